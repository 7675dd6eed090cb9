"""Memory of a quantised copy."""

from dataclasses import replace

from torch.nn import Linear
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.mechanisms.quantized.copy import linear_layers, linear_of
from bubblespec.mechanisms.quantized.products import GROUP, products_for
from bubblespec.memory import Needs


def add_quantized(needs: Needs, config: Config, model: PreTrainedModel) -> Needs:
    """Add the copy's linear layers, if the run has one.

    With several products the largest counts: all are tried before the first step."""
    if "quantized" not in config.speculative.sources:
        return needs
    device = "cpu" if config.model.device == "cpu" else "cuda"
    found = products_for(device, model.dtype, config.quantized.bits)
    layers: list[Linear] = [linear_of(layer) for layer in linear_layers(model)]
    weights = sum(layer.weight.numel() for layer in layers)
    bits = max((product.bits for product in found), default=0)
    grids = 2 * weights // GROUP if bits == 4 else sum(layer.out_features for layer in layers)
    return replace(needs, quantized=weights * bits // 8 + bool(bits) * grids * model.dtype.itemsize)
