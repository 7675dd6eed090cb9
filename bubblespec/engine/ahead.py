"""Forwards launched before the results of the one before are read: when, and what counts of them.

Then a GPU does not wait for the host between them. Such a forward feeds each row from where the row
stands by then. A proposal names the known tokens that it follows: where it agrees with what the row
has gained, the rest of it is fed, else nothing. The same rule runs twice, on the device for the
forward (ops/triton_rows.py), and here once the host reads the results.

But a row whose draft turns out wrong in the first of two forwards gets nothing from its draft in
the second, which began behind it. With F seconds of a forward, H of the host, E tokens that a row
with a draft gains, and q the chance that not all of its draft is right, a forward behind drafts
brings a row E tokens in F + H seconds if it waits, and else (E + q) / (1 + q) in F: a wrong draft
is followed by a forward that brings one token. Rows without drafts bring one in any case. The rows
of a forward together decide.

Shape legend: M rows that sample, P tokens of proposals, S draft tokens.
"""

import time
from typing import Any, NamedTuple

import numpy as np

from bubblespec.engine.arrays import ragged
from bubblespec.engine.batch import Plan

WEIGHT = 0.1  # of the latest forward in averages


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


class Pace:
    """Averages over the forwards of an engine."""

    def __init__(self, clock: Any = time, is_shared: bool = False):
        """is_shared: whether ranks compute forwards together, and so have to decide alike."""
        self.clock, self.is_shared = clock, is_shared
        # F, H, E and q; not numbers before there is a first one.
        self.forward_s = self.host_s = self.gain = self.wrong = np.nan
        self._ready_s = np.nan  # when the host has had the latest results

    def goes_ahead(self, num_rows: int, num_drafted: int) -> bool:
        """Whether not to wait for a forward of rows of which some verify drafts."""
        if num_drafted == 0 or self.is_shared:
            return num_drafted == 0
        plain, wrong = num_rows - num_drafted, self.wrong
        waits = (plain + num_drafted * self.gain) / (self.forward_s + self.host_s)
        behind = (self.gain + wrong) / (1 + wrong)
        return bool((plain + num_drafted * behind) / self.forward_s > waits)

    def landed(self, launched_s: float, waits_since_s: float) -> None:
        """Note that a forward's results have been read. waits_since_s: when the host was done."""
        now_s = self.clock.perf_counter()
        began_s = np.fmax(launched_s, self._ready_s)
        self.forward_s = _averaged(self.forward_s, now_s - began_s)
        if waits_since_s >= self._ready_s:
            self.host_s = _averaged(self.host_s, waits_since_s - self._ready_s)
        self._ready_s = now_s

    def verified(self, num_draft: np.ndarray, accepted: np.ndarray, gained: np.ndarray) -> None:
        """Note the outcome of rows with drafts, int64 [rows] each."""
        has = num_draft > 0
        if has.any():
            self.gain = _averaged(self.gain, float(gained[has].mean()))
            is_wrong = (accepted < num_draft)[has]
            self.wrong = _averaged(self.wrong, float(is_wrong.mean()))

    def pause(self) -> None:
        """Note that the next forward is no successor of the last one."""
        self._ready_s = np.nan


def _averaged(average: float, value: float) -> float:
    return value if np.isnan(average) else average + WEIGHT * (value - average)
