"""Training the drafter (TLT, arXiv 2511.16665): a rank that has nothing better to do learns from
recent responses, slice by slice."""

from collections.abc import Iterable

import numpy as np

from bubblespec.dist.ranks import Ranks
from bubblespec.draft.drafter_training import DrafterTraining
from bubblespec.idle.task import NUM_WANTED, SLICE_S, IdleTask, Job
from bubblespec.records import Span

# What a slice saves in later rollouts is not known, so it comes after whatever saves something.
LITTLE_S = 1e-9
MAX_SHARE = 0.05  # of the rollout so far that a slice may take: the others wait for its end


class TrainDrafter(IdleTask):
    """Training of the drafter in one rollout on one rank."""

    name = "train_drafter"

    def __init__(self, training: DrafterTraining):
        self.training, self.clock = training, training.clock
        self._slices_s = np.empty(0)  # of each rank, 0 where it cannot do any

    def publish(self) -> np.ndarray:
        """How long a slice of this rank takes; 0 if it cannot do one now."""
        return np.array([self._slice_s() if self._can_begin() else 0.0])

    def receive(self, published: list[np.ndarray]) -> None:
        """What all could do."""
        self._slices_s = np.concatenate(published)

    def jobs(self) -> Iterable[Job]:
        """A few slices of each rank that could do some."""
        return [
            Job((rank, number), LITTLE_S, slice_s, False, rank)
            for rank, slice_s in enumerate(self._slices_s.tolist())
            for number in range(NUM_WANTED if slice_s else 0)
        ]

    def capacity(self) -> int:
        """A few slices, where this rank has nothing else."""
        return max(NUM_WANTED - self.num_granted, 0) if self._can_begin() else 0

    def run_slice(self) -> bool:
        """One slice, unless something else has come."""
        if not (self.num_granted and self._can_begin()):
            return False
        self.num_granted -= 1
        begin_s = self.clock.perf_counter()
        if seconds := self.training.run_slice(self._limit_s()):
            self.view.record.slices.append(Span("train drafter", begin_s, begin_s + seconds))
            self.view.record.idle[self.name].seconds += seconds
        return bool(self.num_granted)

    def finish(self, ranks: Ranks) -> None:
        """All ranks go on with the mean of what each has learned."""
        self.training.merge(ranks)

    def _slice_s(self) -> float:
        """Expected seconds of the shortest slice; a little where none has been timed."""
        tokens = self.training.slice_tokens()
        return tokens * self.training.token_s or LITTLE_S * bool(tokens)

    def _limit_s(self) -> float:
        elapsed_s = self.clock.perf_counter() - self.view.record.began_s
        return min(max(SLICE_S, self._slice_s()), MAX_SHARE * elapsed_s)

    def _can_begin(self) -> bool:
        return self.view.is_idle and 0 < self._slice_s() <= self._limit_s()
