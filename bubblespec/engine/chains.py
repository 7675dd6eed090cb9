"""Chains of tokens that the drafter says come next, drawn with the noise that the rows themselves
will use.

The hidden states that the policy's forwards compute anyway are kept for each slot's latest
positions. Before a chain the drafter catches up: all positions that the policy has verified since
the last chain go through it in one forward, over its own small cache of keys and values. From the
last of them it goes on, a token at a time, from its own estimates; what these leave in the cache is
overwritten by the next catching up. A row whose states are not kept any more begins anew, over its
last CONTEXT positions.

Shape legend: R active rows, M rows that get a chain, n tokens of a chain, H hidden size, V token
ids that the drafter knows.
"""

from dataclasses import replace

import numpy as np
import torch

from bubblespec.engine.drafter import Drafter
from bubblespec.engine.engine import Batch, Engine
from bubblespec.engine.graphs import ForwardGraphs
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.noise import gumbel
from bubblespec.engine.packing import PAGE, pack_rows, to_device
from bubblespec.engine.ragged import ragged
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams, restrict

KEPT = 128  # latest positions of a slot whose hidden states are kept
CONTEXT = 64  # of these a row begins with, below KEPT by more than a verification feeds
LONGEST = 5  # tokens of a chain
MOST_IN_GRAPH = 512  # positions of a CUDA graph: a few for each row
MOST_ROWS = 128  # with more active rows hidden states are not kept, and nothing is drafted


