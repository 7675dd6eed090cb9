"""Continuous-batching generation as a stepper: add rows, run one forward, drop rows, stop.

A row's tokens depend on the weights, its prompt and its noise key alone: not on the other rows, the
order of admission, the chunk size, the number of slots or the drafts.

A forward feeds "n new tokens of row r", whether they are a prompt, one sampled token, or that token
and a draft after it. Draft tokens come from a `Proposer`. A `Runner` verifies which of them the row
would have sampled anyway; lowering the row's length rolls the rest back.

A stop token may end a turn of a row instead of the row (`Row.has_turns`). The row is paused then:
it keeps its slot, but samples nothing until `resume` appends the environment's tokens.

Shape legend: R active rows, N tokens in a forward, M rows that sample in it, S draft tokens, T = M
+ S positions sampled.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from bubblespec.engine.batch import Batch, Load, Runner
from bubblespec.engine.ragged import ragged
from bubblespec.engine.sampling import SamplingParams, Verified, is_stop, num_gained
from bubblespec.engine.slots import Slots
from bubblespec.types import Row


class Proposer(Protocol):
    """Where draft tokens come from."""

    def propose(
        self, rows: list[Row], lengths: np.ndarray, room: np.ndarray, budget: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return draft tokens int64 [S], row after row, and their numbers by row, int64 [rows].

        lengths: int64 [rows], response tokens so far; room: int64 [rows], maximum draft tokens of
        each; budget: maximum of all rows together. What exceeds either is cut."""

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


