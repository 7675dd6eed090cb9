"""Stacked weights, which are the model's own parameters, and norms in one call."""

import copy

import pytest
import torch
import transformers
from torch.nn.functional import linear
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from bubblespec.config import ModelConfig, OptimConfig
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.decoder import Decoder, stacked
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.norms import CentredNorm, OffsetRMSNorm, RMSNorm, replace_norms
from bubblespec.engine.weights import join, stack, stacks_of, version_of
from bubblespec.learn.lora import add_adapter
from bubblespec.learn.optimizer import Optimizer
from tests.helpers.generation import as_dict, make_engine, make_prompts, make_rows
from tests.helpers.models import random_model, small_config

GREEDY = SamplingParams(temperature=0.0)


def make_policy(name: str = "qwen2", dtype: torch.dtype = torch.float64):
    model = random_model(small_config(name), dtype)
    prepare_model(model, 100)
    Decoder(model, stacked(model))
    return model


def rows_of(model) -> dict:
    engine = make_engine(model, 4, max_length=64)
    return as_dict(engine.run(make_rows(make_prompts(3, 9), 1, 8), GREEDY))


def fresh_rows(model) -> dict:
    other = random_model(model.config, model.dtype)
    other.load_state_dict({name: of.clone() for name, of in model.state_dict().items()})
    prepare_model(other, 100)
    return rows_of(other)


def change(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def bytes_of(tensors) -> int:
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def test_stacks_are_the_only_copy_of_weights():
    model = make_policy()
    found = stacks_of(model)
    assert sorted(map(len, found)) == [2, 2, 3, 3]
    whole = [tensor for of in found.values() for tensor in of.parameters()]
    parameters = list(model.parameters())
    assert bytes_of(whole + parameters) == sum(p.nbytes for p in parameters)
    assert not any(p.requires_grad for p in whole) and all(p.is_leaf for p in parameters)
    for layers, of in found.items():
        assert torch.equal(of.weight, torch.cat([layer.weight for layer in layers]))
        assert stack(model, layers) is of


@pytest.mark.parametrize("kind", ["foreach", "fused", "the run's"])
def test_adamw_changes_weights_and_stacks(kind):
    model, rows = make_policy(), rows_of
    before, memory = rows(model), [p.data_ptr() for p in model.parameters()]
    if kind == "the run's":
        config = OptimConfig(learning_rate=0.1)
        optimizer = Optimizer(model, config, 3, Ranks(torch.device("cpu")))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **{kind: True})
    versions = [version_of(of) for of in stacks_of(model).values()]
    model.set_attn_implementation("sdpa")
    model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    optimizer.step(*([0] if kind == "the run's" else []))
    assert [p.data_ptr() for p in model.parameters()] == memory
    assert rows(model) == fresh_rows(model) != before
    later = [version_of(of) for of in stacks_of(model).values()]
    is_later = [new > old for old, new in zip(versions, later, strict=True)]
    assert kind == "fused" or all(is_later), "torch's fused step counts no version"


def test_saved_models_are_ordinary(tmp_path):
    model = make_policy()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert not stacks_of(loaded) and loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    other = make_policy()
    change(other)
    memory = [p.data_ptr() for p in other.parameters()]
    other.load_state_dict(model.state_dict())
    assert rows_of(other) == rows_of(model)
    assert [p.data_ptr() for p in other.parameters()] == memory


def test_copied_model_shares_no_memory():
    model = make_policy()
    other = copy.deepcopy(model)
    assert not stacks_of(other)
    wanted = rows_of(model)
    change(other)
    assert rows_of(model) == wanted and rows_of(other) == fresh_rows(other) != wanted
    everything = [*model.parameters(), *other.parameters()]
    for of in (model, other):
        everything += [t for stacked in stacks_of(of).values() for t in stacked.parameters()]
    assert bytes_of(everything) == 2 * sum(p.nbytes for p in model.parameters())


def assign(model) -> None:
    """Load as transformers does: parameters are replaced by others."""
    other = random_model(small_config("qwen2"))
    change(other)
    model.load_state_dict(other.state_dict(), assign=True)


def assign_one(model) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(2 * layer.weight.detach())


def convert(model) -> None:
    change(model)
    model.to(torch.float32)


def there_and_back(model) -> None:
    model.to(torch.float32).to(torch.float64)
    change(model)


