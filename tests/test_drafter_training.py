"""Examples, loss and slices of the drafter's training, and the mean over ranks."""

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from bubblespec.engine.model import tap
from bubblespec.engine.model_checks import prepare_model
from bubblespec.mechanisms.drafter import training as drafter_training
from bubblespec.mechanisms.drafter.eagle3 import Eagle3
from bubblespec.mechanisms.drafter.layer import HeadDrafter
from bubblespec.mechanisms.drafter.mechanism import MAX_CHAIN_LENGTH
from bubblespec.mechanisms.drafter.training import (
    EPOCHS,
    EXAMPLES_PER_UPDATE,
    PASSES,
    SHARE_PER_STEP,
    Example,
    warm_up,
)
from tests.helpers.clocks import Clock
from tests.helpers.drafter_oracle import (
    MAX_LENGTH,
    NAMES,
    ONE_RANK,
    body,
    head,
    hidden_of,
    make_batch,
    make_drafter,
    make_examples,
    make_policy,
    make_texts,
    make_training,
    teach,
)
from tests.helpers.models import VOCAB, everything_in_full_precision
from tests.test_architectures import SERVED, build

SIZES = [(1, 7), (4, 9), (12, 3), (3, 1)]


@pytest.fixture(scope="module")
def llama():
    return make_policy("llama")


@pytest.mark.parametrize("piece", [256, 7])
def test_examples_are_pieces_of_responses_with_context(monkeypatch, llama, piece):
    monkeypatch.setattr(drafter_training, "PIECE", piece)
    sizes = [(70, 20), (3, 70), (5, 7), (5, 8), (90, 2)]
    examples = iter(make_examples(llama, sizes))
    for prompt, response in make_texts(sizes):
        whole = np.concatenate((prompt, response))
        states = hidden_of(llama, whole[:-1].tolist())
        for end in range(len(prompt), len(whole), piece):
            example = next(examples)
            begin = end - example.context_length
            assert example.context_length == min(end, drafter_training.CONTEXT)
            assert example.tokens.tolist() == whole[begin : end + piece][:-1].tolist()
            wanted = states[begin:][: len(example.tokens)]
            assert torch.allclose(example.hidden, wanted, rtol=0, atol=1e-10)
    assert next(examples, None) is None


def test_step_replaces_a_share_of_examples(monkeypatch, llama):
    monkeypatch.setattr(drafter_training, "BUFFER_TOKENS", 120)
    training = make_training(make_drafter(llama))
    batch, hidden = make_batch(llama, [(5, 14)] * 12)
    training.take(batch, hidden)
    assert not training.examples, "no rollout yet"
    training.is_enabled = False
    training.merge(ONE_RANK)
    training.take(batch, hidden)
    assert not training.examples
    training.is_enabled = True
    for steps in (1, 2, 6):
        training.merge(ONE_RANK)
        training.take(batch, hidden)
        share = steps * SHARE_PER_STEP * 120
        total = sum(len(example.hidden) for example in training.examples)
        assert min(share, 120) <= total + 18 and total <= 120


def chain_states(drafter, example: Example, start: int, length: int) -> list[torch.Tensor]:
    hidden, states = list(drafter.combine(example.hidden[: start + 1])), []
    for number in range(length):
        states.append(body(drafter, hidden, example.tokens[1 : start + number + 2].tolist()))
        hidden.append(states[-1])
    return states


def starts_of(example: Example) -> range:
    """Positions of chains whose first token, two positions on, is of the response."""
    return range(max(example.context_length - 2, 0), len(example.tokens) - 1)


@pytest.mark.parametrize("name", [*NAMES, "gemma2", "gpt_oss", "llama4"])
def test_unrolled_pass_equals_chains_from_all_positions(name, monkeypatch):
    if name in NAMES:
        policy = make_policy(name)
    else:  # attention with a cap, sinks, or chunks in other layers
        policy = build(*SERVED[name])
        everything_in_full_precision(monkeypatch, policy)
        prepare_model(policy, MAX_LENGTH)
    drafter = make_drafter(policy)
    training, examples = make_training(drafter), make_examples(policy, SIZES)
    hidden, tokens, counts = training._pad(examples)
    with torch.no_grad():
        passes = training._passes(hidden[:, :-1], tokens, counts, MAX_CHAIN_LENGTH)
        for number, (logits, started) in enumerate(passes):
            positions = [tuple(p) for p in torch.nonzero(counts)[started].tolist()]
            wanted = {
                (row, start + number): chain_states(drafter, example, start, number + 1)[-1]
                for row, example in enumerate(examples)
                for start in starts_of(example)
                if start + number + 1 < len(example.tokens)
            }
            assert positions == sorted(wanted)
            for position, found in zip(positions, logits, strict=True):
                assert torch.allclose(found, head(drafter, wanted[position]), rtol=0, atol=1e-8)


