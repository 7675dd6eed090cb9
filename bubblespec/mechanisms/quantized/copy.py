"""The copy: the policy's decoder with quantised products.

Everything else is shared with the policy: embeddings, norms, keys and values. How large the inputs
of each product's channels get, a forward of the policy shows. An input channel with large values
costs all others their precision, so channels are divided by a factor and the weights multiplied by
it (SmoothQuant, Xiao et al. 2023, arXiv 2211.10438, equation 4, with alpha = 0.5).

After an update the copy is that of older weights, and proposes nearly as well; `Copy.renew`
quantises a part of it again.

Shape legend: N tokens, K features in, M features out.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.engine.decoder import Decoder, Kind, Multiply, stacked
from bubblespec.engine.kv_cache import LANES, KVCache, pack_rows
from bubblespec.engine.model import output_head
from bubblespec.engine.weights import Linears, linear_of
from bubblespec.mechanisms.quantized.products import GROUP, Product
from bubblespec.memory import Needs

SMOOTHING = 0.5  # alpha of SmoothQuant


class Layers:
    """Linear layers of the policy with one input, as one quantised product."""

    def __init__(self, layers: Linears, product: Product, largest: torch.Tensor):
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


class Copy:
    """A quantised copy of a policy that is like Llama."""

    def __init__(
        self, model: PreTrainedModel, product: Product, largest: dict[Linears, torch.Tensor]
    ):
        """Quantise the policy's products. largest: of `observe_inputs`."""
        self.model = model
        self.parts = {
            layers: Layers(layers, product, sizes)
            for layers, sizes in largest.items()
            if all(product.fits(of.in_features, of.out_features) for of in map(linear_of, layers))
        }
        head = output_head(model)
        self.head = replace(head, linear=self.product_of("out", (head.linear,)))
        # The head only finds candidates, for which that of older weights is good enough; it would
        # take as long as all others together.
        self.renewed = [part for layers, part in self.parts.items() if head.linear not in layers]
        self._oldest = 0  # of these, the one that `renew` begins with
        self._num_old = 0  # parts that are older than the weights

    def product_of(self, kind: Kind, layers: Linears) -> Multiply:
        """Return the quantised product of layers, or the policy's where there is none."""
        part = self.parts.get(layers)
        return stacked(self.model)(kind, layers) if part is None else part.compute

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


@torch.inference_mode()
def observe_inputs(model: PreTrainedModel, tokens: torch.Tensor) -> dict[Linears, torch.Tensor]:
    """Run the policy on tokens int64 [N]; return the size of each product's input channels.

    Largest magnitudes, float32 [K], by the layers of the product, the output head included."""
    largest: dict[Linears, torch.Tensor] = {}

    def observed(kind: Kind, layers: Linears) -> Multiply:
        exact = stacked(model)(kind, layers)

        def multiply(x: torch.Tensor) -> torch.Tensor:
            largest[layers] = torch.linalg.vector_norm(x, torch.inf, dim=0).float()
            return exact(x)

        return multiply

    count = np.array([len(tokens)])
    cache = KVCache(1, -(-len(tokens) // LANES) * LANES)  # a GPU reads whole blocks of keys
    packing = pack_rows(cache, 0 * count, count, tokens.device)
    hidden = Decoder(model, observed).hidden(tokens, packing)
    observed("out", (output_head(model).linear,))(hidden)
    return largest


def add_quantized(needs: Needs, product: Product | None, model: PreTrainedModel) -> Needs:
    """Add the memory of the copy's linear layers. product: None where the run has no copy."""
    if product is None:
        return needs
    layers = [linear_of(layer) for layer in linear_layers(model)]
    weights = sum(layer.weight.numel() for layer in layers)
    is_grouped = product.bits == 4
    grids = 2 * weights // GROUP if is_grouped else sum(layer.out_features for layer in layers)
    return replace(needs, quantized=weights * product.bits // 8 + grids * model.dtype.itemsize)
