"""Draft tokens of each row in a forward: of the first source with any, in a window that pays.

Implements the engine's `Proposer`; sources are in sources.py, windows in planner/windows.py. Rows
are known by `Row.number`.

Shape legend: R rows, K kinds of proposals.
"""

import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from bubblespec.draft.sources import (
    MAX_AGE,
    DraftSource,
    Proposals,
    TextMatches,
    TrackedRows,
    check_proposals,
    load_source,
)
from bubblespec.draft.store import TextStore
from bubblespec.draft.suffix import OWN, SOURCE_NAMES
from bubblespec.engine.arrays import spans
from bubblespec.planner.costs import CostModel
from bubblespec.planner.survival import ALIGNED, OFFERED, PROPOSED, AcceptanceStats
from bubblespec.planner.windows import WINDOWS, choose_windows
from bubblespec.records import Acceptance
from bubblespec.types import Row

PRIORS = {ALIGNED: 0.95, "own": 0.8, "sibling": 0.6}  # survival by source
PRIOR = 0.5  # survival of another source
ALWAYS_WINDOW = 6  # draft tokens that are verified whatever the cost


class Proposer:
    """Draft tokens for the rows that it tracks, on one rank over a run."""

    def __init__(
        self,
        sources: Sequence[DraftSource],
        cost: CostModel,
        *,
        always: bool = False,
        clock: Any = time,
    ):
        """Trust sources in order; always: propose ALWAYS_WINDOW tokens whatever the cost."""
        self.cost, self.always, self.clock = cost, always, clock
        self.survival = AcceptanceStats()
        self.sources: list[DraftSource] = []
        self._kinds: list[np.ndarray] = []  # numbers in `survival` of each source's kinds
        for source in sources:
            self.add(source)
        self._start()

    def add(self, source: DraftSource) -> None:
        """Add a source that is queried after all others but last ones. Only between rollouts."""
        priors = [PRIORS.get(name, PRIOR) for name, *_ in source.kinds]
        place = len(self.sources)
        if not source.is_last:
            place -= sum(known.is_last for known in self.sources)
        self.sources.insert(place, source)
        self._kinds.insert(place, self.survival.add(source.kinds, priors))

    @property
    def enabled_sources(self) -> list[DraftSource]:
        """Sources that may propose something."""
        return [source for source in self.sources if source.is_enabled]

    @property
    def is_used(self) -> bool:
        """Whether any source was to propose, failed ones included: the same on all ranks."""
        return any(source.is_enabled or source.problem for source in self.sources)

    @property
    def needs_results(self) -> bool:
        """Whether a forward has to wait for the results of the one before."""
        return any(source.needs_results for source in self.enabled_sources)

    def begin(self) -> None:
        """Begin a rollout: forget rows, reset the counts, and keep the estimates."""
        self._start()
        for source in self.sources:
            source.begin(self.tracked)
        self.survival.begin()

    def _start(self) -> None:
        self._acceptance = Acceptance()
        names = [name for name, *_ in self.survival.kinds]
        self._is_own = np.array([name == SOURCE_NAMES[OWN] for name in names], bool)
        self._spent_s, self._num_queried = 0.0, 0
        self.tracked = TrackedRows()

    @property
    def acceptance(self) -> Acceptance:
        """Outcome of the drafts of this rollout."""
        counts = self._acceptance
        counts.by_source = self.survival.by_source()
        totals = self.survival.counts[PROPOSED:, 1].sum(axis=1).astype(int).tolist()
        counts.draft_tokens, counts.covered_tokens, counts.accepted_tokens = totals
        return counts

    def track(self, row: Row, version: int, is_counted: bool = True) -> None:
        """Propose for a row from now on.

        version: updates of the current weights; is_counted: whether the row is of this step."""
        age = 0 if row.draft is None else min(version - row.draft.version, MAX_AGE)
        self.tracked.add(row, age, is_counted)
        for source in self.sources:
            source.track(row.number)

    def extend(self, row: Row, ids: np.ndarray) -> None:
        """Append an observation to a row's tokens."""
        self._extend(np.array([row.number]), ids, np.array([len(ids)]))

    def take_spent(self) -> tuple[float, int]:
        """Return seconds spent here and rows queried since the last call."""
        spent = self._spent_s, self._num_queried
        self._spent_s, self._num_queried = 0.0, 0
        return spent

    def propose(
        self,
        rows: list[Row],
        lengths: np.ndarray,
        room: np.ndarray,
        budget: int,
        in_flight: np.ndarray | int = 0,
    ) -> tuple[np.ndarray, np.ndarray]:
        """See the engine's `Proposer`; all rows are tracked.

        The windows of all rows are planned together. They are of what follows the tokens that may
        be gained in flight."""
        numbers = numbers_of(rows)
        found = self.find(numbers, room, budget, in_flight)
        if found is None:
            return np.empty(0, np.int64), np.zeros(len(rows), np.int64)
        started, windows = self.clock.perf_counter(), found.count
        if not self.always:
            positions = int(lengths.sum() + self.tracked.prompt_length[numbers].sum())
            chance = self.survival.estimates[found.kind]
            windows = choose_windows(chance, windows, self.cost, positions, budget=budget)
        proposed = fill(found, windows, in_flight)
        self._spent_s += self.clock.perf_counter() - started
        return proposed

    def find(
        self, numbers: np.ndarray, room: np.ndarray, budget: int, in_flight: np.ndarray | int = 0
    ) -> Proposals | None:
        """Return the proposals for rows, see `propose`; None where no source is asked.

        Each begins with the tokens in flight, which its count leaves out; kinds are those of
        `survival`."""
        must_wait = bool(np.any(in_flight))
        asked_sources = [
            (source, kinds)
            for source, kinds in zip(self.sources, self._kinds, strict=True)
            if source.is_enabled and not (must_wait and source.needs_results)
        ]
        if not asked_sources:
            return None
        started = self.clock.perf_counter()
        self._num_queried += len(numbers)
        limits = np.minimum(room, ALWAYS_WINDOW if self.always else min(int(WINDOWS[-1]), budget))
        asked = (limits > 0).nonzero()[0]
        limits = limits + in_flight
        texts: list[np.ndarray] = []
        text, begin, count, kind = np.zeros((4, len(numbers)), np.int64)
        chances = self.survival.estimates
        for source, kinds in asked_sources:
            is_open = count[asked] == 0
            if chance := source.chance:
                is_open |= chances[kind[asked]] < chance
            if not len(some := asked[is_open]):
                continue
            found = source.propose(numbers[some], limits[some])
            if source.path is not None:
                check_proposals(source, found, limits[some])
            given = found.count.nonzero()[0]
            if not len(given):
                continue
            some = some[given]
            begin[some], count[some] = found.begin[given], found.count[given]
            text[some], kind[some] = len(texts), kinds[found.kind[given]]
            self.survival.counts[OFFERED, 1, kind[some]] += 1
            texts.append(found.tokens)
        tokens = texts[0] if texts else np.empty(0, np.int64)
        if len(texts) > 1:
            rows = [text == number for number in range(len(texts))]
            parts = zip(texts, rows, strict=True)
            tokens = np.concatenate([known[spans(begin[of], count[of])] for known, of in parts])
            order = text.argsort(kind="stable")
            begin[order] = count[order].cumsum() - count[order]
        self.tracked.propose(numbers[asked], kind[asked], (in_flight + 0 * numbers)[asked])
        self._spent_s += self.clock.perf_counter() - started
        return Proposals(tokens, begin, np.maximum(count - in_flight, 0), kind)

    def observe(
        self,
        rows: list[Row],
        tokens: np.ndarray,
        num_gained: np.ndarray,
        num_draft: np.ndarray,
        num_accepted: np.ndarray,
    ) -> None:
        """See the engine's `Proposer`: learn from the outcome, and pass the new tokens on."""
        started = self.clock.perf_counter()
        tracked, counts, numbers = self.tracked, self._acceptance, numbers_of(rows)
        kind, is_counted = tracked.take_kind(numbers), tracked.is_counted[numbers] > 0
        counts.row_forwards += int(is_counted.sum())
        counts.gained_tokens += int(num_gained @ is_counted)
        # Rows that have left their draft, of which tokens are left.
        has_left = is_counted & ~tracked.texts.is_aligned[numbers]
        has_left &= tracked.texts.in_draft(numbers)[1] > 0
        if has_left.any():
            given = num_accepted * self._is_own[kind]
            self.survival.behind += num_gained @ has_left, given @ has_left
        if num_draft.any():
            self.survival.observe(kind, num_draft, num_accepted, is_counted)
            lengths = num_accepted[(num_draft > 0) & is_counted]
            bins = WINDOWS.searchsorted(lengths, side="right") - 1
            counts.accepted_lengths += np.bincount(bins, minlength=len(WINDOWS))
        self._extend(numbers, tokens, num_gained)
        self._spent_s += self.clock.perf_counter() - started

    def catch_up(self) -> None:
        """Do work that can wait for the next query, while a GPU computes."""
        for source in self.enabled_sources:
            source.catch_up()

    def _extend(self, numbers: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        self.tracked.texts.extend(numbers, tokens, counts)
        for source in self.enabled_sources:
            source.observe(numbers, tokens, counts)


def fill(
    found: Proposals, windows: np.ndarray, in_flight: np.ndarray | int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that fill windows, int64 [R], behind those in flight, as `propose` does."""
    count = np.where(windows > 0, windows + in_flight, 0)
    return found.tokens[spans(found.begin, count)].astype(np.int64), count


def numbers_of(rows: list[Row]) -> np.ndarray:
    """Return the numbers of rows, int64 [R]."""
    return np.array([row.number for row in rows], np.int64)


def make_proposer(
    names: Collection[str],
    history: TextStore,
    cost: CostModel,
    *,
    has_drafts: bool,
    always: bool = False,
    clock: Any = time,
    vocab_size: int | None = None,
) -> Proposer:
    """Create a proposer with the sources that `speculative.method` names, in order of trust.

    Mechanisms add theirs later. has_drafts: whether samples have drafts of their own; vocab_size:
    number of the policy's tokens, None in virtual time. Raises InputError."""
    sources: list[DraftSource] = []
    if has_drafts or "suffix" in names:
        sources.append(TextMatches(history, searches="suffix" in names))
    sources += [load_source(name, vocab_size) for name in names if "." in name]
    return Proposer(sources, cost, always=always, clock=clock)
