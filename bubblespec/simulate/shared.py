"""The shared tail in virtual time: what a forward of all ranks together takes.

    T = launch + (forward of one rank with the same load - launch) / ranks + all-reduces

Every rank reads a share of the weights and of the keys and values, and computes that share;
starting kernels takes as long as before, as if these forwards were CUDA graphs too. Shares are
taken to be equal: key/value heads that ranks have in common are counted once. An all-reduce has one
latency for any number of rows, as in the tail they are few.
"""

from dataclasses import dataclass

from bubblespec.errors import InputError
from bubblespec.records import Load

PER_LAYER = 2  # all-reduces: behind the attention, and behind the MLP


@dataclass(frozen=True)
class SharedModel:
    """What is given of it."""

    all_reduce_us: float = 10.0
    """Microseconds of one."""
    layers: int = 28
    launch_ms: float = 3.0
    """Milliseconds of a forward that its ranks do not share, see `simulate.analytic`."""
    exchange_us: float = 100.0
    """Microseconds in which the ranks tell each other their proposals, from host to host."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 0:
                raise InputError(f"{name}: {value} must be at least 0")


class SharedCost:
    """Seconds of forwards of all ranks together."""

    def __init__(self, cost, model: SharedModel, num_ranks: int):
        """cost: of one rank's forwards, an object with seconds(load)."""
        self.cost, self.num_ranks, self.launch_s = cost, num_ranks, model.launch_ms * 1e-3
        self.fixed_s = self.launch_s + PER_LAYER * model.layers * model.all_reduce_us * 1e-6

    def seconds(self, load: Load) -> float:
        """See `ForwardCost.seconds`."""
        return self.fixed_s + max(self.cost.seconds(load) - self.launch_s, 0.0) / self.num_ranks
