"""Moves of rows within a rollout: hand-computed cases, all sets of rows that could move, rollouts
played forward by forward."""

import itertools

import numpy as np
import pytest
from bubblespec.idle.draft_planning import Outlook
from bubblespec.rollout.balance import MIN_GAIN, num_forwards
from bubblespec.rollout.moves import MAX_MOVES, Move, Unfinished, expected_left, plan_moves

# Seconds of [a forward, a row, a token, a wide row, a position].
CPU = np.array([1e-3, 1e-5, 1.5e-5, 5e-4, 3e-7])
GPU = np.array([7e-3, 0.0, 1e-7, 0.0, 1.5e-8])
FORWARDS_ALONE = np.array([1.0, 0, 1e-9, 0, 0])


def unfinished(owners, left, *, so_far=0, prompts=10) -> Unfinished:
    zeros = np.zeros(len(owners), np.int64)
    return Unfinished(np.array(owners), zeros + so_far, np.array(left, np.float64), zeros + prompts)


def some_rows(rng, num_rows: int, owners: list[int]) -> Unfinished:
    left = np.ceil(rng.lognormal(3, 1, num_rows))
    return Unfinished(
        rng.choice(owners, num_rows),
        rng.integers(0, 50, num_rows),
        left,
        rng.integers(5, 50, num_rows),
    )


def played_s(
    rows: Unfinished,
    order: list[int],
    begin_s: float,
    cost: np.ndarray,
    num_slots: int,
    *,
    moved: frozenset[int] = frozenset(),
) -> float:
    """When a rank ends, which begins at begin_s and feeds the moved rows' prompts and tokens first:
    forward by forward."""
    queue, done, seconds = list(order), dict.fromkeys(order, 0), begin_s
    for row in moved:
        seconds += cost[2] * (rows.prompt_tokens[row] + rows.so_far[row]) + cost[3]
    while queue:
        fed = queue[:num_slots]
        positions = sum(rows.prompt_tokens[row] + rows.so_far[row] + done[row] for row in fed)
        seconds += cost @ [1, len(fed), len(fed), 0, positions]
        for row in fed:
            done[row] += 1
        queue = [row for row in queue if done[row] < rows.left[row]]
    return seconds


def end_s(
    rows: Unfinished,
    moves: list[Move],
    cost: np.ndarray,
    *,
    num_ranks: int,
    num_slots: int,
    overhead_s: float,
) -> float:
    """When the last rank ends, with moved rows admitted after one another in the order of their
    moves."""
    gone, ends = {move.row for move in moves}, []
    for rank in range(num_ranks):
        stay = [row for row in np.flatnonzero(rows.owners == rank).tolist() if row not in gone]
        come = [move.row for move in moves if move.target == rank]
        begin_s = overhead_s if come else 0.0
        ends.append(played_s(rows, stay + come, begin_s, cost, num_slots, moved=frozenset(come)))
    return max(ends)


def test_nothing_moves_where_no_rank_is_idle_or_nothing_is_left():
    kinds = {"num_ranks": 2, "num_slots": 2, "overhead_s": 0.0}
    assert (
        plan_moves(unfinished([0, 0, 0, 0, 1], [50, 50, 50, 50, 1]), FORWARDS_ALONE, **kinds) == []
    )
    assert plan_moves(unfinished(np.empty(0, np.int64), []), FORWARDS_ALONE, **kinds) == []


def test_rows_that_wait_move_if_that_saves_more_than_it_takes():
    """Eight rows of 10 forwards of 1 s, two slots: 40 s. With the last four elsewhere 20 s, and the
    seconds of the move."""
    rows = unfinished([1] * 8, [10] * 8)
    kinds = {"num_ranks": 2, "num_slots": 2}
    moves = sorted(plan_moves(rows, FORWARDS_ALONE, **kinds, overhead_s=1.0))
    assert [move[:3] for move in moves] == [(row, 1, 0) for row in (4, 5, 6, 7)]
    np.testing.assert_allclose(
        [move[3:] for move in moves], [(19 / 4, 10.0, 40.0)] * 4
    )  # 40 s to 20 s and the move's 1 s; 10 each
    assert len(plan_moves(rows, FORWARDS_ALONE, **kinds, overhead_s=9.9)) == 4  # 40 -> 29.9 s
    assert (
        plan_moves(rows, FORWARDS_ALONE, **kinds, overhead_s=10.1) == []
    )  # 40 -> 30.1 s wins less than a move takes
    feeding = np.array(
        [1.0, 0, 0.3, 0, 0]
    )  # 64 s with the rows' own tokens; a prompt is fed again in 3 s, or in 60 s
    assert len(plan_moves(rows, feeding, **kinds, overhead_s=1.0)) > 0
    assert (
        plan_moves(
            unfinished([1] * 8, [10] * 8, so_far=160, prompts=40), feeding, **kinds, overhead_s=1.0
        )
        == []
    )


