"""Speculation against none, paired: torchrun --nproc_per_node=2 benchmarks/paired_rollout.py
--config F [--json OUT] [overrides]

For each training step the *same batch* is rolled out with the *same weights* twice, without and
with speculation, in alternating order; the tokens are compared; then the policy is trained on them.
Wall time is from one barrier to the next, so it is the slowest rank's, with the exchange of drafts.
With --useless-drafts all drafts are replaced by random tokens: what speculation costs at worst.
Before the first step a batch is generated twice, the second time with its own text as drafts, so
that no arm captures graphs or takes memory while it is timed.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import shared
from bubblespec.draft.store import TextStore
from bubblespec.engine.engine import Engine
from bubblespec.engine.sampling import EVALUATION
from bubblespec.errors import InputError
from bubblespec.learn.advantages import estimate_advantages
from bubblespec.metrics import over_ranks
from bubblespec.records import Samples, StepRecord
from bubblespec.rollout.drafting import DraftAhead
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.rollout.plan import RolloutPlan
from bubblespec.telemetry.report import speculation_metrics
from bubblespec.trainer import Trainer
from bubblespec.types import Group, Row

ARMS = ("none", "speculation")
PAPER = (
    "paper (arXiv 2605.08862, its own hardware): decoding steps -50%, rollout throughput up to 1.8x"
)
HEADING = "step   none s   spec s  ratio   forwards longest accepted/forward  drafted"
LINE = (
    "{step:4} {none_s:8.2f} {speculation_s:8.2f} {ratio:6.2f} {none_forwards:5}>"
    "{speculation_forwards:<4} {longest:7} {rollout/spec_accept_length:16.2f} "
    "{bubble/drafted_tokens:8}"
)
TOTAL = (
    "total: {speedup:.2f}x wall time (median step {speedup_median_step:.2f}x), "
    "{forward_reduction:.0%} fewer forwards on the slowest rank, {differing_rows} of {rows} rows "
    "differ"
)
FITTED = (
    "fitted ms: {rollout:.1f} + {forward:.3f} per forward + {verified:.4f} per verified and "
    "{drafted:.4f} per drafted token"
)


def timed(trainer: Trainer, action: Callable[[], int]) -> tuple[float, int]:
    """Return the seconds of the slowest rank, and the most forwards that `action` returns."""
    ranks = trainer.ranks
    ranks.barrier()
    began_s = time.perf_counter()
    forwards = action()
    ranks.barrier()
    seconds = time.perf_counter() - began_s
    return seconds, int(ranks.all_gather(np.array([forwards])).max())


def make_drafts_useless(trainer: Trainer) -> None:
    """Replace all drafts by random tokens, in this process."""
    finish, rng = DraftAhead.finish, np.random.default_rng(trainer.ranks.rank)
    vocab_size = trainer.learner.model.get_input_embeddings().num_embeddings

    def finish_useless(task, ranks) -> None:
        for name, draft in task.drafts.items():
            random = rng.integers(0, vocab_size, len(draft.tokens)).astype(np.int32)
            task.drafts[name] = dataclasses.replace(draft, tokens=random)
        finish(task, ranks)

    DraftAhead.finish = finish_useless


def warm(trainer: Trainer) -> None:
    """Generate a batch twice, as evaluations do: the second time its own text is its draft."""
    evaluator, rollout = trainer.evaluator, trainer.config.rollout
    prompts = trainer.sampler.schedule.prompts.prompts[: rollout.num_prompts_per_step]
    groups = [Group(prompt, EVALUATION) for prompt in prompts]
    for _ in range(2):
        evaluator.generate(groups, rollout.num_generations, trainer.sampler.params, 0)
    evaluator.store = TextStore(evaluator.store.max_tokens)


def paired_steps(trainer: Trainer, useless_drafts: bool = False) -> Iterator[dict]:
    """Warm both arms, and yield the figures of each step."""
    if not trainer.sampler.needs_timings:
        raise InputError("speculative.method: none, and no TP tail; nothing to compare")
    if useless_drafts:
        make_drafts_useless(trainer)
    plain = shared.plain_engine(trainer)
    with trainer.open():
        trainer.warm_start()
        warm(trainer)
        for step in range(trainer.config.run.max_steps):
            yield paired_step(trainer, plain, step)


def paired_step(
    trainer: Trainer,
    plain: Engine,
    step: int,
    inspect: Callable[[list[Row], list[Row]], None] | None = None,
) -> dict:
    """Roll out a step twice, then learn from it. inspect: gets the rows before weights change."""
    ranks, sampler = trainer.ranks, trainer.sampler
    launch = sampler.schedule.launch(step)
    plan = sampler.plan(launch, step, launch.groups)
    length = trainer.config.rollout.max_completion_length
    rows = {index: plan.table.make_row(index, length) for index in plan.rows}
    for index, row in rows.items():
        row.draft = plan.rows[index].draft
    scoring, plan.scoring = plan.scoring, None  # not in what is timed
    drafted = replace(plan, rows=rows, works=[])
    plan.proposer = plan.cost = rollout = None

    def roll_out(arm: str) -> int:
        nonlocal rollout
        if arm == "none":
            followers, plain.runner.followers = plain.runner.followers, []  # those of drafts
            try:
                return RolloutLoop(plain, ranks, None, plan).run().own_forwards
            finally:
                plain.runner.followers = followers
        rollout = sampler.rollout(drafted)
        return rollout.record.own_forwards

    result: dict = {"step": step}
    for arm in ARMS if step % 2 == 0 else reversed(ARMS):
        timing = timed(trainer, lambda arm=arm: roll_out(arm))
        result[f"{arm}_s"], result[f"{arm}_forwards"] = timing
    pairs = [(row, rows[index]) for index, row in plan.rows.items()]
    differing = sum(not np.array_equal(a.tokens, b.tokens) for a, b in pairs)
    result["differing_rows"] = int(ranks.all_reduce_(torch.tensor(differing)).item())
    if inspect is not None:
        inspect(*map(list, zip(*pairs, strict=True)))
    samples, rewards = learn(trainer, replace(plan, scoring=scoring))
    of_step = {"samples": samples, "rewards": rewards, "generated": samples, "all_rewards": rewards}
    of_step |= {"owners": plan.table.rank_of, "batch_sizes": [len(launch.groups)]}
    of_step |= {"rollouts": [rollout.record], "stages": rollout.stages, "spans": rollout.spans}
    record = StepRecord(step, **of_step, drafts=plan.drafts)
    metrics = speculation_metrics(ranks, record, has_store=True)
    result |= over_ranks(metrics, ranks.gather_text)
    result["bubble/store_tokens"] = sampler.store.num_tokens
    for age, share in sampler.stats.survival.by_age.items():
        result[f"drafts/accept_rate/age_{age}"] = share
    lengths = samples.lengths
    result |= {"rows": len(samples), "tokens": int(lengths.sum()), "longest": int(lengths.max())}
    return result | {"exchange_s": result["timing_s/exchange"], "reward": float(rewards.mean())}


def learn(trainer: Trainer, plan: RolloutPlan) -> tuple[Samples, np.ndarray]:
    """Train the policy on a step's rows. Return the samples and their rewards by group."""
    loss, sampler = trainer.config.loss, trainer.sampler
    samples = sampler.gather(plan)
    rewards = sampler.combined(samples.rewards, samples.lengths)
    rewards = rewards.reshape(len(plan.launch.groups), -1)
    advantages = estimate_advantages(
        rewards, loss.advantage_estimator, loss.scale_rewards, samples
    ).ravel()
    trainer.learner.update(samples, advantages, plan.step)
    sampler.observe_samples(samples, rewards.ravel())
    sampler.schedule.finish(samples, {})
    return samples, rewards


