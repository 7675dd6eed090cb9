"""The operations of a decoder on a GPU, in Triton.

Grids depend only on the sizes of tensors and on bounds of the view, and no operation waits for the
device, so CUDA graphs can capture them all. A token's bits do not depend on the other tokens of a
forward, as long as tiles of attention have the same rows: `AttentionMetadata.max_q` * G up to a
power of two, at most TILE.

Shape legend: N tokens, S sequences, H query heads, K key/value heads, G = H / K, D head
dimension, E that of values, R rotary dimensions, C hidden size, I intermediate size.
"""

from functools import cache
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from bubblespec.engine.kv_cache import LayerCache
from bubblespec.engine.ops.softmax import AttentionOptions
from bubblespec.engine.ops.triton_sampling import FUSED
from bubblespec.engine.ops.triton_sampling import best_and_sum as best_and_sum
from bubblespec.engine.ops.triton_sampling import draw as draw
from bubblespec.engine.ops.view import TILE, AttentionMetadata, Norm


class Packing(Protocol):
    """What the operations read of a packing."""

    @property
    def view(self) -> AttentionMetadata:
        """The place of its tokens in the cache."""


KEYS = 8192  # numbers in a block of keys: 64 of 128 were within 2% of the best size everywhere
MERGED = 8  # splits that are merged at once
VALUES = 1024  # of a block in elementwise operations
LOG2_E = tl.constexpr(1.4426950408889634)


def add_norm(
    x: torch.Tensor | None, residual: torch.Tensor, norm: Norm, total: torch.Tensor | None = None
) -> torch.Tensor:
    """Add x to the residual stream [N, C], and return the RMSNorm of the sum [N, C].

    total: where the sum goes, by default in place."""
    assert residual.is_contiguous() and (x is None or x.is_contiguous())
    out = torch.empty_like(residual)
    num_tokens, columns = residual.shape
    _add_norm[(num_tokens,)](
        residual if x is None else x, residual, residual if total is None else total, norm.weight,
        out, columns, norm.eps, HAS_X=x is not None, HAS_OFFSET=norm.has_offset,
        **whole_rows(columns),
    )  # fmt: skip
    return out


