"""States of layers that are neither attention nor MLP, beside the cache of keys and values.

A state cannot be rolled back, so it is never ahead: it is that behind the last token known to be
right. The window of tokens fed last waits beside it. A row's next forward begins behind those of
them that were right: it adds these to the state first, and then computes its own window from it
without keeping the result. A rejected token leaves no trace, and nothing is copied.

A row that feeds more tokens than a window holds feeds a prompt, or tokens that it had before it
was preempted. All of these are right, so it feeds several windows, one after the other.

Shape legend: R rows, Q tokens of a window, P >= N places of N packed tokens in all windows, H
heads, K and V width of keys and values, C channels of a convolution, k its taps.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from bubblespec.engine.arrays import ragged, to_device
from bubblespec.engine.ops import torch_states as ops

# Tokens of a window, by device. What waits beside a state takes as much memory as the state at 64
# tokens for heads of 128.
WINDOWS = {"cpu": 64, "cuda": 16}


class Window(NamedTuple):
    """Tokens of some rows that are computed at once, each padded to Q of them."""

    slots: slice | torch.Tensor  # of the rows
    is_fresh: torch.Tensor | None  # int64, slots of rows that begin
    kept: torch.Tensor  # int64 [R], tokens of each row's last window that were right
    most: int  # of `kept`
    tokens: torch.Tensor  # int64 [R * Q], the packed token at each place
    width: int  # Q


class Windows(NamedTuple):
    """What a forward over a cache feeds to the states."""

    windows: list[Window]  # in this order
    places: torch.Tensor | None  # int64 [N], of the packed tokens; None: in their order

    def packed(self, padded: torch.Tensor) -> torch.Tensor:
        """Return what windows have computed, [P, ...], of the packed tokens, [N, ...]."""
        return padded if self.places is None else padded.index_select(0, self.places)

    def padded(self, packed: torch.Tensor) -> torch.Tensor:
        """Return packed tokens [N, ...] at their places, [P, ...]."""
        if self.places is None:
            return packed
        return packed.index_select(0, torch.cat([one.tokens for one in self.windows]))


class StateCache:
    """A slot of states for each row, and one that is kept for rows with the same prompt.

    Its tensors [layers, slots + 1, ...] are made at the first write, as zeros."""

    def __init__(self, num_slots: int, layers: list[int], window: int):
        """layers: numbers of the layers that have a state; window: most tokens of one."""
        self.num_slots, self.layers, self.window = num_slots, layers, window
        self.base = np.zeros(num_slots + 1, np.int64)  # tokens that each slot's state has taken in
        self.waiting = np.zeros(num_slots + 1, np.int64)  # tokens of its last window
        self._tensors: dict[str, torch.Tensor] = {}

    def of(self, layer: int, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Return a layer's tensor of a name, [slots + 1, *shape], of the type of another."""
        if name not in self._tensors:
            whole = (len(self.layers), self.num_slots + 1, *shape)
            self._tensors[name] = torch.zeros(whole, dtype=like.dtype, device=like.device)
        return self._tensors[name][self.layers.index(layer)]

    def move(self, source: int, target: int) -> None:
        """Continue the row of slot `source` in slot `target`."""
        self.share(np.array([source]), np.array([target]))

    @torch.inference_mode()
    def share(self, source: np.ndarray, target: np.ndarray) -> None:
        """Give slots `target` the states of other slots `source`, int64 [n] each."""
        self.base[target], self.waiting[target] = self.base[source], self.waiting[source]
        for tensor in self._tensors.values():
            of, to = (to_device(slots, tensor.device) for slots in (source, target))
            tensor.index_copy_(1, to, tensor.index_select(1, of))

    def windows(
        self, start: np.ndarray, count: np.ndarray, groups: list[slice], device: torch.device
    ) -> Windows:
        """Plan what a forward feeds to the rows in the first slots; from now on it counts as fed.

        start, count: int64 [R]; groups: adjacent slots that are computed together."""
        first, windows, size = count.cumsum() - count, [], 0
        places = np.zeros(int(count.sum()), np.int64)
        for group in groups:
            slots = np.arange(group.start, group.stop)
            slots = slots[count[slots] > 0]  # of the others it may not be known where they stand
            are_all = len(slots) == group.stop - group.start
            is_fresh = start[slots] == 0
            kept = np.where(is_fresh, 0, start[slots] - self.base[slots])
            assert ((kept >= 0) & (kept <= self.waiting[slots])).all(), "a state is never ahead"
            fresh, done = to_device(slots[is_fresh], device) if is_fresh.any() else None, 0
            while len(slots):
                left = np.minimum(count[slots] - done, self.window)
                width = int(left.max())
                begin = first[slots] + done
                offset = np.minimum(np.arange(width), np.maximum(left - 1, 0)[:, None])
                tokens = np.minimum(begin[:, None] + offset, len(places) - 1).ravel()
                row, at = ragged(left)
                places[begin[row] + at] = size + row * width + at
                size += len(slots) * width
                rows = group if are_all and not done else to_device(slots, device)
                of_rows = to_device(kept, device), int(kept.max())
                windows.append(Window(rows, fresh, *of_rows, to_device(tokens, device), width))
                self.base[slots], self.waiting[slots] = start[slots] + done, left
                done += self.window
                slots, fresh = slots[count[slots] > done], None
                kept = np.full(len(slots), self.window)
        is_packed = size == len(places) and bool((np.diff(places) > 0).all())
        return Windows(windows, None if is_packed else to_device(places, device))

    def clear(self) -> None:
        """Free the memory."""
        self._tensors.clear()

    def num_bytes(self) -> int:
        """Return the bytes of the tensors that exist; 0 before the first forward."""
        return sum(tensor.nbytes for tensor in self._tensors.values())


