"""The layers of models that are built like Llama on a GPU, with gradients: for training.

They are those of decoder.py over whole sequences, with the same operations, and so with the same
rounding as generation. Around products and attention a layer is four kernels forward and ten
backward. `prepare_model` gives them to the models that they serve.

Shape legend: N packed tokens, H query heads, K key/value heads, D head dimension, C width of the
residual, I hidden units of an MLP.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from bubblespec.engine.attention import KERNELS
from bubblespec.engine.decoder import Attention, Decoder, Layer
from bubblespec.engine.model import HAS_CHECKPOINTS, SequencePacking, taps_of
from bubblespec.engine.ops.triton_training import AddNorm, Gated, Rotated
from bubblespec.engine.ops.view import Norm
from bubblespec.engine.weights import Kind, Linears, Multiply, join, one_by_one, stack


def hidden(
    model: PreTrainedModel, input_ids: torch.Tensor, packing: SequencePacking, kernel: str
) -> torch.Tensor:
    """Compute `forward_hidden` of whole sequences by the layers written out here."""
    return TrainedDecoder(model).states(input_ids, packing, kernel)


class TrainedDecoder(Decoder):
    """A decoder over whole sequences, with gradients.

    It is made for each forward: that costs a thousandth, and adapters may come and go."""

    def __init__(self, model: PreTrainedModel):
        join(model)
        super().__init__(model, _with_gradient(model))
        if self.norm.has_offset:
            raise ValueError("kernels have no gradients of norms with an offset")
        self.has_checkpoints = HAS_CHECKPOINTS in vars(model)

    def states(self, tokens: torch.Tensor, packing: SequencePacking, kernel: str) -> torch.Tensor:
        """Return the last hidden states [N, C] of packed tokens int64 [N]."""
        rotation = packing.position, self.tables(max(packing.lengths))
        run = partial(self._run, partial(KERNELS[kernel], packing), rotation)
        residual, x, taps = self.embed(tokens), None, taps_of(self.model)
        for number, layer in enumerate(self.layers):
            if taps is not None:
                taps.note(number, residual, x)
            if self.has_checkpoints and torch.is_grad_enabled():
                options: dict = {"use_reentrant": False, "preserve_rng_state": False}
                residual = checkpoint(lambda *of: torch.add(*run(*of)), layer, residual, **options)
            else:
                residual, x = run(layer, residual, x)
        return _add_norm(x, residual, self.norm)[1]

    def _run(
        self, attend: Callable, rotation: tuple, layer: Layer, residual: torch.Tensor, x=None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a layer of residual + x; return residual and x before they are added."""
        heads, mixer = (self.heads, self.kv_heads, self.kv_heads), cast(Attention, layer.mixer)
        residual, h = _add_norm(x, residual, layer.before_mixer)
        qkv = mixer.qkv(h).view(len(h), sum(heads), self.head_dim)
        norms = mixer.head_norms or mixer.wide_norms
        if norms is not None:
            both, values = qkv.split((self.heads + self.kv_heads, self.kv_heads), 1)
            parts = zip(both.split(heads[:2], 1), norms, strict=True)
            qkv = torch.cat((*(_norm_heads(part, norm) for part, norm in parts), values), 1)
        if mixer.rotates:
            query, key, value = Rotated.apply(qkv, heads, *rotation)
        else:
            query, key, value = qkv.split(heads, 1)
        attended = attend(query, key, value, mixer.options)
        x = mixer.out(attended.flatten(1))
        if layer.after_mixer is not None:
            x = _add_norm(None, x, layer.after_mixer)[1]
        residual, h = _add_norm(x, residual, layer.before_mlp)
        x = layer.down(Gated.apply(layer.gate_up(h), layer.activation))
        if layer.after_mlp is not None:
            x = _add_norm(None, x, layer.after_mlp)[1]
        return residual, x


def _add_norm(
    x: torch.Tensor | None, residual: torch.Tensor, norm: Norm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return residual + x, and of this the norm, or without a norm itself."""
    if norm is None:
        residual = residual if x is None else residual + x
        return residual, residual
    if x is None:
        return residual, AddNorm.apply(None, residual, norm.weight, norm)
    return AddNorm.apply(x, residual, norm.weight, norm)


def _norm_heads(part: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return the norm of [N, heads, D], of each head or of all together, as the weight is."""
    rows = part.contiguous().view(-1, len(norm.weight))
    return _add_norm(None, rows, norm)[1].view(part.shape)


def _with_gradient(model: PreTrainedModel):
    """Return the products of a model's own weights, stacked, that give gradients to these."""

    def product_of(kind: Kind, layers: Linears) -> Multiply:
        whole = stack(model, layers)
        if len(layers) == 1 or whole is None:
            return one_by_one(layers)
        named = [dict(layer.named_parameters()) for layer in layers]
        parts = [own.get(name) for name in ("weight", "bias") for own in named]
        return lambda x: _Stacked.apply(x, whole.weight, whole.bias, *parts)

    return product_of


class _Stacked(torch.autograd.Function):
    """A product with a stacked weight; gradients are views of one tensor."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, *parts):
        ctx.save_for_backward(x, weight)
        ctx.sizes = [len(part) for part in parts[: len(parts) // 2]]
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad):
        x, weight = ctx.saved_tensors
        needs, count = ctx.needs_input_grad[3:], len(ctx.sizes)
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        nothing = (None,) * count
        of_weights = (grad.t() @ x).split(ctx.sizes) if any(needs[:count]) else nothing
        of_biases = grad.sum(0).split(ctx.sizes) if any(needs[count:]) else nothing
        found = zip((*of_weights, *of_biases), needs, strict=True)
        return of_x, None, None, *(own if is_needed else None for own, is_needed in found)
