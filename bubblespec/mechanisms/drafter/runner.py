"""How the drafter drafts chains of tokens for the rows of an engine.

`DrafterRunner` keeps the hidden states of each slot's latest positions, which the policy's forwards
compute anyway. Before a chain the drafter catches up: all positions that the policy has verified
since the last chain go through it in one forward, over its own small cache of keys and values. From
there it continues token by token; what this leaves in the cache is overwritten by the next
catching up. What is kept follows a row that moves to another slot, and rows share what is kept of a
common prompt; a row whose states are no longer kept starts again from its last CONTEXT positions.
Tokens are drawn with the noise that the row itself will use.

Shape legend: N positions, H hidden size, R active rows, M rows that get a chain, n tokens of a
chain.
"""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.draft.chain_runner import ChainRunner
from bubblespec.engine.arrays import ragged, to_device
from bubblespec.engine.batch import Batch, SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import layer_heads
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import widen
from bubblespec.mechanisms.drafter.layer import Drafter, last_full_layer
from bubblespec.memory import Needs, has_pages, max_slots

NUM_KEPT = 128  # latest positions of a slot whose hidden states are kept
CONTEXT = 64  # positions a row starts with; below NUM_KEPT by more than a verification feeds
MAX_CHAIN_LENGTH = 5  # tokens
# By which logits are multiplied before noise is added. The drafter's probabilities are means over
# what the policy may say at a place: unlikely tokens mostly have less, and would win too often.
SHARPNESS = 1.2
MAX_GRAPH_TOKENS = 512  # of a CUDA graph: a few for each row
BLOCK = 64  # a multiple of the positions that a GPU attends to at once
MAX_ROWS = 128  # with more active rows no hidden states are kept and nothing is drafted


class DrafterForward(ModelForward):
    """The drafter's layer as a forward, whose second input is the policy's hidden states."""

    def hidden(  # type: ignore[override]  # it has a second input
        self, tokens: torch.Tensor, packing, hidden: torch.Tensor
    ) -> torch.Tensor:
        return self.model(hidden, tokens, packing)


