"""Window planning: the cost fit against known costs, survival against known chances, windows
against exhaustive search."""

import itertools

import numpy as np
import pytest

from bubblespec.draft.windows import Survival, match_bucket
from bubblespec.planner.costs import CostModel
from bubblespec.planner.windows import WINDOWS, choose_windows


def known_cost(a=3e-3, b=5e-5, c=8e-5, d=6e-5, e=5e-7) -> CostModel:
    cost = CostModel()
    cost.coefficients = np.array([a, b, c, d, e])
    return cost


def some_load(rng) -> tuple[int, int, int, int]:
    rows = int(rng.integers(1, 65))
    wide = int(rng.integers(0, rows + 1)) * int(rng.integers(0, 2))
    return rows, rows + wide * int(rng.integers(1, 8)), wide, rows * int(rng.integers(10, 400))


def test_cost_fit_recovers_known_costs_through_noise():
    truth, cost = known_cost(), CostModel()
    rng = np.random.default_rng(0)
    for rows, window in itertools.product((1, 8, 64), (0, 3, 15)):
        for _ in range(3):
            load = (rows, rows * (1 + window), rows * (window > 0), rows * 60)
            cost.anchor(*load, truth.seconds(*load) * rng.uniform(0.9, 1.1))
    for _ in range(300):
        load = some_load(rng)
        cost.observe(*load, truth.seconds(*load) * rng.uniform(0.9, 1.1))
    for load in (
        (1, 1, 0, 50),
        (1, 32, 1, 90),
        (8, 8, 0, 2000),
        (32, 128, 20, 4000),
        (64, 64, 0, 9000),
    ):
        assert cost.seconds(*load) == pytest.approx(truth.seconds(*load), rel=0.08)


def test_cost_fit_follows_a_change_and_leaves_interruptions_out():
    before, after, cost = known_cost(), known_cost(6e-3, 1e-4, 1.6e-4, 1.2e-4, 1e-6), CostModel()
    rng = np.random.default_rng(0)
    for truth in (before, after):
        for _ in range(800):
            load = some_load(rng)
            seconds = truth.seconds(*load)
            cost.observe(*load, seconds if rng.random() < 0.98 else 50 * seconds)
        assert cost.seconds(16, 60, 10, 2000) == pytest.approx(
            truth.seconds(16, 60, 10, 2000), rel=0.1
        )
    assert (cost.coefficients >= 0).all()


@pytest.mark.parametrize("times, is_counted", [(4.99, True), (5.01, False)])
def test_five_times_slower_is_an_interruption(times, is_counted):
    cost = CostModel(refresh=1)
    cost.anchor(4, 8, 2, 100, 3e-3)
    before = cost.coefficients.copy()
    cost.observe(4, 8, 2, 100, times * cost.seconds(4, 8, 2, 100))
    assert (cost.coefficients != before).any() == is_counted


def test_a_slow_machine_is_learnt_without_a_profile():
    """No forward is then like what is expected of an unknown machine; interruptions are left out
    all the same."""
    truth, cost, rng = known_cost(0.1, 2e-3, 3e-3, 0.0, 1e-6), CostModel(), np.random.default_rng(0)
    for number in range(200):
        rows = int(rng.integers(1, 65))
        load = (rows, rows, 0, rows * int(rng.integers(10, 400)))
        cost.observe(*load, truth.seconds(*load) * (50 if number % 20 == 0 else 1))
    assert cost.seconds(8, 8, 0, 800) == pytest.approx(truth.seconds(8, 8, 0, 800), rel=0.02)


def test_costs_are_worked_out_only_when_somebody_asks(monkeypatch):
    """Plain decoding observes every forward, and never asks."""
    cost, fits, fit = CostModel(refresh=20), [], CostModel.fit
    monkeypatch.setattr(
        CostModel, "fit", lambda cost: fits.append(len(cost._observed)) or fit(cost)
    )
    for _ in range(50):
        cost.observe(4, 4, 0, 100, 2e-3)
    assert fits == []
    assert cost.seconds(4, 4, 0, 100) == pytest.approx(2e-3, rel=1e-3) and fits == [50]
    cost.observe(4, 4, 0, 100, 2e-3)
    assert cost.seconds(4, 4, 0, 100) == pytest.approx(2e-3, rel=1e-3) and fits == [50]


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


def rate(windows, survival, cost):
    gained = sum(sum(s**i for i in range(1, w + 1)) for w, s in zip(windows, survival, strict=True))
    rows = len(windows)
    return (rows + gained) / cost.seconds(
        rows, rows + sum(windows), sum(w > 0 for w in windows), 100
    )


