"""The layers of models that are built like Llama, written out once.

A layer is five operations (ops/) and four products. The products are values: a `Decoder` computes
with the policy's weights, with a quantised copy of them or with a rank's shards. transformers'
modules compute the same in twice the calls and, on a GPU, twice the kernels; training uses these
on CPUs, and on a GPU the same layers with gradients (trained.py).

Whether a model computes just this is found out by comparing logits (model_checks.py); others are
computed by their own modules (model.py).

Shape legend: N packed tokens, H query heads, K key/value heads, D head dimension, C width of the
residual, I hidden units of an MLP.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedModel

from bubblespec.engine.kv_cache import CachePacking
from bubblespec.engine.model import layer_heads
from bubblespec.engine.ops import ops_for
from bubblespec.engine.ops.view import Norm
from bubblespec.engine.weights import Linears, stack

Multiply = Callable[[torch.Tensor], torch.Tensor]
Kind = Literal["qkv", "out", "gate_up", "down"]
ProductOf = Callable[[Kind, Linears], Multiply]

IS_LIKE_LLAMA = "_bubblespec_is_like_llama"  # attribute of a model
# transformers' names of the activations that `gated` computes.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class Layer(NamedTuple):
    """One layer. Norms that a family does not have are None."""

    number: int  # of the keys and values
    before_attention: Norm | None
    qkv: Multiply  # [N, C] to [N, (H + 2K) * D]
    head_norms: tuple[Norm, Norm] | None  # of each query and key head (Qwen3)
    wide_norms: tuple[Norm, Norm] | None  # of all query and of all key heads together (OLMo 2)
    rotates: bool
    scaling: float
    window: int | None
    out: Multiply  # [N, H * D] to [N, C]
    after_attention: Norm | None
    before_mlp: Norm | None
    gate_up: Multiply  # [N, C] to [N, 2I]
    activation: str
    down: Multiply  # [N, I] to [N, C]
    after_mlp: Norm | None


class Decoder:
    """A decoder over the cache of an engine."""

    def __init__(
        self,
        model: PreTrainedModel,
        product_of: ProductOf,
        num_heads: tuple[int, int] | None = None,
        attend: Callable | None = None,
    ):
        """product_of: the product of linear layers with one input, outputs one after another.

        num_heads: H and K of these products, by default the model's; attend: by
        default that of the device. Raises ValueError for a model that lacks a part."""
        base: Any = model.base_model
        config: Any = model.config.get_text_config(decoder=True)
        try:
            self.embed, self.rotary_emb = base.embed_tokens, base.rotary_emb
            self.norm = _norm_of(base.norm)
            self.layers = [_layer(layer, config, product_of) for layer in base.layers]
            ((heads, kv_heads, self.head_dim, _),) = set(layer_heads(model.config))
            self.heads, self.kv_heads = num_heads or (heads, kv_heads)
        except (AttributeError, KeyError, ValueError) as error:
            name = type(model).__name__
            raise ValueError(f"{name} is not built like Llama: {error}") from error
        self.ops = ops_for(self.norm.weight.device, self.norm.weight.dtype)
        self.attend = attend or self.ops.attend
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def hidden(self, tokens: torch.Tensor, packing: CachePacking) -> torch.Tensor:
        """Return the last hidden states [N, C] of packed tokens int64 [N]."""
        ops, heads, behind_keys = self.ops, self.heads, self.heads + self.kv_heads
        cache, residual, x = packing.cache, self.embed(tokens), None
        shape = len(residual), behind_keys + self.kv_heads, self.head_dim
        rotation = ops.rotation(self.tables(cache.slot_length), packing)
        for layer in self.layers:
            h = self._add_norm(x, residual, layer.before_attention)
            qkv = layer.qkv(h).view(shape)
            if layer.wide_norms is not None:
                queries, keys = qkv[:, :heads], qkv[:, heads:behind_keys]
                for part, norm in zip((queries, keys), layer.wide_norms, strict=True):
                    wide = part.flatten(1).contiguous()
                    part.copy_(ops.add_norm(None, wide, norm).view_as(part))
            own = cache.layer(layer.number, qkv[:, heads:behind_keys], qkv[:, behind_keys:])
            query = ops.rope_store(
                qkv, packing, own, rotation if layer.rotates else None, layer.head_norms
            )
            x = layer.out(self.attend(query, packing, own, layer.scaling, layer.window).flatten(1))
            if layer.after_attention is not None:
                x = ops.add_norm(None, x, layer.after_attention)
            h = self._add_norm(x, residual, layer.before_mlp)
            x = layer.down(ops.gated(layer.gate_up(h), layer.activation))
            if layer.after_mlp is not None:
                x = ops.add_norm(None, x, layer.after_mlp)
        return ops.add_norm(x, residual, self.norm)

    def _add_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm | None
    ) -> torch.Tensor:
        """Add x to the residual in place; return the norm of the sum, or without one the sum."""
        if norm is not None:
            return self.ops.add_norm(x, residual, norm)
        return residual if x is None else residual.add_(x)

    def tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of rotary angles at positions, [length or more, R / 2] each."""
        if self._tables is None or len(self._tables[0]) < length:
            weight = self.norm.weight
            position = torch.arange(length, device=weight.device)[None]
            cos, sin = self.rotary_emb(weight[None, None], position)
            half = cos.shape[-1] // 2
            self._tables = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        return self._tables


