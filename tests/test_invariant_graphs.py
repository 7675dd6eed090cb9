"""Batch invariance on a GPU's path: graphs and eager forwards in triton's interpreter.

A CPU's products depend on how many rows there are, and on where a row is among them. So all of them
are replaced by products in float64, rounded, and those of a tile have a factor that depends on its
rows."""

import numpy as np
import pytest
import torch

from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.graphs import TILES, GraphPool, graph_sizes
from bubblespec.engine.kv_cache import PAGE, SPLIT, pack_rows
from bubblespec.engine.model_checks import prepare_model
from bubblespec.mechanisms import Run, batch_invariant
from bubblespec.mechanisms.batch_invariant import first_difference, row_lengths
from tests.helpers.generation import Drafts, make_rows, make_runner
from tests.helpers.graphs import needs_interpreter, stand_in
from tests.helpers.models import GQA, VOCAB, config_of, random_model

pytestmark = needs_interpreter
MOST, MIN_ROWS = 20, 4  # tokens of the largest and the smallest graph
GRAPHS = {4, 16, 20}  # tokens of all
ONE_LAYER = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
ONE_LAYER |= {"hidden_size": 32, "max_position_embeddings": 2 * SPLIT}


class Products:
    """Products of weights. counts: their rows so far; those of `wrong` rows round differently."""

    def __init__(self):
        self.counts: set[int] = set()
        self.wrong = 0

    def __call__(self, x, weight, bias):
        self.counts.add(len(x))
        assert bias is None
        return (x.double() @ weight.double().T).float() * (1 + 1e-3 * (len(x) == self.wrong))


def product_of_tile(builder, a, b, d, *options):
    from triton.runtime.interpreter import TensorHandle

    found = a.data.astype(np.float64) @ b.data * (1 + 2**-20 * len(a.data))
    return TensorHandle(found.astype(np.float32) + d.data, d.dtype.scalar)


@pytest.fixture
def products(monkeypatch) -> Products:
    from triton.runtime.interpreter import InterpreterBuilder

    stand_in(monkeypatch)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", product_of_tile)
    monkeypatch.setattr(batch_invariant, "MIN_ROWS", MIN_ROWS)
    monkeypatch.setattr(batch_invariant, "NUM_TEXTS", 2)
    monkeypatch.setattr(batch_invariant, "linear", found := Products())
    return found


def runner_of(num_slots: int, length: int, **options):
    model = random_model(config_of("Llama", GQA, **ONE_LAYER), torch.float32)
    prepare_model(model, length)
    sizes = {"max_num_batched_tokens": MOST, "batch_invariant": True, **options}
    return make_runner(model, num_slots, length, 0, **sizes)


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore:invalid value")  # of padding, which is in no sequence
def test_token_has_the_same_bits_in_every_forward(products):
    """Alone, among others in a graph, in a larger eager forward, next to a row of two splits."""
    runner = runner_of(3, SPLIT + 40)
    forward, cache, views = runner.forward, runner.cache, []
    graphs, attend = GraphPool(forward, cache, MOST), forward.decoder.attend
    forward.decoder.attend = lambda *of: views.append(of[1].view) or attend(*of)
    text = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, 10))
    found, long = [], SPLIT + 1  # whose keys are zeros
    for hidden, start, counts in (
        (forward.hidden, [0, 0, 0], [[0, 10, 0]]),
        (graphs.hidden, [0, 0, 0], [[1, 3, 1], [1, 1, 1], [9, 6, 0]]),
        (forward.hidden, [long, 0, 3], [[30, 3, 30], [1, 1, 1], [1, 6, 2]]),
        (graphs.hidden, [long, 0, 3], [[1, 10, 9]]),
    ):
        start, states = np.array(start), []
        for count in np.array(counts):
            packing = pack_rows(cache, start.copy(), count, runner.device)
            is_own = packing.index[0] == 1
            tokens = torch.ones(len(is_own), dtype=torch.int64)
            tokens[is_own] = text[packing.index[1][is_own]]
            states.append(hidden(tokens, packing)[: len(tokens)][is_own].clone())
            start += count
        found.append(torch.cat(states))
    assert all(torch.equal(other, found[0]) for other in found[1:])
    assert {view.max_keys > SPLIT for view in views} == {False, True}
    assert {(view.max_q, view.split) for view in views} == {
        (TILES[-1] // forward.queries_per_kv, SPLIT)
    }


def test_rows_have_the_same_bits_with_and_without_graphs(products):
    """Log-probabilities too. Eager products have the sizes of graphs."""
    found, params, prompts = [], SamplingParams(), [(7, 8), (9, 3, 5) * 3]
    for slots, options, draft in (
        (2, {}, None),
        (1, {"enforce_eager": True}, lambda row, length: [12] * (length % 3) or None),
    ):
        engine = Engine(runner_of(slots, 64, **options))
        rows = engine.run(make_rows(prompts, 1, 4), params, draft and Drafts(draft))
        assert (engine.runner.graphs is None) == bool(options)
        found.append([(row.tokens.tolist(), row.logprob.tolist()) for row in rows])
    assert found[0] == found[1]
    assert products.counts <= set(graph_sizes(MOST, MIN_ROWS)) == GRAPHS


@pytest.mark.parametrize("wrong", [0, 20])
def test_check_compares_graphs_of_every_size(products, wrong):
    products.wrong = wrong
    found = first_difference(runner_of(3, 12), VOCAB)
    if wrong:
        assert found.startswith(f"in a forward of {wrong} tokens ") and "in a graph differ" in found
    else:
        assert found is None and products.counts == GRAPHS


def test_check_has_room_for_the_largest_forward_alone(monkeypatch):
    """Keys and values of 20,000 tokens, up to a page for each row and two of the long one."""
    config = load_config("configs/tiny_cpu.yaml", ["rollout.max_completion_length=2000"])
    config.model.batch_invariant = True
    config.rollout.max_num_batched_tokens = most = 20_000
    model = random_model(config_of("Llama", GQA, **ONE_LAYER), torch.float32)
    prepare_model(model, 64)
    stand_in(monkeypatch)
    seen = []
    monkeypatch.setattr(batch_invariant, "first_difference", lambda *of: seen.append(of[0]))
    batch_invariant.prepare(Run(config, Ranks(torch.device("cpu")), model))
    (runner,) = seen
    lengths = row_lengths(runner.num_slots, runner.max_length)
    assert lengths.max() > SPLIT and lengths.sum() >= most == runner.max_num_batched_tokens
    assert runner.pages.needed(lengths).sum() == runner.pages.num_pages < most / PAGE + 3
    assert runner.graphs.pool.sizes[-1] == most


def test_check_finds_eager_tiles_of_another_size(products):
    runner = runner_of(3, 12)
    runner.cache.fixed_q //= 2
    assert "hidden states, eager differ" in first_difference(runner, VOCAB)
