"""The drafter's chains in an engine, against a plain transcription."""

import numpy as np
import pytest
import torch
from test_architectures import SERVED, build

from bubblespec.engine.arrays import packed
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import output_head, pack_sequences
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.mechanisms.drafter import mechanism as drafter_module
from bubblespec.mechanisms.drafter.eagle3 import Eagle3
from bubblespec.mechanisms.drafter.layer import HeadDrafter
from bubblespec.mechanisms.drafter.mechanism import MAX_CHAIN_LENGTH, DrafterRunner
from bubblespec.types import Row, SampleId
from tests.helpers.drafter_oracle import (
    MAX_LENGTH,
    NAMES,
    PARAMS,
    SEED,
    chain_of,
    draft,
    hidden_of,
    make_drafter,
    make_policy,
)
from tests.helpers.generation import make_runner
from tests.helpers.graphs import needs_interpreter, stand_in
from tests.helpers.models import VOCAB


class CheckedDrafts:
    """A proposer that compares some chains with the oracle, and drafts true and wrong tokens."""

    def __init__(self, runner: DrafterRunner, truth: dict, share: float):
        """share: of the forwards before which chains are checked."""
        self.runner, self.truth, self.share = runner, truth, share
        self.random = np.random.default_rng(2)
        self.num_checked, self.caught_up, self.contexts = 0, [], []

    def propose(self, rows, lengths, room, budget, ahead):
        random, active = self.random, self.runner.engine.rows
        if len(active) <= drafter_module.MAX_ROWS and random.random() < self.share:
            asked = [n for n, row in enumerate(active) if any(row is r for r in rows)]
            slots = np.array([n for n in asked if random.random() < 0.8], np.int64)
            self.check(slots, int(random.integers(1, MAX_CHAIN_LENGTH + 1)))
        drafts = []
        for row, known, fits in zip(rows, lengths.tolist(), room.tolist(), strict=True):
            count = min(int(random.choice([0, 1, 3, 8, 40])), fits)
            draft = np.array(self.truth[row.id][known : known + count], np.int64)
            draft[int(random.integers(0, count + 1)) :] = 1
            drafts.append(draft if len(draft) else None)
        return packed(drafts)

    def check(self, slots: np.ndarray, length: int) -> None:
        engine, drafter = self.runner.engine, self.runner.drafter
        chains, found, num_positions = draft(self.runner, slots, length)
        assert chains.shape == (len(found), length) and set(found.tolist()) <= set(slots.tolist())
        assert num_positions >= len(found)
        for slot, chain in zip(found.tolist(), chains.tolist(), strict=True):
            row, known = engine.rows[slot], int(engine.length[slot])
            tokens = engine.tokens[slot, :known].tolist()
            assert tokens == [*row.prompt, *self.truth[row.id][: known - len(row.prompt)]]
            base = int(self.runner._base[slot])
            assert 0 <= base < known - 1
            states = drafter.combine(hidden_of(drafter.policy, tokens[:-1]))[base:]
            generated = known - len(row.prompt)
            assert chain == chain_of(drafter, states, tokens[base + 1 :], row.id, generated, length)
            self.num_checked += 1
            self.contexts.append(known - 1 - base)
        if len(found):
            self.caught_up.append(num_positions / len(found))

    def observe(self, rows, tokens, num_gained, num_draft, num_accepted):
        pass


def make_rows(count: int, num_generations: int, first: int = 0) -> list[Row]:
    """Prompts of one token among them, and long ones; samples of a prompt are adjacent."""
    random = np.random.default_rng(first)
    sizes = random.choice([1, 2, 9, 50], count)
    prompts = [tuple(random.integers(12, VOCAB, size).tolist()) for size in sizes]
    return [
        Row(SampleId(first + prompt_id, 3, sample), prompt, 60)
        for prompt_id, prompt in enumerate(prompts)
        for sample in range(num_generations)
    ]


