"""The rollout loop: forwards, the ticks between them, and idle time given to those who make use of
it.

A rank generates its rows of a step. At every tick the ranks tell each other how far their rows are
and how much idle work they could take on; every rank draws the same conclusions: it drops rows that
this step is not going to train on, and assigns the offers of idle work (`IdleWork`), rows to take
over from another rank among them. All leave at the same tick, with whatever is unfinished of that
work. Plain generation is the same loop without any of this, and without ticks: nobody needs to know
how far anyone is.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from bubblespec.dist.ranks import Ranks
from bubblespec.draft.proposer import Proposer
from bubblespec.draft.windows import CostModel
from bubblespec.engine.engine import Engine
from bubblespec.engine.sampling import SamplingParams
from bubblespec.idle.arbiter import Arbiter
from bubblespec.idle.work import IdleWork, RankView
from bubblespec.records import ForwardRecord, IdleUse, RolloutRecord, Span
from bubblespec.rollout.board import MAX_WORKS, ProgressBoard, RankState
from bubblespec.rollout.standing import Standing
from bubblespec.rollout.tp_tail import TPTail
from bubblespec.types import Row


class RolloutLoop:
    """One rollout on one rank: make it, and `run` it once."""

    def __init__(
        self,
        engine: Engine,
        ranks: Ranks,
        params: SamplingParams,
        *,
        proposer: Proposer | None = None,
        board: ProgressBoard | None = None,
        works: Sequence[IdleWork] = (),
        cost: CostModel | None = None,
        on_finished: Callable[[Row], None] | None = None,
        tail: TPTail | None = None,
    ):
        """proposer: where draft tokens come from, which knows the rows already; board: needed where
        there are works, or rows to choose from; cost: learns from every forward; on_finished:
        called with each row of this rank that is trained on, once it is done and that is sure;
        tail: decodes the last rows of all ranks, where there is a board; on all ranks or on
        none."""
        self.engine, self.ranks, self.params, self.proposer, self.cost = (
            engine,
            ranks,
            params,
            proposer,
            cost,
        )
        self.board, self.works, self.on_finished, self.tail = board, list(works), on_finished, tail
        self.clock = ranks.clock
        self.record = RolloutRecord()
        self.view = RankView(
            ranks.rank,
            engine,
            {},
            self.record,
            take=self._take,
            give=self._give,
            let_go=self._let_go,
        )

    def run(self, rows: dict[int, Row], standing: Standing) -> RolloutRecord:
        """Generate the rows to their end, or until they are out, on the weights as they are. A rank
        that is told to stop leaves them unfinished; where there are ticks, all ranks do.

        rows: this rank's by their place in `standing`, in the order in which they should be
        generated; the same afterwards, with rows that have gone to another rank left out and those
        that have come added.
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
        if self.works or standing.selection is not None or self.tail is not None:
            self._run_with_ticks()
        else:
            while self.view.unfinished and not self.ranks.must_stop:
                self._forward()
        self.record.ended_s = self.clock.perf_counter()
        return self.record

    def _run_with_ticks(self) -> None:
        board = self.board
        if len(self.works) > MAX_WORKS:
            raise ValueError(
                f"{len(self.works)} uses of idle time; a tick has room for the wishes of {MAX_WORKS}"
            )
        self.arbiter = Arbiter(len(self.works))
        self.record.idle = {work.name: IdleUse() for work in self.works}
        for number, work in enumerate(self.works):
            self.arbiter.update(number, work.offers([]))
        board.begin()
        while True:
            while (
                states := board.poll(self._state, is_urgent=not self.view.unfinished)
            ) is not None:
                self._act_on(states)
            if board.is_over:
                break
            # Where the last tick is about to complete, nothing is started: all would wait for its
            # end.
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
        by_rank = [np.split(state.facts, self._ends) for state in states]
        self.standing.merge([facts[0] for facts in by_rank])
        for number, work in enumerate(self.works, start=1):
            work.hear([facts[number] for facts in by_rank])
        if self.standing.selection is not None:
            self._select()
        if self.tail is not None and self.tail.is_due(self.standing, states):
            self._share_tail()
            return
        for number, work in enumerate(self.works):
            self.arbiter.update(number, work.offers(states))
        for rank, given in enumerate(self.arbiter.assign(states)):
            for number, offer in given:
                self.works[number].start(offer, rank)
                if rank == self.ranks.rank:
                    self.record.idle[self.works[number].name].expected_s += offer.saves_s

    def _select(self) -> None:
        """Drop own rows that are out, and hand on those that are in."""
        standing = self.standing
        standing.judge()
        judgement = standing.judgement
        out = [
            row for row in self.view.unfinished.values() if judgement.is_out[self._places[id(row)]]
        ]
        if out:
            self._drop(out)
        for place in np.flatnonzero(
            judgement.is_in & (standing.owners == self.ranks.rank)
        ).tolist():
            self._tell(place)

    def _drop(self, rows: list[Row]) -> None:
        """Take rows out of the engine; they keep their tokens. Those that wait go first, so that
        none of them takes the slot of another, and then from the last slot down, so that few rows
        move."""
        slots = {id(row): slot for slot, row in enumerate(self.engine.rows)}
        for row in sorted(rows, key=lambda row: slots.get(id(row), len(slots)), reverse=True):
            self.engine.drop(row)
            self._note(row)
            del self.view.unfinished[id(row)]

    def _take(self, place: int, row: Row) -> None:
        """See `RankView.take`."""
        self.rows[place], self._places[id(row)], self.view.unfinished[id(row)] = row, place, row
        missing = 1 + len(self.engine.queue) + len(self.engine.rows) - self.engine.num_slots
        for work in self.works if missing > 0 else ():
            missing -= work.make_room(missing)
        self.engine.add([row])
        self.record.taken_rows += 1
        self.record.first_taken_s = min(self.record.first_taken_s, self.clock.perf_counter())

    def _give(self, place: int) -> Row | None:
        """See `RankView.give`."""
        row = self.rows[place]
        if id(row) not in self.view.unfinished:
            return None
        self.engine.drop(row)
        return row

    def _let_go(self, place: int) -> None:
        """See `RankView.let_go`."""
        row = self.rows.pop(place)
        del self.view.unfinished[id(row)], self._places[id(row)]

    def _share_tail(self) -> None:
        """Go on with the unfinished rows of all ranks, on all of them together. No row is on its
        way from one rank to another: those given away at the last tick have come with this one."""
        unfinished = self.view.unfinished
        for row in [
            row for row in (*self.engine.queue, *self.engine.rows[::-1]) if id(row) in unfinished
        ]:
            self.engine.drop(row)

        def finish(row: Row) -> None:
            del unfinished[id(row)]
            self._note(row)
            self._tell(self._places[id(row)])

        own = {self._places[name]: row for name, row in unfinished.items()}
        self.tail.run(
            own, self.standing, self.params, self.proposer, on_finished=finish, record=self.record
        )
        if self.proposer is not None:
            self.proposer.take_spent()
        self.board.go_on()
        self._last_s = self.clock.perf_counter()

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
        goes_on = any([work.advance() for work in self.works])  # noqa: C419 (of each)
        self._last_s = max(
            self._last_s, *(span.end_s for span in self.record.slices[-1:]), -math.inf
        )
        return goes_on

    def _state(self) -> RankState:
        """What this rank tells the others in the next tick."""
        self._note_active()
        facts = [self.standing.facts(), *(work.facts() for work in self.works)]
        self._ends = np.cumsum([len(of) for of in facts])[:-1]  # the same on all ranks
        wanted = tuple(work.wanted() for work in self.works)
        return RankState(
            len(self.view.unfinished), wanted, self.ranks.must_stop, np.concatenate(facts)
        )

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
        propose_s, looked_up_rows = (
            self.proposer.take_spent() if self.proposer is not None else (0.0, 0)
        )
        record = ForwardRecord(
            self._last_s,
            end,
            end - begin - propose_s,
            propose_s,
            *load,
            own_rows,
            ahead_rows,
            looked_up_rows,
        )
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
