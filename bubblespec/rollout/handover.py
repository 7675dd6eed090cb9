"""Rows that change ranks within a rollout: a rank that has none left takes some of the rank that is expected to end last.

Decided by all ranks alike, from what a tick has told. The row's tokens, with their log-probabilities, travel in the next tick, to
all ranks, who know from the decision how long they are; the new rank feeds prompt and tokens again and goes on. A row that ends
before it can be sent stays where it is.
"""

from collections.abc import Callable, Iterator

import numpy as np

from bubblespec.ranks.progress import RankState
from bubblespec.records import Row
from bubblespec.rollout.moves import Move
from bubblespec.rollout.standing import Standing

NUMBERS_PER_TOKEN = 3  # its id and both log-probabilities, all exact as float64


class Handover:
    """The moves of one rollout, as one rank sees them."""

    def __init__(
        self,
        standing: Standing,
        plan_moves: Callable[[Standing, list[RankState]], list[Move]],
        max_new_tokens: int,
        on_taken: Callable[[Row], None],
    ):
        """plan_moves: a pure function of what all ranks know; on_taken: called with each row that has come to this rank."""
        self.standing, self.max_new_tokens, self.on_taken = standing, max_new_tokens, on_taken
        self._plan_moves = plan_moves
        self._moves: list[tuple[Move, int]] = []  # under way, with the tokens that go with each
        self.parcels = np.empty(0)
        """What this rank sends with the next tick, float64."""

    def plan(self, states: list[RankState]) -> list[int]:
        """Decide on moves after a tick; returns the places of this rank's rows that are to go, each of which it either packs or
        keeps, as it has ended."""
        told = self.standing.told
        moves = self._plan_moves(self.standing, states)
        self._moves = [(move, int(told[move.row])) for move in moves]
        self.parcels = np.zeros(sum(_size(length) for _, length in self._moves))
        return [move.row for move, _ in self._moves if move.source == self.standing.rank]

    def pack(self, place: int, row: Row) -> None:
        """Put a row, which has left the engine, into the parcels. What it has gained since the tick is generated again."""
        for (move, length), begin in self._offsets():
            if move.row == place:
                numbers = np.concatenate((row.tokens[:length], row.logprob[:length], row.full_logprob[:length]), dtype=np.float64)
                self.parcels[begin] = 1.0
                self.parcels[begin + 1 : begin + _size(length)] = numbers

    def arrived(self, states: list[RankState]) -> list[tuple[int, Row | None]]:
        """The moves that this tick completes, as far as they concern this rank: places, each with the row that has come, or None
        where one has gone."""
        here = []
        for (move, length), begin in self._offsets():
            parcel = states[move.source].facts[len(self.standing.owners) + begin :][: _size(length)]
            if parcel[0] == 0.0:
                continue
            self.standing.owners[move.row] = move.target
            if move.source == self.standing.rank:
                here.append((move.row, None))
            elif move.target == self.standing.rank:
                row = self.standing.make_row(move.row, self.max_new_tokens)
                tokens, logprob, full_logprob = parcel[1:].reshape(NUMBERS_PER_TOKEN, length)
                row.tokens, row.logprob = tokens.astype(np.int64), logprob.astype(np.float32)
                row.full_logprob = full_logprob.astype(np.float32)
                self.on_taken(row)
                here.append((move.row, row))
        self._moves, self.parcels = [], np.empty(0)
        return here

    def _offsets(self) -> Iterator[tuple[tuple[Move, int], int]]:
        begin = 0
        for move, length in self._moves:
            yield (move, length), begin
            begin += _size(length)


def _size(length: int) -> int:
    """Numbers of a parcel: whether the row has come, and its tokens."""
    return 1 + NUMBERS_PER_TOKEN * length