def summarise(steps: list[dict]) -> dict:
    """Return totals over all steps, and ratios."""
    keys = [f"{arm}_{unit}" for unit in ("s", "forwards") for arm in ARMS]
    total = {key: sum(s[key] for s in steps) for key in [*keys, "differing_rows", "rows"]}
    return total | {
        "speedup": total["none_s"] / total["speculation_s"],
        "speedup_median_step": float(np.median([s["none_s"] / s["speculation_s"] for s in steps])),
        "forward_reduction": 1 - total["speculation_forwards"] / total["none_forwards"],
    }


def fit(steps: list[dict]) -> dict[str, float] | None:
    """Fit seconds of both arms by least squares; None with fewer than two steps.

    In milliseconds: of a rollout at all, of a forward, and of each token that is verified, or
    drafted for a coming step, of all ranks."""
    if len(steps) < 2:
        return None
    rows, seconds = [], [s[f"{arm}_s"] for arm in ARMS for s in steps]
    for arm in ARMS:
        of_drafts = arm == "speculation"
        for s in steps:
            verified = s["rollout/spec_accepted_tokens"] + s["rollout/spec_wasted_tokens"]
            tokens = [verified, s["bubble/drafted_tokens"]]
            rows.append([1, s[f"{arm}_forwards"], *(of_drafts * count for count in tokens)])
    found = np.linalg.lstsq(np.array(rows, float), np.array(seconds), rcond=None)[0]
    return dict(zip(("rollout", "forward", "verified", "drafted"), 1e3 * found, strict=True))


def run(arguments: argparse.Namespace, folder: str) -> None:
    config = shared.run_config(arguments, folder)
    with shared.open_trainer(config) as trainer:
        ranks, steps = trainer.ranks, []
        shared.log(HEADING, ranks)
        for step in paired_steps(trainer, arguments.useless_drafts):
            steps.append(step)
            ratio = step["none_s"] / step["speculation_s"]
            shared.log(LINE.format_map(step | {"ratio": ratio}), ranks)
        if ranks.is_main:
            summary = summarise(steps)
            print(TOTAL.format_map(summary))
            if fitted := fit(steps):
                summary["fitted_ms"] = fitted
                print(FITTED.format_map(fitted))
            print(PAPER)
            shared.write_result(arguments, summary | {"steps": steps})


if __name__ == "__main__":
    parser = shared.make_parser("Rollouts with speculation, and without")
    parser.add_argument("--useless-drafts", action="store_true")
    sys.exit(shared.main(run, parser))
