"""Linear layers on a CPU with packed weights against products in float64, and their choice."""

import copy
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bubblespec.checkpoint import list_checkpoints, read_state
from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.model_checks import prepare_model
from bubblespec.mechanisms import cpu_linear as linear_module
from bubblespec.mechanisms.cpu_linear import (
    MARGIN,
    ROWS,
    PackedLinear,
    can_choose,
    choose_packed,
    generating_layers,
    has_onednn,
    measure,
    refresh_copies,
    use_packed,
)
from bubblespec.mechanisms.tp_tail.shards import partial_linear
from bubblespec.setup import build
from tests.helpers.runs import SHORT, same_weights, train_here, weights

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")

ALL_ROWS = range(33)
EPS = torch.finfo(torch.float32).eps
K, M = 96, 312  # in and out


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_of(weight: torch.Tensor, bias: torch.Tensor | None, rows=ALL_ROWS) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = torch.nn.Parameter(weight.clone())
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias.clone())
    use_packed(layer, rows)
    return layer


def assert_rounds_like_a_product(
    found: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
):
    """found = a @ b (+ bias) in float32: at most n eps sum |a| |b| off for sums of n terms in any
    order (Higham, Accuracy and stability of numerical algorithms, equation 3.5; n eps < 0.01)."""
    a, b = a.double(), b.double()
    exact, size, terms = a @ b, a.abs() @ b.abs(), a.shape[-1]
    if bias is not None:
        exact, size, terms = exact + bias.double(), size + bias.double().abs(), terms + 1
    assert found.dtype == torch.float32 and found.shape == exact.shape
    assert ((found.double() - exact).abs() <= terms * EPS * size).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 33])
def test_generation_products_are_exact_up_to_rounding(rows, has_bias):
    weight, bias = random(M, K, seed=1), random(M, seed=2) if has_bias else None
    layer = layer_of(weight, bias)
    with torch.inference_mode():
        for x in (random(rows, K), random(K, rows).t()):
            assert_rounds_like_a_product(layer(x), x, weight.t(), bias)
            assert_rounds_like_a_product(layer(x[None])[0], x, weight.t(), bias)


def test_chosen_rows_of_generation_alone_are_packed(monkeypatch):
    """Training and other numbers of rows compute as without copies, bit for bit."""
    layer, seen = layer_of(random(M, K), None, (2, 3)), []

    def noted(x, copy, bias=None):
        seen.append(len(x))
        return x @ layer.weight.t()

    monkeypatch.setattr(linear_module, "packed_linear", noted)
    for rows in (0, 1, 2, 3, 4, 300):
        x = random(rows, K)
        with torch.no_grad():
            layer(x)
        with torch.inference_mode():
            assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))
            partial_linear(layer, (slice(0, M),), False, x)
    assert seen == [2, 2, 3, 3]


@pytest.mark.parametrize("is_rowwise", [False, True])
@pytest.mark.parametrize("rows", [(), ALL_ROWS])
def test_shards_add_up_to_the_whole_layer(rows, is_rowwise):
    weight, bias, x = random(M, K), random(M), random(1, 5, K, seed=2)
    cuts = slice(0, 40), slice(40, K if is_rowwise else M)
    layers = [layer_of(weight, bias, rows) for _ in cuts]  # of two ranks
    for factor in (1.0, 3.0):
        parts = []
        for layer, cut in zip(layers, cuts, strict=True):
            with torch.no_grad():
                layer.weight.copy_(factor * weight)
            with torch.inference_mode():
                given = x[..., cut].contiguous() if is_rowwise else x
                parts.append(partial_linear(layer, (cut,), is_rowwise, given)[0])
        whole, of_bias = (sum(parts), None) if is_rowwise else (torch.cat(parts, -1), bias)
        assert_rounds_like_a_product(whole, x[0], factor * weight.t(), of_bias)


def test_generation_uses_the_current_weights(make_model):
    model = make_model("llama", torch.float32)
    model.lm_head.weight = model.model.embed_tokens.weight
    use_packed(model, ALL_ROWS)
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert model.lm_head in layers and len(layers) == 2 * 7 + 1
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def products() -> list[torch.Tensor]:
        found = []
        with torch.inference_mode():
            for layer in layers:
                x = random(5, layer.in_features)
                found.append(layer(x))
                assert_rounds_like_a_product(found[-1], x, layer.weight.t())
        return found

    before = products()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2)
    changed = [not torch.equal(a, b) for a, b in zip(before, products(), strict=True)]
    assert changed == [layer is model.lm_head for layer in layers]
    model.load_state_dict(state)
    refresh_copies(model)
    assert all(map(torch.equal, before, products()))


def test_parameters_of_packed_layers_stay_unchanged(make_model, tmp_path):
    model, plain = make_model("qwen2", torch.float32), make_model("qwen2", torch.float32)
    memory = {name: p.data_ptr() for name, p in model.named_parameters()}
    use_packed(model, ALL_ROWS)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == memory
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in plain.state_dict().items())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    with torch.inference_mode():
        x = random(4, model.lm_head.in_features)
        assert model.lm_head(x).any() and not twin.lm_head(x).any()


