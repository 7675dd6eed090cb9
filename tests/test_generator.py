"""The engine against `model.generate` and against itself under every change of schedule."""

import math

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig, TopKLogitsWarper, TopPLogitsWarper

from bubblespec.config import RolloutConfig
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.sampling import SamplingParams
from bubblespec.types import Row, SampleId
from tests.helpers.generation import STOP, Drafter, as_dict, make_engine, make_prompts, make_rows
from tests.helpers.models import ARCHITECTURES, VOCAB, small_config
from tests.helpers.reference_step import gumbel, log_distributions, noise_key, sample_response

PLAIN = SamplingParams()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_generate(make_model, name):
    reference, model = make_model(name), make_model(name)
    prompts = make_prompts(5)
    config = GenerationConfig(
        max_new_tokens=15, do_sample=False, eos_token_id=list(STOP), pad_token_id=0
    )
    wanted = [
        reference.generate(torch.tensor([p]), generation_config=config)[0, len(p) :].tolist()
        for p in prompts
    ]
    assert len({tuple(w) for w in wanted}) > 3, "the oracle must not be one constant continuation"
    prepare_model(model, 100)
    engine = make_engine(model, 4, max_num_batched_tokens=16)
    greedy = SamplingParams(temperature=0.0, stop_token_ids=STOP)
    rows = engine.run(make_rows(prompts, 1, 15), greedy)
    assert [row.tokens.tolist() for row in rows] == wanted


