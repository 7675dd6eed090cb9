"""Forwards as graphs against the plain forward.

On a CPU, where there are no CUDA graphs, `Tape` stands in for them: it records every tensor
operation of a forward and replays those on the same memory, so that whatever a forward takes from
the host is frozen as it would be in a graph. The kernels are stood in for by their documented
meaning, written with tensors alone. With a GPU the same tests also run on the real thing.
"""

import inspect
import sys
import types

import numpy as np
import pytest
import torch
from test_generator import ARCHITECTURES, STOP, Drafter, as_dict, make_prompts, make_rows
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bubblespec.config import OptimConfig
from bubblespec.engine import graphs
from bubblespec.engine.engine import Engine
from bubblespec.engine.graphs import NARROW, ForwardGraphs, Shape, graph_shapes, pad
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import forward_hidden, prepare_model
from bubblespec.engine.packing import PAGE, pack_rows
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.learn.optimizer import Optimizer
from tests.helpers.models import VOCAB

LENGTH = 130
# New tokens of five rows in one forward after the other: decoding, prompts, windows, rows that
# wait, padding of 0 to 31 tokens.
MIXES = [
    [3, 1, 40, 0, 9],
    [1, 1, 1, 1, 1],
    [0, 0, 0, 7, 0],
    [1, 1, 0, 1, 1],
    [5, 1, 1, 17, 2],
    [NARROW + 3, 1, 0, 2, 1],
    [1, 0, 8, 3, 20],
    [0, 0, 0, 0, 1],
    [1, 30, 1, 1, 1],
]


def varlen_attn(
    query,
    key,
    value,
    cu_q,
    cu_k,
    max_q,
    max_k,
    *,
    scale,
    window_size,
    enable_gqa,
    seqused_k,
    num_splits,
) -> torch.Tensor:
    """torch's variable-length attention as documented, causal from the last key backwards. What
    breaks its rules becomes NaN."""
    left, right = window_size
    assert (
        right == 0
        and cu_q.dtype == cu_k.dtype == seqused_k.dtype == torch.int32
        and len(cu_q) == len(cu_k)
    )
    token = torch.arange(len(query))
    sequence = torch.searchsorted(cu_q, token, right=True) - 1
    begin, used = cu_q[sequence], seqused_k[sequence]
    # Where the token is among the keys of its sequence.
    position = used - (cu_q[sequence + 1] - begin) + token - begin
    index = torch.arange(len(key)) - cu_k[sequence][:, None]
    seen = (index >= 0) & (index <= position[:, None])
    if left >= 0:
        seen &= index >= position[:, None] - left
    fold = query.shape[1] // key.shape[1]
    assert enable_gqa == (fold > 1)
    key, value = key.repeat_interleave(fold, 1), value.repeat_interleave(fold, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)
    is_right = (
        (token - begin < max_q)
        & (used <= max_k)
        & (used <= (cu_k[1:] - cu_k[:-1])[sequence])
        & (position >= 0)
    )
    return out.masked_fill(~is_right[:, None, None], float("nan"))


def flash_attn_varlen_func(
    query, key, value, cu_q, cu_k, max_q, max_k, softmax_scale, causal, window_size, block_table
) -> torch.Tensor:
    """The flash_attn package's, for a cache in pages: a sequence's keys are those in its pages, one
    after the other."""
    assert causal and key.shape[1] == PAGE
    key, value = (t[block_table.clamp(max=len(t) - 1)].flatten(0, 2) for t in (key, value))
    begin = torch.arange(len(cu_q), dtype=torch.int32) * block_table.shape[1] * PAGE
    options = {
        "enable_gqa": query.shape[1] > key.shape[1],
        "seqused_k": cu_k[1:] - cu_k[:-1],
        "num_splits": 1,
    }
    return varlen_attn(
        query,
        key,
        value,
        cu_q,
        begin,
        max_q,
        max_k,
        scale=softmax_scale,
        window_size=window_size,
        **options,
    )