def test_few_rows_end_no_sooner_for_being_alone():
    """Eight rows in slots: on the GPU a forward takes 7 ms whether it has eight rows or one."""
    rows = unfinished([0] * 8, [1000] * 8, so_far=500)
    assert plan_moves(rows, GPU, num_ranks=8, num_slots=64, overhead_s=0.02) == []


def test_rows_beside_a_long_one_move_where_rows_cost_much():
    """32 rows of 100 tokens at 1 ms a forward and 1 ms a row: 3.3 s. With half of them elsewhere
    1.7 s."""
    cost = np.array([1e-3, 1e-3, 0, 0, 0])
    moves = plan_moves(
        unfinished([0] * 32, [100] * 32), cost, num_ranks=2, num_slots=64, overhead_s=0.02
    )
    assert len(moves) == 16 and {(move.source, move.target) for move in moves} == {(0, 1)}


def test_the_two_slowest_ranks_both_give_rows_away():
    """Each of two ranks has 16 rows for two slots, 80 s. The first gives half of them away, the
    second what then evens it with the third rank: 60 s."""
    rows, kinds = (
        unfinished([0] * 16 + [2] * 16, [10] * 32),
        {"num_ranks": 3, "num_slots": 2, "overhead_s": 0.1},
    )
    moves = plan_moves(rows, FORWARDS_ALONE, **kinds)
    assert {move.source for move in moves} == {0, 2} and {move.target for move in moves} == {1}
    assert end_s(rows, moves, FORWARDS_ALONE, **kinds) == pytest.approx(60.1, abs=0.01)


def test_idle_ranks_share_what_moves():
    """40 rows for two slots, 200 s; on four ranks 50 s each."""
    rows, kinds = (
        unfinished([0] * 40, [10] * 40),
        {"num_ranks": 4, "num_slots": 2, "overhead_s": 0.1},
    )
    moves = plan_moves(rows, FORWARDS_ALONE, **kinds)
    assert [sum(move.target == rank for move in moves) for rank in range(4)] == [0, 10, 10, 10]
    assert end_s(rows, moves, FORWARDS_ALONE, **kinds) == pytest.approx(50.1, abs=0.01)


@pytest.mark.parametrize("num_rows", [100, 1000])
def test_moves_of_a_tick_are_bounded(num_rows):
    moves = plan_moves(
        unfinished([0] * num_rows, [10] * num_rows),
        FORWARDS_ALONE,
        num_ranks=4,
        num_slots=8,
        overhead_s=0.1,
    )
    assert len(moves) == MAX_MOVES


@pytest.mark.parametrize("cost", [CPU, GPU, FORWARDS_ALONE], ids=["cpu", "gpu", "forwards alone"])
@pytest.mark.parametrize("num_slots", [2, 5, 64])
def test_the_end_is_sooner_by_more_than_the_margin_where_anything_moves(cost, num_slots):
    rng, num_moved = np.random.default_rng(num_slots), 0
    for _ in range(60):
        num_ranks = int(rng.integers(2, 6))
        busy = rng.permutation(num_ranks)[: rng.integers(1, num_ranks)].tolist()
        rows = some_rows(rng, int(rng.integers(1, 40)), busy)
        overhead_s = float(rng.choice([0.0, 3.0, 10.0]) * cost[0])
        kinds = {"num_ranks": num_ranks, "num_slots": num_slots, "overhead_s": overhead_s}
        moves = plan_moves(rows, cost, **kinds)
        assert moves == plan_moves(rows, cost, **kinds)
        assert len({move.row for move in moves}) == len(moves) <= MAX_MOVES
        idle = set(range(num_ranks)) - set(rows.owners.tolist())
        assert all(move.source == rows.owners[move.row] and move.target in idle for move in moves)
        before, after = end_s(rows, [], cost, **kinds), end_s(rows, moves, cost, **kinds)
        if moves:
            num_moved += 1
            assert before - after > max(MIN_GAIN * before, overhead_s) - 1e-9 * before
    assert (num_moved > 0) == (
        num_slots < 64 or cost is CPU
    )  # with slots for all, only rows that cost much are worth moving


