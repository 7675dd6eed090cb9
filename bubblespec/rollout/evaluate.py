"""Evaluations: responses to held-out prompts, and their rewards."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bubblespec.draft.proposer import Proposer, make_proposer
from bubblespec.draft.store import TextStore
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.sampling import EVALUATION
from bubblespec.errors import RewardsFailed
from bubblespec.metrics import over_ranks
from bubblespec.records import RolloutRecord, Samples, combine, has_rewards
from bubblespec.rollout.sampler import Sampler, vocab_size_of
from bubblespec.telemetry.report import evaluation_metrics, function_metrics, short_names
from bubblespec.types import Draft, Group, Prompt, StepBatch


class Evaluation(NamedTuple):
    """One evaluation, the same on all ranks."""

    samples: Samples
    rewards: np.ndarray
    """float64 [groups, generations], combined as in training, without the overlong penalty."""
    metrics: dict[str, float | str]


class Evaluator:
    """Generates and scores held-out samples, on a sampler's engine.

    Every evaluation draws the same noise (`sampling.EVALUATION`), so curves are paired, and the
    responses of one evaluation are drafts of the next. Statistics of drafts are kept apart from
    training, as prompts and temperature may be of another kind.
    """

    def __init__(self, sampler: Sampler, proposer: Proposer | None):
        """proposer: None where evaluations have no drafts."""
        self.sampler, self.proposer = sampler, proposer
        self.store = TextStore(sampler.store.max_tokens)
        # Sources that need no earlier text.
        chains = [source for mechanism in sampler.mechanisms for source in mechanism.sources]
        self.has_chains = bool(chains)
        if proposer is not None:
            for source in chains:
                proposer.add(source)

    def evaluate(self, prompts: list[Prompt], version: int) -> Evaluation:
        """Return mean reward, pass@k and the means of eval.functions of held-out prompts.

        pass@k is the expected best of k samples by the first function: for a 0/1 reward the
        usual unbiased estimator (Chen et al. 2021, arXiv 2107.03374, equation 1). version: updates
        of the weights. Raises StopRequested, and RewardsFailed if no sample has a reward.
        """
        sampler, settings = self.sampler, self.sampler.config.eval
        ranks = sampler.ranks
        began_s = ranks.clock.perf_counter()
        groups = [Group(prompt, EVALUATION) for prompt in prompts]
        samples, rollout = self.generate(groups, settings.num_generations, self.params, version)
        seconds = ranks.clock.perf_counter() - began_s
        names = sampler.scorer.names
        scores, others = np.split(samples.rewards, [len(names)], axis=1)
        rewards = combine(scores, sampler.reward_weights).reshape(len(groups), -1)
        if not (is_scored := has_rewards(rewards)).any():
            problem = f"no function returned a number for any of {len(groups)} held-out prompts"
            raise RewardsFailed(f"reward.functions: {problem}")
        metrics: dict[str, float | str] = {
            "eval/completions/mean_length": float(samples.num_sampled.mean()),
            "eval/completions/clipped_ratio": float(samples.is_truncated.mean()),
            "eval/reward/errors": sampler.scorer.take_metrics()["reward/errors"],
        }
        if names:  # distillation may have none
            metrics["eval/reward"] = float(rewards[is_scored].mean())
        for first in samples.rewards.T[:1]:
            if np.isnan(first).all():
                continue
            by_prompt = np.nan_to_num(first).reshape(len(groups), -1)[is_scored]
            for k in numbers_of_samples(settings.num_generations):
                metrics[f"eval/pass@{k}"] = float(expected_best(by_prompt, k).mean())
        by_function = function_metrics(scores, names)
        metrics |= {f"eval/{key}": value for key, value in by_function.items()}
        for name, values in zip(short_names(settings.functions), others.T, strict=True):
            if not np.isnan(values).all():
                metrics[f"eval/{name}"] = float(np.nanmean(values))
            if num_missing := int(np.isnan(values).sum()):
                metrics[f"eval/{name}/missing"] = num_missing
        has_drafts = self.proposer is not None
        metrics |= evaluation_metrics(samples, rollout, seconds, has_drafts=has_drafts)
        return Evaluation(samples, rewards, over_ranks(metrics, ranks.gather_text))

    @property
    def params(self) -> SamplingParams:
        """Return the distribution of evaluations: training's, but for what `eval` sets."""
        settings = self.sampler.config.eval
        own = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k")}
        own = {name: value for name, value in own.items() if value is not None}
        return replace(self.sampler.params, **own)

    def generate(
        self, groups: list[Group], num_generations: int, params: SamplingParams, version: int
    ) -> tuple[Samples, RolloutRecord]:
        """Generate and score samples of held-out prompts; no choice is made by them.

        version: updates of the weights. Raises StopRequested."""
        sampler, launch = self.sampler, StepBatch(groups, len(groups), num_generations)
        plan = sampler.prepare(launch, None, self.store, sampler.stats.chooser.off(version))
        plan.used, plan.params, plan.version = groups, params, version
        if len(self.store) or self.has_chains:
            plan.proposer = self.proposer
        samples, record, *_ = sampler.rollout(plan)
        assert samples is not None
        if self.proposer is not None:
            self.store = TextStore(self.store.max_tokens)
            # All of them, or the longest, as many as there is room for.
            for index in np.argsort(-samples.lengths, kind="stable").tolist():
                tokens = samples.tokens[index].astype(np.int32)
                self.store.put(samples.ids[index], Draft(tokens, True, version))
        return samples, record

    def parts(self) -> dict:
        """Return what a checkpoint keeps: drafts and their survival, which change no token."""
        if self.proposer is None:
            return {}
        return {"evaluation.drafts": self.store, "evaluation.survival": self.proposer.survival}


def make_evaluator(sampler: Sampler) -> Evaluator:
    """Create a run's evaluator. Without draft sources evaluations have no drafts either."""
    sources, proposer = sampler.config.speculative.sources, None
    if sources:
        clock, size = sampler.ranks.clock, vocab_size_of(sampler.engine)
        cost, history = sampler.stats.cost, TextStore(0)
        proposer = make_proposer(
            sources, history, cost, has_drafts=True, clock=clock, vocab_size=size
        )
    return Evaluator(sampler, proposer)


def numbers_of_samples(num_generations: int) -> list[int]:
    """Return the k of pass@k: 1, 2, 4, ... up to the number of samples."""
    return [1 << i for i in range(num_generations.bit_length())]


def expected_best(rewards: np.ndarray, k: int) -> np.ndarray:
    """Return the expected maximum of k of n rewards [..., n], drawn without replacement.

    This is the sum over i of r_(i) C(i-1, k-1) / C(n, k)."""
    n = rewards.shape[-1]
    weights = np.array([math.comb(i, k - 1) / math.comb(n, k) for i in range(n)])
    return np.sort(rewards) @ weights