def test_other_layers_stay_unchanged():
    Other = type("Other", (torch.nn.Linear,), {})  # a class that may compute something else
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4), Other(8, 4))
    use_packed(model, ())
    assert [type(layer) for layer in model] == [torch.nn.Linear, torch.nn.Linear, Other]
    use_packed(model, ALL_ROWS)
    assert [type(layer) for layer in model] == [PackedLinear, PackedLinear, Other]


# The choice


def test_measure_covers_all_layers_and_changes_no_state(make_model):
    """Two rounds once time is up, stacks in place of their layers; state and gradients stay."""
    model = make_model("qwen2", torch.float32)
    prepare_model(model, 100)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    state, reads = torch.get_rng_state(), iter(range(10_000))
    seconds = measure(model, lambda: float(next(reads)))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    layers = list(generating_layers(model))
    shapes = sorted((layer.in_features, layer.out_features) for layer in layers)
    assert shapes == sorted([(64, 128), (64, 64), (64, 192), (96, 64)] * 2 + [(64, 97)])
    assert (seconds == len(layers)).all() and seconds.shape == (2, len(ROWS))


def test_measure_takes_some_layers_of_large_models(make_model, monkeypatch):
    monkeypatch.setattr(linear_module, "MAX_ELEMENTS", 20_000)
    monkeypatch.setattr(linear_module, "MAX_IN_LAYER", 3_000)
    reads = iter(range(10_000))
    seconds = measure(make_model("qwen2", torch.float32), lambda: float(next(reads)))
    assert (seconds == 8).all()


# A float32 run whose forwards do not depend on the clock.
OPTIONS = [*SHORT, "model.dtype=float32", "speculative.method=none", "rollout.max_num_seqs=16"]
OPTIONS += ["optim.learning_rate=1e-3", "run.max_steps=2"]
CONFIG = "configs/tiny_cpu.yaml"


def config_of(folder, *overrides: str):
    return load_config(CONFIG, [*OPTIONS, f"run.output_dir={folder}", *overrides])


def times_of(*packed_s: float) -> np.ndarray:
    """Return what `measure` returns where torch takes a second."""
    return np.stack([np.ones(len(ROWS)), np.resize(packed_s, len(ROWS))])


FAST, PLAIN = times_of(0.5), times_of(1.0)


def test_ranks_decide_together_and_by_a_margin(monkeypatch, make_model):
    limit = 1 / MARGIN
    everyone = [FAST, times_of(1.99 * limit**2, 1.99 * limit**2, 1.5, 1.5, 1.5, 1.7, 1.9)]
    mine = iter(everyone)

    class Two(Ranks):
        def all_gather(self, array):
            return np.stack(everyone) if array.dtype == np.float64 else np.zeros((2, 1))

    chosen = []
    monkeypatch.setattr(linear_module, "measure", lambda model: next(mine))
    for _ in range(2):
        model = make_model("llama", torch.float32)
        chosen.append(choose_packed(Two(torch.device("cpu")), model, None))
    assert chosen[0] == chosen[1]
    # The mean is just below limit at first, sqrt(0.75) then, and above limit for the last two.
    assert chosen[0]["packed"] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_rows_of_measured_products_are_all_up_to_32():
    assert [count for rows in ROWS.values() for count in rows] == list(range(1, 33))
    assert all(measured in rows for measured, rows in ROWS.items())


def test_choice_can_be_switched_off(monkeypatch, tmp_path, capfd):
    """By the key; other types and devices have no choice. Then no phase of set-up is shown."""
    monkeypatch.setattr(linear_module, "measure", None)
    trainer = build(config_of(tmp_path, "model.cpu_linear=torch"), Ranks(torch.device("cpu")))
    trainer.lock.close()
    err = capfd.readouterr().err
    assert "timing the engine" in err and "timing linear layers" not in err
    model, auto = trainer.learner.model, config_of("x")
    assert not trainer.chosen and not any(isinstance(m, PackedLinear) for m in model.modules())
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert can_choose(auto, torch.nn.Linear(4, 4, dtype=dtype)) == (dtype == torch.float32)
        assert not can_choose(auto, torch.nn.Linear(4, 4, device="meta", dtype=dtype))


def test_resumed_run_keeps_the_choice(monkeypatch, tmp_path):
    def run(folder, seconds, *overrides: str):
        monkeypatch.setattr(linear_module, "measure", lambda model: seconds)
        return train_here(folder, "loss.kl_coef=0.1", *overrides, config=CONFIG, short=OPTIONS)

    whole = run(tmp_path / "whole", FAST)
    assert whole.chosen["linear"]["packed"] == list(range(1, 33))
    assert not any(isinstance(m, PackedLinear) for m in whole.learner.reference.modules())
    run(tmp_path / "parts", FAST, "run.max_steps=1")
    (folder,) = list_checkpoints(tmp_path / "parts")
    assert json.loads(json.dumps(whole.chosen["linear"])) == read_state(folder)["linear"]
    continued = run(tmp_path / "parts", PLAIN)
    assert any(isinstance(module, PackedLinear) for module in continued.learner.model.modules())
    assert same_weights(weights(tmp_path / "parts", 2), weights(tmp_path / "whole", 2))

    monkeypatch.setattr(linear_module, "describe_hardware", lambda device: {"cpu": "another"})
    saved = read_state(folder)["linear"]
    chosen = choose_packed(Ranks(torch.device("cpu")), whole.learner.model, saved)
    assert chosen["hardware"] == {"cpu": "another"}
