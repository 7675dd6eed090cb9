"""The rollout loop: forwards, the ticks between them, and idle time given to tasks.

A rank generates its rows of a step. At every tick the ranks tell each other how far their rows are
and how much idle work they could take on; every rank draws the same conclusions: it drops rows that
this step is not going to train on, and assigns the jobs of idle tasks. All leave at the same tick,
with whatever is unfinished of those. A rollout without tasks is the same loop without ticks: nobody
needs to know how far anyone is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.proposer import Proposer
from bubblespec.engine.engine import Engine
from bubblespec.engine.sampling import SamplingParams
from bubblespec.idle.task import IdleTask, RankView, assign
from bubblespec.mechanisms.episodes.episodes import Episodes
from bubblespec.planner.costs import CostModel
from bubblespec.records import ForwardRecord, IdleUse, Load, RolloutRecord, Span
from bubblespec.rollout.board import ProgressBoard, RankState
from bubblespec.rollout.table import Cutoff, RowTable
from bubblespec.types import Row


class TakeOver(Protocol):
    """Finishes the unfinished rows of all ranks in place of the loop; on all ranks or on none."""

    def is_near(self, table: RowTable) -> bool:
        """Whether it may be due soon, so that ticks have to stay frequent."""

    def is_due(self, table: RowTable, states: list[RankState]) -> bool:
        """Whether all ranks enter it at this tick: a pure function of what all ranks know."""

    def run(
        self,
        own: dict[int, Row],
        table: RowTable,
        params: SamplingParams,
        proposer: Proposer | None,
        *,
        own_engine: Engine,
        on_finished,
        record: RolloutRecord,
    ) -> None:
        """Generate the unfinished rows of all ranks to their end. own: this rank's, by index in the
        table; own_engine: the engine that they leave; on_finished: called with each of them."""


@dataclass
class RolloutLoop:
    """One rollout on one rank: make it, and `run` it once."""

    engine: Engine
    ranks: Ranks
    params: SamplingParams
    proposer: Proposer | None = None
    """Where draft tokens come from; it knows the rows already."""
    board: ProgressBoard | None = None
    """Needed where there are tasks, a tail, or rows to choose from."""
    tasks: list[IdleTask] = field(default_factory=list)
    cost: CostModel | None = None
    """Learns from every forward."""
    on_finished: Callable[[Row], None] | None = None
    """Called with each row of this rank that is trained on, once it is done and that is certain."""
    take_over: TakeOver | None = None
    """Finishes the last rows of all ranks; on all ranks or on none."""
    episodes: Episodes | None = None
    """Where an environment answers the rows' turns."""

    def run(self, rows: dict[int, Row], table: RowTable) -> RolloutRecord:
        """Generate the rows to their end, or until they are out, on the weights as they are. A rank
        that is told to stop leaves them unfinished; where there are ticks, all ranks do.

        rows: this rank's by their index in the table, in the order in which to generate them.
        """
        self.rows, self.table, self.clock = rows, table, self.ranks.clock
        self.selects = table.launch.selects
        self._handed_on: set[int] = set()  # indices of rows that on_finished has had
        self.record = RolloutRecord()
        self._unlearned: tuple[Load, float] | None = None  # of the last forward: load, seconds
        self.unfinished = {row: index for index, row in rows.items()}
        self.view = RankView(self.ranks.rank, self.engine, self.unfinished, self.record)
        if self.proposer is not None:
            self.record.acceptance = self.proposer.acceptance
        self.engine.reset()
        if self.episodes is None:
            self.engine.add(list(rows.values()))
        else:
            self._begin_episodes()
        self.record.began_s = self._last_s = self.clock.perf_counter()
        if self.tasks or self.selects or self.take_over is not None:
            self._run_with_ticks()
        else:
            while self.unfinished and not self.ranks.must_stop:
                self._advance_episodes()
                if self._can_feed:
                    self._forward()
                elif self.unfinished:
                    self._wait_for_environments()
        if self.episodes is not None:
            self.episodes.close()
        self._catch_up()
        if self.proposer is not None:
            self.proposer.take_in()
        self.record.ended_s = self.clock.perf_counter()
        return self.record

    def _begin_episodes(self) -> None:
        episodes, self.record.episodes = self.episodes, self.episodes.counts
        if self.proposer is not None:
            episodes.proposer = self.proposer
        if episodes.runs_drafts:
            self.view.begin = partial(episodes.begin, is_own=False)
        for row in self.rows.values():
            episodes.begin(row)

    @property
    def _can_feed(self) -> bool:
        engine = self.engine
        return not (engine.is_idle if self.episodes is None else engine.is_waiting)

    def _run_with_ticks(self) -> None:
        board = self.board
        self.record.idle = {task.name: IdleUse() for task in self.tasks}
        for task in self.tasks:
            task.begin(self.view)
        if self.selects:
            self._cutoff = self.table.cutoff()
        board.begin()
        while True:
            while (states := board.poll(self._state, not self.unfinished)) is not None:
                self._act_on(states)
            if board.is_over:
                break
            # Where the last tick is about to complete nothing is started: all would wait for it.
            is_ending = not self.unfinished and board.are_others_done
            goes_on = False if is_ending else self._run_slices()
            if not is_ending:
                self._advance_episodes()
            if not is_ending and self._can_feed:
                self._forward()
            elif not is_ending and self.episodes is not None and self.episodes.is_running:
                if not goes_on:
                    self._wait_for_environments()
            elif not goes_on:
                self._wait()
        for task in self.tasks:
            task.end()
        self.record.num_ticks = board.num_ticks

    def _act_on(self, states: list[RankState]) -> None:
        """What a tick changes on this rank."""
        capacities, lengths, *published = zip(
            *(np.split(state.facts, self._ends) for state in states), strict=True
        )
        self.table.sync(lengths)
        for task, of_ranks in zip(self.tasks, published, strict=True):
            task.receive(of_ranks)
        if self.selects:
            self._select()
        if self.take_over is not None and self.take_over.is_due(self.table, states):
            self._let_take_over()
            return
        jobs = [task.jobs() for task in self.tasks]
        given = assign(jobs, capacities, [not state.is_done for state in states])
        for rank, of_rank in enumerate(given):
            for number, job in of_rank:
                self.tasks[number].accept(job, rank)
                if rank == self.ranks.rank:
                    self.record.idle[self.tasks[number].name].expected_s += job.saves_s
        # Jobs may follow jobs; the cutoff and the tail wait for lengths. The end needs no frequent
        # ticks: a rank that is done posts at once.
        is_take_over_near = self.take_over is not None and self.take_over.is_near(self.table)
        self.board.is_relaxed = not (self.selects or is_take_over_near or any(given))

    def _select(self) -> None:
        """Drop own rows that are out, and hand on those that are in."""
        self._cutoff: Cutoff = self.table.cutoff()
        self._drop([row for row, index in self.unfinished.items() if self._cutoff.is_out[index]])
        own = self._cutoff.is_in & (self.table.rank_of == self.ranks.rank)
        for index in np.flatnonzero(own).tolist():
            self._hand_on(index)

    def _drop(self, rows: list[Row]) -> None:
        """Take rows out of the engine; they keep their tokens. Those that wait go first, so that
        none of them takes the slot of another, and then from the last slot down."""
        slots = {row: slot for slot, row in enumerate(self.engine.rows)}
        for row in sorted(rows, key=lambda row: slots.get(row, len(slots)), reverse=True):
            if self.episodes is None:
                self.engine.drop(row)
            else:
                self.episodes.abandon(row)
            self._note_end(row)

    def _let_take_over(self) -> None:
        """Go on with the unfinished rows of all ranks, on all of them together."""

        def finish(row: Row) -> None:
            self._hand_on(self._note_end(row))

        own = {index: row for row, index in self.unfinished.items()}
        parts = {"own_engine": self.engine, "on_finished": finish, "record": self.record}
        self.take_over.run(own, self.table, self.params, self.proposer, **parts)
        self.board.go_on()
        self._last_s = self.clock.perf_counter()

    def _hand_on(self, index: int) -> None:
        """A row is done, and trained on."""
        if index not in self._handed_on and self.on_finished is not None:
            self._handed_on.add(index)
            self.on_finished(self.rows[index])

    def _note_end(self, row: Row) -> int:
        """A row of this step is done, or out; returns its index."""
        index = self.unfinished.pop(row)
        self.table.note(index, len(row.tokens), row.finish is not None)
        return index

    def _note_active(self) -> int:
        """How far this rank's rows in slots are; returns the length of the longest."""
        longest = 0
        for row, length in zip(self.engine.rows, self.engine.lengths.tolist(), strict=True):
            if (index := self.unfinished.get(row)) is not None:
                length -= len(row.prompt)
                if self.episodes is not None:
                    length = self.episodes.min_length(row, length)
                self.table.note(index, length, False)
                longest = max(longest, length)
        return longest

    def _run_slices(self) -> bool:
        """A slice of each task; whether there is more to do of any."""
        goes_on = any([task.run_slice() for task in self.tasks])  # noqa: C419 (of each)
        if self.record.slices:
            self._last_s = max(self._last_s, self.record.slices[-1].end_s)
        return goes_on

    def _state(self) -> RankState:
        """What this rank tells the others in the next tick."""
        self._note_active()
        capacities = np.array([task.capacity() for task in self.tasks], np.float64)
        facts = [capacities, self.table.local_state(), *(task.publish() for task in self.tasks)]
        self._ends = np.cumsum([len(of) for of in facts])[:-1]  # the same on all ranks
        return RankState(len(self.unfinished), self.ranks.must_stop, np.concatenate(facts))

    def _wait(self) -> None:
        begin = self.clock.perf_counter()
        if (states := self.board.wait(self._state)) is not None:
            self._act_on(states)
        self._last_s = self.clock.perf_counter()
        self.record.waits.append(Span("wait", begin, self._last_s))

    def _advance_episodes(self) -> None:
        """Take in what environments have answered."""
        if self.episodes is not None:
            self._take_finished(self.episodes.advance())
            self._last_s = self.clock.perf_counter()

    def _wait_for_environments(self) -> None:
        begin, record = self.clock.perf_counter(), self.record
        busy_until_s = max(
            (of[-1].end_s for of in (record.forwards, record.slices) if of), default=0
        )
        if record.waits and record.waits[-1].end_s > busy_until_s:
            begin = record.waits.pop().begin_s  # a slow tool would leave thousands of them
        self.episodes.wait()
        self._last_s = self.clock.perf_counter()
        record.waits.append(Span("wait", begin, self._last_s))

    def _forward(self) -> None:
        engine, unfinished, begin = self.engine, self.unfinished, self.clock.perf_counter()
        own_rows, in_engine = len(unfinished), len(engine.rows) + len(engine.queue)
        if self.episodes is not None:  # some are not in it yet
            own_rows = sum(row in unfinished for row in (*engine.rows, *engine.queue))
        ahead_rows = in_engine - own_rows
        drafts, limit = self.proposer, self.view.max_prefill_tokens
        finished, load = engine.step(self.params, drafts, limit, self._catch_up)
        if load is None:
            return
        end = self.clock.perf_counter()
        propose_s, looked_up = 0.0, 0
        if self.proposer is not None:
            propose_s, looked_up = self.proposer.take_spent()
        seconds = (self._last_s, end, end - begin - propose_s, propose_s)
        record = ForwardRecord(*seconds, *load, own_rows, ahead_rows, looked_up)
        self.record.forwards.append(record)
        self._unlearned = load, end - self._last_s - propose_s
        self._last_s = end
        if self.episodes is not None:
            finished = self.episodes.advance(finished)
            self._last_s = self.clock.perf_counter()
        self._take_finished(finished)

    def _catch_up(self) -> None:
        """Take in what the forward before said, while a GPU computes the next one."""
        if self.cost is not None and self._unlearned is not None:
            self.cost.observe(*self._unlearned)
        self._unlearned = None
        if self.proposer is not None:
            self.proposer.catch_up(is_free=self.ranks.device.type == "cuda")

    def _take_finished(self, finished: list[Row]) -> None:
        unfinished = self.unfinished
        for row in finished:
            if row not in unfinished:
                for task in self.tasks:
                    task.on_finished(row)
                continue
            index = self._note_end(row)
            if not self.selects:
                self._hand_on(index)
        if self.selects and unfinished:
            longest = self._note_active()
            if finished or longest >= self._cutoff.limit:
                self._select()
