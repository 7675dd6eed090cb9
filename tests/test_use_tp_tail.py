"""When the tensor-parallel tail pays: by hand, and as properties."""

import numpy as np
import pytest

from bubblespec.planner.tail import MIN_GAIN, use_tp_tail

FORWARDS = np.array([1.0, 0, 1e-12, 0, 0])  # seconds of [a forward, row, token, wide row, position]
PAY = {"num_ranks": 2, "num_slots": 4, "overhead_s": 0.0}


def pays(rank_of, left, tp_cost, *, context=10, **shape) -> bool:
    left = np.array(left, float)
    shape = {**PAY, **shape}
    rows = (np.array(rank_of), left, np.full(len(left), context))
    return use_tp_tail(*rows, FORWARDS, tp_cost, **shape)


def test_half_the_time_pays_and_the_same_does_not():
    assert pays([0, 1], [40, 100], FORWARDS / 2)
    assert not pays([0, 1], [40, 100], FORWARDS)
    assert not pays([0, 1], [40, 100], FORWARDS * (1 - MIN_GAIN / 2))


def test_the_slowest_rank_counts():
    """Rank 1 has one row of 100 s; three rows of rank 0 need 60 s, one after the other in one
    slot."""
    assert pays([0, 0, 0, 1], [20, 20, 20, 100], 0.94 * FORWARDS, num_slots=1)
    assert not pays([0, 0, 0, 1], [20, 20, 20, 100], 0.96 * FORWARDS, num_slots=1)
    # 150 s, of which 100 are left where all have a slot.
    assert pays([0, 0, 0, 1], [50, 50, 50, 100], 1.4 * FORWARDS, num_slots=1)
    assert not pays([0, 0, 0, 1], [50, 50, 50, 100], 1.45 * FORWARDS, num_slots=1)


@pytest.mark.parametrize("overhead_s, expected", [(0.0, True), (4.9, True), (5.1, False)])
def test_entering_must_be_worth_its_price(overhead_s, expected):
    """10 s are to be gained: by entering it at once, or for less than half of them."""
    assert pays([0, 1], [20, 20], FORWARDS / 2, overhead_s=overhead_s) == expected


def test_tokens_that_are_fed_again_count():
    fed_again = np.array([0.5, 0, 0.01, 0, 0])  # 20 s for 2,000 tokens
    assert pays([0, 1], [20, 20], fed_again)
    assert not pays([0, 1], [20, 20], fed_again, context=1000)


@pytest.mark.parametrize("seed", range(5))
def test_a_cheaper_forward_never_speaks_against_it(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 12))
    rank_of, left = rng.integers(0, 4, count), rng.integers(1, 200, count)
    tp_cost = np.array([1.0, 0.02, 1e-3, 0.01, 1e-6])
    answers = [
        pays(rank_of, left, scale * tp_cost, num_ranks=4) for scale in np.linspace(1.5, 0, 31)
    ]
    assert answers == sorted(answers) and answers[-1] and not answers[0]
