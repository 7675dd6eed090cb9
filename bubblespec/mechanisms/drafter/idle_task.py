"""Training of the drafter in idle time (TLT, arXiv 2511.16665), slice by slice."""

from bubblespec.distributed.ranks import Ranks
from bubblespec.idle.task import SLICE_S, LocalWork
from bubblespec.mechanisms.drafter.training import DrafterTraining
from bubblespec.records import Span

# The saving of a slice in later rollouts is unknown, so work with a known saving comes first.
LITTLE_S = 1e-9
MAX_SHARE = 0.05  # share of the rollout so far that a slice may take, as other ranks may wait


class TrainDrafter(LocalWork):
    """Training of the drafter in one rollout on one rank."""

    name = "train_drafter"

    def __init__(self, training: DrafterTraining):
        self.training, self.clock = training, training.clock

    def next_slice(self) -> tuple[float, float]:
        return self._slice_s(), LITTLE_S * self._slice_s()

    def can_begin(self) -> bool:
        """Whether this rank is idle, and others would not wait for long."""
        return self.view.is_idle and 0 < self._slice_s() <= self._limit_s()

    def do_slice(self) -> Span:
        begin_s = self.clock.perf_counter()
        return Span("train drafter", begin_s, begin_s + self.training.run_slice(self._limit_s()))

    def finish(self, ranks: Ranks) -> None:
        """Continue with the mean of all ranks' drafters."""
        self.training.merge(ranks)

    def _slice_s(self) -> float:
        """Return predicted seconds of the shortest slice; a little where none has been timed."""
        tokens = self.training.slice_tokens()
        return tokens * self.training.token_s or LITTLE_S * bool(tokens)

    def _limit_s(self) -> float:
        elapsed_s = self.clock.perf_counter() - self.view.record.began_s
        return min(max(SLICE_S, self._slice_s()), MAX_SHARE * elapsed_s)
