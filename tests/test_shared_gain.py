"""When the shared tail pays: hand-computed cases, and rollouts played forward by forward."""

import numpy as np
import pytest
from test_moves import played_s, some_rows, unfinished

from bubblespec.rollout.balance import MIN_GAIN
from bubblespec.rollout.shared_gain import pays

# Seconds of [a forward, a row, a token, a wide row, a position].
ALONE = np.array([7e-3, 0.0, 1e-7, 0.0, 1.5e-8])
TOGETHER = np.array([1.5e-3, 0.0, 1e-7, 0.0, 2e-9])
FORWARDS = np.array([1.0, 0, 1e-12, 0, 0])


def test_half_the_time_pays_and_the_same_does_not():
    rows = unfinished([0, 1], [40, 100])
    shape = {"num_ranks": 2, "num_slots": 4, "overhead_s": 0.0}
    assert pays(rows, FORWARDS, FORWARDS / 2, **shape)
    assert not pays(rows, FORWARDS, FORWARDS, **shape)
    assert not pays(rows, FORWARDS, FORWARDS * (1 - MIN_GAIN / 2), **shape)


def test_the_slowest_rank_counts():
    """Rank 1 has one row of 100 s; three rows of rank 0 need 60 s, one after the other in one
    slot."""
    rows = unfinished([0, 0, 0, 1], [20, 20, 20, 100])
    shape = {"num_ranks": 2, "num_slots": 1, "overhead_s": 0.0}
    assert pays(rows, FORWARDS, 0.94 * FORWARDS, **shape) and not pays(
        rows, FORWARDS, 0.96 * FORWARDS, **shape
    )
    rows = unfinished(
        [0, 0, 0, 1], [50, 50, 50, 100]
    )  # 150 s, of which 100 are left where all have a slot
    assert pays(rows, FORWARDS, 1.4 * FORWARDS, **shape) and not pays(
        rows, FORWARDS, 1.45 * FORWARDS, **shape
    )


def test_entering_must_be_worth_its_price():
    """10 s are to be gained: by entering it at once, or for less than half of them."""
    rows = unfinished([0, 1], [20, 20])
    for overhead_s, expected in ((0.0, True), (4.9, True), (5.1, False)):
        assert (
            pays(rows, FORWARDS, FORWARDS / 2, num_ranks=2, num_slots=2, overhead_s=overhead_s)
            == expected
        )
    long = unfinished([0, 1], [20, 20], so_far=1000, prompts=0)
    fed_again = np.array([0.5, 0, 0.01, 0, 0])  # 20 s for the tokens that the rows have
    assert not pays(long, FORWARDS, fed_again, num_ranks=2, num_slots=2, overhead_s=0.0)
    assert pays(
        unfinished([0, 1], [20, 20]), FORWARDS, fed_again, num_ranks=2, num_slots=2, overhead_s=0.0
    )


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_what_pays_ends_sooner_forward_by_forward(num_ranks):
    rng, answers = np.random.default_rng(5), []
    for _ in range(60):
        rows = some_rows(rng, int(rng.integers(1, 12)), list(range(num_ranks)))
        overhead_s = float(rng.choice([0.0, 0.02, 0.2]))
        of_ranks = [np.flatnonzero(rows.owners == rank).tolist() for rank in range(num_ranks)]
        alone_s = max(played_s(rows, own, 0.0, ALONE, 4) for own in of_ranks)
        everything = list(range(len(rows.left)))
        together_s = played_s(
            rows, everything, overhead_s, TOGETHER, len(everything), moved=frozenset(everything)
        )
        found = pays(rows, ALONE, TOGETHER, num_ranks=num_ranks, num_slots=4, overhead_s=overhead_s)
        gain_s, least_s = alone_s - together_s, max(MIN_GAIN * alone_s, overhead_s)
        if abs(gain_s - least_s) > 1e-3 * alone_s:
            assert found == (gain_s > least_s)
            answers.append(found)
    assert 5 < sum(answers) < len(answers) - 5