class Chains:
    """The drafter's part of an engine. It follows the runner's slots: see `ModelRunner.chains`."""

    def __init__(self, drafter: Drafter, runner: ModelRunner, params: SamplingParams):
        """params: of the rows."""
        self.drafter, self.runner, self.params = drafter, runner, params
        length = runner.max_length + LONGEST
        if runner.kernel == "flash_attn":
            length = -(-length // PAGE) * PAGE
        self.num_slots = min(
            runner.num_slots, MOST_ROWS
        )  # rows are in the first slots: in the others nothing is kept
        self.cache = KVCache(self.num_slots, length, int(runner.graphs is not None))
        self.graphs: ForwardGraphs | None = None
        if runner.graphs is not None:
            options = {"state_size": drafter.fuse.out_features, "beside": runner.graphs}
            self.graphs = ForwardGraphs(
                drafter, self.cache, runner.kernel, MOST_IN_GRAPH, **options
            )
        self._hidden: torch.Tensor | None = None  # [slots, KEPT, H], by position modulo KEPT
        # Of each slot: the positions whose states have been kept without a gap; where the drafter's
        # cache begins, and how many positions from there on it holds.
        self._first, self._behind, self._base, self._known = np.zeros(
            (4, runner.num_slots), np.int64
        )
        self._base[:] = -1

    def place(self, slot: int) -> None:
        """Another row comes into a slot, or the weights have changed."""
        self._first[slot] = self._behind[slot] = self._known[slot] = 0
        self._base[slot] = -1

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """The row in slot `source` goes on in slot `target`."""
        if max(source, target) >= self.num_slots:
            self.place(target)
            return
        for array in (self._first, self._behind, self._base, self._known):
            array[target] = array[source]
        if self._hidden is not None:
            self._hidden[target] = self._hidden[source]
        self.cache.copy(source, target, int(self._known[source]))

    @torch.inference_mode()
    def share(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of both slots' rows are the same: what is still kept of them
        is there for both."""
        self.place(target)
        kept_from = max(self._first[source], self._behind[source] - KEPT)
        if (
            self._hidden is not None
            and max(source, target) < self.num_slots
            and kept_from < length <= self._behind[source]
        ):
            self._hidden[target] = self._hidden[source]
            self._first[target], self._behind[target] = kept_from, length

    def release(self) -> None:
        """Give all memory back."""
        self.cache.clear()
        if self.graphs is not None:
            self.graphs.clear()
        self._hidden = None
        for slot in range(self.runner.num_slots):
            self.place(slot)

    def note(self, batch: Batch, hidden: torch.Tensor) -> None:
        """Keep the states of what a forward has fed, [N or more, H], rejected drafts included:
        those are fed again."""
        if len(batch.count) > MOST_ROWS:
            # What has been kept of rejected drafts must not pass for the states of what is fed in
            # their place.
            active = slice(len(batch.count))
            self._behind[active] = np.minimum(self._behind[active], batch.start)
            return
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self.num_slots, KEPT, hidden.shape[1])
        fed = np.flatnonzero(batch.count)
        start, ends = batch.start[fed], batch.start[fed] + batch.count[fed]
        has_gap = start > self._behind[fed]
        self._first[fed] = np.where(has_gap, start, self._first[fed])
        self._behind[fed] = np.where(has_gap, ends, np.maximum(self._behind[fed], ends))
        slot, position = batch.index
        latest = np.flatnonzero(position >= (batch.start + batch.count - KEPT)[slot])
        source = (
            hidden[: len(slot)]
            if len(latest) == len(slot)
            else hidden[to_device(latest, hidden.device)]
        )
        places = to_device(np.array((slot[latest], position[latest] % KEPT)), hidden.device)
        self._hidden[places[0], places[1]] = source

    @torch.inference_mode()
    def draft(
        self, engine: Engine, slots: np.ndarray, length: int
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Chains for decoding rows, int64 [M, n], which of `slots` they are for, int64 [M], and
        with how many positions the drafter had to catch up. slots: int64, ascending; length: n, at
        most LONGEST. The host waits for the device once."""
        count = self._catch_up(engine, slots)
        slots, count = slots[count > 0], count[count > 0]
        if len(slots) == 0:
            return np.empty((0, length), np.int64), slots, 0
        row, offset = ragged(count)
        begin = self._known[slots]
        position = (self._base[slots] + begin)[row] + offset
        places = to_device(np.array((slots[row], position % KEPT)), self.runner.device)
        tokens = to_device(engine.tokens[slots[row], position + 1], self.runner.device)
        states = self._forward(self._hidden[places[0], places[1]], tokens, slots, begin, count)
        state = states[to_device(np.cumsum(count) - 1, self.runner.device)]
        self._known[slots] += count
        generated = (engine.length - engine.prompt_length)[slots]
        # A chain may be longer than its row can get; what is too long of it is cut off later.
        position = np.minimum(generated[:, None] + np.arange(length), self.runner.max_length - 1)
        keys = self.runner.noise_keys(np.repeat(slots, length), position.ravel()).view(
            len(slots), length, 4
        )
        position = to_device(position, self.runner.device)
        chain, one = [], np.ones(len(slots), np.int64)
        for number in range(length):
            if number:
                state = self._forward(state, chain[-1], slots, self._known[slots] + number - 1, one)
            chain.append(
                self.draw(self.drafter.logits(state), keys[:, number], position[:, number])
            )
        return torch.stack(chain, dim=1).cpu().numpy(), slots, int(count.sum())

    @torch.inference_mode()
    def rehearse(self, num_rows: int) -> None:
        """A forward of the drafter as it is for one more token of so many rows, of no rows in
        particular."""
        policy, one = self.drafter.policy, np.ones(num_rows, np.int64)
        hidden = torch.ones(
            num_rows, self.drafter.fuse.out_features, dtype=policy.dtype, device=policy.device
        )
        tokens = to_device(np.zeros(num_rows, np.int64), policy.device)
        state = self._forward(hidden, tokens, np.arange(num_rows), 0 * one, one)
        position = to_device(np.arange(num_rows), policy.device)
        keys = self.runner.noise_keys(np.arange(num_rows), np.zeros(num_rows, np.int64))
        self.draw(self.drafter.logits(state), keys, position).cpu()

    def draw(
        self, logits: torch.Tensor, keys: torch.Tensor, num_generated: torch.Tensor
    ) -> torch.Tensor:
        """What rows with these noise keys, int32 [M, 4], would sample from the drafter's logits [M,
        V]: token ids, int64 [M]."""
        ids = self.drafter.device_ids
        place = self.drafter.place
        params = replace(
            self.params,
            stop_token_ids=tuple(place[t] for t in self.params.stop_token_ids if t in place),
        )
        logits = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
        if params.temperature not in (0.0, 1.0):
            logits = logits / params.temperature
        allowed = restrict(logits, num_generated, params)
        if params.temperature:
            allowed = gumbel(keys, ids.int(), logits.dtype).add_(allowed)
        return ids[allowed.argmax(-1)]

    def _catch_up(self, engine: Engine, slots: np.ndarray) -> np.ndarray:
        """Positions that each row's cache lacks, int64; rows whose cache cannot be continued begin
        anew."""
        known_to_policy = engine.cached[slots]
        kept_from = np.maximum(self._first[slots], self._behind[slots] - KEPT)
        begins = (self._base[slots] < 0) | (self._base[slots] + self._known[slots] < kept_from)
        self._base[slots] = np.where(
            begins, np.maximum(kept_from, known_to_policy - CONTEXT), self._base[slots]
        )
        self._known[slots] = np.where(begins, 0, self._known[slots])
        is_kept = self._behind[slots] >= known_to_policy
        return np.where(is_kept, known_to_policy - self._base[slots] - self._known[slots], 0)

    def _forward(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        slots: np.ndarray,
        start: np.ndarray,
        count: np.ndarray,
    ):
        """The drafter's states of new positions, `count` of each slot from `start` on in its own
        cache."""
        starts, counts = np.zeros((2, slots[-1] + 1), np.int64)
        starts[slots], counts[slots] = start, count
        packing = pack_rows(self.cache, starts, counts, self.runner.device)
        states = self.graphs.forward(tokens, packing, hidden) if self.graphs is not None else None
        return (
            self.drafter(hidden, tokens, packing, self.runner.kernel)
            if states is None
            else states[: len(tokens)]
        )
