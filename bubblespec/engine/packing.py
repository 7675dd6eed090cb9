"""Packed forwards: which tokens of which rows are in one [1, N] input, and how attention finds its way in them.

Two layouts. `CachePacking` feeds new tokens of rows whose past lies in the K/V cache (prefill, decode and verification are
all this). `SequencePacking` is a training micro-batch: whole sequences one after the other, no cache.

Shape legend: N packed tokens, R rows, Q padded new tokens of a row, L attended positions, G query heads per key/value head.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from bubblespec.engine.kv_cache import KVCache

# Rows that feed few tokens are padded to the most of any of them and attended together; the others attend one by one. An
# attention call of its own costs about as much as this many padded queries (measured on a CPU, 4 heads of 24, 200 positions).
CALL_IN_QUERIES = 9
QUERY_CUTS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32])


@dataclass
class AttentionGroup:
    """Rows of adjacent slots whose new tokens are padded to Q and attended in one call.

    tokens: int64 [M], packed indices of the group's real tokens; None when they are all N in order with Q = 1.
    padded: int64 [M], where each of them lies in the padded [R * Q] layout.
    """

    first_slot: int
    num_rows: int
    num_queries: int
    length: int
    query_position: torch.Tensor
    tokens: torch.Tensor | None
    padded: torch.Tensor | None
    _masks: dict = field(default_factory=dict)

    def mask(self, heads_per_kv: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask [R, 1, G * Q, L]: position k is seen by query q if q - window < k <= q. Shared by all layers."""
        wanted = (heads_per_kv, window)
        if wanted not in self._masks:
            key_position = torch.arange(self.length, device=self.query_position.device)
            hidden = key_position > self.query_position[..., None]
            if window is not None:
                hidden |= key_position <= self.query_position[..., None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[wanted] = mask.repeat(1, heads_per_kv, 1)[:, None]
        return self._masks[wanted]


@dataclass
class CachePacking:
    """New tokens of rows in slots 0..R-1, in slot order.

    start, count: int64 [R], cached positions and new tokens of each slot; index: int64 [2, N], slot and position of each
    token (all three on the host); slot, position: the same index on the device.
    """

    cache: KVCache
    start: np.ndarray
    count: np.ndarray
    index: np.ndarray
    slot: torch.Tensor
    position: torch.Tensor

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        """One padded group for all rows with few new tokens, one group for each other row."""
        start, count, device = self.start, self.count, self.slot.device
        first = np.cumsum(count) - count
        is_short = count <= _query_cut(count)
        groups = []
        for row in np.flatnonzero(~is_short):
            tokens = torch.arange(first[row], first[row] + count[row], device=device)
            position = torch.arange(start[row], start[row] + count[row], device=device)[None]
            length = int(start[row] + count[row])
            groups.append(
                AttentionGroup(int(row), 1, int(count[row]), length, position, tokens, torch.arange(len(tokens), device=device))
            )
        used = np.flatnonzero(is_short & (count > 0))
        if len(used):
            low, high, queries = used[0], used[-1] + 1, int(count[used].max())
            all_decode = len(used) == len(count) and queries == 1
            position = start[low:high, None] + np.arange(queries)
            position[~is_short[low:high]] = 0  # rows of other groups ride along as padding: they see position 0 only
            length = int((start + count)[used].max())
            position = np.minimum(position, length - 1)
            tokens = padded = None
            if not all_decode:
                offset = np.arange(queries)
                real = (offset < count[low:high, None]) & is_short[low:high, None]
                padded = torch.from_numpy(np.flatnonzero(real)).to(device)
                tokens = torch.from_numpy((first[low:high, None] + offset)[real]).to(device)
            groups.append(
                AttentionGroup(int(low), int(high - low), queries, length, torch.from_numpy(position).to(device), tokens, padded)
            )
        return groups

    @cached_property
    def varlen(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        """(cu_seq_q, cu_seq_k, seqused_k, longest q, longest k) over contiguous slots, for variable-length kernels."""
        device, rows = self.slot.device, len(self.count)
        cu_q = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(self.count, out=cu_q[1:])
        cu_k = np.arange(rows + 1, dtype=np.int32) * self.cache.slot_length
        used = (self.start + self.count).astype(np.int32)
        to_device = (torch.from_numpy(a).to(device, non_blocking=True) for a in (cu_q, cu_k, used))
        return (*to_device, int(self.count.max()), int(used.max()))


def _query_cut(count: np.ndarray) -> int:
    """Most new tokens of a row that is padded with the others, so that the padding costs no more than it saves in calls."""
    if count.max() == 1:
        return 1
    alone = count[:, None] > QUERY_CUTS
    padded = len(count) * np.minimum(QUERY_CUTS, count.max())  # rows that attend alone ride along as padding
    return int(QUERY_CUTS[(padded + ((CALL_IN_QUERIES + count[:, None]) * alone).sum(axis=0)).argmin()])


def pack_rows(cache: KVCache, start: np.ndarray, count: np.ndarray, device: torch.device) -> CachePacking:
    """start, count: int64 [R], cached positions and new tokens of slots 0..R-1."""
    slot = np.repeat(np.arange(len(count)), count)
    first = np.cumsum(count) - count
    index = np.stack((slot, np.arange(len(slot)) + np.repeat(start - first, count)))
    on_device = torch.from_numpy(index).to(device, non_blocking=True)
    return CachePacking(cache, start, count, index, on_device[0], on_device[1])


@dataclass
class SequencePacking:
    """Whole sequences one after the other. lengths: of each sequence; position: int64 [N], restarting at 0 in each."""

    lengths: list[int]
    position: torch.Tensor

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
            gather, keep = (torch.from_numpy(a).to(device) for a in (index.ravel(), np.flatnonzero(real)))
            groups.append((len(members), int(longest), gather, keep))
            begin += len(members)
        return groups, torch.from_numpy(np.argsort(np.concatenate(grouped))).to(device)

    @cached_property
    def varlen(self) -> tuple[torch.Tensor, int]:
        """(cumulative lengths int32 [sequences + 1], longest)."""
        cumulative = torch.from_numpy(np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int32))
        return cumulative.to(self.position.device), max(self.lengths)


def pack_sequences(lengths: list[int], device: torch.device) -> SequencePacking:
    lengths_array = np.asarray(lengths)
    first = np.cumsum(lengths_array) - lengths_array
    position = np.arange(lengths_array.sum()) - np.repeat(first, lengths_array)
    return SequencePacking(list(lengths), torch.from_numpy(position).to(device))
