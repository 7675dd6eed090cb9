"""Values of single layers, as configurations give them: one for all, a list, or by layer."""

import transformers

from bubblespec.engine.model import Heads, layer_heads, of_layers
from tests.helpers.models import GQA, config_of


def test_values_of_layers_are_read_in_every_form():
    config = config_of("Llama")
    assert of_layers(config, "head_dim") == [16, 16]
    config.sizes, config.head_dim = [96, 48], None
    assert of_layers(config, "sizes") == [96, 48]
    assert of_layers(config, "sliding_window", 7) == of_layers(config, "head_dim", 7) == [7, 7]
    assert layer_heads(config) == [Heads(4, 2, 16, 16)] * 2
    config.per_layer_config = {1: {"num_key_value_heads": 4, "hidden_act": "gelu"}}
    assert layer_heads(config) == [Heads(4, 2, 16, 16), Heads(4, 4, 16, 16)]
    nested = transformers.Gemma3Config(text_config=GQA | {"head_dim": 8})
    assert layer_heads(nested) == [Heads(4, 2, 8, 8)] * 2
