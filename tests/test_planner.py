"""Decisions about time, as properties: placement, drafts, the TP tail, windows."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from bubblespec.mechanisms.tp_tail.tail import MIN_TAIL_GAIN, use_tp_tail
from bubblespec.planner.costs import CostModel, rollout_seconds
from bubblespec.planner.drafts import (
    MAX_LOOKAHEAD,
    MIN_RETURN,
    RETRY_STEPS,
    choose_lookahead,
    draft_value,
    plan_drafts,
)
from bubblespec.planner.lengths import LengthForecast, acceptance_rates
from bubblespec.planner.place import admission_order, place, up_to_cutoff
from bubblespec.planner.prices import suggested_prices
from bubblespec.planner.windows import LEVELS, MIN_GAIN, WINDOWS, choose_windows
from bubblespec.types import StepBatch
from tests.helpers.planning import (
    ALL_HOLD,
    CPU,
    GPU,
    NO_COUNTS,
    NONE_HOLD,
    cost_of,
    draft,
    groups_of,
    make_rows,
    observed,
    random_rows,
)

# Placement


def slowest_s(rows: LengthForecast, rank_of: np.ndarray, cost: CostModel, num_slots: int) -> float:
    rates = acceptance_rates(NO_COUNTS)
    own = [rows.take(rank_of == rank) for rank in np.unique(rank_of)]
    return max(rollout_seconds(of_rank, cost, num_slots, rates) for of_rank in own)


def test_placement_is_deterministic_and_beats_round_robin():
    """On average, as it does not compare: rows by more than whole groups."""
    shapes, ratios = [(3, 4, 8), (16, 2, 8), (48, 4, 6)], []
    for terms, (count, num_ranks, num_slots) in itertools.product((CPU, GPU), shapes):
        cost, seconds = cost_of(terms), np.zeros(3)
        for seed in range(5):
            rng = np.random.default_rng(seed)
            rows = random_rows(seed, count, 0.3, num_generations=2)
            drafted = np.where(rng.random(count) < 0.3, np.floor(rows.expected), 0.0)
            is_whole = drafted > 0
            expected = np.where(is_whole, drafted, rows.expected)
            spread = np.where(is_whole, 0.0, rows.spread)
            rows = replace(rows, drafted=drafted, expected=expected, spread=spread)
            order, placed = rng.permutation(count), [rows.group % num_ranks]
            for units in (rows.group, np.arange(count)):
                shape = {"num_ranks": num_ranks, "num_slots": num_slots}
                shape["keeps_groups"] = units is rows.group
                placed.append(place(rows, cost, **shape))
                assert set(placed[-1].tolist()) == set(range(min(len(set(units)), num_ranks)))
                again = place(rows.take(order), cost, **shape)
                np.testing.assert_array_equal(again, placed[-1][order])
            seconds += [slowest_s(rows, rank_of, cost, num_slots) for rank_of in placed]
        ratios.append(seconds[1:] / seconds[0])
    whole, split = np.mean(ratios, axis=0)
    assert split < whole < 0.96


def test_short_rows_fill_the_slots_next_to_no_long_row():
    rows, cost = make_rows([60.0] + 12 * [10.0]), cost_of((5e-3, 1e-3, 1e-3, 0.0, 0.0))
    splits = [np.arange(13) > number for number in range(13)]  # of the short rows
    placed = place(rows, cost, num_ranks=2, num_slots=8, keeps_groups=False)
    best_s = min(slowest_s(rows, split, cost, 8) for split in splits)
    assert slowest_s(rows, placed, cost, 8) == pytest.approx(best_s)


def test_kept_groups_are_spread_over_ranks():
    rows, cost = random_rows(0, 24, 0.3, num_generations=4), cost_of(CPU)
    placed = place(rows, cost, num_ranks=2, num_slots=64, keeps_groups=True)
    of_groups = [set(placed[rows.group == group].tolist()) for group in range(6)]
    assert all(len(ranks) == 1 for ranks in of_groups) and set.union(*of_groups) == {0, 1}
    alike = make_rows([400.0] * 4 + [100.0] * 20, num_generations=2)
    placed = place(alike, cost, num_ranks=2, num_slots=64, keeps_groups=True)
    assert placed[0] == placed[1] != placed[2] == placed[3]


def test_admission_is_longest_first_likely_excluded_last():
    rows = make_rows([5.0, 9.0, 50.0, 40.0, 7.0, 6.0, 30.0, 80.0], num_generations=2)
    groups = groups_of(range(4))
    everything = StepBatch(groups, 4, 2)
    assert admission_order(rows, np.arange(8), everything) == [7, 2, 3, 6, 1, 4, 5, 0]
    assert admission_order(rows, np.array([0, 3, 4]), everything) == [3, 4, 0]
    assert admission_order(rows, np.arange(0), everything) == []
    half = StepBatch(groups, 2, 2)  # groups 0 and 2 are expected to be the shortest
    assert admission_order(rows, np.arange(8), half) == [1, 4, 5, 0, 7, 2, 3, 6]
    assert up_to_cutoff(rows, half).expected.max() == 9.0
    drafted = make_rows([50.0, 30.0], drafted=[50.0, 0.0])
    assert admission_order(drafted, np.arange(2), StepBatch(groups[:2], 2, 1)) == [1, 0]


# What to draft

PLAN = {"num_ranks": 2, "num_slots": 16}


def value_of(rows: LengthForecast, terms, rates):
    prices = suggested_prices(cost_of(terms), 10.0, 100.0)
    return draft_value(rows, cost_of(terms), rates, prices, **PLAN)


@pytest.mark.parametrize("terms", [CPU, GPU])
def test_useless_drafts_are_never_worth_co_scheduling(terms):
    for seed in range(5):
        value = value_of(random_rows(seed, 16), terms, NONE_HOLD)
        assert not value[0].any()


@pytest.mark.parametrize("terms", [(1e-2, 1e-4, 1e-4, 0.0, 0.0), GPU])
def test_draft_value_grows_with_acceptance(terms):
    rows, saved_s = random_rows(0, 16), []
    for share in (0.0, 0.9, 0.99, 0.999, 1.0):
        rates = acceptance_rates(1e7 * np.array([[1.0, share], [1.0, 0.0]]))
        saved_s.append(value_of(rows, terms, rates)[1].sum())
    assert (np.diff(saved_s) >= -1e-9).all() and saved_s[-1] > saved_s[0]


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_drafts_save_more_than_their_rank_spends(num_ranks):
    """However many ranks share the saving, the one that drafts may end the rollout."""
    cost, spent_s = cost_of((1e-2, 1e-4, 1e-4, 0.0, 0.0)), 0.0
    suggested, shape = suggested_prices(cost, 10.0, 100.0), PLAN | {"num_ranks": num_ranks}
    for seed, factor in itertools.product(range(5), (1.0, 2.0, 4.0, 8.0)):
        prices = suggested._replace(drafted_s=factor * suggested.drafted_s)
        value = draft_value(random_rows(seed, 32), cost, ALL_HOLD, prices, **shape)
        own_s = value[2][value[0]].sum()
        assert value[1][value[0]].sum() >= MIN_RETURN * own_s
        spent_s += own_s
    assert spent_s > 0.0


def test_only_long_rows_pay_where_forwards_cost_most():
    rows = make_rows([10.0] * 12 + [300.0] * 2, [5.0] * 12 + [50.0] * 2)
    value = value_of(rows, (1e-2, 1e-3, 1e-3, 0.0, 0.0), ALL_HOLD)
    assert np.flatnonzero(value[0]).tolist() == [12, 13]
    finished = replace(rows, drafted=rows.expected, spread=0 * rows.spread)
    value = value_of(finished, GPU, ALL_HOLD)
    assert not value[0].any() and not value[2].any(), "nothing is missing"


def make_plans(lengths: dict[int, list[int]], batches, drafts=None, **options):
    fixed = {"cost": cost_of(GPU), "rates": ALL_HOLD, "forwards_per_step": 100.0}
    fixed["prices"] = suggested_prices(cost_of(GPU), 4.0, 100.0)
    options = fixed | PLAN | options
    batches = [groups_of(prompt_ids) for prompt_ids in batches]
    get_draft = (drafts or {}).get
    plans = list(plan_drafts(batches, 1, get_draft, observed(lengths), **options).jobs)
    return [(plan.key.prompt_id, plan.co_scheduled) for plan in plans], plans


LENGTHS = {1: [10, 10], 2: [90, 90], 3: [60, 60], 4: [195, 195]}


def test_drafts_are_planned_by_least_slack():
    """What is worth co-scheduling comes first; a response of the step after next is begun before
    a short one of the next, if it needs so much longer."""
    order, plans = make_plans(LENGTHS, [[1, 2], [3, 4]], planning="idle_only")
    assert order == [(4, False), (2, False), (1, False), (3, False)]
    assert not any(plan.saves_s for plan in plans)
    order, plans = make_plans(LENGTHS, [[1, 2], [3, 4]])
    together = [prompt_id for prompt_id, is_co in order if is_co]
    assert together == [prompt_id for prompt_id in (4, 2, 1, 3) if prompt_id in together]
    assert (2, True) in order and all(plan.saves_s > 0 for plan in plans if plan.co_scheduled)
    order, _ = make_plans(LENGTHS, [[1, 2], [3, 4]], planning="always")
    assert all(is_co for _, is_co in order)
    order, _ = make_plans(LENGTHS, [[1, 2]], cost=None)
    assert order == [(2, False), (1, False)], "before anything has been measured"


def test_finished_drafts_are_left_out_deferred_come_first():
    samples = {
        prompt_id: group.sample(0)
        for prompt_id, group in zip(LENGTHS, groups_of(LENGTHS), strict=True)
    }
    drafts = {samples[2]: draft(90), samples[4]: draft(150, False)}
    order, _ = make_plans(LENGTHS, [[1, 2, 3, 4]], drafts, planning="idle_only")
    assert [prompt_id for prompt_id, _ in order] in ([3, 4, 1], [4, 3, 1])
    order, _ = make_plans(LENGTHS, [[1, 2, 3]], deferred={(1, 0)}, planning="idle_only")
    assert [prompt_id for prompt_id, _ in order] == [1, 2, 3]
    assert make_plans(LENGTHS, [[2]], drafts)[0] == []


def test_lookahead_follows_store_end_and_acceptance():
    roomy = {"steps_left": 50, "steps_stored": 99.0, "accepted": {}}
    assert choose_lookahead(1, **roomy) == MAX_LOOKAHEAD
    assert choose_lookahead(1, **{**roomy, "steps_left": 2}) == 2
    assert choose_lookahead(1, **{**roomy, "steps_stored": 2.5}) == 2
    old = {**roomy, "accepted": {1: 0.9, 4: 0.5, 5: 0.1, 9: 0.05}}
    assert choose_lookahead(1, **old) == 4
    refused = {**roomy, "accepted": {1: 0.0}}
    depths = [choose_lookahead(step, **refused) for step in range(2 * RETRY_STEPS)]
    assert sum(depths) == 2, "they are tried again now and then"


# The TP tail

ALONE = cost_of((1.0, 0.0, 1e-12, 0.0, 0.0))


def together(factor: float, token_s: float = 1e-12) -> CostModel:
    return cost_of((factor, 0.0, token_s, 0.0, 0.0))


def pays(rank_of, left, tp_cost: CostModel, *, prompt_tokens=10, num_slots=4, overhead_s=0.0):
    rows = make_rows(left, prompt_tokens=prompt_tokens)
    shape = {"num_slots": num_slots, "overhead_s": overhead_s}
    return use_tp_tail(rows, np.array(rank_of), ALONE, tp_cost, **shape)


def test_tp_tail_pays_where_joint_forwards_are_faster():
    assert pays([0, 1], [40, 100], together(0.5))
    assert not pays([0, 1], [40, 100], together(1.0))
    assert not pays([0, 1], [40, 100], together(1.0 - MIN_TAIL_GAIN / 2))
    # Three rows one after the other in one slot take longer than one of rank 1.
    assert pays([0, 0, 0, 1], [50, 50, 50, 100], together(1.2), num_slots=1)
    assert not pays([0, 0, 0, 1], [50, 50, 50, 100], together(1.2))


def test_tp_tail_pays_only_above_the_overhead():
    """10 s are to be gained: by entering it at once, or for less than half of them. Long prompts do
    not matter, as they are not fed again."""
    for overhead_s, expected in ((0.0, True), (4.5, True), (5.5, False)):
        assert pays([0, 1], [20, 20], together(0.5), overhead_s=overhead_s) == expected
    assert pays([0, 1], [20, 20], together(0.5, token_s=0.01), prompt_tokens=1000)


def test_tp_tail_replaces_the_last_of_all_ranks():
    """Eight rows alike on as many ranks: the last ends far later than each is expected to."""
    rows = make_rows([1000.0] * 8, 700.0)
    slower = together(1.1)
    shape = {"num_slots": 4, "overhead_s": 0.0}
    assert not use_tp_tail(rows.take([0]), np.zeros(1), ALONE, slower, **shape)
    assert not use_tp_tail(rows, np.arange(8), ALONE, slower, **shape)
    assert use_tp_tail(rows, np.arange(8), ALONE, together(0.8), **shape)


@pytest.mark.parametrize("seed", range(5))
def test_tp_tail_decision_is_monotone_in_cost(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 12))
    rank_of, left = rng.integers(0, 4, count), rng.integers(10, 200, count)
    answers = [pays(rank_of, left, together(factor)) for factor in np.linspace(1.5, 1e-6, 21)]
    assert answers == sorted(answers) and answers[-1] and not answers[0]


# Windows


@pytest.mark.parametrize("seed", range(20))
def test_no_other_windows_give_more_tokens_per_second(seed):
    """Against all windows of three rows, up to the chance of a token at a level's edge."""
    rng = np.random.default_rng(seed)
    survival = LEVELS[rng.integers(len(LEVELS), size=3)]
    available = WINDOWS[rng.integers(9, size=3)]
    terms = (0.01, 10.0 ** rng.uniform(-6, -3), 10.0 ** rng.uniform(-5, -2.5), 1e-3, 0.0)
    cost = cost_of(terms)

    def tokens_per_second(windows) -> float:
        gained = sum(
            sum(s**i for i in range(w + 1)) for s, w in zip(survival, windows, strict=True)
        )
        fed = 3 + sum(windows)
        return gained / float(cost.seconds(3, fed, fed > 3, 1000))

    choices = itertools.product(*(WINDOWS[most >= WINDOWS].tolist() for most in available))
    best = max(map(tokens_per_second, choices))
    windows = choose_windows(survival, available, cost, 1000, budget=10_000)
    if best < MIN_GAIN * tokens_per_second((0, 0, 0)):
        assert not windows.any()
    else:
        assert tokens_per_second(windows.tolist()) == pytest.approx(best, rel=1e-9)
    for rates, budget in ((survival, 9), (survival[[0, 0, 0]], 10)):
        limited = choose_windows(rates, available, cost, 1000, budget=budget)
        assert limited.sum() <= budget and (limited <= available).all()
