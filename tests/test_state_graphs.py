"""Models with a state by the engine of a GPU, in triton's interpreter, against torch's engine."""

import functools

import numpy as np
import pytest
import torch
from test_architectures import HYBRIDS, build
from test_graphs import num_launched

from bubblespec.engine import kv_cache, ops, states
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.ops import torch_ops
from bubblespec.engine.recurrent import state_bytes
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.trial import replace
from tests.helpers.generation import Drafter, as_dict, make_engine, make_prompts, make_rows
from tests.helpers.graphs import needs_interpreter, stand_in
from tests.helpers.turns import SEED, play

pytestmark = needs_interpreter
LENGTH, LIMIT = 48, 10
STANDING = 4 * 2 * 4  # bytes of where three slots and what is kept stand
# The interpreter is slow.
FEW = {"linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 4}
FEW |= {"linear_value_head_dim": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
FEW |= {"mamba_n_heads": 2, "mamba_n_groups": 1, "mamba_d_head": 64}
SIZES = {"max_length": LENGTH, "seed": SEED}
PAGED = SIZES | {"max_num_batched_tokens": 8, "page_size": 16}


def make():
    rows = make_rows([*make_prompts(1, 7), (5, 6), tuple(range(1, 24))], 2, LIMIT)
    for row in rows:
        row.has_turns = row.id.sample != 1
    return rows


@functools.cache
def baseline(name: str):
    kind, base = HYBRIDS[name]
    few = {key: of for key, of in FEW.items() if key in base}
    model = build(kind, base | few, torch.float32)
    prepare_model(model, LENGTH)
    engine, rows = make_engine(model, 4, **SIZES), make()
    assert engine.runner.forward.ops is torch_ops
    play(engine, rows, np.random.default_rng(1))
    return model, as_dict(rows)


def is_far_ahead(monkeypatch, depth: int) -> None:
    """Let up to `depth` forwards be in flight behind the first."""
    monkeypatch.setattr(ModelRunner, "depth", depth)
    monkeypatch.setattr("bubblespec.engine.batch.OverlapPolicy.goes_ahead", lambda *of: True)


@pytest.mark.parametrize(
    "name, depth, num_pages", [("qwen3_5", 1, 4), ("granite_hybrid", 2, None), ("lfm2", 0, None)]
)
def test_rows_of_graphs_equal_rows_of_torch(monkeypatch, name, depth, num_pages):
    """Turns, preemptions, rows that leave, drafts, and windows of fewer tokens than prompts."""
    model, wanted = baseline(name)
    stand_in(monkeypatch)
    is_far_ahead(monkeypatch, depth)
    monkeypatch.setitem(states.WINDOWS, "cuda", 4)
    monkeypatch.setattr(kv_cache, "_zeros", lambda shape, like: like.new_full(shape, torch.nan))
    engine, rows = make_engine(model, 3, **PAGED, num_pages=num_pages), make()
    drafter, in_flight = Drafter(wanted, 0.2), []
    wait = type(engine)._land
    monkeypatch.setattr(
        type(engine), "_land", lambda own, *of: in_flight.append(len(own.flights)) or wait(own, *of)
    )
    play(engine, rows, np.random.default_rng(depth), drafter)
    assert as_dict(rows) == wanted
    pool = engine.runner.graphs.pool
    assert pool.problem is None and pool.num_replays == num_launched(engine)
    assert max(in_flight) == depth and 0 < drafter.num_accepted < drafter.num_draft
    assert num_pages is None or engine.num_admitted > len(rows)
    of_rows = engine.runner.cache.states.num_bytes() - STANDING
    assert of_rows == (engine.num_slots + 1) * state_bytes(model, "cpu")


def test_rows_without_kernels_of_states_are_equal(monkeypatch):
    model, wanted = baseline("qwen3_5")
    stand_in(monkeypatch)
    replace((ops.STATES,), "they fail")
    engine, rows = make_engine(model, 3, **PAGED), make()
    assert engine.runner.graphs is None and engine.runner.forward.ops is not torch_ops
    play(engine, rows, np.random.default_rng(2))
    assert as_dict(rows) == wanted
    assert engine.runner.cache.states.num_bytes() == 4 * state_bytes(model, "cpu")
