"""Gradients of finished groups, a use of idle time: a rank that waits computes those of its own
samples, a slice at a time.

Every rank tells the others the rewards of the samples that it has finished and scored. A group is
complete once all rewards that it is trained on are known; then each rank knows the advantages of
those of its samples that it generated itself. A reward that comes late or not at all keeps its
group out, and the update computes those gradients as if nothing had been streamed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from bubblespec.dist.ranks import Ranks
from bubblespec.idle.work import Offer, RankView
from bubblespec.records import Span
from bubblespec.rollout.board import RankState
from bubblespec.types import Launch, Row, has_zero_std

NUM_WANTED = 2  # slices that a rank asks for at a time: the next tick is some milliseconds away


class Piece(Protocol):
    """A sample whose gradient can be computed."""

    num_tokens: int


class Stream(Protocol):
    """What computes gradients before the update (`learn.streaming.GradientStream`)."""

    is_ready: bool

    def pieces(self, rows: Sequence[Row | None], rewards: np.ndarray) -> list[Piece]: ...
    def max_tokens(self, limit_s: float) -> int: ...
    def seconds(self, num_tokens: int) -> float: ...
    def spared_s(self, num_tokens: int) -> float: ...
    def add(self, pieces: list[Piece]) -> Span: ...


class Wish(NamedTuple):
    """What a rank could do now."""

    num_slices: int
    slice_s: float
    """Expected seconds of one."""
    spared_s: float
    """Expected seconds of all ranks together that the update is spared by one."""


class GroupGradients:
    """Streamed gradients in one rollout on one rank; implements `IdleWork`."""

    name = "gradients"

    def __init__(
        self,
        launch: Launch,
        stream: Stream,
        take_rewards: Callable[[], list[tuple[Row, float]]],
        *,
        max_slice_s: float,
        scores_beside_rows: bool = True,
        only_differing: bool = False,
        frees_cache: bool = False,
    ):
        """take_rewards: this rank's rows that are trained on, finished and scored since the last
        call, with their rewards.

        max_slice_s: see `IdleConfig`; scores_beside_rows: `take_rewards` takes no time, so that it
        can be called while rows of this rank are unfinished; only_differing: leave out groups of
        equal rewards, which dynamic sampling replaces; frees_cache: there is no memory for a slice
        beside keys and values.
        """
        self.stream, self.take_rewards, self.max_slice_s = stream, take_rewards, max_slice_s
        self.scores_beside_rows, self.only_differing, self.frees_cache = (
            scores_beside_rows,
            only_differing,
            frees_cache,
        )
        self.num_kept = launch.num_kept
        self._places = {name: place for place, name in enumerate(launch.ids)}
        self._rows: dict[int, Row] = {}  # this rank's scored ones, by place
        shape = (len(launch.groups), launch.num_generations)
        self._own_rewards, self._rewards = (
            np.full(shape, np.nan),
            np.full(shape, np.nan),
        )  # the latter as of the last tick
        self._is_complete = np.zeros(len(launch.groups), bool)
        self._pieces: list[
            Piece
        ] = []  # of complete groups, not computed yet, in order of their tokens
        self._num_granted = 0  # slices
        self._wishes: list[Wish] = []  # of all ranks, in the last tick
        self._seconds = self._spared_s = (
            0.0  # of this rank's slices, and what the update is spared by them
        )

    def facts(self) -> np.ndarray:
        """Rewards of this rank's samples, NaN elsewhere, and what it could do."""
        if self.scores_beside_rows or not self.view.unfinished:
            for row, reward in self.take_rewards():
                place = self._places[row.id]
                self._rows[place], self._own_rewards.flat[place] = row, reward
        return np.append(self._own_rewards.ravel(), self._wish())

    def hear(self, facts: list[np.ndarray]) -> None:
        """The samples of groups that have become complete can be computed from now on."""
        self._wishes = [Wish(int(of_rank[-3]), *of_rank[-2:].tolist()) for of_rank in facts]
        told = np.fmax.reduce(
            [of_rank[:-3] for of_rank in facts]
        )  # of each sample one rank knows the reward
        self._rewards = told.reshape(self._rewards.shape)
        is_complete = np.isfinite(self._rewards).sum(axis=1) == self.num_kept
        for group in np.flatnonzero(is_complete & ~self._is_complete).tolist():
            numbers = np.flatnonzero(np.isfinite(self._rewards[group]))
            rewards = self._rewards[group, numbers]
            if self.only_differing and has_zero_std(rewards[None])[0]:
                continue
            rows = [
                self._rows.get(group * self._rewards.shape[1] + number)
                for number in numbers.tolist()
            ]
            self._pieces += self.stream.pieces(rows, rewards)
        self._pieces.sort(key=lambda piece: piece.num_tokens)
        self._is_complete = is_complete

    def offers(self, states: list[RankState]) -> list[Offer] | None:
        """Each rank's own slices. What is left for the update is shared by all ranks, so a slice
        saves each of them its part."""
        return [
            Offer((rank, number), wish.spared_s / len(states), wish.slice_s, False, rank)
            for rank, wish in enumerate(self._wishes if states else [])
            for number in range(wish.num_slices)
        ]

    def begin(self, view: RankView) -> list[Row]:
        """Nothing stays in the engine for it."""
        self.view = view
        return []

    def wanted(self) -> int:
        """A few slices at a time, once this rank's rows are done."""
        return max(min(self._wish().num_slices, NUM_WANTED - self._num_granted), 0)

    def start(self, offer: Offer, rank: int) -> None:
        """This rank may do one more slice."""
        self._num_granted += rank == self.view.rank

    def advance(self) -> bool:
        """One slice. Rows that have come from another rank go before."""
        if not (self._num_granted and self._can_begin()):
            return False
        self._num_granted -= 1
        if self.frees_cache:
            self.view.engine.release()
        pieces = self._next_slice()
        taken = set(map(id, pieces))
        self._pieces = [piece for piece in self._pieces if id(piece) not in taken]
        span = self.stream.add(pieces)
        self._seconds += span.end_s - span.begin_s
        self._spared_s += self.stream.spared_s(sum(piece.num_tokens for piece in pieces))
        self.view.record.slices.append(span)
        return bool(self._num_granted and self._can_begin())

    def finish(self, row: Row) -> bool:
        """It has no rows in the engine."""
        return False

    def make_room(self, count: int) -> int:
        """It has none to give."""
        return 0

    def end(self) -> None:
        """What was not computed is the update's."""

    def merge(self, ranks: Ranks) -> None:
        """The update brings the gradients together, and takes so much less time on each rank."""
        use = self.view.record.idle[self.name]
        use.seconds = self._seconds
        use.brought_s = float(ranks.gather(np.array([self._spared_s])).mean())

    def _wish(self) -> Wish:
        if not self._can_begin():
            return Wish(0, 0.0, 0.0)
        size, limit = (
            sum(piece.num_tokens for piece in self._next_slice()),
            self.stream.max_tokens(self.max_slice_s),
        )
        total = sum(piece.num_tokens for piece in self._pieces if piece.num_tokens <= limit)
        return Wish(-(-total // size), self.stream.seconds(size), self.stream.spared_s(size))

    def _next_slice(self) -> list[Piece]:
        """The longest samples that fit into one; none where all are too long for it."""
        room, chosen = self.stream.max_tokens(self.max_slice_s), []
        for piece in reversed(self._pieces):
            if piece.num_tokens <= room:
                chosen.append(piece)
                room -= piece.num_tokens
        return chosen

    def _can_begin(self) -> bool:
        is_idle = not self.view.unfinished and (self.view.engine.is_idle or not self.frees_cache)
        return is_idle and self.stream.is_ready and bool(self._next_slice())
