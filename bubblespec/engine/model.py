"""A Hugging Face causal LM as the engine and the trainer use it: hidden states of packed tokens, and the output head.

The model itself is never patched. `prepare_model` refuses, with the reason, whatever the packed forward cannot compute
exactly: first by its configuration, then by comparing a packed forward with the model's own on random tokens.
"""

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.engine import attention
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.packing import CachePacking, SequencePacking, pack_rows, pack_sequences


class UnsupportedModel(ValueError):
    """This model cannot be served by the packed forward; the message says why."""


def forward_hidden(
    model: PreTrainedModel, input_ids: torch.Tensor, packing: CachePacking | SequencePacking, kernel: str = "sdpa"
) -> torch.Tensor:
    """Last hidden states [N, hidden] of packed input_ids [N]; positions come from the packing."""
    out = model.base_model(
        input_ids=input_ids[None],
        position_ids=packing.position[None],
        use_cache=False,
        packing=packing,
        kernel=kernel,
    )
    return out.last_hidden_state[0]


def output_head(model: PreTrainedModel) -> torch.nn.Module:
    """The module that maps hidden states [N, hidden] to logits [N, vocabulary]."""
    return model.get_output_embeddings()


def prepare_model(model: PreTrainedModel, max_length: int) -> None:
    """Switch the model to the packed attention, turn dropout off, and check that it still gives the model's own logits.

    max_length: longest prompt plus response, in tokens. Raises UnsupportedModel.
    """
    _check_configuration(model, max_length)
    _disable_dropout(model)
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _nothing  # it reads token ids back from the device in every forward
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    tokens = torch.randint(model.config.vocab_size, (12,), generator=torch.Generator().manual_seed(0)).to(model.device)
    with torch.no_grad():
        try:
            reference = model(input_ids=tokens[None], use_cache=False).logits[0]
            if not reference.isfinite().all():
                raise ValueError("its logits are not finite: the weights are damaged, or too large for their type")
            model.set_attn_implementation(attention.NAME)
            _compare(model, tokens, reference)
        except Exception as error:  # the model's own code runs here
            raise UnsupportedModel(f"{type(model).__name__}: {' '.join(str(error).split())}") from error


def _nothing(*args, **kwargs) -> None:
    pass


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Recompute each layer in the backward pass; takes effect in training mode."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _check_configuration(model: PreTrainedModel, max_length: int) -> None:
    name, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: an encoder-decoder model; the engine serves decoder-only models")
    layer_types = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if getattr(model, "_is_stateful", False) or layer_types:
        kinds = f" ({', '.join(sorted(layer_types))})" if layer_types else ""
        raise UnsupportedModel(
            f"{name}: layers with a recurrent state{kinds}; the engine can only roll back layers whose state is a K/V cache"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{name}: does not use transformers' attention interface, so the engine cannot serve it unpatched")
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{name}: has no output head; give a causal language model")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_length > limit:
        raise UnsupportedModel(
            f"rollout.max_prompt_length + rollout.max_completion_length = {max_length} is beyond the model's {limit} positions"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        original = parameters.get("original_max_position_embeddings") or limit
        if parameters.get("rope_type") in ("dynamic", "longrope") and max_length > original:
            raise UnsupportedModel(
                f"{name}: its {parameters['rope_type']} rotary scaling changes with the longest row of a batch beyond {original} "
                f"tokens, so a row's tokens would depend on its neighbours; keep prompt and response within {original}"
            )


def _disable_dropout(model: PreTrainedModel) -> None:
    """The probability ratio compares two forwards of the same weights, so they must not differ by dropout."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def _compare(model: PreTrainedModel, tokens: torch.Tensor, reference: torch.Tensor) -> None:
    """The model's own logits [T, V] against a packed training forward and a ragged cached one (two rows in two chunks)."""
    head, device, length = output_head(model), tokens.device, len(tokens)
    packed = head(forward_hidden(model, tokens.repeat(2), pack_sequences([length] * 2, device)))
    cache = KVCache(2, length)
    first = pack_rows(cache, np.array([0, 0]), np.array([length - 2, 1]), device)
    forward_hidden(model, torch.cat((tokens[:-2], tokens[:1])), first)
    second = pack_rows(cache, np.array([length - 2, 1]), np.array([2, length - 1]), device)
    cached = head(forward_hidden(model, torch.cat((tokens[-2:], tokens[1:])), second))
    scale = reference.abs().max().clamp(min=1.0)
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-3}.get(reference.dtype, 0.1)
    for what, got, wanted in (
        ("packed sequences", packed[length:], reference),
        ("the K/V cache", cached, torch.cat((reference[-2:], reference[1:]))),
    ):
        difference = ((got - wanted).abs().max() / scale).item()
        if not difference <= tolerance:
            raise ValueError(
                f"logits through {what} differ from the model's own by {difference:.1e} of their size; "
                "it computes something (between tokens, or on the logits) that the engine does not know of"
            )
