"""The copy's forward in few calls, for decoders that are built like Llama.

Where a row feeds one token, a CPU spends more time on the calls of a model's code than on reading
8-bit weights. So the layers of Llama, Qwen2, Qwen3, Mistral and others with the same parts are
written out here. Whether a model computes just this is found out by comparing it with the model's
own forward (`is_lean`); where it does not, its own code computes the copy (`ModelForward`).

Shape legend: N packed tokens, D head dimension.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel

from bubblespec.engine.attention import cached_sdpa
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.kernels import random_hidden
from bubblespec.engine.layers import layer_heads, of_layers
from bubblespec.engine.model_checks import is_rounding, relative_difference
from bubblespec.engine.output_head import OutputHead, output_head
from bubblespec.engine.packing import CachePacking, Packing
from bubblespec.mechanisms.quantized.copy import Layers

Multiply = Callable[[torch.Tensor], torch.Tensor]


class Norm(NamedTuple):
    """An RMSNorm: x * weight / sqrt(mean(x^2) + epsilon).

    Constants are tensors of the states' type: a Python number takes longer to convert than to use.
    """

    weight: torch.Tensor
    width_epsilon: torch.Tensor
    root: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        size = x.square().sum(dim=-1, keepdim=True).add_(self.width_epsilon)
        return (x * size.rsqrt_().mul_(self.root)).mul_(self.weight)


class DecoderLayer(NamedTuple):
    """The parts of one layer."""

    number: int
    """Layer of the keys and values."""
    before: Norm
    qkv: Multiply
    head_norms: tuple[Norm, Norm] | None
    """Norms of queries and of keys (Qwen3)."""
    scaling: float
    window: int | None
    out: Multiply
    after: Norm
    gate_up: Multiply
    act: Multiply
    down: Multiply


class LeanForward(ModelForward):
    """The forward of a decoder like Llama on this rank alone."""

    def __init__(
        self,
        model: PreTrainedModel,
        parts: list[Layers],
        head: OutputHead | None = None,
        **options,
    ):
        """model: the policy; parts, head: of its copy, or no head for the policy's own weights.

        Raises ValueError for a model without the parts that are needed."""
        super().__init__(model, **options)
        self.head = head or output_head(model)
        base: Any = model.base_model
        products: dict[tuple, Multiply] = {
            tuple(part.layers): part.compute if head else part.exact for part in parts
        }
        try:
            self.embed, self.rotary = base.embed_tokens, base.rotary_emb
            self.norm = _norm(base.norm)
            self.layers = [_decoder_layer(layer, products) for layer in base.layers]
            heads = {(n, of_keys) for n, of_keys, *_ in layer_heads(model.config)}
            ((self.num_heads, self.num_kv_heads),) = heads
        except (AttributeError, KeyError, ValueError) as error:
            raise ValueError(f"{type(model).__name__} is not built like Llama: {error}") from error

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Forward`."""
        return self.head(hidden)

    def hidden(self, tokens: torch.Tensor, packing: Packing) -> torch.Tensor:
        """See `Forward`."""
        packing = cast(CachePacking, packing)
        x = self.embed(tokens)
        cos, sin = (of[0, :, None] for of in self.rotary(x[None], packing.position[None]))
        half = cos.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        heads, kv_heads = self.num_heads, self.num_kv_heads
        for layer in self.layers:
            qkv = layer.qkv(layer.before(x)).unflatten(-1, (heads + 2 * kv_heads, -1))
            rotated, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
            if layer.head_norms is not None:
                parts = zip(layer.head_norms, rotated.split((heads, kv_heads), 1), strict=True)
                rotated = torch.cat([norm(part) for norm, part in parts], dim=1)
            rotated = torch.addcmul(rotated * cos, rotated.roll(half, -1), sin)
            keys, values = packing.cache.write(
                layer.number, packing.place, rotated[:, heads:], value
            )
            attended = cached_sdpa(
                packing,
                rotated[:, :heads],
                keys,
                values,
                scaling=layer.scaling,
                window=layer.window,
            )
            x = x + layer.out(attended.flatten(1))
            gate, up = layer.gate_up(layer.after(x)).chunk(2, dim=-1)
            x = x + layer.down(layer.act(gate) * up)
        return self.norm(x)


def _norm(module: Any) -> Norm:
    weight = module.weight.detach()
    width = len(weight)
    constants = weight.new_tensor(width * module.variance_epsilon), weight.new_tensor(width**0.5)
    return Norm(weight, *constants)


def _decoder_layer(layer: Any, products: dict[tuple, Multiply]) -> DecoderLayer:
    """Return the parts of a layer. Raises AttributeError or KeyError where it has others."""
    attention, mlp = layer.self_attn, layer.mlp
    in_config = of_layers(attention.config, "sliding_window")[attention.layer_idx]
    head_norms = None
    if hasattr(attention, "q_norm"):
        head_norms = _norm(attention.q_norm), _norm(attention.k_norm)
    return DecoderLayer(
        number=attention.layer_idx,
        before=_norm(layer.input_layernorm),
        qkv=products[attention.q_proj, attention.k_proj, attention.v_proj],
        head_norms=head_norms,
        scaling=attention.scaling,
        window=getattr(attention, "sliding_window", in_config),
        out=products[(attention.o_proj,)],
        after=_norm(layer.post_attention_layernorm),
        gate_up=products[mlp.gate_proj, mlp.up_proj],
        act=mlp.act_fn,
        down=products[(mlp.down_proj,)],
    )


def is_lean(model: PreTrainedModel, parts: list[Layers]) -> bool:
    """Whether `LeanForward` computes what the policy's own forward does, on random tokens."""
    try:
        lean = LeanForward(model, parts)
    except ValueError:
        return False
    difference = relative_difference(random_hidden(lean), random_hidden(ModelForward(model)))
    return is_rounding(difference, model.dtype)
