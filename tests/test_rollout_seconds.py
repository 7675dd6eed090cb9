"""What is known of lengths and costs, and the seconds of a rollout; against direct simulation."""

from dataclasses import replace

import numpy as np
import pytest

from bubblespec.planner.costs import CostModel, play, rollout_seconds
from bubblespec.planner.drafts import draft_value
from bubblespec.planner.lengths import (
    TYPICAL_WINDOW,
    AcceptanceRates,
    LengthForecast,
    LengthModel,
    acceptance_rates,
    forwards_of,
    mean_length_beyond,
)
from bubblespec.planner.prices import Prices
from bubblespec.planner.stats import seconds_in_turn
from bubblespec.types import Load, StepBatch
from tests.helpers.planning import (
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
from tests.helpers.rows import samples_of

NUM_DRAWN = 300  # rollouts of a direct simulation


# Forwards


def draw_lengths(rows: LengthForecast, rng: np.random.Generator) -> np.ndarray:
    """Lengths of responses that go beyond the tokens that they have, float64 [S]."""
    begun = replace(rows, drafted=rows.generated.astype(np.float64))
    mean = np.maximum(begun.expected, 1.0)
    variance = np.log1p(np.maximum(begun.spread / mean, 0.02) ** 2)
    beta, alpha = np.pi / np.sqrt(3 * variance), mean * np.exp(-variance / 2)
    beyond = rng.random(len(rows)) / (1 + (np.maximum(begun.drafted, 1e-3) / alpha) ** beta)
    lengths = alpha * ((1 - beyond) / beyond) ** (1 / beta)
    return np.where(begun.spread == 0.0, begun.expected, np.maximum(lengths, 1.0))


def play_by_forward(forwards: np.ndarray, context: float, cost: CostModel, num_slots: int) -> float:
    """Seconds of a rollout, forward by forward, its rows admitted in the order given."""
    waiting, active, seconds = list(np.ceil(forwards)), [], 0.0
    while waiting or active:
        while waiting and len(active) < num_slots:
            active.append(waiting.pop(0))
        count, common = len(active), min(active)
        seconds += common * float(cost.seconds(count, count, 0, count * context))
        active = [left - common for left in active if left > common]
    return seconds


@pytest.mark.parametrize("num_groups, num_slots", [(8, 64), (33, 8), (1, 2)])
def test_seconds_of_known_lengths_equal_direct_simulation(num_groups, num_slots):
    """Groups are placed round-robin, and the slowest rank counts."""
    rng, cost, num_ranks, samples = np.random.default_rng(num_groups), cost_of(CPU), 2, 3
    launch = StepBatch(groups_of(range(num_groups)), num_groups, samples)
    prompts = np.array([len(group.prompt.token_ids) for group in launch.groups])
    lengths = rng.lognormal(3, 1, num_groups * samples).round() + 1
    rank_of, seconds = np.arange(len(lengths)) // samples % num_ranks, []
    for rank in range(min(num_ranks, num_groups)):
        own, fed = lengths[rank_of == rank], prompts[rank::num_ranks]
        context = fed.mean() + own.mean() / 2
        decoded_s = play_by_forward(-np.sort(-own), context, cost, num_slots)
        seconds.append(decoded_s + cost.coefficients[2] * fed.sum())
    found_s = seconds_in_turn(launch, lengths, cost, num_ranks, num_slots)
    assert found_s == pytest.approx(max(seconds), rel=1e-9)


@pytest.mark.parametrize("terms", [CPU, GPU])
@pytest.mark.parametrize(
    "count, num_slots, relative_spread, generated",
    [(1, 4, 0.5, 0), (16, 16, 0.5, 0), (16, 16, 0.5, 60), (32, 8, 0.6, 0), (40, 8, 0.02, 0)],
)
def test_rollout_seconds_equal_direct_simulation(
    terms, count, num_slots, relative_spread, generated
):
    rows = random_rows(0, count, relative_spread, generated=generated)
    rows = rows.take(np.argsort(-rows.expected))
    cost, rng = cost_of(terms), np.random.default_rng(1)
    context = float((rows.prompt_tokens + (rows.expected + rows.generated) / 2).mean())
    longest = (rows.expected + 4.0 * rows.spread).max() - rows.generated
    played = []
    for _ in range(NUM_DRAWN):
        left = np.minimum(draw_lengths(rows, rng) - rows.generated, longest)
        played.append(play_by_forward(left, context, cost, num_slots))
    found = play(rows, cost, num_slots).mean()
    error = np.std(played) / np.sqrt(NUM_DRAWN)
    assert found == pytest.approx(np.mean(played), rel=0.05, abs=3 * error)


def test_known_tokens_are_fed_once_per_rank():
    cost = cost_of((0.1, 0.02, 0.5, 0.0, 0.0))
    rows = make_rows([64.0, 32.0, 16.0], num_generations=3, prompt_tokens=100)
    decoded_s = 64 * 0.1 + 112 * 0.52
    assert play(rows, cost, 4)[:, 0] == pytest.approx(decoded_s)
    assert rollout_seconds(rows, cost, 4) == pytest.approx(decoded_s + 50)
    rank_of = np.array([0, 1, 1])
    assert rollout_seconds(rows, cost, 4, rank_of=rank_of) == pytest.approx(64 * 0.62 + 50)
    begun = replace(rows, generated=np.array([8, 8, 8]))
    found = rollout_seconds(begun, cost, 4)
    assert found == pytest.approx(56 * 0.1 + 88 * 0.52 + 62)
    assert rollout_seconds(make_rows([]), cost, 4) == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_acceptance_equals_direct_simulation(seed):
    rng = np.random.default_rng(seed)
    chance = rng.uniform(0.98, 0.9999)
    rates = acceptance_rates(1e7 * np.array([[1.0, chance], [1.0, 0.4]]))
    drafted = np.array([7.0, 40.0, 300.0])
    is_right = rng.random((20_000, 300)) < chance
    first_mismatch = np.where(is_right.all(axis=1), 300, is_right.argmin(axis=1))
    assert rates.after == pytest.approx(0.4, rel=1e-3)
    # Forwards of a row whose draft is whole: windows up to the mismatch, then what is not given.
    rows = make_rows(drafted, drafted=drafted)
    forwards = forwards_of(rows, rates, rows.drafted).mean(axis=0)
    of_draft = np.minimum(first_mismatch[:, None], rows.drafted)
    needed = of_draft / TYPICAL_WINDOW + 0.6 * (rows.drafted - of_draft)
    np.testing.assert_allclose(forwards, needed.mean(axis=0), rtol=0.03, atol=0.6)


@pytest.mark.parametrize("tokens_right, after", [(100, 0.3), (100, 0.6), (30, 0.1), (1000, 0.5)])
def test_saving_of_drafts_equals_direct_simulation(tokens_right, after):
    """Where only the number of forwards counts."""
    rows, rng = random_rows(0, 8, 0.4), np.random.default_rng(1)
    rates, free = AcceptanceRates(1 / tokens_right, after), Prices(0.0, 1.0, 0.0, 0.0, 0.0)
    cost = cost_of((1.0, 0.0, 0.0, 0.0, 0.0))
    found = draft_value(rows, cost, rates, free, num_ranks=1, num_slots=8)[1].sum()
    lengths = np.array([draw_lengths(rows, rng) for _ in range(4000)])
    right = np.minimum(rng.exponential(tokens_right, lengths.shape), lengths)
    forwards = right / TYPICAL_WINDOW + (1 - after) * (lengths - right)
    saved = lengths.max(axis=1) - forwards.max(axis=1)
    assert found == pytest.approx(saved.mean(), rel=0.1)


def test_drafts_mostly_hold_before_measurements():
    rates = acceptance_rates(NO_COUNTS)
    assert np.exp(-100 * rates.hazard) > 0.95 and 1 / NONE_HOLD.hazard < 0.1


# Lengths


def test_lengths_come_from_the_best_evidence():
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
    model = observed(
        {n: [20 + 3 * n] * 2 for n in range(1, 30)}, prompt_tokens=lambda prompt_id: prompt_id
    )
    rows = model.predict(groups_of([41, 70], lambda prompt_id: prompt_id), 1, [None, None])
    np.testing.assert_allclose(rows.expected, [20 + 3 * 41, 20 + 3 * 70])
    assert (rows.spread >= 1.0).all()
    nothing_seen = LengthModel()
    assert not nothing_seen.knows_lengths and model.knows_lengths
    assert (nothing_seen.predict(groups_of([1]), 2, [None, draft(9)]).expected >= 1).all()


def test_the_latest_epoch_counts():
    model = observed({1: [10, 30]})
    model.observe(samples_of(groups_of([1]), [np.ones(70, np.int32)] * 2))
    assert model.predict(groups_of([1]), 1, [None]).expected == [70]


def test_mean_beyond_equals_mean_of_unfinished():
    rng = np.random.default_rng(0)
    mean, spread = np.full(200_000, 50.0), np.full(200_000, 20.0)
    lengths = draw_lengths(make_rows(mean, spread), rng)
    for so_far in (0.0, 20.0, 60.0):
        beyond = mean_length_beyond(mean[:1], spread[:1], np.array([so_far]))
        assert beyond[0] == pytest.approx(lengths[lengths > so_far].mean(), rel=0.03)
    so_far = np.arange(1.0, 400.0, 7.0)
    many = (np.full(len(so_far), 50.0), np.full(len(so_far), 20.0))
    assert (mean_length_beyond(*many, so_far) > so_far).all(), "far beyond all that was seen"


def test_saved_length_model_continues_alike():
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
    wide_rows = rng.integers(0, rows + 1)
    tokens = rows + wide_rows * rng.integers(1, 12, count)
    return np.stack((rows, tokens, wide_rows, rows * rng.integers(10, 400, count)), axis=1)


def test_linear_costs_are_recovered_and_interruptions_left_out():
    rng, model = np.random.default_rng(0), CostModel()
    wanted = cost_of(CPU)
    for number, load in enumerate(random_loads(0, 600).tolist()):
        interruption = 20.0 if number % 40 == 39 else 1.0
        model.observe(
            Load(*load), float(wanted.seconds(*load)) * rng.normal(1, 0.05) * interruption
        )
    model.fit()
    loads = random_loads(1, 100).T
    np.testing.assert_allclose(model.seconds(*loads), wanted.seconds(*loads), rtol=0.06)


def test_steps_in_the_tokens_are_followed():
    """Better than by any line: a product with few rows takes as long as one with eight, and twice
    as long beyond."""

    def seconds(rows, tokens, wide_rows, positions):
        return np.where(tokens <= 8, 0.01, 0.02 + 2e-4 * tokens)

    rng, model = np.random.default_rng(0), CostModel()
    tokens = rng.integers(1, 65, 1000)
    for count in tokens.tolist():
        model.observe(Load(count, count), float(seconds(count, count, 0, 0)) * rng.normal(1, 0.03))
    model.fit()
    for counts, limit in ((np.arange(1, 9), 0.2), (np.arange(16, 65), 0.1)):
        wanted = seconds(counts, counts, 0, 0)
        error = np.abs(model.seconds(counts, counts) / wanted - 1).mean()
        line = cost_of(model.coefficients).seconds(counts, counts)
        assert error < limit and error < np.abs(line / wanted - 1).mean()


def test_costs_of_rare_forwards_are_kept():
    """Five tokens take as long as two, which no line says; and then the run feeds two alone."""
    model, seconds = CostModel(), {1: 0.05, 2: 0.06, 5: 0.06, 8: 0.12}
    for _ in range(100):
        for tokens, of in seconds.items():
            model.observe(Load(1, tokens, int(tokens > 1)), of)
    model.fit()
    for _ in range(50):
        for _ in range(20):
            model.observe(Load(1, 2, 1), seconds[2])
        model.fit()
    for tokens, of in seconds.items():
        assert float(model.seconds(1, tokens, tokens > 1)) == pytest.approx(of, rel=0.15)


def test_costs_are_never_negative_and_round_trip():
    rng, model = np.random.default_rng(0), CostModel()
    for load in random_loads(2, 200).tolist():
        model.observe(Load(*load), rng.uniform(1e-3, 2e-3))  # nothing to do with the load
    parameters = model.parameters
    assert (model.coefficients >= 0).all() and model.coefficients[0] > 0
    loads = random_loads(3, 500).T
    assert (model.seconds(*loads) > 0).all()
    again = CostModel.from_parameters(parameters)
    np.testing.assert_array_equal(again.seconds(*loads), model.seconds(*loads))


def test_profile_anchors_terms_without_variation():
    """All forwards of the run feed one token to each of eight rows."""
    model, wanted = CostModel(), cost_of(CPU)
    for load in [(1, 1, 0, 8), (8, 8, 0, 64), (8, 128, 8, 64), (1, 16, 1, 8), (8, 8, 0, 4000)]:
        model.anchor(Load(*load), float(wanted.seconds(*load)))
    for _ in range(500):
        model.observe(Load(8, 8, 0, 800), float(wanted.seconds(8, 8, 0, 800)))
    model.fit()
    load = (2, 40, 2, 100)
    assert float(model.seconds(*load)) == pytest.approx(float(wanted.seconds(*load)), rel=0.1)
