"""The choice of parts of speculation: its filter against a joint normal distribution, and
what it chooses in made-up rollouts."""

import numpy as np
import pytest

from bubblespec.planner import chooser
from bubblespec.planner.chooser import DRAFTS, Chooser
from bubblespec.planner.prices import Counts, Prices
from bubblespec.planner.stats import RunStats

COPY, DRAFTER = "copy", "drafter"
NOTHING = Counts(1.0, 0.0, 0.0, 0.0, 0.0)
ALL = frozenset([DRAFTS, COPY])


def play(effects, seed: int, num_rollouts: int, chooser: Chooser) -> tuple[float, float]:
    """Return the seconds of made-up rollouts over those of the best fixed choice, and the share of
    rollouts with drafts.

    effects: of drafts, of the copy and of a drafter on log seconds, by rollout; the noise is 5%.
    Drafts gain behind a rollout that had them, and the others half in each."""
    rng, seconds, best_s, num_drafted = np.random.default_rng(seed), 0.0, 0.0, 0
    before = frozenset(chooser.parts)
    for step in range(num_rollouts):
        drafts, *others = effects(step)
        off, size_s = chooser.off(step), rng.lognormal(0.0, 0.3)
        log_s = 0.15
        if DRAFTS not in off:
            log_s += drafts if DRAFTS not in before else max(drafts, 0.0)
            for name, effect in zip(chooser.parts[1:], others, strict=False):
                log_s += effect * (2 - (name in off) - (name in before)) / 2
        seconds += size_s * np.exp(log_s)
        best_s += size_s * np.exp(0.15 + min(0.0, drafts + np.minimum(others, 0.0).sum()))
        num_drafted += DRAFTS not in off
        chooser.observe(step, size_s * np.exp(log_s) * rng.lognormal(0.0, 0.05), size_s)
        before = off
    return seconds / best_s, num_drafted / num_rollouts


CASES = {  # effects of drafts, of the copy and of a drafter, if there is one, on log seconds
    "30% faster": (-0.26, -0.05),
    "8% faster": (-0.08, -0.02),
    "5% slower": (0.05, 0.01),
    "20% slower": (0.2, 0.0),
    "copy 10% slower": (-0.15, 0.1),
    "drafter 15% faster": (-0.1, 0.1, -0.15),
    "drafter 10% slower": (-0.1, -0.05, 0.1),
}


@pytest.mark.parametrize(
    "case, num_rollouts, most",
    [
        ("30% faster", 20, 1.06),
        ("8% faster", 60, 1.04),
        ("5% slower", 60, 1.04),
        ("20% slower", 60, 1.06),
        ("20% slower", 200, 1.04),
        ("copy 10% slower", 60, 1.05),
        ("drafter 15% faster", 60, 1.06),
        ("drafter 10% slower", 60, 1.06),
    ],
)
def test_choices_are_near_the_best_fixed_one(case, num_rollouts, most):
    assert 1.0 <= mean_cost(case, num_rollouts, 20) < most


def mean_cost(case: str, num_rollouts: int, num_runs: int) -> float:
    effects = CASES[case]
    parts = [DRAFTS, COPY, DRAFTER][: len(effects)]
    runs = (play(lambda _: effects, seed, num_rollouts, Chooser(parts)) for seed in range(num_runs))
    return float(np.mean([cost for cost, _ in runs]))


def test_changed_effect_is_found():
    """Drafts that were slower for 60 rollouts are faster from then on."""
    chooser = Chooser([DRAFTS])
    play(lambda step: (0.3, 0.0), 0, 60, chooser)
    off = [DRAFTS in chooser.off(step) for step in (60, 61)]
    cost, share = play(lambda step: (0.3 if step < 60 else -0.3, 0.0), 0, 260, Chooser([DRAFTS]))
    assert off == [True, True] and share > 0.5 and cost < 1.15


