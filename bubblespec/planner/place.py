"""Placement of rows on ranks before a rollout, so that the slowest rank ends soon.

Rows, or whole groups, go longest first, each to the rank that is expected to end first with it."""

from dataclasses import replace

import numpy as np

from bubblespec.planner.costs import CostModel
from bubblespec.planner.lengths import TYPICAL_WINDOW, LengthForecast
from bubblespec.types import StepBatch

# Groups per rank from which on whole ones balance as well as rows do, and feed no prompt twice.
MANY_GROUPS = 4


def place(
    rows: LengthForecast, cost: CostModel, *, num_ranks: int, num_slots: int, keeps_groups: bool
) -> np.ndarray:
    """Return the rank of each row, int64 [S]. No rank is without one if there are enough.

    A rank's time is that of the forwards of its longest row, or of as many as its slots need
    for all rows, plus the cost of each row; a prompt is fed once per rank. keeps_groups: whether
    each group stays on one rank."""
    unit = rows.group if keeps_groups else np.arange(len(rows))
    forward_s, row_s, token_s, _, kv_s = cost.coefficients.tolist()
    forwards = expected_forwards(rows)
    context = rows.prompt_tokens + rows.expected / 2
    row_seconds = forwards * (row_s + kv_s * context)
    row_seconds += token_s * np.maximum(rows.expected, rows.drafted)
    prefill_s = token_s * rows.prompt_tokens
    longest, total, seconds, num_rows = np.zeros((4, num_ranks))
    has_group = np.zeros((int(rows.group.max(initial=-1)) + 1, num_ranks), bool)
    rank_of = np.full(len(rows), -1, np.int64)
    for row in longest_first(rows).tolist():
        if rank_of[row] >= 0:
            continue
        own = np.flatnonzero(unit == unit[row])  # this row is the longest of them
        group, needs = rows.group[row], forwards[own].sum()
        added_s = row_seconds[own].sum() + np.where(has_group[group], 0.0, prefill_s[row])
        needed = np.maximum(longest, forwards[row])
        needed = np.maximum(needed, (total + needs) / num_slots)
        end_s = seconds + added_s + forward_s * needed
        rank = np.lexsort((num_rows, np.round(end_s, 12)))[0]
        seconds[rank] += added_s[rank]
        longest[rank] = max(longest[rank], forwards[row])
        total[rank] += needs
        num_rows[rank] += len(own)
        has_group[group, rank] = True
        rank_of[own] = rank
    return rank_of


def place_in_turn(num_groups: int, num_generations: int, num_ranks: int) -> np.ndarray:
    """Return the rank of each row, int64 [groups x generations]: groups round-robin."""
    return np.repeat(np.arange(num_groups) % num_ranks, num_generations)


def up_to_cutoff(rows: LengthForecast, launch: StepBatch) -> LengthForecast:
    """Cut rows at the expected end of a rollout that does not train on all of them."""
    longest = rows.expected.reshape(len(launch.groups), -1).max(axis=1)
    limit = np.sort(longest)[launch.num_trained - 1]
    expected, drafted = np.minimum(rows.expected, limit), np.minimum(rows.drafted, limit)
    return replace(rows, expected=expected, drafted=drafted)


def admission_order(rows: LengthForecast, own: np.ndarray, launch: StepBatch) -> list[int]:
    """Return the order in which a rank admits its rows: longest first, so that none waits.

    Where the launch selects groups: first the rows of groups that are expected to be the shortest;
    then one row of each other group, which excludes its group by outlasting them; then the rest,
    most of which need not be started. own: int64, indices of the rank's rows.
    """
    ordered = own[longest_first(rows.take(own))]
    if launch.selects:
        longest = rows.expected.reshape(len(launch.groups), -1).max(axis=1)
        trained = np.argsort(longest, kind="stable")[: launch.num_trained]
        group = ordered // launch.num_generations
        comes_last = ~np.isin(group, trained) * 2
        comes_last[np.unique(group, return_index=True)[1]] //= 2  # one of each group
        ordered = ordered[np.argsort(comes_last, kind="stable")]
    return ordered.tolist()


def longest_first(rows: LengthForecast) -> np.ndarray:
    """Return rows by expected forwards, most first, the rows of a prompt together, int64 [S]."""
    return np.lexsort((rows.group, -expected_forwards(rows)))


def expected_forwards(rows: LengthForecast) -> np.ndarray:
    """Return the forwards that each row needs if its draft holds, float64 [S]."""
    return np.maximum(rows.expected - rows.drafted, 0.0) + rows.drafted / TYPICAL_WINDOW