def make_engine(policy, num_slots: int, params=PARAMS, drafter=None, **options) -> DrafterRunner:
    engine = Engine(make_runner(policy, num_slots, MAX_LENGTH, SEED, **options))
    runner = DrafterRunner(drafter or make_drafter(policy), engine, params)
    runner.enable(True)
    return runner


def disturb(engine: Engine, random: np.random.Generator) -> None:
    if random.random() < 0.06 and engine.rows:
        row = engine.rows[int(random.integers(len(engine.rows)))]
        engine.drop(row)
        engine.add([row])
    if random.random() < 0.03:
        waiting = engine.collect()
        engine.reset()
        engine.add(waiting)


@pytest.fixture
def short_memory(monkeypatch):
    monkeypatch.setattr(drafter_module, "NUM_KEPT", 24)
    monkeypatch.setattr(drafter_module, "CONTEXT", 12)


CHAINS = [*((name, 32, Eagle3) for name in NAMES), ("llama", 4, Eagle3)]
CHAINS += [(name, 32, HeadDrafter) for name in ("llama", "qwen3", "qwen3_moe")]


@pytest.mark.parametrize("name, max_rows, shape", CHAINS)
def test_chains_of_a_batch_equal_chains_of_each_row(
    monkeypatch, short_memory, name, max_rows, shape
):
    """Rows finish, move, share prompts and are dropped; beyond MAX_ROWS nothing is kept."""
    monkeypatch.setattr(drafter_module, "MAX_ROWS", max_rows)
    check_chains(name, 64 if max_rows == 32 else 16, shape=shape)


def chains_of_rows(policy) -> tuple[list, DrafterRunner]:
    runner, chains = make_engine(policy, 3, max_num_batched_tokens=16, page_size=16), []
    runner.engine.add([Row(SampleId(9, 3, n), tuple(range(12, 15 + 2 * n)), 9) for n in range(3)])
    for _ in range(4):
        runner.engine.step(PARAMS)
        chains += [part.tolist() for part in draft(runner, np.arange(3), 2)[:2]]
    return chains, runner


def test_chains_by_graphs_equal_eager_chains(monkeypatch):
    """All forwards of the drafter and of the policy are graphs, which share their memory; the
    drafter's cache has no pages."""
    pytest.importorskip("triton")
    monkeypatch.setattr(drafter_module, "MAX_GRAPH_TOKENS", 16)
    policy = make_policy("llama", torch.float32)
    wanted, _ = chains_of_rows(policy)
    captures = stand_in(monkeypatch)
    found, runner = chains_of_rows(policy)
    assert found == wanted and len(wanted[0]) == 3
    assert runner.graphs.problem is None and runner.graphs.num_replays == 8
    assert runner.cache.pages is None and captures.pools.count(None) == 1


test_chains_by_graphs_equal_eager_chains.pytestmark = needs_interpreter


def check_chains(
    name: str, max_num_batched_tokens: int, firsts: tuple[int, ...] = (0, 50), shape=Eagle3
) -> None:
    """Compare every chain of an engine with that of its row alone.

    firsts: of the uids of each batch; the engine gives its memory back behind each."""
    policy = make_policy(name)
    plain = Engine(ModelRunner(policy, 8, MAX_LENGTH, SEED))
    all_rows = plain.run([row for first in firsts for row in make_rows(4, 3, first)], PARAMS)
    truth = {row.id: row.tokens.tolist() for row in all_rows}
    drafter = make_drafter(policy, shape=shape)
    runner = make_engine(policy, 5, drafter=drafter, max_num_batched_tokens=max_num_batched_tokens)
    engine = runner.engine
    drafts = CheckedDrafts(runner, truth, 0.25 if drafter_module.MAX_ROWS == 32 else 1.0)
    for first in firsts:
        rows = make_rows(4, 3, first)
        engine.add(rows)
        while not engine.is_idle:
            engine.step(PARAMS, drafts)
            disturb(engine, drafts.random)
        assert all(row.tokens.tolist() == truth[row.id] for row in rows)
        engine.release()
        assert runner.cache.num_bytes() == 0 and runner._hidden is None
    assert drafts.num_checked > 30
    assert max(drafts.caught_up) > 3 and max(drafts.contexts) > drafter_module.CONTEXT + 3