def test_distribution_is_that_of_joint_normal_rollouts(monkeypatch):
    """The filter against conditioning of one normal distribution: effects of each rollout, which an
    autoregression correlates, given all that was measured."""
    monkeypatch.setattr(chooser, "NOISE_ROLLOUTS", 1e12)  # so the noise is known
    monkeypatch.setattr(chooser, "MAX_SURPRISE", np.inf)
    monkeypatch.setattr(chooser, "KEPT", 0.9)
    made, rng = Chooser([DRAFTS, COPY]), np.random.default_rng(0)
    offs = [frozenset(), frozenset(), {COPY}, {COPY}, ALL, ALL, ALL, frozenset(), {COPY}, ALL]
    rows, logs, times = [], [], []
    for step, off in enumerate(offs):
        made._off[step] = frozenset(off)
        made._off.pop(step + 1, None)
        made._off.pop(step + 2, None)
        log_s = rng.normal()
        made.observe(step, np.exp(log_s), 1.0)
        if step == 0 or (DRAFTS in offs[step - 1] and DRAFTS not in off):
            continue  # a warm-up, and one without drafts to verify
        copies = [COPY not in of for of in (offs[step - 1], off)]
        rows.append([1.0, DRAFTS not in off, 0.0 if DRAFTS in off else np.mean(copies)])
        logs.append(log_s)
        times.append(step)
    x, last = np.array(rows), len(offs) - 1
    prior = np.diag([chooser.BASE_ERROR, chooser.EFFECT_ERROR, chooser.EFFECT_ERROR]) ** 2
    mean = np.array([0.0, chooser.EFFECT, chooser.EFFECT])
    apart = np.abs(np.subtract.outer(times, times))
    measured = 0.9**apart * (x @ prior @ x.T) + chooser.NOISE**2 * np.eye(len(x))
    shared = prior @ x.T * 0.9 ** (last - np.array(times))
    gain = shared @ np.linalg.inv(measured)
    np.testing.assert_allclose(made._mean, mean + gain @ (np.array(logs) - x @ mean), rtol=1e-9)
    np.testing.assert_allclose(made._covariance, prior - gain @ shared.T, rtol=1e-7, atol=1e-12)
    metrics = made.metrics()
    assert metrics["chooser/drafts"] == made._mean[1]
    assert metrics["chooser/copy_error"] == pytest.approx(made._covariance[2, 2] ** 0.5)


def test_draws_have_the_distribution():
    """P(N(-0.05, 0.15) < 0) is 0.63. Drafts whose copy gains are chosen more often."""
    drawn = [Chooser([DRAFTS])._draw(step) for step in range(1000)]
    assert abs(np.mean([not off for off in drawn]) - 0.6306) < 0.005
    both = Chooser([DRAFTS, COPY])
    rng = np.random.default_rng(0)
    effects = rng.normal(-0.05, 0.15, (2, 100_000))
    has_drafts = effects[0] + effects[1].clip(max=0.0) < 0.0
    offs = [both._draw(step) for step in range(1000)]
    assert abs(np.mean([DRAFTS not in off for off in offs]) - has_drafts.mean()) < 0.01
    has_copy = has_drafts & (effects[1] < 0.0)
    assert abs(np.mean([not off for off in offs]) - has_copy.mean()) < 0.01
    assert all(off == ALL for off in offs if DRAFTS in off)


def test_choices_hold_for_two_rollouts():
    made, offs = Chooser([DRAFTS, COPY]), []
    for step in range(100):
        offs.append(made.off(step))
        assert made.off(step + 1) == made._off.get(step + 1, frozenset())
        coming = made.off(step + 1)
        made.observe(step, 1.0, 1.0)
        assert made.off(step + 1) == coming, "drafts of the next rollout are made in this one"
    changes = [step for step in range(1, 100) if offs[step] != offs[step - 1]]
    assert len(changes) > 4 and min(np.diff(changes)) >= 2


