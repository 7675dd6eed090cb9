"""Work for idle time: what a task is, and which rank does what.

Idle time is where a rank has finished its rows and waits for the slowest one. Where it still
decodes, but so few rows that others could join its forwards at little cost, tasks may be
co-scheduled.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.engine import Engine
from bubblespec.planner.drafts import Job
from bubblespec.records import RolloutRecord, Span
from bubblespec.types import Row

NOTHING = np.empty(0)
SLICE_S = 0.05  # of work that is not interrupted; its smallest piece may take longer
NUM_WANTED = 2  # slices that a rank asks for at a time: the next tick is some milliseconds away


@dataclass
class RankView:
    """What a task sees of its own rank during a rollout."""

    rank: int
    engine: Engine
    unfinished: dict[Row, int]
    """Rows of this step that are not done, with their index in the launch."""
    record: RolloutRecord
    """Of this rollout, so far."""
    max_prefill_tokens: int | None = None
    """Maximum number of prompt tokens in one forward, None for no limit: a task may set it, to feed
    prompts of its own a little at a time."""
    begin: Callable[[Row], None] | None = None
    """Starts a row of a coming step, where rows are not put into the engine by themselves."""

    @property
    def is_idle(self) -> bool:
        """Whether this rank has nothing to generate: neither rows of its own nor others, or all of
        them wait for their environments."""
        return self.engine.is_waiting

    def add(self, row: Row) -> None:
        """A row of a coming step."""
        if self.begin is None:
            self.engine.add([row])
        else:
            self.begin(row)


class IdleTask:
    """One use of idle time in one rollout. Between its methods the loop runs forwards and ticks."""

    name = "task"
    """In metrics (`idle/NAME/...`)."""
    view: RankView

    def begin(self, view: RankView) -> None:
        """Start with a rollout."""
        self.view = view

    def publish(self) -> np.ndarray:
        """What this rank tells the others in the next tick, float64, of one length on all ranks."""
        return NOTHING

    def receive(self, published: list[np.ndarray]) -> None:
        """What all ranks have published in a tick that has completed, by rank."""

    def jobs(self) -> Iterable[Job]:
        """Every job that no rank has been given, most urgent first, and co-scheduled ones before
        others. Asked after every tick. The same on every rank: from what was received, and from
        what ranks share."""
        return ()

    def capacity(self) -> int:
        """How many more jobs this rank could begin now."""
        return 0

    def accept(self, job: Job, rank: int) -> None:
        """A rank has been given the job, and no other rank has. Called on all ranks."""

    def run_slice(self) -> bool:
        """Between two forwards: put rows into the engine, or do a slice of work that is short
        enough for nobody to wait for it; returns whether there is another slice to do. No
        collectives here."""
        return False

    def on_finished(self, row: Row) -> None:
        """A row that is not of this step is done."""

    def end(self) -> None:
        """The last tick: all ranks leave the rollout. No forward comes after it."""

    def finish(self, ranks: Ranks) -> None:
        """After the rollout, on all ranks together: bring what each has done to where it is needed.
        Collectives may be used."""


class SliceTask(IdleTask):
    """Work that each rank does for itself, in slices, once it has nothing else to do. A subclass
    says what the next slice takes, and does it."""

    num_granted = 0
    """Slices that this rank has been given and has not begun."""
    _of_ranks: Sequence[np.ndarray] = ()
    """What they have published in the last tick."""

    def next_slices(self) -> tuple[int, float, float]:
        """Slices that this rank could do, the expected seconds of one, and the seconds that one
        saves all ranks together. Asked where `can_begin`."""
        raise NotImplementedError

    def can_begin(self) -> bool:
        """Whether there is a slice to do that would keep no other rank waiting."""
        raise NotImplementedError

    def do_slice(self) -> Span:
        """One slice; returns when."""
        raise NotImplementedError

    def publish(self) -> np.ndarray:
        """`next_slices`, 0 where none can begin."""
        return np.array(self.next_slices() if self.can_begin() else (0, 0.0, 0.0))

    def receive(self, published: list[np.ndarray]) -> None:
        """What each rank could do."""
        self._of_ranks = published

    def jobs(self) -> Iterable[Job]:
        """Each rank's own slices. What one saves is shared by all ranks. A rank that has rows and
        publishes slices waits for environments."""
        return [
            Job((rank, number), saved_s / len(self._of_ranks), slice_s, True, rank)
            for rank, (count, slice_s, saved_s) in enumerate(self._of_ranks)
            for number in range(int(count))
        ]

    def capacity(self) -> int:
        """A few slices at a time."""
        count = self.next_slices()[0] if self.can_begin() else 0
        return max(min(count, NUM_WANTED - self.num_granted), 0)

    def accept(self, job: Job, rank: int) -> None:
        """See `IdleTask`."""
        self.num_granted += rank == self.view.rank

    def run_slice(self) -> bool:
        """One slice, unless something else has come."""
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
    """The jobs that each rank gets in a tick, by rank, each with the number of its task.

    jobs: of each task, most urgent first, and co-scheduled ones before others; capacities: of each
    rank, for each task; has_rows: of each rank. A rank with rows of its own gets co-scheduled jobs
    alone, those that save most first. An idle rank does one thing at a time: jobs of the task whose
    first one saves most per second. A pure function of what all ranks know, so no job is given
    twice and nobody has to agree.
    """
    left = [list(of_task) for of_task in jobs]
    rooms = [list(room) for room in capacities]

    def heads(rank: int) -> dict[int, Job]:
        """The next job of each task that the rank may take, by task."""
        found = {}
        for task in (task for task, room in enumerate(rooms[rank]) if room > 0):
            job = next((job for job in left[task] if job.rank in (None, rank)), None)
            if job and (job.co_scheduled or not has_rows[rank]):
                found[task] = job
        return found

    for rank, room in enumerate(rooms):
        if not has_rows[rank]:
            worth = {t: job.saves_s / max(job.costs_s, 1e-9) for t, job in heads(rank).items()}
            best = max(worth, key=worth.get, default=None)
            rooms[rank] = [count if task == best else 0 for task, count in enumerate(room)]
    given: list[list[tuple[int, Job]]] = [[] for _ in rooms]
    # One job each in turn: a rank that got all of them would be the one that the others wait for.
    in_turn = sorted(range(len(rooms)), key=lambda rank: has_rows[rank])
    while in_turn:
        for rank in list(in_turn):
            if not (of_tasks := heads(rank)):
                in_turn.remove(rank)
                continue
            task = max(of_tasks, key=lambda task, of_tasks=of_tasks: of_tasks[task].saves_s)
            given[rank].append((task, of_tasks[task]))
            left[task].remove(of_tasks[task])
            rooms[rank][task] -= 1
    return given
