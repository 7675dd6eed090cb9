"""Kernels of linear layers on a CPU against products in float64, and the choice between kernels."""

import copy
import json
import os

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bubblespec.checkpoint import list_checkpoints, read_state
from bubblespec.config_file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.mechanisms import cpu_linear as linear_module
from bubblespec.mechanisms.cpu_linear import (
    KERNELS,
    MIN_TRAINING_ROWS,
    PACKED,
    ROWS,
    TORCH,
    TRANSPOSED,
    Call,
    FastLinear,
    OneDNNLinear,
    Plan,
    can_choose,
    choose,
    choose_linear,
    has_onednn,
    layers_by_shape,
    measure,
    refresh_copies,
    shape_of,
    use_plans,
)
from bubblespec.mechanisms.tp_tail.shards import partial_linear
from bubblespec.setup import build
from tests.helpers.runs import SHORT, same_weights, train_here, weights

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")

ALL_PACKED = (Call(PACKED),) * len(ROWS)
ONEDNN = Plan(ALL_PACKED, trains=True)
EPS = torch.finfo(torch.float32).eps
K, M = 96, 312  # in and out


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_of(weight: torch.Tensor, bias: torch.Tensor | None, plan: Plan) -> FastLinear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = torch.nn.Parameter(weight.clone())
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias.clone())
    use_plans(layer, {shape_of(layer): plan})
    assert isinstance(layer, FastLinear)
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
@pytest.mark.parametrize("pad_to", [0, 48])
@pytest.mark.parametrize("kernel", KERNELS)
def test_generation_products_are_exact_up_to_rounding(kernel, pad_to, rows, has_bias):
    """Inputs may have any strides, as attention leaves them."""
    weight, bias = random(M, K, seed=1), random(M, seed=2) if has_bias else None
    calls = (*[Call(kernel, pad_to)] * (len(ROWS) - 1), Call(kernel))
    layer = layer_of(weight, bias, Plan(calls, trains=True))
    with torch.inference_mode():
        for x in (random(rows, K), random(K, rows).t()):
            assert_rounds_like_a_product(layer(x), x, weight.t(), bias)
            assert_rounds_like_a_product(layer(x[None])[0], x, weight.t(), bias)


@pytest.mark.parametrize("is_rowwise", [False, True])
@pytest.mark.parametrize(
    "calls",
    [(), ALL_PACKED, (Call(TRANSPOSED),) * len(ROWS), (Call(TRANSPOSED, 6),) * 5 + ALL_PACKED[5:]],
)
def test_shards_add_up_to_the_whole_layer(calls, is_rowwise):
    """Shards are of uneven size, and follow an update of the weight."""
    weight, bias, x = random(M, K), random(M), random(1, 5, K, seed=2)
    cuts = slice(0, 40), slice(40, K if is_rowwise else M)
    layers = [layer_of(weight, bias, Plan(calls, trains=True)) for _ in cuts]  # of two ranks
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


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 130])
def test_training_products_are_exact_up_to_rounding(rows, has_bias):
    x, weight = random(1, rows, K).requires_grad_(), random(M, K, seed=1).requires_grad_()
    grad = random(1, rows, M, seed=3)
    bias = random(M, seed=2).requires_grad_() if has_bias else None
    result = OneDNNLinear.apply(x, weight, bias)
    result.backward(grad)
    with torch.no_grad():
        assert_rounds_like_a_product(result[0], x[0], weight.t(), bias)
        assert_rounds_like_a_product(x.grad[0], grad[0], weight)
        assert_rounds_like_a_product(weight.grad, grad[0].t(), x[0])
        if has_bias:
            assert_rounds_like_a_product(bias.grad[None], torch.ones(1, rows), grad[0])
    x.grad = weight.grad = None
    OneDNNLinear.apply(x, weight.detach(), None).sum().backward()
    assert x.grad is not None
    OneDNNLinear.apply(x.detach(), weight, None).sum().backward()
    assert weight.grad.shape == weight.shape


def test_training_uses_onednn_from_some_rows_on(monkeypatch):
    layer, seen = layer_of(random(M, K), None, Plan(trains=True)), []

    def noted(x, weight, bias=None):
        seen.append(len(x))
        return x @ weight.t()

    monkeypatch.setattr("bubblespec.mechanisms.cpu_linear.onednn_linear", noted)
    layer(random(MIN_TRAINING_ROWS - 1, K))
    with torch.inference_mode():
        layer(random(MIN_TRAINING_ROWS, K))
    assert not seen
    layer(random(MIN_TRAINING_ROWS, K)).sum().backward()
    assert seen == [MIN_TRAINING_ROWS, M]  # the input needs no gradient
    with torch.no_grad():  # old log-probabilities: the kernel of the forward that is differentiated
        layer(random(MIN_TRAINING_ROWS, K))
    assert len(seen) == 3


