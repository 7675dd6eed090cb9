"""What goes into a forward and comes out of it, on the host, and what computes it.

A runner with a `depth` above 0 computes a forward before the host has the results of the one
before. Such a forward is planned by bounds: how many tokens its rows have by then, and whether they
have ended, is known where their tokens are, on the device. There a row's plan moves on by the
tokens that the row has gained meanwhile. A proposal names the known tokens that it follows: where
it agrees with what the row has gained, the rest of it is fed, else nothing. The same rule runs
twice, on the device for the forward (ops/triton_rows.py), and here once the host reads the results.

But a row whose draft turns out wrong in the first of two forwards gets nothing from its draft in
the second, which began behind it. With F seconds of a forward, H of the host, E tokens that a row
with a draft gains, and q the chance that not all of its draft is right, a forward behind drafts
brings a row E tokens in F + H seconds if it waits, and else (E + q) / (1 + q) in F: a wrong draft
is followed by a forward that brings one token. Rows without drafts bring one in any case. The rows
of a forward together decide.

A draft token is accepted while it is the token that the row samples there (sampling.py).

Shape legend: R active rows, N tokens in a forward, M rows that sample in it, S draft tokens, P
tokens of proposals, T = M + S positions sampled.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bubblespec.engine.arrays import ragged
from bubblespec.engine.pages import Pages
from bubblespec.types import Load, Row

WEIGHT = 0.1  # of the latest forward in averages


def num_accepted(token: np.ndarray, draft: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Count each row's draft tokens before the first wrong one, int64 [M].

    token: int64 [T], sampled in place of each draft token and after the last; draft: int64 [S];
    counts: int64 [M], draft tokens of each row."""
    if len(draft) == 0:
        return np.zeros(len(counts), np.int64)
    ends = (counts + 1).cumsum()
    is_wrong = np.ones(len(token), bool)  # True after each row's draft
    is_drafted = is_wrong.copy()
    is_drafted[ends - 1] = False
    is_wrong[is_drafted] = token[is_drafted] != draft
    wrong, first = is_wrong.nonzero()[0], ends - counts - 1
    return wrong[wrong.searchsorted(first)] - first


def num_gained(
    token: np.ndarray, accepted: np.ndarray, counts: np.ndarray, stops: tuple, *, limit: np.ndarray
) -> np.ndarray:
    """Count the tokens that rows gain by a verification, accepted and next ones, int64 [M].

    Rows are cut after a token in `stops`, and at `limit`, int64 [M], at least 1."""
    stop_at = np.where(is_stop(token, stops), ragged(counts + 1)[1], len(token))
    first_stop = np.minimum.reduceat(stop_at, np.cumsum(counts + 1) - (counts + 1))
    return np.minimum(np.minimum(accepted, first_stop) + 1, limit)


def is_stop(token: np.ndarray, stop_token_ids: tuple[int, ...]) -> np.ndarray:
    """Whether tokens are stop tokens, bool [T]; np.isin takes ten times as long for a few."""
    is_any = np.zeros(len(token), bool)
    for stop in stop_token_ids:
        is_any |= token == stop
    return is_any


@dataclass(frozen=True)
class SamplingParams:
    """The sampled distribution, and the tokens that end a response."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # probability of the nucleus; 1 truncates nothing
    top_k: int = 0  # number of best tokens; 0 truncates nothing
    stop_token_ids: tuple[int, ...] = ()
    min_length: int = 0  # response tokens before which stop tokens are barred

    @property
    def truncates(self) -> bool:
        """Whether some tokens may be barred."""
        has_bars = bool(self.stop_token_ids) and self.min_length > 0
        return has_bars or self.top_k > 0 or self.top_p < 1.0


class SamplerOutput(NamedTuple):
    """Tokens drawn at T positions, on the host; what follows a wrong draft token is invalid."""

    token: np.ndarray  # int64 [T]
    logprob: np.ndarray  # float [T], see `sample`


class Plan(NamedTuple):
    """A forward by what the host knows when it is planned: sizes, slots and proposals."""

    start: np.ndarray  # int64 [R], position of each active row's first new token
    count: np.ndarray  # type: ignore[assignment]  # tuple.count is not used
    """int64 [R], new tokens of each, drafts included."""
    known: np.ndarray  # int64 [R], tokens that each row is known to have; it may have more
    slots: np.ndarray  # int64 [M], ascending, of rows that sample: they feed all known tokens
    num_proposed: np.ndarray  # int64 [M], tokens of these rows' proposals, which follow known ones
    proposals: np.ndarray  # int64 [P], the proposals one after the other
    load: Load

    @property
    def num_sampled(self) -> np.ndarray:
        """Positions sampled for each row that samples, int64 [M]: as many as may count."""
        return (self.start + self.count - self.known)[self.slots] + 1


class RowUpdates(NamedTuple):
    """Rows whose text the host has written: begun, continued behind an environment's tokens."""

    slots: np.ndarray  # int64 [W]
    length: np.ndarray  # int64 [W], tokens that each row has
    prompt_length: np.ndarray  # int64 [W]
    total: np.ndarray  # int64 [W], tokens at which it ends, prompt included
    tokens: np.ndarray  # int64 [sum of lengths], row after row


