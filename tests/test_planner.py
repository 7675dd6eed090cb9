"""Decisions about time: costs, lengths, the seconds of a rollout, placement and what to draft;
against direct simulation, and as properties."""

from dataclasses import replace

import numpy as np
import pytest

from bubblespec.planner.costs import KNOTS, CostModel, prefill_seconds, rollout_seconds
from bubblespec.planner.drafts import (
    MAX_LOOKAHEAD,
    RETRY_STEPS,
    choose_lookahead,
    draft_value,
    plan_drafts,
)
from bubblespec.planner.lengths import LengthModel
from bubblespec.planner.place import (
    MIN_TAIL_GAIN,
    admission_order,
    place,
    place_in_turn,
    up_to_cutoff,
    use_tp_tail,
)
from bubblespec.planner.rows import (
    MIN_RELATIVE_SPREAD,
    TYPICAL_WINDOW,
    Rows,
    acceptance_rates,
    forwards_horizon,
    forwards_survival,
    mean_length_beyond,
)
from bubblespec.types import Draft, Group, Launch, Prompt
from tests.helpers.rows import samples_of

NUM_DRAWN = 300  # rollouts of a direct simulation
CPU = (5e-3, 2e-3, 1e-3, 1e-3, 2e-6)  # a row makes every forward slower
GPU = (1e-2, 1e-6, 1e-6, 1e-6, 1e-9)  # only the number of forwards counts
NO_COUNTS = np.zeros((2, 2))
NONE_HOLD = acceptance_rates(np.array([[1e9, 0.0], [1e6, 0.0]]))
ALL_HOLD = acceptance_rates(np.array([[1e6, 1e6], [1.0, 0.0]]))


def cost_of(terms) -> CostModel:
    return CostModel.from_parameters(np.array([*terms, *np.zeros(len(KNOTS))]))


def make_rows(
    expected, spread=0.0, *, drafted=0.0, generated=0, prompt_tokens=10, num_generations=1
) -> Rows:
    expected = np.array(expected, np.float64)
    whole = np.zeros(len(expected))
    return Rows(
        prompt_tokens=np.full(len(expected), prompt_tokens),
        group=np.arange(len(expected)) // num_generations,
        expected=expected,
        spread=whole + spread,
        drafted=whole + drafted,
        generated=np.zeros(len(expected), np.int64) + generated,
    )


def random_rows(seed: int, count: int, relative_spread=0.6, **others) -> Rows:
    expected = np.random.default_rng(seed).uniform(20, 200, count)
    return make_rows(expected, relative_spread * expected, **others)


# Lengths and forwards


def draw_lengths(rows: Rows, rng: np.random.Generator) -> np.ndarray:
    """Lengths of responses that go beyond the tokens that they have, float64 [S]."""
    begun = replace(rows, drafted=rows.generated.astype(np.float64))
    mean = np.maximum(begun.expected, 1.0)
    variance = np.log1p(np.maximum(begun.spread / mean, MIN_RELATIVE_SPREAD) ** 2)
    beta, alpha = np.pi / np.sqrt(3 * variance), mean * np.exp(-variance / 2)
    beyond = rng.random(len(rows)) / (1 + (np.maximum(begun.drafted, 1e-3) / alpha) ** beta)
    lengths = alpha * ((1 - beyond) / beyond) ** (1 / beta)
    return np.where(begun.spread == 0.0, begun.expected, np.maximum(lengths, 1.0))


def play(forwards: np.ndarray, context: float, cost: CostModel, num_slots: int) -> float:
    """Seconds of a rollout, forward by forward, its rows admitted in the order given."""
    waiting, active, seconds = list(np.ceil(forwards)), [], 0.0
    while waiting or active:
        while waiting and len(active) < num_slots:
            active.append(waiting.pop(0))
        count, common = len(active), min(active)
        seconds += common * float(cost.seconds(count, count, 0, count * context))
        active = [left - common for left in active if left > common]
    return seconds


