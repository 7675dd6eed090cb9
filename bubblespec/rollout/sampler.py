"""A step's samples: place its groups on ranks, generate, score, gather, and learn from timings.

With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) groups whose responses all got the same
reward, which give no gradient, are replaced by groups of further prompts, generated under the same
weights, as are groups that lack a reward. The choice of prompts depends on the step and the
gathered rewards alone, so any number of ranks trains on the same tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from bubblespec.config import Config
from bubblespec.data.schedule import StepSchedule
from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.proposer import Proposer
from bubblespec.draft.store import TextStore, exchange
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.errors import RewardsFailed
from bubblespec.planner.chooser import DRAFTS
from bubblespec.planner.costs import rollout_seconds
from bubblespec.planner.place import (
    MANY_GROUPS,
    admission_order,
    place,
    place_in_turn,
    up_to_cutoff,
)
from bubblespec.planner.stats import RunStats, load_parts, state_of
from bubblespec.progress import note
from bubblespec.records import (
    RolloutRecord,
    Samples,
    Span,
    StepRecord,
    combine,
    has_rewards,
    has_zero_std,
    overlong_penalty,
)
from bubblespec.rollout.board import ProgressSync
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.rollout.plan import Mechanism, RolloutPlan
from bubblespec.rollout.table import RolloutProgress, gather_rows
from bubblespec.types import Draft, Group, Row, StepBatch


class Rollout(NamedTuple):
    """What a rollout has given."""

    samples: Samples | None
    """Samples of all ranks that are trained on; None where they are not scored."""
    record: RolloutRecord
    stages: list[Span]
    """Successive spans: gen, wait and reward."""
    spans: list[Span]
    """Details within the stages: exchange, after a rollout of a step."""


@dataclass
class Sampler:
    """Generator of the samples of steps; see `make_sampler`."""

    config: Config
    ranks: Ranks
    engine: Engine
    params: SamplingParams
    schedule: StepSchedule
    scorer: Any
    """A `RewardManager` (rewards/scorer.py), or one in virtual time."""
    reward_weights: list[float]
    """Weights of the reward functions, in their order."""
    stats: RunStats
    store: TextStore
    """Drafts of coming steps."""
    history: TextStore
    """Responses of earlier epochs."""
    proposer: Proposer | None = None
    """Source of draft tokens; None without draft sources and tail batching."""
    board: ProgressSync | None = None
    """None where no rollout needs ticks."""
    mechanisms: list[Mechanism] = field(default_factory=list)
    """Mechanisms of the run, in the order in which they amend the plan of each rollout."""
    planning_s: float = 0.0
    """Seconds spent on drafts outside of rollouts since the last rollout."""

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
                launch = StepBatch(groups, len(groups), rollout.num_generations)
                record = join(record, self._sample_groups(launch, step, used))
        if max_batches > 1 or not has_rewards(record.all_rewards).all():
            record = select_trained(record)
        self.observe_samples(record.generated, record.all_rewards.ravel())
        self.schedule.finish(record.generated, record.deferred)
        return record

    def _sample_groups(self, launch: StepBatch, step: int, used: list[Group]) -> StepRecord:
        """Generate and score the groups of one rollout. used: see `RolloutPlan`."""
        plan = self.plan(launch, step, used)
        self.ranks.activity = f"rollout of step {step + 1}"
        rollout = self.rollout(plan)
        samples, table = rollout.samples, plan.table
        assert samples is not None
        rewards = self.combined(samples.rewards, samples.lengths)
        rewards = rewards.reshape(len(samples.groups), samples.num_generations)
        return StepRecord(
            step=step,
            samples=samples,
            rewards=rewards,
            generated=samples,
            all_rewards=rewards,
            owners=table.rank_of[table.trained()],
            batch_sizes=[len(samples.groups)],
            rollouts=[rollout.record],
            stages=rollout.stages,
            spans=rollout.spans,
            drafts=plan.drafts,
            expected_s=plan.expected_s,
            deferred={launch.ids[i]: int(table.generated[i]) for i in table.deferred().tolist()},
        )

    def plan(self, launch: StepBatch, step: int, used: list[Group]) -> RolloutPlan:
        """Return the plan of a rollout of a step, which mechanisms have not amended yet.

        used: see `RolloutPlan`."""
        stats = self.stats
        draw_index = min((group.draw_index for group in launch.groups), default=0)
        if (
            draw_index > stats.draw_index == 0
            and self.matches_texts
            and DRAFTS in stats.chooser.off(step)
        ):
            stats.chooser.forget()  # responses of the earlier visits are new matches
        stats.draw_index = max(stats.draw_index, draw_index)
        without = stats.chooser.off(step)
        plan = self.prepare(launch, step, self.store, without)
        plan.used, plan.proposer, plan.version = used, self.proposer, step
        plan.cost = stats.cost if self.needs_timings else None
        cost = stats.cost_without(without)
        if plan.table.rows is not None and cost is not None and not launch.selects:
            own = plan.table.rows.take(plan.table.rank_of == self.ranks.rank)
            num_slots, rates = self.engine.num_slots, stats.survival.rates
            plan.expected_s = rollout_seconds(own, cost, num_slots, rates)
        return plan

    def prepare(
        self, launch: StepBatch, step: int | None, store: TextStore, without: frozenset[str]
    ) -> RolloutPlan:
        """Return a plan with the row table, this rank's rows in admission order, and the scoring.

        step, without: see `RolloutPlan`; store: the rows' drafts."""
        ranks, stats, began_s = self.ranks, self.stats, self.ranks.clock.perf_counter()
        rank_of = place_in_turn(len(launch.groups), launch.num_generations, ranks.world_size)
        expected, found = None, [store.get(id_) for id_ in launch.ids]
        if stats.lengths.knows_lengths:
            expected = stats.lengths.predict(launch.groups, launch.num_generations, found)
            if step is not None and DRAFTS in without:  # they are not verified
                expected = replace(expected, drafted=np.zeros(len(expected)))
            cost = stats.cost_without(without)
            if self.is_balanced and cost is not None:
                # Rows find drafts in their group's texts on their rank.
                gains = self.matches_texts and DRAFTS not in without
                least = 1 if gains or self.config.trains_in_rollouts else MANY_GROUPS
                is_whole = len(launch.groups) >= least * ranks.world_size
                rank_of = place(
                    up_to_cutoff(expected, launch) if launch.selects else expected,
                    cost,
                    num_ranks=ranks.world_size,
                    num_slots=self.engine.num_slots,
                    keeps_groups=is_whole or self.scorer.sees_groups(step),
                )
        table = RolloutProgress(launch, rank_of, ranks.rank, expected)
        rows = table.make_rows(self.config.rollout.max_completion_length)
        for index, row in rows.items():
            row.draft = found[index]
        if expected is not None:
            own = np.array(list(rows), np.int64)
            rows = {index: rows[index] for index in admission_order(expected, own, launch)}
        return RolloutPlan(
            table,
            rows,
            self.params,
            step=step,
            drafts={i: draft for i, draft in zip(launch.ids, found, strict=True) if draft},
            began_s=began_s,
            without=without,
            scoring=self.scorer.begin(launch, step),
        )

    def rollout(self, plan: RolloutPlan) -> Rollout:
        """Generate this rank's rows of a plan, and gather the samples of all ranks.

        Timings, drafts and what mechanisms have done are exchanged after a rollout of a step, not
        after an evaluation. Raises StopRequested."""
        ranks, clock = self.ranks, self.ranks.clock
        begin_s = clock.perf_counter()
        for mechanism in self.mechanisms:
            mechanism.begin_rollout(plan)
        self.planning_s += clock.perf_counter() - begin_s
        if plan.proposer is not None:
            plan.proposer.begin()
            is_off = plan.step is not None and DRAFTS in plan.without
            if is_off or not plan.proposer.is_used:
                plan.proposer = None
        for row in plan.rows.values() if plan.proposer is not None else ():
            plan.proposer.track(row, plan.version)
        loop = RolloutLoop(self.engine, ranks, self.board, plan)
        note(loop.progress)
        record = loop.run()
        generated_s = clock.perf_counter()
        ranks.barrier_or_stop()  # waiting for the slowest rank
        met_s = clock.perf_counter()
        note(f"{plan.name}: scoring")
        samples = None if plan.scoring is None else self.gather(plan)
        spans = [] if plan.step is None else [self._conclude(plan, record)]
        stages = [
            Span("gen", plan.began_s, generated_s),
            Span("wait", generated_s, met_s),
            Span("reward", met_s, clock.perf_counter()),
        ]
        return Rollout(samples, record, stages, spans)

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

    def gather(self, plan: RolloutPlan) -> Samples:
        """Return the samples of all ranks that are trained on, with their scores."""
        assert plan.scoring is not None
        trained = plan.table.trained().tolist()
        own = {index: plan.rows[index] for index in trained if index in plan.rows}
        rewards = plan.scoring.collect(list(own.values()))
        return gather_samples(own, rewards, plan.table, self.ranks)

    def _conclude(self, plan: RolloutPlan, record: RolloutRecord) -> Span:
        """Exchange a rollout's timings and drafts between all ranks; return the span of this.

        Tokens of deferred samples become drafts."""
        assert plan.step is not None
        begin_s = self.ranks.clock.perf_counter()
        ids, deferred = plan.launch.ids, plan.table.deferred().tolist()
        num_stored = self.store.num_tokens
        self.store.drop(set(ids).difference(ids[index] for index in deferred))
        if self.needs_timings:
            record.saved_s = self.stats.observe_rollout(
                record,
                plan.launch,
                plan.rows,
                self.ranks,
                num_slots=self.engine.num_slots,
                planning_s=self.planning_s,
                used_share=1.0 - self.store.num_tokens / max(num_stored, 1),
                step=plan.step,
            )
            record.modelled_s = self.stats.modelled_s
        if plan.launch.selects:
            rows = [plan.rows[index] for index in deferred if index in plan.rows]
            self.keep_as_drafts(rows, plan.step)
        for use in plan.idle_uses:
            use.finish(self.ranks)
        for mechanism in self.mechanisms:
            mechanism.end_rollout(record)
        span = Span("exchange", begin_s, self.ranks.clock.perf_counter())
        self.planning_s = span.end_s - span.begin_s
        return span

    def keep_as_drafts(self, rows: Sequence[Row], step: int, are_deferred: bool = True) -> None:
        """Put tokens of rows that a later step continues into the stores of all ranks.

        A longer draft that begins with these tokens stays."""
        drafts = {}
        for row in rows:
            old, length = row.draft, len(row.tokens)
            is_longer = old is not None and len(old.tokens) > length
            if old and is_longer and np.array_equal(old.tokens[:length], row.tokens):
                drafts[row.id] = old
            elif length:
                tokens = row.tokens.astype(np.int32)
                drafts[row.id] = Draft(tokens, row.finish is not None, step)
        exchange(self.store, drafts, self.ranks, are_deferred=are_deferred)

    def observe_samples(self, samples: Samples, rewards: np.ndarray) -> None:
        """Learn lengths, and keep the history, of a step's samples. rewards: [S]."""
        self.stats.observe_samples(samples)
        if self.matches_texts:
            known = np.nan_to_num(rewards, nan=-np.inf).tolist()
            for sample, tokens, reward in zip(samples.ids, samples.tokens, known, strict=True):
                self.history.put(sample, Draft(tokens, True, reward=reward))

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
        parts |= {of.name: of.state for of in self.mechanisms if of.state is not None}
        if self.proposer is not None:
            parts["survival"] = self.proposer.survival
        return parts


