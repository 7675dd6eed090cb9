"""Layers with a state, written out: gated delta layers and short convolutions.

They compute over a cache, or whole sequences with gradients. Their products are values, as in
decoder.py. transformers computes parts in float32 whatever a model's type; here a float64 model is
computed in float64.

Shape legend: N packed tokens, P >= N places in windows (states.py), H value heads, G key heads, K
and V their dimensions, C width of the residual.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import silu, softplus

from bubblespec.engine.comparison import norm_of
from bubblespec.engine.kv_cache import CachePacking
from bubblespec.engine.model import SequencePacking
from bubblespec.engine.ops import torch_states as ops
from bubblespec.engine.ops.torch_ops import gated_norm
from bubblespec.engine.ops.torch_states import unit
from bubblespec.engine.states import advance, convolve
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
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
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
        mixed = silu(convolution(packing, m.layer_idx, mixed, m.conv1d.weight[:, 0], m.conv1d.bias))
        wide = torch.promote_types(h.dtype, torch.float32)
        qk, v = mixed.to(wide).split((2 * m.key_dim, m.value_dim), -1)
        q, k = unit(qk.unflatten(1, (2, m.num_k_heads, m.head_k_dim))).unbind(1)
        decay = -m.A_log.to(wide).exp() * softplus(a.to(wide) + m.dt_bias)
        beta = b.sigmoid().to(wide)
        if self.rate != 1.0:
            beta = beta * self.rate
        v = v.unflatten(1, (m.num_v_heads, m.head_v_dim))
        out = recurrence(packing, m.layer_idx, q * m.head_k_dim**-0.5, k, v, decay, beta)
        out = out.to(h.dtype)
        return self.out(gated_norm(out, z.view_as(out), self.norm).flatten(1))

    def _split(self, product: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the inputs of the convolution, the gate, and those of beta and decay."""
        m = self.module
        if not self.is_paired:
            mixed, z, b, a = product.split(self.sizes, -1)
            return mixed, z.contiguous(), b, a
        pairs, rest = product.split((m.conv_dim + m.value_dim, 2 * m.num_v_heads), -1)
        q, k, v, z, b, a = m.fix_query_key_value_ordering(pairs[None], rest[None])
        mixed = torch.cat([of[0].flatten(1) for of in (q, k, v)], 1)
        return mixed, z[0].contiguous(), b[0], a[0]


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
        return self.out(
            behind
            * convolution(packing, self.number, before * x, self.conv.weight[:, 0], self.conv.bias)
        )


def convolution(
    packing: Packing, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return a layer's causal convolution of x [N, C], with a weight [C, k]."""
    if isinstance(packing, SequencePacking):
        return ops.taps_of_sequences(x, packing.position, weight, bias)
    return packing.windows.packed(convolve(packing, layer, x, weight, bias))


def recurrence(packing: Packing, layer: int, q, k, v, log_decay, beta=None) -> torch.Tensor:
    """Return a layer's outputs [N, H, V], see `ops.window`; q and k [N, G, K], v [N, H, V].

    Each of the G heads of q and k is for H / G adjacent ones of v; log_decay and beta: [N, H]."""
    fold = v.shape[1] // k.shape[1]
    if fold > 1:
        q, k = (of.repeat_interleave(fold, 1) for of in (q, k))
    if isinstance(packing, SequencePacking):
        return _whole(packing, q, k, v, log_decay, beta)
    windows = packing.windows
    fed = (of if of is None else windows.padded(of) for of in (q, k, v, log_decay, beta))
    return windows.packed(advance(packing, layer, *fed))


def _whole(packing: SequencePacking, q, k, v, log_decay, beta) -> torch.Tensor:
    """Return the outputs of whole sequences, with gradients."""
    groups, packed_order = packing.groups
    found = []
    for count, length, gather, keep in groups:
        fed = [
            of
            if of is None
            else of.index_select(0, gather).unflatten(0, (count, length)).transpose(1, 2)
            for of in (q, k, v, log_decay, beta)
        ]
        state, outs = None, []
        for begin in range(0, length, CHUNK):
            part = slice(begin, min(begin + CHUNK, length))
            own = [of if of is None else of[:, :, part] for of in fed]
            out, d, sums = ops.window(state, *own)
            outs.append(out)
            if part.stop < length:
                state = ops.behind(state, own[1], d, sums)
        out = torch.cat(outs, 2).transpose(1, 2).flatten(0, 1)
        found.append(out.index_select(0, keep))
    return torch.cat(found).index_select(0, packed_order)
