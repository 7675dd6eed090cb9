"""Layers with a state on a GPU, in Triton.

A forward reads and writes a row's state once, whatever the number of its tokens. A program keeps a
part of S in registers. It adds the tokens of the stored window that were right, feeds the new
tokens by the rule in torch_states.py, and stores S as it was before the last window, which is
stored next to it. `plan` finds out once in a forward what each row feeds. So the host need not know
where a row stands, and CUDA graphs can capture all of it.

Keys that wait are in two halves: a forward reads one and writes the other one, as several programs
read the same keys. Inputs of a convolution need nothing of this: that of position p is at place p
modulo their number, and those of rejected tokens are overwritten before they are read.

Shape legend: N tokens, S sequences, H value heads, G key heads, K and V width of keys and values, C
channels of a convolution.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from bubblespec.engine.ops.triton_sampling import FUSED
from bubblespec.engine.ops.view import AttentionMetadata

# Fields of a row in a plan. Tokens kept of its last window are -1 for a row that begins.
BEGIN, COUNT, START, KEPT, SLOT, HALF = (tl.constexpr(n) for n in range(6))
FIELDS = tl.constexpr(6)
BLOCK = 512  # tokens and sequences that a row looks at together
CHANNELS = 128  # of a program
TOKENS = 16  # most that a program of a convolution computes together
NUMBERS = 2048  # of S in a program, which is one warp
EPS = tl.constexpr(1e-6)  # of keys and queries at length 1, see `torch_states.unit`


class Waiting(NamedTuple):
    """A layer's states, and the last window of each row; W: tokens of a window."""

    matrix: torch.Tensor  # float32 [slots, H, K, V], S
    keys: torch.Tensor  # [slots, 2, G, W, K], as they are fed
    added: torch.Tensor  # float32 [slots, H, W, V], d
    decays: torch.Tensor  # float32 [slots, 2, H, W], logarithms


