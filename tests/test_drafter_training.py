"""What the learned drafter learns from, and how, against plain transcriptions."""

import numpy as np
import pytest
import torch

from bubblespec.engine.chains import LONGEST, Chains
from bubblespec.engine.drafter import Drafter
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.learn import drafter_training
from bubblespec.learn.drafter_training import BANDS, PASSES, Lesson, Lessons
from bubblespec.types import SampleId
from tests.helpers.drafter_oracle import (
    MAX_LENGTH,
    NAMES,
    SEED,
    body,
    chain_of,
    head,
    make_drafter,
    make_lessons,
    make_policy,
    make_training,
    states_of,
)
from tests.helpers.models import VOCAB
from tests.helpers.reference_step import gumbel as reference_gumbel
from tests.helpers.reference_step import noise_key


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
    assert (
        sum(len(lesson.hidden) for lesson in limited)
        <= 150
        < sum(len(lesson.hidden) for lesson in lessons)
    )
    assert [lesson.first for lesson in limited] == [
        lesson.first for lesson in lessons[: len(limited)]
    ]


def chain_states(drafter, lesson: Lesson, start: int, length: int) -> list[torch.Tensor]:
    """The drafter's states, [H] each, in a chain that goes on from position `start` with the tokens
    of the lesson."""
    hidden, states = list(lesson.hidden[: start + 1]), []
    for number in range(length):
        states.append(body(drafter, hidden, lesson.tokens[1 : start + number + 2].tolist()))
        hidden.append(states[-1])
    return states


SIZES = [(1, 7), (4, 9), (12, 3), (3, 1)]


def starts_of(lesson: Lesson) -> range:
    """Positions where a chain may begin whose first token is of the response: the token two places
    on."""
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
                (row, start + number): head(
                    drafter, chain_states(drafter, lesson, start, number + 1)[-1]
                )
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
                    said = (
                        head(drafter, chain_states(drafter, lesson, start, number + 1)[-1]) / 0.8
                    ).log_softmax(-1)
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
        noise = [
            reference_gumbel(noise_key(SEED, *name, place), VOCAB)[ids].argmax()
            for place in range(size)
        ]
        tokens.append(
            np.where(
                random.random(size) < 0.2, random.choice(ids, size), ids[torch.stack(noise).numpy()]
            )
        )
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
        size = int(
            random.choice([1, 5, 20, 40, 300, 900, 5000], p=[0.1, 0.3, 0.3, 0.2, 0.06, 0.03, 0.01])
        )
        added.append(any_lesson(size, number))
        lessons.add(added[-1])
        kept = list(lessons)
        assert (
            lessons.num_tokens == sum(len(lesson.hidden) for lesson in kept) <= lessons.max_tokens
        )
        assert len(lessons) == len(kept)
        if number == 400:
            lessons.shrink(2500)
    sizes = {}
    for lesson in lessons:
        sizes.setdefault(len(lesson.hidden), []).append(lesson.id.uid)
    assert set(sizes) == {5, 20, 40, 300, 900}
    for size, numbers in sizes.items():  # of each length the latest
        assert (
            numbers
            == [lesson.id.uid for lesson in added if len(lesson.hidden) == size][-len(numbers) :]
        )
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