def whole_rows(columns: int) -> dict:
    """Return the options of programs that compute whole rows."""
    block = triton.next_power_of_2(columns)
    # No element in two warps: one could load what the other has stored already.
    num_warps = max(min(4, block // 32), 1)
    return {"BLOCK": block, "num_warps": min(max(block // 512, num_warps), 16), **FUSED}


@triton.jit
def _add_norm(
    x_ptr, residual_ptr, total_ptr, weight_ptr, out_ptr, columns, eps, HAS_X: tl.constexpr,
    HAS_OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add and normalise one token; it is rounded where transformers rounds."""
    dtype = residual_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    inside = column < columns
    wide = tl.load(residual_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_X:
        wide += tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        wide = wide.to(dtype).to(tl.float32)
        tl.store(total_ptr + row + column, wide.to(dtype), mask=inside)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    tl.store(out_ptr + row + column, _scaled(wide, scale, weight, dtype, HAS_OFFSET), mask=inside)


@triton.jit
def _scaled(wide, scale, weight, dtype: tl.constexpr, HAS_OFFSET: tl.constexpr):
    """Multiply by the norm's scale, round, and multiply by its weight; see `Norm`."""
    if HAS_OFFSET:
        wide = wide * scale
        return (wide + wide * weight.to(tl.float32)).to(dtype)
    return ((wide * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return the norm of x [N, H, D] times the SiLU of a gate [N, H, D]."""
    num_tokens, num_heads, size = x.shape
    assert x.is_contiguous() and gate.stride()[1:] == (size, 1)
    block, out = triton.next_power_of_2(size), torch.empty_like(x)
    heads = max(VALUES // block, 1)
    _gated_norm[(num_tokens, triton.cdiv(num_heads, heads))](
        x, gate, norm.weight, out, gate.stride(0), norm.eps, H=num_heads, D=size,
        HAS_OFFSET=norm.has_offset, HEADS=heads, BLOCK=block, num_warps=4, **FUSED,
    )  # fmt: skip
    return out


@triton.jit
def _gated_norm(
    x_ptr, gate_ptr, weight_ptr, out_ptr, gate_stride, eps, H: tl.constexpr, D: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute some heads of one token."""
    dtype = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    inside = (head < H) & (d < D)
    x = tl.load(x_ptr + token * H * D + head * D + d, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + head * D + d, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    out = _scaled(x, scale, weight, dtype, HAS_OFFSET).to(tl.float32)
    gate, _ = _activation(gate.to(tl.float32), "silu")
    tl.store(out_ptr + token * H * D + head * D + d, (out * gate).to(dtype), mask=inside)


def rates(
    a: torch.Tensor, b: torch.Tensor, log_rate: torch.Tensor, bias: torch.Tensor, most: float
) -> torch.Tensor:
    """Return log decays and betas [N, 2, H] of a gated delta layer in float32, see torch_ops.py."""
    num_tokens, num_heads = a.shape
    assert a.stride(1) == b.stride(1) == log_rate.stride(0) == bias.stride(0) == 1
    out = torch.empty(num_tokens, 2, num_heads, dtype=torch.float32, device=a.device)
    _rates[(num_tokens,)](
        a, b, log_rate, bias, out, a.stride(0), b.stride(0), most, H=num_heads,
        BLOCK=triton.next_power_of_2(num_heads), num_warps=1, **FUSED,
    )  # fmt: skip
    return out


@triton.jit
def _rates(
    a_ptr, b_ptr, log_rate_ptr, bias_ptr, out_ptr, a_stride, b_stride, most, H: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK)
    inside = head < H
    log_rate = tl.load(log_rate_ptr + head, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + head, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(a_ptr + token * a_stride + head, mask=inside, other=0.0).to(tl.float32) + bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    b = tl.load(b_ptr + token * b_stride + head, mask=inside, other=0.0)
    share = (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype)  # as modules round
    out_ptr += token * 2 * H + head
    tl.store(out_ptr, -tl.exp(log_rate) * softplus, mask=inside)
    tl.store(out_ptr + H, share.to(tl.float32) * most, mask=inside)


def rotation(
    tables: tuple[torch.Tensor, torch.Tensor], packing: Packing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `rope_store` takes in all layers: the tables, [positions, R / 2] each."""
    return tables


def rope_store(
    qkv: torch.Tensor,
    packing: Packing,
    cache: LayerCache,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    head_norms: tuple[Norm, Norm] | None = None,
) -> torch.Tensor:
    """Return rotated queries [N, H, D]; store rotated keys and values in the cache.

    qkv: [N, H + 2K, D]; rotation: of `rotation`, None rotates nothing; head_norms: of each query
    and key head."""
    keys, values, view = cache.keys, cache.values, packing.view
    cos, sin = (None, None) if rotation is None else rotation
    _, page_size, num_kv, size = keys.shape
    num_heads = qkv.shape[1] - 2 * num_kv
    assert keys.stride() == values.stride(), "a decoder's keys and values have one dimension"
    assert keys.stride()[1:] == (size, page_size * size, 1)
    assert qkv.stride()[1:] == (size, 1)
    query = qkv.new_empty(len(qkv), num_heads, size)
    block = triton.next_power_of_2(size)
    heads = max(VALUES // block, 1)
    weight_q, weight_k, eps, has_offset = qkv, qkv, 0.0, False
    if head_norms is not None:
        (weight_q, eps, _, has_offset), (weight_k, *_) = head_norms
    _rope_store[(len(qkv), triton.cdiv(num_heads + 2 * num_kv, heads))](
        qkv, query, keys, values, view.place, view.position, qkv if cos is None else cos,
        qkv if sin is None else sin, weight_q, weight_k, qkv.stride(0), keys.stride(0), eps,
        H=num_heads, K=num_kv, D=size, HALF=0 if cos is None else cos.shape[1],
        HAS_NORMS=head_norms is not None, HAS_OFFSET=has_offset, PAGE=page_size, HEADS=heads,
        BLOCK=block, num_warps=4, **FUSED,
    )  # fmt: skip
    return query


@triton.jit
def _rope_store(
    qkv_ptr, query_ptr, keys_ptr, values_ptr, place_ptr, position_ptr, cos_ptr, sin_ptr,
    weight_q_ptr, weight_k_ptr, qkv_stride, page_stride, eps, H: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HAS_NORMS: tl.constexpr,
    HAS_OFFSET: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate and store HEADS heads of one token, of queries, keys or values."""
    dtype = query_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    is_head = (head < H + 2 * K) & (d < D)
    source = qkv_ptr + token * qkv_stride + head * D
    loaded = tl.load(source + d, mask=is_head, other=0.0)
    x = loaded.to(tl.float32)
    if HALF > 0:
        rotates = d < 2 * HALF
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        y = tl.load(source + partner, mask=is_head & rotates, other=0.0).to(tl.float32)
    if HAS_NORMS:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        weight_ptr = tl.where(head < H, weight_q_ptr + d, weight_k_ptr + d)
        weight = tl.load(weight_ptr, mask=is_head, other=0.0)
        x = _scaled(x, scale, weight, dtype, HAS_OFFSET).to(tl.float32)
        if HALF > 0:
            weight_ptr += partner - d
            weight = tl.load(weight_ptr, mask=is_head & rotates, other=0.0)
            y = _scaled(y, scale, weight, dtype, HAS_OFFSET).to(tl.float32)
    if HALF > 0:
        angle = tl.load(position_ptr + token).to(tl.int64) * HALF + d % HALF
        cos = tl.load(cos_ptr + angle, mask=rotates, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=rotates, other=0.0).to(tl.float32)
        turned = (y * tl.where(d < HALF, -sin, sin)).to(dtype).to(tl.float32)
        x = (x * cos).to(dtype).to(tl.float32) + turned  # rounded where transformers rounds
    x = x.to(dtype)
    tl.store(query_ptr + (token * H + head) * D + d, x, mask=is_head & (head < H))
    place = tl.load(place_ptr + token).to(tl.int64)
    target = place // PAGE * page_stride + place % PAGE * D
    is_key = is_head & (head >= H) & (head < H + K)
    tl.store(keys_ptr + target + (head - H) * PAGE * D + d, x, mask=is_key)
    is_value = is_head & (head >= H + K)
    tl.store(values_ptr + target + (head - H - K) * PAGE * D + d, loaded, mask=is_value)


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a block may have."""
    if device.type != "cuda":  # the interpreter
        return 1 << 30
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


@cache
def tiling(width: int, value_width: int, rows: int, limit: int) -> tuple[int, int, int]:
    """Return how many keys a tile of `rows` rows takes at once, and its warps and stages.

    width, value_width: of keys and values in half precision; limit: bytes of shared memory. Keys
    depend on widths alone, as another number of them would round differently."""
    widest = max(width, value_width)
    keys = KEYS // max(widest, 128)
    # What the compiler allocates up to Ada, and not less than that of later cards with 99 KB: all
    # stages but one, queries, and weights. With a stage keys and values share a buffer.
    bytes_of = {
        n: 2 * ((n - 1) * keys * (width + value_width) + rows * (width + keys)) for n in (2, 3)
    }
    num_stages = max((n for n, size in bytes_of.items() if size <= limit), default=1)
    return keys, 4 if rows * widest <= 64 * 128 else 8, num_stages


def attend(
    query: torch.Tensor,
    packing: Packing,
    cache: LayerCache,
    options: AttentionOptions,
) -> torch.Tensor:
    """Return the attention [N, H, E] of queries [N, H, D] over the cache, in pages of 16 n keys.

    A query at position p sees positions k <= p, from `AttentionOptions.first_key` on."""
    keys, values, view = cache.keys, cache.values, packing.view
    num_tokens, num_heads, size = query.shape
    _, page_size, num_kv, value_size = values.shape
    for of in (keys, values):
        assert of.stride()[1:] == (of.shape[3], page_size * of.shape[3], 1)
    assert keys.stride(0) == values.stride(0), "a page has both"
    assert query.stride(2) == 1 and view.table.stride(1) == 1
    assert query.dtype.itemsize == 2 or not query.is_cuda, "tensor cores would round float32"
    group, splits = num_heads // num_kv, triton.cdiv(view.max_keys, view.split)
    rows = min(max(triton.next_power_of_2(view.max_q * group), 16), TILE)
    tiles = triton.cdiv(view.max_q * group, rows)
    widths = [max(triton.next_power_of_2(of), 16) for of in (size, value_size)]
    block, num_warps, num_stages = tiling(*widths, rows, shared_memory(query.device))
    block = min(block, page_size & -page_size)  # powers of two, so blocks divide the page
    assert block >= 16 and view.split % block == 0
    out = query.new_empty(num_tokens, num_heads, value_size)
    # Sums of single splits: weighted values, and the largest score and the sum of weights.
    parts = (num_tokens * num_heads * splits, value_size) if splits > 1 else (1, 1)
    part = torch.empty(parts, dtype=torch.float32, device=query.device)
    weights = torch.empty((2, parts[0]), dtype=torch.float32, device=query.device)
    sinks = out if options.sinks is None else options.sinks
    shape = {"E": value_size, "BLOCK_E": widths[1], "WINDOW": options.window or 0}
    shape |= {"CHUNK": options.chunk or 0, "HAS_SINKS": options.sinks is not None}
    _attend[(len(view.slot) * tiles, num_kv, splits)](
        query, keys, values, out, part, weights, sinks, view.table, view.first, view.slot,
        view.position, options.scaling, *query.stride()[:2], keys.stride(0), view.table.stride(0),
        view.split, splits, parts[0], tiles, CAP=options.cap or 0.0, H=num_heads, G=group, D=size,
        PAGE=page_size, IS_WHOLE=splits == 1, BLOCK_M=rows, BLOCK_N=block, BLOCK_D=widths[0],
        num_warps=num_warps, num_stages=num_stages, **shape, **FUSED,
    )  # fmt: skip
    if splits > 1:
        _merge[(num_tokens, num_heads)](
            out, part, weights, sinks, view.position, view.split, splits, parts[0], **shape,
            H=num_heads, BLOCK_S=MERGED, num_warps=1, **FUSED,
        )  # fmt: skip
    return out


@triton.jit
def _attend(
    query_ptr, keys_ptr, values_ptr, out_ptr, part_ptr, weights_ptr, sinks_ptr, table_ptr,
    first_ptr, slot_ptr, position_ptr, scaling, query_stride, head_stride, page_stride,
    table_stride, split, splits, num_parts, tiles, CAP: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr, IS_WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Sum one split of the keys of one key/value head, for a tile of a sequence's rows.

    Rows are tokens times the query heads of the key/value head."""
    sequence, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    kv_head, index = tl.program_id(1), tl.program_id(2)
    first = tl.load(first_ptr + sequence)
    num_rows = (tl.load(first_ptr + sequence + 1) - first) * G
    if tile * BLOCK_M >= num_rows:
        return
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token = row < num_rows
    token, head = first + row // G, kv_head * G + row % G
    position = tl.load(position_ptr + token, mask=is_token, other=0).to(tl.int32)
    begin = index * split
    # Keys behind the tile's last token may be anything, also NaN, see below.
    end = tl.minimum(begin + split, tl.max(position, 0) + 1)
    if WINDOW + CHUNK > 0:
        earliest = tl.load(position_ptr + first + tile * BLOCK_M // G).to(tl.int32)
        begin = tl.maximum(begin, _first_key(earliest, WINDOW, CHUNK) // BLOCK_N * BLOCK_N)
    if begin >= end:
        return
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    source = token.to(tl.int64) * query_stride + head * head_stride
    is_real = is_token[:, None] & (d < D)[None, :]
    query = tl.load(query_ptr + source[:, None] + d[None, :], mask=is_real, other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    n = tl.arange(0, BLOCK_N)
    keys_ptr += kv_head * PAGE * D
    values_ptr += kv_head * PAGE * E
    table_ptr += tl.load(slot_ptr + sequence).to(tl.int64) * table_stride
    # A page's number is loaded one iteration early, as Triton would not load the keys early
    # otherwise. After the last block this reads the next column: the table has a spare one.
    ahead = tl.load(table_ptr + begin // PAGE)
    for start in range(begin, end, BLOCK_N):
        page = ahead.to(tl.int64)
        ahead = tl.load(table_ptr + (start + BLOCK_N) // PAGE)
        place = page * page_stride
        offset, key = (start % PAGE + n)[:, None], start + n
        # A weight of 0 would not hide a NaN.
        inside = (key < end)[:, None]
        is_key, is_value = inside, inside
        if BLOCK_D > D:
            is_key &= (d < D)[None, :]
        if BLOCK_E > E:
            is_value &= (e < E)[None, :]
        block = tl.load(keys_ptr + place + offset * D + d[None, :], mask=is_key, other=0.0)
        score = tl.dot(query, tl.trans(block))
        if CAP > 0:
            score = _tanh(score * (scaling / CAP)) * (CAP * LOG2_E)
        else:
            score *= scaling * LOG2_E
        sees = key[None, :] <= position[:, None]
        if WINDOW + CHUNK > 0:
            sees &= key[None, :] >= _first_key(position, WINDOW, CHUNK)[:, None]
        score = tl.where(sees, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(top - base)
        block = tl.load(values_ptr + place + offset * E + e[None, :], mask=is_value, other=0.0)
        summed = summed * fade[:, None] + tl.dot(weight.to(block.dtype), block)
        total = total * fade + tl.sum(weight, 1)
        top = new_top
    is_real = is_token[:, None] & (e < E)[None, :]
    if IS_WHOLE:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=is_token, other=0.0).to(tl.float32)
            total += tl.exp2(sink * LOG2_E - top)
        target = (token.to(tl.int64) * H + head) * E
        summed = (summed / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + target[:, None] + e[None, :], summed, mask=is_real)
    else:
        target = (token.to(tl.int64) * H + head) * splits + index
        tl.store(part_ptr + target[:, None] * E + e[None, :], summed, mask=is_real)
        tl.store(weights_ptr + target, top, mask=is_token)
        tl.store(weights_ptr + num_parts + target, total, mask=is_token)


@triton.jit
def _first_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first position that a query sees, where there is a window or a chunk."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position + 1 - WINDOW, 0)
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def _tanh(x):
    """Compute the hyperbolic tangent, to the rounding of 1."""
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def _merge(
    out_ptr, part_ptr, weights_ptr, sinks_ptr, position_ptr, split, splits, num_parts,
    H: tl.constexpr, E: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Add the splits that one token sees, for one query head."""
    row = tl.program_id(0).to(tl.int64) * H + tl.program_id(1)
    position = tl.load(position_ptr + tl.program_id(0)).to(tl.int32)
    low, high = 0, position // split + 1
    if WINDOW + CHUNK > 0:
        low = _first_key(position, WINDOW, CHUNK) // split
    e = tl.arange(0, BLOCK_E)
    top = float("-inf")
    total = 0.0
    summed = tl.zeros([BLOCK_E], tl.float32)
    for start in range(low, high, BLOCK_S):
        index = start + tl.arange(0, BLOCK_S)
        inside = index < high
        source = row * splits + index
        tops = tl.load(weights_ptr + source, mask=inside, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(tops, 0))
        factor, fade = tl.exp2(tops - new_top), tl.exp2(top - new_top)
        totals = tl.load(weights_ptr + num_parts + source, mask=inside, other=0.0)
        is_part = inside[:, None] & (e < E)[None, :]
        parts = tl.load(part_ptr + source[:, None] * E + e[None, :], mask=is_part, other=0.0)
        total = total * fade + tl.sum(totals * factor, 0)
        summed = summed * fade + tl.sum(parts * factor[:, None], 0)
        top = new_top
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks_ptr + tl.program_id(1)).to(tl.float32) * LOG2_E - top)
    summed = (summed / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * E + e, summed, mask=e < E)


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the activation of the first half of [N, 2I] times the second half, [N, I]."""
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1 and activation in ("silu", "gelu", "gelu_tanh")
    out = gate_up.new_empty(num_tokens, size)
    _gated[(num_tokens, triton.cdiv(size, VALUES))](
        gate_up, out, gate_up.stride(0), size, ACT=activation, BLOCK=VALUES, num_warps=4, **FUSED
    )  # fmt: skip
    return out


@triton.jit
def _gated(gate_up_ptr, out_ptr, row_stride, size, ACT: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    source = gate_up_ptr + token * row_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    gate, _ = _activation(gate, ACT)
    dtype = out_ptr.dtype.element_ty
    product = (gate.to(dtype).to(tl.float32) * up).to(dtype)
    tl.store(out_ptr + token * size + column, product, mask=inside)


@triton.jit
def _activation(x, ACT: tl.constexpr):
    """Compute an activation and its derivative."""
    if ACT == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACT == "gelu_tanh":  # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2z))
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        share = 1.0 / (1.0 + tl.exp(-2.0 * z))
        rise = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        slope = share + x * share * (1.0 - share) * rise
    else:
        share = 1.0 / (1.0 + tl.exp(-x))
        slope = share * (1.0 + x * (1.0 - share))
    return x * share, slope
