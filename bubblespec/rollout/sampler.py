"""A step's samples: place its groups on ranks, generate, score, gather, and learn from timings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bubblespec.config import Config
from bubblespec.data.schedule import StepSchedule
from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.proposer import Proposer
from bubblespec.draft.store import DraftStore, History, exchange
from bubblespec.engine.engine import Engine
from bubblespec.engine.sampling import SamplingParams
from bubblespec.idle.task import IdleTask
from bubblespec.planner.costs import CostModel, rollout_seconds
from bubblespec.planner.guard import PLACEMENT
from bubblespec.planner.place import admission_order, place, place_in_turn, up_to_cutoff
from bubblespec.planner.stats import RunStats, load_parts, state_of
from bubblespec.records import RolloutRecord, Span, StepRecord
from bubblespec.rewards.functions import combine, overlong_penalty
from bubblespec.rollout.board import ProgressBoard
from bubblespec.rollout.dynamic_sampling import join, num_lacking, select_trained
from bubblespec.rollout.gather import gather_samples
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.rollout.mechanism import Mechanism, RolloutPlan
from bubblespec.rollout.scoring import Scorer, Scoring
from bubblespec.rollout.table import RowTable
from bubblespec.samples import Samples, has_rewards
from bubblespec.types import Draft, Group, Launch, Row


@dataclass
class Sampler:
    """Generator of the samples of steps; see `make_sampler`."""

    config: Config
    ranks: Ranks
    engine: Engine
    params: SamplingParams
    schedule: StepSchedule
    scorer: Scorer
    reward_weights: list[float]
    """Weights of the reward functions, in their order."""
    stats: RunStats
    store: DraftStore
    """Drafts of coming steps."""
    history: History
    """Responses of earlier epochs."""
    proposer: Proposer | None = None
    """Source of draft tokens; None without draft sources and tail batching."""
    board: ProgressBoard | None = None
    """None where no rollout needs ticks."""
    mechanisms: list[Mechanism] = field(default_factory=list)
    """Mechanisms of the run, in the order in which they amend the plan of each rollout."""
    planning_s: float = 0.0
    """Seconds spent on drafts outside of rollouts since the last rollout."""
    without: frozenset[str] = frozenset()
    """What the current rollout does without, see `Guards`."""

    def sample(self, step: int) -> StepRecord:
        """Return the samples of `step` in canonical order, the same on every rank.

        Raises StopRequested, which abandons the step."""
        rollout, launch = self.config.rollout, self.schedule.launch(step)
        used, max_batches = launch.groups, rollout.dynamic_sampling_max_batches
        record = self._sample_groups(launch, step, used)
        if max_batches > 1:
            while count := num_lacking(record, max_batches):
                groups = self.schedule.replacements(step, count, used)
                if not groups:
                    break
                used = used + groups
                launch = Launch(groups, len(groups), rollout.num_generations)
                record = join(record, self._sample_groups(launch, step, used))
        if max_batches > 1 or not has_rewards(record.all_rewards).all():
            record = select_trained(record)
        self.observe_samples(record.generated, record.all_rewards.ravel())
        self.schedule.finish(record.generated, record.deferred)
        return record

    def _sample_groups(self, launch: Launch, step: int, used: list[Group]) -> StepRecord:
        """Generate and score the groups of one rollout. used: see `roll_out`."""
        ranks, clock = self.ranks, self.ranks.clock
        began_s = clock.perf_counter()
        table, rows, scoring = self.begin(launch, step, self.store)
        ranks.place = f"rollout of step {step + 1}"
        drafts = {id_: draft for id_ in launch.ids if (draft := self.store.get(id_)) is not None}
        expected_s = self._expected_s(table)
        rollout, tasks = self.roll_out(table, rows, step, used, scoring)
        generated_s = clock.perf_counter()
        ranks.barrier_or_stop()  # waiting for the slowest rank
        met_s = clock.perf_counter()
        samples = self.gather(table, rows, scoring)
        trained, ids = table.trained(), launch.ids
        deferred = np.setdiff1d(np.arange(len(ids)), trained).tolist()
        spans = [self.conclude(rollout, tasks, table, rows, step)]
        rewards = self.combined(samples.rewards, samples.lengths)
        rewards = rewards.reshape(len(samples.groups), samples.num_generations)
        stages = [
            Span("gen", began_s, generated_s),
            Span("wait", generated_s, met_s),
            Span("reward", met_s, clock.perf_counter()),
        ]
        return StepRecord(
            step=step,
            samples=samples,
            rewards=rewards,
            generated=samples,
            all_rewards=rewards,
            owners=table.rank_of[trained],
            batch_sizes=[len(samples.groups)],
            rollouts=[rollout],
            stages=stages,
            spans=spans,
            drafts=drafts,
            expected_s=expected_s,
            deferred={ids[index]: int(table.generated[index]) for index in deferred},
        )

    def begin(
        self, launch: Launch, step: int | None, store: DraftStore
    ) -> tuple[RowTable, dict[int, Row], Scoring]:
        """Return the row table, this rank's rows in admission order, and the scoring.

        step: None in an evaluation; store: the rows' drafts."""
        ranks, stats = self.ranks, self.stats
        self.without = stats.guards.without
        rank_of = place_in_turn(len(launch.groups), launch.num_generations, ranks.world_size)
        expected = None
        if stats.lengths.knows_lengths:
            drafts = [store.get(id_) for id_ in launch.ids]
            expected = stats.lengths.predict(launch.groups, launch.num_generations, drafts)
            is_guarded = PLACEMENT in self.without
            if self.is_balanced and stats.shared_cost is not None and not is_guarded:
                rank_of = place(
                    up_to_cutoff(expected, launch) if launch.selects else expected,
                    stats.shared_cost,
                    stats.survival.rates,
                    num_ranks=ranks.world_size,
                    num_slots=self.engine.num_slots,
                    keeps_groups=self.scorer.sees_groups(step),
                    matches_siblings=self.matches_texts,
                )
        table = RowTable(launch, rank_of, ranks.rank, expected)
        rows = table.make_rows(self.config.rollout.max_completion_length)
        if expected is not None:
            own = np.array(list(rows), np.int64)
            rows = {index: rows[index] for index in admission_order(expected, own, launch)}
        return table, rows, self.scorer.begin(launch, step)

    def roll_out(
        self,
        table: RowTable,
        rows: dict[int, Row],
        step: int,
        used: list[Group],
        scoring: Scoring | None = None,
    ) -> tuple[RolloutRecord, list[IdleTask]]:
        """Generate this rank's rows of a step; return the record and the tasks of idle time.

        used: groups that the step has drawn so far, those of this rollout included; scoring: None
        where responses are not scored.
        """
        begin_s = self.ranks.clock.perf_counter()
        plan = self.plan_rollout(table.launch, step, used, scoring)
        self.planning_s += self.ranks.clock.perf_counter() - begin_s
        if self.proposer is not None:
            is_used = bool(self.proposer.enabled_sources) and plan.is_on
            track(self.proposer, rows if is_used else {}, self.store, step)
            if is_used:
                plan.proposer = self.proposer
        cost = self.stats.cost if self.needs_timings else None
        return self.carry_out(plan, table, rows, self.params, cost), plan.tasks

    def plan_rollout(
        self, launch: Launch, step: int | None, used: list[Group], scoring: Scoring | None
    ) -> RolloutPlan:
        """Return the plan of a rollout that is about to begin, amended by all mechanisms."""
        plan = RolloutPlan(launch, step, used, scoring, self.without)
        for mechanism in self.mechanisms:
            mechanism.begin_rollout(plan)
        return plan

    def carry_out(
        self,
        plan: RolloutPlan,
        table: RowTable,
        rows: dict[int, Row],
        params: SamplingParams,
        cost: CostModel | None = None,
    ) -> RolloutRecord:
        """Generate this rank's rows of a plan. cost: learns from every forward."""
        loop = RolloutLoop(
            self.engine,
            self.ranks,
            params,
            rows,
            table,
            proposer=plan.proposer,
            board=self.board,
            tasks=plan.tasks,
            cost=cost,
            on_finished=None if plan.scoring is None else plan.scoring.on_finished,
            take_over=plan.take_over,
            feed=plan.feed,
        )
        return loop.run()

    @property
    def is_balanced(self) -> bool:
        """Whether rows are placed by their expected lengths."""
        return self.config.rollout.placement != "in_turn" and self.ranks.world_size > 1

    @property
    def matches_texts(self) -> bool:
        """Whether rows find drafts in other texts: of their group on this rank, and of history."""
        return "suffix" in self.config.speculative.sources

    @property
    def needs_timings(self) -> bool:
        """Whether later rollouts use the measured costs."""
        uses = self.proposer is not None or self.is_balanced
        return uses or any(mechanism.needs_timings for mechanism in self.mechanisms)

    def gather(self, table: RowTable, rows: dict[int, Row], scoring: Scoring) -> Samples:
        """Return the samples of all ranks that are trained on. rows: this rank's."""
        own = {index: rows[index] for index in table.trained().tolist() if index in rows}
        rewards = scoring.collect(list(own.values()))
        return gather_samples(own, rewards, table, self.ranks)

    def conclude(
        self,
        rollout: RolloutRecord,
        tasks: list[IdleTask],
        table: RowTable,
        rows: dict[int, Row],
        step: int,
    ) -> Span:
        """Exchange a rollout's timings and drafts between all ranks; return the span of this.

        Tokens of deferred samples become drafts."""
        begin_s = self.ranks.clock.perf_counter()
        ids, deferred = table.launch.ids, table.deferred().tolist()
        num_stored = self.store.num_tokens
        self.store.drop(set(ids).difference(ids[index] for index in deferred))
        if self.needs_timings:
            rollout.saved_s = self.stats.observe_rollout(
                rollout,
                table.launch,
                rows,
                self.ranks,
                num_slots=self.engine.num_slots,
                planning_s=self.planning_s,
                used_share=1.0 - self.store.num_tokens / max(num_stored, 1),
                without=self.without,
            )
            rollout.modelled_s = self.stats.modelled_s
        if table.launch.selects:
            self.keep_as_drafts([rows[index] for index in deferred if index in rows], step)
        for task in tasks:
            task.finish(self.ranks)
        for mechanism in self.mechanisms:
            mechanism.end_rollout(rollout)
        span = Span("exchange", begin_s, self.ranks.clock.perf_counter())
        self.planning_s = span.end_s - span.begin_s
        return span

    def keep_as_drafts(self, rows: Sequence[Row], step: int, are_deferred: bool = True) -> None:
        """Put tokens of rows that a later step continues into the stores of all ranks.

        A longer draft that begins with these tokens stays."""
        drafts = {}
        for row in rows:
            old, length = self.store.get(row.id), len(row.tokens)
            is_longer = old is not None and len(old.tokens) > length
            if old and is_longer and np.array_equal(old.tokens[:length], row.tokens):
                drafts[row.id] = old
            elif length:
                tokens = row.tokens.astype(np.int32)
                drafts[row.id] = Draft(tokens, row.finish is not None, step)
        exchange(self.store, drafts, self.ranks, are_deferred=are_deferred)

    def observe_samples(self, samples: Samples, rewards: np.ndarray) -> None:
        """Learn lengths, drop drafts and keep the history of a step's samples. rewards: [S]."""
        self.store.drop(samples.ids)
        self.stats.observe_samples(samples)
        if self.matches_texts:
            for index, tokens in enumerate(samples.tokens):
                uid = samples.prompt_of(index).uid
                self.history.add(uid, tokens, float(np.nan_to_num(rewards[index], nan=-np.inf)))

    def _expected_s(self, table: RowTable) -> float:
        """Return predicted seconds until this rank finishes its rows; NaN if unknown."""
        stats, cost = self.stats, self.stats.shared_cost
        if table.rows is None or table.launch.selects or cost is None:
            return math.nan
        own = table.rows.take(table.rank_of == self.ranks.rank)
        return rollout_seconds(own, cost, self.engine.num_slots, stats.survival.rates)

    def combined(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return weighted rewards plus the overlong penalty, float64 [S]; NaN without a reward.

        rewards, lengths: see `Samples`."""
        return combine(rewards, self.reward_weights) + self.overlong(lengths)

    def overlong(self, lengths: np.ndarray) -> np.ndarray:
        """Return the overlong penalty of each sample, float64 [S]; 0 where it is off."""
        limit = self.config.rollout.max_completion_length
        return overlong_penalty(lengths, limit, self.config.reward.overlong_buffer_length)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return drafts, history and statistics, which change no token, only its time."""
        return state_of(self._parts())

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a saved state; parts that it lacks stay as they are."""
        load_parts(self._parts(), state)

    def _parts(self) -> dict:
        parts = {"drafts": self.store, "history": self.history, "stats": self.stats}
        parts |= {mechanism.name: mechanism for mechanism in self.mechanisms}
        if self.proposer is not None:
            parts["survival"] = self.proposer.survival
        return parts


def track(proposer: Proposer, rows: dict[int, Row], store: DraftStore, version: int) -> None:
    """Begin a rollout of these rows with their drafts. version: updates of the weights."""
    proposer.begin()
    for row in rows.values():
        proposer.track(row, store.get(row.id), version)


def vocab_size_of(engine: Engine) -> int | None:
    """Return the number of tokens that the policy can embed; None in virtual time."""
    model = getattr(engine.runner, "model", None)
    return None if model is None else model.get_input_embeddings().num_embeddings
