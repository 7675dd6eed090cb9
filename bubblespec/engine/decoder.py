"""The layers of models that are built like Llama, written out once; some may have a state.

A layer with attention is five operations (ops/) and four products, others: state_layers.py. The
products are values: a `Decoder` computes with the policy's weights, with a quantised copy of them
or with a rank's shards. transformers' modules compute the same in twice the calls and, on a GPU,
twice the kernels; training uses these on CPUs, and on a GPU the same layers with gradients
(trained.py).

Whether a model computes just this is found out by comparing logits (model_checks.py); others are
computed by their own modules (model.py).

Shape legend: N packed tokens, H query heads, K key/value heads, D head dimension, C width of the
residual, I hidden units of an MLP.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from bubblespec.engine.kv_cache import CachePacking
from bubblespec.engine.model import body_of, layer_heads, state_layers, taps_of
from bubblespec.engine.norms import norm_of
from bubblespec.engine.ops import ops_for
from bubblespec.engine.ops.softmax import AttentionOptions
from bubblespec.engine.ops.view import Norm
from bubblespec.engine.state_layers import GatedDelta, Mixer, ShortConvolution
from bubblespec.engine.weights import Multiply, ProductOf, linear_of, one_by_one, stack

IS_WRITTEN_OUT = "_bubblespec_is_written_out"  # attribute of a model
# transformers' names of the activations that `gated` computes.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class Attention(NamedTuple):
    """Attention of a layer."""

    number: int  # of the keys and values
    qkv: Multiply  # [N, C] to [N, (H + 2K) * D], and a gate behind each query head if there is one
    has_gate: bool  # of what is attended (Qwen3-Next)
    head_norms: tuple[Norm, Norm] | None  # of each query and key head (Qwen3)
    wide_norms: tuple[Norm, Norm] | None  # of all query and of all key heads together (OLMo 2)
    rotates: bool
    options: AttentionOptions
    out: Multiply  # [N, H * D] to [N, C]


class Layer(NamedTuple):
    """One layer. Norms that a family does not have are None."""

    before_mixer: Norm | None
    mixer: Attention | Mixer
    after_mixer: Norm | None
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
        self.model, base = model, body_of(model)
        config: Any = model.config.get_text_config(decoder=True)
        try:
            self.embed, self.rotary_emb = base.embed_tokens, _part(base, "rotary_emb", "pos_emb")
            self.norm = norm_of(_part(base, "norm", "embedding_norm"))
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
        ops, residual, x = self.ops, self.embed(tokens), None
        rotation, taps = None, taps_of(self.model)
        if self.rotary_emb is not None:
            rotation = ops.rotation(self.tables(packing.cache.slot_length), packing)
        for number, layer in enumerate(self.layers):
            if taps is not None:
                taps.note(number, residual, x)
            h = self._add_norm(x, residual, layer.before_mixer)
            if isinstance(layer.mixer, Attention):
                x = self._attention(layer.mixer, h, packing, rotation)
            else:
                x = layer.mixer(h, packing)
            if layer.after_mixer is not None:
                x = ops.add_norm(None, x, layer.after_mixer)
            h = self._add_norm(x, residual, layer.before_mlp)
            x = layer.down(ops.gated(layer.gate_up(h), layer.activation))
            if layer.after_mlp is not None:
                x = ops.add_norm(None, x, layer.after_mlp)
        return ops.add_norm(x, residual, self.norm)

    def _attention(
        self, layer: Attention, h: torch.Tensor, packing: CachePacking, rotation: Any
    ) -> torch.Tensor:
        """Return the attention [N, C] of normed states h [N, C]."""
        ops, heads, behind_keys = self.ops, self.heads, self.heads + self.kv_heads
        qkv, gate = layer.qkv(h).view(len(h), -1, self.head_dim), None
        if layer.has_gate:
            queries = qkv[:, : 2 * heads].view(len(h), heads, 2, -1)
            gate = queries[:, :, 1].sigmoid()
            qkv = torch.cat((queries[:, :, 0], qkv[:, 2 * heads :]), 1)
        if layer.wide_norms is not None:
            parts = qkv[:, :heads], qkv[:, heads:behind_keys]
            for part, norm in zip(parts, layer.wide_norms, strict=True):
                wide = part.flatten(1).contiguous()
                part.copy_(ops.add_norm(None, wide, norm).view_as(part))
        own = packing.cache.layer(layer.number, qkv[:, heads:behind_keys], qkv[:, behind_keys:])
        rotation = rotation if layer.rotates else None
        query = ops.rope_store(qkv, packing, own, rotation, layer.head_norms)
        attended = self.attend(query, packing, own, layer.options)
        return layer.out((attended if gate is None else attended * gate).flatten(1))

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


def is_written_out(model: torch.nn.Module) -> bool:
    """Whether a `Decoder` has given the model's own logits, see `prepare_model`."""
    return bool(vars(model).get(IS_WRITTEN_OUT))


