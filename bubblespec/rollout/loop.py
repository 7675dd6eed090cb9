"""The rollout loop: forwards, the ticks between them, and idle time given to those who make use of it.

A rank generates its rows of a step. With uses of idle time (`IdleWork`) the ranks tell each other at every tick how far they are
and how much they could take on; every rank assigns the offers of a tick in the same way. All ranks leave at the same tick, with
whatever is unfinished of that work. Plain generation is the same loop without such work, and without ticks: nobody needs to know
how far anyone is.
"""

from collections.abc import Callable, Sequence

from bubblespec.engine.generator import Generator
from bubblespec.engine.sampling import SamplingParams
from bubblespec.idle.arbiter import Arbiter
from bubblespec.idle.work import IdleWork, RankView
from bubblespec.ranks.collectives import Ranks
from bubblespec.ranks.progress import MAX_WORKS, ProgressBoard, RankState
from bubblespec.records import ForwardRecord, RolloutRecord, Row, Span
from bubblespec.speculate.proposer import Proposer


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
        on_finished: Callable[[Row], None] | None = None,
    ):
        """proposer: where draft tokens come from, which knows the rows already; board: needed where there are works;
        on_finished: called with each row of this step as it is done."""
        self.engine, self.ranks, self.params, self.proposer = engine, ranks, params, proposer
        self.board, self.works, self.on_finished = board, list(works), on_finished
        self.clock = ranks.clock
        self.record = RolloutRecord()
        self.view = RankView(ranks.rank, engine, {}, self.record)

    def run(self, rows: list[Row]) -> RolloutRecord:
        """Generate the rows to their end, on the weights as they are. A rank that is told to stop leaves them unfinished; where
        there are ticks, all ranks do."""
        self.view.unfinished = {id(row): row for row in rows}
        if self.proposer is not None:
            self.record.acceptance = self.proposer.acceptance
        self.engine.reset([row for work in self.works for row in work.begin(self.view)])
        self.engine.add(rows)
        self.record.began_s = self._last_s = self.clock.perf_counter()
        if self.works:
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
                self._start_offers(states)
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

    def _advance(self) -> bool:
        """A slice of each work; whether there is more to do of any."""
        return any([work.advance() for work in self.works])  # noqa: C419 (of each)

    def _state(self) -> RankState:
        """What this rank tells the others in the next tick."""
        num_unfinished = len(self.view.unfinished)
        wanted = (
            work.wanted() if self.arbiter.has_offers(number, not num_unfinished) else 0 for number, work in enumerate(self.works)
        )
        return RankState(num_unfinished, tuple(wanted), self.ranks.must_stop)

    def _start_offers(self, states: list[RankState]) -> None:
        for work, offer in self.arbiter.assign(states)[self.ranks.rank]:
            self.works[work].start(offer)

    def _wait(self) -> None:
        begin = self.clock.perf_counter()
        if (states := self.board.wait(self._state)) is not None:
            self._start_offers(states)
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
        if self.proposer is not None:
            self.proposer.cost.observe(*load[:4], record.engine_s)
        for row in finished:
            if unfinished.pop(id(row), None) is None:
                any(work.finish(row) for work in self.works)
            elif self.on_finished is not None:
                self.on_finished(row)
