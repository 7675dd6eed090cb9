"""The engine of a GPU in triton's interpreter, its graphs being calls, against torch's engine."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bubblespec.engine import kv_cache, step_graphs
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.graphs import FIELDS, TILES, GraphPool, padded
from bubblespec.engine.kv_cache import KVCache, pack_rows
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.ops import torch_ops
from tests.helpers.generation import STOP, Drafter, as_dict, make_engine, make_rows
from tests.helpers.graphs import POOL, Traffic, fail_at, needs_interpreter, stand_in
from tests.helpers.models import ARCHITECTURES, GQA, SMALL, config_of, random_model
from tests.helpers.tp import ThreadTPGroup, run_together
from tests.test_architectures import SCORES

pytestmark = needs_interpreter
LENGTH, SEED = 64, 5
GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7)
TRUNCATED = SamplingParams(temperature=0.9, top_p=0.9, stop_token_ids=STOP, min_length=2)
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 16, "num_key_value_heads": 4, "first_k_dense_replace": 9}
KINDS = ARCHITECTURES | {
    "gemma": ("Gemma", {**GQA, "head_dim": 16}),
    "deepseek": ("DeepseekV3", SMALL | LATENT),  # keys of 24, values of 16
    # Attention with a cap, sinks and chunks.
    "gemma2": SCORES["gemma2"],
    "granite_swa": SCORES["granite_swa"],
    "llama4": ("Llama4Text", SCORES["llama4"][1] | {"moe_layers": []}),
}
MODULES = ("deepseek", "gemma2", "granite_swa", "llama4")  # not written out
SIZES = {"max_length": LENGTH, "seed": SEED}
ONE_LAYER = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
PAGED = SIZES | {"max_num_batched_tokens": 16, "page_size": 16}
FEW = PAGED | {"max_num_batched_tokens": 6}


def make_model(name: str = "llama", **options):
    kind, base = KINDS[name]
    model = random_model(config_of(kind, base, **options), torch.float32)
    prepare_model(model, LENGTH)
    return model


def make(num_tokens: int = 6):
    return make_rows([(1, 2, 3, 4, 5, 6, 7) * 2, (8, 9) * 7, (9, 3, 5)], 2, num_tokens)


def make_few(num_tokens: int = 4):
    """Create rows for a model of one layer and forwards of few tokens: the interpreter is slow."""
    return make_rows([(7, 8), (9, 3, 5)], 1, num_tokens)


def num_launched(engine: Engine) -> int:
    return engine.num_forwards + len(engine.flights)


def samplers_of(engine: Engine) -> list[tuple]:
    """Return the keys of graphs of sampling: positions, distribution and seed."""
    pool = engine.runner.graphs.pool
    return [key for key in pool.graphs if key not in pool.shapes]


def plain_rows(model, params, rows=None) -> dict:
    engine = make_engine(model, 6, **SIZES)
    assert engine.runner.forward.ops is torch_ops and engine.runner.graphs is None
    return as_dict(engine.run(rows or make(), params))


@pytest.mark.parametrize(
    "name, params, num_pages, corrupted",
    [
        ("llama", SamplingParams(), None, 0.3),
        ("qwen3", WARM, None, None),
        ("mistral-window", GREEDY, 5, None),
        ("qwen2", TRUNCATED, None, 0.0),
        ("gemma", WARM, None, 0.3),
        ("deepseek", WARM, 5, 0.3),
        ("gemma2", WARM, None, 0.3),
        ("granite_swa", WARM, 5, 0.3),
        ("llama4", WARM, None, 0.3),
    ],
)
def test_rows_of_graphs_equal_rows_of_torch(monkeypatch, name, params, num_pages, corrupted):
    few = {"num_hidden_layers": 1} if name == "deepseek" else ONE_LAYER
    model = make_model(name, **({} if name == "llama" or name in SCORES else few))
    wanted = plain_rows(model, params)
    captures = stand_in(monkeypatch)
    # What earlier rows may have left in pages.
    monkeypatch.setattr(kv_cache, "_zeros", lambda shape, like: like.new_full(shape, torch.nan))
    engine = make_engine(model, 4, **PAGED, num_pages=num_pages)
    placed, place = [], engine.runner.place
    engine.runner.place = lambda *of: placed.append(of) or place(*of)
    assert (engine.runner.forward.decoder is None) == (name in MODULES)
    drafts = None if corrupted is None else Drafter(wanted, corrupted)
    assert as_dict(engine.run(make(), params, drafts)) == wanted
    found = engine.runner.graphs.pool
    assert found.problem is None and found.num_replays == num_launched(engine)
    num_sampled = 0 if params.truncates else len({shape.tokens for shape in found.shapes})
    assert captures.pools == [None] + [POOL] * (len(found.shapes) + num_sampled - 1)
    assert drafts is None or drafts.num_accepted > 3
    assert (len(placed) > 6) == (num_pages is not None), "some rows were preempted"


def test_large_steps_sample_without_graphs(monkeypatch):
    model = make_model(**ONE_LAYER)
    wanted = plain_rows(model, WARM, make_few())
    stand_in(monkeypatch)
    monkeypatch.setattr(step_graphs, "MAX_SAMPLED", 4)
    engine = make_engine(model, 6, **SIZES, max_num_batched_tokens=16)
    for _ in range(2):
        assert as_dict(engine.run(make_few(), WARM, Drafter(wanted, 0.0))) == wanted
    graphs = engine.runner.graphs.pool
    assert graphs.problem is None and graphs.num_replays == num_launched(engine)
    assert samplers_of(engine) == [(4, WARM, SEED)]
    eager = make_engine(model, 6, **SIZES, enforce_eager=True)
    assert as_dict(eager.run(make_few(), WARM)) == wanted and eager.runner.graphs is None
    assert eager.runner.forward.ops is not torch_ops


def test_another_temperature_leaves_the_step_unchanged(monkeypatch):
    """The graphs of a distribution are captured in the middle of a step."""
    model, found = make_model(**ONE_LAYER), []
    for is_gpu in (False, True):
        if is_gpu:
            stand_in(monkeypatch)
        engine = make_engine(model, 2, **FEW)
        rows, number = make_few(5), 0
        engine.add(rows)
        while not engine.is_idle:
            # The first step on a GPU launches two forwards.
            of = number if is_gpu else max(number - 1, 0)
            engine.step([SamplingParams(), WARM, GREEDY][of % 3], None)
            number += 1
        found.append(as_dict(rows))
    assert found[0] == found[1] and len({of[1:] for of in samplers_of(engine)}) == 3


def test_step_copies_once_launches_two_and_then_waits_once(monkeypatch):
    """It waits for nothing before its launch. While no row takes a page: that is another copy."""
    captures = stand_in(monkeypatch)
    sizes = {"max_length": 64, "page_size": 64, "max_num_batched_tokens": 6}
    engine = make_engine(make_model(**ONE_LAYER), 4, **sizes)
    engine.add(make_rows([(7, 8), (9, 3, 5)], 2, 7))
    for _ in range(3):  # prompts, and rows that share them
        engine.step(WARM, None)
    traffic, launch_ahead = Traffic(monkeypatch, captures), engine.runner.launch_ahead
    on_launch = []

    def launch(*of):
        wait = launch_ahead(*of)
        on_launch.append((traffic.uploads, traffic.waits, captures.num_replays - before))
        return wait

    monkeypatch.setattr(engine.runner, "launch_ahead", launch)
    with traffic:
        for _ in range(2):
            traffic.clear()
            before = captures.num_replays
            engine.step(WARM, None)
            assert (traffic.uploads, traffic.waits) == (1, 1)
    assert on_launch == [(1, 0, 2)] * 2


@pytest.mark.parametrize(
    "queries_per_kv, num_slots, largest",
    [(1, 1024, 1024), (3, 128, 2048), (7, 7, 700), (1, 300, 300)],
)
def test_every_number_of_tokens_fits_a_graph(num_slots, largest, queries_per_kv):
    """Padding is at most a third beyond eight tokens, in no sequence, and in the spare page."""
    rng, cache = np.random.default_rng(num_slots + queries_per_kv), KVCache(num_slots, 4096)
    forward = SimpleNamespace(min_tokens=1, queries_per_kv=queries_per_kv, is_invariant=False)
    graphs = GraphPool(forward, cache, largest)
    assert len(graphs.shapes) <= 50 and graphs.shapes == sorted(graphs.shapes, reverse=True)
    shapes = set()
    for case in range(1000):
        rows = int(rng.integers(1, num_slots + 1))
        widths = ([1], [0, 1], [1, 2, 4], [1] * 50 + [300], [1, 16], [0, 0, 700])[case % 6]
        count = rng.choice(widths, rows)
        count = np.minimum(count, np.maximum(largest - np.append(0, count.cumsum()[:-1]), 0))
        if not (tokens := int(count.sum())):
            continue
        packing = pack_rows(cache, np.full(rows, 3), count, torch.device("cpu"))
        shape = graphs.shape_of(packing.count)
        shapes.add(shape)
        assert tokens <= shape.tokens < max(2 * tokens, tokens * 1.34 + 256 * (tokens > 1024), 2)
        tile = shape.max_q * queries_per_kv
        assert tile <= TILES[-1] and (tile > TILES[0] - queries_per_kv or shape.max_q == 1)
        small = max(TILES[0] // queries_per_kv, 1)
        assert (shape.max_q == small) == (count.max() <= small)
        inputs = np.zeros((FIELDS, shape.tokens + 1), np.int32)
        padded(np.full(tokens, 9), packing, shape, inputs)
        ids, place, position = inputs[:3, : shape.tokens]
        first, slot = inputs[3:, : shape.sequences + 1]
        assert (ids[:tokens] == 9).all() and (place[tokens:] == num_slots * 4096).all()
        assert np.array_equal(place[:tokens], packing.index[0] * 4096 + packing.index[1])
        width = np.diff(first)
        assert width.min() >= 0 and width.max() <= shape.max_q and first[-1] == tokens
        sequence = np.arange(shape.sequences).repeat(width)
        assert np.array_equal(slot[sequence], packing.index[0])
        assert np.array_equal(position[:tokens], packing.index[1])
    assert len(shapes) > 8


def test_invariant_forwards_have_one_kind_of_tile():
    forward = SimpleNamespace(min_tokens=64, queries_per_kv=4, is_invariant=True)
    shapes = GraphPool(forward, KVCache(9, 4096), 512).shapes
    assert {shape.max_q for shape in shapes} == {16} and shapes[-1].tokens == 64


WARNING = "warning: forwards are eager, not CUDA graphs: "


def run_again(monkeypatch, capsys, model, times=(), *, plain=None):
    """Run an engine with graphs twice, with a release in between, and check its rows. Returns
    replays of forwards after each run, pools, and the lines printed. times: see `fail_at`."""
    wanted = plain_rows(plain or model, WARM, make_few())
    captures = stand_in(monkeypatch)
    fail_at(monkeypatch, times)
    engine = make_engine(model, 2, **FEW)
    graphs, replays = engine.runner.graphs.pool, []
    for _ in range(2):
        assert as_dict(engine.run(make_few(), WARM)) == wanted
        replays.append(graphs.num_replays)
        assert (graphs.problem is None) == bool(graphs.graphs)
        engine.release()
        assert engine.runner.cache.num_bytes() == 0 and not graphs.graphs
    assert replays[-1] in (0, engine.num_forwards // 2, engine.num_forwards)
    return replays, captures.pools, capsys.readouterr().err.splitlines()


def test_model_reading_from_the_gpu_is_eager(monkeypatch, capsys):
    model = make_model(**ONE_LAYER)
    plain = copy.deepcopy(model)
    embed = model.get_input_embeddings()
    embed.register_forward_pre_hook(lambda *call: embed.weight.sum().item() and None)
    replays, pools, (line,) = run_again(monkeypatch, capsys, model, plain=plain)
    assert replays == [0, 0] and not pools
    assert line.startswith(WARNING) and "synchronizing" in line


def test_graphs_of_sampling_without_memory_leave_the_rows_as_they_are(monkeypatch, capsys):
    """A step that was to launch two forwards launches one, and the next ones are eager."""
    model = make_model(**ONE_LAYER)
    wanted = plain_rows(model, WARM, make_few())
    stand_in(monkeypatch)
    fail_at(monkeypatch, [3, 4])
    engine = make_engine(model, 2, **FEW)
    assert as_dict(engine.run(make_few(), WARM)) == wanted
    assert not engine.runner.supports_overlap and capsys.readouterr().err.startswith(WARNING)


def test_graphs_of_sampling_are_tried_again_when_memory_runs_out(monkeypatch, capsys):
    """Those of forwards stay. Other graphs: test_captures.py."""
    model = make_model(**ONE_LAYER)
    replays, pools, printed = run_again(monkeypatch, capsys, model, [3])
    assert replays[0] > 2 and not printed
    assert pools.count(None) == 2, "one for each run"


def test_replays_see_weights_changed_in_place(monkeypatch):
    model, found = make_model("qwen2", **ONE_LAYER), []
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.2)
    wanted = [plain_rows(of, GREEDY, make_few()) for of in (model, other)]
    stand_in(monkeypatch)
    engine = make_engine(model, 2, **FEW)
    for _ in range(2):
        found.append(as_dict(engine.run(make_few(), GREEDY)))
        engine.reset()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)
    assert found == wanted and wanted[0] != wanted[1]


class CapturedSums(ThreadTPGroup):
    """Ranks whose sums are recorded without an exchange, as NCCL's are."""

    can_capture = True
    captures = None

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.captures.stage == "capture" else super().all_reduce_(tensor)