@dataclass
class Batch:
    """What a forward feeds, all on the host."""

    start: np.ndarray  # int64 [R], positions of each active row that have keys and values
    count: np.ndarray  # int64 [R], new tokens of each
    index: np.ndarray  # int64 [2, N], slot and position of each new token, row after row
    tokens: np.ndarray  # int64 [N], the new tokens
    slots: np.ndarray  # int64 [M], ascending, of rows that sample: they feed all known tokens
    generated: np.ndarray  # int64 [M], response tokens that these rows have
    num_draft: np.ndarray  # int64 [M], draft tokens of these rows
    draft: np.ndarray  # int64 [S], the drafts one after the other
    load: Load


class RowPosition(NamedTuple):
    """Where rows stand when a forward of theirs begins."""

    tokens: np.ndarray  # int64 [slots, max_length]
    slots: np.ndarray  # int64 [M]
    length: np.ndarray  # int64 [M], tokens that they have
    total: np.ndarray  # int64 [M], tokens at which they end, prompt included
    is_open: np.ndarray  # bool [M], whether they are fed: they have not ended, paused or left


def draft_of(plan: Plan, rows: RowPosition) -> tuple[np.ndarray, np.ndarray]:
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


class OverlapPolicy:
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


class Runner:
    """What computes a forward: a model (`ModelRunner`), or in virtual time a recorded text."""

    num_slots: int
    max_length: int  # prompt plus response in tokens
    max_num_batched_tokens: int  # in a forward, at least num_slots
    pages: Pages | None  # of keys and values; None where each slot has room for a whole row
    is_shared = False  # whether ranks compute each forward together
    window: int | None = None
    """Most tokens that a row with a draft may feed, where rows have states; None where not."""

    @property
    def supports_overlap(self) -> bool:
        """Whether forwards are launched by plans, see `launch_ahead`."""
        return False

    @property
    def depth(self) -> int:
        """Forwards that are launched before the results of the one before are read."""
        return 0

    def launch(self, batch: Batch, params: SamplingParams) -> Callable[[], SamplerOutput]:
        """Feed the batch and return the call that waits for its end."""
        raise NotImplementedError

    def launch_ahead(
        self, plan: Plan, texts: RowUpdates, params: SamplingParams, batch: Batch | None
    ) -> Callable[[], SamplerOutput]:
        """Feed a plan's rows from where they stand by then.

        texts: rows whose text has changed other than by forwards; batch: what is fed, where `depth`
        is 0. Of each row that samples `Plan.num_sampled` positions are drawn; those behind its
        draft (see `draft_of`) are invalid."""
        raise NotImplementedError

    def place(self, slot: int, row: Row) -> None:
        """Note that a row, with its tokens so far in it, comes into a slot."""

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first `length` positions of a row to slot `target`, where the row continues."""

    def share(
        self, source: np.ndarray, target: np.ndarray, length: np.ndarray, states: np.ndarray
    ) -> None:
        """Give slots `target` the first `length` positions of slots `source`, int64 [n] each.

        states: int64 [n], slots that have just read these, or `num_slots` for what was kept."""

    def keep(self, slot: int) -> None:
        """Keep the states of a slot for `share`, in place of those kept before."""

    def reset(self) -> None:
        """Note that no slot has a row, and that the weights may have changed."""

    def release(self) -> None:
        """Give the memory of keys and values back until the next forward. No slot has a row."""