def vocab_size_of(engine: Engine) -> int | None:
    """Return the number of tokens that the policy can embed; None in virtual time."""
    model = getattr(engine.runner, "model", None)
    return None if model is None else model.get_input_embeddings().num_embeddings


def gather_samples(
    own: dict[int, Row], rewards: np.ndarray, table: RolloutProgress, ranks: Ranks
) -> Samples:
    """Return all samples that are trained on, on every rank, after the rollout.

    own: this rank's, by ascending index; rewards: float64 [rows, functions], of the same."""
    trained, launch = table.trained(), table.launch
    by_index = gather_rows(own, table, ranks)
    rows = [by_index[index] for index in trained.tolist()]
    all_rewards = np.empty((len(rows), rewards.shape[1]))
    for rank, flat in enumerate(ranks.gather_ragged(rewards.ravel())):
        are_from_rank = table.rank_of[trained] == rank
        all_rewards[are_from_rank] = flat.reshape(are_from_rank.sum(), rewards.shape[1])
    groups = trained[:: launch.num_generations] // launch.num_generations
    return Samples(
        groups=[launch.groups[group] for group in groups.tolist()],
        num_generations=launch.num_generations,
        tokens=[row.tokens.astype(np.int32) for row in rows],
        logprob=[row.logprob for row in rows],
        is_truncated=np.array([row.finish == "length" for row in rows]),
        rewards=all_rewards,
    )


