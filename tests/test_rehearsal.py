"""Playing a coming rollout through: against loops over scenarios, numbers of drafts and rows, and
against answers by hand."""

import math

import numpy as np
import pytest
from bubblespec.idle.rehearsal import (
    CAUTION,
    NORMAL_QUANTILE,
    NUM_COUNTS,
    NUM_SCENARIOS,
    POOLED_TOKENS,
    PRIOR_AFTER,
    PRIOR_BEFORE,
    SHARED_VARIANCE,
    TYPICAL_WINDOW,
    Coming,
    chances,
    first_mismatches,
    length_factors,
    rehearse,
)

from bubblespec.idle import rehearsal
from bubblespec.records import POSITIONS

# Seconds of [a forward, a row, a token, a wide row, a position].
CPU = np.array([1e-3, 35e-6, 20e-6, 83e-6, 1e-8])
GPU = np.array([1e-2, 0.0, 1e-7, 0.0, 1e-10])
NOTHING_SEEN = np.zeros((len(POSITIONS) + 1, 2))


def coming(totals, *, margins=0.0, drafted=0.0, is_whole=False, groups=None, prompts=20) -> Coming:
    totals = np.asarray(totals, np.float64)
    size = len(totals)
    return Coming(
        totals=totals,
        margins=np.zeros(size) + margins,
        drafted=np.zeros(size) + drafted,
        is_whole=np.zeros(size, bool) | np.asarray(is_whole),
        groups=np.arange(size) if groups is None else np.asarray(groups),
        prompt_tokens=np.zeros(size, np.int64) + prompts,
    )


def share_seen(share: float, tokens: float = 1e9) -> np.ndarray:
    """Of many draft tokens anywhere such a share was accepted, and none of those after a
    mismatch."""
    seen = np.full((len(POSITIONS) + 1, 2), tokens)
    seen[:-1, 1] *= share
    seen[-1, 1] = 0
    return seen


