"""What each row proposes in a forward: its run-ahead draft, or a suffix match, in a window that pays.

Implements the engine's `Proposer`. It decides about time only: the engine accepts just what a row would have sampled.
"""

import time
from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from bubblespec.drafts.bubble import Draft
from bubblespec.drafts.suffix import NOTHING, OWN, SOURCE_NAMES, GroupIndex, History
from bubblespec.records import Row
from bubblespec.schedule.windows import WINDOWS, CostModel, Survival, choose_windows, match_bucket

ALIGNED = "aligned"  # the row has followed its run-ahead draft from the start
PRIORS = {ALIGNED: 0.95, "own": 0.8, "sibling": 0.6, "self": 0.5, "history": 0.5}
MAX_BACKOFF = 16


@dataclass
class _RowState:
    row: Row
    draft: Draft | None
    age: int = 0
    is_aligned: bool = False
    num_gained: int = 0
    kind: tuple | None = None  # of the proposal under verification


@dataclass
class SpeculationStats:
    """Counts of one rollout on one rank.

    num_covered: tokens for which there was a proposal, right or wrong; num_looked_up: rows for which one was looked for, rows of
    coming steps among them, summed over forwards; by_source, by_age: [drafted, accepted]; aligned: [tokens tried, accepted] of
    drafts up to their first mismatch, that included; left: [tokens gained by rows that have left their draft, how many of them
    from it]; accepted_lengths: verifications by accepted tokens, binned by WINDOWS.
    """

    num_row_forwards: int = 0
    num_gained: int = 0
    num_draft: int = 0
    num_accepted: int = 0
    num_covered: int = 0
    num_looked_up: int = 0
    aligned: list[int] = field(default_factory=lambda: [0, 0])
    left: list[int] = field(default_factory=lambda: [0, 0])
    by_source: dict[str, list[int]] = field(default_factory=dict)
    by_age: dict[int, list[int]] = field(default_factory=dict)
    accepted_lengths: np.ndarray = field(default_factory=lambda: np.zeros(len(WINDOWS), np.int64))
    seconds: float = 0.0  # spent on proposing and on observing what came of it


