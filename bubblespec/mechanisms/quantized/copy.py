"""The copy: the policy's modules and parameters, with other linear layers.

The modules of `Copy.model` share everything with the policy's but the linear layers. These are
quantised; layers with the same input, as queries, keys and values have, are one product. Which
layers these are, and how large the inputs of each channel get, a forward of the policy shows. An
input channel with large values costs all others their precision, so channels are divided by a
factor and the weights multiplied by it (SmoothQuant, Xiao et al. 2023, arXiv 2211.10438, equation
4, with alpha = 0.5).

After an update the copy is that of older weights, and proposes nearly as well; `Copy.renew`
quantises a part of it again.

Shape legend: K features in, M features out.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from bubblespec.engine.model import forward_hidden
from bubblespec.engine.model_checks import is_rounding, relative_difference
from bubblespec.engine.output_head import output_head
from bubblespec.engine.packing import pack_sequences
from bubblespec.mechanisms.quantized.products import Product

SMOOTHING = 0.5  # alpha of SmoothQuant


class Layers:
    """Linear layers of the policy with one input, as one quantised product."""

    def __init__(self, layers: list[torch.nn.Module], product: Product, largest: torch.Tensor):
        """largest: of each input channel, float [K], in magnitude."""
        self.layers, self.product = layers, product
        self.widths = [linear_of(layer).out_features for layer in layers]
        weights = [current_weight(layer) for layer in layers]
        sizes = [torch.linalg.vector_norm(weight, torch.inf, dim=0).float() for weight in weights]
        factor = largest**SMOOTHING
        factor /= torch.stack(sizes).amax(dim=0).clamp_min(1e-5) ** (1 - SMOOTHING)
        self.factor = factor.clamp_min(1e-5)
        self.inverse = (1 / self.factor).to(weights[0].dtype)
        self.packed: Any = None
        self.bias: torch.Tensor | None = None
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        """Quantise the current weights, in place where a CUDA graph knows their addresses."""
        weight = torch.cat([current_weight(layer) for layer in self.layers])
        packed, bias = self.product.pack(weight, self.factor), self._current_bias()
        if isinstance(self.packed, tuple):
            for old, new in zip(self.packed, packed, strict=True):
                old.copy_(new)
        else:
            self.packed = packed
        if self.bias is None or bias is None:
            self.bias = bias
        else:
            self.bias.copy_(bias)

    def _current_bias(self) -> torch.Tensor | None:
        """Return the biases of all layers, [M], zeros for a layer without; None without any."""
        biases = [linear_of(layer).bias for layer in self.layers]
        if all(bias is None for bias in biases):
            return None
        parts = zip(biases, self.widths, strict=True)
        filled = [self.inverse.new_zeros(n) if bias is None else bias for bias, n in parts]
        return torch.cat([part.detach() for part in filled])

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs [..., M] of all layers for their input [..., K]."""
        out = self.product.multiply(x * self.inverse, self.packed)
        return out if self.bias is None else out + self.bias

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the policy's own layers compute."""
        return torch.cat([layer(x) for layer in self.layers], dim=-1)

    def part(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Return the output of one layer. The first to be asked about an input computes all."""
        if self._input is not x:
            self._input, self._outputs = x, self.compute(x).split(self.widths, dim=-1)
        out = self._outputs[number]
        if number == len(self.layers) - 1:
            self._input, self._outputs = None, ()
        return out


class QuantizedLinear(torch.nn.Module):
    """One of `Layers`, in the place of the policy's layer."""

    def __init__(self, layers: Layers, number: int):
        super().__init__()
        self.layers, self.number = layers, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers.part(x, self.number)


class Copy:
    """A quantised copy of the policy."""

    def __init__(self, model: PreTrainedModel, product: Product, groups: list, largest: dict):
        """Quantise the policy's layers. groups, largest: of `observe_inputs`."""
        self.parts: list[Layers] = []
        made: dict[torch.nn.Module, torch.nn.Module] = {}
        for group in groups:
            shapes = [(linear_of(x).in_features, linear_of(x).out_features) for x in group]
            if all(product.fits(*shape) for shape in shapes):
                self.parts.append(Layers(group, product, largest[group[0]]))
                for number, layer in enumerate(group):
                    made[layer] = QuantizedLinear(self.parts[-1], number)
        self.model = cast(PreTrainedModel, _with_layers(model, made))
        head = output_head(model)
        own = made.get(head.linear, head.linear)
        vars(self.model)["to_logits"] = replace(head, linear=own)
        # The head only finds candidates, for which that of older weights is good enough; it would
        # take as long as all others together.
        self.renewed = [part for part in self.parts if head.linear not in part.layers]
        self._oldest = 0  # of these, the one that `renew` begins with
        self._num_old = 0  # parts that are older than the weights

    def renew(self, clock: Callable[[], float], limit_s: float) -> float:
        """Quantise the parts that are oldest again, until time is over; return the seconds."""
        begin_s = clock()
        while self._num_old and clock() - begin_s < limit_s:
            self.renewed[self._oldest].renew()
            self._oldest = (self._oldest + 1) % len(self.renewed)
            self._num_old -= 1
        return clock() - begin_s

    def note_update(self) -> None:
        """Note that the policy's weights have changed."""
        self._num_old = len(self.renewed)


def linear_of(layer: torch.nn.Module) -> torch.nn.Linear:
    """Return the linear layer itself, or that below an adapter (LoRA)."""
    return cast(torch.nn.Linear, getattr(layer, "base_layer", layer))


@torch.no_grad()
def current_weight(layer: torch.nn.Module) -> torch.Tensor:
    """Return the weight [M, K] that a layer multiplies by, its adapters included."""
    weight = linear_of(layer).weight.detach()
    for name in getattr(layer, "active_adapters", ()):
        weight = weight + cast(Any, layer).get_delta_weight(name)
    return weight


def linear_layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the linear layers of a model, one with an adapter as a whole."""
    if isinstance(linear_of(module), torch.nn.Linear):
        yield module
        return
    for child in module.children():
        yield from linear_layers(child)


def computes_product(layer: torch.nn.Module, x: torch.Tensor, output: object) -> bool:
    """Whether a layer's output for x [..., K] is the product with its weight, and its bias."""
    wanted = linear(x[..., -1:, :], current_weight(layer), linear_of(layer).bias)
    if not isinstance(output, torch.Tensor) or output.shape[:-1] != x.shape[:-1]:
        return False
    found = output[..., -1:, :]
    is_alike = found.shape == wanted.shape and found.dtype == wanted.dtype
    return is_alike and is_rounding(relative_difference(found, wanted), wanted.dtype)


@torch.no_grad()
def observe_inputs(
    model: PreTrainedModel, tokens: torch.Tensor, kernel: str
) -> tuple[list[list[torch.nn.Module]], dict[torch.nn.Module, torch.Tensor]]:
    """Run the policy on tokens int64 [N]; return its linear layers in groups with the same input.

    Also the largest magnitude of each input channel, float32 [K] by layer. A layer that computes
    more than its product, as routers of experts do, is left out."""
    groups: list[list[torch.nn.Module]] = []
    largest: dict[torch.nn.Module, torch.Tensor] = {}
    last: list[torch.Tensor] = []  # input of the latest group

    def note(layer: torch.nn.Module, args: tuple[torch.Tensor, ...], output: object) -> None:
        if not args or not args[0].numel() or not computes_product(layer, args[0], output):
            return
        size = torch.linalg.vector_norm(args[0].flatten(0, -2), torch.inf, dim=0).float()
        if layer in largest:  # called again, with another input
            torch.maximum(largest[layer], size, out=largest[layer])
            return
        largest[layer] = size
        if last and args[0] is last[0]:
            groups[-1].append(layer)
        else:
            groups.append([layer])
            last[:] = args[:1]

    handles = [layer.register_forward_hook(note) for layer in linear_layers(model)]
    try:
        packing = pack_sequences([len(tokens)], model.device)
        output_head(model)(forward_hidden(model, tokens, packing, kernel))
    finally:
        for handle in handles:
            handle.remove()
    return groups, largest


def _with_layers(module: torch.nn.Module, made: dict) -> torch.nn.Module:
    """Copy a module that shares all but the given layers; its own `forward` is that of its class.

    Gradient checkpointing wraps the policy's `forward`, whose modules are others."""
    new = copy.copy(module)
    vars(new).pop("forward", None)
    vars(new)["_modules"] = {
        name: made.get(child) or (child and _with_layers(child, made))
        for name, child in module._modules.items()
    }
    return new
