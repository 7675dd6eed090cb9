"""Products with quantised weights: int8 on a CPU, int4 on a GPU.

Weights are rounded to a grid of their own for each output (int8), or for each group of inputs of
an output (int4). On a CPU the inputs are rounded as well, to 8 bits on a grid of each product's
own, and integers are multiplied (`linear_dynamic` of FBGEMM). On a GPU inputs are not rounded.

Rounding may be as coarse as it likes: a copy only proposes tokens.

Shape legend: K features in, M features out.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# Weights from which int4 is near enough; smaller policies gain little by it on a GPU.
LARGE = 3e9
GROUP = 128  # inputs of an output that share a grid of int4
INNER_TILES = 8  # of torch's int4 layout, each of 16 inputs
OUTPUTS_AT_ONCE = 4096  # that are rounded
HALF = 8  # by which int4 weights, 0 to 15, are moved


class Product(NamedTuple):
    """A way to multiply by quantised weights."""

    name: str
    bits: int
    pack: Callable[[torch.Tensor, torch.Tensor], Any]
    """Quantise a weight [M, K] times a factor [K]; return an object, or a tuple of tensors."""
    multiply: Callable[[torch.Tensor, Any], torch.Tensor]
    """Multiply x [..., K] by a packed weight; return [..., M] in the type of x."""
    fits: Callable[[int, int], bool]
    """Whether a weight of K inputs and M outputs can be packed."""


def product_for(model: torch.nn.Module, device: str, bits: int | str) -> Product | None:
    """Return the product of a policy's copy, if a device has one for its type.

    device: cpu or cuda, where the policy will be; bits: auto, 8 or 4."""
    parameters = list(model.parameters())
    if device == "cpu":
        has_engine = "x86" in torch.backends.quantized.supported_engines
        return INT8_CPU if has_engine and bits != 4 else None
    is_large = sum(parameter.numel() for parameter in parameters) >= LARGE
    fits = bits == 4 or (bits == "auto" and is_large)
    return INT4 if fits and parameters[0].dtype == torch.bfloat16 else None


NO_PRODUCT = "this device has no product with quantised weights for this type and size of policy"


def round_to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight [M, K]; return int8 [M, K] and the steps of the outputs' grids, float [M]."""
    step = weight.abs().amax(dim=1).clamp_min(torch.finfo(weight.dtype).tiny) / 127
    return (weight / step[:, None]).round().to(torch.int8), step


def by_parts(
    rounding: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
    weight: torch.Tensor,
    factor: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Round a weight [M, K] times a factor [K] in float32, a few outputs at a time.

    A float32 copy of a large model's output head would take gigabytes."""
    parts = [rounding(part.float() * factor) for part in weight.split(OUTPUTS_AT_ONCE)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _pack_int8(weight: torch.Tensor, factor: torch.Tensor) -> Any:
    whole, step = by_parts(round_to_int8, weight, factor)
    zeros = torch.zeros(len(step), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to take out this type of tensor
        quantized = torch._make_per_channel_quantized_tensor(whole, step.double(), zeros, 0)
    return torch.ops.quantized.linear_prepack(quantized, None)


def _multiply_int8(x: torch.Tensor, packed: Any) -> torch.Tensor:
    size, given = None, x.float()
    if x.numel() > x.shape[-1]:  # the rows share a grid, so they are brought to one size
        size = given.abs().amax(dim=-1, keepdim=True).clamp_min_(1e-9)
        given = given / size
    # Without VNNI, FBGEMM adds up products in 16 bits, where 8-bit inputs would overflow.
    out = torch.ops.quantized.linear_dynamic(given, packed, not HAS_VNNI)
    return (out if size is None else out * size).to(x.dtype)


def round_to_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a weight [M, K] to 16 levels; return levels uint8 [M, K], and each group's grid.

    A grid is (step, middle), [M, groups] each: level q stands for (q - 8) * step + middle."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    step = ((high - low) / 15).clamp_min(1e-6)
    levels = ((groups - low[..., None]) / step[..., None]).round().clamp(0, 15).to(torch.uint8)
    return levels.flatten(1), step, low + HALF * step


def _pack_int4(weight: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    levels, step, middle = by_parts(round_to_int4, weight, factor)
    pairs = levels[:, ::2] << 4 | levels[:, 1::2]
    packed = torch._convert_weight_to_int4pack(pairs, INNER_TILES)
    grids = torch.stack((step, middle), dim=2).transpose(0, 1).contiguous()
    return packed, grids.to(weight.dtype)  # [groups, M, 2]


def _multiply_int4(x: torch.Tensor, packed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    weight, grids = packed
    out = torch._weight_int4pack_mm(x.reshape(-1, x.shape[-1]), weight, GROUP, grids)
    return out.view(*x.shape[:-1], out.shape[-1])


HAS_VNNI = torch.cpu._is_vnni_supported()
INT8_CPU = Product("int8", 8, _pack_int8, _multiply_int8, lambda k, m: True)
INT4 = Product("int4", 4, _pack_int4, _multiply_int4, lambda k, m: k % GROUP == 0 and m % 8 == 0)
