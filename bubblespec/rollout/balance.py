"""Which rank generates which row, decided before a rollout so that the slowest rank ends soon.

A rank takes T = forward_s * forwards + the seconds of its rows' tokens + the prefill of its
prompts; its forwards are those of its longest row, or those that its slots need for all rows. A row
beside a long one makes each of that row's forwards slower. So where rows cost much (a CPU), the few
longest rows belong together, on a rank with little else; where the forward itself costs most (a GPU
below saturation), it hardly matters who is beside whom, and long rows are spread, since guesses of
lengths err.

A pure function of what all ranks know, so that they decide alike.
"""

import heapq
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from bubblespec.idle.rehearsal import TYPICAL_WINDOW, length_factors

NUM_BISECTIONS = 8
MIN_GAIN = 0.05  # of the expected time; what gains less is within the error of a cost model


@dataclass(frozen=True)
class Expected:
    """What S rows are expected to need. Rows with the same number in `groups` have the same
    prompt."""

    tokens: np.ndarray
    """float64 [S], left to decode."""
    margins: np.ndarray
    """float64 [S], how many more than that it easily gets, see `Outlook.guess`."""
    draft_tokens: np.ndarray
    """float64 [S], to verify beforehand."""
    groups: np.ndarray
    """int64 [S], from 0 to at most S - 1."""
    prompt_tokens: np.ndarray
    """int64 [S]."""


def place_rows(rows: Expected, cost: np.ndarray, *, num_ranks: int, num_slots: int) -> np.ndarray:
    """The rank of each row of a rollout, int64 [S]. Expects ranks to admit their rows longest first
    (`longest_first`).

    cost: coefficients of a `CostModel`, float64 [5]. No rank is without rows if there are as many
    rows as ranks.
    """
    order = longest_first(rows)
    work = _Work(rows, order, cost, num_slots)
    together, spread = work.keep_together(num_ranks), work.spread(num_ranks)
    # In the order of rows, not of places: a row's rank does not depend on where in the launch it
    # is.
    factors = length_factors(
        rows.margins[order], work.forwards, work.groups, np.random.default_rng(0)
    )
    gain = 1.0 - work.expected_s(together, num_ranks, factors) / work.expected_s(
        spread, num_ranks, factors
    )
    placed = np.empty(len(order), np.int64)
    placed[order] = together if gain > MIN_GAIN else spread
    return placed


def ends_s(
    rows: Expected, ranks: np.ndarray, cost: np.ndarray, *, num_ranks: int, num_slots: int
) -> np.ndarray:
    """Seconds that each rank takes if every row needs what is expected, float64 [num_ranks]; 0
    without rows. ranks: int64 [S]."""
    order, seconds = longest_first(rows), np.zeros(num_ranks)
    of_rows = _Work(rows, order, cost, num_slots).ends_s(
        ranks[order], num_ranks, np.ones((1, len(order)))
    )
    seconds[np.unique(ranks)] = of_rows[0]
    return seconds


def plain_s(
    lengths: np.ndarray,
    prompt_tokens: np.ndarray,
    cost: np.ndarray,
    *,
    num_slots: int,
    prefilled: int,
    overhead_s: float = 0.0,
) -> float:
    """Seconds that a rank takes for rows of these lengths without drafts, admitted in this order.

    lengths, prompt_tokens: float64 [S]; prefilled: tokens of the different prompts; overhead_s: of
    a forward, beside the engine.
    """
    forward_s, row_s, token_s, _, position_s = cost.tolist()
    seconds = (forward_s + overhead_s) * num_forwards(lengths, num_slots) + token_s * prefilled
    return seconds + float(
        (lengths * (row_s + token_s + position_s * (prompt_tokens + lengths / 2))).sum()
    )


def num_forwards(left: np.ndarray, num_slots: int) -> float:
    """Forwards that rows with so many tokens left take, admitted in this order; float64 [rows]."""
    if len(left) <= num_slots:
        return float(left.max(initial=0.0))
    slots = left[:num_slots].tolist()  # when each is free
    heapq.heapify(slots)
    for tokens in left[num_slots:].tolist():
        heapq.heapreplace(slots, slots[0] + tokens)
    return max(slots)


def longest_first(rows: Expected) -> np.ndarray:
    """The order in which ranks should admit rows, int64 [S]: by expected forwards, the rows of a
    prompt together."""
    return np.lexsort((rows.groups, -_forwards(rows)))


def _forwards(rows: Expected) -> np.ndarray:
    return rows.tokens + rows.draft_tokens / TYPICAL_WINDOW


