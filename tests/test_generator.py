"""The engine against `model.generate` and against itself under every change of schedule."""

import math

import numpy as np
import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from bubblespec.config import RolloutConfig
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.model_checks import prepare_model
from bubblespec.types import Row, SampleId
from tests.helpers.generation import STOP, Drafter, as_dict, make_engine, make_prompts, make_rows
from tests.helpers.models import VOCAB, random_model, small_config
from tests.helpers.reference_step import gumbel, log_distributions, noise_key, sample_response

PLAIN = SamplingParams()
PARAMS = SamplingParams(temperature=0.9, top_p=0.97, stop_token_ids=STOP, min_length=2)


@pytest.fixture(scope="module")
def baseline():
    """Sampled rows of one schedule, which every other schedule must reproduce."""
    model = random_model(small_config("llama"))
    prepare_model(model, 100)
    prompts = make_prompts(5, 25)
    engine = make_engine(model, 64, seed=5)
    rows = engine.run(make_rows(prompts, 3), PARAMS)
    assert {len(row.tokens) for row in rows} != {30} and engine.is_idle
    return model, prompts, rows, engine.num_forwards


@pytest.fixture
def model(baseline):
    return baseline[0]


ALL = {"num_slots": 64}
FEW = {"num_slots": 5, "max_num_batched_tokens": 12}
ONE = {"num_slots": 1, "max_num_batched_tokens": 1}


@pytest.mark.parametrize(
    "corrupted, order, options",
    [
        (None, "given", ONE),
        (None, "given", {"num_slots": 3, "max_num_batched_tokens": 7}),
        (None, "reversed", {"num_slots": 5, "max_num_batched_tokens": 64}),
        (None, "shuffled", {"num_slots": 8}),
        *((share, "given", sizes) for share in (0.0, 0.3, 1.0) for sizes in (ALL, FEW)),
        (0.3, "given", ONE),
    ],
)
def test_tokens_with_any_schedule_and_drafts_are_equal(baseline, corrupted, order, options):
    model, prompts, wanted, num_forwards = baseline
    drafter = None if corrupted is None else Drafter(as_dict(wanted), corrupted)
    rows = make_rows(prompts, 3)
    given = rows[::-1] if order == "reversed" else list(rows)
    if order == "shuffled":
        np.random.default_rng(1).shuffle(given)
    engine = make_engine(model, seed=5, **options)
    engine.run(given, PARAMS, drafter)
    assert as_dict(rows) == as_dict(wanted) and engine.is_idle
    for row, of in zip(rows, wanted, strict=True):
        np.testing.assert_allclose(row.logprob, of.logprob, atol=1e-6)
    if drafter is not None:
        assert drafter.num_gained == sum(len(row.tokens) for row in wanted)
        if options is not ONE:
            share = drafter.num_accepted / drafter.num_draft
            assert drafter.num_draft > 50
            assert share < 0.1 if corrupted == 1.0 else share > 0.3
    if options is ALL and corrupted == 0.0:
        assert engine.num_forwards < 0.6 * num_forwards


@pytest.mark.parametrize("num_pages", [None, 40, 11])
def test_tokens_with_pages_are_equal(baseline, num_pages):
    model, prompts, wanted, _ = baseline
    engine = make_engine(model, 8, seed=5, max_length=55, page_size=5, num_pages=num_pages)
    placed = 0
    for drafter in (None, Drafter(as_dict(wanted), 0.3)):
        rows = make_rows(prompts, 3)
        engine.reset()
        assert as_dict(engine.run(rows, PARAMS, drafter)) == as_dict(wanted)
        (again,) = engine.run(make_rows(prompts[:1], 1), PARAMS)
        np.testing.assert_allclose(again.logprob, rows[0].logprob, atol=1e-6)
        placed += len(rows) + 1
    assert engine.pages.num_free == engine.pages.num_pages
    assert (engine.num_admitted > placed) == (num_pages is not None), "rows were preempted"


@pytest.mark.parametrize("is_drafted", [False, True])
def test_stop_token_at_the_limit_finishes_with_stop(model, is_drafted):
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
def test_drafts_beyond_budget_or_limits_are_cut(model, num_slots, max_num_batched_tokens):
    engine = make_engine(model, num_slots, max_num_batched_tokens=max_num_batched_tokens)
    offered = []

    class TooMany:
        def propose(self, rows, lengths, room, budget, ahead):
            known = [engine.lengths[engine.rows.index(row)] - len(row.prompt) for row in rows]
            assert lengths.tolist() == known
            left = [row.max_new_tokens - n - 1 for row, n in zip(rows, known, strict=True)]
            assert room.tolist() == left
            offered.append((budget, sum(left)))
            return np.full(50 * len(rows), 7), np.full(len(rows), 50)

        def observe(self, rows, tokens, num_gained, num_draft, num_accepted):
            assert (num_accepted <= num_gained).all()

    for prompt_id, prompt in enumerate(make_prompts(3, 15)):
        engine.add([Row(SampleId(prompt_id, 3, j), prompt, 4 + 3 * j) for j in range(4)])
    while not engine.is_idle:
        count = len(offered)
        _, load = engine.step(PLAIN, TooMany())
        assert load.tokens <= max_num_batched_tokens
        if len(offered) > count:
            budget, room = offered[-1]
            assert load.tokens - load.draft_tokens + budget == max_num_batched_tokens
            assert load.draft_tokens == min(budget, room)
    assert any(budget < room for budget, room in offered) == (max_num_batched_tokens < 64)


def test_limit_on_prefills_slows_prompts_only(model):
    """Even a limit of 0 lets prompts make progress."""
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


def test_too_long_row_is_refused(model):
    engine = make_engine(model, 2, max_length=20)
    with pytest.raises(ValueError, match="do not fit max_length = 20"):
        engine.add(make_rows([tuple(range(10))], 1, 11))
    for known in (3, 4):
        with pytest.raises(ValueError, match=f"{known} of at most 3 tokens has none left"):
            engine.add([Row(SampleId(1, 3, 0), (1, 2), 3, np.ones(known, np.int64))])
    partly = Row(SampleId(1, 3, 0), (1, 2), 3, np.ones(2, np.int64))
    engine.add([partly, *make_rows([tuple(range(10))], 1, 10)])
    assert len(engine.queue) == 2, "what just fits is taken, and of what does not fit nothing"


def test_tokens_and_logprobs_equal_plain_computation(make_model, model):
    """Oracle: reference_step.py, truncated by transformers' own warpers."""
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
            logprobs = log_distributions(reference, response, RolloutConfig(temperature=0.8))
        logprobs[:4, STOP] = -math.inf  # barred until the response is long enough
        chosen = torch.from_numpy(row.tokens)[:, None]
        kept = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(20)(None, logprobs))
        kept = kept.log_softmax(-1).gather(1, chosen)[:, 0]
        np.testing.assert_allclose(row.logprob, kept, atol=1e-5)
    assert finishes == {"stop", "length"}


def test_first_differences_in_float32_are_near_ties(make_model):
    """In float32 another batch shape may round differently."""
    model, exact, results = make_model("llama", torch.float32, 100), make_model(), []
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