DEAR_ROWS = CPU * [1, 10, 10, 1, 10]


@pytest.mark.parametrize("cost, num_slots", [(DEAR_ROWS, 2), (DEAR_ROWS, 7), (FORWARDS_ALONE, 2)])
def test_most_of_what_any_set_of_rows_could_win_is_won(cost, num_slots):
    """One rank has all seven rows; every set of them moves to the other in turn."""
    rng, won, best = np.random.default_rng(1), 0.0, 0.0
    kinds = {"num_ranks": 2, "num_slots": num_slots, "overhead_s": 2 * float(cost[0])}
    sets = [
        some for count in range(8) for some in itertools.combinations(range(7), count)
    ]  # first the one of no rows
    for _ in range(12):
        rows = some_rows(rng, 7, [0])
        every = [
            [Move(row, 0, 1) for row in sorted(some, key=lambda row: -rows.left[row])]
            for some in sets
        ]
        before, *others = [end_s(rows, moves, cost, **kinds) for moves in every]
        found = end_s(rows, plan_moves(rows, cost, **kinds), cost, **kinds)
        won, best = won + (before - found) / before, best + (before - min(others)) / before
    assert best > 1.0 and won >= 0.7 * best


@pytest.mark.parametrize(
    "left, num_slots, forwards",
    [([], 2, 0), ([5, 9], 2, 9), ([5, 9, 3], 2, 9), ([5, 9, 7], 2, 12), ([4, 4, 4], 1, 12)],
)
def test_forwards_of_rows_that_wait_for_slots(left, num_slots, forwards):
    assert num_forwards(np.array(left, np.float64), num_slots) == forwards


# Tokens left


def outlook(*lengths: int) -> Outlook:
    known = Outlook()
    known.learn(np.ones(len(lengths), np.int64), np.array(lengths, np.int64))
    return known


def test_tokens_left_are_those_of_a_logistic_length():
    """Against the mean of what is beyond so_far, of a million quantiles."""
    quantiles = (np.arange(1_000_000) + 0.5) / 1_000_000
    for guess, margin in ((100.0, 20.0), (100.0, 80.0), (30.0, 1.0)):
        lengths = guess + margin / np.log(9) * np.log(quantiles / (1 - quantiles))
        assert np.mean(lengths > guess + margin) == pytest.approx(0.1, abs=1e-6)
        for so_far in (
            guess - margin,
            guess - margin / 4,
            guess,
            guess + margin / 2,
            guess + 0.99 * margin,
        ):
            found = expected_left(
                np.array([so_far]), np.array([guess]), np.array([margin]), outlook()
            )
            assert found == pytest.approx(np.mean(lengths[lengths > so_far]) - so_far, rel=1e-4)


def test_tokens_left_long_before_the_guess_and_without_a_margin():
    so_far = np.array([0, 40, 99])
    for margin in (0.0, 2.0):
        found = expected_left(so_far[:2], np.full(2, 100.0), np.full(2, margin), outlook())
        np.testing.assert_allclose(found, [100, 60], rtol=1e-6)
    assert (
        expected_left(so_far, np.full(3, 100.0), np.full(3, 90.0), outlook()) > 100 - so_far
    ).all()


def test_what_outgrows_guess_and_margin_gets_as_long_as_others_did():
    known, so_far = outlook(10, 50, 200, 300), np.array([50, 51, 49, 250, 300, 400])
    found = expected_left(so_far, np.full(6, 20.0), np.full(6, 5.0), known)
    assert (
        found.tolist()
        == [known.total(n) - n for n in so_far.tolist()]
        == [200, 199, 550 / 3 - 49, 50, 300, 400]
    )
    assert expected_left(np.array([7]), np.array([3.0]), np.zeros(1), outlook()).tolist() == [7]
