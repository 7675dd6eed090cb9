"""Forwards as graphs against the plain forward: with helpers/graphs.py on a CPU, and on a GPU."""

import numpy as np
import pytest
import torch

from bubblespec.config import OptimConfig
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.engine import Engine
from bubblespec.engine.graphs import FEW, NARROW, ForwardGraphs, pad
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import forward_hidden
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.packing import PAGE, pack_rows, pack_sequences
from bubblespec.engine.sampling import SamplingParams
from bubblespec.learn.optimizer import Optimizer
from tests.helpers.generation import (
    STOP,
    Drafter,
    as_dict,
    make_engine,
    make_prompts,
    make_rows,
    make_runner,
)
from tests.helpers.graphs import (
    LENGTH,
    POOL,
    Captures,
    assert_equal,
    eager,
    fail_at,
    feed,
    forward_of,
    in_pages,
    prepared,
    stand_in,
    take_pages,
)
from tests.helpers.models import ARCHITECTURES, VOCAB, config_of

# New tokens of five rows in one forward after the other: decoding, prompts, windows, rows without.
MIXES = [
    [3, 1, 40, 0, 9],
    [1, 1, 1, 1, 1],
    [0, 0, 0, 7, 0],
    [5, 1, 1, 17, 2],
    [NARROW + 3, 1, 0, 2, 1],
    [1, 0, 8, 3, 20],
    [0, 0, 0, 0, 1],
]
PARAMS = SamplingParams(temperature=0.9, top_p=0.97, stop_token_ids=STOP, min_length=2)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def on_cpu(monkeypatch) -> Captures:
    return stand_in(monkeypatch)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def device(request) -> torch.device:
    if request.param == "cpu":
        request.getfixturevalue("on_cpu")
    return torch.device(request.param)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padded_forwards_equal_plain_forwards(make_model, device, name):
    """Forwards of five rows: hidden states and, in the slots of rows, keys and values."""
    model = prepared(make_model, name, device)
    sequences = np.random.default_rng(0).integers(1, VOCAB, (5, LENGTH))
    plain, padded = KVCache(5, LENGTH), KVCache(5, LENGTH, num_spare=1)
    captured = ForwardGraphs(forward_of(model, "varlen"), padded, 80)
    start = np.zeros(5, np.int64)
    with torch.inference_mode():
        for count in MIXES:
            wanted = feed(model, plain, sequences, start, count, eager(model))
            got = feed(model, padded, sequences, start, count, captured.forward)
            assert got.isfinite().all() and len(got) >= len(wanted)
            assert_equal(got[: len(wanted)], wanted)
            start += count
        for layer in plain.keys:
            assert_equal(padded.layers[layer].keys[:5], plain.keys[layer])
            assert_equal(padded.layers[layer].values[:5], plain.values[layer])
    assert captured.num_replays == len(MIXES) and captured.problem is None


@pytest.mark.parametrize(
    "kernel, length, page_size",
    [*((k, LENGTH, 26) for k in ("varlen", "flash_attn", "sdpa")), ("flash_attn", PAGE, None)],
)
def test_forwards_over_pages_equal_forwards_over_slots(
    make_model, on_cpu, kernel, length, page_size
):
    """Pages in no order, with graphs and without; flash_attn reads even slots by page tables."""
    model = prepared(make_model, "mistral-window")
    sequences = np.random.default_rng(0).integers(1, VOCAB, (5, length))
    plain, start = KVCache(5, length), np.zeros(5, np.int64)
    own, padded = (
        KVCache(5, length, num_spare=1) if page_size is None else in_pages(5, length, page_size)
        for _ in range(2)
    )
    captured = ForwardGraphs(forward_of(model, kernel), padded, 80)
    with torch.inference_mode():
        for count in MIXES if page_size else ([1, 0, 2, 0, 0], [1, 1, 1, 0, 0], [0, 2, 1, 0, 1]):
            args = (sequences, start, count)
            wanted = feed(model, plain, *args, eager(model))
            assert_equal(feed(model, own, *args, eager(model, kernel)), wanted)
            if kernel != "sdpa":
                assert_equal(feed(model, padded, *args, captured.forward)[: len(wanted)], wanted)
                assert captured.num_replays > 0
            start += count
            for cache in (own, padded) if page_size else ():  # the row in slot 4 gets other pages
                held = cache.pages.table[4].astype(int)
                cache.pages.table[4] = swapped = held[::-1].copy()
                cache.pages.version += 1
                for tensor in (*cache.keys.values(), *cache.values.values()):
                    tensor[swapped] = tensor[held]


