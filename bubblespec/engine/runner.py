"""Forwards of the batches that the engine has planned: cache, CUDA graphs, noise, verification.

Shape legend: R active rows, N tokens in a forward, M rows that sample in it, T positions sampled, T
= M + draft tokens.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.engine.arrays import ragged, reading, to_device
from bubblespec.engine.batch import Batch, Plan, RowUpdates, Runner, SamplerOutput, SamplingParams
from bubblespec.engine.forward import ModelForward, SlotFollower
from bubblespec.engine.graphs import TILES, tokens_of
from bubblespec.engine.kv_cache import PAGE, CachePacking, KVCache
from bubblespec.engine.model import layer_heads, state_layers
from bubblespec.engine.ops import torch_ops
from bubblespec.engine.pages import Pages
from bubblespec.engine.sampling import Noise, drawn, read, stream_counters, stream_keys
from bubblespec.engine.states import StateCache
from bubblespec.engine.step_graphs import StepGraphs
from bubblespec.engine.weights import join
from bubblespec.types import Row

KEYS_AHEAD = 64  # positions whose noise keys are made at once


class ModelRunner(Runner):
    """A `Runner`. The model is used as it is at each forward: train it between rollouts."""

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        max_length: int,
        seed: int,
        *,
        forward: ModelForward | None = None,
        max_num_batched_tokens: int = 2048,
        pages: Pages | None = None,
    ):
        """Lengths in tokens; max_num_batched_tokens: of one forward, at least num_slots.

        pages: by default as many as full rows in all slots take, where the kernel reads pages."""
        self.model, self.device, self.seed = model, model.device, seed
        self.num_slots, self.max_length = num_slots, max_length
        self.max_num_batched_tokens = max_num_batched_tokens
        self.forward: ModelForward = ModelForward(model) if forward is None else forward
        self.is_shared = not self.forward.samples_alone
        on_gpu = self.forward.ops is not torch_ops
        if pages is None and on_gpu:
            pages = Pages.for_rows(num_slots, max_length, PAGE)
        self.pages = pages
        slot_length = max_length if pages is None else pages.slot_length
        layers = len(layer_heads(model.config))
        states = StateCache.of_layers(state_layers(model), num_slots, *self.forward.type)
        if states is not None:
            self.window = states.window
        # Its tensors are made at the first forward.
        self.cache = KVCache(num_slots, slot_length, int(on_gpu), pages, layers, states)
        if self.forward.is_invariant:  # graphs have these tiles too
            self.cache.fixed_q = tokens_of(TILES[-1], self.forward.queries_per_kv)
        self.graphs: StepGraphs | None = None
        if not self.forward.is_eager:
            sizes = max_num_batched_tokens, max_length
            self.graphs = StepGraphs(self.forward, self.cache, *sizes)
        self._noise_key = np.zeros((num_slots, 3), np.int64)  # prompt_id, draw_index, sample
        # Keys of the noise streams of each response position, computed ahead for its first `_keyed`
        # positions.
        self._stream_key = np.zeros((num_slots, max_length, 4), np.int32)
        self._keyed = np.zeros(num_slots, np.int64)
        self.followers: list[SlotFollower] = []

    def place(self, slot: int, row: Row) -> None:
        """See `Runner`: the slot's noise is that of the row."""
        self._noise_key[slot] = row.id
        # those before are not sampled again, unless the row is rewound
        self._keyed[slot] = 0 if row.has_turns else len(row.tokens)
        for follower in self.followers:
            follower.forget(slot)

    def move(self, source: int, target: int, length: int) -> None:
        """See `Runner`: noise keys and, without pages, keys and values are copied."""
        self.cache.move(source, target, length)
        for array in (self._noise_key, self._stream_key, self._keyed):
            array[target] = array[source]
        if self.graphs is not None:
            self.graphs.rows.move(source, target)
        for follower in self.followers:
            follower.move(source, target)

    def share(
        self, source: np.ndarray, target: np.ndarray, length: np.ndarray, states: np.ndarray
    ) -> None:
        """See `Runner`: keys and values are copied, or their pages shared."""
        self.cache.share(source, target, length)
        if self.cache.states is not None:
            self.cache.states.share(states, target)
        for follower in self.followers:
            follower.share(source, target, length)

    def keep(self, slot: int) -> None:
        """See `Runner`."""
        if self.cache.states is not None:
            self.cache.states.move(slot, self.num_slots)

    def reset(self) -> None:
        """See `Runner`: stacked weights are those of the model again."""
        join(self.model)

    def release(self) -> None:
        self.cache.clear()
        if self.graphs is not None:  # they know the tensors by their addresses
            self.graphs.clear()
        for follower in self.followers:
            follower.release()

    @property
    def supports_overlap(self) -> bool:
        """See `Runner`: with graphs, which are captured at the first call."""
        with torch.inference_mode():
            return self.graphs is not None and self.graphs.pool.are_ready()

    @property
    def depth(self) -> int:
        """See `Runner`. What reads hidden states has to know of which tokens they are."""
        is_read = any(follower.reads_states for follower in self.followers)
        return 1 if self.supports_overlap and not is_read else 0

    @torch.inference_mode()
    def launch(self, batch: Batch, params: SamplingParams) -> Callable[[], SamplerOutput]:
        """See `Runner`. The host waits for the GPU once, in the call that this returns."""
        packing = CachePacking(self.cache, batch.start, batch.count, batch.index, self.device)
        hidden = self.forward.hidden(to_device(batch.tokens, self.device), packing)
        for follower in self.followers:
            follower.note(batch, hidden)
        if len(batch.slots) == 0:
            nothing = hidden.new_empty(2, 0, dtype=torch.float64)
            return partial(drawn, reading(nothing))  # waits for the forward alone
        num_sampled = batch.num_draft + 1
        row, offset = ragged(num_sampled)
        packed = (np.cumsum(batch.count)[batch.slots] - num_sampled)[row] + offset
        slots, position = batch.slots[row], batch.generated[row] + offset
        logits = self.forward.logits(hidden[to_device(packed, self.device)])
        noise, num_generated = self._noise(slots, position), to_device(position, self.device)
        sampled = self.forward.sample(logits, noise, num_generated, params)
        self._make_keys(batch.slots, batch.generated + batch.num_draft + 1 + KEYS_AHEAD // 2)
        return partial(read, sampled)

    @torch.inference_mode()
    def launch_ahead(
        self, plan: Plan, texts: RowUpdates, params: SamplingParams, batch: Batch | None
    ) -> Callable[[], SamplerOutput]:
        """See `Runner`: two graphs, with one copy to the GPU before them and one back behind."""
        assert self.graphs is not None
        ids = self._noise_key[texts.slots]
        hidden, sampled = self.graphs.step(plan, texts, ids, params, self.seed)
        if batch is not None:
            for follower in self.followers:
                follower.note(batch, hidden)
        return partial(drawn, reading(sampled))

    def _noise(self, slots: np.ndarray, position: np.ndarray) -> Noise:
        """Return the noise of T response positions of slots: keys, or counters on a GPU."""
        if self.forward.ops is torch_ops:
            return Noise(self.noise_keys(slots, position))
        prompt_id, draw_index, sample = self._noise_key[slots].T
        words = stream_counters(prompt_id, draw_index, sample, position)
        return Noise(to_device(words.view(np.int32), self.device), self.seed)

    def noise_keys(self, slots: np.ndarray, position: np.ndarray) -> torch.Tensor:
        """Return the noise keys of T response positions of slots, int32 [T, 4], row after row."""
        self._make_keys(slots, position + 1)
        return to_device(self._stream_key[slots, position], self.device)

    def _make_keys(self, slots: np.ndarray, needed: np.ndarray) -> None:
        """Compute the keys of the first `needed` positions of slots, which may occur repeatedly."""
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
