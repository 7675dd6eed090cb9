"""Advantages against reference_step.py."""

import itertools

import numpy as np
import pytest

from bubblespec.learn.advantages import estimate_advantages
from bubblespec.records import has_zero_std
from tests.helpers import reference_step

REWARDS = (
    np.random.default_rng(0).normal(size=(5, 6)) * np.array([[1], [10], [0.1], [1], [3]])
    + np.arange(5)[:, None]
)


@pytest.mark.parametrize(
    "estimator, scale",
    [
        *itertools.product(["grpo", "rloo"], ["group", "batch", "none", None]),
        *itertools.product(
            ["reinforce_plus_plus", "reinforce_plus_plus_baseline"], ["batch", "none", None]
        ),
    ],
)
@pytest.mark.parametrize("generations", [6, 1])
def test_advantages_equal_plain_computation(estimator, scale, generations):
    rewards = REWARDS[:, :generations]
    advantages = estimate_advantages(rewards, estimator, scale)
    assert advantages.dtype == np.float64
    wanted = reference_step.estimate_advantages(rewards.tolist(), estimator, scale)
    np.testing.assert_allclose(advantages, wanted, rtol=1e-12, atol=1e-13)
    if estimator != "reinforce_plus_plus":
        np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=1e-11)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_groups_without_variance_have_advantage_zero(scale):
    rewards = np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    advantages = estimate_advantages(rewards, "grpo", scale)
    np.testing.assert_array_equal(advantages[:2], np.zeros((2, 3)))
    assert advantages[2, 1] > 0 > advantages[2, 0]
    np.testing.assert_array_equal(estimate_advantages(rewards[:1], "grpo", scale), np.zeros((1, 3)))
    # The mean may be off by an ulp or two (1.4e-17 each), which 1e-4 cannot blow up beyond 1e-12.
    assert abs(estimate_advantages(np.full((1, 7), 0.1), "grpo", scale)).max() < 1e-12


@pytest.mark.parametrize(
    "rewards, zero",
    [
        ([[1, 1], [0, 1], [0, 0], [2, 2]], [True, False, True, True]),
        ([[0, 1], [1, 0]], [False, False]),
        ([[0.1, 0.1, 0.1]], [True]),
        # sums of the same rewards in another order
        ([[0.1 + 0.2, 0.3], [0.1 + 0.2, 0.3 + 1e-7]], [True, False]),
        ([[1e-6, 0.0]], [False]),
        ([[1], [2]], [True, True]),
    ],
)
def test_zero_std_is_found_up_to_rounding(rewards, zero):
    assert has_zero_std(np.array(rewards, float)).tolist() == zero
