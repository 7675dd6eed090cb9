"""Norms of models: which modules are RMSNorms, found by trial, and the same in one call.

transformers' norms are eight operations, and compute in float32 also in a float64 model, whose
results then differ by 1e-7 between batches of different shapes.
"""

from copy import copy
from typing import Any, cast

import torch
from torch.func import functional_call
from torch.nn.functional import layer_norm, rms_norm

from bubblespec.engine.ops.view import Norm

MAX_DIFFERENCE = 1e-5  # of norms in float32, of values around 1


def replace_norms(model: torch.nn.Module) -> bool:
    """Replace what computes one of `NORMS`; return whether no other norm with one weight is left.

    A norm that differs from all of them on random input stays, and outside of float64 each that is
    no `RMSNorm`, as it rounds elsewhere."""
    found: dict[tuple[type, torch.dtype], type | None] = {}
    for module in model.modules():
        weights = list(module.named_parameters())
        if [(name, of.ndim) for name, of in weights] != [("weight", 1)] or type(module) in NORMS:
            continue
        kind = type(module), weights[0][1].dtype
        if kind not in found:
            allowed = NORMS if kind[1] == torch.float64 else NORMS[:1]
            found[kind] = next((norm for norm in allowed if computes_norm(module, norm)), None)
        if (norm := found[kind]) is not None:
            module.__class__ = norm
    return None not in found.values()


class RMSNorm(torch.nn.Module):
    """`y = x / sqrt(mean(x^2) + epsilon) * weight`."""

    weight: torch.nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalize hidden states [..., width]."""
        weight = self.weight
        return rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)


class OffsetRMSNorm(RMSNorm):
    """`y = x / sqrt(mean(x^2) + epsilon) * (1 + weight)` (Gemma)."""

    eps: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalize hidden states [..., width]."""
        return rms_norm(hidden_states, self.weight.shape, 1.0 + self.weight, self.eps)


class CentredNorm(RMSNorm):
    """An `RMSNorm` of x - mean(x) (Cohere)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalize hidden states [..., width]."""
        weight = self.weight
        return layer_norm(hidden_states, weight.shape, weight, None, self.variance_epsilon)


NORMS: tuple[type[RMSNorm], ...] = (RMSNorm, OffsetRMSNorm, CentredNorm)


@torch.no_grad()
def computes_norm(module: torch.nn.Module, norm: type[RMSNorm]) -> bool:
    """Whether a module computes what a norm computes, in float32 with random weights."""
    generator, other = torch.Generator().manual_seed(0), copy(module)
    other.__class__ = norm
    weight = torch.randn(len(cast(RMSNorm, module).weight), generator=generator)
    x = torch.randn(5, len(weight), generator=generator)
    x[0] *= 1e-3  # where epsilon counts
    try:
        found, wanted = (functional_call(of, {"weight": weight}, (x,)) for of in (module, other))
        return torch.allclose(found, wanted, rtol=0, atol=MAX_DIFFERENCE)
    except Exception:  # the model's own code, which may take something else or need a GPU
        return False


_has_offset: dict[type, bool] = {}  # of classes of norms


def norm_of(module: Any) -> Norm:
    """Return the norm of a module, which is an RMSNorm."""
    weight, kind = module.weight, type(module)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    if kind not in _has_offset:
        _has_offset[kind] = computes_norm(module, OffsetRMSNorm)
    return Norm(weight, eps, weight.new_full((), eps, dtype=dtype), _has_offset[kind])
