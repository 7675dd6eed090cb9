"""Packed forwards: the tokens of many rows in one [1, N] input, and the indices by which attention reads them.

Two layouts. `CachePacking` feeds new tokens of rows whose past lies in the K/V cache (prefill, decode and verification are
all this). `SequencePacking` is a training micro-batch: whole sequences one after the other, no cache.

Shape legend: N packed tokens, R rows, Q padded new tokens of a row, L attended positions, G query heads per key/value head.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.ragged import ragged

# Rows of adjacent slots are padded to the longest of them and attended in one call, as long as that costs less than another
# call. The cost of a call over R rows, in microseconds: CALL + R * (ROW + QUERY * Q + KEY * L + PAIR * Q * L), fitted to 100
# shapes on one CPU thread with 4 heads of 24 (SDPA alone has CALL = 18, the rest is slicing). Only the ratios matter.
CALL, ROW, QUERY, KEY, PAIR = 40.0, 1.1, 0.42, 0.057, 0.0053
PAGE = 256  # positions; the flash_attn package requires multiples of it


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to a GPU without waiting for its queued work; on a CPU share the array's memory. After a copy the array may be changed
    at once: memory that is not pinned has been read when the call returns."""
    return torch.from_numpy(array).to(device, non_blocking=True)


@dataclass
class AttentionGroup:
    """Rows of adjacent slots, attended in one call with their new tokens padded to Q and their positions to L."""

    first_slot: int
    num_rows: int
    """R."""
    num_queries: int
    """Q."""
    length: int
    """L."""
    first_token: int
    """Index of the group's first token in the packed input."""
    num_tokens: int
    """Real tokens of the group."""
    query_position: torch.Tensor
    """int64 [R, Q]."""
    padded: torch.Tensor | None
    """int64 [R * Q], the packed token at each place of the padded layout, counted from first_token; None if nothing is padded."""
    real: torch.Tensor | None
    """int64 [num_tokens], the places of the real tokens in the padded layout; None if nothing is padded."""
    sees_all: bool
    """Each row's only query is its position L - 1."""
    _masks: dict = field(default_factory=dict)

    def mask(self, heads_per_kv: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [R, 1, G * Q, L]: query q sees position k if q - window < k <= q. Shared by all layers. None if every
        query sees every position."""
        if self.sees_all and (window is None or window >= self.length):
            return None
        wanted = (heads_per_kv, window)
        if wanted not in self._masks:
            key_position = torch.arange(self.length, device=self.query_position.device)
            hidden = key_position > self.query_position[..., None]
            if window is not None:
                hidden |= key_position <= self.query_position[..., None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[wanted] = (mask.repeat(1, heads_per_kv, 1) if heads_per_kv > 1 else mask)[:, None]
        return self._masks[wanted]


@dataclass
class CachePacking:
    """New tokens of rows in slots 0..R-1, in slot order. `slot` and `position` are `index` on the device."""

    cache: KVCache
    start: np.ndarray
    """int64 [R], cached positions of each slot."""
    count: np.ndarray
    """int64 [R], new tokens of each slot."""
    index: np.ndarray
    """int64 [2, N], slot and position of each token."""
    device: torch.device
    """Of the forward; the three arrays are on the host."""

    @cached_property
    def _index(self) -> torch.Tensor:
        return to_device(self.index, self.device)

    @property
    def slot(self) -> torch.Tensor:
        return self._index[0]

    @property
    def position(self) -> torch.Tensor:
        return self._index[1]

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        """All rows with new tokens, in slot order."""
        ends = self.start + self.count
        first = np.cumsum(self.count) - self.count
        return [
            self._group(low, high, ends, int(first[low]))
            for low, high in _cheapest_cuts(self.count, ends)
            if self.count[low:high].any()
        ]

    def _group(self, low: int, high: int, ends: np.ndarray, first_token: int) -> AttentionGroup:
        device, count = self.device, self.count[low:high]
        queries, length = int(count.max()), int(ends[low:high].max())
        offset = np.arange(queries)
        # Padding repeats the row's last token; a row without any sees its position 0 only.
        position = np.minimum(self.start[low:high, None] + offset, np.maximum(ends[low:high, None] - 1, 0))
        padded = real = None
        if (count < queries).any():
            begin = np.cumsum(count) - count
            last = np.maximum(count - 1, 0)[:, None]
            padded = np.minimum(begin[:, None] + np.minimum(offset, last), count.sum() - 1)
            real = to_device(np.flatnonzero(offset < count[:, None]), device)
            padded = to_device(padded.ravel(), device)
        sees_all = queries == 1 and bool((position == length - 1).all())
        position = to_device(position, device)
        num_tokens = int(count.sum())
        return AttentionGroup(low, high - low, queries, length, first_token, num_tokens, position, padded, real, sees_all)

    @cached_property
    def varlen(self) -> "Varlen":
        """All slots 0..R-1, also those without new tokens."""
        rows = len(self.count)
        cu_q = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(self.count, out=cu_q[1:])
        cu_k = np.arange(rows + 1, dtype=np.int32) * self.cache.slot_length
        used = (self.start + self.count).astype(np.int32)
        tensors = (to_device(a, self.device) for a in (cu_q, cu_k, used))
        return Varlen(*tensors, int(self.count.max()), int(used.max()), self.cache.slot_length)


@dataclass
class Varlen:
    """S sequences of new tokens and their keys in the flattened cache, for variable-length kernels."""

    cu_q: torch.Tensor
    """int32 [S + 1], offset of each sequence's new tokens."""
    cu_k: torch.Tensor
    """int32 [S + 1], offset of its keys in the flattened cache."""
    used: torch.Tensor
    """int32 [S], number of its keys, of which the last are those of the new tokens."""
    max_q: int
    """Bound on the new tokens of a sequence."""
    max_k: int
    """Bound on its keys."""
    slot_length: int

    @cached_property
    def paged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For a cache read in pages: cumulative numbers of keys int32 [S + 1], and pages of each sequence, int32 [S, pages of a
        slot]. PAGE must divide the slot length; a sequence of more than one key must begin at the beginning of a page."""
        pages = torch.arange(self.slot_length // PAGE, dtype=torch.int32, device=self.used.device)
        lengths = torch.nn.functional.pad(self.used.cumsum(0, dtype=torch.int32), (1, 0))
        return lengths, self.cu_k[:-1, None] // PAGE + pages


def _cheapest_cuts(count: np.ndarray, length: np.ndarray) -> list[tuple[int, int]]:
    """[begin, end) of the groups that rows are attended in: cut at the best place, then each half again, while that saves time.

    count, length: int64 [R], new tokens and attended positions of each row.
    """
    alone = _row_cost(count, length)
    cuts, open_groups = [], [(0, len(count))]
    while open_groups:
        low, high = open_groups.pop()
        q, n, size = count[low:high], length[low:high], high - low
        whole = size * _row_cost(q.max(), n.max())
        # No cutting saves more than all that padding costs.
        if whole - alone[low:high].sum() <= CALL:
            cuts.append((low, high))
            continue
        rows = np.arange(1, size)
        left = rows * _row_cost(np.maximum.accumulate(q)[:-1], np.maximum.accumulate(n)[:-1])
        right = rows * _row_cost(np.maximum.accumulate(q[::-1])[:-1], np.maximum.accumulate(n[::-1])[:-1])
        both = left + right[::-1]
        best = int(both.argmin())
        if both[best] + CALL >= whole:
            cuts.append((low, high))
        else:
            open_groups += [(low + best + 1, high), (low, low + best + 1)]
    return cuts


def _row_cost(queries, length):
    return ROW + QUERY * queries + (KEY + PAIR * queries) * length


def pack_rows(cache: KVCache, start: np.ndarray, count: np.ndarray, device: torch.device) -> CachePacking:
    """start, count: int64 [R], cached positions and new tokens of slots 0..R-1."""
    slot, offset = ragged(count)
    return CachePacking(cache, start, count, np.array((slot, start[slot] + offset)), device)


@dataclass
class SequencePacking:
    """Whole sequences one after the other."""

    lengths: list[int]
    """Tokens of each sequence."""
    position: torch.Tensor
    """int64 [N], from 0 in each sequence."""

    @cached_property
    def groups(self) -> tuple[list[tuple[int, int, torch.Tensor, torch.Tensor]], torch.Tensor]:
        """Sequences of similar length, padded to the longest of them, which at most doubles a group's work.

        Returns the groups, each (number of sequences, padded length, index [sequences * padded length] of the packed tokens
        with the last one repeated as padding, index [M] of the real tokens among those), and the order [N] that puts
        the groups' real tokens, one group after the other, back into packed order.
        """
        device = self.position.device
        lengths = np.asarray(self.lengths)
        first = np.cumsum(lengths) - lengths
        by_length = np.argsort(-lengths, kind="stable")
        groups, grouped, begin = [], [], 0
        while begin < len(by_length):
            longest = lengths[by_length[begin]]
            members = by_length[begin:][lengths[by_length[begin:]] * 2 > longest]
            offset = np.arange(longest)
            real = offset < lengths[members, None]
            index = first[members, None] + np.minimum(offset, lengths[members, None] - 1)
            grouped.append(index[real])
            gather, keep = (to_device(a, device) for a in (index.ravel(), np.flatnonzero(real)))
            groups.append((len(members), int(longest), gather, keep))
            begin += len(members)
        return groups, to_device(np.argsort(np.concatenate(grouped)), device)

    @cached_property
    def varlen(self) -> tuple[torch.Tensor, int]:
        """(cumulative lengths int32 [sequences + 1], longest)."""
        cumulative = np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int32)
        return to_device(cumulative, self.position.device), max(self.lengths)


def pack_sequences(lengths: list[int], device: torch.device) -> SequencePacking:
    """The packing of whole sequences of these lengths, one after the other, each with positions from 0."""
    lengths_array = np.asarray(lengths)
    first = np.cumsum(lengths_array) - lengths_array
    position = np.arange(lengths_array.sum()) - np.repeat(first, lengths_array)
    return SequencePacking(list(lengths), to_device(position, device))
