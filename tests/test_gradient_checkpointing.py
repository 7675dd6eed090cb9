"""Recomputing layers changes neither log-probabilities nor gradients, in models whose training mode
is another function."""

import copy

import pytest
import torch
import transformers
from test_update import gradient, make_config, make_samples

from bubblespec.engine.model import UnsupportedModel, enable_gradient_checkpointing, forward_hidden
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.packing import pack_sequences
from tests.helpers.models import GQA, SMALL, VOCAB

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# What would show: probabilities of 0.5, and factors between 0.5 and 1.5.
RANDOM_IN_TRAINING = {
    "opt": lambda: transformers.OPTConfig(
        **SMALL | {"intermediate_size": None},
        ffn_dim=96,
        word_embed_proj_dim=64,
        dropout=0.5,
        attention_dropout=0.5,
        layerdrop=0.5,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **GQA, **EXPERTS, router_jitter_noise=0.5, attention_dropout=0.5
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=2,
        n_head=4,
        attn_pdrop=0.5,
        resid_pdrop=0.5,
        embd_pdrop=0.5,
        initializer_range=0.2,
    ),
}


def compute(name: str, has_checkpoints: bool, dtype: torch.dtype):
    """Gradient and metrics of one step, and how often a norm of the layers has run."""
    torch.manual_seed(0)
    model = (
        transformers.AutoModelForCausalLM.from_config(RANDOM_IN_TRAINING[name]()).to(dtype).eval()
    )
    prepare_model(model, 64)
    if has_checkpoints:
        enable_gradient_checkpointing(model)
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)
    calls = []
    for layer in layers:
        inner = next(
            m
            for child, m in layer.named_modules()
            if isinstance(m, torch.nn.LayerNorm) or "norm" in child
        )
        inner.register_forward_pre_hook(lambda module, _: calls.append(module))
    config = make_config()
    config.model.gradient_checkpointing = has_checkpoints
    got, metrics = gradient(model, make_samples(), config)
    assert not any(module.training for module in model.modules())
    clock_free = {key: value for key, value in metrics.items() if "timing_s" not in key}
    return got, clock_free, len(calls)


@pytest.mark.parametrize(
    "name, dtype",
    [*((name, torch.float64) for name in RANDOM_IN_TRAINING), ("mixtral", torch.bfloat16)],
)
def test_nothing_random_comes_back(name, dtype):
    (plain, plain_metrics, calls), (got, metrics, more_calls) = (
        compute(name, has_checkpoints, dtype) for has_checkpoints in (False, True)
    )
    assert torch.equal(got, plain) and metrics == plain_metrics
    assert got.isfinite().all() and got.abs().max() > 1e-3
    assert more_calls == 2 * calls > 0


def test_a_forward_without_gradients_is_not_checkpointed(make_model, monkeypatch):
    model = make_model()
    prepare_model(model, 64)
    enable_gradient_checkpointing(model)
    monkeypatch.setattr("bubblespec.engine.model_checks.checkpoint", None)
    with torch.no_grad():
        forward_hidden(model, torch.arange(5), pack_sequences([5], torch.device("cpu")))


def test_a_copy_has_layers_of_its_own(make_model):
    """The reference of a KL term is a copy of the model."""
    model, tokens = make_model(), torch.arange(5)[None]
    enable_gradient_checkpointing(model)
    wanted = model(tokens).logits
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(reference(tokens).logits, wanted) and not model(tokens).logits.any()


def test_a_model_without_layers_to_checkpoint_is_refused():
    with pytest.raises(
        UnsupportedModel, match=r"^model.gradient_checkpointing: Linear has no layers"
    ):
        enable_gradient_checkpointing(torch.nn.Linear(2, 2))
