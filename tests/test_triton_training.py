"""The kernels of an update against plain formulas in float64, and whole updates by them against
those of torch: on a GPU, or in triton's interpreter."""

import pytest
import torch
from test_decoder import LENGTH, LIKE_LLAMA, build
from test_triton_ops import ACTS, DEVICE, DTYPE, assert_near, norm_of, randn, rotate
from test_triton_ops import pytestmark as pytestmark

from bubblespec.engine.model import (
    OWN_HIDDEN,
    enable_gradient_checkpointing,
    forward_hidden,
    pack_sequences,
)
from bubblespec.engine.model_checks import prepare_model
from bubblespec.learn.losses import divergence
from tests.helpers import traffic
from tests.helpers.graphs import needs_interpreter, stand_in
from tests.test_update import (
    ADVANTAGES,
    NUM_PROMPTS,
    gradient,
    make_config,
    make_samples,
    teacher_of,
)

triton_training = pytest.importorskip("bubblespec.engine.ops.triton_training")
trained = pytest.importorskip("bubblespec.engine.trained")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def needs_grad(*shape: int) -> torch.Tensor:
    return randn(*shape).double().requires_grad_()


@pytest.mark.parametrize("size", [5, 4096, 9000])
def test_moved_numbers_have_the_bits_of_torch(size):
    half = torch.float16 if DEVICE == "cpu" else DTYPE  # the interpreter cuts bits of bfloat16 off
    total, part = randn(size, dtype=torch.float32), randn(size, dtype=half)
    wanted = total + part
    triton_training.add_to(total, part)
    assert torch.equal(total, wanted)
    version = part._version
    triton_training.round_into(part, total)
    assert torch.equal(part, total.to(half)) and part._version > version


@pytest.mark.parametrize("has_total", [False, True])
@pytest.mark.parametrize("columns", [64, 300])
def test_add_norm_gradients(has_total, columns):
    x, residual = needs_grad(70, columns), needs_grad(70, columns)
    weight, eps = needs_grad(columns), 1e-3
    total = x + residual
    out = total / (total.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    grad, total_grad = randn(70, columns), randn(70, columns)
    loss = (out * grad).sum() + (total * total_grad).sum() * has_total
    wanted = torch.autograd.grad(loss, (x, weight))
    given = [t.detach().to(DTYPE).requires_grad_() for t in (x, residual, weight)]
    sums = triton_training.AddNorm.apply(*given, norm_of(given[2].detach(), eps))
    assert_near(sums[0], total)
    assert_near(sums[1], out)
    upward, sums = ((total_grad, grad), sums) if has_total else (grad, sums[1])
    found = torch.autograd.grad(sums, given, upward)
    assert torch.equal(found[0], found[1])
    assert_near(found[0], wanted[0])
    assert_near(found[2] / 70, wanted[1] / 70)


@pytest.mark.parametrize("rotary", [16, 12])
def test_rotation_and_its_transpose(rotary):
    x, position = randn(5, 7, 16), torch.tensor([3, 0, 1, 2, 9], device=DEVICE)
    angle = randn(10, rotary // 2, dtype=torch.float32)
    cos, sin = angle.cos(), angle.sin()
    tables, found = (cos.double()[position], sin.double()[position]), x.clone()
    triton_training.rotate(found, 4, position, (cos, sin), is_back=False)
    assert_near(found[:, :4], rotate(x[:, :4].double(), *tables))
    assert torch.equal(found[:, 4:], x[:, 4:])
    triton_training.rotate(found, 4, position, (cos, sin), is_back=True)
    assert_near(found, x)


@pytest.mark.parametrize("act", ACTS)
def test_gated_gradients(act):
    gate_up, grad = needs_grad(3, 2 * 1030), randn(3, 1030)
    with torch.no_grad():
        gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -1e-3])
    gate, up = gate_up.chunk(2, 1)
    (ACTS[act](gate) * up * grad).sum().backward()
    given = gate_up.detach().to(DTYPE).requires_grad_()
    triton_training.Gated.apply(given, act).backward(grad)
    assert_near(given.grad, gate_up.grad)


