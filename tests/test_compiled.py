"""The compiled reduction of logits: compared with the eager one before it is used."""

import numpy as np
import pytest
import torch

from bubblespec.engine import compiled
from bubblespec.engine.compiled import compared, compile_reduction, first_difference
from bubblespec.engine.noise import gumbel
from bubblespec.engine.sampling import SamplingParams, best_and_sum, sample
from tests.helpers.fake_cuda import DEVICE, FakeCuda
from tests.helpers.models import VOCAB

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_is_kept():
    compile_reduction.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_compared_input_covers_all_noise(dtype):
    """Rows allow one to all tokens; the reduction equals that of whole tensors."""
    logits, keys, ids = compared(300, 500, dtype, CPU)
    num_allowed = logits.isfinite().sum(-1)
    assert num_allowed.min() == 1 and num_allowed.max() == 500
    wide = logits.double() if dtype == torch.float64 else logits.float()
    noisy = wide + gumbel(keys, ids, wide.dtype)
    best, index, total = best_and_sum(logits, keys, ids)
    assert torch.equal(index, noisy.argmax(-1)) and torch.equal(best, noisy.amax(-1))
    assert total.dtype == wide.dtype
    exact = np.logaddexp.reduce(wide.double().numpy(), axis=-1)
    np.testing.assert_allclose(total, exact, rtol=1e-5)
    quantiles = (best - wide.gather(-1, index[:, None])[:, 0]).quantile(torch.tensor(0.1).to(best))
    assert quantiles < 1.0, "not only the largest noise"


def wrong(what: str):
    def reduce(logits, keys, ids):
        best, index, total = best_and_sum(logits, keys, ids)
        if what == "value":
            best[-1] = best[-1].nextafter(torch.tensor(9.0))
        if what == "winner":
            index[-1] += 1
        if what == "sum":
            total += 1e-3
        return best, index, total * (1 + 1e-7)

    return reduce


@pytest.mark.parametrize(
    "what, expected",
    [
        ("nothing", None),
        ("value", "1 of 2048 compiled winners differ from eager ones"),
        ("winner", "1 of 2048 compiled winners differ from eager ones"),
        ("sum", "compiled sums differ from eager ones by more than rounding"),
    ],
)
def test_wrong_reduction_is_found_by_the_last_bit(what, expected):
    assert first_difference(wrong(what), 200, torch.float32, CPU) == expected


@pytest.mark.parametrize("failure", ["compiler", "difference"])
def test_failed_compilation_leaves_reduction_eager(monkeypatch, capsys, failure):
    def compile_(function, **options):
        if failure == "compiler":
            raise RuntimeError("no such\ncompiler")
        return wrong("winner")

    monkeypatch.setattr(torch, "compile", compile_)
    given = compared(30, 200, torch.float32, CPU)
    for _ in range(2):
        got = compiled.compiled_best_and_sum(*given)
        assert all(map(torch.equal, got, best_and_sum(*given)))
    (line,) = capsys.readouterr().err.splitlines()
    why = {"compiler": "RuntimeError: no such compiler", "difference": "1 of 2048 compiled"}
    assert line.startswith("warning: sampling is eager: ") and why[failure] in line


def test_one_graph_for_any_number_of_positions(monkeypatch):
    """The whole graph is compiled twice: for a single position, and for any other number."""
    graphs = []

    def compile_(function, fullgraph, options):
        def backend(graph, inputs):
            graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
            return graph

        assert options.keys() == compiled.OPTIONS.keys()
        torch._dynamo.reset()
        return torch_compile(function, fullgraph=fullgraph, backend=backend)

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile_)
    reduce, problem = compile_reduction(200, torch.bfloat16, CPU)
    assert problem is None
    with torch.inference_mode():
        for count in (2, 5, 64, 1, 700):
            given = compared(count, 200, torch.bfloat16, CPU)
            assert all(map(torch.equal, reduce(*given), best_and_sum(*given)))
    assert len(graphs) == 2


def test_compiling_starts_no_worker_processes(monkeypatch):
    from torch._inductor import compile_fx, config

    used = []

    def compile_(graph, inputs, config_patches, **others):
        with config.patch(config_patches):
            used.append(config.compile_threads)  # more than one are processes
        return graph

    monkeypatch.setattr(config, "compile_threads", 8)
    monkeypatch.setattr(compile_fx, "compile_fx", compile_)
    torch._dynamo.reset()
    reduce, problem = compile_reduction(200, torch.float32, CPU)
    assert problem is None and reduce is not best_and_sum
    assert used == [1, 1] and config.compile_threads == 8


def test_cuda_without_triton_is_eager(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reduce, line = compile_reduction(100, torch.bfloat16, torch.device("cuda"))
    assert reduce is best_and_sum and "the package triton is not installed" in line


@torch.inference_mode()
def test_sampling_around_compiled_reduction_has_no_pass():
    """Plain sampling from bfloat16 then needs no pass over the logits."""

    def compiled(logits, keys, ids):
        best = torch.zeros(6, device=DEVICE)
        return best, best.long(), best

    with FakeCuda() as cuda:
        logits = torch.zeros(6, VOCAB, dtype=torch.bfloat16, device=DEVICE)
        keys = torch.zeros(6, 4, dtype=torch.int32, device=DEVICE)
        generated, counts = torch.zeros(6, dtype=torch.int64, device=DEVICE), []
        for reduce in (best_and_sum, compiled):
            cuda.clear()
            cuda.large = logits.numel()
            sample(logits, keys, generated, SamplingParams(), reduce)
            counts.append(cuda.passes)
    assert counts[0] > 20 and counts[1] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_winners_on_the_gpu(dtype):
    _, problem = compile_reduction(151_936, dtype, torch.device("cuda", 0))
    assert problem is None


def test_strided_logits_are_compacted(monkeypatch):
    given, logits = [], torch.randn(3, 12)[:, :10]
    reduce = lambda logits, *_: given.append(logits)  # noqa: E731
    monkeypatch.setattr(compiled, "compile_reduction", lambda *of: (reduce, None))
    compiled.compiled_best_and_sum(logits, None, None)
    assert given[0].is_contiguous() and torch.equal(given[0], logits)
