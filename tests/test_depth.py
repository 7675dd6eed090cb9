"""Forwards launched before the results of those before them: rows are those of depth 0."""

import json

import numpy as np
import pytest

from bubblespec.engine import arrays
from bubblespec.engine.batch import OverlapPolicy
from bubblespec.engine.engine import Engine
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.pages import Pages
from tests.helpers import golden
from tests.helpers.clocks import Clock
from tests.helpers.generation import Drafter, as_dict, make_engine, make_prompts, make_rows
from tests.helpers.late import LateRunner, results_come_late
from tests.helpers.models import config_of, random_model
from tests.helpers.turns import LIMIT, PARAMS, SEED, play
from tests.test_architectures import SERVED

MAX_LENGTH, NUM_SCHEDULES = 56, 24


@pytest.fixture(scope="module", params=["llama", "qwen3_5", "lfm2"])
def baseline(request):
    model = random_model(config_of(*SERVED[request.param]))
    prepare_model(model, MAX_LENGTH)
    rows = make_rows(make_prompts(5, 25), 3, LIMIT)
    for row in rows:
        row.has_turns = row.id.sample != 1
    play(make_engine(model, 8, seed=SEED, max_length=MAX_LENGTH), rows, np.random.default_rng(1))
    return model, as_dict(rows), {row.id: row.logprob for row in rows}


def test_rows_of_random_schedules_equal_those_of_depth_0(baseline):
    """Stops, pauses, preemptions, rows that leave, wrong drafts, up to three in flight."""
    model, wanted, logprobs = baseline
    drafts, masked, preempted = np.zeros(2), 0, 0
    for seed in range(NUM_SCHEDULES):
        random = np.random.default_rng(seed)
        num_slots = int(random.integers(1, 9))
        pages = None
        if seed % 2:
            pages = Pages.for_rows(num_slots, MAX_LENGTH, 4, int(random.integers(14, 40)))
        sizes = {"max_num_batched_tokens": int(random.choice([num_slots, 12, 2048]))}
        runner = LateRunner(model, num_slots, MAX_LENGTH, SEED, pages=pages, **sizes)
        runner.depths = lambda random=random, deepest=1 + seed % 3: int(
            random.integers(1, deepest + 1)
        )
        engine = Engine(runner)
        drafter = Drafter(wanted, float(random.choice([0.0, 0.3]))) if seed % 4 else None
        rows = make_rows(make_prompts(5, 25), 3, LIMIT)
        for row in rows:
            row.has_turns = row.id.sample != 1
        play(engine, rows, random, drafter)
        assert as_dict(rows) == wanted, seed
        for row in rows:
            np.testing.assert_allclose(row.logprob, logprobs[row.id], rtol=1e-4, atol=1e-5)
        masked += runner.num_masked
        preempted += engine.num_admitted > len(rows)
        if drafter is not None:
            drafts += drafter.num_draft, drafter.num_accepted
    assert masked and preempted and 0 < drafts[1] < drafts[0]


def test_row_that_moves_while_a_forward_is_in_flight_keeps_its_tokens(baseline):
    model, wanted, _ = baseline
    engine = Engine(LateRunner(model, 8, MAX_LENGTH, SEED))
    rows = [row for row in make_rows(make_prompts(5, 25), 3, LIMIT) if row.id.sample == 1]
    engine.add(rows)
    for _ in range(2):
        engine.flights.append(engine._launch(engine.schedule(), PARAMS))
        if rows[0] in engine.rows:
            engine.drop(rows[0])  # and the last row moves into its slot
    engine.run(rows[:1], PARAMS)
    assert as_dict(rows) == {name: of for name, of in wanted.items() if name[1] == 1}


def rate(pace: OverlapPolicy, ahead: bool, forward_s: float, host_s: float, chance: float) -> float:
    """Return tokens per second of a row with drafts of 8 tokens, each right with this chance, in a
    virtual clock; what the pace has measured stays in it."""
    random, clock = np.random.default_rng(0), pace.clock
    began_s, gained, is_dropped, free_s = clock.now, 0, False, clock.now
    for _ in range(4000):
        launched_s = clock.now
        clock.now += host_s
        if ahead:
            free_s = max(free_s, launched_s) + forward_s
            waits_since_s, clock.now = clock.now, max(clock.now, free_s)
        else:
            launched_s = waits_since_s = clock.now
            clock.now += forward_s
        pace.landed(launched_s, waits_since_s)
        right = 0 if is_dropped else int((random.random(8) < chance).cumprod().sum())
        gained += right + 1
        if not is_dropped:
            pace.verified(np.array([8]), np.array([right]), np.array([right + 1]))
        # The token behind a right draft is the next of the draft, or it is wrong, too.
        is_dropped = ahead and not is_dropped and (right < 8 or random.random() >= chance)
    return gained / (clock.now - began_s)


@pytest.mark.parametrize(
    "forward_s, host_s, chance",
    [(1.0, 0.6, 0.97), (4.0, 0.6, 0.8), (1.0, 0.9, 0.8), (2.0, 0.1, 0.9), (1.0, 0.3, 0.999)],
)
def test_pace_is_that_which_brings_more_tokens(forward_s, host_s, chance):
    """Measured at either depth it gives the same answer, where the two are not within 5%."""
    answers, rates = [], []
    for ahead in (False, True):
        pace = OverlapPolicy(Clock())
        rates.append(rate(pace, ahead, forward_s, host_s, chance))
        answers.append(pace.goes_ahead(1, 1))
        assert pace.goes_ahead(1, 0)
    if abs(rates[1] / rates[0] - 1) > 0.05:
        assert answers == [rates[1] > rates[0]] * 2
    assert not OverlapPolicy().goes_ahead(8, 1), "nothing has been measured"
    assert not OverlapPolicy(is_shared=True).goes_ahead(8, 1) and OverlapPolicy(
        is_shared=True
    ).goes_ahead(8, 0)


def test_forward_without_samples_is_waited_for(monkeypatch, baseline):
    """Or its time would be the next one's: the cost model learns both."""
    waits, wait = [], arrays.wait
    monkeypatch.setattr(arrays, "wait", lambda *of: waits.append(of) or wait(*of))
    engine = make_engine(baseline[0], 2, seed=SEED, max_length=MAX_LENGTH)
    engine.add(make_rows([(5, 6, 7, 8, 9)], 1, 4))
    assert engine.step(PARAMS, None, 2)[0] == [] and len(waits) == 1


def test_run_of_episodes_equals_recorded_run(monkeypatch, tmp_path):
    with open(golden.PATH, encoding="utf-8") as file:
        wanted = json.load(file)
    results_come_late(monkeypatch)
    found = golden.run("episodes", str(tmp_path))
    assert golden.differences("episodes", found, wanted["episodes"]) == []
