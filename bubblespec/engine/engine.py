"""Continuous-batching generation as a stepper: add rows, run one forward, drop rows, stop.

A row's tokens depend on the weights, its prompt and its noise key alone: not on the other rows, the
order of admission, the chunk size, the number of slots or the drafts.

A forward feeds "n new tokens of row r", whether they are a prompt, one sampled token, or that token
and a draft after it. Draft tokens come from a `Proposer`. A `Runner` verifies which of them the row
would have sampled anyway; lowering the row's length rolls the rest back.

A runner may be ahead of the host: forwards are planned and launched before the results of the one
before are read. `step` is the only place that knows of this.

A stop token may end a turn of a row instead of the row (`Row.has_turns`). The row is paused then:
it keeps its slot, but samples nothing until `resume` appends the environment's tokens.

Shape legend: R active rows, N tokens in a forward, M rows that sample in it, S draft tokens, T = M
+ S positions sampled.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from bubblespec.engine.arrays import ragged
from bubblespec.engine.batch import (
    Batch,
    OverlapPolicy,
    Plan,
    RowPosition,
    RowUpdates,
    Runner,
    SamplerOutput,
    SamplingParams,
    draft_of,
    is_stop,
    num_accepted,
    num_gained,
)
from bubblespec.engine.slots import Scheduler
from bubblespec.types import Load, Row


class Proposer(Protocol):
    """Where draft tokens come from.

    With an attribute `needs_results` that is true, it proposes behind the latest tokens alone: no
    forward is in flight then."""

    def propose(
        self,
        rows: list[Row],
        lengths: np.ndarray,
        room: np.ndarray,
        budget: int,
        in_flight: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return proposals int64 [P], row after row, and their numbers by row, int64 [rows].

        lengths: int64 [rows], response tokens known so far; in_flight: int64 [rows], how many more
        each may have gained by then; the draft is what a proposal has beyond these. room: int64
        [rows], maximum draft tokens of each; budget: of all rows together. What exceeds either is
        cut."""

    def observe(
        self,
        rows: list[Row],
        tokens: np.ndarray,
        num_gained: np.ndarray,
        num_draft: np.ndarray,
        num_accepted: np.ndarray,
    ) -> None:
        """Take in the tokens that rows have gained, int64, row after row.

        Each row gained `num_gained` tokens, the first `num_accepted` of them from a draft of
        `num_draft` tokens, int64 [rows] each."""


class Flight(NamedTuple):
    """A forward that has been launched."""

    plan: Plan
    tickets: np.ndarray  # int64 [M], of the rows that sample
    stop_token_ids: tuple[int, ...]
    is_exact: bool  # whether all their tokens were known when it was planned
    launched_s: float
    wait: Callable[[], SamplerOutput]