class RowSpeculator:
    """Proposals for the rows it knows (`track`). method: bubble (the draft, up to its first mismatch), suffix, or both."""

    def __init__(self, method: str, cost: CostModel, fixed_window: int | None = None, clock=time):
        """fixed_window: propose this many tokens always, instead of planning (for ablation); clock: see `Ranks`."""
        self.uses_bubble, self.uses_suffix = "bubble" in method, "suffix" in method
        self.cost, self.fixed_window, self.clock = cost, fixed_window, clock
        self.survival = Survival()
        self.history: History | None = None
        self.stats = SpeculationStats()
        self._step = -1
        self._pause = self._backoff = 0  # forwards to go without looking for proposals
        self._overhead_s = 0.0  # of looking for them, exponentially weighted
        self._rows: dict[int, _RowState] = {}
        self._members: dict[tuple[int, int], list[_RowState]] = {}  # by (step, uid)
        self._groups: dict[tuple[int, int], GroupIndex] = {}  # built when one of their rows first needs them
        self._not_indexed: dict[tuple[int, int], list[tuple[_RowState, np.ndarray]]] = {}  # tokens that a group does not have yet

    def begin(self, step: int) -> None:
        """A new rollout: forget rows and groups, keep estimates. The statistics count rows of `step`, not run-ahead rows, and go
        on if the step has further rollouts."""
        if step != self._step:
            self.stats = SpeculationStats()
        self._step = step
        self._rows.clear()
        self._members.clear()
        self._groups.clear()
        self._not_indexed.clear()
        self._pause = self._backoff = 0  # the last rollout's end, beyond its drafts, says nothing about this one's beginning
        self.survival.forget(0.05)

    def track(self, row: Row, draft: Draft | None, version: int) -> None:
        """Propose for a row from now on. version: updates of the current weights."""
        state = _RowState(row, draft if self.uses_bubble else None)
        if state.draft is not None:
            state.age = version - draft.version
            state.is_aligned = len(row.tokens) == 0
        self._rows[id(row)] = state
        key = (row.id.visit, row.id.uid)
        self._members.setdefault(key, []).append(state)
        if state.draft is not None and key in self._groups:
            self._groups[key].add_draft(row.id.sample, state.draft.tokens)
        if self.uses_suffix and len(row.tokens):
            self._not_indexed.setdefault(key, []).append((state, row.tokens))

    def propose(self, rows: list[Row], lengths: np.ndarray, room: np.ndarray, budget: int) -> list[np.ndarray | None]:
        """As `Proposer` has it: the windows of all rows together are planned. Nothing for rows that are not tracked."""
        drafts: list[np.ndarray | None] = [None] * len(rows)
        if self._pause:
            self._pause -= 1
            return drafts
        started = self.clock.perf_counter()
        self.stats.num_looked_up += len(rows)
        longest = min(int(WINDOWS[-1]), budget) if self.fixed_window is None else self.fixed_window
        survival, available = np.zeros(len(rows)), np.zeros(len(rows), np.int64)
        for i, (row, length, fits) in enumerate(zip(rows, lengths.tolist(), room.tolist(), strict=True)):
            state = self._rows.get(id(row))
            if state is None or fits <= 0:
                continue
            tokens, state.kind = self._candidate(row, state, length, min(longest, fits))
            if len(tokens):
                drafts[i], available[i] = tokens, len(tokens)
                survival[i] = self.survival.estimate(state.kind, PRIORS[state.kind[0]])
        if self.fixed_window is not None:
            self.stats.seconds += self.clock.perf_counter() - started
            return drafts
        positions = int(lengths.sum()) + sum(len(row.prompt) for row in rows)
        windows, is_worth_it = choose_windows(survival, available, self.cost, positions, budget, self._overhead_s)
        if is_worth_it:
            self._backoff = 0
        else:  # look again after a while, less and less often
            self._backoff = min(2 * self._backoff + 1, MAX_BACKOFF)
            self._pause = self._backoff
        drafts = [draft[:n] if n else None for draft, n in zip(drafts, windows.tolist(), strict=True)]
        seconds = self.clock.perf_counter() - started
        self.stats.seconds += seconds
        self._overhead_s += 0.1 * (seconds - self._overhead_s)
        return drafts

    def observe(self, rows: list[Row], tokens: list[np.ndarray], num_draft: np.ndarray, num_accepted: np.ndarray) -> None:
        """As `Proposer` has it: learn from what was accepted, and take in the new tokens."""
        stats, started = self.stats, self.clock.perf_counter()
        for row, gained, drafted, accepted in zip(rows, tokens, num_draft.tolist(), num_accepted.tolist(), strict=True):
            state = self._rows.get(id(row))
            if state is None:
                continue
            is_counted = row.id.visit == self._step
            if is_counted:
                stats.num_row_forwards += 1
                stats.num_gained += len(gained)
            if drafted:
                self.survival.observe(state.kind, drafted, accepted)
                if is_counted:
                    stats.num_draft += drafted
                    stats.num_accepted += accepted
                    stats.num_covered += min(accepted + 1, drafted)
                    stats.accepted_lengths[bisect_right(WINDOWS, accepted) - 1] += 1
                    _count(stats.by_source, state.kind[0], drafted, accepted)
                    if state.kind[0] == ALIGNED:
                        _count(stats.by_age, state.age, drafted, accepted)
                        stats.aligned[0] += min(accepted + 1, drafted)
                        stats.aligned[1] += accepted
            if is_counted and state.draft is not None and not state.is_aligned and state.num_gained < len(state.draft.tokens):
                stats.left[0] += len(gained)
                stats.left[1] += accepted if drafted and state.kind[0] == SOURCE_NAMES[OWN] else 0
            if state.is_aligned:
                expected = state.draft.tokens[state.num_gained : state.num_gained + len(gained)]
                state.is_aligned = len(expected) == len(gained) and bool((expected == gained).all())
            state.num_gained += len(gained)
            if self.uses_suffix:
                self._not_indexed.setdefault((row.id.visit, row.id.uid), []).append((state, gained))
        stats.seconds += self.clock.perf_counter() - started

    def _candidate(self, row: Row, state: _RowState, length: int, longest: int) -> tuple[np.ndarray, tuple | None]:
        """Tokens that may come next, and their kind for the survival estimate."""
        if state.is_aligned and length < len(state.draft.tokens):
            return state.draft.tokens[length : length + longest], (ALIGNED, min(state.age, 8))
        if not self.uses_suffix:
            return NOTHING, None
        tokens, match, source = self._group(row).propose(row.id.sample, longest)
        return tokens, (SOURCE_NAMES[source], match_bucket(match))

    def _group(self, row: Row) -> GroupIndex:
        """The row's group index with all tokens of all its rows in it."""
        key = (row.id.visit, row.id.uid)
        group = self._groups.get(key)
        if group is None:
            history = self.history.get(row.id.uid) if self.history is not None else ()
            group = self._groups[key] = GroupIndex(history, prompt=row.prompt)
            for state in self._members[key]:
                if state.draft is not None:
                    group.add_draft(state.row.id.sample, state.draft.tokens)
        gained: dict[int, list[np.ndarray]] = {}  # by sample, so that each grows but once
        for state, tokens in self._not_indexed.pop(key, ()):
            gained.setdefault(state.row.id.sample, []).append(tokens)
        for sample, parts in gained.items():
            group.extend(sample, np.concatenate(parts) if len(parts) > 1 else parts[0])
        return group


def _count(table: dict, key, num_draft: int, num_accepted: int) -> None:
    entry = table.setdefault(key, [0, 0])
    entry[0] += num_draft
    entry[1] += num_accepted
