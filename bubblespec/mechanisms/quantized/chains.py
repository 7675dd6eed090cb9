"""How long chains of draft tokens get: one more token where it promises more tokens per second.

A chain is drafted token by token. By how much a token has won, its lead, says how sure it is: the
policy's noise is the same and its logits are close, so a clear winner is nearly always its choice
too. Whether a row drafts another token depends on the chance that all tokens of its chain so far
are right, on the seconds of the copy's forward, and on those of a longer verification.

Shape legend: M rows that may continue.
"""

import numpy as np

from bubblespec.planner.costs import CostModel
from bubblespec.planner.survival import TRIED, Survival
from bubblespec.planner.windows import MIN_GAIN

LEADS = np.array((0.1, 0.25, 0.5, 1.0, 2.0, 4.0))  # leads between two of these are alike
PRIORS = (0.5, 0.6, 0.7, 0.85, 0.95, 0.98, 0.99)  # chance that a token with such a lead is right
ANY, PRIOR = len(PRIORS), 0.93  # of a token of any lead
AHEAD = np.array((1, 2, 4))  # further tokens that a decision considers


class Leads:
    """How often tokens were right, by their lead."""

    def __init__(self):
        self.survival = Survival()
        kinds = [("lead", n) for n in range(len(PRIORS))] + [("any",)]
        self.survival.add(kinds, [*PRIORS, PRIOR])

    def chances(self, lead: np.ndarray) -> np.ndarray:
        """Return the chance that tokens with these leads are right, if all before them are."""
        return self.survival.estimates[LEADS.searchsorted(lead)]

    @property
    def mean(self) -> float:
        """The chance that a token is right, if all before it are, whatever its lead."""
        return float(self.survival.estimates[ANY])

    def observe(self, lead: np.ndarray, is_right: np.ndarray) -> None:
        """Count tokens whose predecessors were all right: their leads, and whether they were."""
        kind, tried = LEADS.searchsorted(lead), self.survival.counts[TRIED:, 1]
        for row, weights in zip(tried, (None, is_right), strict=True):
            row[:ANY] += np.bincount(kind, weights, ANY)
        tried[:, ANY] += len(lead), is_right.sum()


def rows_to_continue(
    chance: np.ndarray,
    mean: float,
    *,
    gained: float,
    drafted: int,
    spent_s: float,
    active: int,
    kv_tokens: int,
    cost: CostModel,
    copy_cost: CostModel,
) -> np.ndarray:
    """Return the rows that draft another token, int64 indices, best first; none if that costs more.

    The first token must gain as much as a first window.

    chance: float64 [M], that a row's chain is right so far; mean: that one more token is; gained,
    drafted, spent_s: tokens that the coming forward of the policy is expected to gain, draft tokens
    and seconds spent on them, all so far; active, kv_tokens: rows of that forward and the positions
    that they attend to; cost, copy_cost: of the policy's forwards and the copy's."""
    order = np.argsort(-chance, kind="stable")
    rows = np.arange(1, len(order) + 1)[:, None]
    more = chance[order].cumsum()[:, None] * np.cumsum(mean ** np.arange(1, AHEAD[-1] + 1))
    mean_kv = kv_tokens / active
    one_s = copy_cost.seconds(rows, rows, 0, rows * mean_kv)
    verify_s = cost.seconds(active, active + drafted + rows * AHEAD, 1, kv_tokens)
    now_s = cost.seconds(active, active + drafted, min(drafted, 1), kv_tokens)
    rate = (gained + more[:, AHEAD - 1]) / (spent_s + AHEAD * one_s + verify_s)
    best = rate.max(axis=1)
    least = 1.0 if spent_s else MIN_GAIN
    if best.max() <= least * gained / (spent_s + now_s):
        return order[:0]
    return order[: int(best.argmax()) + 1]
