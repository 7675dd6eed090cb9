"""Rows that change ranks within a rollout: a rank without rows takes over some from the rank that
is expected to end last.

That pays where rows wait for slots, and where rows beside the longest one slow its forwards down.
Where the forward itself costs most, a few rows end no sooner for being alone, and nothing moves. A
pure function of what all ranks know, so that they decide alike.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bubblespec.idle.draft_planning import Outlook
from bubblespec.rollout.balance import MIN_GAIN, num_forwards

MAX_MOVES = 64  # a tick
NO_MARGIN = 1e-9


@dataclass(frozen=True)
class Unfinished:
    """The N unfinished rows of all ranks, those of a rank in the order in which it admits them: as
    many as it has slots are in them, the others wait."""

    owners: np.ndarray
    """int64 [N], ranks."""
    so_far: np.ndarray
    """int64 [N], tokens that a row has."""
    left: np.ndarray
    """float64 [N], tokens that it is expected to get yet (`expected_left`)."""
    prompt_tokens: np.ndarray
    """int64 [N]."""


class Move(NamedTuple):
    """A row goes from one rank to another."""

    row: int
    """Its place in `Unfinished`."""
    source: int
    target: int
    saves_s: float = 0.0
    """Seconds by which the rollout is expected to end sooner, shared among the moves that this
    takes."""
    costs_s: float = 0.0
    """Seconds that the row is expected to take of its new rank."""
    ends_s: float = 0.0
    """Seconds until the rollout is expected to end if no row moves."""


def expected_left(
    so_far: np.ndarray, guesses: np.ndarray, margins: np.ndarray, outlook: Outlook
) -> np.ndarray:
    """Tokens that unfinished responses are expected to get beyond those they have, float64 [rows].

    so_far: int64 [rows]; guesses, margins: of the lengths, see `Outlook.guess`, float64 [rows]. A
    length is taken to be logistic around its guess: long before it, guess - so_far are left, and
    always more than 0. What has outgrown guess and margin is taken to get as long as the recent
    responses that have got so far.
    """
    scale = np.maximum(margins, NO_MARGIN) / np.log(
        9.0
    )  # the share 0.9 is below the guess + scale * log 9
    ahead = (guesses - so_far) / scale
    near = scale * np.logaddexp(0.0, ahead) * (1.0 + np.exp(-np.maximum(ahead, -30.0)))
    lengths = np.sort(outlook.lengths)
    shorter = np.searchsorted(lengths, so_far, side="right")
    num_longer = len(lengths) - shorter
    mean = np.append(np.cumsum(lengths[::-1])[::-1], 0)[shorter] / np.maximum(num_longer, 1)
    outgrown = np.where(num_longer > 0, mean, 2.0 * so_far) - so_far  # as Outlook.total
    return np.where(so_far < guesses + margins, near, outgrown)


def plan_moves(
    rows: Unfinished, cost: np.ndarray, *, num_ranks: int, num_slots: int, overhead_s: float
) -> list[Move]:
    """The moves of a tick, in the order in which their targets should admit the rows; none where
    they are not expected to end the rollout sooner by more than the share MIN_GAIN of what is left
    of it, and by more than overhead_s.

    Rows that wait go first, those to be admitted last before others; then rows in slots, the
    shortest first. cost: coefficients of a `CostModel`, float64 [5]; overhead_s: from the decision
    to the first forward of a moved row, without feeding its prompt and tokens again.
    """
    num_rows = np.bincount(rows.owners, minlength=num_ranks)
    if num_rows.all() or not num_rows.any():
        return []
    plan = _Plan(rows, cost, num_ranks, num_slots, overhead_s=overhead_s)
    targets = np.flatnonzero(num_rows == 0).tolist()
    began_s = best_s = max(plan.ends_s)
    least_gain_s = max(MIN_GAIN * began_s, overhead_s)
    if began_s - plan.longest_row_s <= least_gain_s:  # no row ends sooner than alone
        return []
    moves, num_best = [], 0
    for _ in range(2 * len(targets)):
        source = plan.ends_s.index(max(plan.ends_s))
        if source in targets or len(moves) == MAX_MOVES:
            break
        batch = plan.move(source, targets, MAX_MOVES - len(moves))
        if not batch:
            break
        moves += batch
        if max(plan.ends_s) < best_s:
            best_s, num_best = max(plan.ends_s), len(moves)
    if began_s - best_s <= least_gain_s:
        return []
    saves_s = (began_s - best_s) / num_best
    return [
        move._replace(saves_s=saves_s, costs_s=float(plan.alone_s[move.row]), ends_s=began_s)
        for move in moves[:num_best]
    ]


class _Plan:
    """Which rank has which rows, and when it ends."""

    def __init__(
        self,
        rows: Unfinished,
        cost: np.ndarray,
        num_ranks: int,
        num_slots: int,
        *,
        overhead_s: float,
    ):
        self.forward_s, row_s, token_s, wide_row_s, position_s = cost.tolist()
        self.left, self.num_slots = rows.left, num_slots
        context = rows.prompt_tokens + rows.so_far
        self.seconds = rows.left * (row_s + token_s + position_s * (context + (rows.left - 1) / 2))
        self.alone_s = self.forward_s * rows.left + self.seconds
        self.longest_row_s = float(self.alone_s.max())
        self.feeding_s = wide_row_s + token_s * context
        self.rows_of = [np.flatnonzero(rows.owners == rank) for rank in range(num_ranks)]
        self.delays_s = [
            0.0 if len(own) else overhead_s for own in self.rows_of
        ]  # before a rank decodes
        self.ends_s = [self._end_s(own, 0.0) for own in self.rows_of]

    def move(self, source: int, targets: list[int], limit: int) -> list[Move]:
        """Move at most `limit` rows to the target that ends first, as many as make the later of
        both ranks end soonest, if the targets that have no rows yet get as many; none if it ends no
        sooner."""
        target = min(targets, key=self.ends_s.__getitem__)
        num_targets = max(sum(len(self.rows_of[rank]) == 0 for rank in targets), 1)
        own, others = self.rows_of[source], self.rows_of[target]
        in_slots = own[: self.num_slots]
        order = np.concatenate(
            (own[self.num_slots :][::-1], in_slots[np.argsort(self.left[in_slots], kind="stable")])
        )
        if len(order) < 2:
            return []
        # When a rank ends from which, and one to which, the first 1, 2, ... rows move: as if slots
        # were filled evenly.
        left, seconds, feeding_s = (
            self.left[order],
            np.cumsum(self.seconds[order]),
            np.cumsum(self.feeding_s[order]),
        )
        total, longest_staying = np.cumsum(left), np.maximum.accumulate(left[::-1])[::-1][1:]
        staying = np.maximum(longest_staying, (total[-1] - total[:-1]) / self.num_slots)
        source_s = self.delays_s[source] + seconds[-1] - seconds[:-1] + self.forward_s * staying
        taken = np.maximum(np.maximum.accumulate(left), self.left[others].max(initial=0.0))
        taken = np.maximum(taken, (total + self.left[others].sum()) / self.num_slots)
        target_s = (
            self.delays_s[target]
            + feeding_s
            + seconds
            + self.seconds[others].sum()
            + self.forward_s * taken
        )
        counts = np.arange(1, min(len(order) - 1, limit) + 1)
        given = np.minimum(counts * num_targets, len(order) - 1)
        count = int(np.maximum(source_s[given - 1], target_s[counts - 1]).argmin()) + 1

        moved = order[:count][np.argsort(-left[:count], kind="stable")]
        stay, together = own[np.isin(own, moved, invert=True)], np.concatenate((others, moved))
        delay_s = self.delays_s[target] + float(feeding_s[count - 1])
        stay_s, together_s = (
            self._end_s(stay, self.delays_s[source]),
            self._end_s(together, delay_s),
        )
        if max(stay_s, together_s) >= self.ends_s[source]:
            return []
        self.rows_of[source], self.rows_of[target], self.delays_s[target] = stay, together, delay_s
        self.ends_s[source], self.ends_s[target] = stay_s, together_s
        return [Move(row, source, target) for row in moved.tolist()]

    def _end_s(self, rows: np.ndarray, delay_s: float) -> float:
        return (
            delay_s
            + self.forward_s * num_forwards(self.left[rows], self.num_slots)
            + float(self.seconds[rows].sum())
        )