def is_like_llama(model: torch.nn.Module) -> bool:
    """Whether a model is written out, and has no layers with a state."""
    return is_written_out(model) and not state_layers(model)


def stacked(model: PreTrainedModel) -> ProductOf:
    """Return the products of a model's own weights, stacked where layers are plain ones."""
    return lambda kind, layers: product_of(stack(model, layers)) or one_by_one(layers)


def product_of(layer: torch.nn.Linear | None) -> Multiply | None:
    """Return the product of a layer, which may change its class, without a module's hooks."""
    return layer and (lambda x: layer.forward(x))


def _part(owner: Any, *names: str) -> Any:
    """Return the part of a module that has one of these names; raise AttributeError."""
    name = next((name for name in names if hasattr(owner, name)), names[0])
    return getattr(owner, name)


def _norm_if_any(owner: Any, *names: str) -> Norm | None:
    found = any(hasattr(owner, name) for name in names)
    return norm_of(_part(owner, *names)) if found else None


def _layer(layer: Any, config: Any, product_of: ProductOf) -> Layer:
    """Return the parts of a layer. Raises AttributeError or KeyError where it has others."""
    mlp = _part(layer, "mlp", "feed_forward")
    mixer: Any = None
    if hasattr(layer, "linear_attn"):
        mixer = GatedDelta(layer.linear_attn, product_of)
    elif hasattr(layer, "conv"):
        mixer = ShortConvolution(layer.conv, product_of)
    # A norm of this name comes before the MLP, or in families with others after the attention.
    middle = norm_of(_part(layer, "post_attention_layernorm", "ffn_norm"))
    is_after = hasattr(layer, "post_feedforward_layernorm")
    gate_up: tuple[str, ...] = ("w1", "w3") if hasattr(mlp, "w1") else ("gate_proj", "up_proj")
    if hasattr(mlp, "gate_up_proj"):
        gate_up = ("gate_up_proj",)
    return Layer(
        before_mixer=_norm_if_any(layer, "input_layernorm", "operator_norm"),
        mixer=mixer or _attention(layer.self_attn, config, product_of),
        after_mixer=middle if is_after else None,
        before_mlp=_norm_if_any(layer, "pre_feedforward_layernorm") if is_after else middle,
        gate_up=product_of("gate_up", tuple(getattr(mlp, name) for name in gate_up)),
        activation=ACTIVATIONS[getattr(config, "hidden_act", "silu")],
        down=product_of("down", (_part(mlp, "down_proj", "w2"),)),
        after_mlp=_norm_if_any(layer, "post_feedforward_layernorm"),
    )


def _attention(attention: Any, config: Any, product_of: ProductOf) -> Attention:
    """Return the parts of a layer's attention."""
    norms = _norm_if_any(attention, "q_norm", "q_layernorm")
    both = norms and (norms, norm_of(_part(attention, "k_norm", "k_layernorm")))
    is_wide = norms is not None and len(norms.weight) != attention.head_dim
    names = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    qkv = tuple(getattr(attention, name) for name in names)
    out = _part(attention, "o_proj", "out_proj")
    num_queries, num_attended = linear_of(qkv[0]).out_features, linear_of(out).in_features
    return Attention(
        number=attention.layer_idx,
        qkv=product_of("qkv", qkv),
        has_gate=num_queries == 2 * num_attended and len(qkv) > 1,
        head_norms=None if is_wide else both,
        wide_norms=both if is_wide else None,
        rotates=bool(getattr(attention, "use_rope", True)),
        options=AttentionOptions(
            attention.scaling,
            getattr(attention, "sliding_window", getattr(config, "sliding_window", None)),
        ),
        out=product_of("out", (out,)),
    )
