"""Training the drafter, a use of idle time: a rank that has nothing better to do learns from recent
responses, slice by slice."""

from typing import Protocol

import numpy as np

from bubblespec.dist.ranks import Ranks
from bubblespec.idle.work import Offer, RankView
from bubblespec.records import Span, total_s
from bubblespec.rollout.board import RankState
from bubblespec.types import Row

NUM_WANTED = 2  # slices that a rank asks for at a time: the next tick is some milliseconds away
# What a slice saves in later rollouts is not known, so it comes after whatever saves something.
LITTLE_S = 1e-9
MOST_SHARE = (
    0.05  # a slice is no longer than this share of the rollout so far: the others wait for its end
)


class Training(Protocol):
    """What trains the drafter (`learn.idle_training.IdleTraining`)."""

    token_s: float

    def slice_tokens(self) -> int: ...
    def run_slice(self, limit_s: float) -> float: ...
    def merge(self, ranks: Ranks, rollout_s: float) -> int: ...


class TrainDrafter:
    """Training of the drafter in one rollout on one rank; implements `IdleWork`."""

    name = "train_drafter"

    def __init__(self, training: Training, *, max_slice_s: float, num_ranks: int, clock):
        """max_slice_s: see `IdleConfig`."""
        self.training, self.max_slice_s, self.clock = training, max_slice_s, clock
        self._wishes = np.zeros(
            num_ranks
        )  # seconds of a slice of each rank, 0 where it cannot do any
        self._num_granted = 0
        self._seconds = 0.0

    def facts(self) -> np.ndarray:
        """How long a slice of this rank takes; 0 if it cannot do one now."""
        return np.array([self._slice_s() if self._can_begin() else 0.0])

    def hear(self, facts: list[np.ndarray]) -> None:
        """What all could do."""
        self._wishes = np.concatenate(facts)

    def offers(self, states: list[RankState]) -> list[Offer] | None:
        """A few slices of each rank that could do some."""
        if not states:
            return []
        return [
            Offer((rank, number), LITTLE_S, slice_s, False, rank)
            for rank, slice_s in enumerate(self._wishes.tolist())
            for number in range(NUM_WANTED if slice_s else 0)
        ]

    def begin(self, view: RankView) -> list[Row]:
        """Nothing stays in the engine for it."""
        self.view = view
        return []

    def wanted(self) -> int:
        """A few slices, where this rank has nothing else."""
        return max(NUM_WANTED - self._num_granted, 0) if self._can_begin() else 0

    def start(self, offer: Offer, rank: int) -> None:
        """This rank may do one more slice."""
        self._num_granted += rank == self.view.rank

    def advance(self) -> bool:
        """One slice, unless something else has come."""
        if not (self._num_granted and self._can_begin()):
            return False
        self._num_granted -= 1
        begin_s = self.clock.perf_counter()
        if seconds := self.training.run_slice(self._limit_s()):
            self.view.record.slices.append(Span("train drafter", begin_s, begin_s + seconds))
            self._seconds += seconds
        return bool(self._num_granted)

    def finish(self, row: Row) -> bool:
        """It has no rows in the engine."""
        return False

    def make_room(self, count: int) -> int:
        """It has none to give."""
        return 0

    def end(self) -> None:
        """What has been learnt stays; what has been added to the gradient goes on in the next
        rollout."""

    def merge(self, ranks: Ranks) -> None:
        """All ranks go on with the mean of what each has learnt."""
        record = self.view.record
        self.training.merge(ranks, record.own_s + total_s(record.shared, "shared"))
        self.view.record.idle[self.name].seconds = self._seconds

    def _slice_s(self) -> float:
        """Expected seconds of the shortest slice; a little where none has been timed."""
        return self.training.slice_tokens() * self.training.token_s or LITTLE_S * bool(
            self.training.slice_tokens()
        )

    def _limit_s(self) -> float:
        elapsed_s = self.clock.perf_counter() - self.view.record.began_s
        return min(self.max_slice_s, MOST_SHARE * elapsed_s)

    def _can_begin(self) -> bool:
        is_idle = not self.view.unfinished and self.view.engine.is_idle
        return is_idle and 0 < self._slice_s() <= self._limit_s()