def test_survival_drifts_back_to_the_prior_by_the_share_given():
    survival = Survival()
    survival.observe(("self", 1), 10, 10)
    survival.forget(0.25)
    assert survival.estimate(("self", 1), 0.5) == pytest.approx((7.5 + 8 * 0.5) / (7.5 + 8))


def test_what_was_seen_elsewhere_counts_until_something_is_seen_here():
    here, there = Survival(), Survival()
    here.observe(("own", 1), 4, 4)
    there.observe(("own", 1), 8, 0)
    there.observe(("self", 1), 8, 2)
    here.adopt(there)
    assert here.estimate(("own", 1), 0.5) == pytest.approx((4 + 8 * 0.5) / (4 + 8))
    assert (
        here.estimate(("self", 1), 0.5)
        == there.estimate(("self", 1), 0.5)
        == pytest.approx((2 + 8 * 0.5) / (3 + 8))
    )
    here.observe(("self", 1), 5, 5)
    assert here.estimate(("self", 1), 0.5) > there.estimate(("self", 1), 0.5)


@pytest.mark.parametrize("seed", range(6))
def test_windows_are_the_best_of_all_without_a_price_of_wide_rows(seed):
    """Against every combination, for three rows and short windows."""
    rng = np.random.default_rng(seed)
    survival, available = rng.uniform(0.05, 0.99, 3), rng.integers(0, 7, 3)
    cost = known_cost(a=rng.uniform(1e-4, 3e-3), d=0.0)
    chosen, _ = choose_windows(survival, available, cost, 100, budget=100)
    best = max(rate(windows, survival, cost) for windows in ladders(available))
    assert rate(chosen, survival, cost) == pytest.approx(best, rel=1e-9)
    assert (chosen <= available).all()


def ladders(available):
    return itertools.product(*[sorted({min(int(w), int(n)) for w in WINDOWS}) for n in available])


def test_windows_are_nearly_the_best_with_a_price_of_wide_rows():
    """Greedy is no longer optimal then: it must come within 3% of the best of all combinations, and
    0.5% on average."""
    lost = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        survival, available = rng.uniform(0.05, 0.99, 3), rng.integers(0, 9, 3)
        cost = known_cost(a=rng.uniform(1e-4, 1e-3), d=rng.uniform(0, 4e-4))
        chosen, _ = choose_windows(survival, available, cost, 100, budget=100)
        lost.append(
            1
            - rate(chosen, survival, cost)
            / max(rate(w, survival, cost) for w in ladders(available))
        )
    assert max(lost) < 0.03 and np.mean(lost) < 0.005


def test_windows_turn_off_where_they_do_not_pay():
    """Poor drafts, a large batch at which every token costs what it brings, and proposals that take
    longer than they save."""
    good, poor = np.full(64, 0.9), np.full(64, 0.02)
    plenty = np.full(64, 32)
    assert not choose_windows(poor, plenty, known_cost(), 0, budget=4096)[0].any()
    saturated = known_cost(a=1e-6, b=0.0, c=1e-3, d=0.0)
    windows, is_worth_it = choose_windows(good, plenty, saturated, 0, budget=4096)
    assert not windows.any() and not is_worth_it
    windows, is_worth_it = choose_windows(good, plenty, known_cost(c=1e-6), 0, budget=4096)
    assert (windows > 3).all() and is_worth_it
    assert not choose_windows(good, plenty, known_cost(c=1e-6), 0, budget=4096, overhead_s=0.1)[1]


def test_windows_respect_the_budget_and_prefer_the_better_row():
    windows, _ = choose_windows(
        np.array([0.99, 0.6]), np.array([64, 64]), known_cost(c=1e-6), 0, budget=20
    )
    assert windows.sum() <= 20 and windows[0] > windows[1]
    assert not choose_windows(np.array([0.9]), np.array([0]), known_cost(), 0, budget=100)[0].any()


def test_match_buckets_grow_with_the_match():
    assert [match_bucket(n) for n in (0, 1, 2, 3, 4, 8, 16, 99)] == [0, 0, 1, 1, 2, 3, 4, 4]


def test_survival_comes_back_from_a_file(tmp_path):
    saved, restored = Survival(), Survival()
    kinds = [("own", 2, True), ("aligned", 0), ("sibling", 1, False)]
    for kind, drafted, accepted in zip(kinds, (30, 20, 10), (25, 3, 10), strict=True):
        saved.observe(kind, drafted, accepted)
    np.savez(tmp_path / "state.npz", **saved.state_dict())
    with np.load(tmp_path / "state.npz") as arrays:
        restored.load_state_dict(dict(arrays))
    for kind in (*kinds, ("never seen",)):
        assert restored.estimate(kind, 0.5) == saved.estimate(kind, 0.5)
    assert restored.estimate(kinds[0], 0.5) > 0.8 > restored.estimate(kinds[1], 0.5) > 0.5