class DrafterRunner(ChainRunner):
    """The drafter's part of an engine: a `SlotFollower` of its runner while it is enabled."""

    def __init__(self, drafter: Drafter, engine: Engine, params: SamplingParams):
        """Create a runner for the rows of an engine. params: of these rows."""
        runner = cast(ModelRunner, engine.runner)
        # Rows are in the first slots; in the others nothing is kept.
        self.num_slots = min(runner.num_slots, MAX_ROWS)
        length = runner.max_length + MAX_CHAIN_LENGTH
        length = -(-length // BLOCK) * BLOCK
        cache = KVCache(self.num_slots, length, int(runner.graphs is not None))
        forward = DrafterForward(drafter, memory=runner.forward.memory)
        size = drafter.fuse.out_features
        super().__init__(engine, params, forward, cache, MAX_GRAPH_TOKENS, size)
        self.drafter = drafter
        self._hidden: torch.Tensor | None = None  # [slots, NUM_KEPT, H], by position % NUM_KEPT
        # Per slot: hidden states have been kept without a gap for positions in [_first, _end); the
        # drafter's cache begins at position _base (-1: it is empty) and holds _num_cached.
        self._context = np.zeros((4, runner.num_slots), np.int64)
        self._first, self._end, self._base, self._num_cached = self._context
        # Slots of the latest draw, int64 [M], and the drafter's states there, [M, H].
        self._latest: tuple[np.ndarray, torch.Tensor] | None = None
        self.forget()

    def enable(self, is_on: bool) -> None:
        """Follow the engine's rows, before they are in slots; or stop and release the memory."""
        followers = self.runner.followers
        if self in followers:
            followers.remove(self)
            if not is_on:
                self.release()
        if is_on:
            followers.append(self)

    def forget(self, slots: int | slice | np.ndarray = slice(None)) -> None:
        """Forget slots whose rows have changed, or all after an update."""
        self._context[:, slots] = 0
        self._base[slots] = -1

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Move the row in slot `source` to slot `target`."""
        self.forget(target)
        if self._hidden is not None and max(source, target) < self.num_slots:
            self._context[:, target] = self._context[:, source]
            self._hidden[target] = self._hidden[source]
            self.cache.copy(source, target, int(self._num_cached[source]))

    @torch.inference_mode()
    def share(self, source: np.ndarray, target: np.ndarray, length: np.ndarray) -> None:
        """See `Runner`: what is still kept of the positions of slots `source` serves both."""
        self.forget(target)
        end = self._end[source]
        first = np.maximum(self._first[source], end - NUM_KEPT)
        is_kept = (np.maximum(source, target) < self.num_slots) & (first < length) & (length <= end)
        if self._hidden is None or not is_kept.any():
            return
        source, target = source[is_kept], target[is_kept]
        self._first[target], self._end[target] = first[is_kept], length[is_kept]
        source, target = to_device(np.array((source, target)), self._hidden.device)
        self._hidden[target] = self._hidden[source]

    def release(self) -> None:
        """Release all memory."""
        super().release()
        self.cache.clear()
        self._hidden = self._latest = None
        self.forget()

    def note(self, batch: Batch, hidden: torch.Tensor) -> None:
        """Keep the hidden states [N or more, H] of what a forward has fed.

        Those of rejected draft tokens are overwritten when their positions are fed again."""
        if len(batch.count) > MAX_ROWS:
            self.forget()
            return
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self.num_slots, NUM_KEPT, hidden.shape[1])
        fed = np.flatnonzero(batch.count)
        start, end = batch.start[fed], batch.start[fed] + batch.count[fed]
        has_gap = start > self._end[fed]
        self._first[fed] = np.where(has_gap, start, self._first[fed])
        self._end[fed] = np.where(has_gap, end, np.maximum(self._end[fed], end))
        # Of a row that was rewound, the drafter's cache holds what was thrown away.
        valid = np.maximum(start - self._base[fed], 0)
        self._num_cached[fed] = np.minimum(self._num_cached[fed], valid)
        slot, position = batch.index
        latest = np.flatnonzero(position >= (batch.start + batch.count - NUM_KEPT)[slot])
        states = hidden[: len(slot)]
        if len(latest) < len(slot):
            states = hidden[to_device(latest, hidden.device)]
        index = to_device(np.array((slot[latest], position[latest] % NUM_KEPT)), hidden.device)
        self._hidden[index[0], index[1]] = states

    def can_draft(self, slots: np.ndarray) -> np.ndarray:
        """Whether the hidden states of slots, or -1, are kept without a gap: bool [M]."""
        if self._hidden is None or len(self.engine.rows) > MAX_ROWS:
            return np.zeros(len(slots), bool)
        known = slots >= 0
        known[known] = self._to_catch_up(slots[known]) > 0
        return known

    def candidates(
        self, slots: np.ndarray, number: int, tokens: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        state, fed = self._catch_up(slots) if number == 0 else self._go_on(slots, number, tokens)
        self._latest = slots, state
        return SHARPNESS * widen(self.drafter.logits(state)), self.drafter.device_ids, fed

    def _catch_up(self, slots: np.ndarray) -> tuple[torch.Tensor, int]:
        """Feed what the policy has verified since each row's last chain.

        Returns the states [M, H] at the rows' ends, and how many positions were fed."""
        assert self._hidden is not None
        count, cached = self._to_catch_up(slots), self._num_cached[slots]
        row, offset = ragged(count)
        position = (self._base[slots] + cached)[row] + offset
        index = to_device(np.array((slots[row], position % NUM_KEPT)), self.runner.device)
        tokens, hidden = self.engine.tokens[slots[row], position + 1], self._hidden[*index]
        states = self.feed(tokens, slots, cached, count, hidden)
        self._num_cached[slots] += count
        return states[to_device(np.cumsum(count) - 1, self.runner.device)], len(row)

    def _go_on(
        self, slots: np.ndarray, number: int, tokens: np.ndarray
    ) -> tuple[torch.Tensor, int]:
        """Feed chains' last tokens after the drafter's own states of the draw before."""
        assert self._latest is not None
        known, state = self._latest
        if len(slots) < len(known):
            state = state[to_device(known.searchsorted(slots), self.runner.device)]
        begin = self._num_cached[slots] + number - 1
        return self.feed(tokens, slots, begin, np.ones_like(slots), state), len(slots)

    def run_once(self, num_rows: int) -> None:
        """Draw a token for each of so many empty rows, to time it."""
        weight = self.drafter.fuse.weight
        self._latest = np.arange(num_rows), weight.new_ones(num_rows, len(weight))
        super().run_once(num_rows)

    def _to_catch_up(self, slots: np.ndarray) -> np.ndarray:
        """Return how many positions each row's cache lacks; 0 where hidden states are missing.

        Rows whose cache cannot be continued start again."""
        verified = self.engine.cached[slots]
        kept_from = np.maximum(self._first[slots], self._end[slots] - NUM_KEPT)
        base, cached = self._base[slots], self._num_cached[slots]
        # Rows that go on after what was thrown away have too much in it.
        restarts = (base < 0) | (base + cached < kept_from) | (base + cached > verified)
        self._base[slots] = np.where(restarts, np.maximum(kept_from, verified - CONTEXT), base)
        self._num_cached[slots] = np.where(restarts, 0, cached)
        lacking = verified - self._base[slots] - self._num_cached[slots]
        return np.where(self._end[slots] >= verified, lacking, 0)


def add_drafter(needs: Needs, config: Config, model: PreTrainedModel, world_size: int) -> Needs:
    """Add the memory of the drafter, a layer and the projection into it, if the run has one."""
    if "drafter" not in config.speculative.sources:
        return needs
    shape = model.config.get_text_config(decoder=True)
    size, layers = model.dtype.itemsize, shape.num_hidden_layers
    total = sum(p.numel() for p in model.parameters())
    embedding: Any = model.get_input_embeddings()
    parameters = (total - embedding.weight.numel()) / layers + 2 * shape.hidden_size**2
    # weights, gradients, moments and, for bfloat16, float32 masters
    drafter = parameters * (2 * size + 16 if model.dtype == torch.bfloat16 else 4 * size)
    slot, numbers = needs.slot, [n * (key + value) for _, n, key, value in layer_heads(shape)]
    own = slot * numbers[last_full_layer(shape)] // sum(numbers)
    if has_pages(config):  # the drafter's own keys and values are in slots
        drafter += min(max_slots(config, world_size), MAX_ROWS) * own
    else:
        slot += own
    tp_row = needs.tp_row * slot // needs.slot
    return replace(needs, drafter=int(drafter), slot=slot, tp_row=tp_row)
