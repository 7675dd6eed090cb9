"""Rows with turns in the engine: stop tokens pause rows, observations come in between. Oracle: each
row computed alone, token by token, by whole forwards of the model."""

import math

import numpy as np
import pytest
import torch

from bubblespec.engine.model_checks import prepare_model
from bubblespec.types import Row
from tests.helpers.generation import Drafter, as_dict, make_engine, make_prompts, make_rows
from tests.helpers.models import VOCAB, random_model, small_config
from tests.helpers.reference_step import gumbel, noise_key
from tests.helpers.turns import LIMIT, SEED, STOPS, observation, play


def alone(model, row: Row) -> tuple[list[int], str, list[float]]:
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
    wanted = {(row.id.prompt_id, row.id.sample): alone(model, row) for row in rows}
    assert {finish for _, finish, _ in wanted.values()} == {"stop", "length"}
    assert any(np.isnan(logprobs).sum() > 10 for *_, logprobs in wanted.values())
    prepare_model(model, 100)
    return model, prompts, wanted


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
    model, prompts, wanted = baseline
    engine = make_engine(model, seed=SEED, **options)
    drafter = None
    if corrupted is not None:
        drafter = Drafter({name: of_row[:1] for name, of_row in wanted.items()}, corrupted)
    rows = make_rows(prompts, 3, LIMIT)
    for row in rows:
        row.has_turns = True
    play(engine, rows, np.random.default_rng(0), drafter, many=99)
    assert as_dict(rows) == {name: of_row[:2] for name, of_row in wanted.items()}
    for row in rows:
        logprobs = wanted[row.id.prompt_id, row.id.sample][2]
        np.testing.assert_allclose(row.logprob, logprobs, atol=1e-5)
    if corrupted == 0.0 and options["num_slots"] > 1:
        assert drafter.num_accepted > 30
    if engine.pages is not None:
        assert engine.pages.num_free == engine.pages.num_pages
