"""RMSNorms of a model in one call, in the precision of the model or better.

transformers' RMSNorms are eight operations, and compute in float32 also in a float64 model, whose
results then differ by 1e-7 between batches of different shapes.
"""

from typing import cast

import torch
from torch.func import functional_call
from torch.nn.functional import rms_norm

MAX_DIFFERENCE = 1e-5  # in float32, of values around 1


class RMSNorm(torch.nn.Module):
    """`y = x / sqrt(mean(x^2) + epsilon) * weight`."""

    weight: torch.nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalize hidden states [..., width]."""
        weight = self.weight
        return rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)


def replace_norms(model: torch.nn.Module) -> bool:
    """Replace what computes an RMSNorm; return whether no other norm with a float32 part is left.

    A norm that differs on random input, as one that multiplies by 1 + weight, stays."""
    is_same: dict[type, bool] = {}
    for module in model.modules():
        shapes = [(name, weight.ndim) for name, weight in module.named_parameters()]
        if shapes != [("weight", 1)] or type(module) is RMSNorm:
            continue
        kind = type(module)
        if kind not in is_same:
            is_same[kind] = computes_rms_norm(module)
        if is_same[kind]:
            module.__class__ = RMSNorm
    return all(is_same.values())


@torch.no_grad()
def computes_rms_norm(module: torch.nn.Module) -> bool:
    """Whether a module computes what `RMSNorm` computes, in float32 with random weights."""
    norm, generator = cast(RMSNorm, module), torch.Generator().manual_seed(0)
    weight = torch.randn(len(norm.weight), generator=generator)
    x = torch.randn(5, len(weight), generator=generator)
    x[0] *= 1e-3  # where epsilon counts
    try:
        wanted = rms_norm(x, weight.shape, weight, norm.variance_epsilon)
        found = functional_call(norm, {"weight": weight}, (x,))
        return torch.allclose(found, wanted, rtol=0, atol=MAX_DIFFERENCE)
    except Exception:  # the model's own code, which may take something else or need a GPU
        return False
