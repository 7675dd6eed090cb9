"""Work for idle time: the interface of tasks, and the assignment of jobs to ranks.

A rank is idle once it has finished its rows and waits for the slowest rank. While it still decodes
few rows, jobs may be co-scheduled: their rows join its forwards at little cost.
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
NUM_WANTED = 2  # slices assigned to a rank at a time: the next tick is some milliseconds away


@dataclass
class RankView:
    """A task's view of its own rank in a rollout."""

    rank: int
    engine: Engine
    unfinished: dict[Row, int]
    """Unfinished rows of this step, with their index in the launch."""
    record: RolloutRecord
    """Record of this rollout, so far."""
    max_prefill_tokens: int | None = None
    """Maximum number of prompt tokens in one forward, None for no limit. Set by tasks that feed
    prompts of their own a little at a time."""
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


class IdleTask:
    """One use of idle time in one rollout. Between its methods the loop runs forwards and ticks."""

    name = "task"
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

    def jobs(self) -> Iterable[Job]:
        """Return all unassigned jobs, most urgent first, co-scheduled ones before others.

        Called after every tick. The same on every rank: a pure function of received numbers.
        """
        return ()

    def capacity(self) -> int:
        """Return how many more jobs this rank could begin now."""
        return 0

    def accept(self, job: Job, rank: int) -> None:
        """Note that a job is assigned to a rank. Called on all ranks."""

    def run_slice(self) -> bool:
        """Put rows into the engine, or do a slice of work too short to keep other ranks waiting.

        Called between two forwards; return whether another slice is due. No collectives here.
        """
        return False

    def on_finished(self, row: Row) -> None:
        """Take a complete row that is not of this step."""

    def end(self) -> None:
        """End the work of this rank, at the last tick. No forward comes after it."""

    def finish(self, ranks: Ranks) -> None:
        """Exchange the results after the rollout, on all ranks together. May use collectives."""


class SliceTask(IdleTask):
    """Work that each rank does for itself, in slices, once it has nothing else to do."""

    num_granted = 0
    """Slices assigned to this rank and not begun."""
    _by_rank: Sequence[np.ndarray] = ()
    """What ranks have published in the last tick."""

    def next_slices(self) -> tuple[int, float, float]:
        """Return the number of slices, the predicted seconds of one, and its saving on all ranks.

        Called where `can_begin`."""
        raise NotImplementedError

    def can_begin(self) -> bool:
        """Whether a slice is due that would keep no other rank waiting."""
        raise NotImplementedError

    def do_slice(self) -> Span:
        """Do one slice; return its span of time."""
        raise NotImplementedError

    def publish(self) -> np.ndarray:
        """Return `next_slices`, zeros where none can begin."""
        return np.array(self.next_slices() if self.can_begin() else (0, 0.0, 0.0))

    def receive(self, published: list[np.ndarray]) -> None:
        """Keep the slices that each rank could do."""
        self._by_rank = published

    def jobs(self) -> Iterable[Job]:
        """Return each rank's own slices, whose savings all ranks share.

        Slices are co-scheduled: a rank with rows publishes them only while all its rows wait."""
        return [
            Job((rank, number), saved_s / len(self._by_rank), slice_s, True, rank)
            for rank, (count, slice_s, saved_s) in enumerate(self._by_rank)
            for number in range(int(count))
        ]

    def capacity(self) -> int:
        """Return how many more slices to assign, a few at a time."""
        count = self.next_slices()[0] if self.can_begin() else 0
        return max(min(count, NUM_WANTED - self.num_granted), 0)

    def accept(self, job: Job, rank: int) -> None:
        """Count a slice of this rank."""
        self.num_granted += rank == self.view.rank

    def run_slice(self) -> bool:
        """Do one slice, unless the rank has other work by now."""
        if not (self.num_granted and self.can_begin()):
            return False
        self.num_granted -= 1
        span = self.do_slice()
        self.view.record.slices.append(span)
        self.view.record.idle[self.name].seconds += span.end_s - span.begin_s
        return bool(self.num_granted and self.can_begin())


def assign(
    jobs: list[Iterable[Job]], capacities: Sequence[Sequence[float]], has_rows: list[bool]
) -> list[list[tuple[int, Job]]]:
    """Return the jobs that a tick assigns to each rank, by rank, each with the number of its task.

    A rank with rows of its own gets co-scheduled jobs only, by seconds saved. An idle rank gets
    jobs of the task whose first job saves most per second. A pure function of shared data, so no
    job is assigned twice.

    jobs: by task, most urgent first, co-scheduled ones before others; capacities: by rank and task;
    has_rows: by rank.
    """
    left = [list(jobs_of_task) for jobs_of_task in jobs]
    rooms = [list(room) for room in capacities]

    def heads(rank: int) -> dict[int, Job]:
        """Return the next job of each task that the rank may take, by task."""
        found = {}
        for task in (task for task, room in enumerate(rooms[rank]) if room > 0):
            job = next((job for job in left[task] if job.rank in (None, rank)), None)
            if job and (job.co_scheduled or not has_rows[rank]):
                found[task] = job
        return found

    for rank, room in enumerate(rooms):
        if not has_rows[rank]:
            worth = {t: job.saves_s / max(job.costs_s, 1e-9) for t, job in heads(rank).items()}
            best = max(worth, key=worth.__getitem__, default=None)
            rooms[rank] = [count if task == best else 0 for task, count in enumerate(room)]
    given: list[list[tuple[int, Job]]] = [[] for _ in rooms]
    # Round-robin: the others would wait for a rank that got all jobs.
    in_turn = sorted(range(len(rooms)), key=lambda rank: has_rows[rank])
    while in_turn:
        for rank in list(in_turn):
            if not (found := heads(rank)):
                in_turn.remove(rank)
                continue
            task, job = max(found.items(), key=lambda item: item[1].saves_s)
            given[rank].append((task, job))
            left[task].remove(job)
            rooms[rank][task] -= 1
    return given
