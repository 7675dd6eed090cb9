"""Kernels that fail or differ, and what a run does then: torch computes the same."""

import numpy as np
import pytest
import torch
from test_architectures import HYBRIDS, SERVED, build
from test_graphs import LENGTH, PAGED, WARM, make_few, make_model, plain_rows

from bubblespec.engine import ops, trial
from bubblespec.engine.model import OWN_HIDDEN, forward_hidden, pack_sequences
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.ops import torch_ops
from bubblespec.engine.sampling import keys_of, stream_counters, stream_keys
from bubblespec.engine.trial import choose_operations, problem_of, replace, sizes_of
from tests.helpers.documented import says
from tests.helpers.generation import Drafter, as_dict, make_engine
from tests.helpers.graphs import needs_interpreter, stand_in
from tests.helpers.models import config_of, random_model

if ops.has_triton():
    from tests.helpers.broken_kernels import KERNELS, NO_COMPILER, NO_HEADER, fail, spoil
else:
    KERNELS = {}

pytestmark = needs_interpreter
ONE_LAYER = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
FAULTS = [(kernel, how) for kernel in KERNELS for how in ("fails", "differs")]
FAULTS.remove(("_plan", "differs"))  # others would write behind their tensors
NO_PAGES = PAGED | {"page_size": None}
alone = lambda text: [text]  # noqa: E731


@pytest.fixture(scope="module")
def model():
    return make_model(**ONE_LAYER)


@pytest.fixture(scope="module")
def hybrid():
    return build(*HYBRIDS["qwen3_5"], torch.float32)


@pytest.fixture(scope="module")
def wanted(model):
    """Rows and gradients by torch's operations."""
    return plain_rows(model, WARM, make_few()), gradients(model)


def gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    packing = pack_sequences([5, 1, 12], model.device)
    forward_hidden(model, torch.arange(18) % 90, packing).pow(3).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def nothing(own, sizes) -> list:
    return []


def inject(monkeypatch, kernel: str, how: str) -> None:
    if how == "fails":
        fail(monkeypatch, kernel, RuntimeError("out of resource: shared memory"))
    else:
        spoil(monkeypatch, kernel)


@pytest.mark.parametrize("kernel, how", FAULTS)
def test_trial_finds_the_kernel(monkeypatch, model, hybrid, kernel, how):
    """The other operations are not tried here: each has passed in another test."""
    stand_in(monkeypatch)
    operation = KERNELS[kernel]
    own = {name: trial.TRIALS[name] if name == operation else nothing for name in ops.OPERATIONS}
    monkeypatch.setattr(trial, "TRIALS", own)
    inject(monkeypatch, kernel, how)
    tried = hybrid if operation == ops.STATES else model
    (line,) = choose_operations("auto", tried, True, alone)
    also = {ops.LAYERS} if operation in (ops.ADD_NORM, ops.GATED) else set()
    assert set(ops.replaced) == {operation} | also
    assert says("one kernel: it raises, or its numbers differ", line)
    cause = "out of resource" if how == "fails" else "differ from torch's"
    assert cause in line and "\n" not in line


@pytest.mark.parametrize("operation", ops.OPERATIONS)
def test_run_goes_on_with_torch(monkeypatch, model, wanted, operation):
    """With the same tokens and gradients, and without a launch of the operation's kernels."""
    stand_in(monkeypatch)
    replace((operation,), "it fails")
    for kernel in [name for name, of in KERNELS.items() if of in ops.replaced]:
        fail(monkeypatch, kernel, AssertionError(f"{kernel} is launched"))
    prepare_model(model, LENGTH)
    assert (OWN_HIDDEN in vars(model)) == (not {ops.ATTEND, ops.LAYERS} & set(ops.replaced))
    engine = make_engine(model, 6, **PAGED if operation != ops.ATTEND else NO_PAGES)
    graphs = engine.runner.graphs
    assert (graphs is None) == (operation in (ops.ATTEND, ops.ROWS))
    rows, grads = wanted
    assert as_dict(engine.run(make_few(), WARM, Drafter(rows, 0.3))) == rows
    assert graphs is None or (graphs.pool.problem is None and graphs.pool.num_replays)
    for name, found in gradients(model).items():
        assert (found - grads[name]).norm() <= 1e-5 * grads[name].norm(), name


def test_layers_replaced_later_are_computed_by_modules(monkeypatch, model, wanted):
    """As those of a reference or teacher, which is prepared before gradients are compared."""
    stand_in(monkeypatch)
    prepare_model(model, LENGTH)
    assert OWN_HIDDEN in vars(model)
    replace((ops.LAYERS,), "gradients differ")
    fail(monkeypatch, None, AssertionError("no kernel is launched"))
    for name, found in gradients(model).items():
        assert torch.equal(found, wanted[1][name]), name


