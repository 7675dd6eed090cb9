"""Rows with turns in the engine: stop tokens pause rows, observations come in between. Oracle: each
row computed alone, token by token, by whole forwards of the model."""

import math

import numpy as np
import pytest
import torch

from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.sampling import SamplingParams
from bubblespec.types import Row
from tests.helpers.generation import STOP, Drafter, as_dict, make_engine, make_prompts, make_rows
from tests.helpers.models import VOCAB, random_model, small_config
from tests.helpers.reference_step import gumbel, noise_key

STOPS = (*STOP, *range(20, 36))  # so that turns are short
PARAMS = SamplingParams(stop_token_ids=STOPS)
SEED, LIMIT = 5, 30


def observation(row: Row, turn: int) -> np.ndarray | None:
    """Return the tokens after a row's turn (from 1): empty, too long, or None where it is over."""
    random = np.random.default_rng((*row.id, turn))
    if turn > 2 and row.id.sample:
        return None
    lengths = (0, 1, 3, 12, LIMIT)
    return random.integers(1, VOCAB, lengths[random.integers(len(lengths) - (turn < 2))])


def alone(model, row: Row) -> tuple[list[int], str, list[float]]:
    """Compute a row alone: tokens, finish, log-probabilities."""
    tokens, logprobs, turn = [], [], 0
    while len(tokens) < LIMIT:
        with torch.no_grad():
            logits = model(torch.tensor([[*row.prompt, *tokens]])).logits[0, -1]
        token = int((logits + gumbel(noise_key(SEED, *row.id, len(tokens)), VOCAB)).argmax())
        tokens.append(token)
        logprobs.append(float(logits.log_softmax(-1)[token]))
        if token not in STOPS:
            continue
        turn += 1
        if (ids := observation(row, turn)) is None:
            return tokens, "stop", logprobs
        ids = ids.tolist()[: LIMIT - len(tokens)]
        tokens, logprobs = tokens + ids, logprobs + [math.nan] * len(ids)
        if len(tokens) == LIMIT:
            break
    return tokens, "length", logprobs


@pytest.fixture(scope="module")
def baseline():
    model = random_model(small_config("llama"))
    prompts = make_prompts(4, 25)
    rows = make_rows(prompts, 3, LIMIT)
    wanted = {(row.id.uid, row.id.sample): alone(model, row) for row in rows}
    assert {finish for _, finish, _ in wanted.values()} == {"stop", "length"}
    assert any(np.isnan(logprobs).sum() > 10 for *_, logprobs in wanted.values())
    prepare_model(model, 100)
    return model, prompts, wanted


def play(engine, rows: list[Row], proposer=None, *, max_prefill_tokens=None) -> None:
    """Generate rows to their end; observations come after a while and in any order."""
    random = np.random.default_rng(0)
    turns, waiting = dict.fromkeys(rows, 0), []
    engine.add(rows)
    while waiting or not engine.is_idle:
        is_waiting = engine.is_waiting
        finished, load = engine.step(PARAMS, proposer, max_prefill_tokens)
        # Where pages are few, a row that could be fed may be preempted instead.
        assert (load is None) == is_waiting or engine.pages is not None
        waiting += [row for row in finished if row.finish == "stop"]
        for row in [row for row in waiting if load is None or random.random() < 0.3]:
            waiting.remove(row)
            turns[row] += 1
            if (ids := observation(row, turns[row])) is None:
                engine.drop(row)
            else:
                engine.resume(row, ids)


PAGES = {"num_slots": 8, "max_length": 55, "page_size": 5}


@pytest.mark.parametrize(
    "corrupted, options",
    [
        *(
            (share, {"num_slots": slots, "max_num_batched_tokens": budget})
            for slots, budget in ((1, 1), (3, 7), (64, 2048))
            for share in (None, 0.0, 0.3)
        ),
        *((None, {**PAGES, "num_pages": count}) for count in (None, 40, 11)),
    ],
)
def test_rows_with_turns_equal_rows_computed_alone(baseline, corrupted, options):
    """Any slots and budget, with drafts; where pages are few, paused rows are preempted."""
    model, prompts, wanted = baseline
    engine = make_engine(model, seed=SEED, **options)
    drafter = None
    if corrupted is not None:
        drafter = Drafter({name: of_row[:1] for name, of_row in wanted.items()}, corrupted)
    rows = make_rows(prompts, 3, LIMIT)
    for row in rows:
        row.has_turns = True
    play(engine, rows, drafter, max_prefill_tokens=4 if engine.pages else None)
    assert as_dict(rows) == {name: of_row[:2] for name, of_row in wanted.items()}
    for row in rows:
        logprobs = wanted[row.id.uid, row.id.sample][2]
        np.testing.assert_allclose(row.logprob, logprobs, atol=1e-5)
        np.testing.assert_allclose(row.full_logprob, logprobs, atol=1e-5)
    if corrupted == 0.0 and options["num_slots"] > 1:
        assert drafter.num_accepted > 30
    if engine.pages is not None:
        assert engine.pages.num_free == engine.pages.num_pages
