"""Graphs of forwards that all ranks compute together, with their sums inside.

Ranks are threads, and graphs are `Tape`s, which record a sum without computing it, as NCCL does.
"""

import copy
import itertools
import threading

import numpy as np
import pytest
import torch
from test_tensor_parallel import LONGEST, OF_ROWS, assert_same_rows, build, plain_rows, rows
from torch.utils._python_dispatch import _get_current_dispatch_mode

from bubblespec.distributed.ranks import Ranks
from bubblespec.engine import graphs
from bubblespec.engine.engine import Engine
from bubblespec.engine.forward import heads_per_key
from bubblespec.engine.model_checks import prepare_model
from bubblespec.mechanisms.tp_tail.shards import TPGroup
from bubblespec.types import Row, SampleId
from tests.helpers.generation import Drafter, as_dict, make_runner
from tests.helpers.graphs import Captures, Tape, fail_at, feed, stand_in, take_pages
from tests.helpers.models import VOCAB, random_model, small_config
from tests.helpers.ranks import run_ranks
from tests.helpers.tp import ThreadTPGroup, run_together

GRAPHS = {"kernel": "varlen", "max_num_batched_tokens": 32}


class Recorded:
    """Mixin of a `TPGroup` whose sums can be recorded."""

    can_capture = True

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        tape = _get_current_dispatch_mode()
        if not isinstance(tape, Tape):
            return super().sum_(tensor)
        tape.calls.append((super().sum_, (tensor,), {}, tensor))
        return tensor


@pytest.fixture
def captures(monkeypatch) -> dict[int, Captures]:
    """Return captures by rank, and "enter", which prepares a rank."""
    by_rank: dict[int, Captures] = {}
    rank = threading.local()

    def capture(run, pool):
        return by_rank[rank.number](run, pool)

    def enter(tp: ThreadTPGroup) -> Recorded:
        rank.number, by_rank[tp.rank] = tp.rank, Captures()
        return type("Group", (Recorded, ThreadTPGroup), {})(tp.meeting, tp.rank)

    stand_in(monkeypatch)
    monkeypatch.setattr(graphs, "capture", capture)
    by_rank["enter"] = enter
    return by_rank


def captured(model, num_slots: int) -> list[int]:
    """Return the tokens of each graph, in the order of capture."""
    fold = heads_per_key(model)
    sizes = (GRAPHS["max_num_batched_tokens"], num_slots, LONGEST)
    return [shape.tokens for shape in graphs.graph_shapes(*sizes, fold=fold)]


@pytest.mark.parametrize(
    "name, size", [("uneven, tied", 2), ("biases everywhere", 2), ("mistral-window", 4)]
)
def test_rows_of_replayed_shards_equal_plain_rows(captures, name, size):
    """With right and wrong drafts every forward is a replay, with two sums in each layer."""
    model = build(name)
    wanted = plain_rows(model)

    def of_rank(tp):
        tp, own = captures["enter"](tp), rows()
        runner = make_runner(copy.deepcopy(model), 4, LONGEST, 3, tp=tp, **GRAPHS)
        engine, drafts = Engine(runner), Drafter(as_dict(wanted), 0.3)
        sums = []
        record = runner.graphs._record
        count = lambda: sums.append(tp.num_sums)  # noqa: E731
        runner.graphs._record = lambda inputs: (count(), record(inputs), count())
        engine.run(own, OF_ROWS, drafts)
        assert drafts.num_accepted > 30 and runner.graphs.problem is None
        assert runner.graphs.num_replays == engine.num_forwards > 10
        num_sizes = len(set(captured(model, 4)))
        assert sums == [num_sizes] * 2, "one of each size before it, and none while recording"
        assert tp.num_sums == num_sizes + 2 * model.config.num_hidden_layers * engine.num_forwards
        return own

    for own in run_together(size, of_rank):
        assert_same_rows(own, wanted)
    assert [captures[rank].sizes for rank in range(size)] == [captured(model, 4)] * size


def test_graphs_share_memory_and_return_after_release(captures):
    """A replay overwrites earlier results; tokens show that no result is read late."""
    model = build("llama")
    wanted = as_dict(plain_rows(model))

    def of_rank(tp):
        tp, own_model = captures["enter"](tp), copy.deepcopy(model)
        alone = Engine(make_runner(own_model, 8, LONGEST, 3, **GRAPHS))
        options = GRAPHS | {"tp": tp, "memory": alone.runner.forward.memory}
        together = Engine(make_runner(own_model, 8, LONGEST, 3, **options))
        found = [as_dict(e.run(rows(), OF_ROWS)) for e in (alone, together, alone, together)]
        for engine in (together, alone):
            engine.release()
            assert engine.runner.cache.num_bytes() == 0
            found.append(as_dict(engine.run(rows(), OF_ROWS)))
        return found

    assert run_together(2, of_rank) == [[wanted] * 6] * 2
    for rank in range(2):
        assert captures[rank].sizes == captured(model, 8) * 4
        assert captures[rank].pools == [None] + [("the pool",)] * (4 * len(captured(model, 8)) - 1)


