"""Recurrent states of rows, in slots like their keys and values.

A state cannot be rolled back, so it is never ahead: it has taken in only tokens that are known to
be right. The last window of tokens is stored next to it. How many of these were right is known when
the row's next forward begins: they are added to the state first. Then the forward computes its own
window from the state, without keeping the result. So a rejected token leaves no trace, and nothing
is copied.

A row that feeds more tokens than a window holds feeds a prompt, or tokens that it had before it
was preempted. All of these are right, so it feeds several windows, one after the other.

Shape legend: R rows, Q tokens of a window, P >= N places of N packed tokens in all windows, H
heads, K and V width of keys and values, C channels of a convolution, k its taps.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import promote_types
from torch.nn.functional import silu

from bubblespec.engine.arrays import ragged, to_device
from bubblespec.engine.ops import STATES, has_kernels
from bubblespec.engine.ops import torch_states as ops
from bubblespec.engine.ops.view import AttentionMetadata

# Tokens of a window, by device. With heads of 128 a window of 64 takes as much memory as the state.
WINDOWS = {"cpu": 64, "cuda": 16}
SHARED_BYTES = 1 << 28  # that are copied at once
STANDING = "standing"  # of slots, a tensor that all layers share


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


class Feed(NamedTuple):
    """What a forward over a cache feeds to the states where kernels compute them.

    They take and return packed tokens."""

    rows: torch.Tensor  # see `triton_states.plan`
    max_q: int  # see `AttentionMetadata`

    def packed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what it is given."""
        return tokens

    def padded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what it is given."""
        return tokens


class StateCache:
    """A slot of states for each row, and one that is kept for rows with the same prompt.

    Its tensors [layers, slots + 1, ...] are made at the first write, as zeros. Where kernels
    compute the layers, one of them says where the slots stand: the host need not know."""

    def __init__(self, num_slots: int, layers: list[int], window: int, in_kernels: bool = False):
        """layers: numbers of the layers that have a state; window: most tokens of one."""
        self.num_slots, self.layers, self.window = num_slots, layers, window
        self.in_kernels = in_kernels
        self.base = np.zeros(num_slots + 1, np.int64)  # tokens that each slot's state has taken in
        self.waiting = np.zeros(num_slots + 1, np.int64)  # tokens of its last window
        self._tensors: dict[str, torch.Tensor] = {}

    @classmethod
    def of_layers(
        cls, layers: list[int], num_slots: int, device: torch.device, dtype: torch.dtype
    ) -> "StateCache | None":
        """Return a cache for these layers of a model on this device; None if there are none."""
        if not layers:
            return None
        in_kernels = has_kernels(device, dtype, STATES)
        window = WINDOWS["cuda" if in_kernels else device.type]
        return cls(num_slots, layers, window, in_kernels)

    def of(
        self, layer: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, device
    ) -> torch.Tensor:
        """Return a layer's tensor of a name, [slots + 1, *shape]."""
        if name not in self._tensors:
            whole = (len(self.layers), self.num_slots + 1, *shape)
            self._tensors[name] = torch.zeros(whole, dtype=dtype, device=device)
        return self._tensors[name][self.layers.index(layer)]

    def move(self, source: int, target: int) -> None:
        """Continue the row of slot `source` in slot `target`."""
        self.share(np.array([source]), np.array([target]))

    @torch.inference_mode()
    def share(self, source: np.ndarray, target: np.ndarray) -> None:
        """Give slots `target` the states of other slots `source`, int64 [n] each."""
        self.base[target], self.waiting[target] = self.base[source], self.waiting[source]
        for tensor in self._tensors.values():
            at_once = max(SHARED_BYTES // (tensor[:, 0].numel() * tensor.itemsize), 1)
            parts = (to_device(of, tensor.device).split(at_once) for of in (source, target))
            for of, to in zip(*parts, strict=True):
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

    def feed(self, view: AttentionMetadata, spare: int) -> Feed:
        """Plan what a forward feeds to kernels; from now on it counts as fed.

        spare: first place of tokens that are not fed."""
        from bubblespec.engine.ops import triton_states

        device = view.slot.device
        if STANDING not in self._tensors:
            shape = 1, self.num_slots + 1, 2
            self._tensors[STANDING] = torch.zeros(shape, dtype=torch.int32, device=device)
        standing = self._tensors[STANDING][0]
        return Feed(triton_states.plan(view, standing, self.window, spare), view.max_q)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that exist."""
        return list(self._tensors.values())

    def clear(self) -> None:
        """Free the memory."""
        self._tensors.clear()

    def num_bytes(self) -> int:
        """Return the bytes of the tensors that exist; 0 before the first forward."""
        return sum(tensor.nbytes for tensor in self._tensors.values())


def convolve(
    packing: Any, layer: int, x: torch.Tensor, weight, bias, has_silu: bool = False
) -> torch.Tensor:
    """Return a layer's causal convolution [P, C] of packed tokens x [N, C], with SiLU behind it.

    weight: [C, k]"""
    back, size = weight.shape[1] - 1, x.shape[-1]
    states, fed = packing.cache.states, packing.windows
    inputs = states.of(layer, "inputs", (back + states.window, size), x.dtype, x.device)
    if isinstance(fed, Feed):
        from bubblespec.engine.ops import triton_states

        x = x if x.stride(1) == 1 else x.contiguous()
        of_rows = fed.rows, fed.max_q, inputs
        return triton_states.convolve(*of_rows, x, weight, bias, has_silu)
    step, found = torch.arange(back, device=x.device), []
    for window in fed.windows:
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
    return silu(torch.cat(found)) if has_silu else torch.cat(found)


def advance(
    packing: Any,
    layer: int,
    qk: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    is_unit: bool = False,
) -> torch.Tensor:
    """Return a layer's outputs [P, H, V] of qk [P, 2, G, K] and v [P, H, V]; see `ops.window`.

    log_decay, beta: [P, H]; scale, is_unit: see `split`."""
    if isinstance(packing.windows, Feed):
        return _advance_in_kernel(packing, layer, qk, v, log_decay, beta, scale, is_unit)
    q, k = split(qk, v.shape[1], scale, is_unit)
    (_, heads, key_size), value_size = q.shape, v.shape[2]
    states, type_of = packing.cache.states, (q.dtype, q.device)
    fed_to = (v.to(q.dtype), log_decay, None if beta is None else beta.to(q.dtype))
    of, wide = partial(states.of, layer), (heads, states.window)
    matrix, sums = of("matrix", (heads, key_size, value_size), *type_of), of("sums", wide, *type_of)
    keys = of("keys", (*wide, key_size), *type_of)
    added = of("added", (*wide, value_size), *type_of)
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
        fed: Any = (
            None if of is None else of[part].unflatten(0, (-1, width)).transpose(1, 2)
            for of in (q, k, *fed_to)
        )  # fmt: skip
        q_of, k_of, *rest = fed
        out, d, c = ops.window(state, q_of, k_of, *rest)
        at = slots, slice(None), slice(width)
        keys[at], added[at], sums[at] = k_of, d, c
        found.append(out.transpose(1, 2).flatten(0, 1))
        begin = part.stop
    return torch.cat(found)


def _advance_in_kernel(
    packing: Any, layer: int, qk, v, log_decay, beta, scale: float, is_unit: bool
) -> torch.Tensor:
    from bubblespec.engine.ops import triton_states

    (_, _, key_heads, key), (_, heads, value) = qk.shape, v.shape
    states, wide = packing.cache.states, torch.float32
    of, window = partial(states.of, layer, device=v.device), states.window
    waiting = triton_states.Waiting(
        matrix=of("matrix", (heads, key, value), wide),
        keys=of("keys", (2, key_heads, window, key), qk.dtype),
        added=of("added", (heads, window, value), wide),
        decays=of("decays", (2, heads, window), wide),
    )
    rows, (q, k) = packing.windows.rows, qk.unbind(1)
    return triton_states.advance(rows, waiting, q, k, v, log_decay, beta, scale, is_unit)


def split(
    qk: torch.Tensor, num_heads: int, scale: float, is_unit: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k, [N, H, K] each and at least float32, of both, [N, 2, G, K].

    scale: of q; is_unit: whether each has length 1. Each of G heads is for H / G adjacent ones."""
    both = qk.to(promote_types(qk.dtype, torch.float32))
    both = ops.unit(both) if is_unit else both
    fold = num_heads // qk.shape[2]
    q, k = (both.repeat_interleave(fold, 2) if fold > 1 else both).unbind(1)
    return (q if scale == 1.0 else q * scale), k
