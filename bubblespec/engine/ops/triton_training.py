"""What an update computes on a GPU besides products and attention, in Triton.

The forwards are those of triton_ops.py. Nothing is added up in an order that could change: a
gradient of a weight is summed over ROWS tokens by each program, and then over programs by torch.
Results overwrite what a product has returned, which no backward pass reads.

Shape legend: N tokens, H query heads, K key/value heads, D head dimension, R rotary dimensions, C
hidden size, I intermediate size, V columns of a product with the head.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from bubblespec.engine.ops.triton_ops import VALUES, _activation, add_norm, gated, whole_rows
from bubblespec.engine.ops.triton_sampling import FUSED, LOGITS

ROWS = 16  # tokens whose gradients of a norm's weight one program adds up
MOVED = 4096  # numbers of a block that is added or copied


def add_to(total: torch.Tensor, part: torch.Tensor) -> None:
    """Add a part to a contiguous float32 buffer of its shape, in place, with torch's bits."""
    _move(total, part.contiguous(), adds=True)


def round_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy float32 numbers into a tensor of another type."""
    if not target.is_contiguous():
        target.copy_(source)
        return
    _move(target, source, adds=False)
    torch.autograd.graph.increment_version(target)  # by which copies of weights are renewed


def _move(target: torch.Tensor, source: torch.Tensor, adds: bool) -> None:
    assert target.is_contiguous() and source.is_contiguous() and target.shape == source.shape
    size = target.numel()
    _moved[(triton.cdiv(size, MOVED),)](
        target, source, size, ADDS=adds, BLOCK=MOVED, num_warps=8, **FUSED
    )  # fmt: skip


@triton.jit
def _moved(target_ptr, source_ptr, size, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    value = tl.load(source_ptr + index, mask=inside, other=0.0)
    if ADDS:
        value = tl.load(target_ptr + index, mask=inside, other=0.0) + value.to(tl.float32)
    tl.store(target_ptr + index, value.to(target_ptr.dtype.element_ty), mask=inside)


class AddNorm(torch.autograd.Function):
    """Return residual + x [N, C] and of this the norm; where x is None the norm alone."""

    @staticmethod
    def forward(ctx: Any, x, residual, weight, norm):
        ctx.set_materialize_grads(False)
        total = residual if x is None else torch.empty_like(residual)
        out = add_norm(x, residual, norm, total)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.has_x = norm.eps, x is not None
        return (total, out) if ctx.has_x else out

    @staticmethod
    def backward(ctx: Any, *grads):
        (total, weight), grad = ctx.saved_tensors, grads[-1].contiguous()
        total_grad = grads[0].contiguous() if ctx.has_x and grads[0] is not None else None
        (num_tokens, columns), needs_weight = total.shape, ctx.needs_input_grad[2]
        programs, out = triton.cdiv(num_tokens, ROWS), torch.empty_like(total)
        parts = total.new_empty(programs if needs_weight else 0, columns, dtype=torch.float32)
        _add_norm_backward[(programs,)](
            grad, total if total_grad is None else total_grad, total, weight, out, parts,
            num_tokens, columns, ctx.eps, HAS_TOTAL=total_grad is not None,
            HAS_WEIGHT=needs_weight, ROWS=ROWS, **whole_rows(columns),
        )  # fmt: skip
        of_weight = parts.sum(0).to(weight.dtype) if needs_weight else None
        return out if ctx.has_x else None, out, of_weight, None


@triton.jit
def _add_norm_backward(
    grad_ptr, total_grad_ptr, total_ptr, weight_ptr, out_ptr, parts_ptr, num_tokens, columns, eps,
    HAS_TOTAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype = out_ptr.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    summed = tl.zeros([BLOCK], tl.float32)
    for token in range(program * ROWS, tl.minimum(program * ROWS + ROWS, num_tokens)):
        place = token * columns + column
        unit = tl.load(total_ptr + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(unit * unit, 0) / columns + eps)
        unit *= scale
        if HAS_WEIGHT:
            summed += grad * unit.to(dtype).to(tl.float32)
        grad *= weight
        grad = scale * (grad - unit * (tl.sum(grad * unit, 0) / columns))
        if HAS_TOTAL:
            grad += tl.load(total_grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, grad.to(dtype), mask=inside)
    if HAS_WEIGHT:
        tl.store(parts_ptr + program * columns + column, summed, mask=inside)


class Rotated(torch.autograd.Function):
    """Return queries, keys and values in the memory of qkv [N, H + 2K, D], rotated.

    heads: H, K, K; position: int64 [N]; tables: see `triton_ops.rotation`."""

    @staticmethod
    def forward(ctx: Any, qkv, heads, position, tables):
        ctx.rotation = heads[0] + heads[1], position, tables
        rotate(qkv, *ctx.rotation, is_back=False)
        return qkv.detach().split(heads, 1)

    @staticmethod
    def backward(ctx: Any, *grads):
        grad = torch.cat(grads, 1)
        rotate(grad, *ctx.rotation, is_back=True)
        return grad, None, None, None


def rotate(
    x: torch.Tensor,
    heads: int,
    position: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    *,
    is_back: bool,
) -> None:
    """Rotate the first `heads` heads of contiguous x [N, heads or more, D] in place, or back."""
    assert x.is_contiguous()
    cos, sin = tables
    half = cos.shape[1]
    block = triton.next_power_of_2(half)
    at_once = max(VALUES // block, 1)
    _rotate[(len(x), triton.cdiv(heads, at_once))](
        x, position, cos, sin, x.stride(0), heads, D=x.shape[2], HALF=half, IS_BACK=is_back,
        HEADS=at_once, BLOCK=block, num_warps=4, **FUSED,
    )  # fmt: skip


@triton.jit
def _rotate(
    x_ptr, position_ptr, cos_ptr, sin_ptr, row_stride, heads, D: tl.constexpr, HALF: tl.constexpr,
    IS_BACK: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Let each thread have both numbers of a pair, so that none reads what another overwrites."""
    dtype = x_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (d < HALF)
    place = x_ptr + token * row_stride + head * D + d
    low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = tl.load(position_ptr + token).to(tl.int64) * HALF + d
    cos = tl.load(cos_ptr + angle, mask=d < HALF, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=d < HALF, other=0.0).to(tl.float32)
    if IS_BACK:
        sin = -sin
    # Rounded where transformers rounds.
    new_low = (low * cos).to(dtype).to(tl.float32) - (high * sin).to(dtype).to(tl.float32)
    new_high = (high * cos).to(dtype).to(tl.float32) + (low * sin).to(dtype).to(tl.float32)
    tl.store(place, new_low.to(dtype), mask=inside)
    tl.store(place + HALF, new_high.to(dtype), mask=inside)


