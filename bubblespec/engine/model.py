"""A Hugging Face causal LM for engine and trainer: hidden states of packed tokens, and logits.

Tokens of many rows are packed into one [1, N] input: new tokens of rows whose past is in the cache
(`CachePacking`), or whole sequences one after the other (`SequencePacking`, a micro-batch).

Of the model's code only its attention function is replaced (attention.py), and norms in float64 and
RMSNorms on a GPU by the same in one call. model_checks.py prepares a model.

Between the product with the output head's weight and the logits, models multiply by a constant
(Cohere, Granite) and cap by a tanh (Gemma): cap * tanh(factor * product / cap). The names of these
constants differ between families, and Granite divides by the constant by which HyperCLOVAX
multiplies. So they are found by trial (comparison.py), and a model that does anything else there is
refused.

The first `num_tokens` columns are the policy's vocabulary. Further rows of the weight, which make
their number a multiple, have no token. They are cut from the product, not from the weight: all
kernels keep their shapes.

Shape legend: N packed tokens or positions, V rows of the head's weight.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bubblespec.engine.arrays import ragged, to_device
from bubblespec.engine.kv_cache import CachePacking
from bubblespec.engine.ops import LAYERS, is_replaced
from bubblespec.errors import InputError

# Attributes of a model: what computes whole sequences in place of its modules, and whether layers
# are computed again in the backward pass.
OWN_HIDDEN, HAS_CHECKPOINTS = "_bubblespec_own_hidden", "_bubblespec_has_checkpoints"
STATE_LAYERS = "_bubblespec_state_layers"  # numbers of layers with a state
TAPS = "_bubblespec_taps"
# Kinds in a configuration's `layer_types` that have no keys and values.
WITHOUT_ATTENTION = {"linear_attention", "conv", "moe", "mlp"}


@dataclass(frozen=True)
class OutputHead:
    """Logits [N, num_tokens] of hidden states [N, hidden]."""

    linear: Any  # the model's, or of a copy: a product with a weight [V, hidden]
    num_tokens: int  # size of the policy's vocabulary, at most V
    factor: float = 1.0
    cap: float | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits(self.linear(hidden))

    def logits(self, product: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole product [N, V]."""
        if self.num_tokens < product.shape[-1]:
            product = product[..., : self.num_tokens]
        return self.finish(product)

    def finish(self, product: torch.Tensor) -> torch.Tensor:
        """Return the logits of some columns of the product."""
        if self.factor != 1.0:
            product = product * self.factor
        return product if self.cap is None else self.cap * torch.tanh(product / self.cap)


class Heads(NamedTuple):
    """Attention heads of a layer, as its keys and values are cached."""

    num_queries: int
    num_keys: int
    key_size: int
    value_size: int


