"""Everything a run holds, and what is done with it in a step. The loop itself is in train.py, set_up.py makes the parts."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np
from transformers import PreTrainedTokenizerBase

from bubblespec.checkpoint import save_checkpoint
from bubblespec.config import Config
from bubblespec.data import PromptSet
from bubblespec.distributed import Ranks, StopRequested
from bubblespec.engine.generator import Generator
from bubblespec.engine.noise import EVALUATION
from bubblespec.engine.sampling import SamplingParams
from bubblespec.errors import SaveFailed, say
from bubblespec.metrics import MetricsLogger
from bubblespec.records import Prompt, Row, Span
from bubblespec.rewards import RewardFunction, combine, overlong_penalty
from bubblespec.rollout import Samples, assign_prompts, gather_samples, generate, make_rows
from bubblespec.schedule.run_ahead import RolloutStats
from bubblespec.schedule.speculation import Speculation
from bubblespec.scoring import Scorer
from bubblespec.trace import Recorder
from bubblespec.update import Learner


@dataclass
class Trainer:
    """The parts of a run, and how far it is.

    num_updates: those done by now, by the run that this one continues as well; saved: those in the newest checkpoint;
    evaluated: those before the last evaluation, or -1.
    """

    config: Config
    ranks: Ranks
    learner: Learner
    tokenizer: PreTrainedTokenizerBase
    engine: Generator
    sampling: SamplingParams
    train_prompts: PromptSet
    eval_prompts: list[Prompt]
    rewards: dict[str, RewardFunction]
    reward_weights: list[float]
    scorer: Scorer
    num_updates: int
    saved: int
    evaluated: int
    lock: IO | None  # keeps output_dir ours; on rank 0
    speculation: Speculation | None = None
    recorder: Recorder | None = None

    def batch(self, step: int) -> list[Prompt]:
        """The global batch of `step`, the same on every rank."""
        return self.train_prompts.batch(self.config.run.seed, step, self.config.rollout.num_prompts_per_step)

    def own_share(self, prompts: list[Prompt]) -> list[Prompt]:
        """This rank's prompts of a batch."""
        return [prompts[i] for i in assign_prompts(len(prompts), self.ranks.world_size)[self.ranks.rank]]

    def combined(self, samples: Samples) -> np.ndarray:
        """Reward of each sample in training: the weighted sum and the overlong penalty, float64 [S]."""
        return combine(samples.rewards, self.reward_weights) + self.overlong(samples)

    def overlong(self, samples: Samples) -> np.ndarray:
        """The overlong penalty of each sample, float64 [S]; 0 where it is off."""
        reward, limit = self.config.reward, self.config.rollout.max_completion_length
        return overlong_penalty(samples.lengths, limit, reward.overlong_buffer_length, reward.overlong_penalty_factor)


def generate_step(
    trainer: Trainer, rows: list[Row], step: int, on_finished: Callable[[Row], None] | None = None
) -> tuple[RolloutStats, dict]:
    """Generate this rank's rows of a step, drafting ahead where that is on. Returns its counts and its drafts.

    on_finished: called with each of the rows as it finishes. Without speculation forwards are counted, but noted only in the
    steps of run.timeline_steps. A rank that has been told to stop leaves the rollout where it is: `ranks.meet` must come next.
    """
    trainer.ranks.place = f"rollout of step {step}"
    log = trainer.recorder.new_log() if trainer.recorder is not None else None
    if trainer.speculation is None:
        stats, started, forwards_before = RolloutStats(), time.perf_counter(), trainer.engine.num_forwards
        events = stats.events if step in trainer.config.run.timeline_steps else None
        generate(trainer.engine, rows, trainer.ranks, on_finished, events, log)
        stats.own_s = stats.total_s = time.perf_counter() - started
        stats.own_forwards = trainer.engine.num_forwards - forwards_before
        return stats, {}
    trainer.engine.speculator = trainer.speculation.speculator
    try:
        return trainer.speculation.rollout(trainer.engine, rows, step, trainer.batch, on_finished, log)
    finally:
        trainer.engine.speculator = None


def train_step(trainer: Trainer, samples: Samples, advantages: np.ndarray, step: int) -> tuple[dict[str, float], list[Span]]:
    """All updates of a step; see `Learner.update`. It is not left half done when the run is told to stop. Raises RunFailed
    after too many steps without an update."""
    trainer.ranks.place = f"training of step {step}"
    if trainer.config.rollout.free_cache_engine:
        trainer.engine.release()
    metrics, spans = trainer.learner.update(samples, advantages, step)
    if trainer.config.reward.overlong_buffer_length:
        metrics["rewards/overlong_penalty/mean"] = float(trainer.overlong(samples).mean())
    trainer.num_updates = step + 1
    return metrics, spans


