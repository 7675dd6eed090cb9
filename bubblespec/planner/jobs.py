"""A piece of idle work, as the planner values it and ranks take it on."""

from collections.abc import Hashable
from typing import NamedTuple


class Job(NamedTuple):
    """A piece of idle work that a rank could do."""

    key: Hashable
    """Key of the piece in its task; for a draft its `SampleId`."""
    saves_s: float
    """Predicted seconds saved of the run's wall time; 0 where nothing is known yet."""
    costs_s: float
    """Predicted seconds of work; free where the rank waits."""
    co_scheduled: bool
    """Whether the job is worth slowing down a rank's own rows."""
    prompt: tuple[int, ...] = ()
    """Prompt of a draft."""