@dataclass
class Taps:
    """The inputs of some layers in a model's latest forward."""

    layers: tuple[int, ...]
    states: dict[int, torch.Tensor] = field(default_factory=dict)  # [N, hidden] by layer

    def note(self, number: int, residual: torch.Tensor, x: torch.Tensor | None = None) -> None:
        """Keep a copy of residual + x if layer `number` is one of them."""
        if number in self.layers:
            state = residual.clone() if x is None else residual + x
            self.states[number] = state.detach()

    def behind(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [N, (1 + layers) * hidden]: last hidden states, then those of each layer."""
        return torch.cat((hidden, *(self.states[number] for number in self.layers)), dim=-1)


class Varlen(NamedTuple):
    """Whole sequences one after the other, for kernels of variable lengths."""

    offsets: torch.Tensor  # int32 [S + 1], of each sequence's tokens
    longest: int


@dataclass
class SequencePacking:
    """Whole sequences one after the other."""

    lengths: list[int]  # tokens of each sequence
    position: torch.Tensor  # int64 [N], from 0 in each sequence

    @cached_property
    def groups(self) -> tuple[list[tuple[int, int, torch.Tensor, torch.Tensor]], torch.Tensor]:
        """Groups of sequences padded to similar lengths, at most doubling the work.

        A group: number of sequences, padded length, index [sequences * padded length] of packed
        tokens with the last one repeated, index [M] of the real tokens in it. Behind the groups:
        the order [N] that puts the real tokens, group after group, into packed order."""
        device = self.position.device
        lengths = np.asarray(self.lengths)
        first = np.cumsum(lengths) - lengths
        by_length = np.argsort(-lengths, kind="stable")
        groups, grouped, begin = [], [], 0
        while begin < len(by_length):
            longest = lengths[by_length[begin]]
            members = by_length[begin:][lengths[by_length[begin:]] * 2 > longest]
            offset = np.arange(longest)
            real = offset < lengths[members, None]
            index = first[members, None] + np.minimum(offset, lengths[members, None] - 1)
            grouped.append(index[real])
            gather, keep = (to_device(a, device) for a in (index.ravel(), np.flatnonzero(real)))
            groups.append((len(members), int(longest), gather, keep))
            begin += len(members)
        return groups, to_device(np.argsort(np.concatenate(grouped)), device)

    @cached_property
    def varlen(self) -> Varlen:
        """The same sequences for variable-length kernels."""
        cumulative = np.append(0, np.cumsum(self.lengths)).astype(np.int32)
        return Varlen(to_device(cumulative, self.position.device), max(self.lengths))


def pack_sequences(lengths: Sequence[int], device: torch.device) -> SequencePacking:
    """Pack whole sequences of these lengths, each with positions from 0."""
    position = ragged(np.asarray(lengths))[1]
    return SequencePacking(list(lengths), to_device(position, device))


def forward_hidden(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    packing: CachePacking | SequencePacking,
    kernel: str = "sdpa",
) -> torch.Tensor:
    """Return last hidden states [N, hidden] of packed input_ids [N], at the packing's positions."""
    own = vars(model).get(OWN_HIDDEN)
    if own is not None and isinstance(packing, SequencePacking) and not is_replaced(LAYERS):
        return own(model, input_ids, packing, kernel)
    out = body_of(model)(
        input_ids=input_ids[None],
        position_ids=packing.position[None],
        use_cache=False,
        packing=packing,
        kernel=kernel,
    )
    return out.last_hidden_state[0]


def tap(model: PreTrainedModel, layers: tuple[int, ...]) -> None:
    """Keep the states in front of these layers, from the next forward on.

    Raises ValueError for a model whose layers are not known."""
    if (known := taps_of(model)) is not None and known.layers == layers:
        return
    modules = [module for _, module in named_layers(model)]
    if len(modules) != model.config.get_text_config(decoder=True).num_hidden_layers:
        raise ValueError(f"{type(model).__name__} does not say which of its modules are its layers")
    taps = vars(model)[TAPS] = Taps(layers)
    for number in set(layers):  # of the model's own modules; those written out call `note`

        def note(module, args: tuple, kwargs: dict, number: int = number) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            taps.note(number, hidden[0])

        modules[number].register_forward_pre_hook(note, with_kwargs=True)


def taps_of(model: torch.nn.Module) -> Taps | None:
    """Return the states that are kept of a model's forwards, see `tap`."""
    return vars(model).get(TAPS)


def with_taps(model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states [N, hidden] of the latest forward, and what taps kept of it."""
    taps = taps_of(model)
    return hidden if taps is None else taps.behind(hidden)


def last_hidden(model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states of what a forward returns, with taps or without."""
    taps = taps_of(model)
    return hidden if taps is None else hidden[..., : hidden.shape[-1] // (1 + len(taps.layers))]


def named_layers(model: PreTrainedModel) -> list[tuple[str, torch.nn.Module]]:
    """Return the layers of the model's own class, and their names in its `body_of`."""
    modules = body_of(model).named_modules()
    return [(name, m) for name, m in modules if isinstance(m, GradientCheckpointingLayer)]


def body_of(model: PreTrainedModel) -> Any:
    """Return the part of the model that computes hidden states.

    Llama 4's `base_model` is the model itself, as the part has another name than its prefix."""
    base = model.base_model
    return getattr(model, "model", base) if base is model else base


def output_head(model: PreTrainedModel) -> OutputHead:
    """Return the head that `prepare_model` has found."""
    return cast(OutputHead, model.to_logits)


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Recompute each layer in the backward pass instead of storing its activations.

    Raises ValueError. The model stays in evaluation mode: transformers' own switch takes
    effect in training mode only, where dropout and router noise would make the trained function
    differ from the one that generated."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        problem = f"{type(model).__name__} has no layers that can be checkpointed"
        raise ValueError(f"model.gradient_checkpointing: {problem}")
    vars(model)[HAS_CHECKPOINTS] = True
    for layer in layers:
        layer.forward = functools.partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """Return the kind of each decoder layer, as far as a configuration names them."""
    return list(getattr(config.get_text_config(decoder=True), "layer_types", None) or [])


def of_layers(config: PreTrainedConfig, name: str, default: Any = None) -> list[Any]:
    """Return an attribute of each decoder layer; default where it is absent or None."""
    layers = config.get_text_config(decoder=True).per_layer_config
    values = [getattr(layer, name, None) for layer in layers]
    for number, value in enumerate(values):
        if isinstance(value, list | tuple) and len(value) == len(values):
            values[number] = value[number]
    return [default if value is None else value for value in values]


def state_layers(model: torch.nn.Module) -> list[int]:
    """Return the numbers of the layers with a state, which `prepare_model` has found."""
    return vars(model).get(STATE_LAYERS, [])


def attention_layers(config: PreTrainedConfig) -> list[int]:
    """Return the numbers of the layers with keys and values."""
    decoder = config.get_text_config(decoder=True)
    kinds = dict(enumerate(layer_kinds(config)))
    return [n for n in range(decoder.num_hidden_layers) if kinds.get(n) not in WITHOUT_ATTENTION]


def layer_heads(config: PreTrainedConfig) -> list[Heads]:
    """Return the heads of each layer with attention. Raises InputError for a model without any."""
    hidden = config.get_text_config(decoder=True).hidden_size
    names = ["num_attention_heads", "num_key_value_heads", "head_dim", "kv_lora_rank"]
    names += ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    found, layers = [], list(zip(*(of_layers(config, name) for name in names), strict=True))
    for heads, keys, size, rank, *latent in (layers[number] for number in attention_layers(config)):
        if heads is None:
            raise InputError(f"model.path: {config.model_type} has no num_attention_heads")
        if rank:  # latent attention, whose keys are cached expanded
            found.append(Heads(heads, heads, latent[0] + latent[1], latent[2]))
        else:
            size = size or hidden // heads
            found.append(Heads(heads, keys or heads, size, size))
    if not found:
        raise InputError(f"model.path: {config.model_type} has no layers with attention")
    return found