class Gated(torch.autograd.Function):
    """Return what `gated` does, [N, I], of contiguous gate_up [N, 2I]."""

    @staticmethod
    def forward(ctx: Any, gate_up, activation):
        assert gate_up.is_contiguous()
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        return gated(gate_up, activation)

    @staticmethod
    def backward(ctx: Any, grad):
        ((gate_up,), (num_tokens, size)) = ctx.saved_tensors, grad.shape
        out = torch.empty_like(gate_up)
        _gated_backward[(num_tokens, triton.cdiv(size, VALUES))](
            grad.contiguous(), gate_up, out, size, ACT=ctx.activation, BLOCK=VALUES, num_warps=4,
            **FUSED,
        )  # fmt: skip
        return out, None


@triton.jit
def _gated_backward(grad_ptr, gate_up_ptr, out_ptr, size, ACT: tl.constexpr, BLOCK: tl.constexpr):
    dtype = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    place = token * 2 * size + column
    grad = tl.load(grad_ptr + token * size + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + place + size, mask=inside, other=0.0).to(tl.float32)
    active, slope = _activation(gate, ACT)
    tl.store(out_ptr + place, (grad * up * slope).to(dtype), mask=inside)
    of_up = (grad * active.to(dtype).to(tl.float32)).to(dtype)
    tl.store(out_ptr + place + size, of_up, mask=inside)


class HeadValues(torch.autograd.Function):
    """Return log-probabilities of targets int64 [N] and divergences, float32 [2, N], or [1, N].

    Logits [N, V] and the teacher's, if there are any, count times inverse_temperature, and of each
    the first `num_tokens` columns. The gradient of logits takes their memory. beta: see
    `losses.divergence`. With g the gradient of a divergence, that of a logit is g (q - p) for
    beta 0, g q (log(q / p) - KL(q || p)) for beta 1, and between
    g (1 - beta) q (log(q / m) - KL(q || m))."""

    @staticmethod
    def forward(ctx: Any, logits, target, teacher, num_tokens, inverse_temperature, beta):
        rows, has_teacher = len(logits), teacher is not None
        other = teacher if has_teacher else logits
        assert logits.stride(1) == other.stride(1) == 1
        values = torch.empty(1 + has_teacher, rows, dtype=torch.float32, device=logits.device)
        sums = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
        ctx.sizes = num_tokens, logits.shape[1], other.shape[1], logits.stride(0), other.stride(0)
        ctx.options = {"HAS_TEACHER": has_teacher, "BETA": float(beta), "num_warps": 8, **FUSED}
        _head_values[(rows,)](
            logits, other, target, values, sums, *ctx.sizes, inverse_temperature,
            BLOCK=LOGITS // (1 + has_teacher), **ctx.options,
        )  # fmt: skip
        ctx.save_for_backward(logits, other, target, sums)
        ctx.inverse_temperature = inverse_temperature
        return values

    @staticmethod
    def backward(ctx: Any, grads):
        logits, *tensors = ctx.saved_tensors
        _head_gradient[(len(logits), triton.cdiv(logits.shape[1], LOGITS))](
            logits, *tensors, grads.contiguous(), *ctx.sizes, ctx.inverse_temperature,
            BLOCK=LOGITS, **ctx.options,
        )  # fmt: skip
        return logits, None, None, None, None, None


