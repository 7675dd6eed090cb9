"""The table of rows: what ranks tell each other, and which rows are certainly trained on, against
every way in which a rollout may go on."""

import itertools

import numpy as np
import pytest

from bubblespec.planner.lengths import LengthForecast
from bubblespec.rollout.table import NO_LIMIT, RolloutProgress
from bubblespec.types import Group, Prompt, StepBatch

PROMPTS = [Prompt(40 + n, "", (1,) * (n + 2), {}) for n in range(5)]


def make_launch(groups=3, trained=None, generations=2) -> StepBatch:
    names = [Group(prompt, 3) for prompt in PROMPTS[:groups]]
    return StepBatch(names, trained or groups, generations)


def make_tables(
    launch: StepBatch, num_ranks: int = 2, rows: LengthForecast | None = None
) -> list[RolloutProgress]:
    rank_of = np.arange(len(launch.ids)) % num_ranks
    return [RolloutProgress(launch, rank_of, rank, rows) for rank in range(num_ranks)]


def table_of(launch: StepBatch, lengths, finished) -> RolloutProgress:
    (table,) = make_tables(launch, 1)
    for index, (length, is_finished) in enumerate(zip(lengths, finished, strict=True)):
        table.note(index, int(length), bool(is_finished))
    return table


def tick(tables: list[RolloutProgress]) -> None:
    states = [table.local_state() for table in tables]
    for table in tables:
        table.sync(states)


def test_sync_is_identical_and_monotone():
    rng, tables = np.random.default_rng(0), make_tables(make_launch(4, generations=3), 3)
    lengths = rng.integers(1, 12, 12)
    reached = np.zeros(12, np.int64)
    for _ in range(40):
        published = [table.local_state() for table in tables]
        at_tick = reached.copy()
        # Ranks go on while the tick is in flight.
        reached = np.minimum(reached + rng.integers(0, 3, 12), lengths)
        for table in tables:
            for index in np.flatnonzero(table.rank_of == table.rank).tolist():
                table.note(index, int(reached[index]), bool(reached[index] == lengths[index]))
        for table in tables:
            table.sync(published)
            own = table.rank_of == table.rank
            np.testing.assert_array_equal(table.synced, np.where(at_tick < lengths, at_tick, -1))
            np.testing.assert_array_equal(table.generated, np.where(own, reached, at_tick))
            is_finished = np.where(own, reached == lengths, at_tick == lengths)
            np.testing.assert_array_equal(table.is_finished, is_finished)
    assert (tables[0].synced == -1).all()


def test_unfinished_rows_follow_last_tick():
    column = np.arange(6.0)
    whole = np.arange(6)
    rows = LengthForecast(whole, whole, column + 10, column, column + 2, 0 * whole)
    tables = make_tables(make_launch(), rows=rows)
    tables[0].note(0, 4, True)
    tables[0].note(2, 6, False)
    tick(tables)
    tables[0].note(2, 8, True)  # after the tick
    for table in tables:
        indices, unfinished = table.unfinished()
        assert indices.tolist() == [1, 2, 3, 4, 5]
        assert unfinished.generated.tolist() == [0, 6, 0, 0, 0] and not unfinished.drafted.any()
        assert unfinished.expected.tolist() == [11, 12, 13, 14, 15]


def selected(launch: StepBatch, lengths) -> np.ndarray:
    """What is trained on once all lengths are known, bool [S]."""
    longest = np.reshape(lengths, (len(launch.groups), -1)).max(axis=1).tolist()
    trained = sorted(range(len(longest)), key=lambda g: (longest[g], g))[: launch.num_trained]
    return np.repeat(np.isin(np.arange(len(longest)), trained), launch.num_generations)


@pytest.mark.parametrize("shape", [(3, 1, 1), (3, 2, 1), (2, 1, 2)])
def test_early_verdicts_hold_however_the_rollout_goes_on(shape):
    """Lengths up to 3: all states, and from each of them all ends. What is certain is said."""
    launch, longest = make_launch(*shape), 3
    size = len(launch.ids)
    states = [(n, True) for n in range(1, longest + 1)] + [(n, False) for n in range(longest)]
    said = 0
    for state in itertools.product(states, repeat=size):
        cutoff = table_of(launch, *zip(*state, strict=True)).cutoff()
        ends = [[n] if done else range(n + 1, longest + 1) for n, done in state]
        outcomes = np.array([selected(launch, lengths) for lengths in itertools.product(*ends)])
        assert outcomes[:, cutoff.is_in].all() and not outcomes[:, cutoff.is_out].any()
        said += int((cutoff.is_in | cutoff.is_out).sum())
        if all(done for _, done in state):
            np.testing.assert_array_equal(cutoff.is_in, outcomes[0])
            np.testing.assert_array_equal(cutoff.is_out, ~outcomes[0])
    assert said > 0


@pytest.mark.parametrize("shape", [(5, 3, 4), (5, 1, 3)])
def test_excluded_rows_need_not_finish(shape):
    """What is left is what would have been selected from all."""
    launch = make_launch(*shape)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 30, len(launch.ids))
        (table,) = make_tables(launch, 1)
        is_out = np.zeros(len(lengths), bool)
        while not (table.is_finished | is_out).all():
            for index in np.flatnonzero(~(table.is_finished | is_out)).tolist():
                reached = min(int(table.generated[index] + rng.integers(0, 4)), lengths[index])
                table.note(index, reached, reached == lengths[index])
            cutoff = table.cutoff()
            assert not (is_out & ~cutoff.is_out).any(), "a verdict is final"
            is_out = cutoff.is_out
            groups_out = is_out.reshape(len(launch.groups), -1).all(axis=1)
            if cutoff.limit < NO_LIMIT:
                unfinished = np.where(table.is_finished | is_out, 0, table.generated)
                longest = unfinished.reshape(len(groups_out), -1).max(axis=1)
                assert (longest[~groups_out] < cutoff.limit).all()
        wanted = selected(launch, lengths)
        np.testing.assert_array_equal(table.trained(), np.flatnonzero(wanted))
        np.testing.assert_array_equal(table.deferred(), np.flatnonzero(~wanted))


def test_row_that_has_outgrown_its_draft_is_of_unknown_length():
    lengths = {"expected": [50.0, 50.0, 50.0, 50.0], "spread": [0.0, 0.0, 9.0, 9.0]}
    columns = {name: np.array(column) for name, column in lengths.items()}
    nothing = np.zeros(4)
    rows = LengthForecast(nothing + 2, nothing, **columns, drafted=nothing, generated=nothing)
    (table,) = make_tables(make_launch(2), 1, rows)
    for index, length in enumerate((49, 50, 49, 60)):
        table.note(index, length, False)
    tick([table])
    _, left = table.unfinished()
    assert left.spread.tolist() == [0.0, 25.0, 9.0, 9.0]
