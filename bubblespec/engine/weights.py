"""Weights of linear layers with one input, one after another in memory: one product for all.

Queries, keys and values are one product, and so are gate and up. The model's parameters become
views of the stacked weight, so there is no second copy: training changes both, and saving and
loading see ordinary parameters. What replaces a parameter's memory (`model.to`, a loader that
assigns) breaks this; `join` notices, and stacks again.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import torch
from torch.nn import Linear

from bubblespec.errors import log

Linears = tuple[torch.nn.Module, ...]
Multiply = Callable[[torch.Tensor], torch.Tensor]
Kind = Literal["qkv", "out", "gate_up", "down"]  # of a product in a layer
ProductOf = Callable[[Kind, Linears], Multiply]
STACKS = "_bubblespec_stacks"  # attribute of a model


class Stacks(dict[Linears, Linear]):
    """The stacks of a model, by their layers."""

    def __deepcopy__(self, memo: Any) -> "Stacks":
        """Return no stacks: the copied model's parameters have memory of their own."""
        return Stacks()


def stack(model: torch.nn.Module, layers: Linears) -> Linear | None:
    """Return one linear layer in place of `layers`; the layer itself if it is alone.

    None if they are no plain linear layers (with an adapter, for example)."""
    if (found := stacks_of(model).get(layers)) is not None:
        return found
    if not all(isinstance(layer, Linear) for layer in layers):
        return None
    linears = cast(tuple[Linear, ...], layers)
    if len(layers) == 1:
        return linears[0]
    if any(type(layer).forward is not Linear.forward for layer in linears):
        return None
    found = vars(model).setdefault(STACKS, Stacks())[layers] = _join(None, linears)
    return found


def one_by_one(layers: Linears) -> Multiply:
    """Return the product of layers that are computed one after another."""
    if len(layers) == 1:
        return layers[0]
    return lambda x: torch.cat([layer(x) for layer in layers], dim=-1)


def stacks_of(model: torch.nn.Module) -> Stacks:
    """Return the stacks that a model has, by their layers."""
    return vars(model).get(STACKS, Stacks())


def linear_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a model's modules and the stacks of their layers."""
    for module in model.modules():
        yield module
        yield from stacks_of(module).values()


def linear_of(layer: torch.nn.Module) -> Linear:
    """Return the linear layer itself, or that below an adapter (LoRA)."""
    return cast(Linear, getattr(layer, "base_layer", layer))


def part_of(weight: torch.Tensor, part: slice, is_rowwise: bool) -> torch.Tensor:
    """Return a part of the inputs of a weight [M, K] if it is rowwise, else of its outputs."""
    return weight[:, part] if is_rowwise else weight[part]


def by_parts(
    compute: Callable, x: torch.Tensor, layer: Linear, parts: tuple[slice, ...], is_rowwise: bool
) -> torch.Tensor:
    """Compute parts of a layer's outputs, or if rowwise its sum over a part, without the bias.

    compute: a product of x with a weight and a bias."""
    outs = []
    for part in parts:
        bias = None if is_rowwise or layer.bias is None else layer.bias[part]
        outs.append(compute(x, part_of(layer.weight, part, is_rowwise), bias))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)


def join(model: torch.nn.Module) -> None:
    """Stack again what no longer shares memory with its stack, with a warning; before rollouts."""
    lost = 0
    for layers, stacked in stacks_of(model).items():
        if not _is_joined(stacked, cast(tuple[Linear, ...], layers)):
            _join(stacked, cast(tuple[Linear, ...], layers))
            lost += 1
    if lost:
        log(f"warning: {lost} stacked weights had been replaced; the engine uses the new ones")


def version_of(linear: Linear) -> tuple[int, ...]:
    """Return numbers that change with the weight of a layer or stack, however it is changed."""
    layers = (linear, *vars(linear).get("parts", ()))
    return tuple(cast(torch.Tensor, layer._parameters["weight"])._version for layer in layers)


def _is_joined(stacked: Linear, layers: tuple[Linear, ...]) -> bool:
    """Whether each layer's parameters lie where the stack has them."""
    for name, whole in stacked.named_parameters():
        place = whole.data_ptr()
        for layer in layers:
            part, size = layer._parameters[name], layer.out_features * whole[0].nbytes
            if part is not None and (part.data_ptr(), part.nbytes) != (place, size):
                return False
            place += size
    return True


@torch.no_grad()
def _join(stacked: Linear | None, layers: tuple[Linear, ...]) -> Linear:
    """Stack the parameters of layers, in the same memory as before where that is possible."""
    if stacked is None:
        has_bias = any(layer.bias is not None for layer in layers)
        outputs = sum(layer.out_features for layer in layers)
        stacked = Linear(layers[0].in_features, outputs, has_bias, device="meta")
        stacked.requires_grad_(False)
        vars(stacked)["parts"] = layers
    for name, old in list(stacked.named_parameters()):
        parts = [layer._parameters[name] for layer in layers]
        given = [
            layer.weight.new_zeros(layer.out_features) if part is None else part.detach()
            for part, layer in zip(parts, layers, strict=True)
        ]
        whole = torch.cat(given)
        if old.device == whole.device and old.dtype == whole.dtype:
            whole = old.copy_(whole).data  # CUDA graphs know its address; its version changes
        else:
            setattr(stacked, name, torch.nn.Parameter(whole, requires_grad=False))
        for part, view in zip(parts, whole.split([len(of) for of in given]), strict=True):
            if part is not None:
                part.data = view
    return stacked