class _Work:
    """The rows of a rollout, longest first, with what they cost."""

    def __init__(self, rows: Expected, order: np.ndarray, cost: np.ndarray, num_slots: int):
        forward_s, row_s, token_s, wide_row_s, position_s = cost.tolist()
        self.forward_s, self.num_slots = forward_s, num_slots
        self.forwards = _forwards(rows)[order]
        self.groups = rows.groups[order]
        tokens, drafts, prompts = (
            rows.tokens[order],
            rows.draft_tokens[order],
            rows.prompt_tokens[order],
        )
        positions = tokens * (prompts + drafts + tokens / 2) + drafts / TYPICAL_WINDOW * (
            prompts + drafts / 2
        )
        self.seconds = (
            (row_s + token_s) * tokens
            + (token_s + (row_s + wide_row_s) / TYPICAL_WINDOW) * drafts
            + position_s * positions
        )
        self.prefill_s = wide_row_s + token_s * prompts

    def spread(self, num_ranks: int) -> np.ndarray:
        """The rank of each row: longest first, each to the rank whose time ends up smallest."""
        longest, total, seconds, num_rows = ([0.0] * num_ranks for _ in range(4))
        held: list[set[int]] = [set() for _ in range(num_ranks)]
        forward_s, num_slots, placed = self.forward_s, self.num_slots, []
        columns = (
            self.forwards.tolist(),
            self.seconds.tolist(),
            self.groups.tolist(),
            self.prefill_s.tolist(),
        )
        for forwards, row_seconds, group, prefill_s in zip(*columns, strict=True):
            best, best_s = 0, float("inf")
            for rank in range(num_ranks):
                end_s = seconds[rank] + forward_s * max(
                    longest[rank], forwards, (total[rank] + forwards) / num_slots
                )
                if group not in held[rank]:
                    end_s += prefill_s
                if end_s < best_s or (end_s == best_s and num_rows[rank] < num_rows[best]):
                    best, best_s = rank, end_s
            seconds[best] += row_seconds + (0.0 if group in held[best] else prefill_s)
            longest[best], total[best] = max(longest[best], forwards), total[best] + forwards
            num_rows[best] += 1
            held[best].add(group)
            placed.append(best)
        return np.array(placed, np.int64)

    def keep_together(self, num_ranks: int) -> np.ndarray:
        """The rank of each row: consecutive rows to a rank, the longest ones to the first; the
        largest time of a rank is made as small as it gets, then that of the ranks after it."""
        size, forward_s, num_slots = len(self.forwards), self.forward_s, self.num_slots
        is_new = np.append(True, self.groups[1:] != self.groups[:-1])
        forwards, prefill = self.forwards.tolist(), np.where(is_new, 0.0, self.prefill_s).tolist()
        total = list(accumulate(forwards, initial=0.0))
        seconds = list(
            accumulate((self.seconds + np.where(is_new, self.prefill_s, 0.0)).tolist(), initial=0.0)
        )

        def rank_s(begin: int, end: int) -> float:
            slowest = max(forwards[begin], (total[end] - total[begin]) / num_slots)
            return forward_s * slowest + seconds[end] - seconds[begin] + prefill[begin]

        def cuts(begin: int, ranks: int, limit_s: float) -> list[int]:
            """Where each rank's rows end if each takes as many as it can within limit_s, but leaves
            one to each after it."""
            ends = []
            for left in reversed(range(ranks)):
                most = max(size - left, min(begin + 1, size))
                end = begin + bisect_right(
                    range(begin + 1, most + 1), limit_s, key=lambda end: rank_s(begin, end)
                )
                begin = max(end, min(begin + 1, size))
                ends.append(begin)
            return ends

        placed, begin = np.zeros(size, np.int64), 0
        for rank in range(num_ranks):
            if begin == size:
                break
            low, high = rank_s(begin, begin + 1), rank_s(begin, size)
            for _ in range(NUM_BISECTIONS if rank < num_ranks - 1 else 0):
                middle = (low + high) / 2
                low, high = (
                    (low, middle)
                    if cuts(begin, num_ranks - rank, middle)[-1] == size
                    else (middle, high)
                )
            end = cuts(begin, num_ranks - rank, high)[0]
            placed[begin:end] = rank
            begin = end
        return placed

    def expected_s(self, ranks: np.ndarray, num_ranks: int, factors: np.ndarray) -> float:
        """Seconds of the slowest rank, on average over scenarios; factors: float64 [scenarios, S],
        of the rows' work."""
        return float(self.ends_s(ranks, num_ranks, factors).max(axis=1).mean())

    def ends_s(self, ranks: np.ndarray, num_ranks: int, factors: np.ndarray) -> np.ndarray:
        """Seconds of each rank that has rows, in order, in each scenario, float64 [scenarios,
        ranks]."""
        order = np.argsort(ranks, kind="stable")
        begins = np.flatnonzero(np.diff(ranks[order], prepend=-1))
        forwards = (self.forwards * factors)[:, order]
        longest = np.maximum.reduceat(forwards, begins, axis=1)
        total = np.add.reduceat(forwards, begins, axis=1)
        seconds = np.add.reduceat((self.seconds * factors)[:, order], begins, axis=1)
        _, firsts = np.unique(self.groups * num_ranks + ranks, return_index=True)
        prefill = np.bincount(ranks[firsts], weights=self.prefill_s[firsts], minlength=num_ranks)[
            ranks[order][begins]
        ]
        return self.forward_s * np.maximum(longest, total / self.num_slots) + seconds + prefill