@pytest.mark.parametrize("fold", [1, 7])
@pytest.mark.parametrize("num_slots, largest", [(1024, 1024), (128, 1024), (7, 700), (300, 300)])
def test_graphs_launch_few_blocks(num_slots, largest, fold):
    """At most 42 graphs, and in attention four times the blocks that rows need, or 64 a head."""
    rng, length = np.random.default_rng(num_slots), 4096
    cache = KVCache(num_slots, length)
    model = torch.nn.Linear(1, 1)
    heads = {"num_attention_heads": 4 * fold, "num_key_value_heads": 4}
    model.config = config_of("Llama", hidden_size=448, **heads)
    graphs = ForwardGraphs(forward_of(model, "varlen"), cache, largest)
    assert graphs.of.heads_per_key == fold and len(graphs.shapes) <= 42
    for case in range(2000):
        rows = int(rng.integers(1, num_slots + 1))
        count = rng.choice(([1], [0, 1], [1, 2, 4], [1] * 50 + [300], [1, 16])[case % 5], rows)
        count[rng.integers(rows)] = 1 + case % 3
        if not 0 < count.sum() <= min(largest, 1024) or count.sum() > 512 < rows:
            continue
        packing = pack_rows(cache, np.full(rows, 3), count, torch.device("cpu"))
        shape = graphs.shape_of(packing)
        needed = int((-(-count // NARROW)).sum())
        assert count.sum() <= shape.tokens <= 2 * count.sum() + 1
        is_few = fold > 1 and count.sum() <= max(FEW, fold * needed)
        assert shape.max_q > 1 or is_few or count.max() == 1
        assert shape.max_q == 1 or not is_few or shape.tokens > fold * num_slots
        blocks, fewest = shape.sequences * -(-shape.max_q // 64), needed * fold
        launched = blocks if shape.max_q == 1 else blocks * fold
        assert launched <= max(4 * fewest, 64 * fold), (shape, count.sum(), needed)
        padded = pad(np.zeros(count.sum(), np.int64), packing, shape)
        cu_q, used = padded[3, : shape.sequences + 1], padded[5, : shape.sequences]
        assert cu_q[-1] == shape.tokens and np.diff(cu_q).max() <= shape.max_q
        assert ((np.diff(cu_q) > 0) <= (used > 0)).all(), "a token without keys"


def test_tokens_with_graphs_are_equal_and_captured_once(make_model, on_cpu):
    """With prompts in chunks, right and wrong drafts, preemption, and a release."""
    model, prompts = prepared(make_model, "mistral-window"), make_prompts(5, 20)

    def run(engine: Engine, proposer=None) -> dict:
        return as_dict(engine.run(make_rows(prompts, 2, 12), PARAMS, proposer))

    wanted = run(make_engine(model, 6, seed=5))
    assert len({tuple(tokens) for tokens, _ in wanted.values()}) > 3
    pages = {"max_length": 40, "page_size": 4, "num_pages": 11}
    engine = make_engine(model, 6, seed=5, kernel="varlen", max_num_batched_tokens=16, **pages)
    assert on_cpu.sizes == [], "nothing before the first forward"
    assert run(engine) == wanted
    sizes = [16, 8, 8, 4, 4, 2, 2, 1]
    assert on_cpu.sizes == sizes and on_cpu.pools == [None] + [POOL] * 7
    engine.reset()
    assert run(engine, Drafter(wanted, 0.3)) == wanted and on_cpu.sizes == sizes
    assert engine.runner.graphs.num_replays == engine.num_forwards > 10
    engine.release()
    assert engine.runner.cache.num_bytes() == 0
    assert run(engine, Drafter(wanted, 0.3)) == wanted
    assert on_cpu.sizes == 2 * sizes and on_cpu.pools[8] is None
    assert engine.runner.graphs.num_replays == engine.num_forwards
    assert engine.num_admitted > 3 * 10, "some rows were preempted"


def test_forwards_too_large_for_a_graph_are_plain(make_model, on_cpu):
    """A slot of 20 positions has room for the padding of graphs of up to 16 tokens."""
    model, found = prepared(make_model), []
    for kernel in ("sdpa", "varlen"):
        engine = make_engine(model, 8, max_length=20, page_size=20, kernel=kernel)
        found.append(as_dict(engine.run(make_rows(make_prompts(8, 11), 1, 9), SamplingParams())))
    assert found[0] == found[1] and max(on_cpu.sizes) == 16
    assert 0 < engine.runner.graphs.num_replays < engine.num_forwards, "prompts exceed 16 tokens"


@pytest.mark.parametrize("options", [{"enforce_eager": True, "kernel": "varlen"}, {}])
def test_engine_without_graphs_spares_no_slot(make_model, on_cpu, options):
    engine = make_engine(prepared(make_model), 6, **options)
    assert engine.run(make_rows(make_prompts(2), 1, 3), PARAMS) and engine.runner.graphs is None
    assert on_cpu.sizes == [] and engine.runner.cache.num_spare == 0


WARNING = "warning: forwards are eager, not CUDA graphs: "


def run_thrice(make_model, capsys, model=None) -> tuple[list[int], list[str]]:
    """Run an engine with graphs three times, with releases in between, and check its tokens.
    Returns the replays after each run, and the lines printed."""
    plain, prompts = prepared(make_model), make_prompts(3)
    wanted = as_dict(make_engine(plain, 6).run(make_rows(prompts, 2, 5), PARAMS))
    engine = make_engine(model or plain, 6, kernel="varlen", max_num_batched_tokens=16)
    graphs, replays = engine.runner.graphs, []
    for _ in range(3):
        assert as_dict(engine.run(make_rows(prompts, 2, 5), PARAMS)) == wanted
        replays.append(graphs.num_replays)
        assert (graphs.problem is None) == bool(graphs.num_replays)
        assert len(graphs._graphs) == (0 if graphs.problem else len(graphs.shapes))
        engine.release()
    assert replays[2] in (0, *(engine.num_forwards * runs // 3 for runs in (1, 3)))
    return replays, capsys.readouterr().err.splitlines()


def test_model_reading_from_the_gpu_is_eager(make_model, on_cpu, capsys):
    model, read = prepared(make_model), []
    model.base_model.register_forward_pre_hook(
        lambda *call: read.append(model.lm_head.weight.sum().item())
    )
    replays, (line,) = run_thrice(make_model, capsys, model)
    assert replays == [0, 0, 0] and read, "a release changes nothing about the model"
    assert line.startswith(WARNING) and "synchronizing" in line


@pytest.fixture
def emptied(monkeypatch) -> list[bool]:
    """An entry for each call of `empty_cache`."""
    times: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: times.append(True))
    return times


@pytest.mark.parametrize("stage", ["rehearse", "capture"])
def test_graphs_are_tried_again_when_memory_runs_out(
    make_model, on_cpu, monkeypatch, capsys, emptied, stage
):
    """The second attempt has a pool of its own, as the first graphs are destroyed."""
    fail_at(monkeypatch, stage, [2])
    replays, printed = run_thrice(make_model, capsys)
    assert replays[0] > 3 and emptied == [True] and not printed
    num_lost = 2 if stage == "capture" else 0
    num_shapes = (len(on_cpu.pools) - num_lost) // 3
    pools = [None] + [POOL] * (num_shapes - 1)
    assert on_cpu.pools == pools[:num_lost] + 3 * pools


def test_graphs_come_back_at_a_release_after_memory_ran_out(
    make_model, on_cpu, monkeypatch, capsys, emptied
):
    """Both attempts of two rollouts fail, with one warning; the third has graphs."""
    fail_at(monkeypatch, "rehearse", [0, 3, 4, 5])
    replays, (line,) = run_thrice(make_model, capsys)
    assert replays[:2] == [0, 0] and replays[2] > 3 and len(emptied) == 2
    assert line.startswith(WARNING) and "Tried to allocate 2 GiB" in line


def test_keys_without_values_are_not_kept(on_cpu):
    """After an error between the two the next write makes both."""
    cache, place = KVCache(2, 8), torch.arange(3)
    key, value = torch.ones(3, 2, 4), torch.full((3, 2, 4), 2.0)
    with pytest.raises(AttributeError):
        cache.write(0, place, key, None)
    assert cache.num_bytes() == 0
    cache.write(0, place, key, value)
    assert cache.keys[0].sum() == 24 and cache.values[0].sum() == 48


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_update_leaves_weights_in_place(make_model, dtype):
    """With and without master weights."""
    model = make_model("qwen2", dtype)
    optimizer = Optimizer(model, OptimConfig(learning_rate=0.1), 3, Ranks(torch.device("cpu")))
    memory = [p.data_ptr() for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    optimizer.step(0)
    pairs = zip(model.parameters(), before, strict=True)
    assert not any(torch.equal(new, old) for new, old in pairs if new.ndim > 1)
    assert [p.data_ptr() for p in model.parameters()] == memory


def test_replays_see_weights_changed_in_place(make_model, device):
    model = prepared(make_model, "qwen2", device)
    cache = KVCache(2, LENGTH, num_spare=1)
    args = (np.random.default_rng(2).integers(1, VOCAB, (2, LENGTH)), [0, 0], [6, 9])
    captured, hidden = ForwardGraphs(forward_of(model, "varlen"), cache, 16), []
    for _ in range(2):
        with torch.inference_mode():
            hidden.append(feed(model, cache, *args, captured.forward)[:15].clone())
            assert_equal(hidden[-1], feed(model, KVCache(2, LENGTH), *args, eager(model)))
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.3)
    assert (hidden[0] - hidden[1]).abs().max() > 0.05 and captured.num_replays == 2


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kernel", ["varlen", "flash_attn"])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_graphs_on_gpu_equal_plain_forwards(make_model, name, kernel):
    """Every bucket against SDPA, as a graph and launched, and after a release; whole sequences."""
    if kernel == "flash_attn":
        pytest.importorskip("flash_attn")
    model = make_model(name, torch.bfloat16).cuda()
    prepare_model(model, 512)
    sequences = np.random.default_rng(3).integers(1, VOCAB, (40, 512))
    plain, engine = KVCache(40, 512), Engine(make_runner(model, 40, 500, seed=0, kernel=kernel))
    runner = engine.runner
    with torch.inference_mode():
        for _ in range(2):
            rng, start = np.random.default_rng(4), np.zeros(40, np.int64)
            take_pages(runner)
            for shape in runner.graphs.shapes:
                count = np.bincount(rng.integers(0, 40, shape.tokens), minlength=40)
                if shape.max_q == 1:
                    count = (np.arange(40) < shape.tokens).astype(np.int64)
                args = (sequences, start, count)
                wanted = feed(model, plain, *args, eager(model))
                assert_equal(feed(model, plain, *args, eager(model, kernel)), wanted)
                got = feed(model, runner.cache, *args, runner.graphs.forward)[: len(wanted)]
                assert_equal(got, wanted)
                start += count
            assert runner.graphs.problem is None
            held = torch.cuda.memory_allocated()
            engine.release()
            assert torch.cuda.memory_allocated() < held - runner.cache.num_slots * 512 * 100
        lengths = [30, 7, 100]
        whole = torch.from_numpy(np.concatenate([sequences[0, :n] for n in lengths])).cuda()
        packing = pack_sequences(lengths, whole.device)
        assert_equal(*(forward_hidden(model, whole, packing, of) for of in (kernel, "sdpa")))
    assert engine.run(make_rows(make_prompts(5), 3), SamplingParams())
    assert runner.graphs.num_replays > 20