class NoWaits(TorchDispatchMode):
    """Raises where the host would have to wait for a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (
            torch.ops.aten.item.default,
            torch.ops.aten.is_nonzero.default,
            torch.ops.aten.nonzero.default,
        ):
            raise RuntimeError("called a synchronizing CUDA operation")
        return function(*args, **(kwargs or {}))


def rehearse(run) -> None:
    with NoWaits():
        run()


class Tape(NoWaits):
    """Records tensor operations; replays them on the memory that they had."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for function, args, kwargs, recorded in self.calls:
            for old, new in zip(
                tree_leaves(recorded), tree_leaves(function(*args, **kwargs)), strict=True
            ):
                if (
                    isinstance(old, torch.Tensor)
                    and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()
                ):
                    old.copy_(new)


class Captures:
    """Counts captures; graphs share one memory, so a replay spoils what the others have
    returned."""

    def __init__(self):
        self.sizes: list[int] = []
        self.results: list[torch.Tensor] = []
        self.pools: list = []

    def __call__(self, run, pool):
        tape = Tape()
        with tape:
            hidden = run()

        def replay() -> None:
            for other in self.results:
                other.fill_(float("nan"))
            tape.replay()

        self.sizes.append(len(hidden))
        self.results.append(hidden)
        self.pools.append(pool)
        return replay, hidden, ("the pool",)


def stand_in(monkeypatch) -> Captures:
    """From now on there are graphs on a CPU."""
    captures = Captures()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setitem(
        sys.modules,
        "flash_attn",
        types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func),
    )
    monkeypatch.setattr(graphs, "rehearse", rehearse)
    monkeypatch.setattr(graphs, "capture", captures)
    monkeypatch.setattr(
        "bubblespec.engine.runner.can_capture", lambda device, kernel: kernel != "sdpa"
    )
    return captures


@pytest.fixture
def on_cpu(monkeypatch) -> Captures:
    return stand_in(monkeypatch)


GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.fixture(params=["cpu", GPU])
def device(request) -> torch.device:
    if request.param == "cpu":
        request.getfixturevalue("on_cpu")
    return torch.device(request.param)


def prepared(make_model, name: str, device: torch.device):
    """In float64 on a CPU, in bfloat16 on a GPU, whose kernels compute in nothing finer."""
    model = make_model(name, torch.float64 if device.type == "cpu" else torch.bfloat16).to(device)
    prepare_model(model, LENGTH)
    return model