def num_lacking(record: StepRecord, max_batches: int) -> int:
    """Return how many further groups the step generates, enough for the gap at the rate so far.

    At most a whole batch; 0 once enough rewards differ, or after `max_batches`."""
    rewards, wanted = record.all_rewards, record.batch_sizes[0]
    is_useful = has_rewards(rewards) & ~has_zero_std(rewards)
    missing = wanted - int(is_useful.sum())
    if missing <= 0 or len(record.batch_sizes) >= max_batches:
        return 0
    return min(wanted, math.ceil(missing / max(is_useful.mean(), 1e-9)))


def join(record: StepRecord, more: StepRecord) -> StepRecord:
    """Return the record of a step with a further rollout."""
    return replace(
        record,
        generated=record.generated + more.generated,
        all_rewards=np.concatenate((record.all_rewards, more.all_rewards)),
        owners=np.concatenate((record.owners, more.owners)),
        batch_sizes=record.batch_sizes + more.batch_sizes,
        rollouts=record.rollouts + more.rollouts,
        stages=record.stages + more.stages,
        spans=record.spans + more.spans,
        drafts=record.drafts | more.drafts,
        expected_s=record.expected_s + more.expected_s,
    )


def select_trained(record: StepRecord) -> StepRecord:
    """Return the record with the groups that are trained on.

    The first groups whose rewards differ come first, then groups of equal rewards; groups that lack
    a reward are left out. Raises RewardsFailed, on all ranks, if all groups lack one.
    """
    order = np.argsort(has_zero_std(record.all_rewards), kind="stable")
    order = order[has_rewards(record.all_rewards)[order]]
    if not len(order):
        raise RewardsFailed(
            f"reward.functions: in step {record.step + 1} no function returned a number for any of "
            f"{len(record.all_rewards)} prompts, so there is nothing to train on"
        )
    chosen = sorted(order[: record.batch_sizes[0]].tolist())
    samples = record.generated.of_groups(chosen)
    return replace(record, samples=samples, rewards=record.all_rewards[chosen])
