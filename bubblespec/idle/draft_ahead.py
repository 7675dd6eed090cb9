"""Drafting ahead, a use of idle time: samples of coming steps, generated early with the noise that their own step will use.

In a hard bubble a rank's free slots fill with drafts. In a soft one drafts join the forwards of its own rows, as long as they
slow them by at most `max_slowdown`. They come from the global batches of coming steps, whoever will generate those. At the last
tick drafts stop where they are and go on later: from their tokens, or, where the rank that made them can keep them in its
engine, over the keys and values that are there.
"""

import math
from collections import deque

import numpy as np

from bubblespec.idle.draft_planning import Item
from bubblespec.idle.work import Offer, RankView
from bubblespec.ranks.collectives import Ranks
from bubblespec.records import Draft, Row, SampleId
from bubblespec.speculate.proposer import Proposer
from bubblespec.speculate.store import DraftStore, exchange


class DraftAhead:
    """Drafting in one rollout on one rank; implements `IdleWork`."""

    def __init__(
        self,
        items: list[Item],
        store: DraftStore,
        proposer: Proposer,
        *,
        version: int,
        max_new_tokens: int,
        max_slowdown: float,
    ):
        """items: everything to draft, most urgent first, the same on every rank; version: updates of the current weights;
        max_slowdown: see `BubbleConfig`."""
        self.store, self.proposer, self.cost = store, proposer, proposer.cost
        self.version, self.max_new_tokens, self.max_slowdown = version, max_new_tokens, max_slowdown
        self._items = {item.id: item for item in items}
        self._given: deque[Item] = deque()  # to this rank, not yet in its engine
        self._rows: dict[int, Item] = {}  # by id() of the row that is drafting it
        self.drafts: dict[SampleId, Draft] = {}  # that this rank has made or taken further

    def offers(self) -> list[Offer]:
        """Items that no rank goes on with from the rollout before. One that does not pay any more is open to all again."""
        free = [item for item in self._items.values() if item.holder < 0 or not item.pays]
        return [Offer(item.id, item.saves_s, item.pays) for item in free]

    def begin(self, view: RankView) -> list[Row]:
        """The longest drafts of the rollout before that this rank can afford beside its rows stay in the engine."""
        self.view, self.num_own_rows = view, len(view.unfinished)
        resumed = {item.id: item for item in self._items.values() if item.holder == view.rank and item.pays}
        rows = [row for row in view.engine.rows if row.id in resumed]
        if view.unfinished and rows:
            num_free = max(view.engine.num_slots - self.num_own_rows, 0)
            longest = sorted(rows, key=lambda row: len(row.tokens), reverse=True)
            rows = longest[: min(self._affordable_beside(rows), num_free)]
        for row in rows:
            self._track(row, resumed.pop(row.id))
        self._given.extend(resumed.values())  # the engine has been used for something else, or is too full now
        return rows

    def wanted(self) -> int:
        """Twice what fits now: the next tick is some forwards away."""
        return 0 if self.view.engine.queue else max(0, 2 * self._num_free_rows() - len(self._given))

    def start(self, offer: Offer) -> None:
        """Put it in line for the engine."""
        self._given.append(self._items[offer.key])

    def advance(self) -> bool:
        """Put items in line into free rows. Beside own rows their prompts are fed a little at a time, and not before those of own
        rows, which would have to keep to the same limit."""
        engine, unfinished = self.view.engine, self.view.unfinished
        if not self._given or engine.queue or any(id(row) in unfinished for row in engine.prefilling()):
            return False
        num_free, prompt_token_s = self._num_free_rows(), self.cost.coefficients[2]
        self.view.max_prefill_tokens = int(min(self._spare_s() / prompt_token_s, engine.max_batch_tokens))
        for _ in range(min(num_free, len(self._given))):
            item = self._given.popleft()
            row = Row(item.id, item.prompt, self.max_new_tokens)
            if (draft := self.store.get(item.id)) is not None:
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
        """The shortest drafts stop, and go on in a later rollout."""
        rows = sorted((row for row in self.view.engine.collect() if id(row) in self._rows), key=lambda row: len(row.tokens))[
            :count
        ]
        for row in rows:
            self.view.engine.drop(row)
            del self._rows[id(row)]
            self._note(row, holder=-1)
        return len(rows)

    def end(self) -> None:
        """Note the unfinished drafts, and which of them stay in the engine: the longest that decode. Those of the next step do
        not: they are about to be verified on whichever rank gets them, and its own rows need slots."""
        engine = self.view.engine
        rows = sorted((row for row in engine.collect() if id(row) in self._rows), key=lambda row: len(row.tokens), reverse=True)
        decoding = {id(row) for row in engine.decoding()}
        may_stay = [id(row) for row in rows if self._rows[id(row)].steps_ahead > 1 and id(row) in decoding]
        staying = set(may_stay[: max(engine.num_slots - self.num_own_rows, 0)])
        for row in rows:
            self._note(row, self.view.rank if id(row) in staying else -1)

    def merge(self, ranks: Ranks) -> None:
        """All ranks' drafts into all ranks' stores."""
        exchange(self.store, self.drafts, ranks)

    def _track(self, row: Row, item: Item) -> None:
        self._rows[id(row)] = item
        self.proposer.track(row, None, self.version, is_counted=False)

    def _note(self, row: Row, holder: int) -> None:
        """A row's tokens as a draft, unless the store has it as it is."""
        old = self.store.get(row.id)
        grown = len(row.tokens) - (len(old.tokens) if old else 0)
        self.view.record.drafted_tokens += grown
        if grown > 0 or holder != (old.holder if old else -1):
            self.drafts[row.id] = Draft(row.tokens.astype(np.int32), row.finish is not None, self.version, holder)

    def _row_s(self, positions: float) -> float:
        """Seconds that one more decoding row adds to a forward."""
        return float(self.cost.seconds(1, 1, 0, positions) - self.cost.coefficients[0])

    def _affordable_beside(self, rows: list[Row]) -> int:
        """How many drafts of the rollout before may go on beside own rows from their first forward on."""
        own = self.view.unfinished.values()
        own_s = self.cost.seconds(len(own), len(own), 0, sum(len(row.prompt) for row in own))
        positions = float(np.mean([len(row.prompt) + len(row.tokens) for row in rows]))
        return int(self.max_slowdown * own_s / self._row_s(positions))

    def _spare_s(self) -> float:
        """Seconds that drafts may add to a forward."""
        engine, unfinished = self.view.engine, self.view.unfinished
        if not unfinished:
            return math.inf
        positions = sum(n for row, n in zip(engine.rows, engine.lengths.tolist(), strict=True) if id(row) in unfinished)
        return self.max_slowdown * float(self.cost.seconds(len(unfinished), len(unfinished), 0, positions))

    def _num_free_rows(self) -> int:
        """How many more draft rows may join the next forwards."""
        engine, num_own = self.view.engine, len(self.view.unfinished)
        active = len(engine.rows)
        free = engine.num_slots - active - len(engine.queue)
        if not num_own or free <= 0:
            return free
        affordable = int(self._spare_s() / self._row_s(float(engine.lengths.mean()) if active else 0.0))
        return max(0, min(free, affordable - (active - num_own)))
