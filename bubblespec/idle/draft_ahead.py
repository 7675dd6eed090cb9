"""Drafting ahead, a use of idle time: samples of coming steps, generated early with the noise that
their own step will use.

In a hard bubble a rank's free slots fill with drafts. In a soft one drafts join the forwards of its
own rows, as long as they slow them by at most `max_slowdown`, and cost the rollout no more than
they may (`Account`). They come from the global batches of coming steps, whoever will generate
those. What is worth drafting is planned before the rollout, and again once its first verifications
have shown how well drafts hold today. At the last tick drafts stop where they are and go on later:
from their tokens, or, where the rank that made them can keep them in its engine, over the keys and
values that are there.
"""

import math
from collections import deque
from collections.abc import Callable

import numpy as np

from bubblespec.dist.ranks import Ranks
from bubblespec.draft.proposer import Proposer
from bubblespec.draft.store import DraftStore, exchange
from bubblespec.idle.draft_planning import Item
from bubblespec.idle.work import Offer, RankView
from bubblespec.records import POSITIONS
from bubblespec.rollout.board import RankState
from bubblespec.types import Draft, Row, SampleId

# A forward in a hard bubble is no longer than so many of a single row, or than this share of the
# rollout so far.
LONGEST_FORWARDS, LONGEST_SHARE = 2.0, 0.02
REPLAN_TOKENS = (64, 1024)  # tried by all ranks in a rollout, before their first mismatches