def save(trainer: Trainer, is_last: bool) -> None:
    """Save a checkpoint. Called by all ranks: they go on together once it is on disk. If that fails the run goes on, with a
    warning; but if this is its last save, raises SaveFailed."""
    done = trainer.num_updates
    trainer.ranks.place = f"save after {done} updates"
    speculation = trainer.speculation.state_dict() if trainer.speculation else None
    problem = save_checkpoint(
        trainer.config,
        step=done,
        evaluated=trainer.evaluated,
        model=trainer.learner.model,
        tokenizer=trainer.tokenizer,
        optimizer=trainer.learner.optimizer,
        speculation=speculation,
        ranks=trainer.ranks,
    )
    if problem is None:
        trainer.saved = done
        return
    newest = f"checkpoint-{trainer.saved}" if trainer.saved else "none"
    line = f"checkpoint-{done} could not be saved: {problem}; the newest checkpoint is {newest}"
    if is_last:
        raise SaveFailed(line)
    if trainer.ranks.is_main:
        say(f"warning: {line}, and the run goes on")


@contextlib.contextmanager
def stops_cleanly(trainer: Trainer, logger: MetricsLogger) -> Iterator[None]:
    """Training ends here when the run is told to stop, on all ranks alike: after an update, whose state is saved. A rollout or
    evaluation is abandoned, and made again, the same, by the continuation. Raises SaveFailed."""
    try:
        yield
    except StopRequested:
        if trainer.saved != trainer.num_updates:
            save(trainer, is_last=True)
        of = f"{trainer.num_updates} of {trainer.config.run.max_steps}"
        logger.say(f"told to stop after {of} updates; the same command goes on from there")
    finally:
        logger.close()


def evaluate_if_due(trainer: Trainer, logger: MetricsLogger) -> None:
    """Evaluate where run.eval_steps wants it; what was evaluated before the run was interrupted is not evaluated again."""
    run, done = trainer.config.run, trainer.num_updates
    is_due = run.eval_steps and (done % run.eval_steps == 0 or done == run.max_steps)
    if is_due and trainer.evaluated != done:
        logger.log_evaluation(done, evaluate(trainer))


def evaluate(trainer: Trainer) -> dict[str, float]:
    """Held-out mean reward and pass@k, under noise that is the same at every evaluation, so that curves are paired.

    pass@k is the expected best of k samples by the first reward function: for a 0/1 reward the usual unbiased estimator
    (Chen et al. 2021, arXiv 2107.03374, equation 1). Raises StopRequested, and then the evaluation is still to be made.
    """
    config, prompts = trainer.config, trainer.eval_prompts
    trainer.ranks.place = f"evaluation after {trainer.num_updates} updates"
    temperature = trainer.sampling.temperature if config.eval.temperature is None else config.eval.temperature
    own = trainer.own_share(prompts)
    rows = make_rows(own, EVALUATION, config.eval.num_generations, config.rollout.max_completion_length)
    trainer.engine.params = SamplingParams(
        temperature, trainer.sampling.top_p, trainer.sampling.top_k, trainer.sampling.stop_token_ids, trainer.sampling.min_length
    )
    scoring = trainer.scorer.begin(own, rows)
    generate(trainer.engine, rows, trainer.ranks, scoring.on_finished)
    trainer.engine.params = trainer.sampling
    trainer.ranks.meet()
    samples = gather_samples(prompts, config.eval.num_generations, rows, scoring.collect(), trainer.ranks)
    metrics = {
        # Without the overlong penalty, which shapes training alone.
        "eval/reward": float(combine(samples.rewards, trainer.reward_weights).mean()),
        "eval/completions/mean_length": float(samples.lengths.mean()),
        "eval/completions/clipped_ratio": float(samples.is_truncated.mean()),
        "eval/reward/errors": trainer.scorer.take_metrics()["reward/errors"],
    }
    by_prompt = np.nan_to_num(samples.rewards[:, 0]).reshape(len(prompts), -1)
    k = 1
    while k <= config.eval.num_generations:
        metrics[f"eval/pass@{k}"] = float(np.mean([expected_best(row, k) for row in by_prompt]))
        k *= 2
    trainer.evaluated = trainer.num_updates
    return metrics


def expected_best(rewards: np.ndarray, k: int) -> float:
    """Expected maximum of k of the n rewards drawn without replacement: sum over i of r_(i) C(i-1, k-1) / C(n, k)."""
    ordered, n = np.sort(rewards), len(rewards)
    weight, total = 1.0, 0.0
    best_share = k / n  # probability that the largest is among the k drawn
    for i in range(n, k - 1, -1):
        weight = best_share if i == n else weight * (i - k + 1) / i
        total += weight * ordered[i - 1]
    return float(total)