def test_disabled_drafter_keeps_no_state():
    runner = make_engine(make_policy("llama"), 2)
    engine, rows = runner.engine, make_rows(2, 1)
    engine.run(rows, PARAMS)
    assert runner._hidden is not None
    runner.enable(False)
    engine.reset()
    again = engine.run(make_rows(2, 1), PARAMS)
    assert runner._hidden is None and not runner.cache.layers
    assert [row.tokens.tolist() for row in again] == [row.tokens.tolist() for row in rows]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_spoilt_weights_draft_known_tokens_or_nothing(value):
    policy = make_policy("llama")
    drafter = make_drafter(policy)
    with torch.no_grad():
        for param in drafter.parameters():
            param.fill_(value)
    for params in (PARAMS, SamplingParams(top_p=0.9), SamplingParams(temperature=0.0)):
        runner = make_engine(policy, 4, params, drafter)
        runner.engine.add(make_rows(2, 1))
        for _ in range(4):
            runner.engine.step(params)
        if value:
            with pytest.raises(ValueError, match="not numbers"):
                draft(runner, np.arange(2), 3)
        else:
            chains, slots, _ = draft(runner, np.arange(2), 3)
            assert len(slots) == 2 and set(chains.ravel().tolist()) <= set(drafter.ids.tolist())


def test_head_follows_weights_and_trains_after_a_chain():
    policy = make_policy("llama")
    drafter = make_drafter(policy, shape=HeadDrafter)
    state = torch.randn(3, 64, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        drafter.logits(state)
    drafter.logits(state).sum().backward()
    assert state.grad is not None
    with torch.no_grad():
        policy.lm_head.weight.mul_(2.0)
    wanted = output_head(policy)(state)[:, drafter.ids]
    assert torch.allclose(drafter.logits(state), wanted, rtol=0, atol=1e-12)


def test_layer_begins_as_the_last_with_keys_of_its_own():
    kind, options = SERVED["gemma4_shared"]
    policy = build(kind, options)
    prepare_model(policy, MAX_LENGTH)
    drafter = HeadDrafter(policy, np.arange(12, VOCAB))
    own, theirs = drafter.body.layers[0].self_attn, policy.model.layers[1].self_attn
    for name, wanted in theirs.named_parameters():
        assert torch.equal(own.get_parameter(name), wanted), name
    packing = pack_sequences([5], policy.device)
    states = drafter(torch.randn(5, 64).double(), torch.arange(5), packing)
    assert states.shape == (5, 64) and states.isfinite().all()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral-window", "qwen3_moe"])
def test_layer_begins_as_last_full_attention_layer(name):
    policy = make_policy(name)
    kinds = getattr(policy.config, "layer_types", None) or ["full_attention"]
    full = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    number = full[-1] if len(full) < len(kinds) and full else policy.config.num_hidden_layers - 1
    theirs = policy.model.layers[number].state_dict()
    of_head = HeadDrafter(policy, np.arange(12, VOCAB)).body.layers[0].state_dict()
    assert of_head.keys() == theirs.keys()
    assert all(torch.equal(of_head[name], tensor) for name, tensor in theirs.items())
    drafter = Eagle3(policy, np.arange(12, VOCAB))
    own = drafter.midlayer.state_dict()
    assert torch.equal(own["self_attn.o_proj.weight"], theirs["self_attn.o_proj.weight"])
    assert torch.equal(own["self_attn.k_proj.weight"][:, 64:], theirs["self_attn.k_proj.weight"])
    assert torch.equal(own["hidden_norm.weight"], theirs["input_layernorm.weight"])
    if name != "qwen3_moe":
        assert torch.equal(own["mlp.up_proj.weight"], theirs["mlp.up_proj.weight"])
    assert torch.equal(drafter.lm_head.weight, policy.lm_head.weight[12:])
