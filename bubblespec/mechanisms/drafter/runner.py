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

from bubblespec.engine.batch import Batch
from bubblespec.engine.engine import Engine
from bubblespec.engine.forward import ModelForward, SlotFollower
from bubblespec.engine.graphs import ForwardGraphs
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.noise import add_gumbel
from bubblespec.engine.packing import pack_rows, to_device
from bubblespec.engine.ragged import ragged
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams, scale_and_restrict, widen
from bubblespec.mechanisms.drafter.layer import Drafter

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


class DrafterRunner(SlotFollower):
    """The drafter's part of an engine: a `SlotFollower` of its runner while it is enabled."""

    def __init__(self, drafter: Drafter, engine: Engine, params: SamplingParams):
        """Create a runner for the rows of an engine. params: of these rows."""
        self.drafter, self.engine = drafter, engine
        self.runner = runner = cast(ModelRunner, engine.runner)
        stops = np.flatnonzero(np.isin(drafter.ids, params.stop_token_ids))
        self.params = replace(params, stop_token_ids=tuple(stops.tolist()))  # by index in its ids
        # Rows are in the first slots; in the others nothing is kept.
        self.num_slots = min(runner.num_slots, MAX_ROWS)
        length = runner.max_length + MAX_CHAIN_LENGTH
        length = -(-length // BLOCK) * BLOCK
        self.cache = KVCache(self.num_slots, length, int(runner.graphs is not None))
        # Any: it has a second input.
        self.forward = cast(Any, DrafterForward(drafter, memory=runner.forward.memory))
        self.graphs: ForwardGraphs | None = None
        if runner.graphs is not None:
            size = drafter.fuse.out_features
            self.graphs = ForwardGraphs(self.forward, self.cache, MAX_GRAPH_TOKENS, size)
        self._hidden: torch.Tensor | None = None  # [slots, NUM_KEPT, H], by position % NUM_KEPT
        # Per slot: hidden states have been kept without a gap for positions in [_first, _end); the
        # drafter's cache begins at position _base (-1: it is empty) and holds _num_cached.
        self._context = np.zeros((4, runner.num_slots), np.int64)
        self._first, self._end, self._base, self._num_cached = self._context
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
        self.cache.clear()
        if self.graphs is not None:
            self.graphs.clear()
        self._hidden = None
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

    @torch.inference_mode()
    def draft(self, slots: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Draft chains, int64 [M, n], for some of the slots, int64 [M] ascending.

        Returns the chains, their slots, and how many positions the drafter had to catch up with.
        length: n, at most MAX_CHAIN_LENGTH. The host waits for the device once."""
        engine, runner = self.engine, self.runner
        count = self._to_catch_up(slots)
        slots, count = slots[count > 0], count[count > 0]
        if len(slots) == 0:
            return np.empty((0, length), np.int64), slots, 0
        assert self._hidden is not None
        row, offset = ragged(count)
        cached = self._num_cached[slots]
        position = (self._base[slots] + cached)[row] + offset
        index = to_device(np.array((slots[row], position % NUM_KEPT)), runner.device)
        tokens = to_device(engine.tokens[slots[row], position + 1], runner.device)
        states = self._forward(self._hidden[index[0], index[1]], tokens, slots, cached, count)
        state = states[to_device(np.cumsum(count) - 1, runner.device)]
        self._num_cached[slots] += count
        generated = (engine.length - engine.prompt_length)[slots]
        # A chain may be longer than its row can get; the excess is cut off later.
        position = np.minimum(generated[:, None] + np.arange(length), runner.max_length - 1)
        keys = runner.noise_keys(np.repeat(slots, length), position.ravel())
        keys = keys.view(len(slots), length, 4)
        position = to_device(position, runner.device)
        chain: list[torch.Tensor] = []
        one = np.ones(len(slots), np.int64)
        for number in range(length):
            if number:
                begin = self._num_cached[slots] + number - 1
                state = self._forward(state, chain[-1], slots, begin, one)
            chain.append(self._draw(state, keys[:, number], position[:, number]))
        return torch.stack(chain, dim=1).cpu().numpy(), slots, int(count.sum())

    @torch.inference_mode()
    def run_once(self, num_rows: int) -> None:
        """Run one forward of the drafter for one token of `num_rows` empty rows, to time it."""
        slots, zeros = np.arange(num_rows), np.zeros(num_rows, np.int64)
        weight = self.drafter.fuse.weight
        hidden, tokens = weight.new_ones(num_rows, len(weight)), to_device(zeros, weight.device)
        state = self._forward(hidden, tokens, slots, zeros, zeros + 1)
        self._draw(state, self.runner.noise_keys(slots, zeros), tokens).cpu()

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

    def _draw(
        self, states: torch.Tensor, keys: torch.Tensor, num_generated: torch.Tensor
    ) -> torch.Tensor:
        """Sample tokens, int64 [M], from states [M, H] with the rows' own noise, int32 [M, 4].

        num_generated: int64 [M], tokens before them."""
        logits, ids = SHARPNESS * widen(self.drafter.logits(states)), self.drafter.device_ids
        _, allowed = scale_and_restrict(logits, num_generated, self.params)
        if self.params.temperature > 0.0:
            allowed = add_gumbel(allowed, keys, ids.int())
        return ids[allowed.argmax(-1)]

    def _forward(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        slots: np.ndarray,
        start: np.ndarray,
        count: np.ndarray,
    ) -> torch.Tensor:
        """Return the states [N, H] of `count` new positions of each slot, from `start` on."""
        starts, counts = np.zeros((2, slots[-1] + 1), np.int64)
        starts[slots], counts[slots] = start, count
        runner = self.runner
        packing = pack_rows(self.cache, starts, counts, runner.device)
        states = self.graphs.forward(tokens, packing, hidden) if self.graphs is not None else None
        if states is None:
            return self.forward.hidden(tokens, packing, hidden)
        return states[: len(tokens)]