def convolve(packing: Any, layer: int, x: torch.Tensor, weight, bias) -> torch.Tensor:
    """Return a layer's causal convolution [P, C] of packed tokens x [N, C]; weight: [C, k]."""
    back, size = weight.shape[1] - 1, x.shape[-1]
    states = packing.cache.states
    inputs = states.of(layer, "inputs", (back + states.window, size), x)
    step, found = torch.arange(back, device=x.device), []
    for window in packing.windows.windows:
        if window.is_fresh is not None:
            inputs[window.is_fresh] = 0.0
        before = inputs[window.slots]
        if window.most:
            index = (window.kept[:, None] + step).unsqueeze(-1).expand(-1, -1, size)
            before = before.gather(1, index)
        new = x.index_select(0, window.tokens).view(-1, window.width, size)
        joined = torch.cat((before[:, :back], new), 1)
        inputs[window.slots, : joined.shape[1]] = joined
        found.append(ops.taps(joined, weight, bias).flatten(0, 1))
    return torch.cat(found)


def advance(packing: Any, layer: int, q, k, v, log_decay, beta=None) -> torch.Tensor:
    """Return a layer's outputs [P, H, V] of q and k [P, H, K] and v [P, H, V]; see `ops.window`.

    log_decay, beta: [P, H]."""
    (_, heads, key_size), value_size = q.shape, v.shape[2]
    states = packing.cache.states
    of, wide = partial(states.of, layer, like=q), (heads, states.window)
    matrix, sums = of("matrix", (heads, key_size, value_size)), of("sums", wide)
    keys, added = of("keys", (*wide, key_size)), of("added", (*wide, value_size))
    begin, found = 0, []
    for window in packing.windows.windows:
        slots, width = window.slots, window.width
        if window.is_fresh is not None:
            matrix[window.is_fresh] = 0.0
        state, at = matrix[slots], (slots, slice(None), slice(window.most))
        if window.most:
            ops.fold(state, keys[at], added[at], sums[at], window.kept)
            if not isinstance(slots, slice):
                matrix[slots] = state
        part = slice(begin, begin + len(state) * width)
        fed = (
            None if of is None else of[part].unflatten(0, (-1, width)).transpose(1, 2)
            for of in (q, k, v, log_decay, beta)
        )  # fmt: skip
        q_of, k_of, *rest = fed
        out, d, c = ops.window(state, q_of, k_of, *rest)
        at = slots, slice(None), slice(width)
        keys[at], added[at], sums[at] = k_of, d, c
        found.append(out.transpose(1, 2).flatten(0, 1))
        begin = part.stop
    return torch.cat(found)
