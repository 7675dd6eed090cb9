"""Fewer kernels per layer on a GPU: RMSNorm, and rotary embeddings of queries and keys together.

transformers writes both as single tensor operations: 8 kernels for a norm and 10 for a rotary
embedding, each of about 2.5 us in a CUDA graph. The replacement rounds once instead of several
times, so CPUs, float32, float64 and batch-invariant models keep transformers' own.

So do models where the two differ on random input: norms that multiply by 1 + weight, partial or
interleaved rotary embeddings.

Shape legend: N packed tokens, H query heads, K key/value heads, D head dimension.
"""

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import cast

import torch
from torch.func import functional_call
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

DEVICES, HALF = ("cuda",), (torch.bfloat16, torch.float16)
ROTARY = "apply_rotary_pos_emb"  # the name in each of transformers' modeling files
MAX_DIFFERENCE = 1e-5  # in float32, where values are around 1


class FusedRMSNorm(torch.nn.Module):
    """`y = x / sqrt(mean(x^2) + epsilon) * weight`."""

    weight: torch.nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalize hidden states [..., width of the norm]."""
        weight = self.weight
        return rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)


def fuse(model: PreTrainedModel) -> None:
    """Replace norms and rotary embedding of a half-precision model on a GPU by equal ones."""
    if model.device.type not in DEVICES or model.dtype not in HALF:
        return
    is_same: dict[type, bool] = {}
    for module in model.modules():
        kind = type(module)
        if kind is not FusedRMSNorm and is_norm(module):
            if kind not in is_same:
                is_same[kind] = computes_rms_norm(module)
            if is_same[kind]:
                module.__class__ = FusedRMSNorm
    for name in {type(module).__module__ for module in model.modules()}:
        file = sys.modules[name]
        own = getattr(file, ROTARY, None)
        if own is not None and not hasattr(own, "original") and computes_rotary(own):
            setattr(file, ROTARY, fused_rotary(own))


def is_norm(module: torch.nn.Module) -> bool:
    """Whether a module looks like an RMSNorm of transformers."""
    shapes = [(name, weight.ndim) for name, weight in module.named_parameters()]
    return shapes == [("weight", 1)] and hasattr(module, "variance_epsilon")


@torch.no_grad()
def computes_rms_norm(module: torch.nn.Module) -> bool:
    """Whether a norm computes what `FusedRMSNorm` computes, in float32 with random weights."""
    norm = cast(FusedRMSNorm, module)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(len(norm.weight), generator=generator)
    x = torch.randn(5, len(weight), generator=generator)
    x[0] *= 1e-3  # where epsilon counts
    fused = rms_norm(x, weight.shape, weight, norm.variance_epsilon)
    return gives(lambda: functional_call(norm, {"weight": weight}, (x,)), fused)


@torch.no_grad()
def computes_rotary(own: Callable) -> bool:
    """Whether a function rotates the halves of whole heads, on random input."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 3, 5, 8), (1, 2, 5, 8), (1, 5, 8), (1, 5, 8)
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    return gives(lambda: own(*given), *rotate_together(*given))


def gives(call: Callable, *wanted: torch.Tensor) -> bool:
    """Whether a call of the model's own code returns these tensors, up to rounding."""
    try:
        found = call()
    except Exception:  # it takes other arguments, or needs a GPU
        return False
    found = found if isinstance(found, tuple) else (found,)
    close = partial(torch.allclose, rtol=0, atol=MAX_DIFFERENCE)
    return len(found) == len(wanted) and all(map(close, found, wanted))


def rotate_together(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query [1, H, N, D] and key [1, K, N, D] as one tensor; cos, sin: [1, N, D]."""
    heads = query.shape[1], key.shape[1]
    both = torch.cat((query.transpose(1, 2), key.transpose(1, 2)), dim=2)
    left, right = both.chunk(2, dim=-1)
    rotated = torch.cat((-right, left), dim=-1)
    both = torch.addcmul(both * cos.unsqueeze(2), rotated, sin.unsqueeze(2))
    query, key = both.split(heads, dim=2)
    return query.transpose(1, 2), key.transpose(1, 2)


def fused_rotary(own: Callable) -> Callable:
    """Return a function that calls `rotate_together` where it applies, else the original."""

    @wraps(own)
    def rotary(query, key, *args, **kwargs):
        is_plain = not kwargs and len(args) == 2 and args[0].shape[-1] == query.shape[-1]
        # OLMo's cos and sin are float32, and its own function rounds the result.
        is_plain = is_plain and args[0].dtype == query.dtype
        if is_plain and query.device.type in DEVICES and query.dtype in HALF:
            return rotate_together(query, key, *args)
        return own(query, key, *args, **kwargs)

    vars(rotary)["original"] = own
    return rotary