@pytest.mark.parametrize(
    "replace, num_lost", [(assign, 4), (assign_one, 1), (convert, 4), (there_and_back, 4)]
)
def test_replaced_weights_are_stacked_again(capsys, replace, num_lost):
    model = make_policy()
    join(model)
    assert not capsys.readouterr().err
    old = {layers: of.weight.data_ptr() for layers, of in stacks_of(model).items()}
    versions = {layers: version_of(of) for layers, of in stacks_of(model).items()}
    own = {layers: of.weight._version for layers, of in stacks_of(model).items()}
    before = rows_of(model)
    replace(model)
    join(model)
    line = f"warning: {num_lost} stacked weights had been replaced; the engine uses the new ones"
    assert capsys.readouterr().err.splitlines() == [line]
    join(model)
    assert not capsys.readouterr().err
    assert rows_of(model) == fresh_rows(model) != before
    for layers, of in stacks_of(model).items():
        assert (of.weight.data_ptr() == old[layers]) == (replace is not convert)
    changed = [version_of(of) != versions[layers] for layers, of in stacks_of(model).items()]
    assert sum(changed) == num_lost, "a copy made of the old weights would stay"
    written = [of.weight._version != own[layers] for layers, of in stacks_of(model).items()]
    assert sum(written) == num_lost * (replace is not convert)
    change(model)
    assert rows_of(model) == fresh_rows(model)


@pytest.mark.parametrize("has_bias", [(True, False, True), (False,) * 3, (False, False, True)])
def test_biases_of_some_layers_are_stacked_with_zeros(has_bias):
    layers = tuple(torch.nn.Linear(8, 3 + n, bias=of) for n, of in enumerate(has_bias))
    model, x = torch.nn.ModuleList(layers), torch.randn(5, 8)
    wanted = torch.cat([layer(x) for layer in layers], dim=1)
    of_all = stack(model, layers)
    torch.testing.assert_close(of_all(x), wanted)
    assert [layer.bias is not None for layer in layers] == list(has_bias)
    replaced = [layer for layer in layers if layer.bias is not None] + [layers[1]]
    for layer in replaced:  # biases by themselves, and a weight
        name = "weight" if layer is replaced[-1] else "bias"
        setattr(layer, name, torch.nn.Parameter(torch.randn_like(getattr(layer, name))))
        join(model)
        wanted = torch.cat([linear(x, of.weight, of.bias) for of in layers], dim=1)
        torch.testing.assert_close(of_all(x), wanted)


def test_adapted_layers_are_not_stacked():
    pytest.importorskip("peft", reason="pip install -r requirements-lora.txt")
    model = random_model(small_config("llama"))
    add_adapter(model, ModelConfig(lora_r=4, lora_alpha=8), 0)
    prepare_model(model, 100)
    rows = rows_of(model)
    assert not stacks_of(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    assert rows_of(model) == fresh_rows_of_adapted(model) != rows


def fresh_rows_of_adapted(model) -> dict:
    other = random_model(small_config("llama"))
    add_adapter(other, ModelConfig(lora_r=4, lora_alpha=8), 0)
    other.load_state_dict(model.state_dict())
    prepare_model(other, 100)
    return rows_of(other)


@pytest.mark.parametrize("part", range(3))
def test_version_changes_with_every_part(part):
    layers = tuple(torch.nn.Linear(4, 3) for _ in range(3))
    of = stack(torch.nn.ModuleList(layers), layers)
    for layer, found in ((layers[part], of), (layers[part], layers[part])):
        before = version_of(found)
        with torch.no_grad():
            layer.weight.mul_(2.0)
        assert version_of(found) != before


# Norms


@pytest.mark.parametrize(
    "own, kind, dtype, tolerance",
    [
        (LlamaRMSNorm, RMSNorm, torch.float32, 1e-6),
        (LlamaRMSNorm, RMSNorm, torch.float64, 1e-14),
        (GemmaRMSNorm, OffsetRMSNorm, torch.float64, 1e-14),
        (Cohere2LayerNorm, CentredNorm, torch.float64, 1e-14),
    ],
)
def test_replaced_norm_computes_the_formula(own, kind, dtype, tolerance):
    norm = own(24, eps=1e-2).to(dtype)
    torch.nn.init.normal_(norm.weight)
    assert replace_norms(torch.nn.ModuleList([norm])) and type(norm) is kind
    x = torch.randn(2, 5, 24, dtype=dtype)
    x[0] *= 1e-2
    centred = x - x.mean(-1, keepdim=True) * (kind is CentredNorm)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-2).sqrt()
    wanted = scaled * (norm.weight + (kind is OffsetRMSNorm))
    torch.testing.assert_close(norm(x), wanted, rtol=tolerance, atol=tolerance)


def test_norms_that_compute_something_else_stay():
    """Those of Gemma and Cohere round elsewhere outside of float64."""

    class Halved(LlamaRMSNorm):
        def forward(self, x):
            return super().forward(x) / 2

    gemma = GemmaRMSNorm(24)
    torch.nn.init.normal_(gemma.weight)
    others = gemma, Cohere2LayerNorm(24), Halved(24), torch.nn.LayerNorm(24)
    norms = torch.nn.ModuleList([*others, LlamaRMSNorm(24)])
    kinds, x = [type(norm) for norm in norms], torch.randn(3, 24)
    before = [norm(x) for norm in norms]
    assert not replace_norms(norms)
    assert [type(norm) for norm in norms] == [*kinds[:4], RMSNorm]
    for norm, wanted in zip(norms, before, strict=True):
        torch.testing.assert_close(norm(x), wanted)
