"""Packed forwards: tokens of many rows in one [1, N] input, with indices for attention.

Two layouts. `CachePacking` feeds new tokens of rows whose past lies in the K/V cache (prefill,
decode and verification are all this). `SequencePacking` is a training micro-batch: whole sequences
one after the other, no cache.

Shape legend: N packed tokens, R rows, Q padded new tokens of a row, L attended positions, G query
heads per key/value head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from bubblespec.engine.arrays import ragged
from bubblespec.engine.arrays import to_device as to_device
from bubblespec.engine.arrays import to_host as to_host
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.ops.view import View

# Rows of adjacent slots are padded to the longest of them and attended in one call, as long as the
# padding costs less than two calls: MAX_PADDING, where a row costs (Q + 10) * (L + 80). Fitted to
# 100 shapes on one CPU thread with 4 heads of 24, where a unit is 5.3 ns.
MAX_PADDING = 15_000
# A CPU computes exponentials beyond the last multiple of LANES one by one: from LANES / 2 on it is
# faster to pad and mask. 16 queries of 63 positions take 1.5 times as long as 16 of 64.
LANES = 16
PAGE = 256  # positions
WIDE = 9  # new tokens of a row that a GPU attends together outside graphs


class AttentionGroup(NamedTuple):
    """Rows of adjacent slots, attended in one call: new tokens padded to Q, positions to L."""

    first_slot: int
    num_rows: int  # R
    num_queries: int  # Q
    length: int  # L, at least the positions of each row
    places: slice  # of its R * Q queries in the padded order, see `CachePacking.padding`


class Padding(NamedTuple):
    """The padded order of queries, in which each row of a group has Q of them."""

    tokens: torch.Tensor  # int64 [places], the packed token at each place
    position: torch.Tensor  # int64 [places], the last one that it sees
    places: torch.Tensor  # int64 [N], of the packed tokens


@dataclass
class CachePacking:
    """New tokens of rows in slots 0..R-1, in slot order."""

    cache: KVCache
    start: np.ndarray  # int64 [R], cached positions of each slot
    count: np.ndarray  # int64 [R], new tokens of each slot
    index: np.ndarray  # int64 [2, N], slot and position of each token
    device: torch.device  # of the forward; the three arrays are on the host

    def __post_init__(self) -> None:
        self.ends = self.start + self.count  # int64 [R], positions of each slot after the forward
        self._masks: dict = {}

    @cached_property
    def _index(self) -> torch.Tensor:
        places = self.cache.places(*self.index)
        return to_device(np.array((places, self.index[1])), self.device)

    @property
    def place(self) -> torch.Tensor:
        """Places of keys and values in the flattened cache, int64 [N]."""
        return self._index[0]

    @cached_property
    def page_offset(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages of keys and values, and places in these, int64 [N] each."""
        if self.cache.pages is None:
            return to_device(self.index[0], self.device), self.position
        return self.cache.locate(self.place)

    @property
    def position(self) -> torch.Tensor:
        """Positions of the tokens in their rows, int64 [N]."""
        return self._index[1]

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        """All rows with new tokens, in slot order."""
        groups: list[AttentionGroup] = []
        num_places = 0
        for low, high in _cheapest_cuts(self.count, self.ends):
            queries, length = int(self.count[low:high].max()), int(self.ends[low:high].max())
            if queries:
                places = slice(num_places, num_places + (high - low) * queries)
                if queries > 1 and length % LANES >= LANES // 2:
                    length = min(length + -length % LANES, self.cache.slot_length)
                groups.append(AttentionGroup(low, high - low, queries, length, places))
                num_places = places.stop
        return groups

    @cached_property
    def padding(self) -> Padding | None:
        """Padding by a row's last token, or another row's; None if nothing is padded."""
        num_tokens = self.index.shape[1]
        if self.groups[-1].places.stop == num_tokens:
            return None
        width = np.zeros_like(self.count)
        for group in self.groups:
            width[group.first_slot : group.first_slot + group.num_rows] = group.num_queries
        row, offset = ragged(width)
        tokens = (self.count.cumsum() - self.count)[row]
        tokens += np.minimum(offset, np.maximum(self.count - 1, 0)[row])
        position = np.minimum(self.start[row] + offset, np.maximum(self.ends - 1, 0)[row])
        places = np.flatnonzero(offset < self.count[row])
        arrays = (np.minimum(tokens, num_tokens - 1), position, places)
        return Padding(*(to_device(array, self.device) for array in arrays))

    def mask(
        self, group: AttentionGroup, heads_per_kv: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return the additive mask [R, 1, G * Q, L] of all layers; None if queries see everything.

        Query q sees position k if q - window < k <= q."""
        key = (group.first_slot, heads_per_kv, window)
        if key not in self._masks:
            self._masks[key] = self._make_mask(group, heads_per_kv, window, dtype)
        return self._masks[key]

    def _make_mask(self, group, heads_per_kv, window, dtype) -> torch.Tensor | None:
        first, rows, queries, length, places = group
        reaches_back = window is None or window >= length
        if queries == 1 and reaches_back and (self.ends[first : first + rows] == length).all():
            return None
        # Whether q sees k depends on k - q alone: each query's mask is a piece of one vector, with
        # k = q at L - 1.
        vector = torch.full((2 * length - 1,), float("-inf"), dtype=dtype, device=self.device)
        vector[max(length - (window or length), 0) : length] = 0.0
        position = self.position if self.padding is None else self.padding.position
        mask = vector.unfold(0, length, 1).index_select(0, length - 1 - position[places])
        mask = mask.view(rows, 1, queries, length)
        return mask if heads_per_kv == 1 else mask.repeat(1, 1, heads_per_kv, 1)

    def pieces(self, max_q: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return slot, tokens and keys of sequences of at most max_q tokens each, int64 [S]."""
        slot, width, end = pieces(self.count, max_q)
        return slot, width, self.start[slot] + end

    @cached_property
    def view(self) -> View:
        """What triton_ops.py reads of a forward that is in no graph."""
        max_q = WIDE if self.cache.is_invariant else int(min(self.count.max(), WIDE))
        slot, tokens, used = self.pieces(max_q)
        arrays = np.append(0, tokens.cumsum()), slot, used
        first, slots, keys = (to_device(a.astype(np.int32), self.device) for a in arrays)
        table, max_keys = self.cache.block_table(self.device), int(self.ends.max())
        sizes = max_q, max_keys, self.cache.split_of(self.index.shape[1], max_keys)
        return View(self.place, self.position, first, slots, keys, table, *sizes)


def pieces(count: np.ndarray, max_q: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut rows of `count` tokens into sequences of at most max_q, S in all; int64.

    Returns their rows, tokens and ends in the row, [S] each."""
    row, piece = ragged(-(-count // max_q))
    end = np.minimum((piece + 1) * max_q, count[row])
    return row, end - piece * max_q, end


def _cheapest_cuts(count: np.ndarray, length: np.ndarray) -> list[tuple[int, int]]:
    """Cut rows of `count` new and `length` attended tokens into groups, see MAX_PADDING."""
    alone = _row_cost(count, length)
    if len(count) * _row_cost(count.max(), length.max()) - alone.sum() <= MAX_PADDING:
        return [(0, len(count))]
    cuts, begin, queries, longest, unpadded = [], 0, 0, 0, 0
    for row, (n, end, cost) in enumerate(
        zip(count.tolist(), length.tolist(), alone.tolist(), strict=True)
    ):
        queries, longest, unpadded = max(queries, n), max(longest, end), unpadded + cost
        if (row + 1 - begin) * _row_cost(queries, longest) - unpadded > MAX_PADDING:
            cuts.append((begin, row))
            begin, queries, longest, unpadded = row, n, end, cost
    return [*cuts, (begin, len(count))]


def _row_cost(queries, length):
    return (queries + 10) * (length + 80)


def pack_rows(
    cache: KVCache, start: np.ndarray, count: np.ndarray, device: torch.device
) -> CachePacking:
    """Pack rows without an engine, and reserve their pages; start, count: see `CachePacking`."""
    if cache.pages is not None:
        cache.pages.grow(start + count)
    slot, offset = ragged(count)
    return CachePacking(cache, start, count, np.array((slot, start[slot] + offset)), device)


class Varlen(NamedTuple):
    """Whole sequences one after the other, for kernels of variable lengths."""

    offsets: torch.Tensor  # int32 [S + 1], of each sequence's tokens
    longest: int


@dataclass
class SequencePacking:
    """Whole sequences one after the other."""

    lengths: list[int]  # tokens of each sequence
    position: torch.Tensor  # int64 [N], from 0 in each sequence

    @cached_property
    def groups(self) -> tuple[list[tuple[int, int, torch.Tensor, torch.Tensor]], torch.Tensor]:
        """Groups of sequences padded to similar lengths, at most doubling the work.

        A group: number of sequences, padded length, index [sequences * padded length] of packed
        tokens with the last one repeated, index [M] of the real tokens in it. Behind the groups:
        the order [N] that puts the real tokens, group after group, into packed order."""
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
    def varlen(self) -> Varlen:
        """The same sequences for variable-length kernels."""
        cumulative = np.append(0, np.cumsum(self.lengths)).astype(np.int32)
        return Varlen(to_device(cumulative, self.position.device), max(self.lengths))


def pack_sequences(lengths: Sequence[int], device: torch.device) -> SequencePacking:
    """Pack whole sequences of these lengths, each with positions from 0."""
    position = ragged(np.asarray(lengths))[1]
    return SequencePacking(list(lengths), to_device(position, device))
