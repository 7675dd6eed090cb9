"""The learned drafter: its chains, its training and its choice of a length, each against a plain transcription.

The oracle has no cache and no batch: for each token of a chain, one packed forward of the drafter over all positions of one row.
"""

import copy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import GQA, VOCAB, small_config
from test_graphs import stand_in

from bubblespec.engine import chains as chains_module
from bubblespec.engine import runner as runner_module
from bubblespec.engine.chains import LONGEST, Chains
from bubblespec.engine.drafter import Drafter
from bubblespec.engine.generator import Generator
from bubblespec.engine.model import forward_hidden, output_head, prepare_model
from bubblespec.engine.noise import gumbel, random_bits, stream_keys
from bubblespec.engine.packing import pack_sequences
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.engine.shared_runner import SharedRunner
from bubblespec.learn import drafter_training
from bubblespec.learn.drafter_training import BANDS, PASSES, DrafterTraining, Lesson, Lessons, lessons_of
from bubblespec.learn.idle_training import IdleTraining
from bubblespec.learn.microbatch import pack_responses
from bubblespec.records import CHAIN_ROWS
from bubblespec.rollout.shared_tail import OwnersPropose
from bubblespec.samples import Row, SampleId
from bubblespec.speculate import learned, rest
from bubblespec.speculate.learned import Acceptance, LearnedDrafts
from bubblespec.speculate.sources import TrackedRow
from bubblespec.speculate.windows import CostModel
from tests.clocks import Clock
from tests.joint import run_together
from tests.reference_step import gumbel as reference_gumbel
from tests.reference_step import noise_key
from tests.reference_step import random_bits as reference_bits

NAMES = ["llama", "qwen2", "qwen3", "mistral-window", "gpt2", "gpt_neox", "qwen3_moe"]
SEED = 5
STOP = (5, 11)
PARAMS = SamplingParams(temperature=0.8, top_k=20, stop_token_ids=STOP, min_length=3)
MAX_LENGTH = 120


def make_policy(name: str, dtype: torch.dtype = torch.float64) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    if name == "qwen3_moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config = transformers.Qwen3MoeConfig(**GQA, **experts, head_dim=16)
    else:
        config = small_config(name)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    prepare_model(model, MAX_LENGTH)
    return model


def make_drafter(policy, ids=None) -> Drafter:
    """Of some of the tokens, the stop tokens among them, with weights unlike those that it begins with."""
    drafter = Drafter(policy, np.sort(np.array([*STOP, *range(20, 70)])) if ids is None else ids)
    torch.manual_seed(1)
    with torch.no_grad():
        for param in drafter.parameters():
            param.add_(0.05 * torch.randn_like(param))
    return drafter


# The oracle


@torch.no_grad()
def states_of(policy, tokens: list[int]) -> torch.Tensor:
    """The policy's hidden states, [L, H], of one sequence."""
    return forward_hidden(policy, torch.tensor(tokens), pack_sequences([len(tokens)], torch.device("cpu")))


