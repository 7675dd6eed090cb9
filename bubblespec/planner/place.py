"""Which rank generates which row, decided before a rollout so that the slowest rank ends soon.

A row beside a long one makes each of that row's forwards slower. Where rows cost much (a CPU), the
few longest rows belong together, on a rank with little else; where the forward itself costs most (a
GPU below saturation) it hardly matters who is beside whom, and long rows are spread, since lengths
are uncertain. Several ways are tried, and the one is taken that is expected to end soonest.
"""

from bisect import bisect_right
from itertools import accumulate

import numpy as np

from bubblespec.planner.costs import CostModel, rollout_seconds
from bubblespec.planner.rows import TYPICAL_WINDOW, AcceptanceRates, Rows
from bubblespec.types import Launch

NUM_BISECTIONS = 12
MIN_GAIN = 0.05  # by keeping long rows together; less is within the error of a cost model


def place(
    rows: Rows, cost: CostModel, rates: AcceptanceRates, *, num_ranks: int, num_slots: int
) -> np.ndarray:
    """The rank of each row, int64 [S]. Expects ranks to admit their rows longest first. No rank is
    without rows if there are as many rows as ranks."""
    order = longest_first(rows)
    ordered = rows.take(order)
    work = _Work(ordered, cost, num_slots)
    ways = [np.arange(len(rows)) % num_ranks, work.spread(num_ranks), work.keep_together(num_ranks)]
    in_turn = ordered.group % num_ranks
    if len(np.unique(in_turn)) == num_ranks:
        ways.append(in_turn)

    def slowest_s(ranks: np.ndarray) -> float:
        of_ranks = (ordered.take(ranks == rank) for rank in range(num_ranks))
        return max(rollout_seconds(own, cost, num_slots, rates) for own in of_ranks)

    seconds = np.array([slowest_s(ranks) for ranks in ways])
    seconds[2] /= 1.0 - MIN_GAIN  # long rows together
    placed = np.empty(len(order), np.int64)
    placed[order] = ways[int(seconds.argmin())]
    return placed


def place_in_turn(num_groups: int, num_generations: int, num_ranks: int) -> np.ndarray:
    """The rank of each row, int64 [groups x generations]: groups in turn."""
    return np.repeat(np.arange(num_groups) % num_ranks, num_generations)


def up_to_cutoff(rows: Rows, launch: Launch) -> Rows:
    """What rows are expected to need until the rollout is over, where not all are trained on: none
    gets longer than the last that is."""
    longest = rows.expected.reshape(len(launch.groups), -1).max(axis=1)
    limit = np.sort(longest)[launch.num_trained - 1]
    expected, drafted = np.minimum(rows.expected, limit), np.minimum(rows.drafted, limit)
    return Rows(**{**vars(rows), "expected": expected, "drafted": drafted})


def admission_order(rows: Rows, own: np.ndarray, launch: Launch) -> list[int]:
    """The order in which a rank should admit its rows: longest first, so that they do not wait for
    slots. Where not all are trained on, first those of the groups that are expected to be among the
    shortest; of each other group one, which has to outlast them to be out; and then the rest, of
    which most need not be begun. own: int64, indices of the rank's rows.
    """
    ordered = own[longest_first(rows.take(own))].tolist() if len(own) else []
    if not launch.selects:
        return ordered
    longest = rows.expected.reshape(len(launch.groups), -1).max(axis=1)
    is_trained = np.zeros(len(launch.groups), bool)
    is_trained[np.argsort(longest, kind="stable")[: launch.num_trained]] = True
    seen: set[int] = set()
    first, probes, rest = [], [], []
    for index in ordered:
        group = index // launch.num_generations
        (first if is_trained[group] else rest if group in seen else probes).append(index)
        seen.add(group)
    return first + probes + rest


def longest_first(rows: Rows) -> np.ndarray:
    """The order in which ranks should admit rows, int64 [S]: by expected forwards, the rows of a
    prompt together."""
    return np.lexsort((rows.group, -expected_forwards(rows)))


def expected_forwards(rows: Rows) -> np.ndarray:
    """Forwards that each row needs if its draft holds, float64 [S]."""
    return np.maximum(rows.expected - rows.drafted, 0.0) + rows.drafted / TYPICAL_WINDOW


class _Work:
    """The rows of a rollout, longest first, with what each costs a rank."""

    def __init__(self, rows: Rows, cost: CostModel, num_slots: int):
        self.forward_s, row_s, token_s, multi_row_s, kv_s = cost.coefficients.tolist()
        self.num_slots, self.group = num_slots, rows.group
        self.forwards = expected_forwards(rows)
        context = rows.prompt_tokens + rows.expected / 2
        tokens = np.maximum(rows.expected, rows.drafted)
        verifications = rows.drafted / TYPICAL_WINDOW
        self.seconds = self.forwards * (row_s + kv_s * context) + token_s * tokens
        self.seconds += multi_row_s * verifications
        self.prefill_s = multi_row_s + token_s * rows.prompt_tokens

    def spread(self, num_ranks: int) -> np.ndarray:
        """Longest first, each to the rank whose time ends up smallest."""
        longest, total, seconds = (np.zeros(num_ranks) for _ in range(3))
        num_rows = np.zeros(num_ranks, np.int64)
        has_group = np.zeros((int(self.group.max(initial=-1)) + 1, num_ranks), bool)
        placed = np.empty(len(self.forwards), np.int64)
        for row, forwards in enumerate(self.forwards.tolist()):
            group = self.group[row]
            added_s = self.seconds[row] + np.where(has_group[group], 0.0, self.prefill_s[row])
            slots = np.maximum(np.maximum(longest, forwards), (total + forwards) / self.num_slots)
            end_s = seconds + added_s + self.forward_s * slots
            rank = np.lexsort((num_rows, np.round(end_s, 12)))[0]
            seconds[rank] += added_s[rank]
            longest[rank] = max(longest[rank], forwards)
            total[rank] += forwards
            num_rows[rank] += 1
            has_group[group, rank] = True
            placed[row] = rank
        return placed

    def keep_together(self, num_ranks: int) -> np.ndarray:
        """Consecutive rows to a rank, the longest ones to the first, so that the slowest rank takes
        as little time as it can: the limit is found by bisection."""
        size = len(self.forwards)
        is_new = np.append(True, self.group[1:] != self.group[:-1])
        own_s = self.seconds + np.where(is_new, self.prefill_s, 0.0)
        seconds = list(accumulate(own_s.tolist(), initial=0.0))
        total = list(accumulate(self.forwards.tolist(), initial=0.0))
        forwards = self.forwards.tolist()

        def rank_s(begin: int, end: int) -> float:
            slowest = max(forwards[begin], (total[end] - total[begin]) / self.num_slots)
            return self.forward_s * slowest + seconds[end] - seconds[begin]

        def ends(limit_s: float) -> list[int]:
            """Where each rank's rows end if each takes what it can within the limit, and leaves one
            row to each after it."""
            begin, found = 0, []
            for left in reversed(range(num_ranks)):
                last = max(size - left, min(begin + 1, size))
                fits = range(begin + 1, last + 1)
                end = begin + bisect_right(fits, limit_s, key=lambda end, b=begin: rank_s(b, end))
                begin = max(end, min(begin + 1, size))
                found.append(begin)
            return found

        low, high = 0.0, rank_s(0, size) if size else 0.0
        for _ in range(NUM_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if ends(middle)[-1] == size else (middle, high)
        counts = np.diff([0, *ends(high)])
        return np.repeat(np.arange(num_ranks), counts)
