"""Guards by made-up seconds: rollouts of different lengths, with noise, and a model that may be
wrong about all settings alike."""

import numpy as np
import pytest

from bubblespec.planner.guard import (
    COPY,
    DRAFTS,
    FIRST_CONTROL,
    FIRST_PAUSE,
    MIN_LOST,
    Guard,
    Guards,
)
from bubblespec.planner.stats import RunStats
from tests.helpers.rollouts import fixed_cost


def play(speedup: float, *, seed: int, noise=0.1, bias=1.0, count=60, has_effect_behind=False):
    """`count` rollouts with a mechanism that makes them `speedup` times as fast, and the one behind
    them if it has an effect there: the settings that the guard chose, and the seconds of each
    rollout as it was and without the mechanism."""
    rng, guard, rows = np.random.default_rng(seed), Guard(has_effect_behind), []
    for _ in range(count):
        without_s = rng.lognormal(0.0, 0.5)
        is_faster = guard.setting or (has_effect_behind and rows[-1][0])
        seconds = without_s / speedup if is_faster else without_s
        rows.append((guard.setting, seconds, without_s))
        guard.observe(seconds * rng.lognormal(0.0, noise), bias * without_s, guard.setting)
    settings, seconds, plain = np.array(rows).T
    return settings.astype(bool), seconds, plain


def worst(seconds, plain, count: int) -> float:
    """The largest share of their time that any `count` successive rollouts lose."""
    lost = np.cumsum(np.append(0.0, seconds - plain))
    return float((lost[count:] - lost[:-count]).max() / (plain.mean() * count))


@pytest.mark.parametrize("speedup", [0.8, 0.86, 0.93, 0.97])
@pytest.mark.parametrize("noise", [0.05, 0.1])
def test_slower_mechanism_loses_little(speedup, noise):
    runs = [play(speedup, seed=seed, noise=noise, count=200) for seed in range(60)]
    assert np.mean([worst(*run[1:], 40) for run in runs]) < 0.03
    assert np.mean([worst(*run[1:], 200) for run in runs]) < 0.01


@pytest.mark.parametrize("bias", [0.8, 1.25])
@pytest.mark.parametrize("speedup, noise, kept", [(1.3, 0.2, 0.94), (1.1, 0.1, 0.97)])
def test_faster_mechanism_stays_on(speedup, noise, kept, bias):
    """Comparisons and mistaken pauses take little of what it gains; the model's error nothing."""
    runs = [play(speedup, seed=seed, bias=bias, noise=noise)[1:] for seed in range(100)]
    gains = [plain.sum() / seconds.sum() for seconds, plain in runs]
    assert np.mean(gains) > kept * speedup


def test_clearly_faster_mechanism_is_rarely_compared():
    assert max((~play(2.0, seed=seed)[0]).sum() for seed in range(20)) <= 4


@pytest.mark.parametrize("speedup, is_on", [(0.5, False), (0.85, False), (1.15, True), (2.0, True)])
def test_effect_of_a_mechanism_on_the_next_rollout_is_no_part_of_a_comparison(speedup, is_on):
    """Drafts that were made with it still help the first rollout without it."""
    runs = [play(speedup, seed=s, noise=0.05, has_effect_behind=True)[0] for s in range(40)]
    kept = [run[12:].mean() > 0.5 for run in runs]
    assert np.mean(kept) == pytest.approx(float(is_on), abs=0.1)
    first = runs[0].tolist().index(False)
    assert runs[0][first : first + 2].tolist() == [False, False]


def test_pause_waits_until_enough_is_lost():
    """By rollouts that count, each of which loses 6%: more than chance before that."""
    guard, lost = Guard(), 0.0
    while not guard.is_paused:
        lost += 0.06 * (guard.setting and not guard.is_unprepared)
        guard.observe(1.06 if guard.setting else 1.0, 1.0, guard.setting)
    assert MIN_LOST < lost < MIN_LOST + 0.06