class DraftAhead:
    """Drafting in one rollout on one rank; implements `IdleWork`."""

    name = "draft_ahead"

    def __init__(
        self,
        plan: Callable[[np.ndarray], list[Item]],
        store: DraftStore,
        proposer: Proposer,
        *,
        version: int,
        max_new_tokens: int,
        max_slowdown: float,
        allowance_s: float = math.inf,
        older: DraftStore | None = None,
    ):
        """plan: everything to draft, most urgent first, the same on every rank, from what the ranks
        have seen of drafts in this rollout (see `chances`); once they have seen some, those of
        which that may say something else; version: updates of the current weights; max_slowdown:
        see `BubbleConfig`; allowance_s: seconds by which drafts may slow down the rows of each
        rank; older: where drafts of items by older weights are, to be verified."""
        self.store, self.older, self.proposer, self.cost = store, older, proposer, proposer.cost
        self.version, self.max_new_tokens, self.max_slowdown = version, max_new_tokens, max_slowdown
        self.allowance_s, self.spent_s = allowance_s, 0.0  # spent beside own rows
        self._plan, self._seen = plan, np.zeros((len(POSITIONS) + 1, 2))
        self._replan_at = deque(REPLAN_TOKENS)
        self._items = {item.id: item for item in plan(self._seen)}
        self._taken: set[SampleId] = set()  # by any rank
        self._given: deque[Item] = deque()  # to this rank, not yet in its engine
        self._rows: dict[int, Item] = {}  # by id() of the row that is drafting it
        self._num_counted = 0  # forwards that are in spent_s, or behind own rows
        self.drafts: dict[SampleId, Draft] = {}  # that this rank has made or taken further

    def facts(self) -> np.ndarray:
        """What this rank has seen of drafts in this rollout."""
        acceptance = self.proposer.acceptance
        return np.array(
            [*acceptance.before_divergence.ravel(), *acceptance.after_divergence], np.float64
        )

    def hear(self, facts: list[np.ndarray]) -> None:
        """What all have seen."""
        self._seen = np.sum(facts, axis=0).reshape(-1, 2)

    @property
    def _num_tried(self) -> float:
        return self._seen[:-1, 0].sum()

    def offers(self, states: list[RankState]) -> list[Offer] | None:
        """Items that no rank goes on with from the rollout before. One that does not pay any more
        is open to all again."""
        if states and not (self._replan_at and self._num_tried >= self._replan_at[0]):
            return None
        if states:
            while self._replan_at and self._num_tried >= self._replan_at[0]:
                self._replan_at.popleft()
            news = {item.id: item for item in self._plan(self._seen)}
            if all(self._items[name].pays == item.pays for name, item in news.items()):
                return None
            self._items |= news
        else:
            self._taken.update(
                item.id for item in self._items.values() if item.holder >= 0 and item.pays
            )
        free = [item for item in self._items.values() if item.id not in self._taken]
        return [Offer(item.id, item.saves_s, item.costs_s, item.pays) for item in free]

    def begin(self, view: RankView) -> list[Row]:
        """The longest drafts of the rollout before that this rank can afford beside its rows stay
        in the engine."""
        self.view, self.num_own_rows = view, len(view.unfinished)
        resumed = {
            item.id: item for item in self._items.values() if item.holder == view.rank and item.pays
        }
        rows = [row for row in view.engine.rows if row.id in resumed]
        if view.unfinished and rows:
            num_free = max(view.engine.num_slots - self.num_own_rows, 0)
            longest = sorted(rows, key=lambda row: len(row.tokens), reverse=True)
            rows = longest[: min(self._affordable_beside(rows), num_free)]
        for row in rows:
            self._track(row, resumed.pop(row.id))
        self._given.extend(
            resumed.values()
        )  # the engine has been used for something else, or is too full now
        return rows

    def wanted(self) -> int:
        """Twice what fits now: the next tick is some forwards away."""
        return (
            0
            if self.view.engine.queue
            else max(0, 2 * self._num_free_rows() - len(self._waiting()))
        )

    def start(self, offer: Offer, rank: int) -> None:
        """Put it in line for the engine of the rank that has been given it."""
        self._taken.add(offer.key)
        if rank == self.view.rank:
            self._given.append(self._items[offer.key])

    def advance(self) -> bool:
        """Put items in line into free rows. Beside own rows their prompts are fed a little at a
        time, and not before those of own rows, which would have to keep to the same limit; and
        where they may cost no more, or do not pay, they wait."""
        engine, unfinished = self.view.engine, self.view.unfinished
        self._count_spent()
        if unfinished and self._rows:
            rows = [row for row in (*engine.rows, *engine.queue) if id(row) in self._rows]
            self._pause([row for row in rows if not self._may_go_on(self._rows[id(row)])])
        prefilling = [*engine.queue, *engine.prefilling()]
        if any(id(row) in unfinished for row in prefilling):
            self.view.max_prefill_tokens = None
            return False
        if prefilling or self._given:
            prompt_tokens = min(
                self._spare_s() / self.cost.coefficients[2], engine.max_batch_tokens
            )
            self.view.max_prefill_tokens = max(int(prompt_tokens), 1)
        if not self._given or engine.queue:
            return False
        for item in self._waiting()[: self._num_free_rows()]:
            self._given.remove(item)
            row = Row(item.id, item.prompt, self.max_new_tokens)
            if (draft := self.drafts.get(item.id) or self.store.get(item.id)) is not None:
                row.tokens = draft.tokens.astype(np.int64)
            self._track(row, item)
            engine.add([row])
        return False

    def finish(self, row: Row) -> bool:
        """Note the finished draft."""
        is_ours = self._rows.pop(id(row), None) is not None
        if is_ours:
            self._note(row, holder=-1)
        return is_ours

    def make_room(self, count: int) -> int:
        """The shortest drafts stop, and go on once there is room again."""
        rows = sorted(
            (row for row in self.view.engine.collect() if id(row) in self._rows),
            key=lambda row: len(row.tokens),
        )
        return self._pause(rows[:count])

    def end(self) -> None:
        """Note the unfinished drafts, and which of them stay in the engine: the longest that
        decode. Those of the next step do not: they are about to be verified on whichever rank gets
        them, and its own rows need slots."""
        engine = self.view.engine
        self._count_spent()
        rows = sorted(
            (row for row in engine.collect() if id(row) in self._rows),
            key=lambda row: len(row.tokens),
            reverse=True,
        )
        decoding = {id(row) for row in engine.decoding()}
        may_stay = [
            id(row) for row in rows if self._rows[id(row)].steps_ahead > 1 and id(row) in decoding
        ]
        staying = set(may_stay[: max(engine.num_slots - self.num_own_rows, 0)])
        for row in rows:
            self._note(row, self.view.rank if id(row) in staying else -1)

    def merge(self, ranks: Ranks) -> None:
        """All ranks' drafts into all ranks' stores."""
        nearest_first = sorted(self.drafts, key=lambda name: self._items[name].steps_ahead)
        exchange(self.store, {name: self.drafts[name] for name in nearest_first}, ranks)

    def _pause(self, rows: list[Row]) -> int:
        """Take rows out of the engine, for later in this rollout or in a later one; returns how
        many."""
        for row in rows:
            self.view.engine.drop(row)
            self._given.append(self._rows.pop(id(row)))
            self._note(row, holder=-1)
        return len(rows)

    def _waiting(self) -> list[Item]:
        """Items in line that could begin now."""
        return [item for item in self._given if not self.view.unfinished or self._may_go_on(item)]

    def _may_go_on(self, item: Item) -> bool:
        """Whether an item may be drafted beside own rows."""
        return self._items[item.id].pays and self._room_s() > 0

    def _room_s(self) -> float:
        """Seconds that drafts may cost own rows yet."""
        return self.allowance_s - self.spent_s

    def _count_spent(self) -> None:
        """What drafts have cost own rows in the forwards since the last call, by the cost model."""
        forwards, (_, row_s, token_s, _, position_s) = (
            self.view.record.forwards,
            self.cost.coefficients.tolist(),
        )
        use = self.view.record.idle.get(self.name)
        for forward in forwards[self._num_counted :]:
            if forward.ahead_rows and forward.own_rows:
                # Beside own rows: prompts are those of drafts, which wait until own rows are
                # prefilled.
                spent_s = forward.ahead_rows * (
                    row_s + token_s + position_s * forward.positions / forward.rows
                )
                spent_s += token_s * forward.prompt_tokens
                self.spent_s += spent_s
            else:
                spent_s = forward.end_s - forward.begin_s if forward.ahead_rows else 0.0
            if use is not None:
                use.seconds += spent_s
        self._num_counted = len(forwards)

    def _track(self, row: Row, item: Item) -> None:
        self._rows[id(row)] = item
        older = None if self.older is None else self.older.get(row.id)
        self.proposer.track(row, older, self.version, is_counted=False)

    def _note(self, row: Row, holder: int) -> None:
        """A row's tokens as a draft, unless the store has it as it is."""
        old = self.drafts.get(row.id) or self.store.get(row.id)
        grown = len(row.tokens) - (len(old.tokens) if old else 0)
        self.view.record.drafted_tokens += grown
        if grown > 0 or holder != (old.holder if old else -1):
            self.drafts[row.id] = Draft(
                row.tokens.astype(np.int32), row.finish is not None, self.version, holder
            )

    def _row_s(self, positions: float) -> float:
        """Seconds that one more decoding row adds to a forward."""
        return float(self.cost.seconds(1, 1, 0, positions) - self.cost.coefficients[0])

    def _affordable_beside(self, rows: list[Row]) -> int:
        """How many drafts of the rollout before may go on beside own rows from their first forward
        on."""
        own = self.view.unfinished.values()
        own_s = self.cost.seconds(len(own), len(own), 0, sum(len(row.prompt) for row in own))
        positions = float(np.mean([len(row.prompt) + len(row.tokens) for row in rows]))
        return int(self.max_slowdown * own_s / self._row_s(positions))

    def _spare_s(self) -> float:
        """Seconds that drafts may add to a forward."""
        engine, unfinished = self.view.engine, self.view.unfinished
        if not unfinished:
            return self._longest_s() - float(self.cost.coefficients[0])
        positions = sum(
            n
            for row, n in zip(engine.rows, engine.lengths.tolist(), strict=True)
            if id(row) in unfinished
        )
        return self.max_slowdown * float(
            self.cost.seconds(len(unfinished), len(unfinished), 0, positions)
        )

    def _longest_s(self) -> float:
        """What a forward in a hard bubble may take: the others wait for its end."""
        elapsed_s = (
            self.view.record.forwards[-1].end_s - self.view.record.began_s
            if self.view.record.forwards
            else 0.0
        )
        return max(LONGEST_FORWARDS * float(self.cost.coefficients[0]), LONGEST_SHARE * elapsed_s)

    def _num_free_rows(self) -> int:
        """How many more draft rows may join the next forwards."""
        engine, num_own = self.view.engine, len(self.view.unfinished)
        active = len(engine.rows)
        free = engine.num_slots - active - len(engine.queue)
        if free <= 0 or (num_own and self._room_s() <= 0):
            return 0
        affordable = int(
            self._spare_s() / self._row_s(float(engine.lengths.mean()) if active else 0.0)
        )
        return max(0, min(free, affordable - (active - num_own)))
