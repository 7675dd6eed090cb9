"""The rollout loop: forwards, the ticks between them, and idle time given to those who make use of it.

A rank generates its rows of a step. At every tick the ranks tell each other how far their rows are and how much idle work they
could take on; every rank draws the same conclusions: it drops rows that this step is not going to train on, hands rows over to
one that has none left, and assigns the offers of idle work (`IdleWork`). All leave at the same tick, with whatever is unfinished
of that work. Plain generation is the same loop without any of this, and without ticks: nobody needs to know how far anyone is.
"""

from collections.abc import Callable, Sequence

import numpy as np

from bubblespec.engine.generator import Generator
from bubblespec.engine.sampling import SamplingParams
from bubblespec.idle.arbiter import Arbiter
from bubblespec.idle.work import IdleWork, RankView
from bubblespec.ranks.collectives import Ranks
from bubblespec.ranks.progress import MAX_WORKS, ProgressBoard, RankState
from bubblespec.records import ForwardRecord, RolloutRecord, Row, Span
from bubblespec.rollout.handover import Handover
from bubblespec.rollout.standing import Standing
from bubblespec.speculate.proposer import Proposer
from bubblespec.speculate.windows import CostModel


class RolloutLoop:
    """One rollout on one rank: make it, and `run` it once."""

    def __init__(
        self,
        engine: Generator,
        ranks: Ranks,
        params: SamplingParams,
        *,
        proposer: Proposer | None = None,
        board: ProgressBoard | None = None,
        works: Sequence[IdleWork] = (),
        handover: Handover | None = None,
        cost: CostModel | None = None,
        on_finished: Callable[[Row], None] | None = None,
    ):
        """proposer: where draft tokens come from, which knows the rows already; board: needed where there are works, a handover,
        or rows to choose from; cost: learns from every forward; on_finished: called with each row of this rank that is trained
        on, once it is done and that is sure."""
        self.engine, self.ranks, self.params, self.proposer, self.cost = engine, ranks, params, proposer, cost
        self.board, self.works, self.handover, self.on_finished = board, list(works), handover, on_finished
        self.clock = ranks.clock
        self.record = RolloutRecord()
        self.view = RankView(ranks.rank, engine, {}, self.record)

    def run(self, rows: dict[int, Row], standing: Standing) -> RolloutRecord:
        """Generate the rows to their end, or until they are out, on the weights as they are. A rank that is told to stop leaves
        them unfinished; where there are ticks, all ranks do.

        rows: this rank's by their place in `standing`, in the order in which they should be generated; the same afterwards, with
        rows that have gone to another rank left out and those that have come added.
        """
        self.rows, self.standing = rows, standing
        self._places = {id(row): place for place, row in rows.items()}
        self._told: set[int] = set()  # places of rows that on_finished has had
        self.view.unfinished = {id(row): row for row in rows.values()}
        if self.proposer is not None:
            self.record.acceptance = self.proposer.acceptance
        self.engine.reset([row for work in self.works for row in work.begin(self.view)])
        self.engine.add(list(rows.values()))
        self.record.began_s = self._last_s = self.clock.perf_counter()
        self._tells_lengths = standing.selection is not None or self.handover is not None
        if self.works or self._tells_lengths:
            self._run_with_ticks()
        else:
            while self.view.unfinished and not self.ranks.must_stop:
                self._forward()
        self.record.ended_s = self.clock.perf_counter()
        return self.record

    def _run_with_ticks(self) -> None:
        board = self.board
        if len(self.works) > MAX_WORKS:
            raise ValueError(f"{len(self.works)} uses of idle time; a tick has room for the wishes of {MAX_WORKS}")
        self.arbiter = Arbiter([work.offers() for work in self.works])
        board.begin()
        while True:
            while (states := board.poll(self._state, is_urgent=not self.view.unfinished)) is not None:
                self._act_on(states)
            if board.is_over:
                break
            # Where the last tick is about to complete, nothing is started: all would wait for its end.
            is_ending = not self.view.unfinished and board.are_others_done
            goes_on = False if is_ending else self._advance()
            if not is_ending and not self.engine.is_idle:
                self._forward()
            elif not goes_on:
                self._wait()
        for work in self.works:
            work.end()
        self.record.num_ticks = board.num_ticks

    def _act_on(self, states: list[RankState]) -> None:
        """What a tick changes on this rank."""
        if self._tells_lengths:
            self.standing.merge(states)
        if self.handover is not None:
            self._hand_over(states)
        if self.standing.selection is not None:
            self._select()
        for work, offer in self.arbiter.assign(states)[self.ranks.rank]:
            self.works[work].start(offer)

    def _select(self) -> None:
        """Drop own rows that are out, and hand on those that are in."""
        standing = self.standing
        standing.judge()
        judgement = standing.judgement
        out = [row for row in self.view.unfinished.values() if judgement.is_out[self._places[id(row)]]]
        if out:
            self._drop(out)
        for place in np.flatnonzero(judgement.is_in & (standing.owners == self.ranks.rank)).tolist():
            self._tell(place)

    def _drop(self, rows: list[Row]) -> None:
        """Take rows out of the engine; they keep their tokens. Those that wait go first, so that none of them takes the slot of
        another, and then from the last slot down, so that few rows move."""
        slots = {id(row): slot for slot, row in enumerate(self.engine.rows)}
        for row in sorted(rows, key=lambda row: slots.get(id(row), len(slots)), reverse=True):
            self.engine.drop(row)
            self._note(row)
            del self.view.unfinished[id(row)]

    def _hand_over(self, states: list[RankState]) -> None:
        """Rows that have come with this tick, and those that go with the next one."""
        handover, unfinished = self.handover, self.view.unfinished
        for place, row in handover.arrived(states):
            if row is None:  # it has gone
                row = self.rows.pop(place)
                del unfinished[id(row)], self._places[id(row)]
                continue
            self.rows[place], self._places[id(row)], unfinished[id(row)] = row, place, row
            missing = 1 + len(self.engine.queue) + len(self.engine.rows) - self.engine.num_slots
            for work in self.works if missing > 0 else ():
                missing -= work.make_room(missing)
            self.engine.add([row])
            self.record.taken_rows += 1
        for place in handover.plan(states):
            if id(row := self.rows[place]) in unfinished:
                self.engine.drop(row)
                handover.pack(place, row)

    def _tell(self, place: int) -> None:
        """A row is done, and trained on."""
        if place not in self._told and self.on_finished is not None:
            self._told.add(place)
            self.on_finished(self.rows[place])

    def _note(self, row: Row) -> None:
        self.standing.note(self._places[id(row)], len(row.tokens), row.finish is not None)

    def _note_active(self) -> int:
        """How far this rank's rows in slots are; returns the most tokens of any."""
        longest = 0
        for row, length in zip(self.engine.rows, self.engine.lengths.tolist(), strict=True):
            if (place := self._places.get(id(row))) is not None:
                length -= len(row.prompt)
                self.standing.note(place, length, False)
                longest = max(longest, length)
        return longest

    def _advance(self) -> bool:
        """A slice of each work; whether there is more to do of any."""
        return any([work.advance() for work in self.works])  # noqa: C419 (of each)

    def _state(self) -> RankState:
        """What this rank tells the others in the next tick."""
        num_unfinished = len(self.view.unfinished)
        wanted = (
            work.wanted() if self.arbiter.has_offers(number, not num_unfinished) else 0 for number, work in enumerate(self.works)
        )
        state = RankState(num_unfinished, tuple(wanted), self.ranks.must_stop)
        if not self._tells_lengths:
            return state
        self._note_active()
        facts = self.standing.facts()
        return state._replace(facts=facts if self.handover is None else np.concatenate((facts, self.handover.parcels)))

    def _wait(self) -> None:
        begin = self.clock.perf_counter()
        if (states := self.board.wait(self._state)) is not None:
            self._act_on(states)
        self._last_s = self.clock.perf_counter()
        self.record.waits.append(Span("wait", begin, self._last_s))

    def _forward(self) -> None:
        engine, unfinished, begin = self.engine, self.view.unfinished, self.clock.perf_counter()
        own_rows = len(unfinished)
        ahead_rows = len(engine.rows) + len(engine.queue) - own_rows
        finished, load = engine.step(self.params, self.proposer, self.view.max_prefill_tokens)
        end = self.clock.perf_counter()
        propose_s, looked_up_rows = self.proposer.take_spent() if self.proposer is not None else (0.0, 0)
        record = ForwardRecord(self._last_s, end, end - begin - propose_s, propose_s, *load, own_rows, ahead_rows, looked_up_rows)
        self.record.forwards.append(record)
        self._last_s = end
        if self.cost is not None:
            self.cost.observe(*load[:4], record.engine_s)
        for row in finished:
            if unfinished.pop(id(row), None) is None:
                any(work.finish(row) for work in self.works)
                continue
            self._note(row)
            if self.standing.selection is None:
                self._tell(self._places[id(row)])
        if self.standing.selection is not None and unfinished:
            longest = self._note_active()
            if finished or longest >= self.standing.judgement.cut:
                self._select()
