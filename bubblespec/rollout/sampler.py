"""A step's samples: place its groups on ranks, generate, wait for the slowest rank, score, gather, and bring idle work together.

With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) groups whose responses all got the same reward, which give no
gradient, are replaced by groups of further prompts, generated under the same weights. Which prompts come next depends on the
step and the gathered rewards alone, so any number of ranks trains on the same tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bubblespec.config import Config
from bubblespec.data.step_planner import StepPlanner
from bubblespec.engine.generator import Generator
from bubblespec.engine.sampling import SamplingParams
from bubblespec.idle.speculation import Speculation
from bubblespec.idle.work import IdleWork
from bubblespec.ranks.collectives import Ranks
from bubblespec.records import Group, RolloutRecord, Row, SampleId, Samples, Span, StepRecord, has_zero_std
from bubblespec.rewards.functions import combine, overlong_penalty
from bubblespec.rewards.scorer import Scorer, Scoring
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.rollout.placement import gather_samples, make_rows, place_groups


@dataclass
class Sampler:
    """The parts that a step's samples come from."""

    config: Config
    ranks: Ranks
    engine: Generator
    params: SamplingParams
    planner: StepPlanner
    scorer: Scorer
    reward_weights: list[float]
    """One for each reward function."""
    speculation: Speculation | None = None

    def sample(self, step: int) -> StepRecord:
        """The samples of `step`, in canonical order and the same on every rank. Raises StopRequested: the step is abandoned."""
        rollout = self.config.rollout
        record = self._sample_groups(self.planner.launch(step), step)
        if rollout.dynamic_sampling:
            record = self._replace_groups(record)
        if self.speculation is not None:
            self.speculation.learn_samples(step, record.generated, record.all_rewards.ravel())
        self.planner.finish(record.generated.groups)
        return record

    def evaluate(self, groups: list[Group], num_generations: int, params: SamplingParams) -> Samples:
        """Samples of held-out prompts, generated without speculation. Raises StopRequested."""
        owners = place_groups(len(groups), self.ranks.world_size)
        rows, scoring = self._own_rows(groups, owners, num_generations)
        RolloutLoop(self.engine, self.ranks, params, on_finished=scoring.on_finished).run(rows)
        self.ranks.meet()
        return self._gather(groups, owners, num_generations, rows, scoring=scoring)

    def combined(self, samples: Samples) -> np.ndarray:
        """Reward of each sample in training: the weighted sum and the overlong penalty, float64 [S]."""
        return combine(samples.rewards, self.reward_weights) + self.overlong(samples)

    def overlong(self, samples: Samples) -> np.ndarray:
        """The overlong penalty of each sample, float64 [S]; 0 where it is off."""
        reward, limit = self.config.reward, self.config.rollout.max_completion_length
        return overlong_penalty(samples.lengths, limit, reward.overlong_buffer_length, reward.overlong_penalty_factor)

    def _replace_groups(self, record: StepRecord) -> StepRecord:
        """Generate further groups until there are enough whose rewards differ, or as many batches as allowed."""
        rollout, step = self.config.rollout, record.step
        wanted = len(record.generated.groups)
        while len(record.batch_sizes) < rollout.dynamic_sampling_max_batches:
            useful = ~has_zero_std(record.all_rewards)
            missing = wanted - int(useful.sum())
            # As many as will fill the gap at the rate so far, at most a whole batch.
            count = min(wanted, math.ceil(missing / max(useful.mean(), 1e-9))) if missing > 0 else 0
            groups = self.planner.replacements(step, count, record.generated.groups)
            if not groups:
                break
            more = self._sample_groups(groups, step, record)
            record = replace(
                record,
                generated=record.generated + more.generated,
                all_rewards=np.concatenate((record.all_rewards, more.all_rewards)),
                **{name: getattr(record, name) + getattr(more, name) for name in ("owners", "batch_sizes", "rollouts")},
                **{name: getattr(record, name) + getattr(more, name) for name in ("stages", "spans")},
                drafts=record.drafts | more.drafts,
            )
        # The first useful groups, and where they are too few, the first of the others beside them.
        chosen = sorted(np.argsort(has_zero_std(record.all_rewards), kind="stable")[:wanted].tolist())
        return replace(record, samples=record.generated.of_groups(chosen), rewards=record.all_rewards[chosen])

    def _sample_groups(self, groups: list[Group], step: int, before: StepRecord | None = None) -> StepRecord:
        """One rollout of a step and what follows it. before: the step so far."""
        ranks, speculation, num_generations = self.ranks, self.speculation, self.config.rollout.num_generations
        clock = ranks.clock
        began_s = clock.perf_counter() if before is None else before.stages[-1].end_s
        owners = place_groups(len(groups), ranks.world_size)
        rows, scoring = self._own_rows(groups, owners, num_generations, step)
        ranks.place, drafts = f"rollout of step {step}", {}
        if speculation is not None:
            names = [group.sample(number) for group in groups for number in range(num_generations)]
            drafts = {name: draft for name in names if (draft := speculation.store.get(name)) is not None}
        used = groups if before is None else before.generated.groups + groups
        rollout, works = self.roll_out(rows, step, used, scoring.on_finished)
        generated_s = clock.perf_counter()
        ranks.meet()  # the bubble: waiting for the slowest rank
        met_s = clock.perf_counter()
        samples = self._gather(groups, owners, num_generations, rows, scoring=scoring)
        spans = [] if speculation is None else [self.exchange(rollout, works, samples.ids)]
        rewards = self.combined(samples).reshape(len(groups), num_generations)
        ended_s = clock.perf_counter()
        stages = [Span("gen", began_s, generated_s), Span("wait", generated_s, met_s), Span("reward", met_s, ended_s)]
        return StepRecord(
            step=step,
            samples=samples,
            rewards=rewards,
            generated=samples,
            all_rewards=rewards,
            owners=owners,
            batch_sizes=[len(groups)],
            rollouts=[rollout],
            stages=stages,
            spans=spans,
            drafts=drafts,
        )

    def roll_out(
        self, rows: list[Row], step: int, used: list[Group], on_finished: Callable[[Row], None] | None = None
    ) -> tuple[RolloutRecord, list[IdleWork]]:
        """Generate this rank's rows of a step, with speculation where that is on. Returns also the uses of idle time. used: see
        `Speculation.draft_ahead`; on_finished: see `RolloutLoop`."""
        loop, speculation = RolloutLoop(self.engine, self.ranks, self.params, on_finished=on_finished), self.speculation
        if speculation is not None:
            rows = speculation.begin(rows, step)
            loop.proposer, loop.board, loop.works = speculation.proposer, speculation.board, self._idle_works(step, used)
        return loop.run(rows), loop.works

    def exchange(self, rollout: RolloutRecord, works: list[IdleWork], ids: list[SampleId]) -> Span:
        """After a rollout with speculation, on all ranks together: what each has measured and made. ids: all its samples."""
        begin_s = self.ranks.clock.perf_counter()
        self.speculation.learn_rollout(rollout, ids)
        for work in works:
            work.merge(self.ranks)
        return Span("exchange", begin_s, self.ranks.clock.perf_counter())

    def _idle_works(self, step: int, used: list[Group]) -> list[IdleWork]:
        """The uses of idle time in a rollout of a step, which has drawn the groups `used` so far."""
        draft_ahead = self.speculation.draft_ahead(step, self.planner, used, self.engine.num_slots)
        return [] if draft_ahead is None else [draft_ahead]

    def _own_rows(
        self, groups: list[Group], owners: list[int], num_generations: int, step: int | None = None
    ) -> tuple[list[Row], Scoring]:
        """This rank's rows of a rollout, and what scores them as they are done. step: None in an evaluation."""
        own = [group for group, owner in zip(groups, owners, strict=True) if owner == self.ranks.rank]
        rows = make_rows(own, num_generations, self.config.rollout.max_completion_length)
        return rows, self.scorer.begin([group.prompt for group in own], rows, step)

    def _gather(
        self, groups: list[Group], owners: list[int], num_generations: int, rows: list[Row], *, scoring: Scoring
    ) -> Samples:
        return gather_samples(
            groups, owners, num_generations=num_generations, rows=rows, rewards=scoring.collect(), ranks=self.ranks
        )