def run_ranks(monkeypatch, model, work) -> list:
    """Run work(tp, engine) on two ranks."""
    captures = stand_in(monkeypatch)

    def of_rank(tp):
        own = CapturedSums(tp.meeting, tp.rank)
        own.captures = captures
        return work(own, make_engine(copy.deepcopy(model), 2, **FEW, tp=own))

    return run_together(2, of_rank)


def test_rows_of_replayed_shards_equal_plain_rows(monkeypatch):
    """Sums of each size are made once before the graphs, and then two in the layer."""
    model = make_model(**ONE_LAYER)
    wanted = plain_rows(model, WARM, make_few())

    def of_rank(tp, engine: Engine):
        graphs, sums = engine.runner.graphs.pool, []
        connect = graphs.of.connect
        graphs.of.connect = lambda: (sums.append(tp.num_sums), connect(), sums.append(tp.num_sums))
        found = as_dict(engine.run(make_few(), WARM, Drafter(wanted, 0.3)))
        assert graphs.problem is None and graphs.num_replays == num_launched(engine) > 2
        assert sums == [0, len({shape.tokens for shape in graphs.shapes})]
        assert tp.num_sums == sums[1] + 2 * num_launched(engine)
        return found

    assert run_ranks(monkeypatch, model, of_rank) == [wanted] * 2
