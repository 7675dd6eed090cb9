"""Use of idle time: the interface of each rank's own work, and the assignment of drafts to ranks.

A rank is idle once it has finished its rows and waits for the slowest rank. While it still decodes
few rows, drafts may be co-scheduled: their rows join its forwards at little cost.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.engine import Engine
from bubblespec.planner.jobs import Job
from bubblespec.records import RolloutRecord, Span
from bubblespec.types import Row

NOTHING = np.empty(0)
SLICE_S = 0.05  # seconds of uninterrupted work; the smallest piece may take longer
LEAST_S = 1e-9


@dataclass
class RankView:
    """The view of idle work on its own rank in a rollout."""

    rank: int
    engine: Engine
    unfinished: dict[Row, int]
    """Unfinished rows of this step, with their index in the launch."""
    record: RolloutRecord
    """Record of this rollout, so far."""
    max_prefill_tokens: int | None = None
    """Maximum number of prompt tokens in one forward, None for no limit. Set where prompts of
    drafts are fed a little at a time."""
    begin: Callable[[Row], None] | None = None
    """The feed's own way to begin a row of a coming step; None: the row goes into the engine."""

    @property
    def is_idle(self) -> bool:
        """Whether this rank has nothing to generate: no rows, or rows that all wait."""
        return self.engine.is_waiting

    def add(self, row: Row) -> None:
        """Begin a row of a coming step."""
        if self.begin is None:
            self.engine.add([row])
        else:
            self.begin(row)


class LocalWork:
    """Work that each rank does for itself in a rollout, in slices, when it has nothing else to do.

    Between its methods the loop runs forwards and ticks."""

    name = "work"
    """Name in metrics (`idle/NAME/...`)."""
    view: RankView

    def begin(self, view: RankView) -> None:
        """Start with a rollout."""
        self.view = view

    def publish(self) -> np.ndarray:
        """Return this rank's numbers for the next tick, float64, as long on all ranks."""
        return NOTHING

    def receive(self, published: list[np.ndarray]) -> None:
        """Use the numbers of all ranks in a completed tick, by rank."""

    def can_begin(self) -> bool:
        """Whether a slice is due that would keep no other rank waiting."""
        raise NotImplementedError

    def next_slice(self) -> tuple[float, float]:
        """Return predicted seconds of the next slice, and of wall time saved, where `can_begin`."""
        raise NotImplementedError

    def do_slice(self) -> Span:
        """Do one slice; return its span of time. No collectives here."""
        raise NotImplementedError

    def finish(self, ranks: Ranks) -> None:
        """Exchange the results after the rollout, on all ranks together. May use collectives."""

    @property
    def rate(self) -> float:
        """Predicted seconds saved per second of the next slice; 0 where none can begin."""
        if not self.can_begin():
            return 0.0
        slice_s, saved_s = self.next_slice()
        return saved_s / max(slice_s, LEAST_S)

    def run_slice(self) -> None:
        """Do one slice, and record it."""
        use = self.view.record.idle[self.name]
        use.expected_s += self.next_slice()[1]
        span = self.do_slice()
        self.view.record.slices.append(span)
        use.seconds += span.end_s - span.begin_s


def assign(
    jobs: Iterable[Job], capacities: Sequence[float], has_rows: list[bool]
) -> list[list[Job]]:
    """Return the jobs that a tick assigns to each rank, by rank.

    Round-robin, ranks that wait first: the others would wait for a rank that got all jobs. A rank
    with rows of its own gets co-scheduled jobs only. A pure function of shared data, so no job is
    assigned twice.

    jobs: most urgent first, co-scheduled ones before others; capacities, has_rows: by rank."""
    left, rooms = list(jobs), list(capacities)
    given: list[list[Job]] = [[] for _ in rooms]
    in_turn = sorted(range(len(rooms)), key=lambda rank: has_rows[rank])
    while in_turn:
        for rank in list(in_turn):
            if rooms[rank] <= 0 or not left or (has_rows[rank] and not left[0].co_scheduled):
                in_turn.remove(rank)
                continue
            given[rank].append(left.pop(0))
            rooms[rank] -= 1
    return given
