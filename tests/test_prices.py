"""Prices against rollouts whose parts have known prices."""

import numpy as np
import pytest

from bubblespec.planner.prices import (
    LEAST_SHARE,
    Counts,
    Prices,
    RolloutCostFit,
    counts_of,
    suggested_prices,
)
from bubblespec.records import ForwardRecord, RolloutRecord, Span
from bubblespec.types import Load
from tests.helpers.planning import cost_of

COST = cost_of((2e-3, 1e-4, 1e-5, 0.0, 1e-8))
TRUE = Prices(0.05, 1.4, 4e-5, 3e-4, 1e-3)  # forwards suggest 0, 1, 1e-5, 1.1e-4 and 1e-3


def rollouts(count: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        drafted = rng.integers(0, 3000)
        yield Counts(1.0, rng.uniform(0.1, 1.0), rng.integers(0, 2000), drafted, drafted // 30)


def test_prices_of_whole_rollouts_are_found():
    model, rng, errors = RolloutCostFit(), np.random.default_rng(1), []
    for counts in rollouts(60):
        seconds = np.dot(counts, TRUE) * rng.lognormal(0.0, 0.03)
        model.observe(counts, seconds, COST, 100.0, 150.0)
        errors.append(abs(model.error))
    assert np.median(errors[10:]) < 0.05
    found = model.prices
    assert found.forward == pytest.approx(TRUE.forward, rel=0.1)
    # Tokens and begun responses come together, so it is their sum that is known.
    of_tokens = [prices.drafted_s + prices.begun_s / 30 for prices in (found, TRUE)]
    assert of_tokens[0] == pytest.approx(of_tokens[1], rel=0.15)


def test_prices_follow_a_change():
    """Also that of the constant, of which forwards suggest nothing."""
    model, errors = RolloutCostFit(), []
    for number, counts in enumerate(rollouts(160)):
        seconds = float(np.dot(counts, TRUE)) * (1.0 if number < 80 else 1.5)
        model.observe(counts, seconds, COST, 100.0, 150.0)
        errors.append(abs(model.error))
    assert max(np.mean(errors[60:80]), np.mean(errors[140:])) < 0.08 < errors[80]
    assert model.prices.rollout_s > 0.3 * TRUE.rollout_s


def test_rollout_without_seconds_is_not_priced():
    model = RolloutCostFit()
    model.observe(next(rollouts(1)), 0.0, COST, 100.0, 150.0)
    assert model.prices is None and not model.state_dict()["moments"].any()


def test_unseen_prices_are_those_of_forwards():
    model = RolloutCostFit()
    for counts in rollouts(20):
        plain = counts._replace(verified=0.0, drafted=0.0, begun=0.0)
        model.observe(plain, 1.2 * plain.forwards_s, COST, 100.0, 150.0)
    suggested = suggested_prices(COST, 100.0, 150.0)
    assert model.prices[2:] == pytest.approx(suggested[2:]) and suggested.begun_s == 1e-3
    assert model.prices.forward == pytest.approx(1.2, rel=0.03)


def test_nothing_is_free():
    """Drafted tokens that seem to cost nothing would leave co-scheduled drafts without a worth."""
    model = RolloutCostFit()
    for counts in rollouts(40):
        model.observe(counts, counts.forwards_s, COST, 100.0, 150.0)
    suggested = suggested_prices(COST, 100.0, 150.0)
    assert 0.0 < model.prices.drafted_s < 0.2 * suggested.drafted_s
    assert (np.array(model.prices) >= LEAST_SHARE * np.array(suggested)).all()
    assert suggested == pytest.approx((0.0, 1.0, 1e-5, 1e-4 + 1e-5 + 150e-8, 1e-3))


def test_saved_prices_continue_alike():
    model, again = RolloutCostFit(), RolloutCostFit()
    again.load_state_dict(model.state_dict())
    assert again.prices is None
    for counts in rollouts(5):
        model.observe(counts, np.dot(counts, TRUE), COST, 100.0, 150.0)
    again.load_state_dict(model.state_dict())
    for each in (model, again):
        each.observe(Counts(1.0, 0.5, 10.0, 100.0, 3.0), 0.8, COST, 100.0, 150.0)
    assert again.prices == model.prices and again.error == model.error


def test_counts_are_of_rows_of_this_step():
    """Forwards with nothing but drafts count for nothing; waiting rows feed no tokens."""

    def forward(rows, own, ahead, prompts=0, drafts=0):
        load = Load(rows, rows + prompts + drafts, 0, 100 * rows, prompts, drafts)
        return ForwardRecord(0.0, 1.0, 1.0, 0.0, load, own, ahead, 0)

    record = RolloutRecord(shared=[Span("shared", 2.0, 2.5)], drafts_begun=2)
    record.forwards = [forward(4, 9, 0, 40), forward(6, 2, 4), forward(5, 0, 5)]
    record.acceptance.draft_tokens = 7
    counts = counts_of(record, COST)
    alone = COST.seconds(4, 44, 0, 400) + COST.seconds(2, 2, 0, 200)
    assert counts == pytest.approx((1.0, alone + 0.5, 7.0, 4.0, 2.0))
