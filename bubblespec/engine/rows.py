"""What moves a planned forward on by the tokens that its rows have gained since it was planned.

A forward that is launched before the results of the one before are known feeds each row from where
the row stands by then. A proposal names the known tokens that it follows: where it agrees with what
the row has gained, the rest of it is fed, else nothing. The same rule runs twice, on the device for
the forward (ops/triton_rows.py), and here once the host reads the results.

Shape legend: M rows that sample, P tokens of proposals, S draft tokens.
"""

from typing import NamedTuple

import numpy as np

from bubblespec.engine.batch import Plan
from bubblespec.engine.ragged import ragged


class Standing(NamedTuple):
    """Where rows stand when a forward of theirs begins."""

    tokens: np.ndarray  # int64 [slots, max_length]
    slots: np.ndarray  # int64 [M]
    length: np.ndarray  # int64 [M], tokens that they have
    total: np.ndarray  # int64 [M], tokens at which they end, prompt included
    is_open: np.ndarray  # bool [M], whether they are fed: they have not ended, paused or left


def draft_of(plan: Plan, rows: Standing) -> tuple[np.ndarray, np.ndarray]:
    """Return the draft tokens that a plan feeds for its M rows: numbers int64 [M], and int64 [S].

    The token behind the draft has to fit into the row, too."""
    tokens, slots, length, total, is_open = rows
    known = plan.known[plan.slots]
    gained, width = length - known, plan.num_sampled - 1
    row, offset = ragged(plan.num_proposed)
    text = tokens.ravel()[slots[row] * tokens.shape[1] + known[row] + offset]
    is_wrong = (offset < gained[row]) & (text != plan.proposals)
    agrees = np.bincount(row[is_wrong], minlength=len(slots)) == 0
    left = np.minimum(np.minimum(plan.num_proposed - gained, width), total - 1 - length)
    num_draft = np.where(agrees & is_open, np.maximum(left, 0), 0)
    behind = offset - gained[row]
    return num_draft, plan.proposals[(behind >= 0) & (behind < num_draft[row])]