class Engine(Scheduler):
    """Rows in slots, and the forwards that generate their tokens."""

    def __init__(self, runner: Runner):
        """Raise ValueError if a token of each slot does not fit into one forward."""
        super().__init__(runner)
        self.max_num_batched_tokens = runner.max_num_batched_tokens
        if self.max_num_batched_tokens < self.num_slots:
            raise ValueError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is below "
                f"num_slots = {self.num_slots}"
            )
        self.num_forwards = 0
        self.flights: deque[Flight] = deque()
        self.pace = OverlapPolicy(is_shared=runner.is_shared)

    @property
    def is_waiting(self) -> bool:
        """Whether there is nothing to feed: no row to admit, and all active rows are paused."""
        if self.flights:
            return False
        if len(self.rows) < self.num_slots and self._can_admit():
            return False
        return not self._num_unfed().any()

    def run(
        self, rows: list[Row], params: SamplingParams, proposer: Proposer | None = None
    ) -> list[Row]:
        """Generate all rows to their end; return them in the order given."""
        self.add(rows)
        while not self.is_idle:
            self.step(params, proposer)
        return rows

    def step(
        self,
        params: SamplingParams,
        proposer: Proposer | None = None,
        max_prefill_tokens: int | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[list[Row], Load | None]:
        """Run forwards, and read the results of one.

        A forward admits rows, feeds every row's next tokens and samples behind its known tokens.
        Returns the rows that have finished or paused, and the forward's work, or None with nothing
        to feed. max_prefill_tokens: limit on tokens of rows that do not decode yet; meanwhile:
        called while a GPU computes the forward, must not change the engine or its rows."""
        depth = self.runner.depth
        if depth and getattr(proposer, "needs_results", False):
            depth = 0
        while not self.flights or (len(self.flights) <= depth and self._goes_ahead()):
            plan = self.schedule(proposer, max_prefill_tokens)
            if plan is None:
                break
            self.flights.append(self._launch(plan, params))
            depth = min(depth, self.runner.depth)  # graphs may have found no memory
        if not self.flights:
            return [], None
        flight = self.flights.popleft()
        if meanwhile is not None:
            meanwhile()
        waits_since_s = self.pace.clock.perf_counter()
        drawn = flight.wait()
        if depth:
            self.pace.landed(flight.launched_s, waits_since_s)
        self.num_forwards += 1
        load = flight.plan.load
        if len(flight.plan.slots) == 0:
            return [], load
        slots, num_draft, draft, drawn = self._land(flight, drawn)
        stops = flight.stop_token_ids
        gained, accepted, tokens = self._append(slots, num_draft, draft, drawn, stops)
        if len(slots) == 0:
            return [], load
        if depth:
            self.pace.verified(num_draft, accepted, gained)
        if proposer is not None:
            proposer.observe(self._rows_in(slots), tokens, gained, num_draft, accepted)
        last = tokens[gained.cumsum() - 1]
        return self._finish(slots, is_stop(last, stops)), load

    def _goes_ahead(self) -> bool:
        """Whether not to wait for the forward launched last."""
        plan = self.flights[-1].plan
        return self.pace.goes_ahead(len(plan.slots), int(np.count_nonzero(plan.num_proposed)))

    def reset(self) -> None:
        """Forget all rows, and all keys and values; needed whenever the weights have changed."""
        self.flights.clear()
        self.pace.pause()
        super().reset()

    def schedule(
        self, proposer: Proposer | None = None, max_prefill_tokens: int | None = None
    ) -> Plan | None:
        """Admit rows, and plan a forward of every row's next tokens; None if there are none."""
        self._keep_prompt()
        self._reclaim_pages()
        self._admit()
        active = len(self.rows)
        if not active:
            return None
        count, proposals, num_proposed = self._plan(proposer, max_prefill_tokens)
        if not (num_tokens := int(count.sum())):
            return None
        known, most = self.length[:active].copy(), self.most[:active]
        start = np.where(most > 0, known - 1, self.cached[:active])
        ends = start + count
        if self.pages is not None:
            self.pages.grow(ends + most)
        num_prompt = np.minimum(np.maximum(self.prompt_length[:active] - 1 - start, 0), count)
        slots = (ends >= known).nonzero()[0]
        wide, num_draft = int(np.count_nonzero(count > 1)), ends[slots] - known[slots]
        sums = (ends, num_prompt, num_draft)
        load = Load(active, num_tokens, wide, *(int(of.sum()) for of in sums))
        return Plan(start, count, known, slots, num_proposed[slots], proposals, load)

    def _launch(self, plan: Plan, params: SamplingParams) -> Flight:
        """Launch a planned forward. From now on its rows count as fed."""
        runner, slots, is_exact = self.runner, plan.slots, not self.flights
        if runner.supports_overlap:
            batch = self._batch(plan) if is_exact else None
            wait = runner.launch_ahead(plan, self._texts(), params, batch)
        else:
            wait = runner.launch(self._batch(plan), params)
        active = slice(len(plan.count))
        self.cached[active] = np.minimum(plan.start + plan.count, plan.known)
        if runner.window is not None:
            whole = np.maximum(plan.count - 1, 0) // runner.window * runner.window
            self.began[active] = plan.start + self.most[active] + whole
        self.most[slots] += plan.num_sampled
        self.fewest[slots] += 1
        stops, now_s = params.stop_token_ids, self.pace.clock.perf_counter()
        return Flight(plan, self.ticket[slots], stops, is_exact, now_s, wait)

    def _batch(self, plan: Plan) -> Batch:
        """Return what a plan feeds where all tokens of its rows are known."""
        start, count, known, slots, num_draft, draft, load = plan
        slot, offset = ragged(count)
        index = np.array((slot, start[slot] + offset))  # a quarter of what np.stack takes
        generated = known[slots] - self.prompt_length[slots]
        tokens = self.tokens.ravel()[slot * self.max_length + index[1]]
        if len(draft):
            tokens[index[1] >= known[slot]] = draft
        return Batch(start, count, index, tokens, slots, generated, num_draft, draft, load)

    def _texts(self) -> RowUpdates:
        """Return the rows whose text has been written since the last plan."""
        slots = self.is_written[: len(self.rows)].nonzero()[0]
        self.is_written[slots] = False
        length, prompt_length = self.length[slots], self.prompt_length[slots]
        row, offset = ragged(length)
        tokens = self.tokens[slots[row], offset]
        return RowUpdates(slots, length, prompt_length, prompt_length + self.limit[slots], tokens)

    def _land(
        self, flight: Flight, drawn: SamplerOutput
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, SamplerOutput]:
        """Return slots, int64 [M], and drafts of the rows that a forward counts for, and its draws.

        A row that has ended, paused or left since the forward was planned has none."""
        plan, sampled = flight.plan, flight.plan.num_sampled
        if flight.is_exact and not self.flights:  # or planning the next one may have moved rows
            slots, (num_draft, draft) = plan.slots, plan[4:6]
        else:
            active = len(self.rows)
            order = self.ticket[:active].argsort()
            place = self.ticket[order].searchsorted(flight.tickets)
            slots = np.append(order, 0)[place]
            counts = self.ticket[slots] == flight.tickets if active else place < 0
            slots = np.where(counts, slots, 0)
            length, total = self.length[slots], (self.prompt_length + self.limit)[slots]
            standing = RowPosition(self.tokens, slots, length, total, counts)
            num_draft, draft = draft_of(plan, standing)
            row, offset = ragged(sampled)
            kept = counts[row] & (offset <= num_draft[row])
            drawn = SamplerOutput(drawn.token[kept], drawn.logprob[kept])
            slots, num_draft, sampled = slots[counts], num_draft[counts], sampled[counts]
        self.most[slots] -= sampled
        self.fewest[slots] -= 1
        return slots, num_draft, draft, drawn

    def _num_unfed(self) -> np.ndarray:
        """Count the tokens to feed of each active row, int64 [R]; a paused one keeps its last.

        A row in flight has one to come, unless it has reached its limit by then."""
        active = len(self.rows)
        unfed = self.length[:active] - self.is_paused[:active] - self.cached[:active]
        if self.flights:
            least = (self.length + self.fewest - self.prompt_length)[:active]
            unfed[(self.fewest[:active] > 0) & (least < self.limit[:active])] = 1
        return unfed

    def _rows_in(self, slots: np.ndarray) -> list[Row]:
        if len(slots) == len(self.rows):
            return self.rows.copy()
        return [self.rows[slot] for slot in slots.tolist()]

    def _plan(
        self, proposer: Proposer | None, max_prefill_tokens: int | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Divide the token budget: decoding rows first, then prompts, then drafts.

        Returns the new tokens of each active row, int64 [R]; proposals, int64 [P], row after row;
        and their numbers, int64 [R]."""
        active = len(self.rows)
        unfed = self._num_unfed()
        if unfed.max() > 1:
            self._share_prefills()
            unfed = self._num_unfed()
        prefilling = unfed > 1
        count = np.where(prefilling, 0, unfed)
        budget = int(self.max_num_batched_tokens - count.sum())
        # Prefill at least one token, so that a batch of prompts makes progress.
        prefill_budget = budget if max_prefill_tokens is None else max(max_prefill_tokens, 1)
        leaders = set()
        for slot in np.flatnonzero(prefilling):
            if self.cached[slot] < self.prompt_length[slot] - 1:
                if self.prompt_key[slot] in leaders:
                    continue  # another row is computing this prompt
                leaders.add(self.prompt_key[slot])
            count[slot] = min(unfed[slot], budget, prefill_budget)
            budget -= int(count[slot])
            prefill_budget -= int(count[slot])
        proposals, num_proposed = np.empty(0, np.int64), np.zeros(active, np.int64)
        decoding = (unfed == 1).nonzero()[0]
        if proposer is not None and budget > 0 and len(decoding):
            proposals, num_proposed[decoding], drafts = self._propose(proposer, decoding, budget)
            count[decoding] += drafts
        return count, proposals, num_proposed

    def _propose(
        self, proposer: Proposer, slots: np.ndarray, budget: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return proposals for the rows in `slots`, row after row, their lengths and the drafts'.

        All int64; a draft is the part of a proposal beyond what a row may gain in flight."""
        generated, in_flight = self.length[slots] - self.prompt_length[slots], self.most[slots]
        # The token after the draft needs a position too, whatever the row gains in flight.
        room = np.maximum(self.limit[slots] - generated - 1 - in_flight, 0)
        if self.runner.window is not None:
            room = np.minimum(room, self.runner.window - 1)
        if self.pages is not None:
            room = np.minimum(room, self.pages.room(self._reach, slots))
        tokens, given = proposer.propose(self._rows_in(slots), generated, room, budget, in_flight)
        drafts = np.minimum(np.maximum(given - in_flight, 0), room)
        before = drafts.cumsum() - drafts
        drafts = np.minimum(drafts, np.maximum(budget - before, 0))
        lengths = np.minimum(drafts + in_flight, self.limit[slots] - generated) * (drafts > 0)
        if int(lengths.sum()) < len(tokens):
            tokens = tokens[ragged(given)[1] < lengths.repeat(given)]
        return tokens, lengths, drafts

    def _append(
        self,
        slots: np.ndarray,
        num_draft: np.ndarray,
        draft: np.ndarray,
        drawn: SamplerOutput,
        stop_token_ids: tuple[int, ...],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Verify drafts and write the tokens gained.

        Returns how many tokens each row has gained and how many of them its draft had, int64 [M],
        and the tokens, int64, row after row."""
        token, logprob = drawn
        begin = self.length[slots]
        gained, accepted = np.ones(len(slots), np.int64), np.zeros(len(slots), np.int64)
        place = slots * self.max_length + begin  # in flat arrays, which are several times as fast
        if len(draft):
            accepted = num_accepted(token, draft, num_draft)
            limit = self.limit[slots] + self.prompt_length[slots] - begin
            gained = num_gained(token, accepted, num_draft, stop_token_ids, limit=limit)
            row, offset = ragged(num_draft + 1)
            kept = (offset < gained[row]).nonzero()[0]
            token, logprob = token[kept], logprob[kept]
            place = place[row[kept]] + offset[kept]
            accepted = np.minimum(accepted, gained)
        self.length[slots] = begin + gained
        self.tokens.ravel()[place] = token
        self.logprob.ravel()[place] = logprob
        # Keys and values behind the accepted tokens are overwritten before they are read. The last
        # token has none, unless a forward in flight feeds it.
        self.cached[slots] = begin + gained - (self.most[slots] == 0)
        return gained, accepted, token

    def _finish(self, slots: np.ndarray, is_stopped: np.ndarray) -> list[Row]:
        """Take out, or pause at the end of a turn, rows that have stopped or reached their limit.

        is_stopped: bool [slots]."""
        ended = self.length[slots] - self.prompt_length[slots] >= self.limit[slots]
        finished: list[Row] = []
        done = (is_stopped | ended).nonzero()[0]
        # From the last slot down, so that the row moving into a freed slot is never one that has
        # finished too.
        for i in done[slots[done].argsort()[::-1]].tolist():
            row = self._read_results(slots[i])
            row.finish = "stop" if is_stopped[i] else "length"
            finished.append(row)
            if row.has_turns and is_stopped[i]:
                self.is_paused[slots[i]] = True
                self._renew(slots[i])
            else:
                self._refill(slots[i])
        return finished
