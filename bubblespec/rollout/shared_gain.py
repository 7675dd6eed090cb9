"""Whether the last rows of a rollout are done sooner if all ranks decode them together.

A forward of all ranks together has a share of the weights to read on each of them, and collectives
in every layer; the rows of all ranks are in it. How long such forwards take was measured at the
start of the run, as a cost of the same form as that of forwards of one rank. A pure function of
what all ranks know, so that they decide alike.

What ranks give up for it is left out: the idle time of those that would be done first, in which
they would draft coming steps. By the time that few rows are left all such work has been given to
ranks, so no offer says what it is worth, and how far a rank is with it the others do not know. What
has been drafted by then is kept, and goes on in the next idle time.
"""

import numpy as np

from bubblespec.rollout.balance import MIN_GAIN, num_forwards
from bubblespec.rollout.moves import Unfinished


def pays(
    rows: Unfinished,
    cost: np.ndarray,
    shared_cost: np.ndarray,
    *,
    num_ranks: int,
    num_slots: int,
    overhead_s: float,
) -> bool:
    """Whether it ends the rollout sooner by more than the share MIN_GAIN of what is left of it, and
    by more than overhead_s.

    cost, shared_cost: coefficients of a `CostModel` each, float64 [5]; num_slots: of one rank;
    overhead_s: from the decision to the first forward, without feeding the rows' prompts and tokens
    again. Drafts shorten both ways by the same factor, and are not looked at.
    """
    own_s = max(
        _seconds(rows, np.flatnonzero(rows.owners == rank), cost, num_slots)
        for rank in range(num_ranks)
    )
    _, _, token_s, wide_row_s, _ = shared_cost.tolist()
    everything = np.arange(len(rows.left))
    fed_again = wide_row_s * len(everything) + token_s * float(
        (rows.prompt_tokens + rows.so_far).sum()
    )
    together_s = overhead_s + fed_again + _seconds(rows, everything, shared_cost, len(everything))
    return own_s - together_s > max(MIN_GAIN * own_s, overhead_s)


def _seconds(rows: Unfinished, chosen: np.ndarray, cost: np.ndarray, num_slots: int) -> float:
    """Until these rows are done, in one engine."""
    forward_s, row_s, token_s, _, position_s = cost.tolist()
    left, context = rows.left[chosen], (rows.prompt_tokens + rows.so_far)[chosen]
    of_rows = left * (row_s + token_s + position_s * (context + (left - 1) / 2))
    return forward_s * num_forwards(left, num_slots) + float(of_rows.sum())
