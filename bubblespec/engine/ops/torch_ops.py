"""The operations of a decoder layer in torch: the reference on every device, and the CPU's path.

Each rounds where transformers' modules round. A call costs a CPU more than most of its work, and a
Python number as an operand costs another microsecond; so calls are few, and constants are tensors.

Shape legend: N packed tokens, H query heads, K key/value heads, D head dimension, R rotary
dimensions, C width of the residual, I hidden units of an MLP.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from bubblespec.engine.kv_cache import CachePacking, LayerCache
from bubblespec.engine.ops.softmax import AttentionOptions, attend_heads
from bubblespec.engine.ops.view import Norm
from bubblespec.engine.sampling import best_and_sum as best_and_sum

ACTIVATIONS: dict[str, Callable] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


FULL = (torch.float32, torch.float64)


def add_norm(x: torch.Tensor | None, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Add x [N, C] to the residual [N, C] in place, and return the norm of the sum."""
    if x is not None:
        residual += x
    return _normalize(residual, norm)


def _normalize(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    is_full = x.dtype in FULL
    wide = x if is_full else x.float()
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(norm.epsilon, size, size, value=1 / x.shape[-1]).rsqrt_()
    if norm.has_offset:
        wide = wide * scale
        return wide.addcmul_(wide, norm.weight.to(wide.dtype)).to(x.dtype)
    return (wide * scale if is_full else (wide * scale).to(x.dtype)).mul_(norm.weight)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return the norm of x [..., D] times the SiLU of a gate [..., D]."""
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    return (_normalize(x, norm) * functional.silu(wide)).to(x.dtype)


def rates(
    a: torch.Tensor, b: torch.Tensor, log_rate: torch.Tensor, bias: torch.Tensor, most: float
) -> torch.Tensor:
    """Return log decays and betas [N, 2, H] of a gated delta layer, at least in float32.

    a, b: [N, H]; log_rate, bias: [H], of decays; most: bound of betas."""
    wide = torch.promote_types(a.dtype, torch.float32)
    decay = -log_rate.to(wide).exp() * functional.softplus(a.to(wide) + bias)
    beta = b.sigmoid().to(wide)
    return torch.stack((decay, beta if most == 1.0 else beta * most), 1)


def rotation(
    tables: tuple[torch.Tensor, torch.Tensor], packing: CachePacking
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `rope_store` takes in all layers, of `Decoder.tables`."""
    cos, sin = (table.index_select(0, packing.position)[:, None] for table in tables)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rope_store(
    qkv: torch.Tensor,
    packing: CachePacking,
    cache: LayerCache,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    head_norms: tuple[Norm, Norm] | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, store keys and values, and return the queries, [N, H, D].

    qkv: [N, H + 2K, D], overwritten; rotation: see `rotation`, or None; head_norms: of queries and
    of keys, before the rotation."""
    kv_heads = cache.keys.shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    both = qkv[:, : heads + kv_heads]
    if head_norms is not None:
        for part, norm in zip((both[:, :heads], both[:, heads:]), head_norms, strict=True):
            part.copy_(_normalize(part, norm))
    if rotation is not None:
        cos, sin = rotation
        rotated = both[..., : cos.shape[-1]]
        turned = rotated.roll(cos.shape[-1] // 2, -1)
        if qkv.dtype in FULL:
            torch.addcmul(rotated * cos, turned, sin, out=rotated)
        else:  # as transformers rounds
            torch.add(rotated * cos, turned * sin, out=rotated)
    page, offset = packing.page_offset
    assert cache.kv is not None, "a decoder's keys and values have one dimension"
    cache.kv[page, :, offset] = qkv[:, heads:]
    return qkv[:, :heads]


def attend(
    query: torch.Tensor,
    packing: CachePacking,
    cache: LayerCache,
    options: AttentionOptions,
) -> torch.Tensor:
    """Return the attention [N, H, D] of queries [N, H, D] over the cache, their own keys included.

    Query heads are folded into the query axis, so no key is copied."""
    num_heads, kv_heads = query.shape[1], cache.keys.shape[2]
    queries_per_kv, padding, attended = num_heads // kv_heads, packing.padding, []
    if padding is not None:
        query = query.index_select(0, padding.tokens)
    for group in packing.groups:
        rows, queries = group.num_rows, group.num_queries
        q = (
            query[group.places]
            .reshape(rows, queries, kv_heads, queries_per_kv, -1)
            .permute(0, 2, 3, 1, 4)
        )
        q = q.reshape(rows, kv_heads, queries_per_kv * queries, -1)
        slots = slice(group.first_slot, group.first_slot + rows)
        k, v = (
            packing.cache.read(t, slots, group.length).transpose(1, 2)
            for t in (cache.keys, cache.values)
        )
        mask = packing.mask(group, queries_per_kv, options, query.dtype)
        out = attend_heads(q, k, v, mask, options)
        out = out.reshape(rows, kv_heads, queries_per_kv, queries, -1).permute(0, 3, 1, 2, 4)
        attended.append(out.reshape(rows * queries, num_heads, -1))
    out = attended[0] if len(attended) == 1 else torch.cat(attended)
    return out if padding is None else out.index_select(0, padding.places)


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the activation of the first half of [N, 2I] times the second half, [N, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)