class Engine(Slots):
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

    @property
    def is_waiting(self) -> bool:
        """Whether there is nothing to feed: no row to admit, and all active rows are paused."""
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
        """Run one forward: admit, feed every row's next tokens, sample behind its known tokens.

        Returns the rows that have finished or paused, and the forward's work, or None with nothing
        to feed. max_prefill_tokens: limit on tokens of rows that do not decode yet; meanwhile:
        called while a GPU computes the forward, must not change the engine or its rows."""
        batch = self.schedule(proposer, max_prefill_tokens)
        if batch is None:
            return [], None
        wait = self.runner.launch(batch, params)
        if meanwhile is not None:
            meanwhile()
        verified = wait()
        self.num_forwards += 1
        self.cached[: len(batch.count)] = batch.start + batch.count
        if len(batch.slots) == 0:
            return [], batch.load
        gained, tokens = self._append(batch, verified, params.stop_token_ids)
        if proposer is not None:
            accepted = np.minimum(verified.accepted, gained)
            proposer.observe(self._rows_in(batch.slots), tokens, gained, batch.num_draft, accepted)
        last = tokens[gained.cumsum() - 1]
        return self._finish(batch.slots, is_stop(last, params.stop_token_ids)), batch.load

    def schedule(
        self, proposer: Proposer | None = None, max_prefill_tokens: int | None = None
    ) -> Batch | None:
        """Admit rows, and plan a forward of every row's next tokens; None if there are none."""
        self._reclaim_pages()
        self._admit()
        active = len(self.rows)
        if not active:
            return None
        count, draft = self._plan(proposer, max_prefill_tokens)
        if not (num_tokens := int(count.sum())):
            return None
        start = self.cached[:active].copy()
        ends = start + count
        if self.pages is not None:
            self.pages.grow(ends)
        num_prompt = np.minimum(np.maximum(self.prompt_length[:active] - 1 - start, 0), count)
        slots = (ends >= self.length[:active]).nonzero()[0]
        length = self.length[slots]
        num_draft = ends[slots] - length
        wide, sums = int(np.count_nonzero(count > 1)), (ends, num_prompt, num_draft)
        load = Load(active, num_tokens, wide, *(int(of.sum()) for of in sums))
        slot, offset = ragged(count)
        index = np.array((slot, start[slot] + offset))  # a quarter of what np.stack takes
        generated = length - self.prompt_length[slots]
        tokens = self.tokens.ravel()[slot * self.max_length + index[1]]
        if len(draft):
            tokens[index[1] >= self.length[slot]] = draft
        return Batch(start, count, index, tokens, slots, generated, num_draft, draft, load)

    def _num_unfed(self) -> np.ndarray:
        """Count the tokens to feed of each active row, int64 [R]; a paused one keeps its last."""
        active = len(self.rows)
        return self.length[:active] - self.is_paused[:active] - self.cached[:active]

    def _rows_in(self, slots: np.ndarray) -> list[Row]:
        if len(slots) == len(self.rows):
            return self.rows.copy()
        return [self.rows[slot] for slot in slots.tolist()]

    def _plan(
        self, proposer: Proposer | None, max_prefill_tokens: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Divide the token budget: decoding rows first, then prompts, then drafts.

        Returns the new tokens of each active row, int64 [R], and the drafts, int64 [S]."""
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
                if self.prompt_id[slot] in leaders:
                    continue  # another row is computing this prompt
                leaders.add(self.prompt_id[slot])
            count[slot] = min(unfed[slot], budget, prefill_budget)
            budget -= int(count[slot])
            prefill_budget -= int(count[slot])
        draft = np.empty(0, np.int64)
        decoding = (~(prefilling | self.is_paused[:active])).nonzero()[0]
        if proposer is not None and budget > 0 and len(decoding):
            draft, lengths = self._propose(proposer, decoding, budget)
            count[decoding] += lengths
        return count, draft

    def _propose(
        self, proposer: Proposer, slots: np.ndarray, budget: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return drafts for the rows in `slots`, row after row, and their lengths, int64 both."""
        generated = self.length[slots] - self.prompt_length[slots]
        room = self.limit[slots] - generated - 1  # the token after the draft needs a position too
        if self.pages is not None:
            room = np.minimum(room, self.pages.room(self.length[: len(self.rows)], slots))
        tokens, given = proposer.propose(self._rows_in(slots), generated, room, budget)
        lengths = np.minimum(given, room)
        before = lengths.cumsum() - lengths
        lengths = np.minimum(lengths, np.maximum(budget - before, 0))
        if int(lengths.sum()) < len(tokens):
            tokens = tokens[ragged(given)[1] < lengths.repeat(given)]
        return tokens, lengths

    def _append(
        self, batch: Batch, verified: Verified, stop_token_ids: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Write the tokens gained; return counts int64 [M] and tokens int64, row after row."""
        accepted, token, logprobs = verified
        slots, num_draft, generated = batch.slots, batch.num_draft, batch.generated
        begin = self.length[slots]
        gained = np.ones(len(slots), np.int64)
        place = slots * self.max_length + begin  # in flat arrays, which are several times as fast
        if batch.load.draft_tokens:
            limit = self.limit[slots] - generated
            gained = num_gained(token, accepted, num_draft, stop_token_ids, limit=limit)
            # The positions sampled are those after each row's last known token and its drafts.
            slot, position = batch.index[0], batch.index[1] + 1
            sampled = (position >= self.length[slot]).nonzero()[0]
            self.length[slots] = begin + gained
            kept = (position < self.length[slot])[sampled].nonzero()[0]
            token, logprobs = token[kept], logprobs.take(kept, axis=1)
            place = (slot * self.max_length + position)[sampled[kept]]
        self.length[slots] = begin + gained
        self.tokens.ravel()[place] = token
        for flat, values in zip(self.logprobs.reshape(2, -1), logprobs, strict=True):
            flat[place] = values
        # Keys and values behind the accepted tokens are overwritten before they are read.
        self.cached[slots] = self.length[slots] - 1
        return gained, token

    def _finish(self, slots: np.ndarray, is_stopped: np.ndarray) -> list[Row]:
        """Take out, or pause at the end of a turn, rows that have stopped or reached their limit.

        is_stopped: bool [slots]."""
        ended = self.length[slots] - self.prompt_length[slots] >= self.limit[slots]
        finished: list[Row] = []
        # From the last slot down, so that the row moving into a freed slot is never one that has
        # finished too.
        for i in (is_stopped | ended).nonzero()[0][::-1].tolist():
            row = self._read_results(slots[i])
            row.finish = "stop" if is_stopped[i] else "length"
            finished.append(row)
            if row.has_turns and is_stopped[i]:
                self.is_paused[slots[i]] = True
            else:
                self._refill(slots[i])
        return finished
