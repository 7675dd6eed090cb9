"""Layers with a state, written out: gated delta layers and short convolutions.

They compute over a cache, or whole sequences with gradients. Their products are values, as in
decoder.py. transformers computes parts in float32 whatever a model's type; here a float64 model is
computed in float64.

Shape legend: N packed tokens, P >= N places in windows (states.py), H value heads, G key heads, K
and V their dimensions, C width of the residual.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import silu

from bubblespec.engine.kv_cache import CachePacking
from bubblespec.engine.model import SequencePacking
from bubblespec.engine.norms import norm_of
from bubblespec.engine.ops import ops_for, torch_ops, torch_states
from bubblespec.engine.states import advance, convolve, split
from bubblespec.engine.weights import ProductOf

Packing = CachePacking | SequencePacking
Mixer = Callable[[torch.Tensor, Packing], torch.Tensor]

CHUNK = 64  # tokens of whole sequences that are computed at once


class GatedDelta:
    """A gated delta layer (Qwen3.5, Qwen3-Next, OLMo hybrid)."""

    def __init__(self, module: Any, product_of: ProductOf):
        """Raise AttributeError for a module that has other parts."""
        self.module = m = module
        self.is_paired = hasattr(m, "in_proj_qkvz")  # products of each key head lie together
        names: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        if self.is_paired:
            names = ("in_proj_qkvz", "in_proj_ba")
        elif hasattr(m, "q_proj"):
            names = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
        self.product = product_of("qkv", tuple(getattr(m, name) for name in names))
        self.sizes = m.conv_dim, m.value_dim, m.num_v_heads, m.num_v_heads
        self.norm = norm_of(m.o_norm if hasattr(m, "o_norm") else m.norm)
        self.out = product_of("out", (m.o_proj if hasattr(m, "o_proj") else m.out_proj,))
        self.rate = 2.0 if getattr(m, "allow_neg_eigval", False) else 1.0

    def __call__(self, h: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Return [N, C] of normed states [N, C]."""
        m = self.module
        mixed, z, b, a = self._split(self.product(h))
        weight, bias = m.conv1d.weight[:, 0], m.conv1d.bias
        mixed = convolution(packing, m.layer_idx, mixed, weight, bias, has_silu=True)
        qk, v = mixed.split((2 * m.key_dim, m.value_dim), -1)
        qk = qk.unflatten(1, (2, m.num_k_heads, m.head_k_dim))
        v = v.unflatten(1, (m.num_v_heads, m.head_v_dim))
        # Kernels have no gradients.
        ops = torch_ops if isinstance(packing, SequencePacking) else ops_for(h.device, h.dtype)
        rates = ops.rates(a, b, m.A_log, m.dt_bias, self.rate)
        how = {"scale": m.head_k_dim**-0.5, "is_unit": True}
        out = recurrence(packing, m.layer_idx, qk, v, rates, **how).to(h.dtype)
        gate = z.unflatten(1, out.shape[1:])
        return self.out(ops.gated_norm(out, gate, self.norm).flatten(1))

    def _split(self, product: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the inputs of the convolution, the gate, and those of beta and decay."""
        m = self.module
        if not self.is_paired:
            mixed, z, b, a = product.split(self.sizes, -1)
            return mixed, z, b, a
        pairs, rest = product.split((m.conv_dim + m.value_dim, 2 * m.num_v_heads), -1)
        q, k, v, z, b, a = m.fix_query_key_value_ordering(pairs[None], rest[None])
        mixed = torch.cat([of[0].flatten(1) for of in (q, k, v)], 1)
        return mixed, z[0].flatten(1), b[0], a[0]


class ShortConvolution:
    """A gated short convolution (LFM2)."""

    def __init__(self, module: Any, product_of: ProductOf):
        """Raise AttributeError for a module that has other parts."""
        self.conv, self.number = module.conv, module.layer_idx
        self.product = product_of("qkv", (module.in_proj,))
        self.out = product_of("out", (module.out_proj,))

    def __call__(self, h: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Return [N, C] of normed states [N, C]."""
        before, behind, x = self.product(h).chunk(3, -1)
        weight, bias = self.conv.weight[:, 0], self.conv.bias
        return self.out(behind * convolution(packing, self.number, before * x, weight, bias))


def convolution(
    packing: Packing,
    layer: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    has_silu: bool = False,
) -> torch.Tensor:
    """Return a layer's causal convolution of x [N, C], with a weight [C, k] and SiLU behind it."""
    if isinstance(packing, SequencePacking):
        out = torch_states.taps_of_sequences(x, packing.position, weight, bias)
        return silu(out) if has_silu else out
    return packing.windows.packed(convolve(packing, layer, x, weight, bias, has_silu))


def recurrence(
    packing: Packing,
    layer: int,
    qk: torch.Tensor,
    v: torch.Tensor,
    rates: torch.Tensor,
    *,
    scale: float = 1.0,
    is_unit: bool = False,
) -> torch.Tensor:
    """Return a layer's outputs [N, H, V], see `torch_states.window`; qk [N, 2, G, K], v [N, H, V].

    rates: [N, 1 or 2, H], log decays, and betas of a delta rule; scale, is_unit: see `split`."""
    if not isinstance(packing, SequencePacking):
        windows = packing.windows
        qk, v, rates = (windows.padded(of) for of in (qk, v, rates))
        how: dict = {"scale": scale, "is_unit": is_unit}
        return windows.packed(advance(packing, layer, qk, v, *rates.unbind(1), **how))
    q, k = split(qk, v.shape[1], scale, is_unit)
    v = v.to(q.dtype)
    log_decay, beta = rates.unbind(1) if rates.shape[1] == 2 else (rates[:, 0], None)
    if beta is not None and (kernel := delta_kernel(q.device)) is not None:
        low = (of[None].to(torch.bfloat16) for of in (q, k, v))  # it takes no float32
        borders = packing.varlen.offsets.long()
        out = kernel(*low, log_decay[None], beta[None], scale=1.0, cu_seqlens=borders)[0]
        return out[0].to(q.dtype)
    return _whole(packing, q, k, v, log_decay, beta)


@functools.cache
def delta_kernel(device: torch.device) -> Callable | None:
    """Return flash-linear-attention's gated delta rule, where it is installed, for a GPU."""
    if device.type != "cuda" or importlib.util.find_spec("fla") is None:
        return None
    return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule


def _whole(packing: SequencePacking, q, k, v, log_decay, beta) -> torch.Tensor:
    """Return the outputs of whole sequences, with gradients."""
    groups, packed_order = packing.groups
    found = []
    for count, length, gather, keep in groups:
        fed: Any = [
            of
            if of is None
            else of.index_select(0, gather).unflatten(0, (count, length)).transpose(1, 2)
            for of in (q, k, v, log_decay, beta)
        ]
        state, outs = None, []
        for begin in range(0, length, CHUNK):
            part = slice(begin, min(begin + CHUNK, length))
            own: Any = [of if of is None else of[:, :, part] for of in fed]
            out, d, sums = torch_states.window(state, *own)
            outs.append(out)
            if part.stop < length:
                state = torch_states.behind(state, own[1], d, sums)
        out = torch.cat(outs, 2).transpose(1, 2).flatten(0, 1)
        found.append(out.index_select(0, keep))
    return torch.cat(found).index_select(0, packed_order)