def test_generation_uses_the_current_weights(make_model):
    """After a change in place and after a load, with a tied head."""
    model = make_model("llama", torch.float32)
    model.lm_head.weight = model.model.embed_tokens.weight
    use_plans(model, dict.fromkeys(layers_by_shape(model), ONEDNN))
    layers = [module for module in model.modules() if isinstance(module, FastLinear)]
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


def test_parameters_with_plans_stay_unchanged(make_model, tmp_path):
    model, plain = make_model("qwen2", torch.float32), make_model("qwen2", torch.float32)
    memory = {name: p.data_ptr() for name, p in model.named_parameters()}
    use_plans(model, dict.fromkeys(layers_by_shape(model), ONEDNN))
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


def test_layers_without_plan_stay_unchanged():
    Other = type("Other", (torch.nn.Linear,), {})  # a class that may compute something else
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4), Other(8, 4))
    use_plans(model, {"8x8": Plan(), "8x4": ONEDNN})
    assert [type(layer) for layer in model] == [torch.nn.Linear, FastLinear, Other]


# The choice


def times_of(packed: float = 1.0, train: float = 1.0, **one) -> np.ndarray:
    """Return a table of `measure` for one shape, from ms: 1 by torch, 3 transposed, `packed`, and
    `train` for oneDNN. one: another time at one of ROWS, for instance `torch_0`."""
    usual = {TORCH: (1.0, 1.0), TRANSPOSED: (3.0, np.inf), PACKED: (packed, train)}
    table = [
        [*(one.get(f"{kernel}_{number}", seconds) for number in range(len(ROWS))), training]
        for kernel, (seconds, training) in usual.items()
    ]
    return np.array([table]) * 1e-3


def calls_of(**one: Call) -> tuple[Call, ...]:
    """Torch's, but for some of ROWS, given as `at_0` and so on."""
    return tuple(one.get(f"at_{number}", Call()) for number in range(len(ROWS)))


@pytest.mark.parametrize(
    "seconds, wanted",
    [
        (times_of(), Plan()),
        (times_of(packed=0.95, train=0.95), Plan()),  # not by a margin
        (times_of(packed=0.8), Plan(ALL_PACKED)),
        (
            times_of(packed_2=0.8),
            Plan(calls_of(at_0=Call(PACKED, 3), at_1=Call(PACKED, 3), at_2=Call(PACKED))),
        ),
        (times_of(packed=0.8, packed_0=4.0), Plan((Call(PACKED, 2), *ALL_PACKED[1:]))),
        (times_of(torch_1=1.5, packed=2.0), Plan(calls_of(at_1=Call(TORCH, 3)))),
        (times_of(torch_0=0.7, packed=0.8), Plan((Call(), *ALL_PACKED[1:]))),
        (1e-3 * times_of(packed=0.5), Plan()),  # too little to be seen
        (
            times_of(transposed_1=0.7),
            Plan(calls_of(at_0=Call(TRANSPOSED, 2), at_1=Call(TRANSPOSED))),
        ),
        (
            times_of(transposed_3=0.8, packed_3=0.75, torch_2=0.7),
            Plan(calls_of(at_0=Call(TORCH, 3), at_1=Call(TORCH, 3), at_3=Call(TRANSPOSED))),
        ),
        (times_of(train=0.5), Plan(trains=True)),
        (times_of(train=0.5, packed=0.8), ONEDNN),
    ],
)
def test_choose_takes_the_simplest_fast_kernel(seconds, wanted):
    assert choose(["8x8"], seconds) == {"8x8": wanted}


def test_unmeasured_row_counts_use_the_next_call():
    """Between ROWS the next one's call is used, padded to as many rows if few are torch's."""
    calls = calls_of(at_0=Call(TORCH, 6), at_4=Call(PACKED))
    by_rows = Plan(calls).by_rows()
    assert len(by_rows) == ROWS[-1] + 1
    assert [by_rows[count] for count in (0, 1, 4, 5, 6, 7, 8, 23, 25, 48)] == [
        calls[0], calls[0], Call(), Call(PACKED), Call(PACKED), Call(TORCH, 8), Call(),
        Call(TORCH, 24), Call(), Call(),
    ]  # fmt: skip
    assert set(Plan().by_rows()) == {Call()}