@pytest.mark.parametrize("beta", [None, 0.0, 0.3, 1.0])
def test_one_pass_over_logits(beta):
    """The logits take two blocks; columns behind the tokens have a gradient of 0."""
    rows, tokens, temperature = 3, 5000, 0.7
    logits, other = (torch.randn(rows, 5008, device=DEVICE).to(DTYPE) * 3 for _ in range(2))
    target = torch.tensor([0, 4999, 77], device=DEVICE)
    own = logits.double().requires_grad_()
    log_q, log_p = (t.double()[:, :tokens].div(temperature).log_softmax(-1) for t in (own, other))
    wanted = [log_q.gather(1, target[:, None])[:, 0]]
    if beta is not None:
        wanted.append(divergence(log_q, log_p, beta))
    how = None if beta is None else other, tokens, 1 / temperature, beta or 0.0
    found = triton_training.HeadValues.apply(logits.requires_grad_(), target, *how)
    assert found.dtype == torch.float32
    assert_near(found, torch.stack(wanted), 1e-5)
    factors = randn(*found.shape, dtype=torch.float32)
    (torch.stack(wanted) * factors).sum().backward()
    (of_logits,) = torch.autograd.grad(found, logits, factors)
    assert_near(of_logits * 100, own.grad * 100)
    assert not of_logits[:, tokens:].any() and own.grad[:, :tokens].abs().max() > 0.1


def hidden_and_gradients(compute, model, lengths: list[int]):
    model.zero_grad()
    packing = pack_sequences(lengths, model.device)
    ids = torch.arange(sum(lengths)) % 90
    hidden = compute(model, ids, packing, "sdpa")
    hidden.pow(3).sum().backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return hidden.detach(), named


@pytest.mark.parametrize("name", sorted(LIKE_LLAMA - {"gemma"}))
def test_layers_and_gradients_equal_those_of_modules(monkeypatch, name):
    """With checkpoints, too; among the weights are biases, and norms of heads."""
    model, lengths = build(name, torch.float32), [5, 1, 12]  # beyond a window of 7
    prepare_model(model, LENGTH)
    hidden, wanted = hidden_and_gradients(forward_hidden, model, lengths)
    stand_in(monkeypatch)
    for has_checkpoints in (False, True) if name == "llama" else (False,):
        if has_checkpoints:
            enable_gradient_checkpointing(model)
        found, gradients = hidden_and_gradients(trained.hidden, model, lengths)
        assert_near(found, hidden)
        assert gradients.keys() == wanted.keys()
        for key, of in wanted.items():
            assert (gradients[key] - of).norm() < 1e-5 * of.norm(), key


def test_models_that_kernels_do_not_serve_keep_their_modules(make_model, monkeypatch, capsys):
    stand_in(monkeypatch)
    right = triton_training.rotate
    monkeypatch.setattr(triton_training, "rotate", lambda x, *rest, **how: x.mul_(1.5))
    assert OWN_HIDDEN not in vars(make_model("llama", torch.float32, 64))
    line = "training computes transformers' modules: logits through layers"
    assert line in capsys.readouterr().err
    monkeypatch.setattr(triton_training, "rotate", right)
    assert OWN_HIDDEN not in vars(make_model("gpt2", torch.float32, 64))


@pytest.mark.parametrize("loss_type, at_once", [("grpo", 1 << 26), ("distillation", 97)])
def test_update_by_kernels_has_the_same_gradient(make_model, monkeypatch, loss_type, at_once):
    samples, advantages = make_samples(generations=1), ADVANTAGES[:NUM_PROMPTS]
    config = make_config(loss_type=loss_type)
    make = lambda name="llama", **options: make_model(name, torch.float32, 64)  # noqa: E731

    def run(has_kernels: bool):
        model = make()
        assert (OWN_HIDDEN in vars(model)) == has_kernels
        return gradient(model, samples, config, advantages, teacher=teacher_of(make, config))

    wanted, metrics = run(False)
    stand_in(monkeypatch)
    monkeypatch.setattr("bubblespec.learn.learner.MAX_LOGITS", at_once)
    found, others = run(True)
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    assert others["loss"] == pytest.approx(metrics["loss"], rel=1e-4, abs=1e-6)


def test_few_kernels_move_few_bytes():
    """A micro-batch of 15,360 tokens and 28 layers, counted on meta tensors."""
    (_, old), (layer, new) = traffic.by_kind(False), traffic.by_kind(True)
    total = {
        kind: sum(moved for _, moved in of.values()) for kind, of in (("old", old), ("new", new))
    }
    assert layer["layers"] <= 16 and layer["products"] == 12
    assert total["new"] < 0.42 * total["old"]
    assert new["bookkeeping"][1] < 0.1 * total["new"] < old["bookkeeping"][1]


test_models_that_kernels_do_not_serve_keep_their_modules.pytestmark = needs_interpreter
test_few_kernels_move_few_bytes.pytestmark = needs_interpreter
test_layers_and_gradients_equal_those_of_modules.pytestmark += needs_interpreter
test_update_by_kernels_has_the_same_gradient.pytestmark += needs_interpreter