def is_like_llama(model: torch.nn.Module) -> bool:
    """Whether a `Decoder` has given the model's own logits, see `prepare_model`."""
    return bool(vars(model).get(IS_LIKE_LLAMA))


def stacked(model: PreTrainedModel) -> ProductOf:
    """Return the products of a model's own weights, stacked where layers are plain ones."""
    return lambda kind, layers: product_of(stack(model, layers)) or one_by_one(layers)


def product_of(layer: torch.nn.Linear | None) -> Multiply | None:
    """Return the product of a layer, which may change its class, without a module's hooks."""
    return layer and (lambda x: layer.forward(x))


def one_by_one(layers: Linears) -> Multiply:
    """Return the product of layers that are computed one after another."""
    if len(layers) == 1:
        return layers[0]
    return lambda x: torch.cat([layer(x) for layer in layers], dim=-1)


def _norm_of(module: Any) -> Norm:
    weight = module.weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    eps = module.variance_epsilon
    return Norm(weight, eps, weight.new_full((), eps, dtype=dtype))


def _norm_if_any(owner: Any, name: str) -> Norm | None:
    return _norm_of(getattr(owner, name)) if hasattr(owner, name) else None


def _layer(layer: Any, config: Any, product_of: ProductOf) -> Layer:
    """Return the parts of a layer. Raises AttributeError or KeyError where it has others."""
    attention, mlp = layer.self_attn, layer.mlp
    # A norm of this name comes before the MLP, or in families with others after the attention.
    middle = _norm_of(layer.post_attention_layernorm)
    is_after = hasattr(layer, "post_feedforward_layernorm")
    norms = None
    if hasattr(attention, "q_norm"):
        norms = _norm_of(attention.q_norm), _norm_of(attention.k_norm)
    is_wide = norms is not None and len(norms[0].weight) != attention.head_dim
    qkv = (
        (attention.qkv_proj,)
        if hasattr(attention, "qkv_proj")
        else (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    gate_up = (mlp.gate_up_proj,) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj, mlp.up_proj)
    return Layer(
        number=attention.layer_idx,
        before_attention=_norm_if_any(layer, "input_layernorm"),
        qkv=product_of("qkv", qkv),
        head_norms=None if is_wide else norms,
        wide_norms=norms if is_wide else None,
        rotates=bool(getattr(attention, "use_rope", True)),
        scaling=attention.scaling,
        window=getattr(attention, "sliding_window", getattr(config, "sliding_window", None)),
        out=product_of("out", (attention.o_proj,)),
        after_attention=middle if is_after else None,
        before_mlp=_norm_if_any(layer, "pre_feedforward_layernorm") if is_after else middle,
        gate_up=product_of("gate_up", gate_up),
        activation=ACTIVATIONS[config.hidden_act],
        down=product_of("down", (mlp.down_proj,)),
        after_mlp=_norm_if_any(layer, "post_feedforward_layernorm"),
    )
