"""Continuous-batching generation as a stepper: add rows, run one packed forward at a time, drop
rows, stop at any point.

A row's tokens depend on the weights, its prompt and its noise key alone: not on the other rows, the
order of admission, the chunk size, the number of slots or the drafts.

Active rows always occupy slots 0..R-1, so attention reads the cache through a slice and never
gathers it: the slot of a finished row is refilled from the queue at once, or else the last active
row moves into it. Rows with the same prompt share one prefill: the first of them computes the
prompt's keys and values, the others copy them and feed only its last token.

Where keys and values are in pages, rows are admitted while pages last. When they run out, the
youngest row goes back to the head of the queue: it is fed with its tokens again later, which are
its own and need no verification.

A stop token may end a turn of a row instead of the row (`Row.has_turns`). The row is paused then:
it keeps its slot, but samples nothing until it is resumed with what somebody else has to say.

A forward feeds "n new tokens of row r", whether they are a prompt, one sampled token, or that token
and a draft after it. Draft tokens come from a `Proposer`; a `Runner` verifies which of them the row
would have sampled anyway, and rolling back the others is lowering the row's length.

Shape legend: R active rows, N tokens in a forward, M rows that sample in it, S draft tokens, T = M
+ S positions sampled.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from bubblespec.engine.batch import Batch, Load, Runner
from bubblespec.engine.ragged import ragged
from bubblespec.engine.sampling import SamplingParams, Verified, is_stop, num_gained
from bubblespec.types import Row


class Proposer(Protocol):
    """Where draft tokens come from."""

    def propose(
        self, rows: list[Row], lengths: np.ndarray, room: np.ndarray, budget: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draft tokens for the rows about to decode: int64 [S], row after row, and how many of
        each, int64 [rows]. lengths: int64 [rows], response tokens so far; room: int64 [rows],
        maximum draft tokens of each; budget: of all together (what exceeds either is cut)."""

    def observe(
        self,
        rows: list[Row],
        tokens: np.ndarray,
        num_gained: np.ndarray,
        num_draft: np.ndarray,
        num_accepted: np.ndarray,
    ) -> None:
        """Rows have gained tokens, int64, row after row: each `num_gained`, of which a draft of
        `num_draft` tokens gave the first `num_accepted`, int64 [rows]."""


