"""The guard of a mechanism: what it decides, and what that costs, in noisy rollouts."""

import copy

import numpy as np
import pytest

from bubblespec.planner.guard import CLEAR_RATIO, INTERVAL, Guard
from bubblespec.planner.stats import RunStats
from bubblespec.records import RolloutRecord
from tests.helpers.rollouts import ALONE, fixed_cost, rows_of

NUM_ROLLOUTS, NUM_SEEDS = 60, 200


class Played:
    """A run with a guard. A rollout with the mechanism takes `cost` times what it takes without it,
    and each is disturbed by `noise`."""

    def __init__(self, cost: float, seed: int, noise: float = 0.2, model_error: float = 1.0):
        rng, guard = np.random.default_rng(seed), Guard()
        self.is_on, self.settings = [], []
        for _ in range(NUM_ROLLOUTS):
            self.settings.append(guard.setting)
            without_s = rng.lognormal(0.0, 0.5)  # responses differ in length
            measured_s = without_s * (cost if guard.setting else 1.0) * rng.lognormal(0.0, noise)
            guard.observe(measured_s, without_s * model_error)
            self.is_on.append(guard.is_on)
        self.loss = np.mean(np.where(self.settings, cost, 1.0)) / min(cost, 1.0) - 1.0


@pytest.mark.parametrize("model_error", [0.8, 1.0, 1.2])
def test_what_pays_is_not_switched_off(model_error):
    runs = [Played(1 / 1.3, seed, model_error=model_error) for seed in range(NUM_SEEDS)]
    assert sum(not all(run.is_on) for run in runs) <= NUM_SEEDS // 100
    assert np.mean([run.loss for run in runs]) < 0.04, "control rollouts are not free"


@pytest.mark.parametrize("noise, num_off_by_25, loss", [(0.2, 0.5, 0.035), (0.1, 0.8, 0.025)])
def test_what_costs_time_is_switched_off(noise, num_off_by_25, loss):
    runs = [Played(1.14, seed, noise) for seed in range(NUM_SEEDS)]
    assert np.mean([not run.is_on[24] for run in runs]) > num_off_by_25
    assert np.mean([not run.is_on[-1] for run in runs]) > 0.85
    assert np.mean([run.loss for run in runs]) < loss


def test_what_costs_much_is_soon_off():
    runs = [Played(1.5, seed) for seed in range(NUM_SEEDS)]
    assert np.mean([not run.is_on[11] for run in runs]) > 0.9
    assert np.mean([not run.is_on[-1] for run in runs]) > 0.99


@pytest.mark.parametrize("cost", [0.6, 0.8, 1.0, 1.14])
def test_an_error_of_the_model_does_not_decide(cost):
    """It is the same in both settings. Only how soon the mechanism is compared depends on it: not
    while it is clearly ahead by the model."""
    for seed in range(20):
        runs = [Played(cost, seed, model_error=error) for error in (0.8, 0.85)]
        assert runs[0].is_on == runs[1].is_on
    clear = Played(0.5, 0, noise=0.0)
    assert all(clear.settings) and CLEAR_RATIO > 0.5


def test_what_is_off_is_tried_again():
    """The machine was busy while the mechanism was on; it pays after all."""
    guard = Guard()
    while guard.is_on:
        guard.observe(2.0 if guard.setting else 1.0, 1.0)
    for _ in range(2 * INTERVAL + 8):
        guard.observe(0.9 if guard.setting else 1.5, 1.0)
    assert guard.is_on


def test_one_interruption_does_not_switch_off():
    for interrupted in range(30):
        guard = Guard()
        for number in range(40):
            seconds = 0.9 if guard.setting else 1.0
            guard.observe(5.0 * seconds if number == interrupted else seconds, 1.0)
            assert guard.is_on, interrupted


def test_a_saved_state_goes_on_alike():
    rng = np.random.default_rng(0)
    guard = Guard()
    for _ in range(80):
        again = Guard()
        again.load_state_dict(copy.deepcopy(guard.state_dict()))
        assert (again.setting, again.is_checking) == (guard.setting, guard.is_checking)
        seconds = rng.lognormal(0.1 * guard.setting, 0.2)
        for of in (guard, again):
            of.observe(seconds, 1.0)
        for name, array in guard.state_dict().items():
            np.testing.assert_array_equal(again.state_dict()[name], array)
        guard = again


def test_two_mechanisms_are_never_compared_at_once():
    rng = np.random.default_rng(0)
    stats = RunStats(cost=fixed_cost(), guards={"co_scheduled": Guard(), "drafter": Guard()})
    rows, checked = rows_of(0), set()
    for row in rows:
        row.tokens = np.ones(8, np.int64)
    for _ in range(120):
        checking = {name for name, guard in stats.guards.items() if guard.is_checking}
        assert len(checking) <= 1
        checked |= checking
        record = RolloutRecord(0.0, 8.0 * rng.lognormal(0.0, 0.2))
        stats.observe_rollout(record, rows, ALONE, num_slots=8, planning_s=0.0)
    assert checked == set(stats.guards)