def test_paused_mechanism_is_tried_again():
    settings = play(0.5, seed=0, noise=0.01, count=100)[0].tolist()
    first = settings.index(False, 4)
    assert not any(settings[first : first + FIRST_PAUSE - 4])
    assert True in settings[first + FIRST_PAUSE - 4 :], "what it saves may have changed"


def test_first_rollout_behind_a_pause_is_not_compared():
    """A quantised copy is that of old weights then, and is renewed in it."""
    guard = Guard()
    guard._pause_left = 1
    guard.observe(1.0, 1.0, False)
    assert guard.setting and guard.is_unprepared
    guard.observe(9.0, 1.0, True)
    assert not guard.state_dict()["with"].size and guard.setting


def test_first_rollout_is_not_compared():
    """It warms up, and has no drafts to verify."""
    guard = Guard()
    guard.observe(100.0, 1.0, True)
    assert not guard.setting and guard.state_dict()["with"].size == 0


def test_rollout_without_seconds_leaves_guard_unchanged():
    guard = Guard()
    guard.observe(1.0, 0.0, True)
    assert str(guard.state_dict()) == str(Guard().state_dict())


def test_saved_guard_continues_alike():
    guard, again = Guard(), Guard()
    for _ in range(25):
        guard.observe(1.2 if guard.setting else 1.0, 1.0, guard.setting)
    again.load_state_dict(guard.state_dict())
    for _ in range(40):
        assert (again.setting, again.test()) == (guard.setting, guard.test())
        for each in (guard, again):
            each.observe(1.2, 1.0, each.setting)


# Several guards


def all_guards() -> Guards:
    guards = Guards({DRAFTS: Guard()})
    guards.add(COPY)
    return guards


def test_one_part_is_compared_at_a_time():
    """The copy only with drafts."""
    guards, chosen = all_guards(), []
    for _ in range(60):
        without = guards.without
        chosen.append(without)
        slower = 1.3 * (COPY not in without and DRAFTS not in without) or 1.0
        guards.observe(slower if DRAFTS not in without else 2.0, 1.0, without)
    assert chosen[0] == set() and chosen[FIRST_CONTROL] == {DRAFTS}
    before = [without for without in chosen if not guards[COPY].is_paused or COPY not in without]
    assert all(len(without) <= 1 for without in before)
    first_copy = chosen.index({COPY})
    assert chosen[first_copy + 1] == {COPY} and all(COPY in of for of in chosen[20:40])


def test_nothing_is_compared_directly_behind_a_rollout_without_drafts():
    """It has fewer drafts, whatever else it does without."""
    guards, compared = all_guards(), [set()]
    for _ in range(60):
        without = guards.without
        compared.append(without - guards.paused)
        assert not (compared[-2] == {DRAFTS} and compared[-1])
        guards.observe(1.0 if DRAFTS in without else 0.9, 1.0, without)
    assert all({name} in compared for name in guards)


def test_comparison_of_another_part_postpones_that_of_drafts():
    stats = RunStats(cost=fixed_cost())
    stats.guards = guards = all_guards()
    foreseen = []
    for _ in range(60):
        foreseen.append(stats.is_next_without)
        was_on = DRAFTS not in guards.without
        guards.observe(1.0, 1.0, guards.without)
        is_paused = guards[DRAFTS].is_paused
        assert is_paused or not was_on or foreseen[-1] == (DRAFTS in guards.without)
    assert sum(foreseen) > 3


def test_paused_drafts_pause_all_comparisons():
    guards = all_guards()
    guards[DRAFTS]._pause_left = 3
    for _ in range(3):
        assert guards.without == {DRAFTS}
        guards.observe(1.0, 1.0, guards.without)
    assert guards.without == set() and not guards[COPY].state_dict()["without"].size


def test_stats_without_guards_are_always_on():
    stats = RunStats(cost=fixed_cost())
    assert not stats.guards.without and not stats.is_paused and not stats.is_next_without
    assert stats.metrics() == {}
    stats.guards[DRAFTS] = Guard()
    stats.guards[DRAFTS].observe(1.0, 1.0, True)
    assert stats.guards.without == {DRAFTS} and stats.metrics() == {"guard/is_on": 0}