def test_measure_covers_all_shapes_and_changes_no_state(make_model):
    """Two rounds of all shapes once time is up; model, gradients and random state stay."""
    model = make_model("qwen2", torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    state, reads = torch.get_rng_state(), iter(range(10_000))
    seconds = measure(model, lambda: float(next(reads)))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(isinstance(module, FastLinear) for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    shapes = {shape: len(layers) for shape, layers in layers_by_shape(model).items()}
    assert shapes == {"64x96": 4, "96x64": 2, "64x64": 4, "64x97": 1, "64x32": 4}
    assert seconds.shape == (len(shapes), len(KERNELS), len(ROWS) + 1) and (seconds > 0).all()
    assert np.isinf(seconds).sum() == len(shapes)
    assert next(reads) <= 2 * (sum(shapes.values()) + 3 * len(shapes)) * seconds[0].size


# A float32 run whose forwards do not depend on the clock.
OPTIONS = [*SHORT, "model.dtype=float32", "speculative.method=none", "rollout.max_num_seqs=16"]
OPTIONS += ["optim.learning_rate=1e-3", "run.max_steps=2"]
CONFIG = "configs/tiny_cpu.yaml"


def config_of(folder, *overrides: str):
    return load_config(CONFIG, [*OPTIONS, f"run.output_dir={folder}", *overrides])


def faked(seconds: np.ndarray):
    """`measure` of a machine on which every shape takes these times."""
    return lambda model: np.repeat(seconds, len(layers_by_shape(model)), axis=0)


FAST, PLAIN = times_of(packed=0.5, train=0.5), times_of()


def test_ranks_decide_together(monkeypatch, make_model):
    """Ranks choose by the mean of their measurements."""
    model, mine = make_model("llama", torch.float32), iter([FAST, PLAIN])
    everyone = [faked(times)(model) for times in (FAST, times_of(packed=1.5, train=0.6))]

    class Two(Ranks):
        def gather(self, array):
            return np.stack(everyone) if array.dtype == np.float64 else np.zeros((2, 1))

    config, chosen = config_of("x"), []
    for _ in range(2):
        monkeypatch.setattr(linear_module, "measure", faked(next(mine)))
        chosen.append(choose_linear(config, Two(torch.device("cpu")), model, None))
    assert chosen[0] == chosen[1]
    # sqrt(0.5 * 1.5) and sqrt(0.5 * 0.6)
    assert set(chosen[0]["plans"].values()) == {ONEDNN}


def test_choice_can_be_switched_off(monkeypatch, tmp_path, capfd):
    """By the key; other types and devices have no choice. Then no phase of set-up is shown."""
    monkeypatch.setattr(linear_module, "measure", None)
    trainer = build(config_of(tmp_path, "model.cpu_linear=torch"), Ranks(torch.device("cpu")))
    trainer.lock.close()
    err = capfd.readouterr().err
    assert "timing the engine" in err and "timing linear layers" not in err
    model, auto = trainer.learner.model, config_of("x")
    assert trainer.linear is None and not any(isinstance(m, FastLinear) for m in model.modules())
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert can_choose(auto, torch.nn.Linear(4, 4, dtype=dtype)) == (dtype == torch.float32)
        assert not can_choose(auto, torch.nn.Linear(4, 4, device="meta", dtype=dtype))


def test_resumed_run_keeps_the_choice(monkeypatch, tmp_path):
    """Resumed weights equal those of an uninterrupted run; another CPU measures again."""

    def run(folder, seconds, *overrides: str):
        monkeypatch.setattr(linear_module, "measure", faked(seconds))
        return train_here(folder, "loss.kl_coef=0.1", *overrides, config=CONFIG, short=OPTIONS)

    whole = run(tmp_path / "whole", FAST)
    assert set(whole.linear["plans"].values()) == {ONEDNN}
    layers = [m for m in whole.learner.reference.modules() if isinstance(m, FastLinear)]
    assert {module.plan for module in layers} == {Plan(trains=True)}
    run(tmp_path / "parts", FAST, "run.max_steps=1")
    (folder,) = list_checkpoints(tmp_path / "parts")
    assert json.loads(json.dumps(whole.linear)) == read_state(folder)["linear"]
    continued = run(tmp_path / "parts", PLAIN)
    assert any(isinstance(module, FastLinear) for module in continued.learner.model.modules())
    assert same_weights(weights(tmp_path / "parts", 2), weights(tmp_path / "whole", 2))

    monkeypatch.setattr(linear_module, "describe_hardware", lambda device: {"cpu": "another"})
    resume = f"run.resume_from_checkpoint={os.path.abspath(folder)}"
    config, saved = config_of(tmp_path / "parts", resume), read_state(folder)["linear"]
    chosen = choose_linear(config, Ranks(torch.device("cpu")), whole.learner.model, saved)
    assert chosen["hardware"] == {"cpu": "another"}