@pytest.mark.parametrize(
    "stage, times, attempts",
    [("rehearse", [5, 6], 1), ("capture", [0, 1], 1), ("rehearse", [5], 0), ("capture", [3], 0)],
)
def test_out_of_memory_of_a_rank_is_agreed_on(
    captures, monkeypatch, capsys, stage, times, attempts
):
    """The failing rank alone tries again; after two failures no rank has graphs until a release."""
    model = build("llama")
    wanted = as_dict(plain_rows(model))
    failing = threading.local()
    calls = fail_at(monkeypatch, stage, times, lambda: hasattr(failing, "rank"))

    def of_rank(tp):
        tp = captures["enter"](tp)
        if tp.rank == 1:
            failing.rank = 1
        engine = Engine(make_runner(copy.deepcopy(model), 8, LONGEST, 3, tp=tp, **GRAPHS))
        found, own = [], engine.runner.graphs
        for attempt in range(2):
            found.append(as_dict(engine.run(rows(), OF_ROWS)))
            has_graphs = attempt >= attempts
            assert (own.problem is None) == bool(own._graphs) == has_graphs
            assert bool(own.num_replays) == has_graphs
            engine.release()
        assert own.num_replays == engine.num_forwards * (2 - attempts) // 2 > 10
        return found

    assert run_together(3, of_rank) == [[wanted] * 2] * 3
    assert len(calls) == times[-1] + 1 + len(captured(model, 8)) * (2 - attempts)
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == attempts
    assert all("forwards are eager" in s and "Tried to allocate" in s for s in lines)


def forwards_in_processes(ranks: Ranks, kernel: str) -> dict:
    """Return the largest differences of launched and replayed forwards in shards from the whole
    model's, for every size of graph."""
    device, on_gpu = ranks.device, ranks.device.type == "cuda"
    num_rows, max_tokens = (40, 256) if on_gpu else (8, 32)
    with pytest.MonkeyPatch.context() as patch:
        tp = TPGroup(ranks)
        if not on_gpu:
            stand_in(patch)
            tp = type("Group", (Recorded, TPGroup), {})(ranks)
            tp.can_capture = True
        dtype = torch.bfloat16 if on_gpu else torch.float64
        model = random_model(small_config("qwen2"), dtype).to(device)
        prepare_model(model, 256)
        whole = make_runner(model, num_rows, 256, 0, kernel=kernel, enforce_eager=True)
        options = {"kernel": kernel, "max_num_batched_tokens": max_tokens}
        launched = make_runner(model, num_rows, 256, 0, tp=tp, enforce_eager=True, **options)
        replayed = make_runner(model, num_rows, 256, 0, tp=tp, **options)
        ranks.before_end.append(replayed.release)
        sequences = np.random.default_rng(3).integers(1, VOCAB, (num_rows, 256))
        rng, start = np.random.default_rng(4), np.zeros(num_rows, np.int64)
        differences = np.zeros(2)
        for runner in (whole, launched, replayed):
            take_pages(runner)
        with torch.inference_mode():
            for tokens in (shape.tokens for shape in replayed.graphs.shapes):
                count = np.bincount(rng.integers(0, num_rows, tokens), minlength=num_rows)
                wanted, *got = (
                    feed(model, runner.cache, sequences, start, count, runner.hidden)[:tokens]
                    for runner in (whole, launched, replayed)
                )
                scale = wanted.abs().max().clamp(min=1.0)
                found = [((hidden - wanted).abs().max() / scale).item() for hidden in got]
                differences = np.maximum(differences, found)
                start += count
        num_forwards = len(replayed.graphs.shapes)
        assert replayed.graphs.num_replays == num_forwards and launched.graphs is None
        engine = Engine(replayed)
        engine.reset()
        engine.run([Row(SampleId(n, 0, 0), (1, 2, 3 + n), 20) for n in range(5)], OF_ROWS)
        assert replayed.graphs.num_replays == num_forwards + engine.num_forwards
        return {"launched": float(differences[0]), "replayed": float(differences[1])}


def cards(count: int) -> list:
    has_cards = torch.cuda.is_available() and torch.cuda.device_count() >= count
    why = f"needs {count} CUDA devices"
    return [pytest.mark.gpu, pytest.mark.skipif(not has_cards, reason=why)]


ON_GPUS = itertools.product(["cuda"], [1, 2], ["varlen", "flash_attn"])


@pytest.mark.parametrize(
    "device, num_ranks, kernel",
    [("cpu", 2, "varlen"), *(pytest.param(*case, marks=cards(case[1])) for case in ON_GPUS)],
)
def test_processes_replay_shards_like_the_whole_model(tmp_path, device, num_ranks, kernel):
    """Over gloo with tapes; on GPUs over NCCL, whose end waits until graphs with sums are gone."""
    if kernel == "flash_attn":
        pytest.importorskip("flash_attn")
    for found in run_ranks(tmp_path, forwards_in_processes, num_ranks, kernel, device=device):
        assert max(found.values()) < (0.03 if device == "cuda" else 1e-9)


@pytest.mark.parametrize("options, can", [({"enforce_eager": True}, True), ({}, False)])
def test_no_graphs_if_eager_or_sums_are_not_capturable(captures, options, can):
    model = build("llama")

    def of_rank(tp):
        tp = captures["enter"](tp)
        tp.can_capture = can
        runner = make_runner(copy.deepcopy(model), 4, LONGEST, 3, tp=tp, kernel="varlen", **options)
        return runner.graphs is None and runner.cache.num_spare == 0

    assert run_together(2, of_rank) == [True] * 2
