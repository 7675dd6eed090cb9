"""Continuous-batching generation as a stepper: add rows, run one packed forward at a time, drop rows, stop at any point.

Active rows always occupy slots 0..R-1, so attention reads the cache through a slice and never gathers it: the slot of a
finished row is refilled from the queue at once, or else the last active row moves into it. Rows with the same prompt share
one prefill: the first of them computes the prompt's keys and values, the others copy them and feed only its last token.

What a row's tokens are depends on the weights, the prompt and the row's noise key alone: not on the other rows, the order
of admission, the chunk size or the number of slots.

Shape legend: R active rows, N tokens in a forward, M rows that sample in it.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import forward_hidden, output_head
from bubblespec.engine.noise import stream_keys
from bubblespec.engine.packing import pack_rows
from bubblespec.engine.sampling import SamplingParams, sample


@dataclass(eq=False)
class Row:
    """One response to generate, and afterwards the response.

    uid, step and sample are the noise key (uid 63 bits, step below 2**32, sample below 4096). tokens: int64 response, with its
    stop token; logprob, full_logprob: float32, see `sample`. finish: "stop", "length", or None while it is not finished.
    """

    uid: int
    step: int
    sample: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    logprob: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    full_logprob: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    finish: str | None = None


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
    ):
        """max_length: longest prompt plus response in tokens; max_batch_tokens: most tokens in a forward, at least num_slots."""
        if max_batch_tokens < num_slots:
            raise ValueError(f"max_batch_tokens = {max_batch_tokens} is below num_slots = {num_slots}")
        self.model, self.head, self.kernel = model, output_head(model), kernel
        self.device = model.device
        self.seed, self.max_batch_tokens = seed, max_batch_tokens
        self.params = SamplingParams()
        slot_length = -(-max_length // 256) * 256 if kernel == "flash_attn" else max_length
        self.cache = KVCache(num_slots, slot_length)  # tensors are made at the first forward
        self.queue: deque[Row] = deque()
        self.rows: list[Row] = []  # the row in each of slots 0..R-1
        self.num_forwards = 0
        self.num_fed_tokens = 0
        # Per slot. A row's known tokens are tokens[: length], of which the first `cached` have keys and values.
        self.tokens = np.zeros((num_slots, max_length), np.int64)
        self.length = np.zeros(num_slots, np.int64)
        self.cached = np.zeros(num_slots, np.int64)
        self.prompt_length = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int64)
        self.logprobs = np.zeros((num_slots, max_length, 2), np.float32)
        self.noise_key = np.zeros((num_slots, 3), np.int64)  # uid, step, sample
        # The prompt whose keys and values a slot holds, also after its row has finished; -1 for none.
        self.prompt_id = np.full(num_slots, -1, np.int64)
        self._prompt_ids: dict[tuple[int, ...], int] = {}

    @property
    def is_idle(self) -> bool:
        return not self.rows and not self.queue

    def add(self, rows: list[Row]) -> None:
        """Queue rows; those with the same prompt should be adjacent, so that they share its prefill."""
        for row in rows:
            if not 1 <= len(row.prompt) < len(row.prompt) + row.max_new_tokens <= self.tokens.shape[1]:
                raise ValueError(
                    f"a prompt of {len(row.prompt)} and up to {row.max_new_tokens} new tokens do not fit max_length = "
                    f"{self.tokens.shape[1]}"
                )
        self.queue.extend(rows)

    def drop(self, row: Row) -> None:
        """Take a row out before it has finished; it keeps the tokens sampled so far and can be added again from the start."""
        if row in self.queue:
            self.queue.remove(row)
        else:
            slot = self.rows.index(row)
            self._take_results(slot)
            self._free(slot)

    def reset(self) -> None:
        """Forget all rows and all cached keys and values. Needed whenever the weights have changed."""
        self.queue.clear()
        self.rows.clear()
        self.prompt_id.fill(-1)
        self._prompt_ids.clear()

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
        packing = pack_rows(self.cache, self.cached[:active].copy(), count, self.device)
        fed = self.tokens[packing.index[0], packing.index[1]]
        hidden = forward_hidden(self.model, torch.from_numpy(fed).to(self.device), packing, self.kernel)
        self.num_forwards += 1
        self.num_fed_tokens += len(fed)
        self.cached[:active] += count
        slots = np.flatnonzero(self.cached[:active] == self.length[:active])
        if len(slots) == 0:
            return []
        last = np.cumsum(count)[slots] - 1
        self._sample(slots, hidden[torch.from_numpy(last).to(self.device)])
        return self._finish(slots)

    def _plan(self) -> np.ndarray:
        """New tokens of each active row in this forward, int64 [R]: decoding rows first, then prompts under the token budget."""
        active = len(self.rows)
        self._share_prefills()
        wanted = self.length[:active] - self.cached[:active]
        prefilling = self.cached[:active] < self.prompt_length[:active] - 1
        count = np.where(prefilling, 0, wanted)
        budget = self.max_batch_tokens - count.sum()
        leaders = set()
        for slot in np.flatnonzero(prefilling):
            if self.prompt_id[slot] in leaders:
                continue  # another row is computing this prompt
            leaders.add(self.prompt_id[slot])
            count[slot] = min(wanted[slot], budget)
            budget -= count[slot]
        return count

    def _share_prefills(self) -> None:
        """Rows that still need a prompt which another slot holds whole copy its keys and values."""
        active = len(self.rows)
        needy = np.flatnonzero(self.cached[:active] < self.prompt_length[:active] - 1)
        if len(needy) == 0:
            return
        whole = self.cached >= self.prompt_length - 1
        for slot in needy:
            sources = np.flatnonzero(whole & (self.prompt_id == self.prompt_id[slot]))
            if len(sources):
                self.cached[slot] = self.prompt_length[slot] - 1
                self.cache.copy(int(sources[0]), int(slot), int(self.cached[slot]))

    def _sample(self, slots: np.ndarray, hidden: torch.Tensor) -> None:
        """Append one token to each row in `slots`. hidden: [M, hidden size]."""
        position = self.length[slots] - self.prompt_length[slots]
        uid, step, index = self.noise_key[slots].T
        keys = torch.from_numpy(stream_keys(self.seed, uid, step, index, position)).to(self.device)
        num_generated = torch.from_numpy(position).to(self.device)
        token, logprob, full_logprob = sample(self.head(hidden), keys, num_generated, self.params)
        # One copy to the host: token ids are exact in float64.
        result = torch.stack((token.double(), logprob.double(), full_logprob.double())).cpu().numpy()
        self.tokens[slots, self.length[slots]] = result[0].astype(np.int64)
        self.logprobs[slots, position] = result[1:].T
        self.length[slots] += 1

    def _finish(self, slots: np.ndarray) -> list[Row]:
        """Take out the rows in `slots` whose last token ends them."""
        stopped = np.isin(self.tokens[slots, self.length[slots] - 1], self.params.stop_token_ids)
        full = self.length[slots] - self.prompt_length[slots] >= self.limit[slots]
        finished = []
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
        length = len(row.prompt)
        held = min(self.cached[slot], length - 1) if self.prompt_id[slot] == prompt_id else 0
        self.tokens[slot, :length] = row.prompt
        self.length[slot] = self.prompt_length[slot] = length
        self.cached[slot] = held
        self.limit[slot] = row.max_new_tokens
        self.noise_key[slot] = row.uid, row.step, row.sample
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
        per_slot = (self.tokens, self.length, self.cached, self.prompt_length, self.limit, self.logprobs, self.noise_key)
        for array in (*per_slot, self.prompt_id):
            array[slot] = array[last]
        self.prompt_id[last] = -1
