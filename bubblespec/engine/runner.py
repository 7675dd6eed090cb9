"""A model's forward over the batch that the engine has planned: keys and values, CUDA graphs,
noise and verification; on one rank, or on all ranks of a tensor-parallel group together.

Shape legend: R active rows, N tokens in a forward, M rows that sample in it, T positions sampled, T
= M + draft tokens.
"""

import contextlib
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.engine.attention import ALONE, reads_pages
from bubblespec.engine.batch import Batch
from bubblespec.engine.compiled import compiled_best_and_sum
from bubblespec.engine.graphs import ForwardGraphs, can_capture
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import forward_hidden
from bubblespec.engine.noise import stream_keys
from bubblespec.engine.output_head import output_head
from bubblespec.engine.packing import PAGE, CachePacking, to_device
from bubblespec.engine.pages import Pages
from bubblespec.engine.ragged import ragged
from bubblespec.engine.sampling import SamplingParams, Verified, sample, verify
from bubblespec.mechanisms.batch_invariant import MIN_ROWS, FixedMeans, fixed_best_and_sum
from bubblespec.mechanisms.tp_tail.shards import Shards, TPGroup
from bubblespec.types import Row

KEYS_AHEAD = 64  # positions whose noise keys are made at once


class ModelRunner:
    """A `Runner`. The model is used as it is at each forward: train it between rollouts."""

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        max_length: int,
        seed: int,
        *,
        max_num_batched_tokens: int = 2048,
        kernel: str = "sdpa",
        enforce_eager: bool = False,
        tp: TPGroup | None = None,
        beside: ForwardGraphs | None = None,
        batch_invariant: bool = False,
        num_pages: int | None = None,
        page_size: int | None = None,
    ):
        """max_length: prompt plus response in tokens; max_num_batched_tokens: of one forward, at
        least num_slots; kernel: see attention.py; enforce_eager: nothing compiled and no CUDA
        graphs, which need a kernel for variable lengths on CUDA anyway; tp: ranks that compute each
        forward together, over the same rows in the same slots; beside: graphs whose memory this
        one's share; batch_invariant: see batch_invariant.py, of a model that `make_invariant` was
        given; num_pages: of keys and values, by default as many as full rows in all slots take;
        page_size: in positions, by default PAGE where the kernel reads pages, else a page is a
        whole slot. Raises TPUnsupported for a model that so many ranks cannot share."""
        self.num_slots, self.max_length = num_slots, max_length
        self.max_num_batched_tokens, self.kernel = max_num_batched_tokens, kernel
        self.model, self.device = model, model.device
        self.seed = seed
        self.shards = None if tp is None else Shards(model, tp)
        self.head, self.sample = output_head(model), sample
        if self.shards is not None:
            self.head, self.sample = self.shards.logits, self.shards.sample
        if self.device.type == "cuda" and not enforce_eager:
            self.sample = partial(self.sample, reduce=compiled_best_and_sum)
        self.batch_invariant = batch_invariant
        # Of the policy's forwards; training and a drafter need not be invariant.
        invariant = {"sdpa": "alone", "varlen": ALONE} if batch_invariant else {}
        self._kernel = invariant.get(kernel, kernel)
        if batch_invariant:
            self.sample = partial(self.sample, reduce=fixed_best_and_sum)
        if page_size is None and reads_pages(kernel):
            page_size = PAGE
        slot_length, self.pages = max_length, None
        if page_size is not None:
            per_row = -(-max_length // page_size)
            slot_length = per_row * page_size
            count = num_slots * per_row if num_pages is None else num_pages
            self.pages = Pages(num_slots, slot_length, count, page_size)
        has_graphs = not enforce_eager and can_capture(self.device, kernel)
        has_graphs = has_graphs and (tp is None or tp.can_capture)
        # Its tensors are made at the first forward.
        self.cache = KVCache(num_slots, slot_length, int(has_graphs), self.pages)
        self.graphs: ForwardGraphs | None = None
        if has_graphs:
            parts = (model, self.cache, self._kernel, max_num_batched_tokens)
            options = {"shards": self.shards, "beside": beside}
            options["min_tokens"] = MIN_ROWS if batch_invariant else 1
            self.graphs = ForwardGraphs(*parts, **options)
        self._noise_key = np.zeros((num_slots, 3), np.int64)  # uid, visit, sample
        # Keys of the noise streams of each response position, worked out ahead of its first
        # `_keyed` positions.
        self._stream_key = np.zeros((num_slots, max_length, 4), np.int32)
        self._keyed = np.zeros(num_slots, np.int64)
        self.follower = None
        """A `DrafterRunner` that keeps something of its own for the rows in slots."""

    def place(self, slot: int, row: Row) -> None:
        """See `Runner`: the slot's noise is that of the row."""
        self._noise_key[slot] = row.id
        # those before are not sampled again, unless the row is rewound
        self._keyed[slot] = 0 if row.has_turns else len(row.tokens)
        if self.follower is not None:
            self.follower.forget(slot)

    def move(self, source: int, target: int, length: int) -> None:
        """See `Runner`: noise keys and, without pages, keys and values are copied."""
        self.cache.move(source, target, length)
        for array in (self._noise_key, self._stream_key, self._keyed):
            array[target] = array[source]
        if self.follower is not None:
            self.follower.move(source, target)

    def share(self, source: np.ndarray, target: np.ndarray, length: np.ndarray) -> None:
        """See `Runner`: keys and values are copied, or their pages shared."""
        self.cache.share(source, target, length)
        if self.follower is not None:
            self.follower.share(source, target, length)

    def release(self) -> None:
        """See `Runner`."""
        self.cache.clear()
        if self.graphs is not None:  # they know the tensors by their addresses
            self.graphs.clear()
        if self.follower is not None:
            self.follower.release()

    @torch.inference_mode()
    def launch(self, batch: Batch, params: SamplingParams) -> Callable[[], Verified]:
        """See `Runner`. The host waits for the GPU once, in the call that this returns."""
        packing = CachePacking(self.cache, batch.start, batch.count, batch.index, self.device)
        hidden = self.hidden(batch.tokens, packing)
        if self.follower is not None:
            self.follower.note(batch, hidden)
        if len(batch.slots) == 0:
            return self._wait
        sampled = batch.num_draft + 1
        row, offset = ragged(sampled)
        packed = (np.cumsum(batch.count)[batch.slots] - sampled)[row] + offset
        hidden = hidden[to_device(packed, self.device)]
        position = batch.generated[row] + offset
        keys = self.noise_keys(batch.slots[row], position)
        num_generated = to_device(position, self.device)
        sampled = self.sample(self.head(hidden), keys, num_generated, params)
        self._make_keys(batch.slots, batch.generated + batch.num_draft + 1 + KEYS_AHEAD // 2)
        return partial(verify, sampled, batch.draft, batch.num_draft)

    def _wait(self) -> Verified:
        """Wait for a forward in which nothing is sampled: its time is not the next one's."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return Verified(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((2, 0)))

    def hidden(self, tokens: np.ndarray, packing: CachePacking) -> torch.Tensor:
        """Hidden states of the packed tokens, [N or more, hidden]; with a graph valid until the
        next forward."""
        is_fixed = self.batch_invariant and self.device.type == "cuda"
        with FixedMeans() if is_fixed else contextlib.nullcontext():
            hidden = None if self.graphs is None else self.graphs.forward(tokens, packing)
            if hidden is not None:
                return hidden
            tokens = to_device(tokens, self.device)
            with contextlib.nullcontext() if self.shards is None else self.shards.applied():
                return forward_hidden(self.model, tokens, packing, self._kernel)

    def noise_keys(self, slots: np.ndarray, position: np.ndarray) -> torch.Tensor:
        """Keys of the noise of response positions, int32 [T, 4]. slots, position: int64 [T], rows
        one after the other."""
        self._make_keys(slots, position + 1)
        return to_device(self._stream_key[slots, position], self.device)

    def _make_keys(self, slots: np.ndarray, needed: np.ndarray) -> None:
        """Work out the keys of the first `needed` positions, int64 [slots]; a slot may occur
        several times. KEYS_AHEAD more than needed, as one at a time costs as much as many."""
        needed = np.minimum(needed, self.max_length)
        if (needed <= self._keyed[slots]).all():
            return
        most = np.zeros(self.num_slots, np.int64)
        np.maximum.at(most, slots, needed)
        lacking = np.flatnonzero(most > self._keyed)
        end = np.minimum(most[lacking] + KEYS_AHEAD, self.max_length)
        row, offset = ragged(end - self._keyed[lacking])
        slot = lacking[row]
        new = self._keyed[slot] + offset
        self._stream_key[slot, new] = stream_keys(self.seed, *self._noise_key[slot].T, new)
        self._keyed[lacking] = end
