"""Taking rows over, a use of idle time: a rank that has none left goes on with some of the rank
that is expected to end last.

Decided by all ranks alike, from what a tick has told. The row's tokens, with their
log-probabilities, travel in the next tick, to all ranks, who know from the decision how long they
are; the new rank feeds prompt and tokens again and goes on. A row that ends before it can be sent
stays where it is.
"""

import math
import time
from collections.abc import Callable

import numpy as np

from bubblespec.dist.ranks import Ranks
from bubblespec.idle.work import Offer, RankView
from bubblespec.rollout.board import RankState
from bubblespec.rollout.moves import MAX_MOVES, Move
from bubblespec.rollout.standing import Standing
from bubblespec.types import Row

NUMBERS_PER_TOKEN = 3  # its id and both log-probabilities, all exact as float64


class TakeOver:
    """The moves of one rollout, as one rank sees them; implements `IdleWork`."""

    name = "take_over"

    def __init__(
        self,
        standing: Standing,
        plan_moves: Callable[[Standing, list[RankState]], list[Move]],
        max_new_tokens: int,
        on_taken: Callable[[Row], None],
        clock=time,
    ):
        """plan_moves: a pure function of what all ranks know; on_taken: called with each row that
        has come to this rank; clock: see `Ranks`."""
        self.clock = clock
        self.standing, self.max_new_tokens, self.on_taken = standing, max_new_tokens, on_taken
        self._plan_moves = plan_moves
        self._moves: list[tuple[Move, int]] = []  # under way, with the tokens that go with each
        self._parcels: list[
            np.ndarray
        ] = []  # of each of these, what this rank sends with the next tick
        self._end_s = (
            math.nan
        )  # when the rollout was expected to end before any row moved, by this rank's clock

    def facts(self) -> np.ndarray:
        """The rows that go with this tick."""
        return np.concatenate(self._parcels) if self._parcels else np.empty(0)

    def hear(self, facts: list[np.ndarray]) -> None:
        """The rows that have come with it, and those that have gone."""
        begin = 0
        for move, length in self._moves:
            parcel = facts[move.source][begin : begin + _size(length)]
            begin += _size(length)
            if parcel[0] == 0.0:
                continue
            self.standing.owners[move.row] = move.target
            if move.source == self.view.rank:
                self.view.let_go(move.row)
            elif move.target == self.view.rank:
                row = self.standing.make_row(move.row, self.max_new_tokens)
                tokens, logprob, full_logprob = parcel[1:].reshape(NUMBERS_PER_TOKEN, length)
                row.tokens, row.logprob = tokens.astype(np.int64), logprob.astype(np.float32)
                row.full_logprob = full_logprob.astype(np.float32)
                self.on_taken(row)
                self.view.take(move.row, row)
        self._moves, self._parcels = [], []

    def offers(self, states: list[RankState]) -> list[Offer]:
        """The moves that would end the rollout sooner, each for the rank that is to have the
        row."""
        self._planned = (
            {move.row: move for move in self._plan_moves(self.standing, states)} if states else {}
        )
        return [
            Offer(move.row, move.saves_s, move.costs_s, False, move.target)
            for move in self._planned.values()
        ]

    def begin(self, view: RankView) -> list[Row]:
        """No row stays from the rollout before."""
        self.view = view
        return []

    def wanted(self) -> int:
        """As many rows as can move at once, for a rank without any."""
        return 0 if self.view.unfinished else MAX_MOVES

    def start(self, offer: Offer, rank: int) -> None:
        """The rank that has the row packs it. What the row has gained since the tick is generated
        again."""
        move, length = self._planned[offer.key], int(self.standing.told[offer.key])
        if math.isnan(self._end_s):
            self._end_s = self.clock.perf_counter() + move.ends_s
        parcel = np.zeros(_size(length))
        if move.source == self.view.rank and (row := self.view.give(move.row)) is not None:
            parcel[0] = 1.0
            parcel[1:] = np.concatenate(
                (row.tokens[:length], row.logprob[:length], row.full_logprob[:length]),
                dtype=np.float64,
            )
        self._moves.append((move, length))
        self._parcels.append(parcel)

    def advance(self) -> bool:
        """Nothing: rows go with the ticks."""
        return False

    def finish(self, row: Row) -> bool:
        """A row that has come is one of this step."""
        return False

    def make_room(self, count: int) -> int:
        """None: it has no rows of its own."""
        return 0

    def end(self) -> None:
        """Nothing is under way once all rows are done."""
        if not math.isnan(self._end_s):
            self.view.record.idle[self.name].brought_s = self._end_s - self.clock.perf_counter()

    def merge(self, ranks: Ranks) -> None:
        """Nothing: the rows are where they are."""


def _size(length: int) -> int:
    """Numbers of a parcel: whether the row has come, and its tokens."""
    return 1 + NUMBERS_PER_TOKEN * length