def body(drafter: Drafter, hidden: list[torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """The drafter's state at the last of these positions, [H]."""
    packing = pack_sequences([len(tokens)], torch.device("cpu"))
    return drafter(torch.stack(hidden), torch.tensor(tokens), packing)[-1]


def head(drafter: Drafter, state: torch.Tensor) -> torch.Tensor:
    return output_head(drafter.policy)(state)[drafter.ids]


def draw(drafter: Drafter, logits: torch.Tensor, name: SampleId, position: int, params: SamplingParams) -> int:
    """Of logits over the drafter's tokens what the sample would say at this place of its response."""
    logits = (logits / params.temperature).tolist()
    if position < params.min_length:
        logits = [-np.inf if token in params.stop_token_ids else x for token, x in zip(drafter.ids, logits, strict=True)]
    if params.top_k:
        least = sorted(logits)[-params.top_k] if len(logits) > params.top_k else -np.inf
        logits = [x if x >= least else -np.inf for x in logits]
    noise = reference_gumbel(noise_key(SEED, *name, position), VOCAB)[drafter.ids]
    return int(drafter.ids[int((torch.tensor(logits, dtype=torch.float64) + noise).argmax())])


@torch.no_grad()
def chain_of(drafter, hidden, tokens, name: SampleId, position: int, length: int, params=PARAMS) -> list[int]:
    """hidden: [P, H], the policy's from where the row's context begins; tokens: P, the ones after these; position: of the chain
    in the response."""
    hidden, tokens, chain = list(hidden), list(tokens), []
    for number in range(length):
        hidden.append(body(drafter, hidden, tokens))
        chain.append(draw(drafter, head(drafter, hidden[-1]), name, position + number, params))
        tokens.append(chain[-1])
    return chain


# Chains in an engine


class CheckedDrafts:
    """A proposer that draws chains for some rows now and then, compares them with the oracle, and proposes what is sure to have
    rejected and accepted drafts: true tokens, and wrong ones behind them."""

    def __init__(self, engine: Generator, policy, drafter: Drafter, truth: dict, random: np.random.Generator, share: float):
        self.share = share  # of the forwards that have chains before them
        self.engine, self.policy, self.drafter, self.truth, self.random = engine, policy, drafter, truth, random
        self.num_checked, self.caught_up, self.contexts = 0, [], []

    def propose(self, rows, lengths, room, budget):
        engine, random, scheduler = self.engine, self.random, self.engine.scheduler
        chains = engine.runner.chains
        if len(engine.rows) <= chains_module.MOST_ROWS and random.random() < self.share:
            slots = [slot for slot, row in enumerate(engine.rows) if any(row is r for r in rows) and random.random() < 0.8]
            self.check(chains, scheduler, np.array(slots, np.int64), int(random.integers(1, LONGEST + 1)))
        drafts = []
        for row, known, fits in zip(rows, lengths.tolist(), room.tolist(), strict=True):
            count = min(int(random.choice([0, 1, 3, 8, 40])), fits)
            draft = np.array(self.truth[row.id][known : known + count], np.int64)
            draft[int(random.integers(0, count + 1)) :] = 1
            drafts.append(draft if len(draft) else None)
        return drafts

    def check(self, chains: Chains, scheduler, slots: np.ndarray, length: int) -> None:
        drawn, got, num_positions = chains.draft(scheduler, slots, length)
        assert drawn.shape == (len(got), length) and set(got.tolist()) <= set(slots.tolist())
        assert num_positions >= len(got)
        for slot, chain in zip(got.tolist(), drawn.tolist(), strict=True):
            row, known = self.engine.rows[slot], int(scheduler.length[slot])
            tokens = scheduler.tokens[slot, :known].tolist()
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
    prompts = [tuple(random.integers(12, VOCAB, size).tolist()) for size in random.choice([1, 2, 9, 50], count)]
    return [Row(SampleId(first + u, 3, j), p, 60) for u, p in enumerate(prompts) for j in range(num_generations)]


@pytest.fixture
def short_memory(monkeypatch):
    """What is kept of a row is soon too little for its context."""
    monkeypatch.setattr(chains_module, "KEPT", 24)
    monkeypatch.setattr(chains_module, "CONTEXT", 12)


def disturb(engine: Generator, random: np.random.Generator) -> None:
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
def test_chains_are_those_of_the_row_alone(monkeypatch, short_memory, name, most_rows, max_batch_tokens):
    """Rows finish, move, share prompts, have drafts rejected, are dropped and come again; with more than MOST_ROWS of them
    nothing is kept for a while."""
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
    largest = [size for size, pool in zip(captures.sizes, captures.pools, strict=True) if pool is None]
    assert set(largest) == {64}, "the drafter's take the memory of the policy's"


def check_chains(name: str, most_rows: int, max_batch_tokens: int, kernel: str) -> Chains:
    """Every chain of an engine with this kernel against that of its row alone."""
    policy = make_policy(name)
    drafter = make_drafter(policy)
    truth = {}
    plain = Generator(ModelRunner(policy, 8, MAX_LENGTH, SEED))
    for first in (0, 50):
        truth |= {row.id: row.tokens.tolist() for row in plain.run(make_rows(4, 3, first), PARAMS)}
    random = np.random.default_rng(2)
    runner = ModelRunner(policy, 5, MAX_LENGTH, SEED, max_batch_tokens=max_batch_tokens, kernel=kernel)
    engine = Generator(runner)
    runner.chains = Chains(drafter, runner, PARAMS)
    drafts = CheckedDrafts(engine, policy, drafter, truth, random, 0.25 if most_rows == 32 else 1.0)
    for first in (0, 50):
        rows = make_rows(4, 3, first)
        engine.add(rows)
        while not engine.is_idle:
            engine.step(PARAMS, drafts)
            disturb(engine, random)
        assert {row.id: row.tokens.tolist() for row in rows} == {row.id: truth[row.id] for row in rows}
        engine.release()
        assert runner.chains.cache.num_bytes() == 0
    assert drafts.num_checked > 30
    assert max(drafts.caught_up) > 3 and max(drafts.contexts) > chains_module.CONTEXT + 3
    return runner.chains


@pytest.mark.parametrize("size", [2, 4])
def test_chains_in_slices_are_those_of_the_row_alone(short_memory, size):
    """All ranks decode the same rows together; each drafts for its own ones, over hidden states that all have computed."""
    model = make_policy("llama")
    parts, plain = (model, make_drafter(model)), Generator(ModelRunner(model, 8, MAX_LENGTH, SEED))
    truth = {row.id: row.tokens.tolist() for row in plain.run(make_rows(4, 3), PARAMS)}

    def of_rank(joint):
        (policy, drafter), rows = copy.deepcopy(parts), make_rows(4, 3)
        runner = SharedRunner(policy, 5, MAX_LENGTH, SEED, joint, max_batch_tokens=64)
        engine = Generator(runner)
        runner.chains = Chains(drafter, runner, PARAMS)
        drafts = CheckedDrafts(engine, policy, drafter, truth, np.random.default_rng(joint.rank), 1.0)
        own = {id(row) for row in rows[joint.rank :: size]}
        engine.run(rows, PARAMS, OwnersPropose(drafts, own, lambda numbers: joint.gather(torch.from_numpy(numbers)).numpy()))
        assert {row.id: row.tokens.tolist() for row in rows} == truth
        return drafts.num_checked

    assert min(run_together(size, of_rank)) > 5


def test_what_is_kept_of_rejected_drafts_is_not_taken_for_what_is_fed_while_there_are_too_many_rows(monkeypatch):
    monkeypatch.setattr(chains_module, "MOST_ROWS", 2)
    policy = make_policy("llama")
    runner = ModelRunner(policy, 3, MAX_LENGTH, SEED)
    engine, runner.chains = Generator(runner), Chains(make_drafter(policy), runner, PARAMS)
    rows = [Row(SampleId(number, 0, 0), (20 + number, 30, 40), 60) for number in range(3)]
    truth = {row.id: row.tokens.tolist() for row in Generator(ModelRunner(policy, 3, MAX_LENGTH, SEED)).run(rows, PARAMS)}
    rows = [Row(row.id, row.prompt, 60) for row in rows]
    drafts = CheckedDrafts(engine, policy, runner.chains.drafter, truth, np.random.default_rng(0), 0.0)
    wrong = SimpleNamespace(propose=lambda rows, *_: [np.ones(8, np.int64)] * len(rows), observe=drafts.observe)
    engine.add(rows[:2])
    for _ in range(3):
        engine.step(PARAMS, wrong)
    engine.add(rows[2:])
    for _ in range(3):
        engine.step(PARAMS)
    engine.drop(rows[2])
    for _ in range(2):
        engine.step(PARAMS)
        drafts.check(runner.chains, engine.scheduler, np.arange(len(engine.rows)), 3)
    assert drafts.num_checked == 2 * len(engine.rows) > 0


def test_samples_of_a_prompt_all_begin_with_its_states(monkeypatch):
    monkeypatch.setattr(chains_module, "CONTEXT", 12)
    policy = make_policy("llama")
    runner = ModelRunner(policy, 4, MAX_LENGTH, SEED)
    engine, runner.chains = Generator(runner), Chains(make_drafter(policy), runner, PARAMS)
    prompt = tuple(range(12, 42))
    engine.add([Row(SampleId(1, 0, number), prompt, 20) for number in range(3)])
    while engine.prefilling():
        engine.step(PARAMS)
    while not (decoding := engine.decoding()) or len(decoding) < 3:
        engine.step(PARAMS)
    _, slots, num_positions = runner.chains.draft(engine.scheduler, np.arange(3), 1)
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
        engine, runner.chains = Generator(runner), Chains(drafter, runner, params)
        engine.add(make_rows(2, 1))
        for _ in range(4):
            engine.step(params)
        drawn, slots, _ = runner.chains.draft(engine.scheduler, np.arange(2), 3)
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
    assert torch.allclose(drafter.logits(state), output_head(policy)(state)[:, drafter.ids], rtol=0, atol=1e-12)
    drafter.restrict_to(np.array([3, 4]))
    assert torch.allclose(drafter.logits(state), output_head(policy)(state)[:, [3, 4]], rtol=0, atol=1e-12)


# Training


def make_training(drafter: Drafter, temperature: float = 0.8, **options) -> DrafterTraining:
    options = {"learning_rate": 1e-3, "max_tokens": 10_000, "seed": SEED} | options
    return DrafterTraining(drafter, "sdpa", temperature=temperature, **options)


def make_lessons(policy, sizes: list[tuple[int, int]], tokens=None, max_tokens=None) -> list[Lesson]:
    """sizes: tokens of prompt and response of each. tokens: of the responses, by default any."""
    random = np.random.default_rng(4)
    prompts = [random.integers(12, VOCAB, size).tolist() for size, _ in sizes]
    if tokens is None:
        tokens = [random.integers(12, VOCAB, size) for _, size in sizes]
    names = [SampleId(10 + number, 2, number % 3) for number in range(len(sizes))]
    zeros = [np.zeros(len(t), np.float32) for t in tokens]
    batch = pack_responses(prompts, tokens, zeros, ids=names, order=list(range(len(sizes))), device=torch.device("cpu"))
    packing = pack_sequences(batch.sequence_lengths, torch.device("cpu"))
    with torch.no_grad():
        return lessons_of(batch, forward_hidden(policy, batch.input_ids, packing), max_tokens)


def test_lessons_are_the_ends_of_prompts_and_whole_responses():
    policy = make_policy("llama")
    sizes = [(1, 2), (30, 1), (90, 20), (1, 1), (64, 3)]
    lessons = make_lessons(policy, sizes)
    random = np.random.default_rng(4)
    prompts = [random.integers(12, VOCAB, size).tolist() for size, _ in sizes]
    responses = [random.integers(12, VOCAB, size).tolist() for _, size in sizes]
    for lesson, prompt, response in zip(lessons, prompts, responses, strict=True):
        kept = prompt[-drafter_training.CONTEXT :]
        assert lesson.context_length == len(kept) and lesson.tokens.tolist() == [*kept, *response]
        states = states_of(policy, [*prompt, *response[:-1]])[-(len(lesson.tokens) - 1) :]
        assert torch.allclose(lesson.hidden, states, rtol=0, atol=1e-10)
    batch = [lesson.id for lesson in lessons]
    assert batch == [SampleId(10 + number, 2, number % 3) for number in range(5)]


def test_long_responses_are_learnt_in_pieces_of_bounded_length(monkeypatch):
    """Each token of a response is in one piece, behind the end of what comes before it."""
    monkeypatch.setattr(drafter_training, "PIECE", 7)
    policy = make_policy("llama")
    sizes = [(70, 20), (3, 70), (5, 7), (5, 8)]
    lessons = make_lessons(policy, sizes)
    random = np.random.default_rng(4)
    prompts = [random.integers(12, VOCAB, size).tolist() for size, _ in sizes]
    responses = [random.integers(12, VOCAB, size).tolist() for _, size in sizes]
    for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        pieces = [lesson for lesson in lessons if lesson.id.uid == 10 + number]
        assert [piece.first for piece in pieces] == list(range(0, len(response), 7))
        states = states_of(policy, [*prompt, *response[:-1]])
        for piece in pieces:
            end = len(prompt) + piece.first
            assert piece.context_length == min(end, drafter_training.CONTEXT)
            whole = [*prompt, *response][end - piece.context_length : end + 7]
            assert piece.tokens.tolist() == whole
            wanted = states[end - piece.context_length :][: len(whole) - 1]
            assert torch.allclose(piece.hidden, wanted, rtol=0, atol=1e-10)
    limited = make_lessons(policy, sizes, max_tokens=150)
    assert sum(len(lesson.hidden) for lesson in limited) <= 150 < sum(len(lesson.hidden) for lesson in lessons)
    assert [lesson.first for lesson in limited] == [lesson.first for lesson in lessons[: len(limited)]]


def chain_states(drafter, lesson: Lesson, start: int, length: int) -> list[torch.Tensor]:
    """The drafter's states, [H] each, in a chain that goes on from position `start` with the tokens of the lesson."""
    hidden, states = list(lesson.hidden[: start + 1]), []
    for number in range(length):
        states.append(body(drafter, hidden, lesson.tokens[1 : start + number + 2].tolist()))
        hidden.append(states[-1])
    return states


SIZES = [(1, 7), (4, 9), (12, 3), (3, 1)]


def starts_of(lesson: Lesson) -> range:
    """Positions where a chain may begin whose first token is of the response: the token two places on."""
    return range(max(lesson.context_length - 2, 0), len(lesson.tokens) - 2)


@pytest.mark.parametrize("name", NAMES)
def test_an_unrolled_pass_is_a_token_of_the_chains_from_all_positions(name):
    policy = make_policy(name)
    drafter = make_drafter(policy)
    training, lessons = make_training(drafter), make_lessons(policy, SIZES)
    batch = training._pad(lessons)
    with torch.no_grad():
        for number, (logits, started) in enumerate(training._passes(batch, LONGEST)):
            places = torch.nonzero(batch.counts)[started].tolist()
            wanted = {
                (row, start + number): head(drafter, chain_states(drafter, lesson, start, number + 1)[-1])
                for row, lesson in enumerate(lessons)
                for start in starts_of(lesson)
                if start + number + 2 < len(lesson.tokens)
            }
            assert [tuple(place) for place in places] == sorted(wanted)
            for place, found in zip(places, logits, strict=True):
                assert torch.allclose(found, wanted[tuple(place)], rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_the_gradient_is_that_of_the_loss_as_written_down(name):
    policy = make_policy(name)
    drafter = make_drafter(policy)
    training, lessons = make_training(drafter), make_lessons(policy, SIZES)
    losses = []
    for number in range(PASSES):
        for lesson in lessons:
            for start in starts_of(lesson):
                place = start + number
                if place + 2 < len(lesson.tokens):
                    teacher = (head(drafter, lesson.hidden[place + 1]) / 0.8).softmax(-1).detach()
                    said = (head(drafter, chain_states(drafter, lesson, start, number + 1)[-1]) / 0.8).log_softmax(-1)
                    losses.append(-(teacher * said).sum())
    wanted = torch.stack(losses).mean()
    policy.zero_grad(set_to_none=True)
    params = list(drafter.parameters())
    gradients = torch.autograd.grad(wanted, params, allow_unused=True)
    assert training.backward(lessons, 0.5) == pytest.approx(wanted.item(), rel=1e-5)
    assert sum(gradient is not None for gradient in gradients) > 5
    for param, gradient in zip(params, gradients, strict=True):
        assert (param.grad is None) == (gradient is None)
        if gradient is not None:
            assert torch.allclose(param.grad, 0.5 * gradient, rtol=1e-3, atol=1e-6)
    assert all(param.grad is None for param in policy.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_updates_lower_the_loss_and_leave_the_policy_as_it_is(dtype):
    policy = make_policy("qwen2", dtype)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    drafter = Drafter(policy, np.arange(12, VOCAB))
    ours = [param.clone() for param in drafter.parameters()]
    training, lessons = make_training(drafter, learning_rate=3e-3), make_lessons(policy, SIZES)
    losses = []
    for _ in range(15):
        losses.append(training.backward(lessons))
        training.step()
    assert losses[-1] < losses[0]
    assert any(not torch.equal(a, b) for a, b in zip(ours, drafter.parameters(), strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    assert all(param.grad is None for param in policy.parameters())


@pytest.mark.parametrize("piece", [256, 6])
def test_what_is_accepted_is_what_chains_from_each_position_get_right(monkeypatch, piece):
    """Responses near to what the drafter says, so that long chains are right now and then."""
    monkeypatch.setattr(drafter_training, "PIECE", piece)
    policy = make_policy("llama")
    ids = np.arange(20, 28)
    drafter = make_drafter(policy, ids)
    params = SamplingParams(temperature=20.0)
    random, tokens = np.random.default_rng(3), []
    sizes = [(1, 12), (3, 25), (20, 9), (5, 1), (2, 2)]
    for number, (_, size) in enumerate(sizes):
        name = SampleId(10 + number, 2, number % 3)
        noise = [reference_gumbel(noise_key(SEED, *name, place), VOCAB)[ids].argmax() for place in range(size)]
        tokens.append(np.where(random.random(size) < 0.2, random.choice(ids, size), ids[torch.stack(noise).numpy()]))
    lessons = make_lessons(policy, sizes, tokens)
    right, count = np.zeros((2, LONGEST))
    for lesson in lessons:
        for start in starts_of(lesson):
            left = lesson.tokens[start + 2 :][:LONGEST].tolist()
            drawn = chain_of(
                drafter,
                lesson.hidden[: start + 1],
                lesson.tokens[1 : start + 2].tolist(),
                lesson.id,
                lesson.first + start + 2 - lesson.context_length,
                len(left),
                params,
            )
            for number in range(len(left)):
                count[number] += 1
                right[number] += drawn[: number + 1] == left[: number + 1]
    chains = Chains(drafter, ModelRunner(policy, 2, MAX_LENGTH, SEED), params)
    found = make_training(drafter, 20.0).accepted(lessons, chains, LONGEST)
    assert found == pytest.approx(right / count) and right[-1] > 0 and right[0] < count[0]


def any_lesson(size: int, number: int = 0) -> Lesson:
    return Lesson(SampleId(number, 0, 0), 1, np.zeros(size + 1, np.int64), torch.zeros(size, 1))


@pytest.mark.parametrize("seed", range(5))
def test_lessons_stay_within_their_budget_and_keep_rare_lengths(seed):
    random = np.random.default_rng(seed)
    lessons, added = Lessons(4000), []
    for number in range(600):
        size = int(random.choice([1, 5, 20, 40, 300, 900, 5000], p=[0.1, 0.3, 0.3, 0.2, 0.06, 0.03, 0.01]))
        added.append(any_lesson(size, number))
        lessons.add(added[-1])
        kept = list(lessons)
        assert lessons.num_tokens == sum(len(lesson.hidden) for lesson in kept) <= lessons.max_tokens
        assert len(lessons) == len(kept)
        if number == 400:
            lessons.shrink(2500)
    sizes = {}
    for lesson in lessons:
        sizes.setdefault(len(lesson.hidden), []).append(lesson.id.uid)
    assert set(sizes) == {5, 20, 40, 300, 900}
    for size, numbers in sizes.items():  # of each length the latest
        assert numbers == [lesson.id.uid for lesson in added if len(lesson.hidden) == size][-len(numbers) :]
    assert len(lessons) > 20 and BANDS > 3


def test_lessons_are_drawn_without_repetition_and_rare_lengths_more_often():
    lessons, random = Lessons(100_000), np.random.default_rng(0)
    assert lessons.draw(3, random) == []
    for number in range(100):
        lessons.add(any_lesson(10 if number < 96 else 500, number))
    drawn = [lesson for _ in range(400) for lesson in lessons.draw(5, random)]
    assert all(len({x.id for x in drawn[n : n + 5]}) == 5 for n in range(0, len(drawn), 5))
    share = sum(len(lesson.hidden) == 500 for lesson in drawn) / len(drawn)
    assert 0.1 < share < 0.3  # 4 of 100; about 2 in 12 of the chances
    assert len(lessons.draw(1000, random)) == 100


class Gathered:
    """Two ranks in one process, of which this is the first."""

    world_size = 2

    def __init__(self, count: int, flat):
        self.count, self.flat = count, flat

    def gather(self, array):
        return np.array([array, [self.count, *array[1:]]])

    def sum_(self, tensor):
        return tensor + self.flat


def idle_training(drafter, policy, clock=None) -> IdleTraining:
    runner = ModelRunner(policy, 2, MAX_LENGTH, SEED)
    chains = Chains(drafter, runner, PARAMS)
    source = LearnedDrafts(chains, SimpleNamespace(rows=[], runner=runner), CostModel())
    return IdleTraining(make_training(drafter), chains, source, np.zeros(LONGEST), clock or Clock())


def rests_of(saved: dict[int, list[tuple[float, float]]], num_steps: int, training: IdleTraining) -> list[bool]:
    """In which steps the drafter rests, where chains save and rollouts take so many seconds on two ranks: by step, else nothing
    of a second. A step without ranks has plain rollouts alone; only in step 84 was the drafter not asked."""

    def both(gathered, own):
        gathered.append(own)
        return np.stack((own, 0 * own))

    rests = []
    for step in range(num_steps):
        gathered = []
        gather = partial(both, gathered)
        training.begin_step(SimpleNamespace(gather=gather))
        assert len(gathered) == (step == 0 or not rests[-1]), "a drafter at rest has nothing to tell"
        rests.append(training.source.rests)
        by_rank = saved.get(step, [(0.0, 1.0)] * 2)
        if by_rank and not rests[-1]:
            training.source.saved_s, training.source.num_asked = by_rank[0][0], 0
            others = np.array([0.0, step != 84, *by_rank[1]])
            training.merge(
                SimpleNamespace(world_size=2, gather=lambda own, others=others: np.stack((own, others))), by_rank[0][1]
            )
            assert training.source.saved_s == training.source.num_asked == 0
    return rests


def test_a_drafter_that_does_not_pay_is_tried_now_and_then():
    """After each trial in vain it rests for longer. It stays awake while chains save a share of what the slowest rank takes,
    and after steps that had no chains for other reasons."""
    policy = make_policy("llama")
    training = idle_training(make_drafter(policy), policy)
    (lesson,) = make_lessons(policy, [(4, 9)])
    training.training.lessons.add(lesson)
    share = 1.01 * rest.LEAST_SAVED
    saved = {
        10: [(0.0, 0.5), (share, 1.0)],
        11: [],  # plain rollouts
        12: [(share, 1.0), (0.0, 0.9)],
        13: [(share, 0.9), (0.0, 1.0)],  # what the faster rank saves saves nothing
        83: [(share, 1.0), (share, 1.0)],
    }
    awake = [step for step, rests in enumerate(rests_of(saved, 150, training)) if not rests]
    assert awake == [0, 10, 11, 12, 13, 23, 43, 83, 84, 85, 95, 115]
    training.take(None, None)
    assert training.source.rests and training.new_lessons == []


def test_at_rest_no_rows_are_followed_and_no_memory_is_held():
    policy = make_policy("llama")
    training = idle_training(make_drafter(policy), policy)
    source, runner = training.source, training.source.engine.runner
    engine, rows = Generator(runner), [Row(SampleId(5, 0, n), (1, 2, 3), 9) for n in range(2)]
    source.follow(True)
    engine.run(rows, PARAMS)
    assert runner.chains is training.chains and training.chains._hidden is not None
    source.follow(False)
    assert runner.chains is None and training.chains._hidden is None and not training.chains.cache.keys
    again = [Row(SampleId(5, 0, n), (1, 2, 3), 9) for n in range(2)]
    engine.reset()
    engine.run(again, PARAMS)
    assert training.chains._hidden is None
    assert [row.tokens.tolist() for row in again] == [row.tokens.tolist() for row in rows]
    source.follow(True)
    engine.reset()
    engine.run([Row(SampleId(6, 0, 0), (1, 2, 3), 9)], PARAMS)
    assert training.chains._hidden is not None


def test_what_chains_save_is_what_their_tokens_take_without_them():
    """A forward takes 10 ms and 1 ms for a token, one of the drafter 0.5 ms; tokens are right with chance 0.8."""
    clock = Clock()
    rows = [Row(SampleId(0, 0, n), (1,), 50) for n in range(2)]
    engine = SimpleNamespace(rows=rows, lengths=np.full(2, 20), scheduler=None)
    source = LearnedDrafts(TimedChains(clock, 5e-4), engine, made_cost(10e-3, 0, 1e-3, 0, 0), clock)
    source.own_cost = made_cost(0, 5e-4, 0, 0, 0)
    source.acceptance.expect(0.8 ** np.arange(1, LONGEST + 1))
    length = source.choose(2, 1)
    (proposal,) = source.propose([TrackedRow(rows[1], None, True)], [0], [9])
    assert length == len(proposal.tokens) > 1
    tokens = 2 + sum(0.8**n for n in range(1, length + 1))
    wanted = tokens * (10e-3 + 2e-3) / 2 - (10e-3 + (2 + length) * 1e-3 + length * 5e-4)
    assert source.saved_s == pytest.approx(wanted, rel=1e-6) and wanted > 0
    source.own_cost = made_cost(1.0, 0, 0, 0, 0)
    assert source.propose([TrackedRow(rows[1], None, True)], [0], [9]) == [None] and source.saved_s == pytest.approx(wanted)


@pytest.mark.parametrize("own, other", [(3, 1), (0, 2), (4, 0), (0, 0)])
def test_drafters_are_merged_by_the_updates_that_ranks_have_made(own, other):
    policy = make_policy("llama")
    training = idle_training(make_drafter(policy), policy)
    params = training.training.params
    before = torch.cat([p.detach().flatten() for p in params])
    torch.manual_seed(7)
    theirs = torch.randn_like(before)
    training._num_updates = own
    assert training.merge(Gathered(other, theirs * (other / max(own + other, 1))), 1.0) == own + other
    after = torch.cat([p.detach().flatten() for p in params])
    wanted = before if own + other == 0 else (own * before + other * theirs) / (own + other)
    assert torch.allclose(after, wanted, rtol=1e-12, atol=0) and training._num_updates == 0


def test_slices_are_lessons_that_fit_and_eight_make_an_update():
    policy = make_policy("llama")
    training = idle_training(make_drafter(policy), policy)
    assert training.slice_tokens() == 0 and training.run_slice(1.0) == 0.0
    for lesson in make_lessons(policy, [(2, 4), (2, 30)] * 6):
        training.training.lessons.add(lesson)
    assert training.slice_tokens() == 5
    for number in range(1, 17):
        assert training.run_slice(1.0) > 0
        assert training.training.num_updates == number // 8
    training.token_s = 1.0
    learnt, backward = [], training.training.backward
    training.training.backward = lambda lessons, share: learnt.extend(lessons) or backward(lessons, share)
    for _ in range(6):
        training.token_s = 1.0
        training.run_slice(5.5)
    assert learnt and all(len(lesson.hidden) == 5 for lesson in learnt)
    training.token_s = 1.0
    assert training.run_slice(4.5) == 0.0


# The length of chains


def made_cost(*coefficients: float) -> CostModel:
    cost = CostModel()
    cost.coefficients = np.array(coefficients)
    return cost


def test_acceptance_is_counted_by_place():
    acceptance = Acceptance()
    assert acceptance.chances() == pytest.approx(learned.UNKNOWN ** np.arange(1, LONGEST + 1))
    acceptance.expect(np.array([0.5, 0.4, 0.4, 0.0, 0.0]))
    assert acceptance.chances() == pytest.approx([0.5, 0.4, 0.4, 0.0, 0.0])
    acceptance.observe(np.array([1, 2, 3]), np.array([1, 2, 9]))  # two right
    acceptance.observe(np.array([1, 2, 3]), np.array([1]))  # one right, of the others nothing is known
    acceptance.observe(np.array([1, 2]), np.array([7, 2, 3]))  # none
    tried, right, prior = [3, 1, 1, 0, 0], [2, 1, 0, 0, 0], [0.5, 0.8, 1.0, 0.0, 0.0]
    weight = learned.PRIOR_CHAINS
    wanted = np.cumprod([(r + weight * p) / (t + weight) for t, r, p in zip(tried, right, prior, strict=True)])
    assert acceptance.chances() == pytest.approx(wanted, rel=1e-2)
    acceptance.expect(np.array([0.2, 0.3, 0.1, 0.1, 0.1]))  # from fewer and fewer positions
    assert (np.diff(acceptance.chances()) <= 0).all() and acceptance.chances()[0] <= 1


@pytest.mark.parametrize("seed", range(20))
def test_the_length_is_that_with_most_tokens_a_second(seed):
    random = np.random.default_rng(seed)
    active = int(random.integers(1, 30))
    count, lengths = int(random.integers(1, active + 1)), random.integers(5, 400, active)
    cost, own = (made_cost(*(10.0 ** random.uniform(-5, -2, 5)) * (1, 0.1, 0.1, 0.1, 1e-3)) for _ in range(2))
    source = LearnedDrafts(None, SimpleNamespace(rows=[None] * active, lengths=lengths), cost)
    source.own_cost = own
    source.acceptance.expect(np.cumprod(random.uniform(0.3, 0.95, LONGEST)))
    chances, rates = source.acceptance.chances().tolist(), []
    for length in range(LONGEST + 1):
        a, b, c, d, e = cost.coefficients
        seconds = a + b * active + c * (active + count * length) + d * (count if length else 0) + e * lengths.sum()
        if length:
            a, b, c, _, _ = own.coefficients
            seconds += a + b * length + c * count * length
        tokens = active
        for number in range(length):
            tokens += count * chances[number]
        rates.append(tokens / seconds)
    assert source.choose(active, count) == int(np.argmax(rates))


class TimedChains:
    """Chains that take as long as they are told, for all rows."""

    def __init__(self, clock: Clock, seconds: float, truth: int = 1):
        self.clock, self.seconds, self.truth = clock, seconds, truth

    def rehearse(self, num_rows):
        self.clock.sleep(self.seconds)

    def draft(self, scheduler, slots, length):
        self.clock.sleep(self.seconds * length)
        return np.full((len(slots), length), self.truth), slots, len(slots)


@pytest.mark.parametrize("seconds, drafts_on", [(1e-4, True), (0.1, False)])
def test_what_chains_take_is_learnt_however_long(seconds, drafts_on):
    """Before the first chain, and as chains are made."""
    clock = Clock()
    rows = [Row(SampleId(0, 0, n), (1,), 50) for n in range(3)]
    engine = SimpleNamespace(rows=rows, lengths=np.full(3, 20), scheduler=None, num_slots=8, reset=lambda: None)
    source = LearnedDrafts(TimedChains(clock, seconds), engine, made_cost(0.01, 0, 1e-5, 0, 0), clock)
    source.acceptance.expect(np.full(LONGEST, 0.9))
    source.profile()
    tracked, lengths = [TrackedRow(row, None, True) for row in rows], []
    for _ in range(60):
        proposals = source.propose(tracked, [0] * 3, [4, 9, 2])
        lengths.append(0 if proposals[0] is None else len(proposals[1].tokens))
        if lengths[-1]:
            assert [len(p.tokens) for p in proposals] == [min(lengths[-1], limit) for limit in (4, 9, 2)]
            for row in tracked:
                source.observe(row, np.array([1]))
    assert (lengths[0] > 0) == (lengths[-1] > 0) == drafts_on
    chosen = source.take_chosen()
    assert chosen.sum() == 60 == chosen[CHAIN_ROWS.index(3)].sum() and not source.take_chosen().any()


def test_nothing_is_drafted_for_many_rows_and_a_row_that_is_no_more_tells_nothing():
    clock = Clock()
    rows = [Row(SampleId(0, 0, n), (1,), 50) for n in range(chains_module.MOST_ROWS + 1)]
    engine = SimpleNamespace(rows=rows, lengths=np.full(len(rows), 20), scheduler=None)
    source = LearnedDrafts(TimedChains(clock, 1e-6), engine, made_cost(0.01, 0, 1e-9, 0, 0), clock)
    tracked = [TrackedRow(row, None, True) for row in rows]
    assert source.propose(tracked, [0] * len(rows), [9] * len(rows)) == [None] * len(rows)
    engine.rows = rows[:2]
    assert all(source.propose(tracked[:2], [0, 0], [9, 9])) and source.propose([], [], []) == []
    source.track(tracked[0])  # another row in its place
    source.observe(tracked[0], np.array([1]))
    assert not source.acceptance.seen.any()
    source.observe(tracked[1], np.array([1]))
    assert source.acceptance.seen[0].tolist() == [1, 1]


# Noise


def test_noise_of_some_tokens_is_that_of_the_whole_vocabulary():
    random = np.random.default_rng(0)
    keys = torch.from_numpy(random.integers(-(2**31), 2**31, (6, 4)).astype(np.int32))
    ids = torch.from_numpy(np.sort(random.choice(5000, 40, replace=False)).astype(np.int32))
    assert torch.equal(random_bits(keys, ids), random_bits(keys, 5000)[:, ids.long()])
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(gumbel(keys, ids, dtype), gumbel(keys, 5000, dtype)[:, ids.long()])
    words = [[int(word) % 2**32 for word in key] for key in keys.tolist()]
    assert random_bits(keys, ids).tolist() == [[reference_bits(key, int(token)) for token in ids] for key in words]


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
        for slot, place_in_response, key in zip(np.repeat(slots, 3), position.ravel(), found, strict=True):
            assert [int(word) % 2**32 for word in key] == noise_key(SEED, *names[int(slot)], int(place_in_response))
        if number % 2:
            place(int(random.integers(4)), number)
        else:
            source, target = random.choice(4, 2, replace=False).tolist()
            runner.move(source, target, 0)
            names[target] = names[source]
    assert stream_keys(SEED, *np.array([[1], [2], [3], [4]])).shape == (1, 4)