def assert_equal(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Up to rounding: the last bits of float64, or what another order of summation makes of
    bfloat16."""
    tolerance = 1e-9 if got.dtype == torch.float64 else 0.03
    scale = wanted.abs().max().clamp(min=1.0)
    assert ((got - wanted).abs().max() / scale).item() < tolerance


def feed(model, cache: KVCache, sequences, start, count, run) -> torch.Tensor:
    """Hidden states of the next count[r] tokens of all sequences r, by run(tokens, packing)."""
    packing = pack_rows(cache, np.array(start), np.array(count), model.device)
    return run(
        np.concatenate([s[a : a + n] for s, a, n in zip(sequences, start, count, strict=True)]),
        packing,
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padded_forwards_equal_plain_ones(make_model, device, name):
    """Nine forwards of five rows: hidden states and, in the slots of rows, keys and values."""
    model = prepared(make_model, name, device)
    sequences = np.random.default_rng(0).integers(1, VOCAB, (5, LENGTH))
    plain, padded = KVCache(5, LENGTH), KVCache(5, LENGTH, num_spare=1)
    captured = ForwardGraphs(model, padded, "varlen", 200)
    start = np.zeros(5, np.int64)

    def eager(tokens, packing):
        return forward_hidden(model, torch.from_numpy(tokens).to(device), packing, "sdpa")

    with torch.inference_mode():
        for count in MIXES:
            wanted = feed(model, plain, sequences, start, count, eager)
            got = feed(model, padded, sequences, start, count, captured.forward)
            assert got.isfinite().all() and len(got) >= len(wanted)
            assert_equal(got[: len(wanted)], wanted)
            start += count
        for layer in plain.keys:
            assert_equal(padded.keys[layer][:5], plain.keys[layer])
            assert_equal(padded.values[layer][:5], plain.values[layer])
    assert captured.num_replays == len(MIXES) and not captured.is_off


def test_keys_in_pages(make_model, on_cpu):
    """The flash_attn package reads the cache by page tables."""
    model = make_model("mistral-window")
    prepare_model(model, LENGTH)
    sequences = np.random.default_rng(0).integers(1, VOCAB, (3, 2 * PAGE))
    plain, padded = KVCache(3, 2 * PAGE), KVCache(3, 2 * PAGE, num_spare=1)
    captured = ForwardGraphs(model, padded, "flash_attn", 4)
    start = np.zeros(3, np.int64)
    with torch.inference_mode():
        for count in ([1, 0, 2], [1, 1, 1], [0, 2, 1], [0, 0, 1]):
            wanted = feed(
                model,
                plain,
                sequences,
                start,
                count,
                lambda t, p: forward_hidden(model, torch.from_numpy(t), p),
            )
            assert_equal(
                feed(model, padded, sequences, start, count, captured.forward)[: len(wanted)],
                wanted,
            )
            flat = feed(
                model,
                plain,
                sequences,
                start,
                count,
                lambda t, p: forward_hidden(model, torch.from_numpy(t), p, "flash_attn"),
            )
            assert_equal(flat, wanted)
            start += count
    assert captured.num_replays == 4


def test_the_operator_of_torch_2_11(make_model, on_cpu, monkeypatch):
    """Where torch's function does not know `seqused_k`, the operator below it is called."""

    def operator(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        return_debug_mask, *, scale, window_size_left, window_size_right, seqused_k,
    ) -> tuple:  # fmt: skip
        assert dropout_p == 0.0 and not return_debug_mask and is_causal == (window_size_left < 0)
        window, fold = (window_size_left, window_size_right), query.shape[1] > key.shape[1]
        options = {
            "scale": scale,
            "window_size": window,
            "enable_gqa": fold,
            "seqused_k": seqused_k,
            "num_splits": 1,
        }
        return (
            varlen_attn(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, **options),
            None,
            None,
            None,
            None,
        )

    schema = [
        argument.name
        for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments
    ]
    assert schema[: len(names := list(inspect.signature(operator).parameters))] == names
    monkeypatch.setattr("bubblespec.engine.attention._has_varlen", lambda: False)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    for name in ("llama", "mistral-window"):
        model = make_model(name)
        prepare_model(model, 100)
        wanted = as_dict(
            make_generator(model, "sdpa").run(make_rows(make_prompts(3), 1, 12), PARAMS)
        )
        assert (
            as_dict(
                make_generator(model, "varlen", max_batch_tokens=16).run(
                    make_rows(make_prompts(3), 1, 12), PARAMS
                )
            )
            == wanted
        )


@pytest.mark.parametrize("count", [*MIXES, [0, 0, 0, 0, 0]])
def test_what_padding_says_to_the_kernel(count):
    """Read back sequence by sequence, it is the rows' new tokens and their keys, and padding that
    meets nobody."""
    cache, start = KVCache(5, LENGTH, num_spare=1), np.array([4, 0, 31, 2, 60])
    packing = pack_rows(cache, start, np.array(count), torch.device("cpu"))
    tokens = np.random.default_rng(1).integers(1, VOCAB, sum(count))
    size = min(b for b in graphs.BUCKETS if b >= sum(count))
    ids, slot, position, cu_q, cu_k, used = pad(tokens, packing, size)
    assert (
        cu_q[0] == 0
        and cu_q[-1] == size
        and (np.diff(cu_q) >= 0).all()
        and (np.diff(cu_k) >= 0).all()
    )
    fed = np.flatnonzero(count)
    for sequence in range(size):
        q = np.arange(cu_q[sequence], cu_q[sequence + 1])
        keys = {divmod(k, LENGTH) for k in range(cu_k[sequence], cu_k[sequence] + used[sequence])}
        written = list(zip(slot[q].tolist(), position[q].tolist(), strict=True))
        if sequence < len(fed):
            row = fed[sequence]
            assert keys == {(row, p) for p in range(start[row] + count[row])}
            assert written == [(row, p) for p in range(start[row], start[row] + count[row])]
        elif len(q):
            assert keys == set(written) and len(written) == 1 and written[0][0] == cache.num_slots
    np.testing.assert_array_equal(ids[: len(tokens)], tokens)
    assert len({*zip(slot[:size].tolist(), position[:size].tolist(), strict=True)}) == size, (
        "no place is written twice"
    )


def test_shapes():
    assert graph_shapes(2048, 4096)[0] == Shape(1024, 1024) and graph_shapes(2048, 4096)[
        -1
    ] == Shape(1, 1)
    assert [s.tokens for s in graph_shapes(20, 4096)] == [24, 16, 8, 4, 2, 1], (
        "larger forwards do not come"
    )
    assert graph_shapes(2048, 100)[0] == Shape(96, 96), "padding must fit the spare slot"
    assert [s for s in graph_shapes(2048, 4096) if s.tokens == 256] == [
        Shape(256, 256),
        Shape(256, NARROW),
    ]
    shapes = graph_shapes(2048, 4096)
    assert shapes == sorted(shapes, reverse=True) and len(shapes) == 25


PARAMS = SamplingParams(temperature=0.9, top_p=0.97, stop_token_ids=STOP, min_length=2)


def make_generator(
    model, kernel: str, num_slots: int = 6, max_batch_tokens: int = 64, **options
) -> Engine:
    return Engine(
        ModelRunner(
            model,
            num_slots,
            100,
            seed=5,
            max_batch_tokens=max_batch_tokens,
            kernel=kernel,
            **options,
        )
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window"])
def test_generated_tokens_are_the_same(make_model, on_cpu, name):
    """Prompts in chunks, decoding, verification of drafts of which a third is wrong, and rows that
    end and are refilled."""
    model = make_model(name)
    prepare_model(model, 100)
    prompts = make_prompts(5)
    wanted = as_dict(make_generator(model, "sdpa").run(make_rows(prompts, 2), PARAMS))
    assert len({tuple(tokens) for tokens, _ in wanted.values()}) > 3
    for proposer, max_batch_tokens in (
        (None, 32),
        (Drafter(wanted, 0.3), 32),
        (Drafter(wanted, 0.3), 7),
    ):
        engine = make_generator(model, "varlen", max_batch_tokens=max_batch_tokens)
        assert as_dict(engine.run(make_rows(prompts, 2), PARAMS, proposer)) == wanted
        assert engine.runner.graphs.num_replays == engine.num_forwards > 10


def test_captured_once_largest_first_and_again_after_a_release(make_model, on_cpu):
    model = make_model()
    prepare_model(model, 100)
    prompts = make_prompts(3)
    engine = make_generator(model, "varlen", max_batch_tokens=16)
    assert on_cpu.sizes == [], "nothing before the first forward"
    wanted = as_dict(engine.run(make_rows(prompts, 2), PARAMS))
    assert on_cpu.sizes == [16, 8, 4, 2, 1] and on_cpu.pools == [None] + [("the pool",)] * 4
    engine.reset()
    assert as_dict(engine.run(make_rows(prompts, 2), PARAMS)) == wanted and len(on_cpu.sizes) == 5
    engine.release()
    replays = engine.runner.graphs.num_replays
    assert engine.runner.cache.num_bytes() == 0
    assert as_dict(engine.run(make_rows(prompts, 2), PARAMS)) == wanted
    assert (
        on_cpu.sizes == [16, 8, 4, 2, 1] * 2
        and on_cpu.pools[5] is None
        and engine.runner.graphs.num_replays > replays
    )
    assert as_dict(make_generator(model, "sdpa").run(make_rows(prompts, 2), PARAMS)) == wanted


def test_forwards_too_large_for_a_graph_are_plain(make_model, on_cpu):
    """A slot of 20 positions has room for the padding of graphs of up to 16 tokens."""
    model = make_model()
    prepare_model(model, 20)

    def run(kernel: str) -> tuple[dict, Engine]:
        engine = Engine(ModelRunner(model, 8, 20, seed=1, kernel=kernel))
        return as_dict(engine.run(make_rows(make_prompts(8, 11), 1, 9), SamplingParams())), engine

    (wanted, _), (got, engine) = run("sdpa"), run("varlen")
    assert got == wanted and max(on_cpu.sizes) == 16
    assert 0 < engine.runner.graphs.num_replays < engine.num_forwards, (
        "the prompts together have more than 16 tokens"
    )


@pytest.mark.parametrize("options, kernel", [({"enforce_eager": True}, "varlen"), ({}, "sdpa")])
def test_no_graphs(make_model, on_cpu, options, kernel):
    model = make_model()
    prepare_model(model, 100)
    engine = make_generator(model, kernel, **options)
    assert engine.run(make_rows(make_prompts(2), 1), PARAMS) and engine.runner.graphs is None
    assert on_cpu.sizes == [] and len(engine.runner.cache.keys[0]) == 6, "no slot is spared either"


def test_a_model_that_reads_from_the_gpu_goes_on_without_graphs(make_model, on_cpu, capsys):
    model = make_model()
    prepare_model(model, 100)
    wanted = as_dict(make_generator(model, "sdpa").run(make_rows(make_prompts(3), 2), PARAMS))
    read = []
    model.base_model.register_forward_pre_hook(
        lambda *call: read.append(model.lm_head.weight.sum().item())
    )
    engine = make_generator(model, "varlen")
    assert (
        as_dict(engine.run(make_rows(make_prompts(3), 2), PARAMS)) == wanted
        and engine.runner.graphs.num_replays == 0
        and read
    )
    said = capsys.readouterr().err.strip()
    assert (
        said.startswith("warning: no CUDA graphs") and "synchronizing" in said and "\n" not in said
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_update_leaves_the_weights_where_they_are(make_model, dtype):
    """Both ways that the optimizer has, with and without master weights."""
    model = make_model("qwen2", dtype)
    optimizer = Optimizer(model, OptimConfig(learning_rate=0.1), max_steps=3)
    places = [p.data_ptr() for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    optimizer.step(0)
    assert not any(
        torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True) if p.ndim > 1
    )
    assert [p.data_ptr() for p in model.parameters()] == places


def test_replays_see_weights_changed_in_place(make_model, device):
    model = prepared(make_model, "qwen2", device)
    cache, sequences = (
        KVCache(2, LENGTH, num_spare=1),
        np.random.default_rng(2).integers(1, VOCAB, (2, LENGTH)),
    )
    captured = ForwardGraphs(model, cache, "varlen", 16)
    hidden = []
    for _ in range(2):
        with torch.inference_mode():
            hidden.append(
                feed(model, cache, sequences, [0, 0], [6, 9], captured.forward)[:15].clone()
            )
            plain = feed(
                model,
                KVCache(2, LENGTH),
                sequences,
                [0, 0],
                [6, 9],
                lambda t, p: forward_hidden(model, torch.from_numpy(t).to(device), p),
            )
        assert_equal(hidden[-1], plain)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.3)
    assert (hidden[0] - hidden[1]).abs().max() > 0.05 and captured.num_replays == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", ["varlen", "flash_attn"])
def test_graphs_on_the_gpu(make_model, kernel):
    """Every bucket against the plain forward of the same kernel, with windows in it; then again
    after a release."""
    if kernel == "flash_attn":
        pytest.importorskip("flash_attn")
    model = make_model("llama", torch.bfloat16).cuda()
    prepare_model(model, 512)
    sequences = np.random.default_rng(3).integers(1, VOCAB, (40, 512))
    plain, engine = KVCache(40, 512), Engine(ModelRunner(model, 40, 500, seed=0, kernel=kernel))
    assert engine.runner.graphs is not None
    with torch.inference_mode():
        for _ in range(2):
            rng, start = np.random.default_rng(4), np.zeros(40, np.int64)
            for tokens in (shape.tokens for shape in engine.runner.graphs.shapes):
                count = np.bincount(rng.integers(0, 40, tokens), minlength=40)
                args = (sequences, start, count)
                wanted = feed(
                    model,
                    plain,
                    *args,
                    lambda t, p: forward_hidden(model, torch.from_numpy(t).cuda(), p, kernel),
                )
                assert_equal(
                    feed(model, engine.runner.cache, *args, engine.runner.graphs.forward)[:tokens],
                    wanted,
                )
                start += count
            assert not engine.runner.graphs.is_off
            held = torch.cuda.memory_allocated()
            engine.release()
            assert torch.cuda.memory_allocated() < held - engine.runner.cache.num_slots * 512 * 100
    assert (
        engine.run(make_rows(make_prompts(5), 3), SamplingParams())
        and engine.runner.graphs.num_replays > 20
    )
