"""Speculation over a run: the drafts, histories and estimates that live from step to step, and what
they say about the next one.

All of it is the same on every rank, as it is learnt from what the ranks have exchanged; so all
ranks plan alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from bubblespec.config import Config
from bubblespec.data.schedule import StepSchedule
from bubblespec.dist.ranks import Ranks
from bubblespec.draft.evaluation import EvaluationDrafts
from bubblespec.draft.proposer import Proposer
from bubblespec.draft.store import DraftStore, exchange
from bubblespec.draft.suffix import History
from bubblespec.idle.account import Account
from bubblespec.idle.draft_ahead import DraftAhead
from bubblespec.idle.draft_planning import Item, Outlook, afford, plan_items, undrafted
from bubblespec.idle.evaluation_ahead import plan_evaluation
from bubblespec.idle.rehearsal import rehearse
from bubblespec.records import POSITIONS, RolloutRecord
from bubblespec.rollout.board import ProgressBoard
from bubblespec.types import Draft, Group, Row, SampleId, Samples

MAX_AUTO_LOOKAHEAD = 16
MOST_PACE = 2.0  # by which a rollout may seem to be slower or faster than those before
# where even the freshest drafts are refused, one step in so many drafts all the same: they may have
# got better
RETRY_STEPS = 8
MIN_AGE_SHARE = 0.2  # drafts so old that less of them is accepted are not worth making


@dataclass
class Speculation:
    """Made once a run, by all ranks together."""

    config: Config
    ranks: Ranks
    board: ProgressBoard
    proposer: Proposer
    store: DraftStore
    history: History
    evaluation: EvaluationDrafts | None = None
    """None where evaluations are plain."""
    tokens_per_step: float = 0.0
    """Of responses, over all ranks; exponentially weighted, as are all averages here."""
    forwards: float = 0.0
    """Of the slowest rank in a rollout."""
    accepted_by_age: dict[int, float] = field(default_factory=dict)
    """Share of aligned draft tokens, by the updates since the draft was last extended."""
    outlook: Outlook = field(default_factory=Outlook)
    seen: np.ndarray = field(default_factory=lambda: np.zeros((len(POSITIONS) + 1, 2)))
    """Of drafts in recent rollouts, see `chances`."""
    shared_cost: np.ndarray | None = None
    """Coefficients of the ranks' cost models, their mean; None before the first rollout."""
    overhead_s: float = 0.0
    """Seconds that this rank has spent on drafts outside of rollouts, plans and the exchange, since
    they were accounted for."""
    pace: float = 1.0
    """Seconds of the slowest rank over what the cost model says of its forwards."""
    account: Account = field(init=False)
    """What drafts have won and lost."""

    def __post_init__(self):
        self.account = Account(self.config.run.max_steps, self.config.speculative.check_every)

    @property
    def has_drafts(self) -> bool:
        """Whether tokens are proposed at all; else what is known of lengths and costs serves
        placement alone."""
        return bool(self.proposer.sources)

    def lookahead(self, step: int) -> int:
        """How many steps to draft ahead of `step`."""
        bubble = self.config.bubble
        if "bubble" not in self.config.speculative.method:
            return 0
        remaining = self.config.run.max_steps - step - 1
        if bubble.lookahead != "auto":
            return min(int(bubble.lookahead), remaining)
        affordable = int(bubble.max_draft_tokens // max(self.tokens_per_step, 1.0))
        too_old = [age for age, share in self.accepted_by_age.items() if share < MIN_AGE_SHARE]
        depth = min(
            MAX_AUTO_LOOKAHEAD, affordable, remaining, *(age - 1 for age in too_old if age > 0)
        )
        return max(depth, 1 if remaining and affordable and step % RETRY_STEPS == 0 else 0)

    def begin(self, rows: dict[int, Row], step: int) -> dict[int, Row]:
        """A rollout of these rows of `step` is about to begin, under weights that have had so many
        updates. Returns the rows in the order in which they should be generated: where rows wait
        for slots, those with the most to decode must not wait."""
        self.proposer.begin()
        drafts = [self.store.get(row.id) for row in rows.values()]
        for row in rows.values():
            self.track(row, step)
        missing, places = (
            undrafted(list(rows.values()), drafts, self.outlook, self.history),
            list(rows),
        )
        return {places[i]: rows[places[i]] for i in np.argsort(-missing, kind="stable").tolist()}

    def track(self, row: Row, step: int) -> None:
        """Propose for a row of `step` from now on."""
        self.proposer.track(row, self.store.get(row.id), version=step)

    def keep(self, rows: Sequence[Row], step: int) -> None:
        """The tokens of rows that will go on in a later step become drafts, in the stores of all
        ranks. A draft that has turned out right so far and is longer stays."""
        drafts = {}
        for row in rows:
            old, length = self.store.get(row.id), len(row.tokens)
            if not length:
                continue
            goes_on = old is not None and len(old.tokens) > length
            if goes_on and np.array_equal(old.tokens[:length], row.tokens):
                drafts[row.id] = old
            else:
                drafts[row.id] = Draft(row.tokens.astype(np.int32), row.finish is not None, step)
        exchange(self.store, drafts, self.ranks, are_deferred=True)

    def draft_ahead(
        self, step: int, schedule: StepSchedule, used: list[Group], num_slots: int
    ) -> DraftAhead | None:
        """Drafting ahead during a rollout of `step`; None where nothing is to be drafted. used: the
        groups that the step has drawn so far, those of this rollout included."""
        depth, begin_s = self.lookahead(step), self.ranks.clock.perf_counter()
        batches = schedule.upcoming(step, depth, used) if depth else []
        of_evaluation = self._items_of_evaluation(step, num_slots)
        if not any(batches) and not of_evaluation:
            return None
        drafting = self._plan(
            batches, step, num_slots, {group.name for group in schedule.deferred}, of_evaluation
        )
        self.overhead_s += self.ranks.clock.perf_counter() - begin_s
        return drafting

    def _plan(
        self,
        batches: list[list[Group]],
        step: int,
        num_slots: int,
        deferred: set[tuple[int, int]],
        of_evaluation: Sequence[Item] = (),
    ) -> DraftAhead:
        """deferred: names of groups that come before all others; of_evaluation: what comes after
        all others."""

        judged: set[int] = (
            set()
        )  # steps ahead of which a rollout was played through: the only ones that news change

        def plan(news: np.ndarray) -> list[Item]:
            if not news.any():
                items = self._items(batches, num_slots, deferred, self.seen)
                judged.update(item.steps_ahead for item in items if item.costs_s > 0)
                return [*items, *of_evaluation]
            nearby = [
                groups if ahead in judged else [] for ahead, groups in enumerate(batches, start=1)
            ]
            return (
                []
                if self.config.tail_batching.enabled
                else self._items(nearby, num_slots, deferred, self.seen + news)
            )

        return DraftAhead(
            plan,
            self.store,
            self.proposer,
            version=step,
            max_new_tokens=self.config.rollout.max_completion_length,
            max_slowdown=self.config.bubble.max_slowdown,
            allowance_s=self.account.allowance_s,
            older=None if self.evaluation is None else self.evaluation.store,
        )

    def _items(
        self,
        batches: list[list[Group]],
        num_slots: int,
        deferred: set[tuple[int, int]],
        seen: np.ndarray,
    ) -> list[Item]:
        """What to draft, as far as is known now; seen: as `self.seen`."""
        worth = None
        if self.shared_cost is not None:
            shape = {"num_ranks": self.ranks.world_size, "num_slots": num_slots}
            worth = partial(rehearse, cost=self.shared_cost, seen=seen, **shape)
        items = plan_items(
            batches,
            self.config.rollout.num_generations,
            self.store,
            self.history,
            outlook=self.outlook,
            forwards_per_step=self.forwards,
            worth=worth,
        )
        items = afford(items, self.account.allowance_s, self.ranks.world_size)
        if self.config.tail_batching.enabled:
            # A short round has no tail that drafts beside its rows could save: they are for ranks
            # that wait.
            idle_only = [replace(item, pays=False) for item in items]
            items = sorted(idle_only, key=lambda item: item.id[:2] not in deferred)
        return items

    def _items_of_evaluation(self, step: int, num_slots: int) -> list[Item]:
        """What to draft of the coming evaluation during a rollout of `step`."""
        drafts_ahead = (
            "bubble" in self.config.speculative.method and self.config.bubble.lookahead != 0
        )
        if self.evaluation is None or self.shared_cost is None or not drafts_ahead:
            return []
        known = (self.evaluation, self.store, self.outlook, self.shared_cost)
        return plan_evaluation(
            self.config, step, *known, num_ranks=self.ranks.world_size, num_slots=num_slots
        )

    @property
    def is_plain(self) -> bool:
        """Whether the next rollout is to be one without drafts: as nothing would be proposed, to
        see what that takes, or because drafts have lost too much."""
        if self.has_drafts and not self.proposer.enabled_sources:
            return True
        return self.has_drafts and not self.config.tail_batching.enabled and self.account.is_plain

    def learn_rollout(
        self,
        record: RolloutRecord,
        ids: list[SampleId],
        *,
        plain_s: float,
        work_s: float,
        spent_s: float,
        was_plain: bool,
    ) -> None:
        """Exchange what each rank has measured in a rollout, so that all of them plan alike. The
        drafts of its samples, `ids` of all ranks, go: those have had their turn. Where a rollout is
        abandoned this is not called, and they stay.

        plain_s, work_s: what this rank's rows would have taken without drafts, and what they took,
        by its cost model; spent_s: what that work took by the clock; was_plain: there were no
        drafts.
        """
        ages, counts = np.zeros((MAX_AUTO_LOOKAHEAD + 1, 2)), record.acceptance
        for age, of_age in counts.by_age.items():
            ages[min(age, MAX_AUTO_LOOKAHEAD)] += of_age
        seen = (counts.before_divergence.ravel(), counts.after_divergence)
        overhead_s, self.overhead_s = (
            (0.0, self.overhead_s) if was_plain else (self.overhead_s, 0.0)
        )
        times = [plain_s, work_s, spent_s, record.total_s, overhead_s]
        own = (ages.ravel(), *seen, [record.own_forwards, *times], self.proposer.cost.coefficients)
        measured = self.ranks.gather(np.concatenate(own))
        for age, (drafted, accepted) in enumerate(
            measured[:, : ages.size].sum(axis=0).reshape(ages.shape)
        ):
            if drafted >= 20:
                self.accepted_by_age[age] = _average(
                    self.accepted_by_age.get(age), accepted / drafted
                )
        size = ages.size + self.seen.size
        # Where nothing is drafted any more, what was seen is forgotten, and drafts are tried again.
        self.seen = 0.7 * self.seen + measured[:, ages.size : size].sum(axis=0).reshape(
            self.seen.shape
        )
        self.forwards = _average(self.forwards or None, float(measured[:, size].max()))
        self.shared_cost = measured[:, size + 6 :].mean(axis=0)
        plain_s, work_s, spent_s, total_s, overhead_s = (
            measured[:, size + 1 : size + 6].max(axis=0).tolist()
        )
        won_s = self._settle(
            plain_s, work_s, spent_s, total_s=total_s, overhead_s=overhead_s, was_plain=was_plain
        )
        if DraftAhead.name in record.idle:
            record.idle[DraftAhead.name].brought_s = won_s
        self.store.drop(ids)

    def _settle(
        self,
        plain_s: float,
        work_s: float,
        spent_s: float,
        *,
        total_s: float,
        overhead_s: float,
        was_plain: bool,
    ) -> float:
        """Account for a rollout, by seconds of the slowest rank. Single rollouts of the same work
        differ by a fifth on a machine that does other things too. So its work is what the cost
        model says of its forwards, like that of a plain rollout, at the pace of recent ones; only a
        plain rollout counts as it was measured. What a rollout takes besides, plans and set-up, is
        no pace: it would be as much without drafts, however many forwards that takes. Returns the
        seconds that drafts have won."""
        if work_s > 0:
            pace = spent_s / work_s
            if self.account.num_settled:
                pace = min(max(pace, self.pace / MOST_PACE), self.pace * MOST_PACE)
            self.pace = pace if not self.account.num_settled else 0.9 * self.pace + 0.1 * pace
        actual_s = total_s if was_plain else self.pace * work_s + total_s - spent_s + overhead_s
        return self.account.settle(self.pace * plain_s, actual_s, was_plain)

    def learn_samples(self, step: int, samples: Samples, rewards: np.ndarray) -> None:
        """Take in what a step has generated, the same on every rank: lengths, and histories for the
        prompts' next epoch. Its samples have had their turn, and need no drafts. rewards: float64
        [S]."""
        self.store.drop(samples.ids)
        lengths = samples.lengths
        self.tokens_per_step = _average(self.tokens_per_step or None, float(lengths.sum()))
        self.outlook.learn(
            np.repeat([len(g.prompt.token_ids) for g in samples.groups], samples.num_generations),
            lengths,
        )
        if "suffix" in self.config.speculative.method:
            for i, tokens in enumerate(samples.tokens):
                self.history.add(samples.prompt_of(i).uid, tokens, float(rewards[i]), step)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Drafts, history and estimates as arrays. They change no token, only how soon it is there.
        All is the same on every rank, but for the shares of proposals accepted so far, of which any
        rank's will do; costs are measured anew at a start.
        """
        ages = np.array(
            [[age, share] for age, share in self.accepted_by_age.items()], np.float64
        ).reshape(-1, 2)
        parts = {
            "drafts": self.store.state_dict(),
            "history": self.history.state_dict(),
            "survival": self.proposer.survival.state_dict(),
            "evaluation": {} if self.evaluation is None else self.evaluation.state_dict(),
        }
        flat = {
            f"{name}.{key}": array for name, part in parts.items() for key, array in part.items()
        }
        averages = np.array([self.tokens_per_step, self.forwards])
        cost = np.empty(0) if self.shared_cost is None else self.shared_cost
        shares = {"accepted_by_age": ages, "seen": self.seen}
        return (
            flat
            | shares
            | {
                "lengths": self.outlook.seen,
                "averages": averages,
                "shared_cost": cost,
                "account": self.account.state(),
                "pace": np.array(self.pace),
            }
        )

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state."""
        for name, part in (
            ("drafts", self.store),
            ("history", self.history),
            ("survival", self.proposer.survival),
        ):
            part.load_state_dict(_part(state, name))
        if self.evaluation is not None:
            self.evaluation.load_state_dict(_part(state, "evaluation"))
        self.outlook.seen = state["lengths"]
        self.tokens_per_step, self.forwards = map(float, state["averages"])
        self.accepted_by_age = {int(age): float(share) for age, share in state["accepted_by_age"]}
        if "account" in state:  # not in checkpoints of before there was one
            self.seen = state["seen"]
            self.account.load_state(state["account"])
            self.pace = float(state["pace"])
        cost = state["shared_cost"]
        self.shared_cost = cost if len(cost) else None


def _part(state: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {
        key.removeprefix(f"{name}."): array
        for key, array in state.items()
        if key.startswith(f"{name}.")
    }


def _average(old: float | None, new: float) -> float:
    return new if old is None else 0.7 * old + 0.3 * new
