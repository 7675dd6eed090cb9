"""Window planning: the cost fit against known costs, survival against known chances, windows against exhaustive search."""

import itertools

import numpy as np
import pytest

from bubblespec.schedule.windows import WINDOWS, CostModel, Survival, choose_windows, match_bucket


def known_cost(a=3e-3, b=5e-5, c=8e-5, d=4e-4) -> CostModel:
    cost = CostModel()
    cost.coefficients = np.array([a, b, c, d])
    return cost


def test_cost_fit_recovers_known_costs_through_noise():
    truth, cost = known_cost(), CostModel()
    rng = np.random.default_rng(0)
    for rows, window in itertools.product((1, 8, 64), (0, 3, 15)):
        for _ in range(3):
            cost.anchor(rows, rows * (1 + window), truth.seconds(rows, rows * (1 + window)) * rng.uniform(0.9, 1.1))
    for _ in range(300):
        rows = int(rng.integers(1, 65))
        tokens = rows + int(rng.integers(0, 100)) * int(rng.integers(0, 2))
        cost.observe(rows, tokens, truth.seconds(rows, tokens) * rng.uniform(0.9, 1.1))
    for rows, tokens in ((1, 1), (1, 32), (8, 8), (32, 128), (64, 64)):
        assert cost.seconds(rows, tokens) == pytest.approx(truth.seconds(rows, tokens), rel=0.08)


def test_cost_fit_follows_a_change_and_leaves_interruptions_out():
    before, after, cost = known_cost(), known_cost(a=6e-3, b=1e-4, c=1.6e-4, d=8e-4), CostModel()
    rng = np.random.default_rng(0)
    for truth in (before, after):
        for _ in range(800):
            rows = int(rng.integers(1, 65))
            tokens = rows + int(rng.integers(0, 100)) * int(rng.integers(0, 2))
            seconds = truth.seconds(rows, tokens)
            cost.observe(rows, tokens, seconds if rng.random() < 0.98 else 50 * seconds)
        assert cost.seconds(16, 60) == pytest.approx(truth.seconds(16, 60), rel=0.1)
    assert (cost.coefficients >= 0).all()


@pytest.mark.parametrize("chance", [0.2, 0.7, 0.98])
def test_survival_converges_to_the_chance(chance):
    rng, survival = np.random.default_rng(0), Survival()
    for _ in range(500):
        window = int(rng.integers(1, 17))
        wrong = np.flatnonzero(rng.random(window) > chance)
        survival.observe(("own", 2), window, int(wrong[0]) if len(wrong) else window)
    assert survival.estimate(("own", 2), prior=0.5) == pytest.approx(chance, abs=0.06)
    assert survival.estimate(("own", 3), prior=0.5) == 0.5
    for _ in range(400):
        survival.forget(0.05)
    assert survival.estimate(("own", 2), prior=0.5) == pytest.approx(0.5, abs=0.01)


def rate(windows, survival, cost, rows):
    gained = sum(sum(s**i for i in range(1, w + 1)) for w, s in zip(windows, survival, strict=True))
    return (rows + gained) / cost.seconds(rows, rows + sum(windows))


@pytest.mark.parametrize("seed", range(6))
def test_windows_are_the_best_of_all(seed):
    """Against every combination, for three rows and short windows."""
    rng = np.random.default_rng(seed)
    survival, available = rng.uniform(0.05, 0.99, 3), rng.integers(0, 7, 3)
    cost = known_cost(a=rng.uniform(1e-4, 3e-3), d=rng.uniform(0, 1e-3))
    chosen = choose_windows(survival, available, cost, 3, budget=100)
    ladder = [sorted({min(int(w), int(n)) for w in WINDOWS}) for n in available]
    best = max(rate(windows, survival, cost, 3) for windows in itertools.product(*ladder))
    assert rate(chosen, survival, cost, 3) == pytest.approx(best, rel=1e-9)
    assert (chosen <= available).all()


def test_windows_turn_off_where_they_do_not_pay():
    """Poor drafts, and a large batch at which every token costs what it brings."""
    good, poor = np.full(64, 0.9), np.full(64, 0.02)
    plenty = np.full(64, 32)
    assert not choose_windows(poor, plenty, known_cost(), 64, 4096).any()
    saturated = known_cost(a=1e-6, b=0.0, c=1e-3, d=0.0)
    assert not choose_windows(good, plenty, saturated, 64, 4096).any()
    assert (choose_windows(good, plenty, known_cost(c=1e-6), 64, 4096) > 3).all()


def test_windows_respect_the_budget_and_prefer_the_better_row():
    windows = choose_windows(np.array([0.99, 0.6]), np.array([64, 64]), known_cost(c=1e-6), 2, budget=20)
    assert windows.sum() <= 20 and windows[0] > windows[1]
    assert not choose_windows(np.array([0.9]), np.array([0]), known_cost(), 1, 100).any()


def test_match_buckets_grow_with_the_match():
    assert [match_bucket(n) for n in (0, 1, 2, 3, 4, 8, 16, 99)] == [0, 0, 1, 1, 2, 3, 4, 4]
