"""What each forward feeds, and what the rows gain from it: slots, queue, shared prefills, budgets,
drafts. numpy alone.

Active rows always occupy slots 0..R-1, so attention reads the cache through a slice and never
gathers it: the slot of a finished row is refilled from the queue at once, or else the last active
row moves into it. Rows with the same prompt share one prefill: the first of them computes the
prompt's keys and values, the others copy them and feed only its last token.

A forward feeds "n new tokens of row r", whether they are a prompt, one sampled token, or that token
and a draft after it. Draft tokens come from a `Proposer`, of which nothing else is known here: a
`Runner` verifies which of them the row would have sampled anyway, and rolling back the others is
lowering the row's length.

Shape legend: R active rows, N tokens in a forward, M rows that sample in it, S draft tokens, T = M
+ S positions sampled.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bubblespec.engine.ragged import ragged
from bubblespec.records import Load
from bubblespec.types import Row

if TYPE_CHECKING:  # it comes with torch
    from bubblespec.engine.sampling import SamplingParams


@dataclass
class Batch:
    """What a forward feeds, all on the host."""

    start: np.ndarray
    """int64 [R], positions of each active row that have keys and values."""
    count: np.ndarray
    """int64 [R], new tokens of each."""
    index: np.ndarray
    """int64 [2, N], slot and position of each new token, rows one after the other."""
    tokens: np.ndarray
    """int64 [N], the new tokens."""
    slots: np.ndarray
    """int64 [M], the slots of the rows that sample, ascending: they feed all their known tokens,
    and their drafts."""
    generated: np.ndarray
    """int64 [M], response tokens that these rows have."""
    num_draft: np.ndarray
    """int64 [M], draft tokens of these rows."""
    draft: np.ndarray
    """int64 [S], the drafts one after the other."""
    load: Load


class Proposer(Protocol):
    """Where draft tokens come from."""

    def propose(
        self, rows: list[Row], lengths: np.ndarray, room: np.ndarray, budget: int
    ) -> list[np.ndarray | None]:
        """Draft tokens int64 [n] for each of the rows about to decode, or None. lengths: int64
        [rows], response tokens so far; room: int64 [rows], most draft tokens of each; budget: most
        draft tokens together (what exceeds either is cut)."""

    def observe(
        self,
        rows: list[Row],
        tokens: list[np.ndarray],
        num_draft: np.ndarray,
        num_accepted: np.ndarray,
    ) -> None:
        """Rows have gained `tokens`, of which a draft of `num_draft` tokens gave the first
        `num_accepted`, int64 [rows]."""


class Runner(Protocol):
    """What computes a forward: a model (`ModelRunner`), or in virtual time a recorded text."""

    num_slots: int
    max_length: int
    """Longest prompt plus response in tokens."""
    max_batch_tokens: int
    """Most tokens in a forward, at least num_slots."""

    def forward(
        self, batch: Batch, params: "SamplingParams"
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Feed the batch, and verify its drafts. Returns, as `Verified` has them, accepted int64
        [M], the tokens int64 [T], and both log-probabilities [2, T]."""

    def place(self, slot: int, row: Row) -> None:
        """A row, with its tokens so far in it, comes into a slot; or stays in it while what
        computes it has changed."""

    def move(self, source: int, target: int, length: int) -> None:
        """The row in slot `source` goes on in slot `target`; its first `length` positions have keys
        and values."""

    def share(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of both slots' rows are the same; only `source` has keys and
        values of them."""

    def release(self) -> None:
        """Give the memory of keys and values back until the next forward. No slot has a row."""


class Scheduler:
    """Slots and queue. For each forward `schedule` is followed by `update`, with what the runner
    made of the batch."""

    def __init__(self, runner: Runner):
        num_slots, max_length = runner.num_slots, runner.max_length
        if runner.max_batch_tokens < num_slots:
            raise ValueError(
                f"max_batch_tokens = {runner.max_batch_tokens} is below num_slots = {num_slots}"
            )
        self.runner, self.max_batch_tokens = runner, runner.max_batch_tokens
        self.queue: deque[Row] = deque()
        self.rows: list[Row] = []  # the row in each of slots 0..R-1
        # Per slot. A row's known tokens are tokens[: length], of which the first `cached` have keys
        # and values.
        self.tokens = np.zeros((num_slots, max_length), np.int64)
        self.length = np.zeros(num_slots, np.int64)
        self.cached = np.zeros(num_slots, np.int64)
        self.prompt_length = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int64)
        self.logprobs = np.zeros((num_slots, max_length, 2), np.float32)
        # The prompt whose keys and values a slot holds, also after its row has finished; -1 for
        # none.
        self.prompt_id = np.full(num_slots, -1, np.int64)
        self._prompt_ids: dict[tuple[int, ...], int] = {}
        # What moves with a row to another slot.
        self._per_slot = (
            self.tokens,
            self.length,
            self.cached,
            self.prompt_length,
            self.limit,
            self.logprobs,
            self.prompt_id,
        )

    def add(self, rows: list[Row]) -> None:
        """Queue rows, see `Engine.add`."""
        longest = self.tokens.shape[1]
        for row in rows:
            if not (
                row.prompt
                and row.max_new_tokens > 0
                and len(row.prompt) + row.max_new_tokens <= longest
            ):
                raise ValueError(
                    f"a prompt of {len(row.prompt)} and up to {row.max_new_tokens} new tokens do not fit max_length = {longest}"
                )
            if len(row.tokens) >= row.max_new_tokens:
                raise ValueError(
                    f"a row with {len(row.tokens)} of at most {row.max_new_tokens} tokens has none left to generate"
                )
        self.queue.extend(rows)

    def drop(self, row: Row) -> None:
        """Take a row out, see `Engine.drop`."""
        if row in self.queue:
            self.queue.remove(row)
        else:
            slot = self.rows.index(row)
            self._take_results(slot)
            self._free(slot)

    def collect(self) -> list[Row]:
        """The rows in slots, with their tokens so far in them, and those in the queue as they are.
        All stay where they are."""
        return [self._take_results(slot) for slot in range(len(self.rows))] + list(self.queue)

    def decoding(self) -> list[Row]:
        """Rows whose prompt and all of whose tokens but the last are in the cache."""
        active = len(self.rows)
        return [
            self.rows[slot]
            for slot in np.flatnonzero(self.cached[:active] == self.length[:active] - 1)
        ]

    def prefilling(self) -> list[Row]:
        """Active rows whose prompt is not whole in the cache; its last token is fed when they first
        sample."""
        return [self.rows[slot] for slot in self._prefilling()]

    def reset(self, staying: Collection[Row] = ()) -> None:
        """Forget all rows but those `staying`, and whose prompts are in the cache, see
        `Engine.reset`."""
        self.queue.clear()
        stay = {id(row) for row in staying}
        for slot in reversed(range(len(self.rows))):
            if id(self.rows[slot]) not in stay:
                self._free(slot)
        for slot in range(len(self.rows)):
            self.runner.place(slot, self._take_results(slot))
        self.prompt_id.fill(-1)  # so that nobody shares the prompt of a row that has stayed
        self._prompt_ids.clear()

    def schedule(
        self, proposer: Proposer | None = None, max_prefill_tokens: int | None = None
    ) -> Batch | None:
        """Admit rows, and plan a forward of every row's next tokens; None without rows.
        max_prefill_tokens: most tokens of rows that do not decode yet, by default
        max_batch_tokens."""
        while self.queue and len(self.rows) < len(self.tokens):
            self.rows.append(self.queue.popleft())
            self._place(len(self.rows) - 1)
        active = len(self.rows)
        if not active:
            return None
        count = self._plan(
            proposer, self.max_batch_tokens if max_prefill_tokens is None else max_prefill_tokens
        )
        start = self.cached[:active].copy()
        ends = start + count
        num_prompt = np.minimum(np.maximum(self.prompt_length[:active] - 1 - start, 0), count)
        slots = (ends >= self.length[:active]).nonzero()[0]
        length = self.length[slots]
        num_draft = ends[slots] - length
        wide = np.count_nonzero(count > 1)
        load = Load(
            active,
            int(count.sum()),
            wide,
            int(ends.sum()),
            int(num_prompt.sum()),
            int(num_draft.sum()),
        )
        slot, offset = ragged(count)
        position = start[slot] + offset
        draft = np.empty(0, np.int64)
        if load.draft_tokens:
            row, offset = ragged(num_draft)
            draft = self.tokens[slots[row], length[row] + offset]
        generated = length - self.prompt_length[slots]
        index = np.array((slot, position))  # a quarter of what np.stack takes
        return Batch(
            start,
            count,
            index,
            self.tokens[slot, position],
            slots,
            generated,
            num_draft,
            draft,
            load,
        )

    def update(
        self,
        batch: Batch,
        result: tuple[np.ndarray, np.ndarray, np.ndarray],
        stop_token_ids: tuple[int, ...],
        proposer: Proposer | None = None,
    ) -> list[Row]:
        """Append what the rows have gained by a forward, see `Runner.forward`. Returns those that
        it has ended."""
        self.cached[: len(batch.count)] = batch.start + batch.count
        if len(batch.slots) == 0:
            return []
        self._append(batch, *result, stop_token_ids=stop_token_ids, proposer=proposer)
        return self._finish(batch.slots, stop_token_ids)

    def _prefilling(self) -> np.ndarray:
        """Slots of rows whose prompt is not whole in the cache."""
        active = len(self.rows)
        return np.flatnonzero(self.cached[:active] < self.prompt_length[:active] - 1)

    def _plan(self, proposer: Proposer | None, max_prefill_tokens: int) -> np.ndarray:
        """New tokens of each active row in this forward, int64 [R]: decoding rows first, then
        prompts under the token budget, then drafts, which are written behind the known tokens of
        their rows."""
        active = len(self.rows)
        wanted = self.length[:active] - self.cached[:active]
        if wanted.max() > 1:
            self._share_prefills()
            wanted = self.length[:active] - self.cached[:active]
        prefilling = wanted > 1
        count = np.where(prefilling, 0, wanted)
        budget = int(self.max_batch_tokens - count.sum())
        # Prompts alone must get on, whatever the caller's limit is.
        prefill_budget = max(max_prefill_tokens, 1)
        leaders = set()
        for slot in np.flatnonzero(prefilling):
            if self.cached[slot] < self.prompt_length[slot] - 1:
                if self.prompt_id[slot] in leaders:
                    continue  # another row is computing this prompt
                leaders.add(self.prompt_id[slot])
            count[slot] = min(wanted[slot], budget, prefill_budget)
            budget -= int(count[slot])
            prefill_budget -= int(count[slot])
        if proposer is not None and budget > 0 and len(decoding := (~prefilling).nonzero()[0]):
            count[decoding] += self._write_drafts(proposer, decoding, budget)
        return count

    def _write_drafts(self, proposer: Proposer, slots: np.ndarray, budget: int) -> np.ndarray:
        """Ask for drafts and put them behind the rows' known tokens; returns their lengths, int64
        [slots]."""
        generated = self.length[slots] - self.prompt_length[slots]
        room = (
            self.limit[slots] - generated - 1
        )  # the sampled token after the draft needs a place too
        drafts = proposer.propose([self.rows[s] for s in slots.tolist()], generated, room, budget)
        lengths = np.zeros(len(slots), np.int64)
        for i, draft in enumerate(drafts):
            if draft is None:
                continue
            fitting = min(len(draft), int(room[i]), budget)
            begin = self.length[slots[i]]
            self.tokens[slots[i], begin : begin + fitting] = draft[:fitting]
            lengths[i] = fitting
            budget -= fitting
        return lengths

    def _share_prefills(self) -> None:
        """Rows that still need a prompt which another slot holds whole get its keys and values."""
        needy = self._prefilling()
        if len(needy) == 0:
            return
        whole = np.flatnonzero(self.cached >= self.prompt_length - 1)[::-1]
        first_with = dict(zip(self.prompt_id[whole].tolist(), whole.tolist(), strict=True))
        for slot in needy:
            source = first_with.get(int(self.prompt_id[slot]))
            if source is not None:
                self.cached[slot] = self.prompt_length[slot] - 1
                self.runner.share(source, int(slot), int(self.cached[slot]))

    def _append(
        self,
        batch: Batch,
        accepted: np.ndarray,
        token: np.ndarray,
        logprobs: np.ndarray,
        *,
        stop_token_ids: tuple[int, ...],
        proposer: Proposer | None,
    ) -> None:
        slots, num_draft, generated = batch.slots, batch.num_draft, batch.generated
        begin = self.length[slots]
        if len(token) == len(slots):  # no drafts; what follows gives the same
            first, gained = np.arange(len(slots)), np.ones(len(slots), np.int64)
            self.tokens[slots, begin] = token
            self.logprobs[slots, generated] = logprobs.T
        else:
            first = (num_draft + 1).cumsum() - (num_draft + 1)
            gained = num_gained(
                token, accepted, num_draft, stop_token_ids, limit=self.limit[slots] - generated
            )
            row, offset = ragged(gained)
            source = first[row] + offset
            self.tokens[slots[row], begin[row] + offset] = token[source]
            self.logprobs[slots[row], generated[row] + offset] = logprobs[:, source].T
        self.length[slots] = begin + gained
        # Keys and values are those of the accepted tokens; whatever lies behind them is overwritten
        # before it is read.
        self.cached[slots] = begin + gained - 1
        if proposer is not None:
            tokens = [
                token[begin:end]
                for begin, end in zip(first.tolist(), (first + gained).tolist(), strict=True)
            ]
            proposer.observe(
                [self.rows[slot] for slot in slots.tolist()],
                tokens,
                num_draft,
                np.minimum(accepted, gained),
            )

    def _finish(self, slots: np.ndarray, stop_token_ids: tuple[int, ...]) -> list[Row]:
        """Take out the rows in `slots` whose last token ends them."""
        stopped = is_stop(self.tokens[slots, self.length[slots] - 1], stop_token_ids)
        full = self.length[slots] - self.prompt_length[slots] >= self.limit[slots]
        finished: list[Row] = []
        if not (stopped | full).any():
            return finished
        for slot, by_stop in zip(
            slots[stopped | full][::-1], stopped[stopped | full][::-1], strict=True
        ):
            # From the last slot down, so that the row moving into a freed slot is never one that
            # has finished too.
            row = self._take_results(slot)
            row.finish = "stop" if by_stop else "length"
            finished.append(row)
            self._free(slot)
        return finished

    def _place(self, slot: int) -> None:
        """Write a row at its beginning into its slot, whose keys and values stay if they are those
        of its prompt."""
        row = self.rows[slot]
        prompt_id = self._prompt_ids.setdefault(row.prompt, len(self._prompt_ids))
        length, known = len(row.prompt), len(row.tokens)
        self.cached[slot] = (
            min(self.cached[slot], length - 1) if self.prompt_id[slot] == prompt_id else 0
        )
        self.tokens[slot, :length] = row.prompt
        self.tokens[slot, length : length + known] = row.tokens
        self.logprobs[slot, :known] = (
            np.stack((row.logprob, row.full_logprob), axis=1) if len(row.logprob) else 0.0
        )
        self.prompt_length[slot], self.length[slot] = length, length + known
        self.limit[slot] = row.max_new_tokens
        self.prompt_id[slot] = prompt_id
        self.runner.place(slot, row)

    def _take_results(self, slot: int) -> Row:
        row = self.rows[slot]
        begin, end = self.prompt_length[slot], self.length[slot]
        row.tokens = self.tokens[slot, begin:end].copy()
        row.logprob, row.full_logprob = self.logprobs[slot, : end - begin].T.copy()
        return row

    def _free(self, slot: int) -> None:
        """Refill a slot from the queue, or move the last active row into it."""
        if self.queue:
            self.rows[slot] = self.queue.popleft()
            self._place(slot)
            return
        last = len(self.rows) - 1
        moved = self.rows.pop()
        if slot == last:
            return
        self.rows[slot] = moved
        self.runner.move(last, int(slot), int(self.cached[last]))
        for array in self._per_slot:
            array[slot] = array[last]
        self.prompt_id[last] = -1


def num_accepted(token: np.ndarray, draft: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Draft tokens of each row before its first wrong one, int64 [R].

    token: int64 [T], what the row samples in place of each draft token and after the last; draft:
    int64 [S]; counts: int64 [R], draft tokens of each row.
    """
    if len(draft) == 0:
        return np.zeros(len(counts), np.int64)
    behind = (counts + 1).cumsum()
    is_wrong = np.ones(len(token), bool)  # as the position after a row's draft is taken to be
    is_drafted = is_wrong.copy()
    is_drafted[behind - 1] = False
    is_wrong[is_drafted] = token[is_drafted] != draft
    wrong, first = is_wrong.nonzero()[0], behind - counts - 1
    return wrong[wrong.searchsorted(first)] - first


def num_gained(
    token: np.ndarray,
    accepted: np.ndarray,
    counts: np.ndarray,
    stop_token_ids: tuple[int, ...],
    *,
    limit: np.ndarray,
) -> np.ndarray:
    """Tokens each row gains by a verification, int64 [R]: the accepted and the next, cut after a
    stop token and at `limit`.

    All on the host. token: int64 [T]; accepted, counts: int64 [R]; limit: int64 [R], tokens a row
    may still get, at least 1.
    """
    stop_at = np.where(is_stop(token, stop_token_ids), ragged(counts + 1)[1], len(token))
    first_stop = np.minimum.reduceat(stop_at, np.cumsum(counts + 1) - (counts + 1))
    return np.minimum(np.minimum(accepted, first_stop) + 1, limit)


def is_stop(token: np.ndarray, stop_token_ids: tuple[int, ...]) -> np.ndarray:
    """bool [T]; what np.isin says, ten times sooner for a few stop tokens."""
    is_any = np.zeros(len(token), bool)
    for stop in stop_token_ids:
        is_any |= token == stop
    return is_any
