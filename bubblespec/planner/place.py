"""Which rank generates which row, decided before a rollout so that the slowest rank ends soon: the
longest rows first, each to the rank that is expected to end first with it; and whether the last
rows are done sooner if all ranks decode them together.

In a forward of all ranks together each reads a share of the weights, and there are collectives in
every layer; the rows of all ranks are in it. How long such forwards take is measured at the start
of the run, as a cost model of its own. The idle time that the first ranks to finish give up for it
is not counted: by the time that few rows are left, its jobs have been assigned.
"""

from dataclasses import replace

import numpy as np

from bubblespec.planner.costs import CostModel, prefill_seconds, rollout_seconds
from bubblespec.planner.rows import TYPICAL_WINDOW, AcceptanceRates, Rows
from bubblespec.types import Launch

MIN_TAIL_GAIN = 0.05  # of what is left of the rollout; less is within the error of a cost model


def place(
    rows: Rows,
    cost: CostModel,
    rates: AcceptanceRates,
    *,
    num_ranks: int,
    num_slots: int,
    keeps_groups: bool = False,
) -> np.ndarray:
    """The rank of each row, int64 [S]; groups in turn where that is expected to end sooner. Expects
    ranks to admit their rows longest first. No rank is without rows if there are enough of them.
    keeps_groups: a group is not divided among ranks."""
    in_turn = rows.group % num_ranks
    unit = rows.group if keeps_groups else np.arange(len(rows))
    balanced = _longest_to_first(rows, unit, cost, num_ranks, num_slots)
    if len(np.unique(in_turn)) < min(num_ranks, len(rows)):
        return balanced

    def slowest_s(rank_of: np.ndarray) -> float:
        of_ranks = (rows.take(rank_of == rank) for rank in range(num_ranks))
        return max(rollout_seconds(own, cost, num_slots, rates) for own in of_ranks)

    return in_turn if slowest_s(in_turn) < slowest_s(balanced) else balanced


def _longest_to_first(
    rows: Rows, unit: np.ndarray, cost: CostModel, num_ranks: int, num_slots: int
) -> np.ndarray:
    """Longest first, each unit of rows to the rank whose time ends up smallest, int64 [S]. A rank's
    time is that of the forwards of its longest row, or of as many as its slots need for all rows,
    with what each row adds to them; a prompt is fed once per rank. unit: int64 [S], of each row."""
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
        own = np.flatnonzero(unit == unit[row])  # of which this row is the longest
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
    """The rank of each row, int64 [groups x generations]: groups in turn."""
    return np.repeat(np.arange(num_groups) % num_ranks, num_generations)


def up_to_cutoff(rows: Rows, launch: Launch) -> Rows:
    """What rows are expected to need until the rollout is over, where not all are trained on: none
    gets longer than the last that is."""
    longest = rows.expected.reshape(len(launch.groups), -1).max(axis=1)
    limit = np.sort(longest)[launch.num_trained - 1]
    expected, drafted = np.minimum(rows.expected, limit), np.minimum(rows.drafted, limit)
    return replace(rows, expected=expected, drafted=drafted)


def admission_order(rows: Rows, own: np.ndarray, launch: Launch) -> list[int]:
    """The order in which a rank should admit its rows: longest first, so that they do not wait for
    slots. Where not all are trained on: first the rows of groups that are expected to be among the
    shortest; then one row of each other group, which has to outlast them for its group to be out;
    then the rest, most of which need not be started. own: int64, indices of the rank's rows.
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


def longest_first(rows: Rows) -> np.ndarray:
    """The order in which ranks should admit rows, int64 [S]: by expected forwards, the rows of a
    prompt together."""
    return np.lexsort((rows.group, -expected_forwards(rows)))


def expected_forwards(rows: Rows) -> np.ndarray:
    """Forwards that each row needs if its draft holds, float64 [S]."""
    return np.maximum(rows.expected - rows.drafted, 0.0) + rows.drafted / TYPICAL_WINDOW


def use_tp_tail(
    rows: Rows,
    rank_of: np.ndarray,
    cost: CostModel,
    tp_cost: CostModel,
    *,
    num_slots: int,
    overhead_s: float,
) -> bool:
    """Whether all ranks together end the rollout sooner by more than MIN_TAIL_GAIN of what is left
    of it, and by more than overhead_s. The same on every rank.

    rows: the unfinished ones of all ranks; rank_of: int64 [S]; cost, tp_cost: of forwards of one
    rank, and of all together; num_slots: of one rank; overhead_s: from the decision to the first
    forward. Drafts shorten both ways by the same factor, and are not looked at.
    """

    def decoding_s(some: Rows, cost: CostModel, num_slots: int) -> float:
        """Their prompts and tokens are in a cache."""
        return rollout_seconds(some, cost, num_slots) - prefill_seconds(some, cost)

    ranks = np.unique(rank_of)
    alone_s = max(decoding_s(rows.take(rank_of == rank), cost, num_slots) for rank in ranks)
    together_s = overhead_s + decoding_s(rows, tp_cost, len(rows))
    return alone_s - together_s > max(MIN_TAIL_GAIN * alone_s, overhead_s)
