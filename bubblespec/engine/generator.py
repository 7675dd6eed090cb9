"""Continuous-batching generation as a stepper: add rows, run one packed forward at a time, drop rows, stop at any point.

Active rows always occupy slots 0..R-1, so attention reads the cache through a slice and never gathers it: the slot of a
finished row is refilled from the queue at once, or else the last active row moves into it. Rows with the same prompt share
one prefill: the first of them computes the prompt's keys and values, the others copy them and feed only its last token.

A forward feeds "n new tokens of row r", whether they are a prompt, one sampled token, or that token and a draft after it.
Draft tokens come from a `speculator`, which the engine knows nothing else about: `verify` accepts those that the row would
have sampled anyway, and rolling back the others is lowering the row's length.

What a row's tokens are depends on the weights, the prompt and the row's noise key alone: not on the other rows, the order
of admission, the chunk size, the number of slots or the drafts.

Shape legend: R active rows, N tokens in a forward, M rows that sample in it, T positions sampled, T = M + draft tokens.
"""

from collections import deque
from collections.abc import Collection
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.engine.graphs import ForwardGraphs, can_capture
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import forward_hidden, output_head
from bubblespec.engine.noise import stream_keys
from bubblespec.engine.packing import PAGE, CachePacking, pack_rows, to_device
from bubblespec.engine.sampling import SamplingParams
from bubblespec.engine.verify import is_stop, num_gained, verify
from bubblespec.records import Load, Row

KEYS_AHEAD = 64  # positions whose noise keys are made at once


class Speculator(Protocol):
    """Where draft tokens come from."""

    def propose(self, rows: list[Row], lengths: np.ndarray, room: np.ndarray, budget: int) -> list[np.ndarray | None]:
        """Draft tokens int64 [n] for each of the rows about to decode, or None. lengths: int64 [rows], response tokens so
        far; room: int64 [rows], most draft tokens of each; budget: most draft tokens together (what exceeds either is cut)."""

    def observe(self, rows: list[Row], tokens: list[np.ndarray], num_draft: np.ndarray, num_accepted: np.ndarray) -> None:
        """Rows have gained `tokens`, of which a draft of `num_draft` tokens gave the first `num_accepted`, int64 [rows]."""