@pytest.mark.parametrize("seconds, expected_s", [(0.0, 1.0), (1.0, 0.0)])
def test_rollout_without_seconds_tells_nothing(seconds, expected_s):
    made = Chooser([DRAFTS])
    for step in range(9):
        made.observe(step, seconds, expected_s)
    assert made.off(9) == made.off(10) == frozenset()
    assert made.metrics() == pytest.approx(Chooser([DRAFTS]).metrics())


def test_further_rollouts_of_a_step_tell_nothing():
    """Dynamic sampling adds them; they have no drafts."""
    states = []
    for count in (1, 3):
        made = Chooser([DRAFTS])
        for step in range(12):
            for further in range(count):
                made.observe(step, 2.0 + further, 1.0)
        states.append(made.state_dict())
    for name, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][name], err_msg=name)


def test_interruption_counts_little():
    made = [Chooser([DRAFTS]) for _ in range(2)]
    for step in range(20):
        for of, interrupted_s in zip(made, (0.0, 100.0), strict=True):
            of.observe(step, 1.0 + interrupted_s * (step == 10), 1.0)
    calm, interrupted = (of.metrics()["chooser/drafts"] for of in made)
    assert abs(interrupted - calm) < chooser.MAX_SURPRISE / 2


def test_saved_choices_continue_alike():
    parts, offs = [DRAFTS, COPY], []
    for is_saved in (False, True):
        made, rng, chosen = Chooser(parts), np.random.default_rng(3), []
        for step in range(40):
            if is_saved and step == 17:
                state = {name: array.copy() for name, array in made.state_dict().items()}
                made = Chooser(parts)
                made.load_state_dict(state)
            chosen.append(made.off(step))
            made.observe(step, rng.lognormal(0.0, 0.1), 1.0)
        offs.append(chosen)
    assert offs[0] == offs[1] and len(set(offs[0])) > 1
    other = Chooser([DRAFTS])
    other.load_state_dict(state)
    assert not any(map(other.off, range(40))), "another run has chosen about other parts"


def test_forgotten_choices_begin_again():
    made = Chooser([DRAFTS])
    for step in range(9):
        made.observe(step, 1.0 + (step % 2), 1.0)
    made.forget()
    for name, array in made.state_dict().items():
        np.testing.assert_array_equal(array, Chooser([DRAFTS]).state_dict()[name], err_msg=name)
    made.add(COPY)
    assert list(made.metrics())[:2] == ["chooser/drafts", "chooser/copy"]
    nothing = Chooser()
    nothing.add(COPY)
    nothing.observe(0, 1.0, 1.0)
    assert not nothing.metrics() and not nothing.off(2), "without drafts nothing is chosen about"


def test_draft_is_charged_in_the_rollout_that_it_was_made_for():
    """At its price, and to none if that rollout does without drafts; the rest stays for later."""
    stats, seen = RunStats(chooser=Chooser([DRAFTS])), []
    stats.chooser.observe = lambda *of: seen.append(of)
    stats.pricing.prices, stats.modelled_s = Prices(1.0, 2.0, 0.0, 0.1, 0.5), 4.5
    stats.chooser._off = {2: frozenset([DRAFTS])}
    made = Counts(1.0, 0.0, 0.0, drafted=30.0, begun=2.0)
    for step, (counts, used_share) in enumerate([(made, 0.0), (made, 0.5), (NOTHING, 1.0)]):
        stats._choose(step, 12.0, counts, used_share)
    assert seen == [(0, 8.0, 4.5), (1, 10.0, 4.5), (2, 12.0, 4.5)]
    assert stats.invested_s == 0.0


if __name__ == "__main__":  # how near to the best fixed choice runs of 20, 60 and 200 rollouts are
    for name in CASES:
        print(f"{name:20}", *(f"{1 / mean_cost(name, count, 40):.3f}" for count in (20, 60, 200)))
