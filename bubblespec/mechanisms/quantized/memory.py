"""Memory of a quantised copy."""

from dataclasses import replace

from torch.nn import Linear
from transformers import PreTrainedModel

from bubblespec.engine.weights import linear_of
from bubblespec.mechanisms.quantized.copy import linear_layers
from bubblespec.mechanisms.quantized.products import GROUP, Product
from bubblespec.memory import Needs


def add_quantized(needs: Needs, product: Product | None, model: PreTrainedModel) -> Needs:
    """Add the copy's linear layers. product: None where the run has no copy."""
    if product is None:
        return needs
    layers: list[Linear] = [linear_of(layer) for layer in linear_layers(model)]
    weights = sum(layer.weight.numel() for layer in layers)
    is_grouped = product.bits == 4
    grids = 2 * weights // GROUP if is_grouped else sum(layer.out_features for layer in layers)
    size = weights * product.bits // 8 + grids * model.dtype.itemsize
    return replace(needs, quantized=size)
