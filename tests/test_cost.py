"""The cost of forwards: what a fit recovers."""

import numpy as np
import pytest

from bubblespec.tools.simulate.recorded import RATES, ForwardCost, fit_cost


def make_cost(**rates: float) -> ForwardCost:
    """Flat up to 64 tokens, then rising."""
    return ForwardCost([1, 64], [0.0, 2e-5], 5e-3, dict.fromkeys(RATES, 0.0) | rates)


def random_loads(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 64, count)
    wide = rng.integers(0, rows + 1)
    drafts = wide * rng.integers(1, 8, count)
    prompt = rng.choice([0, 0, 0, 40, 400], count)
    positions = rows * rng.integers(20, 800, count)
    return np.stack([rows, rows + drafts + prompt, wide, positions, prompt, drafts], axis=1)


def seconds_of(cost: ForwardCost, loads: np.ndarray) -> np.ndarray:
    return np.array([cost.seconds(load) for load in loads])


@pytest.mark.parametrize(
    "truth",
    [
        make_cost(positions=2e-8, pairs=1e-9),
        make_cost(rows=1e-4, prompt_tokens=1e-5),
        ForwardCost([1], [1e-4], 1e-3, dict.fromkeys(RATES, 0.0) | {"wide_rows": 2e-4}),
    ],
)
def test_fit_recovers_costs_despite_noise_and_interruptions(truth):
    loads, unseen = random_loads(600), random_loads(200, seed=1)
    rng = np.random.default_rng(2)
    seconds = seconds_of(truth, loads) * rng.normal(1.0, 0.03, len(loads))
    seconds[::20] *= 8.0  # interrupted
    cost = fit_cost(loads, seconds, "test")
    ratio = seconds_of(cost, unseen) / seconds_of(truth, unseen)
    assert np.abs(ratio - 1).max() < 0.08


def test_more_work_never_takes_less_time():
    loads = random_loads(300)
    cost = fit_cost(loads, np.random.default_rng(3).uniform(1e-3, 1e-2, 300), "noise")
    for field in range(1, 6):
        more = loads.astype(float)
        more[:, field] += 10
        assert (seconds_of(cost, more) >= seconds_of(cost, loads)).all()
