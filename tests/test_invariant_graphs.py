"""Batch invariance on a GPU's path: graphs and eager forwards in triton's interpreter."""

import numpy as np
import pytest
import torch

from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.graphs import TILES, ForwardGraphs, graph_sizes
from bubblespec.engine.kv_cache import SPLIT, pack_rows
from bubblespec.engine.model_checks import prepare_model
from bubblespec.mechanisms import batch_invariant
from bubblespec.mechanisms.batch_invariant import first_difference
from tests.helpers.generation import Drafts, make_rows, make_runner
from tests.helpers.graphs import needs_interpreter, stand_in
from tests.helpers.models import GQA, VOCAB, config_of, random_model

pytestmark = needs_interpreter
MOST, MIN_ROWS = 20, 4  # tokens of the largest and the smallest graph
ONE_LAYER = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}


class Products:
    """A product whose rows are computed one by one, as this CPU's own depend on their number.

    counts: rows of all products so far; one of `wrong` rows rounds differently."""

    def __init__(self, monkeypatch):
        self.counts: set[int] = set()
        self.wrong = -1
        monkeypatch.setattr(batch_invariant, "linear", self)

    def __call__(self, x, weight, bias):
        if x.shape[-2] != 1:
            self.counts.add(len(x))
        out = (x[..., None, :] * weight).sum(-1) * (1 + 1e-3 * (len(x) == self.wrong))
        return out if bias is None else out + bias


@pytest.fixture
def products(monkeypatch) -> Products:
    stand_in(monkeypatch)
    monkeypatch.setattr(batch_invariant, "MIN_ROWS", MIN_ROWS)
    return Products(monkeypatch)


def make_model():
    model = random_model(config_of("Llama", GQA, **ONE_LAYER), torch.float32)
    prepare_model(model, 64)
    return model


def runner_of(num_slots: int, length: int, **options):
    sizes = {"max_num_batched_tokens": MOST, **options}
    return make_runner(make_model(), num_slots, length, 0, batch_invariant=True, **sizes)


@torch.inference_mode()
def test_token_has_the_same_bits_in_every_forward(products):
    """Alone, among others in a graph, in a larger eager forward, next to a row of two splits."""
    runner = runner_of(4, SPLIT + 40)
    forward, cache, views = runner.forward, runner.cache, []
    graphs = ForwardGraphs(forward, cache, MOST)
    attend = forward.decoder.attend
    forward.decoder.attend = lambda *of: views.append(of[1].view) or attend(*of)
    text = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, 12))
    found = []
    for hidden, start, counts in (
        (forward.hidden, [0, 0, 0], [[0, 12, 0]]),
        (forward.hidden, [0, 0, 0], [[0, 5, 0], [0, 1, 0], [0, 6, 0]]),
        (graphs.hidden, [0, 0, 0], [[1, 5, 1], [1, 1, 1], [9, 6, 0]]),
        (forward.hidden, [SPLIT + 1, 0, 3], [[30, 5, 30], [1, 1, 1], [1, 6, 2]]),
        (graphs.hidden, [SPLIT + 1, 0, 3], [[1, 5, 1], [1, 1, 9], [1, 6, 2]]),
    ):
        start, states = np.array(start), []
        for count in np.array(counts):
            packing = pack_rows(cache, start.copy(), count, runner.device)
            own = torch.from_numpy(packing.index[0] == 1)
            tokens = torch.ones(len(own), dtype=torch.int64)
            tokens[own] = text[packing.index[1][own.numpy()]]
            states.append(hidden(tokens, packing)[: len(own)][own].clone())
            start += count
        found.append(torch.cat(states))
    assert all(torch.equal(other, found[0]) for other in found[1:])
    assert {view.max_keys > SPLIT for view in views} == {False, True}
    assert {(view.max_q, view.split) for view in views} == {(TILES[-1] // forward.fold, SPLIT)}
    assert products.counts <= {4, 16, 20}


def test_rows_have_the_same_bits_with_and_without_graphs(products):
    """Log-probabilities too. Eager products have the sizes of graphs."""
    found, params = [], SamplingParams()
    for slots, options, draft in (
        (4, {}, None),
        (3, {"enforce_eager": True}, lambda row, length: [12] * (length % 3)),
    ):
        engine = Engine(runner_of(slots, 64, **options))
        rows = engine.run(make_rows([(7, 8), (9, 3, 5) * 4], 2, 5), params, draft and Drafts(draft))
        assert (engine.runner.graphs is None) == bool(options)
        found.append([(row.tokens.tolist(), row.logprob.tolist()) for row in rows])
    assert found[0] == found[1]
    assert products.counts <= set(graph_sizes(MOST, MIN_ROWS)) == {4, 16, 20}


def test_check_compares_every_size_in_graphs_and_eager(products):
    runner = runner_of(5, 16)
    assert first_difference(runner, VOCAB) is None
    assert products.counts == {4, 16, 20}
    for products.wrong, way in ((20, "in a graph"), (16, "in a graph")):
        found = first_difference(runner, VOCAB)
        assert found.startswith(f"in a forward of {products.wrong} tokens ") and way in found


def test_check_finds_what_differs_in_eager_forwards_alone(products):
    runner = runner_of(5, 16)
    hidden = runner.forward.hidden
    runner.forward.hidden = lambda tokens, packing: (
        hidden(tokens, packing)
        * (1 + 1e-3 * (hasattr(packing, "cache") and not hasattr(packing.cache, "none")))
    )
    del runner