def plan(view: AttentionMetadata, standing: torch.Tensor, window: int, spare: int) -> torch.Tensor:
    """Return what the rows of a forward feed, int32 [S, FIELDS]; from now on it counts as fed.

    standing: int32 [slots, 2], where each slot's last window begins, and its half; spare: first
    place of tokens that are not fed."""
    rows = torch.empty(len(view.slot), FIELDS.value, dtype=torch.int32, device=view.slot.device)
    _plan[(len(view.slot),)](
        view.first, view.slot, view.place, view.position, standing, rows, len(view.slot), spare,
        WINDOW=window, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return rows


@triton.jit
def _plan(
    first_ptr, slot_ptr, place_ptr, position_ptr, standing_ptr, rows_ptr, sequences, spare,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Plan the row whose first sequence this is."""
    sequence = tl.program_id(0)
    rows_ptr += sequence * FIELDS
    begin, end = tl.load(first_ptr + sequence), tl.load(first_ptr + sequence + 1)
    slot = tl.load(slot_ptr + sequence)
    before = tl.load(slot_ptr + sequence - 1, mask=sequence > 0, other=-1)
    if (begin == end) | (before == slot):
        tl.store(rows_ptr + COUNT, 0)
        return
    number = tl.arange(0, BLOCK)
    for other in range(sequence + 1, sequences, BLOCK):
        inside = other + number < sequences
        own = tl.load(slot_ptr + other + number, mask=inside, other=-1) == slot
        low = tl.load(first_ptr + other + number, mask=inside, other=0)
        high = tl.load(first_ptr + other + number + 1, mask=inside, other=0)
        end = tl.maximum(end, tl.max(tl.where(own & (high > low), high, 0), 0))
    count = 0
    for token in range(begin, end, BLOCK):  # tokens that are not fed come last
        place = tl.load(place_ptr + token + number, mask=token + number < end, other=spare)
        count += tl.sum((place < spare).to(tl.int32), 0)
    tl.store(rows_ptr + COUNT, count)
    if count == 0:
        return
    start = tl.load(position_ptr + begin).to(tl.int32)
    standing_ptr += slot * 2
    half = tl.load(standing_ptr + 1)
    kept = tl.where(start == 0, -1, start - tl.load(standing_ptr))
    tl.store(rows_ptr + BEGIN, begin)
    tl.store(rows_ptr + START, start)
    tl.store(rows_ptr + KEPT, kept)
    tl.store(rows_ptr + SLOT, slot)
    tl.store(rows_ptr + HALF, half)
    tl.store(standing_ptr, start + (count - 1) // WINDOW * WINDOW)
    tl.store(standing_ptr + 1, 1 - half)


def convolve(
    rows: torch.Tensor,
    max_q: int,
    inputs: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    has_silu: bool = False,
) -> torch.Tensor:
    """Return a causal convolution [N, C] of x [N, C], with SiLU behind it; it is rounded once.

    rows: of `plan`; max_q: see `AttentionMetadata`; inputs: [slots, places, C], of each row's last
    tokens; weight: [C, taps]."""
    assert x.stride(1) == 1 and inputs.is_contiguous() and weight.is_contiguous()
    channels, taps = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens = min(triton.next_power_of_2(max_q), TOKENS)
    _convolve[(len(rows), triton.cdiv(channels, CHANNELS))](
        x, inputs, weight, weight if bias is None else bias, out, rows, channels, x.stride(0),
        TAPS=taps, PLACES=inputs.shape[1], HAS_BIAS=bias is not None, HAS_SILU=has_silu,
        TOKENS=tokens, BLOCK=CHANNELS, num_warps=4 if tokens > 2 else 1, **FUSED,
    )  # fmt: skip
    return out


@triton.jit
def _convolve(
    x_ptr, inputs_ptr, weight_ptr, bias_ptr, out_ptr, rows_ptr, channels, x_stride,
    TAPS: tl.constexpr, PLACES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute some channels of one row, and keep its last inputs."""
    dtype = out_ptr.dtype.element_ty
    rows_ptr += tl.program_id(0) * FIELDS
    count = tl.load(rows_ptr + COUNT)
    if count == 0:
        return
    begin, start = tl.load(rows_ptr + BEGIN).to(tl.int64), tl.load(rows_ptr + START)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = (channel < channels)[None, :]
    inputs_ptr += tl.load(rows_ptr + SLOT).to(tl.int64) * PLACES * channels + channel[None, :]
    x_ptr += begin * x_stride + channel[None, :]
    out_ptr += begin * channels + channel[None, :]
    number = tl.arange(0, TOKENS)[:, None]
    for done in range(0, count, TOKENS):
        token = done + number
        inside = (token < count) & is_channel
        total = tl.zeros([TOKENS, BLOCK], tl.float32)
        for tap in tl.static_range(TAPS):
            at = token - (TAPS - 1 - tap)
            place = (start + at) % PLACES
            is_old = inside & (at < 0) & (start + at >= 0)
            new = tl.load(x_ptr + at * x_stride, mask=inside & (at >= 0), other=0.0)
            old = tl.load(inputs_ptr + place * channels, mask=is_old, other=0.0)
            tap_ptr = weight_ptr + channel * TAPS + tap
            weight = tl.load(tap_ptr, mask=channel < channels, other=0.0).to(tl.float32)
            total += (new.to(tl.float32) + old.to(tl.float32)) * weight[None, :]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + channel, mask=channel < channels, other=0.0)
            total += bias.to(tl.float32)[None, :]
        if HAS_SILU:  # of what is rounded, as modules have it
            total = total.to(dtype).to(tl.float32)
            total = total / (1.0 + tl.exp(-total))
        tl.store(out_ptr + token * channels, total.to(dtype), mask=inside)
    tl.debug_barrier()  # all threads have read the old inputs
    for done in range(tl.maximum(count - PLACES, 0), count, TOKENS):
        token = done + number
        inside = (token < count) & is_channel
        new = tl.load(x_ptr + token * x_stride, mask=inside, other=0.0)
        tl.store(inputs_ptr + (start + token) % PLACES * channels, new, mask=inside)


def advance(
    rows: torch.Tensor,
    waiting: Waiting,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float = 1.0,
    is_unit: bool = False,
) -> torch.Tensor:
    """Return outputs [N, H, V] of q and k [N, G, K] and v [N, H, V], see torch_states.py.

    rows: of `plan`; log_decay, beta: float32 [N, H], of one stride; scale: of q; is_unit: whether
    keys and queries are taken at length 1. Each key head is for H / G adjacent value heads."""
    (_, heads, value), (_, key_heads, key) = v.shape, k.shape
    for of, width in ((q, key), (k, key), (v, value)):
        assert of.stride()[1:] == (width, 1)
    beta, has_beta = log_decay if beta is None else beta, beta is not None
    assert log_decay.stride() == beta.stride() and beta.stride(1) == 1
    assert q.stride() == k.stride() and all(of.is_contiguous() for of in waiting)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    block_k = triton.next_power_of_2(key)
    block_v = min(triton.next_power_of_2(value), max(NUMBERS // block_k, 1))
    _advance[(len(rows), heads, triton.cdiv(value, block_v))](
        q, k, v, log_decay, beta, out, *waiting, rows, q.stride(0), v.stride(0), beta.stride(0),
        scale, H=heads, G=key_heads, K=key, V=value, WINDOW=waiting.keys.shape[3],
        HAS_BETA=has_beta, IS_UNIT=is_unit, BLOCK_K=block_k, BLOCK_V=block_v, num_warps=1, **FUSED,
    )  # fmt: skip
    return out


@triton.jit
def _advance(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, out_ptr, matrix_ptr, keys_ptr, added_ptr, decays_ptr,
    rows_ptr, k_stride, v_stride, rate_stride, scale, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, WINDOW: tl.constexpr, HAS_BETA: tl.constexpr,
    IS_UNIT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Feed one row to some columns of one head's state."""
    rows_ptr += tl.program_id(0) * FIELDS
    count = tl.load(rows_ptr + COUNT)
    if count == 0:
        return
    head, part = tl.program_id(1), tl.program_id(2)
    key_head = head // (H // G)
    begin, kept = tl.load(rows_ptr + BEGIN).to(tl.int64), tl.load(rows_ptr + KEPT)
    slot, half = tl.load(rows_ptr + SLOT).to(tl.int64), tl.load(rows_ptr + HALF)
    key, value = tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = key < K, value < V
    matrix_ptr += (slot * H + head) * K * V + key[:, None] * V + value[None, :]
    is_old = key < tl.where(kept < 0, 0, K)
    state = tl.load(matrix_ptr, mask=is_old[:, None] & is_value[None, :], other=0.0)
    # Tokens of the last window that were right.
    added_ptr += (slot * H + head) * WINDOW * V + value
    of_keys, of_decays = (slot * 2 + half) * G + key_head, (slot * 2 + half) * H + head
    for token in range(0, kept):
        k = _wide(keys_ptr + (of_keys * WINDOW + token) * K + key, is_key, IS_UNIT)
        d = tl.load(added_ptr + token * V, mask=is_value, other=0.0)
        grown = tl.exp(tl.load(decays_ptr + of_decays * WINDOW + token))
        state = state * grown + k[:, None] * d[None, :]
    q_ptr += begin * k_stride + key_head * K + key
    k_ptr += begin * k_stride + key_head * K + key
    v_ptr += begin * v_stride + head * V + value
    decay_ptr += begin * rate_stride + head
    beta_ptr += begin * rate_stride + head
    out_ptr += (begin * H + head) * V + value
    last = (count - 1) // WINDOW * WINDOW  # first token of the window that waits
    for token in range(0, last):
        of_key, of_rate = token * k_stride, token * rate_stride
        out, d, k, grown = _step(
            state, q_ptr + of_key, k_ptr + of_key, v_ptr + token * v_stride, decay_ptr + of_rate,
            beta_ptr + of_rate, scale, is_key, is_value, HAS_BETA, IS_UNIT,
        )  # fmt: skip
        state = state * grown + k[:, None] * d[None, :]
        tl.store(out_ptr + token * H * V, out.to(out_ptr.dtype.element_ty), mask=is_value)
    is_changed = key < tl.where((kept != 0) | (last > 0), K, 0)
    tl.store(matrix_ptr, state, mask=is_changed[:, None] & is_value[None, :])
    tl.debug_barrier()  # what waited has been read
    half = 1 - half
    of_keys, of_decays = (slot * 2 + half) * G + key_head, (slot * 2 + half) * H + head
    writes_keys = key < tl.where((part == 0) & (head % (H // G) == 0), K, 0)
    for token in range(last, count):
        of_key, of_rate = token * k_stride, token * rate_stride
        out, d, k, grown = _step(
            state, q_ptr + of_key, k_ptr + of_key, v_ptr + token * v_stride, decay_ptr + of_rate,
            beta_ptr + of_rate, scale, is_key, is_value, HAS_BETA, IS_UNIT,
        )  # fmt: skip
        state = state * grown + k[:, None] * d[None, :]
        tl.store(out_ptr + token * H * V, out.to(out_ptr.dtype.element_ty), mask=is_value)
        place = token - last
        fed = tl.load(k_ptr + of_key, mask=writes_keys, other=0.0)
        tl.store(keys_ptr + (of_keys * WINDOW + place) * K + key, fed, mask=writes_keys)
        tl.store(added_ptr + place * V, d, mask=is_value)
        decay = tl.load(decay_ptr + of_rate)
        tl.store(decays_ptr + of_decays * WINDOW + place, decay, mask=part == 0)


@triton.jit
def _step(
    state, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, scale, is_key, is_value,
    HAS_BETA: tl.constexpr, IS_UNIT: tl.constexpr,
):  # fmt: skip
    """Return a token's output, what it adds to its key's row of the state, its key and decay."""
    q, k = _wide(q_ptr, is_key, IS_UNIT) * scale, _wide(k_ptr, is_key, IS_UNIT)
    d = tl.load(v_ptr, mask=is_value, other=0.0).to(tl.float32)
    grown = tl.exp(tl.load(decay_ptr))
    if HAS_BETA:
        d = tl.load(beta_ptr) * (d - grown * tl.sum(state * k[:, None], 0))
    out = grown * tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * d
    return out, d, k, grown


@triton.jit
def _wide(ptr, is_key, IS_UNIT: tl.constexpr):
    """Load a key or query, in float32, at length 1."""
    x = tl.load(ptr, mask=is_key, other=0.0).to(tl.float32)
    if IS_UNIT:
        x *= tl.rsqrt(tl.sum(x * x, 0) + EPS)
    return x