@pytest.mark.parametrize("terms", [CPU, GPU])
@pytest.mark.parametrize(
    "count, num_slots, relative_spread, generated",
    [(1, 4, 0.5, 0), (16, 16, 0.5, 0), (16, 16, 0.5, 60), (32, 8, 0.6, 0), (40, 8, 0.02, 0)],
)
def test_rollout_seconds_are_those_of_rollouts(terms, count, num_slots, relative_spread, generated):
    rows = random_rows(0, count, relative_spread, generated=generated)
    rows = rows.take(np.argsort(-rows.expected))
    cost, rng = cost_of(terms), np.random.default_rng(1)
    context = float((rows.prompt_tokens + (rows.expected + rows.generated) / 2).mean())
    longest = forwards_horizon(rows)
    played = []
    for _ in range(NUM_DRAWN):
        left = np.minimum(draw_lengths(rows, rng) - rows.generated, longest)
        played.append(play(left, context, cost, num_slots))
    found = rollout_seconds(rows, cost, num_slots) - prefill_seconds(rows, cost)
    error = np.std(played) / np.sqrt(NUM_DRAWN)
    assert found == pytest.approx(np.mean(played), rel=0.05, abs=3 * error)


def test_seconds_of_known_lengths_are_exact_up_to_the_grid():
    cost = cost_of((0.1, 0.02, 0.0, 0.0, 0.0))
    rows = make_rows([64.0, 32.0, 16.0])
    assert rollout_seconds(rows, cost, 4) == pytest.approx(64 * 0.1 + 112 * 0.02, rel=1e-3)
    assert rollout_seconds(make_rows([]), cost, 4) == 0.0
    fed = make_rows([64.0], generated=16, prompt_tokens=100)
    assert prefill_seconds(fed, cost_of((0.0, 0.0, 0.5, 3.0, 0.0))) == pytest.approx(58.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("terms", [CPU, GPU])
def test_seconds_grow_with_rows_and_lengths_and_shrink_with_slots(terms, seed):
    """Within the width of the grid."""
    cost, rows = cost_of(terms), random_rows(seed, 24)

    def seconds(count: int, factor: float = 1.0, num_slots: int = 8) -> float:
        rows_of = rows.take(np.arange(count))
        longer = {"expected": factor * rows_of.expected, "spread": factor * rows_of.spread}
        return rollout_seconds(Rows(**{**vars(rows_of), **longer}), cost, num_slots)

    for series in (
        [seconds(count) for count in range(1, 25)],
        [seconds(24, factor) for factor in (0.5, 0.8, 1.0, 1.5, 2.0)],
        [seconds(24, num_slots=count) for count in (24, 12, 6, 3, 1)],
    ):
        assert (np.diff(series) > -0.02 * np.array(series[1:])).all()
        assert series[-1] > series[0]


@pytest.mark.parametrize("seed", range(3))
def test_acceptance_is_that_of_drafts_verified_token_by_token(seed):
    rng = np.random.default_rng(seed)
    chance = rng.uniform(0.98, 0.9999)
    rates = acceptance_rates(1e7 * np.array([[1.0, chance], [1.0, 0.4]]))
    drafted = np.array([7.0, 40.0, 300.0])
    is_right = rng.random((20_000, 300)) < chance
    first_mismatch = np.where(is_right.all(axis=1), 300, is_right.argmin(axis=1))
    accepted = np.minimum(first_mismatch[:, None], drafted).mean(axis=0)
    np.testing.assert_allclose(rates.accepted(drafted), accepted, rtol=0.03)
    reached = (first_mismatch[:, None] >= drafted).mean(axis=0)
    np.testing.assert_allclose(rates.reaches(drafted), reached, atol=0.02)
    assert rates.after == pytest.approx(0.4, rel=1e-3)
    # Forwards of a row whose draft is whole: windows up to the mismatch, then what is not given.
    rows = make_rows(drafted[1:], drafted=drafted[1:])
    points = np.arange(0.5, 400.0)
    forwards = forwards_survival(rows, rates, points).sum(axis=1)
    of_draft = np.minimum(first_mismatch[:, None], rows.drafted)
    needed = of_draft / TYPICAL_WINDOW + 0.6 * (rows.drafted - of_draft)
    np.testing.assert_allclose(forwards, needed.mean(axis=0), rtol=0.03, atol=0.6)


def test_nothing_measured_means_drafts_that_mostly_hold():
    rates = acceptance_rates(NO_COUNTS)
    assert rates.reaches(np.array([100.0]))[0] > 0.95
    assert NONE_HOLD.accepted(np.array([100.0]))[0] < 0.1


# Lengths


def groups_of(uids, prompt_tokens=lambda uid: 4) -> list[Group]:
    return [Group(Prompt(uid, "", (1,) * prompt_tokens(uid), {}), 0) for uid in uids]


def observed(lengths_by_uid: dict[int, list[int]], **prompts) -> LengthModel:
    model, groups = LengthModel(), groups_of(lengths_by_uid, **prompts)
    lengths = (length for of_prompt in lengths_by_uid.values() for length in of_prompt)
    model.observe(samples_of(groups, [np.ones(length, np.int32) for length in lengths]))
    return model


def draft(length: int, is_finished: bool = True) -> Draft:
    return Draft(np.ones(length, np.int32), is_finished, 0)


def test_lengths_come_from_the_best_that_is_known():
    """A finished draft, then the prompt's own responses of earlier epochs, then siblings' drafts,
    then a line through all."""
    model = observed({1: [10, 30], 2: [40, 40], 3: [90, 110]})
    groups = groups_of([1, 7, 8])
    rows = model.predict(groups, 2, [draft(25), None, draft(60), None, None, draft(70, False)])
    assert rows.expected[0] == 25 and rows.spread[0] == 0, "finished"
    assert (rows.expected[1], rows.spread[1]) == (20, 10), "an earlier epoch"
    assert rows.expected[3] == 60 and 0 < rows.spread[3] < rows.spread[4], "its sibling"
    mean = np.mean([10, 30, 40, 40, 90, 110])
    assert rows.expected[4] == pytest.approx(mean)
    assert rows.expected[5] > 71, "it has got so far"
    assert rows.drafted.tolist() == [25, 0, 60, 0, 0, 70] and not rows.generated.any()
    assert rows.group.tolist() == [0, 0, 1, 1, 2, 2] and set(rows.prompt_tokens) == {4}


def test_the_line_goes_through_prompt_lengths():
    model = observed({n: [20 + 3 * n] * 2 for n in range(1, 30)}, prompt_tokens=lambda uid: uid)
    rows = model.predict(groups_of([41, 70], lambda uid: uid), 1, [None, None])
    np.testing.assert_allclose(rows.expected, [20 + 3 * 41, 20 + 3 * 70])
    assert (rows.spread >= 1.0).all()
    nothing_seen = LengthModel()
    assert not nothing_seen.knows_lengths and model.knows_lengths
    assert (nothing_seen.predict(groups_of([1]), 2, [None, draft(9)]).expected >= 1).all()


def test_the_latest_epoch_counts():
    model = observed({1: [10, 30]})
    model.observe(samples_of(groups_of([1]), [np.ones(70, np.int32)] * 2))
    assert model.predict(groups_of([1]), 1, [None]).expected == [70]


def test_the_mean_beyond_is_that_of_those_that_go_on():
    rng = np.random.default_rng(0)
    mean, spread = np.full(200_000, 50.0), np.full(200_000, 20.0)
    lengths = draw_lengths(make_rows(mean, spread), rng)
    for so_far in (0.0, 20.0, 60.0):
        beyond = mean_length_beyond(mean[:1], spread[:1], np.array([so_far]))
        assert beyond[0] == pytest.approx(lengths[lengths > so_far].mean(), rel=0.03)
    so_far = np.arange(1.0, 400.0, 7.0)
    many = (np.full(len(so_far), 50.0), np.full(len(so_far), 20.0))
    assert (mean_length_beyond(*many, so_far) > so_far).all(), "far beyond all that was seen"


def test_a_saved_length_model_goes_on_alike():
    model, again = observed({1: [10, 30], 2: [40, 40]}), LengthModel()
    again.load_state_dict(model.state_dict())
    for of in (model, again):
        of.observe(samples_of(groups_of([5, 1]), [np.ones(n, np.int32) for n in (3, 5, 7, 9)]))
    asked = (groups_of([1, 2, 5, 9]), 1, [None] * 4)
    for name, column in vars(model.predict(*asked)).items():
        np.testing.assert_array_equal(column, vars(again.predict(*asked))[name])


# Costs


def random_loads(seed: int, count: int) -> np.ndarray:
    """Rows, tokens, rows with several query tokens and key/value positions, int64 [count, 4]."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 33, count)
    multi_rows = rng.integers(0, rows + 1)
    tokens = rows + multi_rows * rng.integers(1, 12, count)
    return np.stack((rows, tokens, multi_rows, rows * rng.integers(10, 400, count)), axis=1)


def test_linear_costs_are_recovered_and_interruptions_left_out():
    rng, model = np.random.default_rng(0), CostModel()
    wanted = cost_of(CPU)
    for number, load in enumerate(random_loads(0, 600).tolist()):
        interruption = 20.0 if number % 40 == 39 else 1.0
        model.observe(*load, float(wanted.seconds(*load)) * rng.normal(1, 0.05) * interruption)
    model.fit()
    loads = random_loads(1, 100).T
    np.testing.assert_allclose(model.seconds(*loads), wanted.seconds(*loads), rtol=0.06)


def test_steps_in_the_tokens_are_followed():
    """Better than by any line: a product with few rows takes as long as one with eight, and twice
    as long beyond."""

    def seconds(rows, tokens, multi_rows, kv_tokens):
        return np.where(tokens <= 8, 0.01, 0.02 + 2e-4 * tokens)

    rng, model = np.random.default_rng(0), CostModel()
    tokens = rng.integers(1, 65, 1000)
    for count in tokens.tolist():
        model.observe(count, count, 0, 0, float(seconds(count, count, 0, 0)) * rng.normal(1, 0.03))
    model.fit()
    for counts, limit in ((np.arange(1, 9), 0.2), (np.arange(16, 65), 0.1)):
        wanted = seconds(counts, counts, 0, 0)
        error = np.abs(model.seconds(counts, counts) / wanted - 1).mean()
        line = cost_of(model.coefficients).seconds(counts, counts)
        assert error < limit and error < np.abs(line / wanted - 1).mean()


def test_costs_are_never_negative_and_round_trip():
    rng, model = np.random.default_rng(0), CostModel()
    for load in random_loads(2, 200).tolist():
        model.observe(*load, rng.uniform(1e-3, 2e-3))  # nothing to do with the load
    parameters = model.parameters
    assert (model.coefficients >= 0).all() and model.coefficients[0] > 0
    loads = random_loads(3, 500).T
    assert (model.seconds(*loads) > 0).all()
    again = CostModel.from_parameters(parameters)
    np.testing.assert_array_equal(again.seconds(*loads), model.seconds(*loads))


def test_the_profile_holds_what_the_run_does_not_vary():
    """All forwards of the run feed one token to each of eight rows."""
    model, wanted = CostModel(), cost_of(CPU)
    for load in [(1, 1, 0, 8), (8, 8, 0, 64), (8, 128, 8, 64), (1, 16, 1, 8), (8, 8, 0, 4000)]:
        model.anchor(*load, float(wanted.seconds(*load)))
    for _ in range(500):
        model.observe(8, 8, 0, 800, float(wanted.seconds(8, 8, 0, 800)))
    model.fit()
    load = (2, 40, 2, 100)
    assert float(model.seconds(*load)) == pytest.approx(float(wanted.seconds(*load)), rel=0.1)


# Placement


@pytest.mark.parametrize("terms", [CPU, GPU])
@pytest.mark.parametrize("count, num_ranks, num_slots", [(3, 4, 8), (16, 2, 8), (48, 4, 6)])
def test_placement_is_no_worse_than_in_turn_and_the_same_everywhere(
    terms, count, num_ranks, num_slots
):
    cost, shape = cost_of(terms), {"num_ranks": num_ranks, "num_slots": num_slots}
    rates = acceptance_rates(NO_COUNTS)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        rows = random_rows(seed, count, 0.3, num_generations=2)
        drafted = np.where(rng.random(count) < 0.3, np.floor(rows.expected), 0.0)
        is_whole = drafted > 0
        expected = np.where(is_whole, drafted, rows.expected)
        spread = np.where(is_whole, 0.0, rows.spread)
        rows = replace(rows, drafted=drafted, expected=expected, spread=spread)
        placed = place(rows, cost, rates, **shape)
        assert set(placed.tolist()) == set(range(min(count, num_ranks))), "no rank without rows"

        def slowest_s(ranks: np.ndarray, rows: Rows = rows) -> float:
            own = [rows.take(ranks == rank) for rank in range(num_ranks)]
            return max(rollout_seconds(of_rank, cost, num_slots, rates) for of_rank in own)

        in_turn = place_in_turn(-(-count // 2), 2, num_ranks)[:count]
        assert slowest_s(placed) <= (1 + 1e-9) * slowest_s(in_turn)
        order = rng.permutation(count)
        np.testing.assert_array_equal(place(rows.take(order), cost, rates, **shape), placed[order])


def test_groups_that_are_kept_together_are_spread():
    rows = random_rows(0, 24, 0.3, num_generations=4)
    rates, cost = acceptance_rates(NO_COUNTS), cost_of(CPU)
    placed = place(rows, cost, rates, num_ranks=2, num_slots=64, keeps_groups=True)
    of_groups = [set(placed[rows.group == group].tolist()) for group in range(6)]
    assert all(len(ranks) == 1 for ranks in of_groups) and set.union(*of_groups) == {0, 1}
    alike = make_rows([400.0] * 4 + [100.0] * 20, num_generations=2)
    placed = place(alike, cost, rates, num_ranks=2, num_slots=64, keeps_groups=True)
    assert placed[0] == placed[1] != placed[2] == placed[3]


def test_long_rows_are_spread():
    rows = make_rows([400.0] * 2 + [100.0] * 20)
    shape, rates = {"num_ranks": 2, "num_slots": 64}, acceptance_rates(NO_COUNTS)
    for terms in (CPU, GPU):
        assert len(set(place(rows, cost_of(terms), rates, **shape)[:2].tolist())) == 2


def test_admission_is_longest_first_and_what_may_be_out_comes_last():
    rows = make_rows([5.0, 9.0, 50.0, 40.0, 7.0, 6.0, 30.0, 80.0], num_generations=2)
    groups = groups_of(range(4))
    everything = Launch(groups, 4, 2, 2)
    assert admission_order(rows, np.arange(8), everything) == [7, 2, 3, 6, 1, 4, 5, 0]
    assert admission_order(rows, np.array([0, 3, 4]), everything) == [3, 4, 0]
    assert admission_order(rows, np.arange(0), everything) == []
    half = Launch(groups, 2, 2, 2)  # groups 0 and 2 are expected to be the shortest
    assert admission_order(rows, np.arange(8), half) == [1, 4, 5, 0, 7, 2, 3, 6]
    assert up_to_cutoff(rows, half).expected.max() == 9.0
    drafted = make_rows([50.0, 30.0], drafted=[50.0, 0.0])
    assert admission_order(drafted, np.arange(2), Launch(groups[:2], 2, 1, 1)) == [1, 0]


# What to draft

PLAN = {"num_ranks": 2, "num_slots": 16}


@pytest.mark.parametrize("terms", [CPU, GPU])
def test_useless_drafts_are_never_worth_co_scheduling(terms):
    for seed in range(5):
        value = draft_value(random_rows(seed, 16), cost_of(terms), NONE_HOLD, **PLAN)
        assert not value.pays.any()


@pytest.mark.parametrize("terms", [(1e-2, 1e-4, 1e-4, 0.0, 0.0), GPU])
def test_drafts_are_worth_more_as_more_of_them_holds(terms):
    rows, saved_s = random_rows(0, 16), []
    for share in (0.0, 0.9, 0.99, 0.999, 1.0):
        rates = acceptance_rates(1e7 * np.array([[1.0, share], [1.0, 0.0]]))
        saved_s.append(draft_value(rows, cost_of(terms), rates, **PLAN).saves_s.sum())
    assert (np.diff(saved_s) >= -1e-9).all() and saved_s[-1] > saved_s[0]


def test_only_long_rows_pay_where_forwards_cost_most():
    rows = make_rows([10.0] * 12 + [300.0] * 2, [5.0] * 12 + [50.0] * 2)
    value = draft_value(rows, cost_of((1e-2, 1e-3, 1e-3, 0.0, 0.0)), ALL_HOLD, **PLAN)
    assert np.flatnonzero(value.pays).tolist() == [12, 13]
    finished = replace(rows, drafted=rows.expected, spread=0 * rows.spread)
    value = draft_value(finished, cost_of(GPU), ALL_HOLD, **PLAN)
    assert not value.pays.any() and not value.costs_s.any(), "nothing is missing"


def make_plans(lengths: dict[int, list[int]], batches, drafts=None, **options):
    """What is planned for batches of prompts, by their uids."""
    options = {
        "cost": cost_of(GPU),
        "rates": ALL_HOLD,
        "forwards_per_step": 100.0,
        **PLAN,
        **options,
    }
    batches = [groups_of(uids) for uids in batches]
    get_draft = (drafts or {}).get
    plans = plan_drafts(batches, 1, get_draft, observed(lengths), **options)
    return [(plan.key.uid, plan.co_scheduled) for plan in plans], plans


LENGTHS = {1: [10, 10], 2: [90, 90], 3: [60, 60], 4: [195, 195]}


def test_drafts_are_planned_by_least_slack():
    """What is worth co-scheduling comes first; a response of the step after next is begun before
    a short one of the next, if it needs so much longer."""
    order, plans = make_plans(LENGTHS, [[1, 2], [3, 4]], planning="idle_only")
    assert order == [(4, False), (2, False), (1, False), (3, False)]
    assert not any(plan.saves_s for plan in plans)
    order, plans = make_plans(LENGTHS, [[1, 2], [3, 4]])
    assert [uid for uid, is_co in order if is_co] == [4, 2, 3][: sum(is_co for _, is_co in order)]
    assert (2, True) in order and all(plan.saves_s > 0 for plan in plans if plan.co_scheduled)
    order, _ = make_plans(LENGTHS, [[1, 2], [3, 4]], planning="always")
    assert all(is_co for _, is_co in order)
    order, _ = make_plans(LENGTHS, [[1, 2]], cost=None)
    assert order == [(2, False), (1, False)], "before anything has been measured"


def test_finished_drafts_are_not_planned_and_deferred_groups_come_first():
    samples = {uid: group.sample(0) for uid, group in zip(LENGTHS, groups_of(LENGTHS), strict=True)}
    drafts = {samples[2]: draft(90), samples[4]: draft(150, False)}
    order, _ = make_plans(LENGTHS, [[1, 2, 3, 4]], drafts, planning="idle_only")
    assert [uid for uid, _ in order] == [3, 4, 1] or [uid for uid, _ in order] == [4, 3, 1]
    order, _ = make_plans(LENGTHS, [[1, 2, 3]], deferred={(1, 0)}, planning="idle_only")
    assert [uid for uid, _ in order] == [1, 2, 3]
    assert make_plans(LENGTHS, [[2]], drafts)[0] == []


def test_lookahead():
    roomy = {"steps_left": 50, "steps_stored": 99.0, "accepted": {}}
    assert choose_lookahead(1, **roomy) == MAX_LOOKAHEAD
    assert choose_lookahead(1, **{**roomy, "steps_left": 2}) == 2
    assert choose_lookahead(1, **{**roomy, "steps_stored": 2.5}) == 2
    old = {**roomy, "accepted": {1: 0.9, 4: 0.5, 5: 0.1, 9: 0.05}}
    assert choose_lookahead(1, **old) == 4
    refused = {**roomy, "accepted": {1: 0.0}}
    depths = [choose_lookahead(step, **refused) for step in range(2 * RETRY_STEPS)]
    assert sum(depths) == 2, "they are tried again now and then"


# The tensor-parallel tail

ALONE = cost_of((1.0, 0.0, 1e-12, 0.0, 0.0))


def together(factor: float, token_s: float = 1e-12) -> CostModel:
    return cost_of((factor, 0.0, token_s, 0.0, 0.0))


def pays(rank_of, left, tp_cost: CostModel, *, prompt_tokens=10, num_slots=4, overhead_s=0.0):
    rows = make_rows(left, prompt_tokens=prompt_tokens)
    shape = {"num_slots": num_slots, "overhead_s": overhead_s}
    return use_tp_tail(rows, np.array(rank_of), ALONE, tp_cost, **shape)


def test_the_tp_tail_pays_where_forwards_are_faster_together():
    assert pays([0, 1], [40, 100], together(0.5))
    assert not pays([0, 1], [40, 100], together(1.0))
    assert not pays([0, 1], [40, 100], together(1.0 - MIN_TAIL_GAIN / 2))
    # Three rows one after the other in one slot take longer than one of rank 1.
    assert pays([0, 0, 0, 1], [50, 50, 50, 100], together(1.2), num_slots=1)
    assert not pays([0, 0, 0, 1], [50, 50, 50, 100], together(1.2))


@pytest.mark.parametrize("overhead_s, expected", [(0.0, True), (4.5, True), (5.5, False)])
def test_entering_the_tp_tail_must_be_worth_it(overhead_s, expected):
    """10 s are to be gained: by entering it at once, or for less than half of them."""
    assert pays([0, 1], [20, 20], together(0.5), overhead_s=overhead_s) == expected


def test_tokens_that_are_fed_again_count():
    assert pays([0, 1], [20, 20], together(0.5, token_s=0.01))
    assert not pays([0, 1], [20, 20], together(0.5, token_s=0.01), prompt_tokens=1000)


@pytest.mark.parametrize("seed", range(5))
def test_a_cheaper_forward_never_speaks_against_the_tp_tail(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 12))
    rank_of, left = rng.integers(0, 4, count), rng.integers(10, 200, count)
    answers = [pays(rank_of, left, together(factor)) for factor in np.linspace(1.5, 1e-6, 21)]
    assert answers == sorted(answers) and answers[-1] and not answers[0]