@pytest.mark.parametrize("shape", [Eagle3, HeadDrafter])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_gradient_equals_reference_loss(name, shape):
    policy = make_policy(name)
    drafter = make_drafter(policy, shape=shape)
    training, examples = make_training(drafter), make_examples(policy, SIZES)
    losses = []
    for number in range(PASSES):
        for example in examples:
            for start in starts_of(example):
                position = start + number
                if position + 1 < len(example.tokens):
                    teacher = teach(drafter, example.hidden[position + 1]) / 0.8
                    teacher = teacher.softmax(-1).detach()
                    state = chain_states(drafter, example, start, number + 1)[-1]
                    said = (head(drafter, state) / 0.8).log_softmax(-1)
                    losses.append(-(teacher * said).sum())
    wanted = torch.stack(losses).mean()
    policy.zero_grad(set_to_none=True)
    params = list(drafter.parameters())
    gradients = torch.autograd.grad(wanted, params, allow_unused=True)
    loss = training.loss(examples)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    (0.5 * loss).backward()
    assert sum(gradient is not None for gradient in gradients) > 5
    for param, gradient in zip(params, gradients, strict=True):
        assert (param.grad is None) == (gradient is None)
        if gradient is not None:
            assert torch.allclose(param.grad, 0.5 * gradient, rtol=1e-3, atol=1e-6)
    assert all(param.grad is None for param in policy.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_training_lowers_loss_and_keeps_policy(dtype):
    policy = make_policy("qwen2", dtype)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    drafter = Eagle3(policy, np.arange(12, VOCAB))
    tap(policy, drafter.taps)
    training, examples = make_training(drafter), make_examples(policy, 5 * SIZES)
    loss = training.loss(examples).item()
    warm_up(training, examples, ONE_RANK)
    assert training.loss(examples).item() < loss
    assert 2 * EPOCHS <= training.num_updates <= EPOCHS * 20 / EXAMPLES_PER_UPDATE
    final = drafter_training.FINAL_RATE * drafter_training.LEARNING_RATE
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(final)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    assert all(param.grad is None for param in policy.parameters())


def test_slices_fit_the_limit_and_make_updates(llama):
    training = make_training(make_drafter(llama), Clock())
    assert training.slice_tokens() == 0 and training.run_slice(1.0) == 0.0
    for example in make_examples(llama, [(2, 4), (2, 30)] * 6):
        training.add(example)
    assert training.slice_tokens() == 5
    for number in range(1, 17):
        training.token_s = 0.0
        assert training.run_slice(1.0) > 0 and training.token_s > 0
        assert training.num_updates == number // EXAMPLES_PER_UPDATE
    learned, learn = [], training.learn
    training.learn = lambda examples: learned.extend(examples) or learn(examples)
    for _ in range(6):
        training.token_s = 1.0
        training.run_slice(5.5)
    assert learned and all(len(example.hidden) == 5 for example in learned)
    training.token_s = 1.0
    assert training.run_slice(4.5) == 0.0


class TwoRanks:
    world_size, is_main = 2, True

    def __init__(self, theirs: torch.Tensor):
        self.theirs = theirs

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + self.theirs


@pytest.mark.parametrize("is_known", [True, False])
def test_drafter_without_numbers_is_given_up_once(llama, capfd, is_known):
    training = make_training(make_drafter(llama))
    theirs = torch.full_like(parameters_to_vector(training.masters), torch.nan)
    if is_known:
        vector_to_parameters(theirs, training.masters)
    training.merge(ONE_RANK)
    assert training.has_failed == is_known
    training.merge(TwoRanks(torch.cat((theirs, torch.ones(1)))))
    training.merge(ONE_RANK)
    line = "the learned drafter drafts no more: its weights are not numbers\n"
    assert training.has_failed and capfd.readouterr().err == line


@pytest.mark.parametrize("own, other", [(3, 1), (0, 2), (4, 0), (0, 0)])
def test_merge_weights_ranks_by_updates(llama, own, other):
    training = make_training(make_drafter(llama))
    before = torch.cat([p.detach().flatten() for p in training.params])
    torch.manual_seed(7)
    theirs = torch.randn_like(before)
    training._num_unmerged = own
    training.merge(TwoRanks(torch.cat((other * theirs, torch.tensor([other])))))
    after = torch.cat([p.detach().flatten() for p in training.params])
    wanted = (own * before + other * theirs) / (own + other) if own + other else before
    assert torch.allclose(after, wanted, rtol=1e-12, atol=0) and training._num_unmerged == 0
