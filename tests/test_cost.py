"""The cost of forwards: what a fit recovers, and the roofline."""

import numpy as np
import pytest

from bubblespec.records import Load
from bubblespec.simulate.cost import (
    GPUS,
    RATES,
    ForwardCost,
    fit_cost,
    load_shared_cost,
    roofline,
)


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
def test_known_costs_are_recovered_through_noise_and_interruptions(truth):
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


def test_the_roofline_is_that_of_the_data_sheet():
    cost, (bandwidth, compute, _) = roofline("h200", "7b"), GPUS["h200"]
    weights_s, token_s = 2 * 7.62e9 / (0.8 * bandwidth), 2 * 7.62e9 / (0.5 * compute)
    assert cost.seconds(Load(1, 1, 0, 0, 0, 0)) == pytest.approx(3e-3 + weights_s)
    prompt = Load(1, 5000, 0, 0, 5000, 0)
    assert cost.seconds(prompt) == pytest.approx(3e-3 + 5000 * token_s, rel=0.01)
    kv_bytes = 2 * 2 * 28 * 4 * 128
    read_s = cost.seconds(Load(1, 1, 0, 10**6, 0, 0)) - cost.seconds(Load(1, 1, 0, 0, 0, 0))
    assert read_s == pytest.approx(kv_bytes * 10**6 / (0.8 * bandwidth))


def test_ranks_together_share_the_roofline_and_pay_for_all_reduces():
    alone, together = roofline("h200", "7b"), roofline("h200", "7b", 2)
    launch_s = 3e-3
    read_s = alone.seconds(Load(1, 1, 0, 0, 0, 0)) - launch_s
    all_reduces_s = (2 * 28 + 1) * 10e-6  # what NCCL's ring took on two GPUs
    expected_s = launch_s + read_s / 2 + all_reduces_s
    assert together.seconds(Load(1, 1, 0, 0, 0, 0)) == pytest.approx(expected_s)
    for name in ("positions", "pairs"):
        assert together.rates[name] == pytest.approx(alone.rates[name] / 2)
    # More ranks than key/value heads: each reads a whole one. 28 query heads: some ranks have 4.
    eight = roofline("h200", "7b", 8)
    assert eight.rates["positions"] == pytest.approx(alone.rates["positions"] / 4)
    assert eight.rates["pairs"] == pytest.approx(alone.rates["pairs"] * 4 / 28)
    prompt = [cost.seconds(Load(1, 5000, 0, 0, 5000, 0)) for cost in (alone, together, eight)]
    assert prompt[0] > prompt[1] > prompt[2] > prompt[0] / 8


def test_a_model_that_so_many_ranks_cannot_share_has_no_shared_cost():
    assert load_shared_cost("h200:1.5b", 12) is not None
    assert load_shared_cost("h200:1.5b", 16) is None
