"""Gradient checkpointing changes neither log-probabilities nor gradients, in models that are random
in training mode."""

import copy

import pytest
import torch
from test_update import gradient, make_config, make_samples

from bubblespec.engine.model import (
    enable_gradient_checkpointing,
    forward_hidden,
    pack_sequences,
)
from bubblespec.engine.model_checks import prepare_model
from tests.helpers.models import GPT2, GQA, SMALL, config_of, random_model

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
HALF = dict.fromkeys(("attention_dropout", "dropout", "layerdrop", "router_jitter_noise"), 0.5)
HALF |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.5)
OPT = SMALL | {"intermediate_size": None, "ffn_dim": 96, "word_embed_proj_dim": 64}
# Randomness that would show: probabilities of 0.5, and factors between 0.5 and 1.5.
RANDOM_IN_TRAINING = {
    "opt": ("OPT", OPT | HALF),
    "mixtral": ("Mixtral", GQA | EXPERTS | HALF),
    "gpt2": ("GPT2", GPT2 | HALF),
}


def compute(name: str, has_checkpoints: bool, dtype: torch.dtype):
    model = random_model(config_of(*RANDOM_IN_TRAINING[name]), dtype)
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
def test_checkpoints_leave_gradients_unchanged(name, dtype):
    (plain, plain_metrics, calls), (got, metrics, more_calls) = (
        compute(name, has_checkpoints, dtype) for has_checkpoints in (False, True)
    )
    assert torch.equal(got, plain) and metrics == plain_metrics
    assert got.isfinite().all() and got.abs().max() > 1e-3
    assert more_calls == 2 * calls > 0


def test_forward_without_gradients_is_not_checkpointed(make_model, monkeypatch):
    model = make_model(max_length=64)
    enable_gradient_checkpointing(model)
    monkeypatch.setattr("bubblespec.engine.model.checkpoint", None)
    with torch.no_grad():
        forward_hidden(model, torch.arange(5), pack_sequences([5], torch.device("cpu")))


def test_copied_model_has_separate_layers(make_model):
    """The reference of a KL term is a copy of the model."""
    model, tokens = make_model(), torch.arange(5)[None]
    enable_gradient_checkpointing(model)
    wanted = model(tokens).logits
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(reference(tokens).logits, wanted) and not model(tokens).logits.any()


def test_checkpoints_of_model_without_layers_are_refused():
    with pytest.raises(ValueError, match=r"^model.gradient_checkpointing: Linear has no layers"):
        enable_gradient_checkpointing(torch.nn.Linear(2, 2))
