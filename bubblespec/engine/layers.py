"""What a configuration says about single decoder layers, which need not be alike (Gemma 4)."""

from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from bubblespec.errors import InputError


class Heads(NamedTuple):
    """Attention heads of a layer, as its keys and values are cached."""

    num_queries: int
    num_keys: int
    key_size: int
    value_size: int


def of_layers(config: PreTrainedConfig, name: str, default: Any = None) -> list[Any]:
    """Return an attribute of each decoder layer; default where it is absent or None."""
    layers = config.get_text_config(decoder=True).per_layer_config
    values = [getattr(layer, name, None) for layer in layers]
    for number, value in enumerate(values):
        if isinstance(value, list | tuple) and len(value) == len(values):
            values[number] = value[number]
    return [default if value is None else value for value in values]


def layer_heads(config: PreTrainedConfig) -> list[Heads]:
    """Return the heads of each decoder layer. Raises InputError for a model without attention."""
    hidden = config.get_text_config(decoder=True).hidden_size
    names = ["num_attention_heads", "num_key_value_heads", "head_dim", "kv_lora_rank"]
    names += ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    found = []
    for heads, keys, size, rank, *latent in zip(
        *(of_layers(config, n) for n in names), strict=True
    ):
        if heads is None:
            raise InputError(f"model.path: {config.model_type} has no num_attention_heads")
        if rank:  # latent attention, whose keys are cached expanded
            found.append(Heads(heads, heads, latent[0] + latent[1], latent[2]))
        else:
            size = size or hidden // heads
            found.append(Heads(heads, keys or heads, size, size))
    return found