@triton.jit
def _head_values(
    logits_ptr, teacher_ptr, target_ptr, values_ptr, sums_ptr, num_tokens, size, teacher_size,
    row_stride, teacher_stride, inverse_temperature, HAS_TEACHER: tl.constexpr,
    BETA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load all columns, whose number is even as that of tokens may not be, in wide vectors."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    logits_ptr += row.to(tl.int64) * row_stride
    total = _logsumexp(logits_ptr, num_tokens, size, inverse_temperature, BLOCK)
    chosen = tl.load(logits_ptr + tl.load(target_ptr + row)).to(tl.float32)
    tl.store(values_ptr + row, chosen * inverse_temperature - total)
    tl.store(sums_ptr + row, total)
    if HAS_TEACHER:
        teacher_ptr += row.to(tl.int64) * teacher_stride
        teacher_total = _logsumexp(
            teacher_ptr, num_tokens, teacher_size, inverse_temperature, BLOCK
        )  # fmt: skip
        own, others = 0.0, 0.0  # KL(q || m) and KL(p || m)
        for start in range(0, num_tokens, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < num_tokens
            q = tl.load(logits_ptr + column, mask=column < size, other=0.0).to(tl.float32)
            p = tl.load(teacher_ptr + column, mask=column < teacher_size, other=0.0).to(tl.float32)
            q = q * inverse_temperature - total
            p = p * inverse_temperature - teacher_total
            m = _log_mixture(q, p, BETA)
            own += tl.sum(tl.where(inside, tl.exp(q) * (q - m), 0.0), 0)
            others += tl.sum(tl.where(inside, tl.exp(p) * (p - m), 0.0), 0)
        if BETA == 0.0:
            value = others
        elif BETA == 1.0:
            value = own
        else:
            value = BETA * others + (1.0 - BETA) * own
        tl.store(values_ptr + rows + row, value)
        tl.store(sums_ptr + rows + row, teacher_total)
        tl.store(sums_ptr + 2 * rows + row, own)


@triton.jit
def _logsumexp(logits_ptr, num_tokens, size, inverse_temperature, BLOCK: tl.constexpr):
    top = float("-inf")
    summed = 0.0
    for start in range(0, num_tokens, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + column, mask=column < size, other=0.0).to(tl.float32)
        logit = tl.where(column < num_tokens, logit * inverse_temperature, float("-inf"))
        new_top = tl.maximum(top, tl.max(logit, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        summed = summed * tl.exp(top - base) + tl.sum(tl.exp(logit - base), 0)
        top = new_top
    return top + tl.log(summed)


@triton.jit
def _log_mixture(q, p, BETA: tl.constexpr):
    """Compute log(beta p + (1 - beta) q) of logarithms; the other's where beta is 0 or 1."""
    if BETA == 0.0:
        m = q
    elif BETA == 1.0:
        m = p
    else:
        top = tl.maximum(q, p)
        m = top + tl.log(BETA * tl.exp(p - top) + (1.0 - BETA) * tl.exp(q - top))
    return m


@triton.jit
def _head_gradient(
    logits_ptr, teacher_ptr, target_ptr, sums_ptr, grads_ptr, num_tokens, size, teacher_size,
    row_stride, teacher_stride, inverse_temperature, HAS_TEACHER: tl.constexpr,
    BETA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, rows = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_tokens
    place = logits_ptr + row.to(tl.int64) * row_stride + column
    log_q = tl.load(place, mask=column < size, other=0.0).to(tl.float32) * inverse_temperature
    log_q -= tl.load(sums_ptr + row)
    q = tl.exp(log_q)
    grad = tl.where(column == tl.load(target_ptr + row), 1.0, 0.0) - q
    grad *= tl.load(grads_ptr + row)
    if HAS_TEACHER:
        teacher_ptr += row.to(tl.int64) * teacher_stride + column
        log_p = tl.load(teacher_ptr, mask=column < teacher_size, other=0.0).to(tl.float32)
        log_p = log_p * inverse_temperature - tl.load(sums_ptr + rows + row)
        factor = tl.load(grads_ptr + rows + row)
        if BETA == 0.0:
            grad += factor * (q - tl.exp(log_p))
        else:
            own = tl.load(sums_ptr + 2 * rows + row)
            if BETA < 1.0:
                factor *= 1.0 - BETA
            grad += factor * q * (log_q - _log_mixture(log_q, log_p, BETA) - own)
    grad = tl.where(inside, grad * inverse_temperature, 0.0)
    tl.store(place, grad.to(logits_ptr.dtype.element_ty), mask=column < size)
