"""The rollout loop: forwards, the ticks between them, and the use of idle time.

A rank generates its rows of a step. At every tick the ranks exchange the lengths of their rows and
their capacity for idle work, and draw the same conclusions: they abort rows that this step is not
going to train on, begin a take-over, or assign drafts of coming steps. All leave at the same tick;
unfinished drafts end there. A rollout that needs none of these is the same loop without ticks.
"""

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.engine import Engine
from bubblespec.records import ForwardRecord, IdleUse, RolloutRecord, Span
from bubblespec.rollout.board import ProgressSync, RankState
from bubblespec.rollout.plan import IdleTask, RankView, RolloutPlan
from bubblespec.rollout.table import Cutoff
from bubblespec.types import Load, Row


class RolloutLoop:
    """One rollout on one rank, to be `run` once."""

    def __init__(self, engine: Engine, ranks: Ranks, board: ProgressSync | None, plan: RolloutPlan):
        """board: needed for idle work, a take-over, or a launch that selects groups."""
        self.engine, self.ranks, self.board, self.plan = engine, ranks, board, plan
        self.table, self.proposer, self.feed = plan.table, plan.proposer, plan.feed
        self.idle_drafts, self.works = plan.idle_drafts, plan.works
        self.clock, self.selects = ranks.clock, plan.launch.selects
        self.record = RolloutRecord()
        self.unfinished = dict(plan.rows)
        num_rows = len(self.table.rank_of)
        self.view = RankView(ranks.rank, engine, self.unfinished, self.record, num_rows)
        self._submitted: set[int] = set()  # numbers of rows that are scored
        self._unlearned: tuple[Load, float] | None = None  # load and seconds of the last forward
        self._cutoff: Cutoff | None = self.table.cutoff() if self.selects else None
        self.last_s = 0.0  # when the last forward, wait or slice ended

    def run(self) -> RolloutRecord:
        """Generate rows to their end, or until the cutoff excludes them.

        On a stop request rows stay unfinished: on all ranks with ticks, else on this one."""
        self.engine.reset()
        self.feed.start(self.view, self.proposer)
        self.record.began_s = self.last_s = self.clock.perf_counter()
        for use in self.plan.idle_uses:
            self.record.idle[use.name] = IdleUse()
            use.begin(self.view)
        if self.plan.idle_uses or self.selects or self.plan.take_over is not None:
            assert self.board is not None
            self.board.begin()
        else:
            self.board = None
        while not self._is_over():
            goes_on = self._use_idle_time()
            if self.feed.is_running:  # rows may have become complete outside the engine
                self._take_finished(self.feed.advance())
                self.last_s = self.clock.perf_counter()
            has_nothing = self.engine.is_waiting if self.feed.is_running else self.engine.is_idle
            if not has_nothing:
                self._forward()
            elif not goes_on and self.feed.is_running:
                self._wait_for_feed()
            elif not goes_on and self.board is not None:
                self._wait()
        if self.idle_drafts is not None:
            self.idle_drafts.end()
        self.feed.close()
        self._catch_up()
        if self.proposer is not None:
            self.record.acceptance = self.proposer.acceptance
        self.record.num_ticks = 0 if self.board is None else self.board.num_ticks
        self.record.ended_s = self.clock.perf_counter()
        return self.record

    def progress(self) -> str:
        """Return how far the rollout is, on all ranks where ticks tell this one."""
        done, total, of = len(self.plan.rows) - len(self.unfinished), len(self.plan.rows), ""
        if self.board is not None:
            done, total = int(self.table.is_finished.sum()), len(self.table.is_finished)
        elif self.ranks.world_size > 1:
            of = f" of rank {self.ranks.rank}"
        return f"{self.plan.name}: generating, {done} of {total} responses{of} are complete"

    def _is_over(self) -> bool:
        """Act on ticks that have completed; return whether the rollout ends here."""
        if (board := self.board) is None:
            return not self.unfinished or self.ranks.must_stop
        while True:
            while (states := board.poll(self._state, not self.unfinished)) is not None:
                self._act_on(states)
            if board.is_over or self.unfinished or not board.are_others_done:
                return board.is_over
            self._wait()  # the last tick is about to complete, and all would wait for new work

    def _act_on(self, states: list[RankState]) -> None:
        """Apply a tick to this rank."""
        board = self.board
        assert board is not None
        self.table.sync([state.facts[1:] for state in states])
        if self.selects:
            self._select()
        if self.plan.take_over is not None and self.plan.take_over.is_due(self.table, states):
            self.plan.take_over.run(self)
            board.go_on()
            self.last_s = self.clock.perf_counter()
            return
        has_assigned = False
        if self.idle_drafts is not None:
            capacities = [int(state.facts[0]) for state in states]
            has_assigned = self.idle_drafts.assign(
                capacities, [not state.is_done for state in states]
            )
        # Ticks stay frequent while drafts are assigned, or a cutoff or take-over waits for lengths.
        # The end of the rollout does not need that: a rank that is done posts at once.
        is_near = self.plan.take_over is not None and self.plan.take_over.is_near(self.table)
        board.is_relaxed = not (self.selects or is_near or has_assigned)

    def _select(self) -> None:
        """Abort rows that the cutoff excludes; submit finished ones that it includes."""
        self._cutoff = cutoff = self.table.cutoff()
        self._abort([row for row in self.unfinished.values() if cutoff.is_out[row.number]])
        own = cutoff.is_in & (self.table.rank_of == self.ranks.rank)
        for number in np.flatnonzero(own).tolist():
            self._submit(self.plan.rows[number])

    def _abort(self, rows: list[Row]) -> None:
        """Take rows out of the engine; their tokens stay.

        Queued rows go first, so that none takes a free slot, then from the last slot down."""
        slots = {row: slot for slot, row in enumerate(self.engine.rows)}
        for row in sorted(rows, key=lambda row: slots.get(row, len(slots)), reverse=True):
            self.feed.drop(row)
            self._note_end(row)

    def finish(self, row: Row) -> None:
        """Note and pass on a row of this rank that a take-over has finished."""
        self._note_end(row)
        self._submit(row)

    def _submit(self, row: Row) -> None:
        """Begin to score a complete row that is trained on, once."""
        if row.number not in self._submitted and self.plan.scoring is not None:
            self._submitted.add(row.number)
            self.plan.scoring.on_finished(row)

    def _note_end(self, row: Row) -> None:
        """Note that a row has left the rollout."""
        del self.unfinished[row.number]
        self.table.note(row.number, len(row.tokens), row.finish is not None)

    def _note_active(self) -> int:
        """Note the lengths of this rank's rows in slots; return the longest."""
        longest = 0
        for row, length in zip(self.engine.rows, self.engine.lengths.tolist(), strict=True):
            if row.number in self.unfinished:
                # `cutoff` adds a token to each unfinished row, but a paused one may get none.
                length -= len(row.prompt) + (row.finish is not None)
                self.table.note(row.number, length, False)
                longest = max(longest, length)
        return longest

    def _use_idle_time(self) -> bool:
        """Begin drafts, or do a slice of work; return whether another slice is due."""
        if self.idle_drafts is not None:
            self.idle_drafts.fill()
        if (work := self._best_work()) is None:
            return False
        work.run_slice()
        self.last_s = max(self.last_s, self.record.slices[-1].end_s)
        return self._best_work() is not None

    def _best_work(self) -> IdleTask | None:
        """Return the work that saves most per second now; None where drafts save more, or nothing.

        On a rank whose own rows all wait, drafts take no time from it."""
        work = max(self.works, key=lambda work: work.rate, default=None)
        drafts = 0.0 if self.idle_drafts is None or self.unfinished else self.idle_drafts.rate
        return work if work is not None and work.rate > drafts else None

    def _state(self) -> RankState:
        """Return this rank's state for the next tick."""
        self._note_active()
        takes_drafts = self.idle_drafts is not None and (
            self.unfinished or self._best_work() is None
        )
        capacity = self.idle_drafts.capacity() if takes_drafts else 0
        facts = np.append(float(capacity), self.table.local_state())
        return RankState(len(self.unfinished), self.ranks.must_stop, facts)

    def _wait(self) -> None:
        assert self.board is not None
        begin = self.clock.perf_counter()
        states = self.board.wait(self._state)
        self.record.waits.append(Span("wait", begin, self.clock.perf_counter()))
        if states is not None:
            self._act_on(states)
        self.last_s = self.clock.perf_counter()

    def _wait_for_feed(self) -> None:
        begin, record = self.clock.perf_counter(), self.record
        busy_until_s = max(
            (spans[-1].end_s for spans in (record.forwards, record.slices) if spans), default=0
        )
        if record.waits and record.waits[-1].end_s > busy_until_s:
            begin = record.waits.pop().begin_s  # one span instead of thousands for a slow tool
        self.feed.wait()
        self.last_s = self.clock.perf_counter()
        record.waits.append(Span("wait", begin, self.last_s))

    def _forward(self) -> None:
        engine, unfinished, begin = self.engine, self.unfinished, self.clock.perf_counter()
        own_rows, in_engine = len(unfinished), len(engine.rows) + len(engine.queue)
        if self.feed.is_running:  # some rows may be outside the engine
            own_rows = sum(row.number in unfinished for row in (*engine.rows, *engine.queue))
        limit = self.view.max_prefill_tokens
        finished, load = engine.step(self.plan.params, self.proposer, limit, self._catch_up)
        if load is None:
            return
        record = self.record_of(load, begin, own_rows, in_engine - own_rows)
        self.record.forwards.append(record)
        # Proposing takes the GPU no time where the next forward is in flight already.
        propose_s = 0.0 if engine.flights else record.propose_s
        self._unlearned = load, record.end_s - record.begin_s - propose_s
        if self.feed.is_running:
            finished = self.feed.advance(finished)
            self.last_s = self.clock.perf_counter()
        self._take_finished(finished)

    def record_of(
        self, load: Load, begin_s: float, own_rows: int, ahead_rows: int
    ) -> ForwardRecord:
        """Return the record of a forward that has just ended. begin_s: of the engine's step."""
        end_s = self.clock.perf_counter()
        propose_s, looked_up = (0.0, 0) if self.proposer is None else self.proposer.take_spent()
        seconds = (self.last_s, end_s, end_s - begin_s - propose_s, propose_s)
        self.last_s = end_s
        return ForwardRecord(*seconds, load, own_rows, ahead_rows, looked_up)

    def _catch_up(self) -> None:
        """Learn from the last forward, while a GPU computes the next one."""
        if self.plan.cost is not None and self._unlearned is not None:
            self.plan.cost.observe(*self._unlearned)
        self._unlearned = None
        if self.proposer is not None and self.ranks.device.type == "cuda":
            self.proposer.catch_up()

    def _take_finished(self, finished: list[Row]) -> None:
        """Note complete rows, those of this step and drafts of coming ones."""
        unfinished = self.unfinished
        for row in finished:
            if row.number not in unfinished:
                if self.idle_drafts is not None:
                    self.idle_drafts.on_finished(row)
                continue
            self._note_end(row)
            if not self.selects:
                self._submit(row)
        if self._cutoff is not None and unfinished:
            longest = self._note_active()
            if finished or longest >= self._cutoff.limit:
                self._select()
