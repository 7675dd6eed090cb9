"""Keys and values of all rows, in one contiguous slot per row or in pages, and forwards over them.

The caller tracks lengths; lowering one rolls the row back. A forward feeds new tokens of rows whose
past lies in the cache (prefill, decode and verification are all this): tokens of many rows packed
into one [1, N] input, with indices for attention.

Shape legend: N packed tokens, R rows, Q padded new tokens of a row, L attended positions, G query
heads per key/value head, K key/value heads.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from bubblespec.engine.arrays import ragged, staged, to_device
from bubblespec.engine.ops.softmax import AttentionOptions
from bubblespec.engine.ops.view import TILE, AttentionMetadata
from bubblespec.engine.pages import Pages
from bubblespec.engine.states import SHARED_BYTES, Feed, StateCache, Windows

SPLIT = 512  # keys; 256 and 1,024 were within 5% for 1 to 128 rows of 4,096 keys on an H200
MAX_SPLIT_TOKENS = 256
ALIGNMENT = 64  # bytes, as torch's own tensors have it
# Rows of adjacent slots are padded to the longest of them and attended in one call, as long as the
# padding costs less than two calls: MAX_PADDING, where a row costs (Q + 10) * (L + 80). Fitted to
# 100 shapes on one CPU thread with 4 heads of 24, where a unit is 5.3 ns.
MAX_PADDING = 15_000
# A CPU computes exponentials beyond the last multiple of LANES one by one: from LANES / 2 on it is
# faster to pad and mask. 16 queries of 63 positions take 1.5 times as long as 16 of 64.
LANES = 16
PAGE = 256  # positions


def pieces(count: np.ndarray, max_q: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut rows of `count` tokens into sequences of at most max_q; int64 [S], rows and tokens."""
    row, piece = ragged(-(-count // max_q))
    return row, np.minimum(count[row] - piece * max_q, max_q)


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


def _zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return zeros; on a CPU in pages that take memory, and time, when they are written to."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = int(np.prod(shape)) * like.element_size()
    taken = np.zeros(size + ALIGNMENT, np.uint8)
    begin = -taken.ctypes.data % ALIGNMENT
    return torch.from_numpy(taken[begin : begin + size]).view(like.dtype).view(shape)


class LayerCache(NamedTuple):
    """Keys and values of one layer; the positions of a head lie next to each other in a page."""

    keys: torch.Tensor  # [pages and spare ones, page_size, K, dimension], a view
    values: torch.Tensor
    kv: torch.Tensor | None
    """Both, keys first, [pages, 2K, page_size, dimension], if they have one dimension."""


class KVCache:
    """`LayerCache`s of all layers, in one tensor where they have one shape.

    Without `pages`, a page is a slot. Padding of fixed-size forwards is written to spare ones.

    Memory is taken at the first write, as zeros: masked positions are multiplied by zero and must
    be finite."""

    def __init__(
        self,
        num_slots: int,
        slot_length: int,
        num_spare: int = 0,
        pages: Pages | None = None,
        num_layers: int = 1,
        states: StateCache | None = None,
    ):
        """num_layers: layers for which the first write takes memory; states: of other layers."""
        self.num_slots, self.slot_length, self.num_spare = num_slots, slot_length, num_spare
        self.pages, self.num_layers, self.states = pages, num_layers, states
        self.fixed_q = 0
        """`AttentionMetadata.max_q` of all forwards, where sums must not depend on other tokens."""
        self.num_pages, self.page_size = num_slots, slot_length
        if pages is not None:
            self.num_pages, self.page_size = pages.num_pages, pages.page_size
        self.layers: dict[int, LayerCache] = {}
        # [layers, pages and spare ones, numbers of a page] each; the first has `num_layers`.
        self._tensors: list[torch.Tensor] = []
        self._table: torch.Tensor | None = None
        self._version = -1  # version of the pages in `_table`

    @property
    def spare(self) -> int:
        """First place of spare pages, in the flattened cache."""
        return self.num_pages * self.page_size

    def places(self, slot: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return places of positions in the flattened cache; all int64 [N]."""
        if self.pages is None:
            return slot * self.slot_length + position
        page, offset = np.divmod(position, self.page_size)
        return self.pages.table[slot, page] * np.int64(self.page_size) + offset

    def layer(self, number: int, key: torch.Tensor, value: torch.Tensor) -> LayerCache:
        """Return a layer's cache, for keys and values like these, [N, heads, dimension]."""
        if number not in self.layers:
            heads, sizes = key.shape[1], (key.shape[2], value.shape[2])
            pages = self.num_pages + (self.num_spare if self.pages is None else 1)
            shape = pages, self.page_size * heads * sum(sizes)
            place = len(self.layers)  # layers without attention have none
            whole = self._tensors[0] if self._tensors else None
            if whole is None or place >= len(whole) or whole.shape[1:] != shape:
                count = 1 if self._tensors else self.num_layers
                whole = _zeros((count, *shape), key)
                self._tensors.append(whole)
            own = whole[place if whole is self._tensors[0] else 0]
            parts = own.split([self.page_size * heads * size for size in sizes], dim=1)
            keys, values = (
                part.view(pages, heads, self.page_size, size).transpose(1, 2)
                for part, size in zip(parts, sizes, strict=True)
            )
            kv = None
            if sizes[0] == sizes[1]:
                kv = own.view(pages, 2 * heads, self.page_size, sizes[0])
            self.layers[number] = LayerCache(keys, values, kv)
        return self.layers[number]

    def write(
        self, number: int, place: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> LayerCache:
        """Store keys and values [N, heads, dimension] at places int64 [N]; return the layer."""
        layer, at = self.layer(number, key, value), self.locate(place)
        layer.keys[at], layer.values[at] = key, value
        return layer

    def locate(self, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pages and offsets in these of places in the flattened cache, int64 [N] each."""
        return place // self.page_size, place % self.page_size

    def read(self, cached: torch.Tensor, slots: slice, length: int) -> torch.Tensor:
        """Read first positions of adjacent slots, [R, length, heads, dimension]; gather pages."""
        if self.pages is None:
            return cached[slots, :length]
        pages = self.block_table(cached.device)[slots, : self.pages.needed(length)].long()
        return cached[pages].flatten(1, 2)[:, :length]

    def block_table(self, device: torch.device) -> torch.Tensor:
        """Return `Pages.table` at an address that stays until `clear`; slots without pages."""
        if self.pages is None:
            if self._table is None:
                slots = torch.arange(self.num_slots + 1, dtype=torch.int32, device=device)
                self._table = slots[:, None].expand(-1, 2).contiguous()
            return self._table
        if self._table is None:
            self._table = torch.from_numpy(self.pages.table).to(device)
        elif self._version != self.pages.version:
            self._table.copy_(staged(self.pages.table, device), non_blocking=True)
        self._version = self.pages.version
        return self._table

    def split_of(self, num_tokens: int, max_keys: int) -> int:
        """Return how many keys a GPU sums at once, where tokens have at most max_keys keys.

        With few tokens splits fill the GPU; with many they only take memory."""
        is_split = self.fixed_q > 0 or num_tokens <= MAX_SPLIT_TOKENS
        return SPLIT if is_split else -(-max_keys // SPLIT) * SPLIT

    def erase(self, place: torch.Tensor) -> None:
        """Write zeros to places int64 [N], and to spare ones."""
        at = self.locate(place)
        for part in self._parts():
            part[at] = 0.0
            part[self.num_pages :] = 0.0

    def move(self, source: int, target: int, length: int) -> None:
        """Continue the row in slot `source`, of `length` positions, in slot `target`."""
        if self.states is not None:
            self.states.move(source, target)
        if self.pages is None:
            self.copy(source, target, length)
        else:
            self.pages.move(source, target)

    @torch.inference_mode()  # the tensors are made in inference mode, and may only be written in it
    def share(self, source: np.ndarray, target: np.ndarray, length: np.ndarray) -> None:
        """Give slots `target` the first positions of other slots `source`, int64 [n] each."""
        if self.pages is not None:
            slots = zip(source.tolist(), target.tolist(), length.tolist(), strict=True)
            source, target, length = np.array([self.pages.share(*of) for of in slots]).T
        source, target, length = (of[length > 0] for of in (source, target, length))
        if not len(length):
            return
        # All rows at once, as a GPU takes as long for one. Positions beyond a row's length are
        # overwritten before they are read.
        device = self._tensors[0].device
        read, write = torch.from_numpy(np.array((source, target))).to(device, non_blocking=True)
        if self.pages is not None:
            for tensor in self._tensors:
                at_once = max(SHARED_BYTES // (tensor[:, 0].numel() * tensor.itemsize), 1)
                for of, to in zip(read.split(at_once), write.split(at_once), strict=True):
                    tensor.index_copy_(1, to, tensor.index_select(1, of))
            return
        longest = int(length.max())
        for part in self._parts():
            part[:, :longest].index_copy_(0, write, part[:, :longest].index_select(0, read))

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a page (without pages: slot) to another."""
        for part in self._parts():
            part[target, :length] = part[source, :length]

    def _parts(self) -> list[torch.Tensor]:
        return [part for own in self.layers.values() for part in (own.keys, own.values)]

    def clear(self) -> None:
        """Free the memory; the next write makes the tensors again, as zeros."""
        self.layers.clear()
        self._tensors.clear()
        self._table = None
        if self.states is not None:
            self.states.clear()

    def num_bytes(self) -> int:
        """Return the bytes of the tensors that exist; 0 before the first forward."""
        of_states = 0 if self.states is None else self.states.num_bytes()
        return of_states + sum(tensor.nbytes for tensor in self._tensors)


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
    def windows(self) -> Windows | Feed:
        """What the forward feeds to layers with a state."""
        assert self.cache.states is not None
        if self.cache.states.in_kernels:
            return self.cache.states.feed(self.view, self.cache.spare)
        slots = [slice(of.first_slot, of.first_slot + of.num_rows) for of in self.groups]
        return self.cache.states.windows(self.start, self.count, slots, self.device)

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
        self,
        group: AttentionGroup,
        heads_per_kv: int,
        options: AttentionOptions,
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """Return the additive mask [R, 1, G * Q, L] of all layers; None if queries see everything.

        Query q sees position k if q - window < k <= q, and k is in the chunk of q."""
        key = (group.first_slot, heads_per_kv, options.window, options.chunk)
        if key not in self._masks:
            self._masks[key] = self._make_mask(group, heads_per_kv, options, dtype)
        return self._masks[key]

    def _make_mask(self, group, heads_per_kv, options, dtype) -> torch.Tensor | None:
        first, rows, queries, length, places = group
        window, chunk = options.window, options.chunk
        reaches_back = min(window or length, chunk or length) >= length
        if queries == 1 and reaches_back and (self.ends[first : first + rows] == length).all():
            return None
        # Without chunks whether q sees k depends on k - q alone: each query's mask is a piece of
        # one vector, with k = q at L - 1.
        vector = torch.full((2 * length - 1,), float("-inf"), dtype=dtype, device=self.device)
        vector[max(length - (window or length), 0) : length] = 0.0
        position = self.position if self.padding is None else self.padding.position
        mask = vector.unfold(0, length, 1).index_select(0, length - 1 - position[places])
        if chunk is not None:
            begin = options.first_key(position[places])[:, None]
            mask.masked_fill_(torch.arange(length, device=self.device) < begin, float("-inf"))
        mask = mask.view(rows, 1, queries, length)
        return mask if heads_per_kv == 1 else mask.repeat(1, 1, heads_per_kv, 1)

    @cached_property
    def view(self) -> AttentionMetadata:
        """What triton_ops.py reads of a forward that is in no graph."""
        max_q = self.cache.fixed_q or int(min(self.count.max(), TILE))
        slot, tokens = pieces(self.count, max_q)
        arrays = np.append(0, tokens.cumsum()), slot
        first, slots = (to_device(a.astype(np.int32), self.device) for a in arrays)
        table, max_keys = self.cache.block_table(self.device), int(self.ends.max())
        sizes = max_q, max_keys, self.cache.split_of(self.index.shape[1], max_keys)
        return AttentionMetadata(self.place, self.position, first, slots, table, *sizes)


def pack_rows(
    cache: KVCache, start: np.ndarray, count: np.ndarray, device: torch.device
) -> CachePacking:
    """Pack rows without an engine, and reserve their pages; start, count: see `CachePacking`."""
    if cache.pages is not None:
        cache.pages.grow(start + count)
    slot, offset = ragged(count)
    return CachePacking(cache, start, count, np.array((slot, start[slot] + offset)), device)
