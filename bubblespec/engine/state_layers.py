"""Layers with a state, written out: gated delta layers and short convolutions.

Their products are values, as in decoder.py. recurrent.py has the same layers as transformers'
modules, which train.

Shape legend: N packed tokens, P >= N places in windows (states.py), H value heads, G key heads, K
and V their dimensions, C width of the residual.
"""

from collections.abc import Callable
from typing import Any

import torch

from bubblespec.engine.comparison import norm_of
from bubblespec.engine.kv_cache import CachePacking
from bubblespec.engine.ops import ops_for
from bubblespec.engine.states import advance, convolve
from bubblespec.engine.weights import ProductOf

Mixer = Callable[[torch.Tensor, CachePacking], torch.Tensor]


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
        self.ops = ops_for(m.conv1d.weight.device, m.conv1d.weight.dtype)
        self.out = product_of("out", (m.o_proj if hasattr(m, "o_proj") else m.out_proj,))
        self.rate = 2.0 if getattr(m, "allow_neg_eigval", False) else 1.0

    def __call__(self, h: torch.Tensor, packing: CachePacking) -> torch.Tensor:
        """Return [N, C] of normed states [N, C]."""
        m, windows = self.module, packing.windows
        mixed, z, b, a = self._split(self.product(h))
        weight = m.conv1d.weight.squeeze(1)
        mixed = convolve(packing, m.layer_idx, mixed, weight, m.conv1d.bias, has_silu=True)
        qk, v = mixed.split((2 * m.key_dim, m.value_dim), -1)
        rates = windows.padded(self.ops.rates(a, b, m.A_log, m.dt_bias, self.rate)).unbind(1)
        qk = qk.unflatten(1, (2, m.num_k_heads, m.head_k_dim))
        v = v.unflatten(1, (m.num_v_heads, m.head_v_dim))
        how = {"scale": m.head_k_dim**-0.5, "is_unit": True}
        out = advance(packing, m.layer_idx, qk, v, *rates, **how)
        out = windows.packed(out).to(h.dtype)
        z = z.unflatten(1, out.shape[1:])
        return self.out(self.ops.gated_norm(out, z, self.norm).flatten(1))

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

    def __call__(self, h: torch.Tensor, packing: CachePacking) -> torch.Tensor:
        """Return [N, C] of normed states [N, C]."""
        before, behind, x = self.product(h).chunk(3, -1)
        weight = self.conv.weight.squeeze(1)
        out = convolve(packing, self.number, before * x, weight, self.conv.bias)
        return self.out(behind * packing.windows.packed(out))
