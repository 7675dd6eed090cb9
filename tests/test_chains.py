"""Chains of the learned drafter in an engine, against a plain transcription; and the noise that
they are drawn with."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_graphs import stand_in

from bubblespec.engine import chains as chains_module
from bubblespec.engine import runner as runner_module
from bubblespec.engine.chains import LONGEST, Chains
from bubblespec.engine.drafter import Drafter
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import output_head
from bubblespec.engine.noise import gumbel, random_bits, stream_keys
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.rollout.tp_tail import OwnersPropose
from bubblespec.types import Row, SampleId
from tests.helpers.drafter_oracle import (
    MAX_LENGTH,
    NAMES,
    PARAMS,
    SEED,
    chain_of,
    make_drafter,
    make_policy,
    states_of,
)
from tests.helpers.joint import run_together
from tests.helpers.models import VOCAB
from tests.helpers.reference_step import noise_key
from tests.helpers.reference_step import random_bits as reference_bits


class CheckedDrafts:
    """A proposer that draws chains for some rows now and then, compares them with the oracle, and
    proposes what is sure to have rejected and accepted drafts: true tokens, and wrong ones behind
    them."""

    def __init__(
        self,
        engine: Engine,
        policy,
        drafter: Drafter,
        truth: dict,
        random: np.random.Generator,
        share: float,
    ):
        self.share = share  # of the forwards that have chains before them
        self.engine, self.policy, self.drafter, self.truth, self.random = (
            engine,
            policy,
            drafter,
            truth,
            random,
        )
        self.num_checked, self.caught_up, self.contexts = 0, [], []

    def propose(self, rows, lengths, room, budget):
        engine, random = self.engine, self.random
        chains = engine.runner.chains
        if len(engine.rows) <= chains_module.MOST_ROWS and random.random() < self.share:
            slots = [
                slot
                for slot, row in enumerate(engine.rows)
                if any(row is r for r in rows) and random.random() < 0.8
            ]
            self.check(
                chains, engine, np.array(slots, np.int64), int(random.integers(1, LONGEST + 1))
            )
        drafts = []
        for row, known, fits in zip(rows, lengths.tolist(), room.tolist(), strict=True):
            count = min(int(random.choice([0, 1, 3, 8, 40])), fits)
            draft = np.array(self.truth[row.id][known : known + count], np.int64)
            draft[int(random.integers(0, count + 1)) :] = 1
            drafts.append(draft if len(draft) else None)
        return drafts

    def check(self, chains: Chains, engine, slots: np.ndarray, length: int) -> None:
        drawn, got, num_positions = chains.draft(engine, slots, length)
        assert drawn.shape == (len(got), length) and set(got.tolist()) <= set(slots.tolist())
        assert num_positions >= len(got)
        for slot, chain in zip(got.tolist(), drawn.tolist(), strict=True):
            row, known = self.engine.rows[slot], int(engine.length[slot])
            tokens = engine.tokens[slot, :known].tolist()
            assert tokens == [*row.prompt, *self.truth[row.id][: known - len(row.prompt)]]
            base = int(chains._base[slot])
            assert 0 <= base < known - 1
            wanted = chain_of(
                self.drafter,
                states_of(self.policy, tokens[:-1])[base:],
                tokens[base + 1 :],
                row.id,
                known - len(row.prompt),
                length,
            )
            assert chain == wanted
            self.num_checked += 1
            self.contexts.append(known - 1 - base)
        if len(got):
            self.caught_up.append(num_positions / len(got))

    def observe(self, rows, tokens, num_draft, num_accepted):
        pass


def make_rows(count: int, num_generations: int, first: int = 0) -> list[Row]:
    """Prompts of one token among them, and long ones; samples of a prompt are adjacent."""
    random = np.random.default_rng(first)
    prompts = [
        tuple(random.integers(12, VOCAB, size).tolist())
        for size in random.choice([1, 2, 9, 50], count)
    ]
    return [
        Row(SampleId(first + u, 3, j), p, 60)
        for u, p in enumerate(prompts)
        for j in range(num_generations)
    ]


@pytest.fixture
def short_memory(monkeypatch):
    """What is kept of a row is soon too little for its context."""
    monkeypatch.setattr(chains_module, "KEPT", 24)
    monkeypatch.setattr(chains_module, "CONTEXT", 12)


def disturb(engine: Engine, random: np.random.Generator) -> None:
    """Drop a row and add it again, or begin anew with only some rows staying."""
    if random.random() < 0.06 and engine.rows:
        row = engine.rows[int(random.integers(len(engine.rows)))]
        engine.drop(row)
        engine.add([row])
    if random.random() < 0.03 and not engine.prefilling():
        others = [*engine.queue]
        engine.reset(list(engine.rows))
        engine.add(others)


@pytest.mark.parametrize("most_rows, max_batch_tokens", [(32, 64), (4, 16)])
@pytest.mark.parametrize("name", NAMES)
def test_chains_are_those_of_the_row_alone(
    monkeypatch, short_memory, name, most_rows, max_batch_tokens
):
    """Rows finish, move, share prompts, have drafts rejected, are dropped and come again; with more
    than MOST_ROWS of them nothing is kept for a while."""
    if (name not in NAMES[:1]) and most_rows == 4:
        pytest.skip("what is kept does not depend on the architecture")
    monkeypatch.setattr(chains_module, "MOST_ROWS", most_rows)
    check_chains(name, most_rows, max_batch_tokens, "sdpa")


def test_chains_by_graphs_are_the_same(monkeypatch, short_memory):
    """All forwards of the drafter and of the policy are graphs, which share their memory."""
    monkeypatch.setattr(chains_module, "MOST_IN_GRAPH", 40)
    captures = stand_in(monkeypatch)
    graphs = check_chains("llama", 32, 64, "varlen").graphs
    assert graphs.num_replays > 40 and not graphs.is_off
    largest = [
        size for size, pool in zip(captures.sizes, captures.pools, strict=True) if pool is None
    ]
    assert set(largest) == {64}, "the drafter's take the memory of the policy's"


def check_chains(name: str, most_rows: int, max_batch_tokens: int, kernel: str) -> Chains:
    """Every chain of an engine with this kernel against that of its row alone."""
    policy = make_policy(name)
    drafter = make_drafter(policy)
    truth = {}
    plain = Engine(ModelRunner(policy, 8, MAX_LENGTH, SEED))
    for first in (0, 50):
        truth |= {row.id: row.tokens.tolist() for row in plain.run(make_rows(4, 3, first), PARAMS)}
    random = np.random.default_rng(2)
    runner = ModelRunner(
        policy, 5, MAX_LENGTH, SEED, max_batch_tokens=max_batch_tokens, kernel=kernel
    )
    engine = Engine(runner)
    runner.chains = Chains(drafter, runner, PARAMS)
    drafts = CheckedDrafts(engine, policy, drafter, truth, random, 0.25 if most_rows == 32 else 1.0)
    for first in (0, 50):
        rows = make_rows(4, 3, first)
        engine.add(rows)
        while not engine.is_idle:
            engine.step(PARAMS, drafts)
            disturb(engine, random)
        assert {row.id: row.tokens.tolist() for row in rows} == {
            row.id: truth[row.id] for row in rows
        }
        engine.release()
        assert runner.chains.cache.num_bytes() == 0
    assert drafts.num_checked > 30
    assert max(drafts.caught_up) > 3 and max(drafts.contexts) > chains_module.CONTEXT + 3
    return runner.chains


@pytest.mark.parametrize("size", [2, 4])
def test_chains_in_slices_are_those_of_the_row_alone(short_memory, size):
    """All ranks decode the same rows together; each drafts for its own ones, over hidden states
    that all have computed."""
    model = make_policy("llama")
    parts, plain = (model, make_drafter(model)), Engine(ModelRunner(model, 8, MAX_LENGTH, SEED))
    truth = {row.id: row.tokens.tolist() for row in plain.run(make_rows(4, 3), PARAMS)}

    def of_rank(joint):
        (policy, drafter), rows = copy.deepcopy(parts), make_rows(4, 3)
        runner = ModelRunner(policy, 5, MAX_LENGTH, SEED, tp=joint, max_batch_tokens=64)
        engine = Engine(runner)
        runner.chains = Chains(drafter, runner, PARAMS)
        drafts = CheckedDrafts(
            engine, policy, drafter, truth, np.random.default_rng(joint.rank), 1.0
        )
        own = {id(row) for row in rows[joint.rank :: size]}
        engine.run(
            rows,
            PARAMS,
            OwnersPropose(
                drafts, own, lambda numbers: joint.gather(torch.from_numpy(numbers)).numpy()
            ),
        )
        assert {row.id: row.tokens.tolist() for row in rows} == truth
        return drafts.num_checked

    assert min(run_together(size, of_rank)) > 5


def test_what_is_kept_of_rejected_drafts_is_not_taken_for_what_is_fed_while_there_are_too_many_rows(
    monkeypatch,
):
    monkeypatch.setattr(chains_module, "MOST_ROWS", 2)
    policy = make_policy("llama")
    runner = ModelRunner(policy, 3, MAX_LENGTH, SEED)
    engine, runner.chains = Engine(runner), Chains(make_drafter(policy), runner, PARAMS)
    rows = [Row(SampleId(number, 0, 0), (20 + number, 30, 40), 60) for number in range(3)]
    truth = {
        row.id: row.tokens.tolist()
        for row in Engine(ModelRunner(policy, 3, MAX_LENGTH, SEED)).run(rows, PARAMS)
    }
    rows = [Row(row.id, row.prompt, 60) for row in rows]
    drafts = CheckedDrafts(
        engine, policy, runner.chains.drafter, truth, np.random.default_rng(0), 0.0
    )
    wrong = SimpleNamespace(
        propose=lambda rows, *_: [np.ones(8, np.int64)] * len(rows), observe=drafts.observe
    )
    engine.add(rows[:2])
    for _ in range(3):
        engine.step(PARAMS, wrong)
    engine.add(rows[2:])
    for _ in range(3):
        engine.step(PARAMS)
    engine.drop(rows[2])
    for _ in range(2):
        engine.step(PARAMS)
        drafts.check(runner.chains, engine, np.arange(len(engine.rows)), 3)
    assert drafts.num_checked == 2 * len(engine.rows) > 0


def test_samples_of_a_prompt_all_begin_with_its_states(monkeypatch):
    monkeypatch.setattr(chains_module, "CONTEXT", 12)
    policy = make_policy("llama")
    runner = ModelRunner(policy, 4, MAX_LENGTH, SEED)
    engine, runner.chains = Engine(runner), Chains(make_drafter(policy), runner, PARAMS)
    prompt = tuple(range(12, 42))
    engine.add([Row(SampleId(1, 0, number), prompt, 20) for number in range(3)])
    while engine.prefilling():
        engine.step(PARAMS)
    while not (decoding := engine.decoding()) or len(decoding) < 3:
        engine.step(PARAMS)
    _, slots, num_positions = runner.chains.draft(engine, np.arange(3), 1)
    assert slots.tolist() == [0, 1, 2] and num_positions == 3 * 12


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_drafter_with_spoilt_weights_still_drafts_its_tokens(value):
    policy = make_policy("llama")
    drafter = make_drafter(policy)
    with torch.no_grad():
        for param in drafter.parameters():
            param.fill_(value)
    for params in (PARAMS, SamplingParams(top_p=0.9), SamplingParams(temperature=0.0)):
        runner = ModelRunner(policy, 4, MAX_LENGTH, SEED)
        engine, runner.chains = Engine(runner), Chains(drafter, runner, params)
        engine.add(make_rows(2, 1))
        for _ in range(4):
            engine.step(params)
        drawn, slots, _ = runner.chains.draft(engine, np.arange(2), 3)
        assert len(slots) == 2 and set(drawn.ravel().tolist()) <= set(drafter.ids.tolist())


def test_the_head_follows_the_weights_and_is_fit_for_training_after_a_chain():
    policy = make_policy("llama")
    drafter = make_drafter(policy)
    state = torch.randn(3, 64, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        drafter.logits(state)
    drafter.logits(state).sum().backward()
    assert state.grad is not None
    with torch.no_grad():
        policy.lm_head.weight.mul_(2.0)
    assert torch.allclose(
        drafter.logits(state), output_head(policy)(state)[:, drafter.ids], rtol=0, atol=1e-12
    )
    drafter.restrict_to(np.array([3, 4]))
    assert torch.allclose(
        drafter.logits(state), output_head(policy)(state)[:, [3, 4]], rtol=0, atol=1e-12
    )


def test_chains_may_be_longer_than_what_their_rows_can_get():
    policy = make_policy("llama")
    runner = ModelRunner(policy, 1, 12, SEED)
    chains = runner.chains = Chains(make_drafter(policy), runner, PARAMS)
    engine, lengths = Engine(runner), []
    engine.add([Row(SampleId(0, 3, 0), (7,), 11)])
    while not engine.is_idle:
        engine.step(SamplingParams(temperature=0.8))
        if engine.rows:
            lengths.append(int(engine.lengths[0]))
            assert chains.draft(engine, np.array([0]), LONGEST)[0].shape == (1, LONGEST)
    assert lengths[-1] == 11, "of 12 positions"


# Noise


def test_noise_of_some_tokens_is_that_of_the_whole_vocabulary():
    random = np.random.default_rng(0)
    keys = torch.from_numpy(random.integers(-(2**31), 2**31, (6, 4)).astype(np.int32))
    ids = torch.from_numpy(np.sort(random.choice(5000, 40, replace=False)).astype(np.int32))
    assert torch.equal(random_bits(keys, ids), random_bits(keys, 5000)[:, ids.long()])
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(gumbel(keys, ids, dtype), gumbel(keys, 5000, dtype)[:, ids.long()])
    words = [[int(word) % 2**32 for word in key] for key in keys.tolist()]
    assert random_bits(keys, ids).tolist() == [
        [reference_bits(key, int(token)) for token in ids] for key in words
    ]


@pytest.mark.parametrize("ahead", [0, 3])
def test_noise_keys_are_those_of_the_rows_in_the_slots(monkeypatch, ahead):
    """In any order of positions, also after rows have moved, and up to the end of a slot."""
    monkeypatch.setattr(runner_module, "KEYS_AHEAD", ahead)
    runner, random = ModelRunner(make_policy("llama"), 4, 30, SEED), np.random.default_rng(0)
    names = {}

    def place(slot: int, number: int) -> None:
        names[slot] = SampleId(2**62 + number, number, number % 4)
        runner.place(slot, Row(names[slot], (1,), 20, np.arange(number % 3)))

    for slot in range(4):
        place(slot, slot)
    for number in range(4, 20):
        slots = np.sort(random.choice(4, int(random.integers(1, 5)), replace=False))
        position = random.integers(2, 30, (len(slots), 3))
        found = runner.noise_keys(np.repeat(slots, 3), position.ravel()).numpy()
        for slot, place_in_response, key in zip(
            np.repeat(slots, 3), position.ravel(), found, strict=True
        ):
            assert [int(word) % 2**32 for word in key] == noise_key(
                SEED, *names[int(slot)], int(place_in_response)
            )
        if number % 2:
            place(int(random.integers(4)), number)
        else:
            source, target = random.choice(4, 2, replace=False).tolist()
            runner.move(source, target, 0)
            names[target] = names[source]
    assert stream_keys(SEED, *np.array([[1], [2], [3], [4]])).shape == (1, 4)