class Generator:
    """Slots, queue and the packed forward. The model is used as it is at each step: train it between rollouts."""

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        max_length: int,
        seed: int,
        max_batch_tokens: int = 2048,
        kernel: str = "sdpa",
        speculator: Speculator | None = None,
        rule: str = "coupled",
        enforce_eager: bool = False,
    ):
        """max_length: longest prompt plus response in tokens; max_batch_tokens: most tokens in a forward, at least num_slots;
        enforce_eager: no CUDA graphs, which need a kernel for variable lengths on CUDA anyway."""
        if max_batch_tokens < num_slots:
            raise ValueError(f"max_batch_tokens = {max_batch_tokens} is below num_slots = {num_slots}")
        self.model, self.head, self.kernel = model, output_head(model), kernel
        self.device = model.device
        self.seed, self.max_batch_tokens = seed, max_batch_tokens
        self.max_prefill_tokens = max_batch_tokens  # most prompt tokens in one forward; the caller may change it at any time
        self.params = SamplingParams()
        self.speculator, self.rule = speculator, rule
        slot_length = -(-max_length // PAGE) * PAGE if kernel == "flash_attn" else max_length
        has_graphs = not enforce_eager and can_capture(self.device, kernel)
        self.cache = KVCache(num_slots, slot_length, int(has_graphs))  # tensors are made at the first forward
        self.graphs = ForwardGraphs(model, self.cache, kernel, max_batch_tokens) if has_graphs else None
        self.queue: deque[Row] = deque()
        self.rows: list[Row] = []  # the row in each of slots 0..R-1
        self.num_forwards = 0
        self.load: Load | None = None  # of the last forward
        # Per slot. A row's known tokens are tokens[: length], of which the first `cached` have keys and values.
        self.tokens = np.zeros((num_slots, max_length), np.int64)
        self.length = np.zeros(num_slots, np.int64)
        self.cached = np.zeros(num_slots, np.int64)
        self.prompt_length = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int64)
        self.logprobs = np.zeros((num_slots, max_length, 2), np.float32)
        self.noise_key = np.zeros((num_slots, 3), np.int64)  # uid, step, sample
        # Keys of the noise streams of each response position, worked out ahead of its first `keyed` positions.
        self.stream_key = np.zeros((num_slots, max_length, 4), np.int32)
        self.keyed = np.zeros(num_slots, np.int64)
        # The prompt whose keys and values a slot holds, also after its row has finished; -1 for none.
        self.prompt_id = np.full(num_slots, -1, np.int64)
        self._prompt_ids: dict[tuple[int, ...], int] = {}
        # What moves with a row to another slot.
        described = (self.tokens, self.length, self.cached, self.prompt_length, self.limit, self.logprobs, self.noise_key)
        self.per_slot = (*described, self.stream_key, self.keyed, self.prompt_id)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing left to generate."""
        return not self.rows and not self.queue

    def add(self, rows: list[Row]) -> None:
        """Queue rows; those with the same prompt should be adjacent, so that they share its prefill."""
        for row in rows:
            if not (row.prompt and row.max_new_tokens > 0 and len(row.prompt) + row.max_new_tokens <= self.tokens.shape[1]):
                raise ValueError(
                    f"a prompt of {len(row.prompt)} and up to {row.max_new_tokens} new tokens do not fit max_length = "
                    f"{self.tokens.shape[1]}"
                )
            if len(row.tokens) >= row.max_new_tokens:
                raise ValueError(f"a row with {len(row.tokens)} of at most {row.max_new_tokens} tokens has none left to generate")
        self.queue.extend(rows)

    def drop(self, row: Row) -> None:
        """Take a row out before it has finished; it keeps its tokens so far, and goes on after them if it is added again."""
        if row in self.queue:
            self.queue.remove(row)
        else:
            slot = self.rows.index(row)
            self._take_results(slot)
            self._free(slot)

    def collect(self) -> list[Row]:
        """The rows in slots, with their tokens so far in them, and those in the queue as they are. All stay where they are."""
        return [self._take_results(slot) for slot in range(len(self.rows))] + list(self.queue)

    def decoding(self) -> list[Row]:
        """Rows whose prompt and all of whose tokens but the last are in the cache."""
        active = len(self.rows)
        return [self.rows[slot] for slot in np.flatnonzero(self.cached[:active] == self.length[:active] - 1)]

    def reset(self, kept: Collection[Row] = ()) -> None:
        """Forget all rows, all cached keys and values and the limit on prefills. Needed whenever the weights have changed.

        Rows to be `kept` must be decoding. They go on over keys and values that older weights have computed: what they then
        generate is a sample of no policy, and good for nothing but drafts.
        """
        self.queue.clear()
        stay = {id(row) for row in kept}
        for slot in reversed(range(len(self.rows))):
            if id(self.rows[slot]) not in stay:
                self._free(slot)
        self.max_prefill_tokens = self.max_batch_tokens
        self.prompt_id.fill(-1)  # so that nobody shares the prompt of a kept row
        self._prompt_ids.clear()

    def release(self) -> None:
        """Forget all rows, and give the memory of keys and values back until the next forward."""
        self.reset()
        self.cache.clear()
        if self.graphs is not None:  # they know the tensors by their addresses
            self.graphs.clear()

    def run(self, rows: list[Row]) -> list[Row]:
        """Generate all rows to their end; returns them as given."""
        self.add(rows)
        while not self.is_idle:
            self.step()
        return rows

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """One forward: admit, feed every row's next tokens, sample where a row's known tokens end. Returns finished rows."""
        while self.queue and len(self.rows) < self.cache.num_slots:
            self.rows.append(self.queue[0])
            self._place(len(self.rows) - 1, self.queue.popleft())
        if not self.rows:
            return []
        count = self._plan()
        active = len(self.rows)
        num_prompt = np.minimum(np.maximum(self.prompt_length[:active] - 1 - self.cached[:active], 0), count)
        ends = self.cached[:active] + count
        slots = (ends >= self.length[:active]).nonzero()[0]
        num_draft = ends[slots] - self.length[slots]
        wide = np.count_nonzero(count > 1)
        self.load = Load(active, int(count.sum()), wide, int(ends.sum()), int(num_prompt.sum()), int(num_draft.sum()))
        accepted, token, logprobs = self._forward(count, slots, num_draft)
        self.num_forwards += 1
        self.cached[:active] = ends
        if len(slots) == 0:
            return []
        self._append(slots, num_draft, accepted, token, logprobs)
        return self._finish(slots)

    def _hidden(self, tokens: np.ndarray, packing: CachePacking) -> torch.Tensor:
        """Hidden states of the packed tokens, [N or more, hidden]; with a graph valid until the next forward."""
        hidden = self.graphs.forward(tokens, packing) if self.graphs is not None else None
        if hidden is None:
            hidden = forward_hidden(self.model, to_device(tokens, self.device), packing, self.kernel)
        return hidden

    def _plan(self) -> np.ndarray:
        """New tokens of each active row in this forward, int64 [R]: decoding rows first, then prompts under the token budget,
        then drafts, which are written behind the known tokens of their rows."""
        active = len(self.rows)
        wanted = self.length[:active] - self.cached[:active]
        if wanted.max() > 1:
            self._share_prefills()
            wanted = self.length[:active] - self.cached[:active]
        prefilling = wanted > 1
        count = np.where(prefilling, 0, wanted)
        budget = int(self.max_batch_tokens - count.sum())
        # Prompts alone must get on, whatever the caller's limit is.
        prefill_budget = max(self.max_prefill_tokens, 1)
        leaders = set()
        for slot in np.flatnonzero(prefilling):
            if self.cached[slot] < self.prompt_length[slot] - 1:
                if self.prompt_id[slot] in leaders:
                    continue  # another row is computing this prompt
                leaders.add(self.prompt_id[slot])
            count[slot] = min(wanted[slot], budget, prefill_budget)
            budget -= int(count[slot])
            prefill_budget -= int(count[slot])
        decoding = (~prefilling).nonzero()[0]
        if self.speculator is not None and budget > 0 and len(decoding):
            count[decoding] += self._write_drafts(decoding, budget)
        return count

    def _write_drafts(self, slots: np.ndarray, budget: int) -> np.ndarray:
        """Ask for drafts and put them behind the rows' known tokens; returns their lengths, int64 [slots]."""
        generated = self.length[slots] - self.prompt_length[slots]
        room = self.limit[slots] - generated - 1  # the sampled token after the draft needs a place too
        drafts = self.speculator.propose([self.rows[s] for s in slots.tolist()], generated, room, budget)
        lengths = np.zeros(len(slots), np.int64)
        for i, draft in enumerate(drafts):
            if draft is None:
                continue
            kept = min(len(draft), int(room[i]), budget)
            begin = self.length[slots[i]]
            self.tokens[slots[i], begin : begin + kept] = draft[:kept]
            lengths[i] = kept
            budget -= kept
        return lengths

    def _share_prefills(self) -> None:
        """Rows that still need a prompt which another slot holds whole copy its keys and values."""
        active = len(self.rows)
        needy = np.flatnonzero(self.cached[:active] < self.prompt_length[:active] - 1)
        if len(needy) == 0:
            return
        whole = np.flatnonzero(self.cached >= self.prompt_length - 1)[::-1]
        first_with = dict(zip(self.prompt_id[whole].tolist(), whole.tolist(), strict=True))
        for slot in needy:
            source = first_with.get(int(self.prompt_id[slot]))
            if source is not None:
                self.cached[slot] = self.prompt_length[slot] - 1
                self.cache.copy(source, int(slot), int(self.cached[slot]))

    def _forward(self, count: np.ndarray, slots: np.ndarray, num_draft: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All that the engine needs of the model: feed `count` tokens of each active row, int64 [R], and verify the drafts of
        `num_draft` tokens, int64 [M], which stand behind the known tokens of the rows in `slots`.

        Returns, as `Verified` has them, accepted int64 [M], the tokens int64 [T], and both log-probabilities [2, T].
        """
        active = len(self.rows)
        packing = pack_rows(self.cache, self.cached[:active].copy(), count, self.device)
        fed = self.tokens[packing.index[0], packing.index[1]]
        hidden = self._hidden(fed, packing)
        if len(slots) == 0:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty((2, 0))
        hidden = hidden[to_device(_last_of_each(count, slots, num_draft + 1), self.device)]
        row, offset = _ragged(num_draft + 1)
        generated = self.length[slots] - self.prompt_length[slots]
        position = generated[row] + offset
        self._make_keys(slots, generated + num_draft + 1)
        keys = to_device(self.stream_key[slots[row], position], self.device)
        draft_row, draft_offset = _ragged(num_draft)
        draft = to_device(self.tokens[slots[draft_row], self.length[slots[draft_row]] + draft_offset], self.device)
        position = to_device(position, self.device)
        verified = verify(self.head(hidden), draft, num_draft, keys, position, self.params, self.rule)
        # One copy to the host: token ids are exact in float64.
        result = torch.cat([part.double() for part in verified]).cpu().numpy()
        accepted, result = result[: len(slots)].astype(np.int64), result[len(slots) :].reshape(3, -1)
        return accepted, result[0].astype(np.int64), result[1:]

    def _append(
        self, slots: np.ndarray, num_draft: np.ndarray, accepted: np.ndarray, token: np.ndarray, logprobs: np.ndarray
    ) -> None:
        """Append what the rows in `slots` gain; see `_forward`."""
        begin, generated = self.length[slots], self.length[slots] - self.prompt_length[slots]
        if len(token) == len(slots):  # no drafts; what follows gives the same
            first, gained = np.arange(len(slots)), np.ones(len(slots), np.int64)
            self.tokens[slots, begin] = token
            self.logprobs[slots, generated] = logprobs.T
        else:
            first = (num_draft + 1).cumsum() - (num_draft + 1)
            gained = num_gained(token, accepted, num_draft, self.params.stop_token_ids, self.limit[slots] - generated)
            row, offset = _ragged(gained)
            source = first[row] + offset
            self.tokens[slots[row], begin[row] + offset] = token[source]
            self.logprobs[slots[row], generated[row] + offset] = logprobs[:, source].T
        self.length[slots] = begin + gained
        # Keys and values are those of the accepted tokens; whatever lies behind them is overwritten before it is read.
        self.cached[slots] = begin + gained - 1
        if self.speculator is not None:
            tokens = [token[begin:end] for begin, end in zip(first.tolist(), (first + gained).tolist(), strict=True)]
            self.speculator.observe([self.rows[slot] for slot in slots.tolist()], tokens, num_draft, np.minimum(accepted, gained))

    def _make_keys(self, slots: np.ndarray, needed: np.ndarray) -> None:
        """Keys of the first `needed` response positions of each slot, int64 [M], and of KEYS_AHEAD more: a key at a time costs
        as much as many."""
        short = needed > self.keyed[slots]
        if not short.any():
            return
        slots, end = slots[short], np.minimum(needed[short] + KEYS_AHEAD, self.stream_key.shape[1])
        row, offset = _ragged(end - self.keyed[slots])
        slot = slots[row]
        position = self.keyed[slot] + offset
        uid, step, sample = self.noise_key[slot].T
        self.stream_key[slot, position] = stream_keys(self.seed, uid, step, sample, position)
        self.keyed[slots] = end

    def _finish(self, slots: np.ndarray) -> list[Row]:
        """Take out the rows in `slots` whose last token ends them."""
        stopped = is_stop(self.tokens[slots, self.length[slots] - 1], self.params.stop_token_ids)
        full = self.length[slots] - self.prompt_length[slots] >= self.limit[slots]
        finished: list[Row] = []
        if not (stopped | full).any():
            return finished
        for slot, by_stop in zip(slots[stopped | full][::-1], stopped[stopped | full][::-1], strict=True):
            # From the last slot down, so that the row moving into a freed slot is never one that has finished too.
            row = self._take_results(slot)
            row.finish = "stop" if by_stop else "length"
            finished.append(row)
            self._free(slot)
        return finished

    def _place(self, slot: int, row: Row) -> None:
        """Put a row at its beginning into a slot, keeping the slot's keys and values if they are those of its prompt."""
        prompt_id = self._prompt_ids.setdefault(row.prompt, len(self._prompt_ids))
        length, known = len(row.prompt), len(row.tokens)
        held = min(self.cached[slot], length - 1) if self.prompt_id[slot] == prompt_id else 0
        self.tokens[slot, :length] = row.prompt
        self.tokens[slot, length : length + known] = row.tokens
        self.logprobs[slot, :known] = np.stack((row.logprob, row.full_logprob), axis=1) if len(row.logprob) else 0.0
        self.prompt_length[slot], self.length[slot] = length, length + known
        self.cached[slot] = held
        self.limit[slot] = row.max_new_tokens
        self.noise_key[slot] = row.id.uid, row.id.visit, row.id.sample
        self.keyed[slot] = 0
        self.prompt_id[slot] = prompt_id

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
            self._place(slot, self.rows[slot])
            return
        last = len(self.rows) - 1
        moved = self.rows.pop()
        if slot == last:
            return
        self.rows[slot] = moved
        self.cache.copy(last, int(slot), int(self.cached[last]))
        for array in self.per_slot:
            array[slot] = array[last]
        self.prompt_id[last] = -1


def _ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For rows of the given lengths one after the other: each element's row and its offset in it, int64 [sum] each."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)


def _last_of_each(count: np.ndarray, slots: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Packed indices of the last `wanted` tokens of each row in `slots`, where all rows feed `count` tokens."""
    row, offset = _ragged(wanted)
    return (np.cumsum(count)[slots] - wanted)[row] + offset
