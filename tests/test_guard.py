"""The guard by made-up seconds: rollouts of different lengths, with noise, and a model that may be
wrong about both settings alike."""

import numpy as np
import pytest

from bubblespec.planner.guard import FIRST_CONTROL, FIRST_PAUSE, Guard
from bubblespec.planner.stats import RunStats
from tests.helpers.rollouts import fixed_cost


def play(speedup: float, *, seed: int, noise: float = 0.2, bias: float = 1.0, count: int = 60):
    """The guard after `count` rollouts with a mechanism that makes them `speedup` times as fast;
    the settings it chose, and seconds with it over seconds without the mechanism."""
    rng, guard, settings, total, plain = np.random.default_rng(seed), Guard(), [], 0.0, 0.0
    for _ in range(count):
        without_s = rng.lognormal(0.0, 0.5)
        seconds = without_s / speedup if guard.setting else without_s
        settings.append(guard.setting)
        total, plain = total + seconds, plain + without_s
        guard.observe(seconds * rng.lognormal(0.0, noise), bias * without_s)
    return guard, settings, total / plain


@pytest.mark.parametrize("bias", [0.8, 1.0, 1.25])
@pytest.mark.parametrize("noise, share", [(0.1, 0.0), (0.2, 0.05)])
def test_faster_mechanism_stays_on_despite_model_bias(bias, noise, share):
    """It is left out of single rollouts alone; with rollouts that differ by a fifth by chance, a
    few of 200 runs leave it out for a while."""
    runs = [play(1.3, seed=seed, bias=bias, noise=noise) for seed in range(200)]
    assert np.mean([settings.count(False) > 6 for _, settings, _ in runs]) <= share
    assert np.mean([seconds for *_, seconds in runs]) < 1 / 1.3 + 0.03


def test_slower_mechanism_pauses_for_many_rollouts():
    runs = [play(0.86, seed=seed, noise=0.1) for seed in range(100)]
    assert np.mean([settings.count(False) > 6 for _, settings, _ in runs]) > 0.9
    assert np.mean([seconds for *_, seconds in runs]) < 1.1, "it costs 0.16 if it is always on"


def test_clearly_faster_mechanism_has_few_controls():
    without = [play(2.0, seed=seed, noise=0.1)[1].count(False) for seed in range(20)]
    assert max(without) <= 3


def test_paused_mechanism_is_tried_again():
    _, settings, _ = play(0.5, seed=0, noise=0.01, count=100)
    first = settings.index(False, 4)
    assert True in settings[first + FIRST_PAUSE :], "what it saves may have changed"


def test_rollout_without_seconds_leaves_guard_unchanged():
    guard = Guard()
    guard.observe(0.0, 1.0)
    guard.observe(1.0, 0.0)
    assert str(guard.state_dict()) == str(Guard().state_dict())


def test_saved_guard_continues_alike():
    guard, _, _ = play(0.8, seed=3, count=25)
    again = Guard()
    again.load_state_dict(guard.state_dict())
    for _ in range(40):
        assert (again.setting, again.lead) == (guard.setting, guard.lead)
        for each in (guard, again):
            each.observe(1.2, 1.0)


def test_stats_without_guard_are_always_on():
    stats = RunStats(cost=fixed_cost(), guard=Guard())
    for _ in range(FIRST_CONTROL):
        stats.guard.observe(1.0, 1.0)
    assert not stats.is_on and stats.metrics() == {"guard/is_on": 0}
    stats = RunStats(cost=fixed_cost())
    assert stats.is_on and not stats.is_paused and not stats.is_next_without
    assert stats.metrics() == {}
