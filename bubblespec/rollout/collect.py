"""A step's samples: generate a batch, wait for the slowest rank, score, gather, and exchange drafts.

With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) groups whose responses all got the same reward, which give no
gradient, are replaced by groups of further prompts, generated under the same weights. Which prompts come next depends on the
step and the gathered rewards alone, so any number of ranks trains on the same tokens.
"""

import math
import time
from dataclasses import dataclass

import numpy as np

from bubblespec.learn.advantages import has_zero_std
from bubblespec.records import Prompt
from bubblespec.rollout.loop import RolloutStats
from bubblespec.rollout.placement import Samples, gather_samples, make_rows
from bubblespec.telemetry.timeline import Event
from bubblespec.trainer import Trainer, generate_step


@dataclass
class Collected:
    """samples, rewards: what to train on, rewards float64 [prompts, generations], combined; generated, all_rewards: everything
    that was generated, the replaced groups among it, in batches of `batch_sizes` prompts; stats, stages: of this rank."""

    samples: Samples
    rewards: np.ndarray
    generated: Samples
    all_rewards: np.ndarray
    batch_sizes: list[int]
    stats: RolloutStats
    stages: list[Event]

    @property
    def num_batches(self) -> int:
        return len(self.batch_sizes)


def collect(trainer: Trainer, step: int) -> Collected:
    """The samples of `step`, in canonical order and the same on every rank. Raises StopRequested: the step is abandoned."""
    rollout = trainer.config.rollout
    wanted, stages = rollout.num_prompts_per_step, []
    samples, rewards, stats = _collect_batch(trainer, trainer.batch(step), step, stages)
    if not rollout.dynamic_sampling:
        return Collected(samples, rewards, samples, rewards, [wanted], stats, stages)
    batch_sizes = [wanted]
    while len(batch_sizes) < rollout.dynamic_sampling_max_batches:
        useful = ~has_zero_std(rewards)
        missing = wanted - int(useful.sum())
        # As many as will fill the gap at the rate so far, at most a whole batch.
        count = min(wanted, math.ceil(missing / max(useful.mean(), 1e-9))) if missing > 0 else 0
        prompts = trainer.train_prompts.extra(trainer.config.run.seed, step, count, {p.uid for p in samples.prompts})
        if not prompts:
            break
        more_samples, more_rewards, more_stats = _collect_batch(trainer, prompts, step, stages)
        samples, stats = samples + more_samples, stats + more_stats
        rewards = np.concatenate((rewards, more_rewards))
        batch_sizes.append(len(prompts))
    # The first useful groups, and where they are too few, the first of the others beside them.
    kept = sorted(np.argsort(has_zero_std(rewards), kind="stable")[:wanted].tolist())
    return Collected(samples.of_prompts(kept), rewards[kept], samples, rewards, batch_sizes, stats, stages)


def _collect_batch(
    trainer: Trainer, prompts: list[Prompt], step: int, stages: list[Event]
) -> tuple[Samples, np.ndarray, RolloutStats]:
    """Samples and combined rewards [prompts, generations] of a global batch; the time it takes is noted in `stages`."""
    rollout, ranks = trainer.config.rollout, trainer.ranks
    started = stages[-1][2] if stages else time.perf_counter()
    own = trainer.own_share(prompts)
    rows = make_rows(own, step, rollout.num_generations, rollout.max_completion_length)
    scoring = trainer.scorer.begin(own, rows)
    stats, drafts = generate_step(trainer, rows, step, scoring.on_finished)
    generated = time.perf_counter()
    ranks.meet()  # the bubble: waiting for the slowest rank
    everyone_done = time.perf_counter()
    samples = gather_samples(prompts, rollout.num_generations, rows, scoring.collect(), ranks)
    if trainer.speculation is not None:
        exchange_started = time.perf_counter()
        trainer.speculation.exchange(drafts, stats)
        stats.events.append(("exchange", exchange_started, time.perf_counter()))
    rewards = trainer.combined(samples).reshape(len(prompts), rollout.num_generations)
    ended = time.perf_counter()
    stages += [("gen", started, generated), ("wait", generated, everyone_done), ("reward", everyone_done, ended)]
    return samples, rewards, stats
