"""Keys and values of all rows, in one contiguous slot per row or in pages.

The caller tracks lengths; lowering one rolls the row back."""

from typing import NamedTuple

import numpy as np
import torch

from bubblespec.engine.arrays import staged
from bubblespec.engine.pages import Pages

SPLIT = 512  # keys; 256 and 1,024 were within 5% for 1 to 128 rows of 4,096 keys on an H200
MAX_SPLIT_TOKENS = 256
ALIGNMENT = 64  # bytes, as torch's own tensors have it


class LayerCache(NamedTuple):
    """Keys and values of one layer; the positions of a head lie next to each other in a page."""

    keys: torch.Tensor  # [pages and spare ones, page_size, K, dimension], a view
    values: torch.Tensor
    joint: torch.Tensor | None
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
    ):
        """num_layers: layers for which the first write takes memory."""
        self.num_slots, self.slot_length, self.num_spare = num_slots, slot_length, num_spare
        self.pages, self.num_layers = pages, num_layers
        self.is_invariant = False  # whether a token's sums must not depend on other tokens
        self.num_pages, self.page_size = num_slots, slot_length
        if pages is not None:
            self.num_pages, self.page_size = pages.num_pages, pages.page_size
        self.layers: dict[int, LayerCache] = {}
        # [layers, pages and spare ones, numbers of a page] each; the first has `num_layers`.
        self._tensors: list[torch.Tensor] = []
        self._table: torch.Tensor | None = None
        self._version = -1  # version of the pages in `_table`

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
            whole = self._tensors[0] if self._tensors else None
            if whole is None or number >= len(whole) or whole.shape[1:] != shape:
                count = 1 if self._tensors else max(self.num_layers, number + 1)
                whole = _zeros((count, *shape), key)
                self._tensors.append(whole)
            own = whole[number if whole is self._tensors[0] else 0]
            parts = own.split([self.page_size * heads * size for size in sizes], dim=1)
            keys, values = (
                part.view(pages, heads, self.page_size, size).transpose(1, 2)
                for part, size in zip(parts, sizes, strict=True)
            )
            joint = None
            if sizes[0] == sizes[1]:
                joint = own.view(pages, 2 * heads, self.page_size, sizes[0])
            self.layers[number] = LayerCache(keys, values, joint)
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
        is_split = self.is_invariant or num_tokens <= MAX_SPLIT_TOKENS
        return SPLIT if is_split else -(-max_keys // SPLIT) * SPLIT

    def erase(self, place: torch.Tensor) -> None:
        """Write zeros to places int64 [N], and to spare ones."""
        at = self.locate(place)
        for part in self._parts():
            part[at] = 0.0
            part[self.num_pages :] = 0.0

    def move(self, source: int, target: int, length: int) -> None:
        """Continue the row in slot `source`, of `length` positions, in slot `target`."""
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
                tensor.index_copy_(1, write, tensor.index_select(1, read))
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

    def num_bytes(self) -> int:
        """Return the bytes of the tensors that exist; 0 before the first forward."""
        return sum(tensor.nbytes for tensor in self._tensors)


def _zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return zeros; on a CPU in pages that take memory, and time, when they are written to."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = int(np.prod(shape)) * like.element_size()
    taken = np.zeros(size + ALIGNMENT, np.uint8)
    begin = -taken.ctypes.data % ALIGNMENT
    return torch.from_numpy(taken[begin : begin + size]).view(like.dtype).view(shape)