def test_rows_are_compared_by_their_own_size():
    """Attention over many keys is a tenth of that over one: its sign must not hide."""
    right = torch.tensor([[3.0, -1.0], [0.1, 0.02]]).bfloat16()
    assert trial._difference([right.clone()], [right]) is None
    wrong = right * torch.tensor([[1.0], [-1.0]]).bfloat16()
    assert "50% of its results differ from torch's" in trial._difference([wrong], [right])


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_kernels_pass_their_trials(monkeypatch, name):
    stand_in(monkeypatch)
    sizes = sizes_of(random_model(config_of(*SERVED[name]), torch.float32), True)
    assert [problem_of(operation, sizes) for operation in ops.OPERATIONS] == [None] * 10


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "falcon_h1"])
def test_kernels_of_states_pass_their_trial(monkeypatch, name):
    stand_in(monkeypatch)
    sizes = sizes_of(build(*HYBRIDS[name], torch.float32))
    assert sizes.states and problem_of(ops.STATES, sizes) is None


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama4", "qwen3_5"])
def test_trial_of_attention_has_what_the_model_has(monkeypatch, name):
    stand_in(monkeypatch)
    sizes = sizes_of(random_model(config_of(*SERVED[name]), torch.float32))
    options = [options for _, options in sizes.attention]
    assert any(of.cap for of in options) == (name == "gemma2")
    assert any(of.chunk for of in options) == (name == "llama4")
    assert sizes.has_sinks == (name == "gpt_oss")
    assert problem_of(ops.ATTEND, sizes) is None


def test_without_a_compiler_torch_computes_everything(monkeypatch, capsys, model, wanted):
    stand_in(monkeypatch)
    for error, what in ((NO_COMPILER, "gcc python3-dev"), (NO_HEADER, "python3-dev")):
        with monkeypatch.context() as patch:
            fail(patch, None, error)
            (line,) = choose_operations("auto", model, False, alone)
            assert says("no C compiler, or no Python.h", line) and f": apt install {what} (" in line
            with pytest.raises(ValueError, match=r"the kernel of attention fails: no ") as ends:
                choose_operations("triton", model, False, alone)
            assert says("any of these, with `model.kernels=triton`", f"error: {ends.value}")
            choose_operations("auto", model, False, alone)
            prepare_model(model, LENGTH)
            engine = make_engine(model, 6, **NO_PAGES)
            assert engine.runner.forward.ops is torch_ops and engine.runner.pages is None
            assert as_dict(engine.run(make_few(), WARM)) == wanted[0]
    assert capsys.readouterr().err == "", "the model is not blamed"


def test_all_ranks_replace_what_fails_on_one(monkeypatch, model):
    import json

    stand_in(monkeypatch)
    of_other = json.dumps(["", {ops.SAMPLE: "no memory"}])

    def gather(text: str) -> list[str]:
        others = dict.fromkeys(ops.OPERATIONS, "")
        return [text, json.dumps(["", others | json.loads(of_other)[1]])]

    (line,) = choose_operations("auto", model, False, gather)
    assert list(ops.replaced) == [ops.SAMPLE] and "sampling in place of kernels: no memory" in line
    lost = json.dumps(["model.kernels: the kernel of rows fails", {}])
    with pytest.raises(ValueError, match="kernel of rows fails"):
        choose_operations("auto", model, False, lambda text: [text, lost])


def test_lost_device_ends_the_trial_with_one_line(monkeypatch, model):
    stand_in(monkeypatch)
    fail(monkeypatch, "_gated", RuntimeError("CUDA error: an illegal memory access was seen"))
    with pytest.raises(ValueError, match=r"kernel of gated units fails: .*illegal") as lost:
        choose_operations("auto", model, False, alone)
    assert says("the GPU itself, in a trial at the start", f"error: {lost.value}")


def test_torch_is_chosen_without_a_trial(monkeypatch, model, wanted):
    stand_in(monkeypatch)
    fail(monkeypatch, None, AssertionError("no kernel is launched"))
    assert choose_operations("torch", model, False, alone) == []
    prepare_model(model, LENGTH)
    engine = make_engine(model, 6, **NO_PAGES)
    assert as_dict(engine.run(make_few(), WARM)) == wanted[0]


def test_triton_needs_a_gpu(model):
    with pytest.raises(ValueError, match=r"^model\.kernels: triton needs a GPU"):
        choose_operations("triton", model, False, alone)
    assert choose_operations("auto", model, False, alone) == []


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 12345, -3])
def test_keys_of_counters_are_those_of_philox(seed):
    random = np.random.default_rng(0)
    of = [random.integers(0, 1 << bits, 50) for bits in (62, 32, 12, 20)]
    counters = torch.from_numpy(stream_counters(*of).view(np.int32))
    assert np.array_equal(keys_of(counters, seed).numpy(), stream_keys(seed, *of))


test_triton_needs_a_gpu.pytestmark = []
