"""A step's samples: place its groups on ranks, generate, wait for the slowest rank, score, gather,
and bring idle work together.

With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) groups whose responses all got the same
reward, which give no gradient, are replaced by groups of further prompts, generated under the same
weights. Which prompts come next depends on the step and the gathered rewards alone, so any number
of ranks trains on the same tokens.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from bubblespec.config import Config
from bubblespec.data.schedule import StepSchedule
from bubblespec.dist.ranks import Ranks
from bubblespec.draft.store import DraftStore
from bubblespec.engine.engine import Engine
from bubblespec.engine.sampling import SamplingParams
from bubblespec.idle.drafter_training import TrainDrafter
from bubblespec.idle.gradients import GroupGradients
from bubblespec.idle.speculation import Speculation
from bubblespec.idle.work import IdleWork
from bubblespec.learn.idle_training import IdleTraining
from bubblespec.learn.streaming import GradientStream
from bubblespec.records import RolloutRecord, Span, StepRecord
from bubblespec.rewards.functions import combine, overlong_penalty
from bubblespec.rewards.scorer import Scorer, Scoring
from bubblespec.rollout.balance import ends_s, place_rows, plain_s
from bubblespec.rollout.forecast import Mover, admit_first, forecast, up_to_cut
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.rollout.placement import gather_samples, place_in_turn
from bubblespec.rollout.standing import Standing
from bubblespec.rollout.take_over import TakeOver
from bubblespec.rollout.tp_tail import TPTail
from bubblespec.types import Group, Launch, Row, Samples, has_zero_std


@dataclass
class Sampler:
    """The parts that a step's samples come from."""

    config: Config
    ranks: Ranks
    engine: Engine
    params: SamplingParams
    schedule: StepSchedule
    scorer: Scorer
    reward_weights: list[float]
    """One for each reward function."""
    speculation: Speculation | None = None
    stream: GradientStream | None = None
    """Where gradients are streamed."""
    drafter: IdleTraining | None = None
    """Where there is a learned drafter."""
    tail: TPTail | None = None
    """Where the last rows of a rollout may be decoded by all ranks together."""

    def sample(self, step: int) -> StepRecord:
        """The samples of `step`, in canonical order and the same on every rank. Raises
        StopRequested: the step is abandoned."""
        rollout = self.config.rollout
        if self.stream is not None:
            self.stream.begin()
        if self.drafter is not None:
            self.drafter.begin_step(self.ranks)
        record = self._sample_groups(self.schedule.launch(step), step)
        if rollout.dynamic_sampling:
            record = self._replace_groups(record)
        if self.speculation is not None:
            self.speculation.learn_samples(step, record.generated, record.all_rewards.ravel())
        self.schedule.finish(record.generated, record.deferred)
        return record

    def evaluate(
        self, groups: list[Group], num_generations: int, params: SamplingParams, version: int
    ) -> tuple[Samples, RolloutRecord]:
        """Samples of held-out prompts. With speculation those of the last evaluation are drafts of
        them. version: updates of the weights. Raises StopRequested."""
        launch = Launch(groups, len(groups), num_generations, num_generations)
        drafts = self.speculation.evaluation if self.speculation is not None else None
        if drafts is not None:
            drafts.renew(launch.ids, self.speculation.store)
        standing, rows, scoring = self.begin(launch, store=None if drafts is None else drafts.store)
        loop = RolloutLoop(self.engine, self.ranks, params, on_finished=scoring.on_finished)
        if drafts is not None and len(drafts.store):
            loop.proposer, rows = drafts.proposer, drafts.begin(rows, version)
        record = loop.run(rows, standing)
        self.ranks.meet()
        samples = self.gather(standing, rows, scoring)
        if drafts is not None:
            drafts.learn(samples, version)
        return samples, record

    def combined(self, samples: Samples) -> np.ndarray:
        """Reward of each sample in training: the weighted sum and the overlong penalty, float64
        [S]."""
        return self._combine(samples.rewards, samples.lengths)

    def overlong(self, samples: Samples) -> np.ndarray:
        """The overlong penalty of each sample, float64 [S]; 0 where it is off."""
        return self._overlong(samples.lengths)

    def _combine(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return combine(rewards, self.reward_weights) + self._overlong(lengths)

    def _overlong(self, lengths: np.ndarray) -> np.ndarray:
        reward, limit = self.config.reward, self.config.rollout.max_completion_length
        return overlong_penalty(
            lengths, limit, reward.overlong_buffer_length, reward.overlong_penalty_factor
        )

    def _replace_groups(self, record: StepRecord) -> StepRecord:
        """Generate further groups until there are enough whose rewards differ, or as many batches
        as allowed."""
        rollout, step = self.config.rollout, record.step
        wanted = len(record.generated.groups)
        while len(record.batch_sizes) < rollout.dynamic_sampling_max_batches:
            useful = ~has_zero_std(record.all_rewards)
            missing = wanted - int(useful.sum())
            # As many as will fill the gap at the rate so far, at most a whole batch.
            count = min(wanted, math.ceil(missing / max(useful.mean(), 1e-9))) if missing > 0 else 0
            groups = self.schedule.replacements(step, count, record.used)
            if not groups:
                break
            more = self._sample_groups(
                Launch(groups, len(groups), *[rollout.num_generations] * 2), step, record
            )
            record = replace(
                record,
                generated=record.generated + more.generated,
                all_rewards=np.concatenate((record.all_rewards, more.all_rewards)),
                owners=np.concatenate((record.owners, more.owners)),
                **{
                    name: getattr(record, name) + getattr(more, name)
                    for name in ("batch_sizes", "rollouts")
                },
                **{
                    name: getattr(record, name) + getattr(more, name)
                    for name in ("stages", "spans")
                },
                drafts=record.drafts | more.drafts,
                used=more.used,
                expected_s=record.expected_s + more.expected_s,
            )
        # The first useful groups, and where they are too few, the first of the others beside them.
        chosen = sorted(
            np.argsort(has_zero_std(record.all_rewards), kind="stable")[:wanted].tolist()
        )
        return replace(
            record, samples=record.generated.of_groups(chosen), rewards=record.all_rewards[chosen]
        )

    def _sample_groups(
        self, launch: Launch, step: int, before: StepRecord | None = None
    ) -> StepRecord:
        """One rollout of a step and what follows it. before: the step so far."""
        ranks, speculation = self.ranks, self.speculation
        clock = ranks.clock
        began_s = clock.perf_counter() if before is None else before.stages[-1].end_s
        standing, rows, scoring = self.begin(launch, step)
        ranks.place, drafts = f"rollout of step {step}", {}
        if speculation is not None:
            drafts = {
                name: draft
                for name in launch.ids
                if (draft := speculation.store.get(name)) is not None
            }
        expected_s = self._expected_s(standing)
        used = launch.groups if before is None else before.used + launch.groups
        rollout, works = self.roll_out(standing, rows, step, used, scoring)
        generated_s = clock.perf_counter()
        ranks.meet()  # the bubble: waiting for the slowest rank
        met_s = clock.perf_counter()
        samples = self.gather(standing, rows, scoring)
        chosen, ids = standing.chosen(), launch.ids
        others = np.setdiff1d(np.arange(len(ids)), chosen).tolist()
        spans = [] if speculation is None else [self.exchange(rollout, works, standing, rows, step)]
        rewards = self.combined(samples).reshape(len(samples.groups), samples.num_generations)
        ended_s = clock.perf_counter()
        stages = [
            Span("gen", began_s, generated_s),
            Span("wait", generated_s, met_s),
            Span("reward", met_s, ended_s),
        ]
        return StepRecord(
            step=step,
            samples=samples,
            rewards=rewards,
            generated=samples,
            all_rewards=rewards,
            owners=standing.owners[chosen],
            batch_sizes=[len(samples.groups)],
            rollouts=[rollout],
            stages=stages,
            spans=spans,
            drafts=drafts,
            expected_s=expected_s,
            used=used,
            deferred={ids[place]: int(standing.lengths[place]) for place in others},
        )

    def begin(
        self, launch: Launch, step: int | None = None, store: DraftStore | None = None
    ) -> tuple[Standing, dict[int, Row], Scoring]:
        """A rollout's standing, this rank's rows of it, and what scores them as they are done.
        step: None in an evaluation; store: see `forecast`."""
        standing = self._place(launch, store)
        rows = standing.make_rows(self.config.rollout.max_completion_length)
        return standing, rows, self.scorer.begin(launch.groups, step)

    @property
    def _shape(self) -> dict[str, int]:
        """What placement must know of the ranks."""
        return {"num_ranks": self.ranks.world_size, "num_slots": self.engine.num_slots}

    def _place(self, launch: Launch, store: DraftStore | None) -> Standing:
        """Decide which rank generates which sample."""
        num_ranks, speculation = self.ranks.world_size, self.speculation
        expected, owners = (
            None,
            place_in_turn(len(launch.groups), launch.num_generations, num_ranks),
        )
        if (
            (num_ranks > 1 or launch.selects)
            and speculation is not None
            and speculation.shared_cost is not None
        ):
            expected = forecast(launch, speculation, store)
            if num_ranks > 1 and self.config.rollout.placement != "in_turn":
                until_end = up_to_cut(expected, launch) if launch.selects else expected
                owners = place_rows(until_end, speculation.shared_cost, **self._shape)
        return Standing(launch, owners, self.ranks.rank, expected)

    def _expected_s(self, standing: Standing) -> float:
        """Seconds in which this rank's rows are expected to be done; NaN where nobody knows."""
        if standing.expected is None or standing.launch.selects:
            return math.nan
        by_rank = ends_s(
            standing.expected, standing.owners, self.speculation.shared_cost, **self._shape
        )
        return float(by_rank[self.ranks.rank])

    def _take_over(self, standing: Standing, step: int) -> TakeOver | None:
        """Rows may change ranks where all are trained on: what is not is left unfinished anyway."""
        takes_over = "take_over" in self.config.rollout.placement and self.ranks.world_size > 1
        if not takes_over or standing.launch.selects or standing.expected is None:
            return None
        mover = Mover(standing.expected, self.speculation, self.engine.num_slots)
        limit = self.config.rollout.max_completion_length
        return TakeOver(
            standing,
            mover.plan,
            limit,
            lambda row: self.speculation.track(row, step),
            self.ranks.clock,
        )

    def roll_out(
        self,
        standing: Standing,
        rows: dict[int, Row],
        step: int,
        used: list[Group],
        scoring: Scoring | None = None,
    ) -> tuple[RolloutRecord, list[IdleWork]]:
        """Generate this rank's rows of a step, with speculation where that is on. Returns also the
        uses of idle time. rows: see `RolloutLoop.run`; used: see `Speculation.draft_ahead`;
        scoring: of its rows, None where they are not scored."""
        on_finished = None if scoring is None else scoring.on_finished
        loop, speculation = (
            RolloutLoop(self.engine, self.ranks, self.params, on_finished=on_finished),
            self.speculation,
        )
        ordered = dict(rows)
        if speculation is not None:
            if self.drafter is not None:
                self.drafter.source.follow(self._has_drafter)
            ordered = speculation.begin(rows, step)
            if standing.launch.selects and standing.expected is not None:
                ordered = {
                    place: rows[place]
                    for place in admit_first(list(ordered), standing.launch, standing.expected)
                }
            loop.board, loop.tail = speculation.board, self.tail
            loop.cost = speculation.proposer.cost if self._learns else None
            loop.works = self._idle_works(standing, step, used, scoring)
            loop.proposer = (
                speculation.proposer
                if speculation.has_drafts and not speculation.is_plain
                else None
            )
        record = loop.run(ordered, standing)
        rows.clear()
        rows.update(ordered)  # some may have changed ranks
        return record, loop.works

    def exchange(
        self,
        rollout: RolloutRecord,
        works: list[IdleWork],
        standing: Standing,
        rows: dict[int, Row],
        step: int,
    ) -> Span:
        """After a rollout of a step with speculation, on all ranks together: what each has measured
        and made, and the tokens of what is deferred, as drafts."""
        begin_s = self.ranks.clock.perf_counter()
        deferred = standing.deferred().tolist()
        if self._learns:
            is_over = np.ones(len(standing.owners), bool)
            is_over[deferred] = False
            ids = [name for name, over in zip(standing.launch.ids, is_over, strict=True) if over]
            overhead_s, work_s, spent_s = self._work(rollout)
            times = {
                "plain_s": self._plain_s(list(rows.values()), overhead_s),
                "work_s": work_s,
                "spent_s": spent_s,
            }
            self.speculation.learn_rollout(
                rollout, ids, **times, was_plain=self.speculation.is_plain
            )
        if standing.selection is not None:
            self.speculation.keep([rows[place] for place in deferred if place in rows], step)
        for work in works:
            work.merge(self.ranks)
        span = Span("exchange", begin_s, self.ranks.clock.perf_counter())
        self.speculation.overhead_s += span.end_s - span.begin_s
        return span

    @property
    def _learns(self) -> bool:
        """Whether what a rollout takes matters to a later one: tokens may be proposed in it, rows
        placed by expectation, or the last of them shared."""
        placement, may_propose = (
            self.config.rollout.placement,
            bool(self.speculation.proposer.enabled_sources),
        )
        return may_propose or placement != "in_turn" or self.tail is not None

    def _work(self, rollout: RolloutRecord) -> tuple[float, float, float]:
        """Seconds of a typical forward beside the engine, and of all forwards with rows of the
        step: by the cost model, and by the clock."""
        own = [f for f in rollout.forwards if f.own_rows]
        if not own:
            return 0.0, 0.0, 0.0
        overhead_s = float(np.median([f.end_s - f.begin_s - f.engine_s - f.propose_s for f in own]))
        rows, tokens, wide_rows, positions = np.array(
            [(f.rows, f.tokens, f.wide_rows, f.positions) for f in own]
        ).T
        engine_s = self.speculation.proposer.cost.seconds(rows, tokens, wide_rows, positions)
        beside_s = len(own) * overhead_s + sum(f.propose_s for f in own)
        return overhead_s, float(engine_s.sum()) + beside_s, sum(f.engine_s for f in own) + beside_s

    def _plain_s(self, rows: list[Row], overhead_s: float) -> float:
        """Seconds that this rank's rows, in the order in which they were admitted, would have taken
        without drafts."""
        lengths, prompts = (
            [len(row.tokens) for row in rows],
            {row.id[:2]: len(row.prompt) for row in rows},
        )
        return plain_s(
            np.array(lengths, np.float64),
            np.array([len(row.prompt) for row in rows], np.float64),
            self.speculation.proposer.cost.coefficients,
            num_slots=self.engine.num_slots,
            prefilled=sum(prompts.values()),
            overhead_s=overhead_s,
        )

    def _idle_works(
        self, standing: Standing, step: int, used: list[Group], scoring: Scoring | None
    ) -> list[IdleWork]:
        """The uses of idle time in a rollout of a step, which has drawn the groups `used` so
        far."""
        draft_ahead = None
        if not self.speculation.is_plain:
            draft_ahead = self.speculation.draft_ahead(
                step, self.schedule, used, self.engine.num_slots
            )
        gradients = None
        if (
            self.stream is not None
            and scoring is not None
            and len(used) == len(standing.launch.groups)
        ):
            gradients = self._group_gradients(standing.launch, scoring)
        drafter = None
        if self._has_drafter:
            limit_s = self.config.idle.max_slice_s
            drafter = TrainDrafter(
                self.drafter,
                max_slice_s=limit_s,
                num_ranks=self.ranks.world_size,
                clock=self.ranks.clock,
            )
        return [
            work
            for work in (self._take_over(standing, step), gradients, draft_ahead, drafter)
            if work is not None
        ]

    @property
    def _has_drafter(self) -> bool:
        """Whether the next rollout may have chains, and train what drafts them."""
        return (
            self.drafter is not None
            and self.drafter.source.is_enabled
            and not self.speculation.is_plain
        )

    def _group_gradients(self, launch: Launch, scoring: Scoring) -> GroupGradients:
        """Of a step's first rollout: with dynamic sampling whatever differs in it is trained on,
        and of later ones not all is."""

        def take_rewards() -> list[tuple[Row, float]]:
            # A row to which no function applies ends the run, but not before all ranks are there.
            scored = [
                (row, scores) for row, scores in scoring.take_scored() if not np.isnan(scores).all()
            ]
            if not scored:
                return []
            rows, scores = zip(*scored, strict=True)
            return list(
                zip(
                    rows,
                    self._combine(
                        np.stack(scores), np.array([len(row.tokens) for row in rows])
                    ).tolist(),
                    strict=True,
                )
            )

        return GroupGradients(
            launch,
            self.stream,
            take_rewards,
            max_slice_s=self.config.idle.max_slice_s,
            scores_beside_rows=self.config.reward.num_workers > 0,
            only_differing=self.config.rollout.dynamic_sampling,
            frees_cache=self.config.rollout.free_cache_engine,
        )

    def gather(self, standing: Standing, rows: dict[int, Row], scoring: Scoring) -> Samples:
        """The samples that are trained on, of all ranks; rows: this rank's."""
        chosen, launch = standing.chosen(), standing.launch
        groups = [
            launch.groups[place // launch.num_generations]
            for place in chosen[:: launch.num_kept].tolist()
        ]
        own = [rows[place] for place in chosen.tolist() if place in rows]
        return gather_samples(
            groups,
            standing.owners[chosen],
            numbers=chosen % launch.num_generations,
            rows=own,
            rewards=scoring.collect(own),
            ranks=self.ranks,
        )