@pytest.fixture(scope="module")
def baseline():
    """Sampled rows of one schedule, which every other schedule must reproduce."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small_config("llama"))
    model = model.to(torch.float64).eval()
    prepare_model(model, 100)
    prompts = make_prompts(5, 25)
    params = SamplingParams(temperature=0.9, top_p=0.97, stop_token_ids=STOP, min_length=2)
    rows = make_engine(model, 64, seed=5).run(make_rows(prompts, 3), params)
    return model, prompts, params, as_dict(rows)


@pytest.fixture
def model(make_model):
    model = make_model()
    prepare_model(model, 100)
    return model


@pytest.mark.parametrize(
    "num_slots, max_num_batched_tokens, order",
    [(1, 1, "given"), (3, 7, "given"), (5, 64, "reversed"), (8, 2048, "shuffled")],
)
def test_schedule_leaves_tokens_unchanged(baseline, num_slots, max_num_batched_tokens, order):
    model, prompts, params, wanted = baseline
    rows = make_rows(prompts, 3)
    if order == "reversed":
        rows.reverse()
    if order == "shuffled":
        np.random.default_rng(1).shuffle(rows)
    engine = make_engine(model, num_slots, seed=5, max_num_batched_tokens=max_num_batched_tokens)
    assert as_dict(engine.run(rows, params)) == wanted
    assert {len(tokens) for tokens, _ in wanted.values()} != {30} and engine.is_idle


@pytest.mark.parametrize(
    "corrupted, num_slots, max_num_batched_tokens",
    [*((share, *size) for share in (0.0, 0.3, 1.0) for size in ((64, 2048), (5, 12))), (0.3, 1, 1)],
)
def test_drafts_leave_tokens_unchanged(baseline, corrupted, num_slots, max_num_batched_tokens):
    model, prompts, params, wanted = baseline
    drafter = Drafter(wanted, corrupted)
    engine = make_engine(model, num_slots, seed=5, max_num_batched_tokens=max_num_batched_tokens)
    rows = make_rows(prompts, 3)
    assert as_dict(engine.run(rows, params, drafter)) == wanted
    assert drafter.num_gained == sum(len(tokens) for tokens, _ in wanted.values())
    if max_num_batched_tokens > 1:
        assert drafter.num_draft > 50
        share = drafter.num_accepted / drafter.num_draft
        assert share < 0.1 if corrupted == 1.0 else share > 0.3
    if num_slots == 64 and corrupted == 0.0:
        plain = make_engine(model, num_slots, seed=5)
        again = plain.run(make_rows(prompts, 3), params)
        assert engine.num_forwards < 0.6 * plain.num_forwards
        for a, b in zip(rows, again, strict=True):
            np.testing.assert_allclose(a.logprob, b.logprob, atol=1e-6)
            np.testing.assert_allclose(a.full_logprob, b.full_logprob, atol=1e-6)


@pytest.mark.parametrize("num_pages", [None, 40, 11])
def test_pages_leave_tokens_unchanged(baseline, num_pages):
    """With as many as rows may need, with fewer than they come to need, and with those of one
    row."""
    model, prompts, params, wanted = baseline
    engine = make_engine(model, 8, seed=5, max_length=55, page_size=5, num_pages=num_pages)
    placed = 0
    for drafter in (None, Drafter(wanted, 0.3)):
        rows = make_rows(prompts, 3)
        engine.reset()
        assert as_dict(engine.run(rows, params, drafter)) == wanted
        placed += len(rows)
        (again,) = engine.run(make_rows(prompts[:1], 1), params)
        np.testing.assert_allclose(again.logprob, rows[0].logprob, atol=1e-6)
        placed += 1
    assert engine.pages.num_free == engine.pages.num_pages
    assert (engine.num_admitted > placed) == (num_pages is not None), "rows gave way"


@pytest.mark.parametrize("is_drafted", [False, True])
def test_a_stop_token_at_the_limit_is_a_stop(model, is_drafted):
    """Where the last token that fits is a stop token, the response has ended by itself: nothing was
    cut off."""
    (free,) = make_engine(model, 1).run(make_rows([(1, 2, 3)], 1, 20), PLAIN)
    tokens = free.tokens.tolist()
    length = next(n for n in range(12, 2, -1) if tokens[n - 1] not in tokens[: n - 1])
    stop = tokens[length - 1]
    for limit, stop_token_ids, finish in [
        (length, (stop,), "stop"),
        (20, (stop,), "stop"),  # drafts go on after it, and their tokens there are not gained
        (length - 1, (stop,), "length"),
        (length, (), "length"),
    ]:
        drafter = Drafter({(100, 0): (tokens, None)}, 0.0) if is_drafted else None
        params = SamplingParams(stop_token_ids=stop_token_ids)
        (row,) = make_engine(model, 1).run(make_rows([(1, 2, 3)], 1, limit), params, drafter)
        assert (row.tokens.tolist(), row.finish) == (tokens[: min(limit, length)], finish)
        assert (drafter is None) or drafter.num_accepted > 0


@pytest.mark.parametrize("num_slots, max_num_batched_tokens", [(6, 12), (3, 3), (5, 64)])
def test_a_forward_keeps_to_its_budget_and_its_rows_limits(
    model, num_slots, max_num_batched_tokens
):
    """Drafts that are far too long: the proposer is told what has room, and of what exceeds it
    nothing is fed."""
    engine = make_engine(model, num_slots, max_num_batched_tokens=max_num_batched_tokens)
    told = []

    class TooMany:
        def propose(self, rows, lengths, room, budget):
            known = [engine.lengths[engine.rows.index(row)] - len(row.prompt) for row in rows]
            assert lengths.tolist() == known
            left = [row.max_new_tokens - n - 1 for row, n in zip(rows, known, strict=True)]
            assert room.tolist() == left
            told.append((budget, sum(left)))
            return np.full(50 * len(rows), 7), np.full(len(rows), 50)

        def observe(self, rows, tokens, num_gained, num_draft, num_accepted):
            assert (num_accepted <= num_gained).all()

    for uid, prompt in enumerate(make_prompts(3, 15)):
        engine.add([Row(SampleId(uid, 3, j), prompt, 4 + 3 * j) for j in range(4)])
    while not engine.is_idle:
        count = len(told)
        _, load = engine.step(PLAIN, TooMany())
        assert load.tokens <= max_num_batched_tokens
        if len(told) > count:
            budget, room = told[-1]
            assert load.tokens - load.draft_tokens + budget == max_num_batched_tokens
            assert load.draft_tokens == min(budget, room)
    assert any(budget < room for budget, room in told) == (max_num_batched_tokens < 64)


def test_a_limit_on_prefills_slows_prompts_only(model):
    """The caller's limit changes the number of forwards, not the tokens; the least there is lets
    prompts get on."""
    engine = make_engine(model, 2)
    results, forwards = [], []
    for limit in (None, 4, 0):
        engine.reset()
        before, rows = engine.num_forwards, make_rows([tuple(range(1, 41))], 2, 10)
        engine.add(rows)
        while not engine.is_idle:
            engine.step(PLAIN, max_prefill_tokens=limit)
        results.append(as_dict(rows))
        forwards.append(engine.num_forwards - before)
    assert results[0] == results[1] == results[2]
    assert forwards[1] >= forwards[0] + 8 and forwards[2] >= forwards[0] + 38


def test_rows_that_do_not_fit_are_refused(model):
    engine = make_engine(model, 2, max_length=20)
    with pytest.raises(ValueError, match="do not fit max_length = 20"):
        engine.add(make_rows([tuple(range(10))], 1, 11))
    for known in (3, 4):
        with pytest.raises(ValueError, match=f"{known} of at most 3 tokens has none left"):
            engine.add([Row(SampleId(1, 3, 0), (1, 2), 3, np.ones(known, np.int64))])
    partly = Row(SampleId(1, 3, 0), (1, 2), 3, np.ones(2, np.int64))
    engine.add([partly, *make_rows([tuple(range(10))], 1, 10)])
    assert len(engine.queue) == 2, "what just fits is taken, and of what does not fit nothing"


def test_tokens_and_recorded_logprobs_are_those_of_the_plain_computation(make_model, model):
    """Oracle: reference_step.py, whose log-probabilities are truncated by transformers' own
    warpers."""
    reference = make_model()
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, stop_token_ids=STOP, min_length=4)
    rollout = RolloutConfig(temperature=0.8, top_p=0.9, top_k=20, stop_token_ids=list(STOP))
    rollout.min_completion_length, rollout.max_completion_length = 4, 30
    finishes = set()
    for row in make_engine(model, 3, seed=1 << 40).run(make_rows(make_prompts(4), 2), params):
        response = sample_response(reference, list(row.prompt), (1 << 40, *row.id), rollout)
        assert row.tokens.tolist() == response.tokens
        assert (row.finish == "length") == response.is_truncated
        finishes.add(row.finish)
        with torch.no_grad():
            logprobs = log_distributions(reference, response, 0.8)
        logprobs[:4, STOP] = -math.inf  # barred until the response is long enough
        chosen = torch.from_numpy(row.tokens)[:, None]
        kept = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(20)(None, logprobs))
        np.testing.assert_allclose(row.full_logprob, logprobs.gather(1, chosen)[:, 0], atol=1e-5)
        kept = kept.log_softmax(-1).gather(1, chosen)[:, 0]
        np.testing.assert_allclose(row.logprob, kept, atol=1e-5)
    assert finishes == {"stop", "length"}


def test_float32_first_differences_are_near_ties(make_model):
    """In float32 another batch shape may round differently; a row may then only leave the other at
    a near tie."""
    model, exact = make_model(dtype=torch.float32), make_model()
    prepare_model(model, 100)
    results = []
    for num_slots, budget in ((64, 2048), (3, 5)):
        engine = make_engine(model, num_slots, seed=1, max_num_batched_tokens=budget)
        results.append(engine.run(make_rows(make_prompts(6), 4), PLAIN))
    for a, b in zip(*results, strict=True):
        differs = np.flatnonzero(a.tokens[: len(b.tokens)] != b.tokens[: len(a.tokens)])
        if len(differs):
            position = int(differs[0])
            with torch.no_grad():
                logits = exact(torch.tensor([[*a.prompt, *a.tokens[:position]]])).logits[0, -1]
            best = (logits + gumbel(noise_key(1, *a.id, position), VOCAB)).topk(2).values
            assert best[0] - best[1] < 1e-3