def some_rows(seed: int) -> Coming:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 40))
    groups = np.sort(rng.integers(0, max(size // 4, 1), size))
    totals = np.round(rng.lognormal(4, 1, size)) + 1
    is_whole = rng.random(size) < 0.2
    drafted = np.where(
        is_whole,
        totals,
        np.where(rng.random(size) < 0.5, 0, np.round(totals * rng.uniform(0, 1.2, size))),
    )
    return Coming(
        totals, totals * rng.uniform(0, 1), drafted, is_whole, groups, rng.integers(5, 50, size)
    )


def brute_force(rows: Coming, cost, seen, num_ranks: int, num_slots: int):
    """(pays, saves_s, costs_s) as lists, row by row, token by token where a draft goes wrong."""
    forward_s, row_s, token_s, wide_row_s, position_s = (float(c) for c in cost)
    size = len(rows.totals)
    tried, accepted = (sum(float(n) for n in seen[:-1, i]) + PRIOR_BEFORE[i] for i in (0, 1))
    held = [
        (of[1] + POOLED_TOKENS * accepted / tried) / (of[0] + POOLED_TOKENS)
        for of in seen[:-1].tolist()
    ]
    goes_on = (seen[-1][1] + PRIOR_AFTER[1]) / (seen[-1][0] + PRIOR_AFTER[0])
    random = np.random.default_rng(0)
    common, own = random.standard_normal((2, NUM_SCENARIOS, size))
    survives = random.exponential(size=(NUM_SCENARIOS, size))

    def mismatch(limit: float, patience: float) -> int:
        at = 0
        while at < limit:
            place = max(i for i, first in enumerate(POSITIONS) if first <= at)
            patience += math.log(min(held[place], 1 - 1e-9))
            if patience < 0:
                return at
            at += 1
        return at

    lengths, rights = np.empty((NUM_SCENARIOS, size)), np.empty((NUM_SCENARIOS, size))
    for scenario in range(NUM_SCENARIOS):
        for i in range(size):
            spread = math.log(1 + (rows.margins[i] / NORMAL_QUANTILE / max(rows.totals[i], 1)) ** 2)
            score = (
                SHARED_VARIANCE**0.5 * common[scenario, rows.groups[i]]
                + (1 - SHARED_VARIANCE) ** 0.5 * own[scenario, i]
            )
            length = max(
                rows.totals[i] * math.exp(spread**0.5 * score - spread / 2), rows.drafted[i]
            )
            lengths[scenario, i] = rows.drafted[i] if rows.is_whole[i] else length
            rights[scenario, i] = mismatch(lengths[scenario, i], survives[scenario, i])
    decode_s = [
        row_s + token_s + position_s * (rows.prompt_tokens[i] + rows.totals[i] / 2)
        for i in range(size)
    ]
    costs_s = [
        sum(max(n - rows.drafted[i], 0) for n in lengths[:, i]) / NUM_SCENARIOS * decode_s[i]
        for i in range(size)
    ]
    longest_first = sorted(range(size), key=lambda i: -rows.totals[i])
    rank_of = {i: place % num_ranks for place, i in enumerate(longest_first)}
    open_rows = [i for i in longest_first if not rows.is_whole[i]]

    def rollout_s(made: list[int]) -> float:
        ends = []
        for scenario in range(NUM_SCENARIOS):
            end_s = 0.0
            for rank in range(num_ranks):
                forwards, seconds = [], 0.0
                for i in (i for i in range(size) if rank_of[i] == rank):
                    length = lengths[scenario, i]
                    draft = length if i in made else min(rows.drafted[i], length)
                    right = min(rights[scenario, i], draft)
                    wrong = draft - right
                    decoded = (length - draft) + wrong * (1 - goes_on)
                    forwards.append(decoded + right / TYPICAL_WINDOW)
                    seconds += decoded * decode_s[i] + (right + wrong * goes_on) * token_s
                    seconds += right / TYPICAL_WINDOW * (row_s + wide_row_s)
                if forwards:
                    end_s = max(
                        end_s, forward_s * max(*forwards, sum(forwards) / num_slots) + seconds
                    )
            ends.append(end_s)
        return sum(ends) / NUM_SCENARIOS

    counts = [0]
    if open_rows:
        counts += sorted({int(n) for n in np.geomspace(1, len(open_rows), NUM_COUNTS)})
    took_s = {count: rollout_s(open_rows[:count]) for count in counts}
    total_s = {
        c: took_s[c] + CAUTION * sum(costs_s[i] for i in open_rows[:c]) / num_ranks for c in counts
    }
    best = min(counts, key=lambda count: total_s[count])
    pays = [i in open_rows[:best] for i in range(size)]
    others = [i for i in open_rows if not pays[i]]
    saves_s = [0.0] * size
    for i in open_rows[:best]:
        saves_s[i] = (took_s[0] - took_s[best]) / best
    for i in others:
        saves_s[i] = max(took_s[best] - took_s[counts[-1]], 0.0) / len(others)
    return pays, saves_s, costs_s


@pytest.mark.parametrize("seed", range(24))
def test_a_rehearsal_is_that_of_loops(seed):
    rng = np.random.default_rng(100 + seed)
    rows, cost = some_rows(seed), (CPU, GPU, CPU * [1, 1, 1, 1, 1e3])[seed % 3]
    seen = np.round(rng.uniform(0, 2000, NOTHING_SEEN.shape))
    seen[:, 1] = np.round(
        seen[:, 0]
        * (rng.uniform(0.95, 1.0, len(seen)) if seed % 2 else rng.uniform(0, 1, len(seen)))
    )
    for num_ranks, num_slots in ((1, 64), (2, 8), (3, 2)):
        pays, saves_s, costs_s = brute_force(rows, cost, seen, num_ranks, num_slots)
        found = rehearse(rows, cost, seen, num_ranks=num_ranks, num_slots=num_slots)
        assert found.pays.tolist() == pays
        np.testing.assert_allclose(found.costs_s, costs_s, rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(found.saves_s, saves_s, rtol=1e-6, atol=1e-9)
        assert not found.pays[rows.is_whole].any() and not found.saves_s[rows.is_whole].any()


def test_a_long_response_among_short_ones_pays_alone():
    """Perfect drafts of 1000 tokens are verified in 125 forwards. So the draft of the long response
    saves 875, and the others, of 100 tokens, save none: the long one is there longer than they
    are."""
    rows = coming([100.0] * 20 + [1000.0] + [100.0] * 20)
    found = rehearse(rows, GPU, share_seen(1.0), num_ranks=1, num_slots=64)
    assert np.flatnonzero(found.pays).tolist() == [20]
    assert found.saves_s[20] == pytest.approx(875 * 1e-2, rel=1e-3)
    assert found.costs_s[20] == pytest.approx(1000 * (1e-7 + 520e-10), rel=1e-3)


def test_equally_long_responses_pay_together_or_not_at_all():
    """All but one of them drafted saves no forward."""
    for num_rows, prompts_s in ((8, 1e-7), (8, 4e-3)):
        cost = np.array([1e-2, 0.0, prompts_s, 0.0, 0.0])
        found = rehearse(
            coming([500.0] * num_rows), cost, share_seen(1.0), num_ranks=1, num_slots=64
        )
        assert found.pays.all() == (prompts_s == 1e-7) and found.pays.any() == found.pays.all()


@pytest.mark.parametrize("cost", [CPU, GPU], ids=["cpu", "gpu"])
def test_hopeless_drafts_do_not_pay(cost):
    rows = coming(np.random.default_rng(0).lognormal(5, 1, 60), margins=30.0)
    found = rehearse(rows, cost, share_seen(0.0), num_ranks=2, num_slots=64)
    assert not found.pays.any() and (found.costs_s > 0).all()
    np.testing.assert_allclose(found.saves_s, 0.0, atol=1e-4)


def test_perfect_drafts_do_not_pay_where_rows_cost_all():
    """A token is decoded for 2 ms, and verified for 1 ms and an eighth of a row: making it costs
    more than it saves."""
    rows = coming(np.random.default_rng(0).lognormal(5, 1, 60))
    found = rehearse(
        rows, np.array([1e-6, 1e-3, 1e-3, 0.0, 0.0]), share_seen(1.0), num_ranks=1, num_slots=64
    )
    assert not found.pays.any()


def test_what_is_drafted_already_costs_nothing_and_saves_nothing_more():
    whole = coming([300.0, 200.0], drafted=[300.0, 200.0], is_whole=True)
    found = rehearse(whole, GPU, NOTHING_SEEN, num_ranks=2, num_slots=4)
    assert not found.pays.any() and not found.saves_s.any() and not found.costs_s.any()
    begun = coming([300.0, 10.0], drafted=[299.0, 0.0])
    found = rehearse(begun, GPU, share_seen(1.0), num_ranks=1, num_slots=4)
    assert found.costs_s[0] == pytest.approx(1e-7 + 170e-10) and found.saves_s[0] == pytest.approx(
        1e-2 * 7 / 8, rel=1e-3
    )


def test_more_ranks_than_rows():
    found = rehearse(coming([50.0]), GPU, share_seen(1.0), num_ranks=8, num_slots=1)
    assert found.pays.tolist() == [True]


def test_chances_are_pooled():
    """A position where little was tried is taken to be as all are together, which begin as what is
    believed."""
    before, after = chances(NOTHING_SEEN)
    np.testing.assert_allclose(before, np.full(len(POSITIONS), 0.9999))
    assert after == pytest.approx(0.1)
    seen = NOTHING_SEEN.copy()
    seen[2], seen[5], seen[-1] = (900.0, 450.0), (10.0, 0.0), (300.0, 150.0)
    before, after = chances(seen)
    together = (450 + 99.99) / (910 + 100)
    assert before[2] == pytest.approx((450 + 20 * together) / 920) and before[5] == pytest.approx(
        20 * together / 30
    )
    others = [place for place in range(len(POSITIONS)) if place not in (2, 5)]
    np.testing.assert_allclose(before[others], together)
    assert after == pytest.approx(160 / 400)


@pytest.mark.parametrize("shares", ["equal", "by position"])
def test_first_mismatches_are_those_of_tokens_tried_one_by_one(shares):
    """A draft of at least k right tokens is as likely as that each of them is; draws that are
    spread evenly show it exactly."""
    rng = np.random.default_rng(0)
    share = (
        np.full(len(POSITIONS), 0.98)
        if shares == "equal"
        else rng.uniform(0.95, 0.9999, len(POSITIONS))
    )
    chance = (np.arange(40_000) + 0.5) / 40_000
    found = first_mismatches(share, -np.log(chance))
    assert (found == np.floor(found)).all()
    survives = 1.0
    for right in range(1, 600):
        place = max(i for i, first in enumerate(POSITIONS) if first <= right - 1)
        survives *= share[place]
        assert abs((found >= right).sum() - survives * 40_000) <= 1.01, right
    if shares == "equal":
        assert found.mean() == pytest.approx(0.98 / 0.02, rel=1e-3), "the mean of a geometric law"


def test_first_mismatches_at_the_limits():
    """Drafts that are always right last as long as any response; those that are always wrong not
    for a token."""
    draws = np.array([1e-6, 0.1, 3.0])
    assert first_mismatches(np.ones(len(POSITIONS)), draws).min() >= 1000
    assert first_mismatches(np.full(len(POSITIONS), 1e-12), draws).tolist() == [0, 0, 0]


def test_length_factors_have_mean_one_and_the_spread_that_was_asked_for(monkeypatch):
    """Nine of ten are below the margin; half of the variance is what samples of a prompt have in
    common."""
    monkeypatch.setattr(rehearsal, "NUM_SCENARIOS", 2000)
    means, groups = np.array([1000.0] * 60), np.repeat(np.arange(30), 2)
    for margin in (0.0, 100.0, 1500.0):
        factors = length_factors(np.full(60, margin), means, groups, np.random.default_rng(0))
        assert factors.shape == (2000, 60) and factors.mean() == pytest.approx(1.0, abs=0.02)
        assert factors.std() == pytest.approx(margin / 1000 / 1.28, rel=0.1, abs=1e-12)
        if margin == 100.0:
            assert np.quantile(factors, 0.9) == pytest.approx(1.1, abs=0.01)
        if margin:
            logs = np.log(factors)
            pairs = logs[:, 0::2], logs[:, 1::2]
            assert np.corrcoef(pairs[0].ravel(), pairs[1].ravel())[0, 1] == pytest.approx(
                0.5, abs=0.02
            )
            assert (
                abs(np.corrcoef(pairs[0].ravel(), np.roll(pairs[1], 1, axis=1).ravel())[0, 1])
                < 0.02
            )
