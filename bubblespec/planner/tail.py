"""Whether the last rows of a rollout are done sooner if all ranks decode them together.

A forward of all ranks together reads a share of the weights on each of them, and has collectives in
every layer; the rows of all ranks are in it. How long such forwards take is measured at the start
of the run, as a cost of the same form as that of forwards of one rank.

What ranks give up for it, the idle time of those that would be done first, is left out: by the time
that few rows are left all drafting has been assigned, what has been drafted is kept, and the rest
goes on in the next idle time.
"""

import numpy as np

MIN_GAIN = 0.05  # of the time left; what gains less is within the error of a cost model


def use_tp_tail(
    rank_of: np.ndarray,
    left: np.ndarray,
    context: np.ndarray,
    cost: np.ndarray,
    tp_cost: np.ndarray,
    *,
    num_ranks: int,
    num_slots: int,
    overhead_s: float,
) -> bool:
    """Whether it ends the rollout sooner by more than the share MIN_GAIN of what is left of it, and
    by more than overhead_s. A pure function of what all ranks know, so that they decide alike.

    Of the N unfinished rows of all ranks, those of a rank in the order of admission: rank_of, int64
    [N]; left: tokens that each is expected to get yet, float64 [N]; context: prompt and tokens so
    far, int64 [N]. cost, tp_cost: coefficients of a `CostModel` each, float64 [5]; num_slots: of
    one rank; overhead_s: from the decision to the first forward, without feeding the rows' prompts
    and tokens again. Drafts shorten both ways by the same factor, and are not looked at.
    """
    own_s = 0.0
    for rank in range(num_ranks):
        own = rank_of == rank
        own_s = max(own_s, _seconds(left[own], context[own], cost, num_slots))
    _, _, token_s, wide_row_s, _ = tp_cost.tolist()
    fed_again_s = wide_row_s * len(left) + token_s * float(context.sum())
    together_s = overhead_s + fed_again_s + _seconds(left, context, tp_cost, len(left))
    return own_s - together_s > max(MIN_GAIN * own_s, overhead_s)


def _seconds(left: np.ndarray, context: np.ndarray, cost: np.ndarray, num_slots: int) -> float:
    """Until these rows are done, in one engine whose slots are filled in their order."""
    forward_s, row_s, token_s, _, position_s = cost.tolist()
    of_rows = left * (row_s + token_s + position_s * (context + (left - 1) / 2))
    free_at = np.zeros(num_slots)  # forwards after which each slot is free
    for tokens in left.tolist():
        free_at[free_at.argmin()] += tokens
    return forward_s * float(free_at.max()) + float(of_rows.sum())
