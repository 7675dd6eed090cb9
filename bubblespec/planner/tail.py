"""Whether the last rows of a rollout are done sooner if all ranks decode them together.

In a forward of all ranks together each reads a share of the weights, and there are collectives in
every layer; the rows of all ranks are in it. How long such forwards take is measured at the start
of the run, as a cost model of its own. What ranks give up for it, the idle time of those that would
be done first, is left out: by the time that few rows are left its jobs have been given to ranks.
"""

import numpy as np

from bubblespec.planner.costs import CostModel, prefill_seconds, rollout_seconds
from bubblespec.planner.rows import Rows

MIN_GAIN = 0.05  # of what is left of the rollout; less is within the error of a cost model


def use_tp_tail(
    rows: Rows,
    rank_of: np.ndarray,
    cost: CostModel,
    tp_cost: CostModel,
    *,
    num_slots: int,
    overhead_s: float,
) -> bool:
    """Whether it ends the rollout sooner by more than MIN_GAIN of what is left of it, and by more
    than overhead_s. The same on every rank.

    rows: the unfinished ones of all ranks; rank_of: int64 [S]; cost, tp_cost: of forwards of one
    rank, and of all together; num_slots: of one rank; overhead_s: from the decision to the first
    forward, without feeding the rows' prompts and tokens again. Drafts shorten both ways by the
    same factor, and are not looked at.
    """

    def alone(own: Rows) -> float:  # their prompts and tokens are in the cache
        return rollout_seconds(own, cost, num_slots) - prefill_seconds(own, cost)

    alone_s = max(alone(rows.take(rank_of == rank)) for rank in np.unique(rank_of))
    together_s = overhead_s + rollout_seconds(rows, tp_cost, len(rows))
    return alone_s - together_s > max(MIN_GAIN * alone_s, overhead_s)
