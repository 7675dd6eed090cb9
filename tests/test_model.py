"""Which models are served, and what those that are not get told."""

import pytest
import transformers

from bubblespec.engine.model import UnsupportedModel
from bubblespec.engine.model_checks import prepare_model
from tests.helpers.models import GQA, SMALL, VOCAB

STATE_SPACE = transformers.MambaConfig(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0
)
ENCODER_DECODER = transformers.T5Config(
    vocab_size=VOCAB, d_model=32, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0
)
DYNAMIC = {
    "rope_type": "dynamic",
    "factor": 2.0,
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "auto_class, config, why",
    [
        ("AutoModelForCausalLM", STATE_SPACE, "a recurrent state"),
        ("AutoModelForSeq2SeqLM", ENCODER_DECODER, "an encoder-decoder model"),
        (
            "AutoModelForCausalLM",
            transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2),
            "attention interface",
        ),
        ("AutoModelForCausalLM", transformers.Gemma2Config(**GQA, head_dim=16), "softcap"),
        (
            "AutoModelForCausalLM",
            transformers.LlamaConfig(**SMALL, rope_parameters=DYNAMIC),
            "dynamic rotary scaling",
        ),
        ("AutoModel", transformers.LlamaConfig(**SMALL), "no output head"),
    ],
)
def test_refused_with_the_reason_in_one_line(auto_class, config, why):
    model = getattr(transformers, auto_class).from_config(config).eval()
    with pytest.raises(UnsupportedModel, match=why) as error:
        prepare_model(model, 100)
    assert "\n" not in str(error.value)


def test_too_long_for_the_positions(make_model):
    with pytest.raises(UnsupportedModel, match="600 exceeds the model's 512 positions"):
        prepare_model(make_model("gpt2"), 600)


def test_dropout_is_turned_off():
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=1,
        n_head=2,
        attn_pdrop=0.5,
        resid_pdrop=0.5,
        embd_pdrop=0.5,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    prepare_model(model, 100)
    assert not any(module.training for module in model.modules())