class Engine:
    """Slots and queue, and the runner that computes the forwards."""

    def __init__(self, runner: Runner):
        """Raises ValueError if a token of each slot does not fit into one forward."""
        self.runner, self.max_num_batched_tokens = runner, runner.max_num_batched_tokens
        num_slots, max_length = runner.num_slots, runner.max_length
        self.num_slots, self.max_length = num_slots, max_length
        if self.max_num_batched_tokens < num_slots:
            raise ValueError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is below "
                f"num_slots = {num_slots}"
            )
        self.num_forwards = 0
        self.queue: deque[Row] = deque()  # rows that wait for a slot
        # Active rows, by slot. Their tokens are in them once they have finished; see `collect`.
        self.rows: list[Row] = []
        # Per slot. A row's known tokens are tokens[: length], of which the first `cached` have keys
        # and values.
        self.tokens = np.zeros((num_slots, max_length), np.int64)
        self.length, self.cached, self.prompt_length, self.limit = np.zeros(
            (4, num_slots), np.int64
        )
        self.logprobs = np.zeros((2, num_slots, max_length), np.float32)
        self.is_paused = np.zeros(num_slots, bool)
        # The prompt whose keys and values a slot holds, also after its row has finished; -1 for
        # none.
        self.prompt_id = np.full(num_slots, -1, np.int64)
        self._prompt_ids: dict[tuple[int, ...], int] = {}
        self.pages = runner.pages
        # How many rows had been admitted before each slot's, and before those that gave way.
        self._age, self._num_admitted = np.zeros(num_slots, np.int64), 0
        self._gave_way: dict[Row, int] = {}

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing left to generate."""
        return not self.rows and not self.queue

    @property
    def is_waiting(self) -> bool:
        """Whether there is nothing to feed: all rows in slots are paused, and no other row can
        come into one. True where it is idle, too."""
        if len(self.rows) < self.num_slots and self._can_admit():
            return False
        return not self._wanted().any()

    @property
    def lengths(self) -> np.ndarray:
        """Known tokens of each active row, prompt included, int64 [R]."""
        return self.length[: len(self.rows)].copy()

    def add(self, rows: list[Row]) -> None:
        """Queue rows; those with the same prompt should be adjacent, so that they share its
        prefill. Raises ValueError for a row that does not fit, or has all its tokens."""
        for row in rows:
            prompt, limit = len(row.prompt), row.max_new_tokens
            if not (prompt and limit > 0 and prompt + limit <= self.max_length):
                raise ValueError(
                    f"a prompt of {prompt} and up to {limit} new tokens do not fit max_length = "
                    f"{self.max_length}"
                )
            if (known := len(row.tokens)) >= limit:
                raise ValueError(
                    f"a row with {known} of at most {limit} tokens has none left to generate"
                )
        self.queue.extend(rows)

    def insert(self, rows: list[Row], counts: np.ndarray) -> None:
        """Put rows into the first slots at once; the engine has no others. The first `counts` of
        their known tokens, int64 [rows], are not fed: the caller writes their keys and values."""
        self.add(rows)
        while self.queue:
            self.rows.append(self.queue.popleft())
            self._place(len(self.rows) - 1)
        self.cached[: len(rows)] = counts
        if self.pages is not None:
            self.pages.grow(counts)

    def drop(self, row: Row) -> None:
        """Take a row out before it has finished; it keeps its tokens so far, and continues after
        them if it is added again."""
        if row in self.queue:
            self.queue.remove(row)
            return
        slot = self.rows.index(row)
        self._take_results(slot)
        self._free(slot)

    def resume(self, row: Row, ids: np.ndarray) -> None:
        """Append tokens that are not sampled to a paused row, which samples again behind them.
        Where they leave no room for another token, they are cut to the row's limit, and the row is
        taken out: it has finished with "length"."""
        room = row.max_new_tokens - len(row.tokens)
        ids, row.finish = ids[:room], "length" if len(ids) >= room else None
        unknown = np.full(len(ids), np.nan, np.float32)
        row.tokens = np.concatenate((row.tokens, ids))
        row.logprob = np.concatenate((row.logprob, unknown))
        row.full_logprob = np.concatenate((row.full_logprob, unknown))
        if row in self.rows:
            self._write(self.rows.index(row))
        if row.finish is not None:
            self.drop(row)

    def collect(self) -> list[Row]:
        """The rows in slots, with their tokens so far in them, and those in the queue as they are.
        All stay where they are."""
        return [self._take_results(slot) for slot in range(len(self.rows))] + list(self.queue)

    def prefilling(self) -> list[Row]:
        """Active rows whose prompt is not whole in the cache yet; its last token is fed when they
        first sample."""
        return [self.rows[slot] for slot in self._prefilling()]

    def reset(self) -> None:
        """Forget all rows, and all cached keys and values. Needed whenever the weights have
        changed."""
        self.queue.clear()
        self.rows.clear()
        self.prompt_id.fill(-1)
        self._prompt_ids.clear()
        self._gave_way.clear()
        if self.pages is not None:
            self.pages.clear()

    def release(self) -> None:
        """Forget all rows, and give the memory of keys and values back until the next forward."""
        self.reset()
        self.runner.release()

    def run(
        self, rows: list[Row], params: SamplingParams, proposer: Proposer | None = None
    ) -> list[Row]:
        """Generate all rows to their end; returns them as given."""
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
        """One forward: admit, feed every row's next tokens, sample where a row's known tokens end.
        Returns the finished rows, those that are paused now among them, and what the forward had
        to do, or None where there is nothing to feed.

        proposer: where drafts come from; max_prefill_tokens: of rows that do not decode yet, by
        default max_num_batched_tokens; meanwhile: called while a GPU computes the forward, leaves
        the engine and its rows as they are.
        """
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
        """Admit rows, and plan a forward of every row's next tokens; None if there are none. See
        `step`."""
        if self.pages is not None:
            self._reclaim_pages()
        while len(self.rows) < self.num_slots and self._can_admit():
            self.rows.append(self.queue.popleft())
            self._place(len(self.rows) - 1)
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
        wide, sums = np.count_nonzero(count > 1), (ends, num_prompt, num_draft)
        load = Load(active, num_tokens, wide, *(int(of.sum()) for of in sums))
        slot, offset = ragged(count)
        index = np.array((slot, start[slot] + offset))  # a quarter of what np.stack takes
        generated = length - self.prompt_length[slots]
        tokens = self.tokens.ravel()[slot * self.max_length + index[1]]
        if len(draft):
            tokens[index[1] >= self.length[slot]] = draft
        return Batch(start, count, index, tokens, slots, generated, num_draft, draft, load)

    def _wanted(self) -> np.ndarray:
        """Known tokens of each active row that can be fed, int64 [R]. The last one of a paused row
        is fed when it is resumed."""
        active = len(self.rows)
        return self.length[:active] - self.is_paused[:active] - self.cached[:active]

    def _rows_in(self, slots: np.ndarray) -> list[Row]:
        if len(slots) == len(self.rows):
            return self.rows.copy()
        return [self.rows[slot] for slot in slots.tolist()]

    def _prefilling(self) -> np.ndarray:
        """Slots of rows whose prompt is not whole in the cache."""
        active = len(self.rows)
        return np.flatnonzero(self.cached[:active] < self.prompt_length[:active] - 1)

    def _plan(
        self, proposer: Proposer | None, max_prefill_tokens: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """New tokens of each active row in this forward, int64 [R], and the drafts among them,
        int64 [S], row after row: decoding rows first, then prompts under the token budget, then
        drafts."""
        active = len(self.rows)
        wanted = self._wanted()
        if wanted.max() > 1:
            self._share_prefills()
            wanted = self._wanted()
        prefilling = wanted > 1
        count = np.where(prefilling, 0, wanted)
        budget = int(self.max_num_batched_tokens - count.sum())
        # Prompts alone must get on, whatever the caller's limit is.
        prefill_budget = budget if max_prefill_tokens is None else max(max_prefill_tokens, 1)
        leaders = set()
        for slot in np.flatnonzero(prefilling):
            if self.cached[slot] < self.prompt_length[slot] - 1:
                if self.prompt_id[slot] in leaders:
                    continue  # another row is computing this prompt
                leaders.add(self.prompt_id[slot])
            count[slot] = min(wanted[slot], budget, prefill_budget)
            budget -= int(count[slot])
            prefill_budget -= int(count[slot])
        draft = np.empty(0, np.int64)
        decoding = (~(prefilling | self.is_paused[:active])).nonzero()[0]
        if proposer is not None and budget > 0 and len(decoding):
            draft, lengths = self._ask_for_drafts(proposer, decoding, budget)
            count[decoding] += lengths
        return count, draft

    def _ask_for_drafts(
        self, proposer: Proposer, slots: np.ndarray, budget: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Drafts for the rows in `slots`, row after row, and their lengths, int64 both."""
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

    def _can_admit(self) -> bool:
        """Whether a row waits and there are pages for it. One more for each row stays free: a row
        that gave way and is fed again will not have to give way again soon."""
        if not self.queue or self.pages is None or not self.rows:
            return bool(self.queue)
        row, active = self.queue[0], len(self.rows)
        needed = self.pages.needed(len(row.prompt) + len(row.tokens)) + active
        return needed + self.pages.lacking(self.length[:active]) <= self.pages.num_free

    def _reclaim_pages(self) -> None:
        """Before a forward: pages for all known tokens of all rows are to be free. Those of
        rejected drafts are given back first; then the youngest rows give way."""
        if self.pages.lacking(self.length[: len(self.rows)]) > self.pages.num_free:
            self.pages.trim(self.length[: len(self.rows)])
        while self.pages.lacking(self.length[: len(self.rows)]) > self.pages.num_free:
            slot = int(self._age[: len(self.rows)].argmax())
            row = self._take_results(slot)
            self._gave_way[row] = int(self._age[slot])
            self._forget(slot)
            self._close(slot)
            self.queue.appendleft(row)

    def _share_prefills(self) -> None:
        """Rows that still need a prompt which another slot holds whole get its keys and values."""
        whole = np.flatnonzero(self.cached >= self.prompt_length - 1)[::-1]
        first_with = dict(zip(self.prompt_id[whole].tolist(), whole.tolist(), strict=True))
        slots = self._prefilling()
        source = np.array([first_with.get(i, -1) for i in self.prompt_id[slots].tolist()], np.int64)
        if len(slots := slots[source >= 0]):
            self.cached[slots] = self.prompt_length[slots] - 1
            self.runner.share(source[source >= 0], slots, self.cached[slots])

    def _append(self, batch: Batch, verified: Verified, stop_token_ids: tuple[int, ...]):
        """Write what the rows have gained behind their known tokens; returns how many tokens that
        is, int64 [M], and the tokens, int64, row after row."""
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
        # Keys and values are those of the accepted tokens; whatever lies behind them is overwritten
        # before it is read.
        self.cached[slots] = self.length[slots] - 1
        return gained, token

    def _finish(self, slots: np.ndarray, is_stopped: np.ndarray) -> list[Row]:
        """Take out the rows in `slots` that have stopped, bool [slots], or reached their limit;
        those that have ended a turn stay."""
        ended = self.length[slots] - self.prompt_length[slots] >= self.limit[slots]
        finished: list[Row] = []
        # From the last slot down, so that the row moving into a freed slot is never one that has
        # finished too.
        for i in (is_stopped | ended).nonzero()[0][::-1].tolist():
            row = self._take_results(slots[i])
            row.finish = "stop" if is_stopped[i] else "length"
            finished.append(row)
            if row.has_turns and is_stopped[i]:
                self.is_paused[slots[i]] = True
            else:
                self._free(slots[i])
        return finished

    def _place(self, slot: int) -> None:
        """Write a row at its beginning into its slot, whose keys and values stay if they are those
        of its prompt."""
        row = self.rows[slot]
        prompt_id = self._prompt_ids.setdefault(row.prompt, len(self._prompt_ids))
        length = len(row.prompt)
        has_prompt = self.prompt_id[slot] == prompt_id
        self.cached[slot] = min(self.cached[slot], length - 1) if has_prompt else 0
        self.tokens[slot, :length] = row.prompt
        self.prompt_length[slot], self.limit[slot] = length, row.max_new_tokens
        self.prompt_id[slot] = prompt_id
        self._write(slot)
        self._age[slot] = self._gave_way.pop(row, self._num_admitted)
        self._num_admitted += 1
        self.runner.place(slot, row)

    def _write(self, slot: int) -> None:
        """A row's tokens so far, and whether it is paused, into its slot."""
        row, begin = self.rows[slot], self.prompt_length[slot]
        given = slice(begin, begin + len(row.tokens))
        self.tokens[slot, given] = row.tokens
        self.logprobs[:, slot, given] = (row.logprob, row.full_logprob) if len(row.logprob) else 0.0
        self.length[slot] = given.stop
        self.cached[slot] = min(self.cached[slot], given.stop - 1)
        self.is_paused[slot] = row.finish is not None

    def _take_results(self, slot: int) -> Row:
        row = self.rows[slot]
        begin, end = self.prompt_length[slot], self.length[slot]
        row.tokens = self.tokens[slot, begin:end].copy()
        row.logprob, row.full_logprob = self.logprobs[:, slot, begin:end].copy()
        return row

    def _free(self, slot: int) -> None:
        """Refill a slot from the queue, or move the last active row into it."""
        if self.pages is not None:
            self._forget(slot)
        if self._can_admit():
            self.rows[slot] = self.queue.popleft()
            self._place(slot)
        else:
            self._close(slot)

    def _forget(self, slot: int) -> None:
        """Give a slot's pages back."""
        self.length[slot], self.cached[slot], self.prompt_id[slot] = 0, 0, -1
        self.pages.truncate(slot)

    def _close(self, slot: int) -> None:
        """Move the last active row into the slot."""
        moved, last = self.rows.pop(), len(self.rows)
        if slot == last:
            return
        self.rows[slot] = moved
        self.runner.move(last, int(slot), int(self.cached[last]))
        per_slot = (self.length, self.cached, self.prompt_length, self.limit, self.prompt_id)
        for array in (self.tokens, *self.logprobs, self._age, self.is_paused, *per_slot):
            array[slot] = array[last]
        self.prompt_id[last] = -1
