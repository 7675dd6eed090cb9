"""What each row proposes in a forward: the first source that knows something, in a window that
pays.

Implements the engine's `Proposer`; sources are in sources.py, windows in planner/windows.py.
"""

import time
from collections.abc import Sequence

import numpy as np

from bubblespec.draft.sources import (
    ALIGNED,
    DraftSource,
    OwnDrafts,
    SuffixMatches,
    Survival,
    TrackedRow,
)
from bubblespec.draft.store import History
from bubblespec.draft.suffix import OWN, SOURCE_NAMES
from bubblespec.planner.costs import CostModel
from bubblespec.planner.windows import WINDOWS, choose_windows
from bubblespec.records import Acceptance
from bubblespec.types import Draft, Row

PRIORS = {ALIGNED: 0.95, "own": 0.8, "sibling": 0.6}  # of survival, by source
PRIOR = 0.5  # of another source
MAX_BACKOFF = 16  # forwards
ALWAYS_WINDOW = 6  # draft tokens that are verified whatever that costs


class Proposer:
    """Proposals for the rows that it knows (`track`), of one rank over a run."""

    def __init__(
        self,
        sources: Sequence[DraftSource],
        cost: CostModel,
        *,
        always: bool = False,
        clock=time,
    ):
        """sources: in order of trust; always: propose up to ALWAYS_WINDOW tokens whatever they
        cost, instead of planning; clock: see `Ranks`."""
        self.sources, self.cost, self.always, self.clock = list(sources), cost, always, clock
        self.survival = Survival()
        self.acceptance = Acceptance()
        self._spent_s, self._num_looked_up = 0.0, 0
        self._pause = self._backoff = 0  # forwards to go without looking for proposals
        self._overhead_s = 0.0  # of looking for them, exponentially weighted
        self._rows: dict[int, TrackedRow] = {}
        # Of forwards without drafts: their rows, and what each has gained. Taken in when next
        # needed, as each taking in costs as much as the look-up of a proposal.
        self._unread: list[tuple[list[Row], list[np.ndarray]]] = []

    @property
    def enabled_sources(self) -> list[DraftSource]:
        """The sources that may have something to propose."""
        return [source for source in self.sources if source.is_enabled]

    def begin(self) -> None:
        """A new rollout: forget rows, count anew, and go on with the estimates."""
        self.acceptance = Acceptance(by_source={name: [0, 0] for name, *_ in self.survival.counts})
        self._spent_s, self._num_looked_up = 0.0, 0
        self._rows.clear()
        self._unread.clear()
        for source in self.sources:
            source.begin()
        # The last rollout's end, beyond its drafts, says nothing about this one's beginning.
        self._pause = self._backoff = 0
        self.survival.begin()

    def track(self, row: Row, draft: Draft | None, version: int, is_counted: bool = True) -> None:
        """Propose for a row from now on. version: updates of the current weights; is_counted: it is
        of this step."""
        self.take_in()
        length = len(row.tokens)
        tracked = TrackedRow(row, draft, is_counted, num_gained=length)
        if draft is not None:
            tracked.age = version - draft.version
            tracked.is_aligned = np.array_equal(draft.tokens[:length], row.tokens)
        self._rows[id(row)] = tracked
        for source in self.sources:
            source.track(tracked)

    def take_spent(self) -> tuple[float, int]:
        """Seconds spent here since the last call, and rows for which proposals were looked for."""
        spent = self._spent_s, self._num_looked_up
        self._spent_s, self._num_looked_up = 0.0, 0
        return spent

    def propose(
        self, rows: list[Row], lengths: np.ndarray, room: np.ndarray, budget: int
    ) -> list[np.ndarray | None]:
        """As the engine's `Proposer` has it: the windows of all rows together are planned. Nothing
        for rows that are not tracked."""
        drafts: list[np.ndarray | None] = [None] * len(rows)
        if self._pause:
            self._pause -= 1
            return drafts
        started = self.clock.perf_counter()
        self.take_in()
        self._num_looked_up += len(rows)
        longest = ALWAYS_WINDOW if self.always else min(int(WINDOWS[-1]), budget)
        survival = [0.0] * len(rows)
        tracked = [self._rows.get(id(row)) for row in rows]
        asked = [i for i, fits in enumerate(room.tolist()) if fits > 0 and tracked[i] is not None]
        length_of, limits = lengths.tolist(), np.minimum(room, longest).tolist()
        estimates: dict[tuple, float] = {}  # by kind
        for source in self.enabled_sources:
            chance = source.chance
            open_rows = [i for i in asked if drafts[i] is None or survival[i] < chance]
            answers = source.propose(
                [tracked[i] for i in open_rows],
                [length_of[i] for i in open_rows],
                [limits[i] for i in open_rows],
            )
            for i, proposal in zip(open_rows, answers, strict=True):
                if proposal is None:
                    continue
                drafts[i], kind = proposal
                tracked[i].kind = kind
                if kind not in estimates:
                    prior = PRIORS.get(kind[0], PRIOR)
                    estimates[kind] = self.survival.estimate(kind, prior)
                survival[i] = estimates[kind]
        if not self.always:
            available = np.array([0 if draft is None else len(draft) for draft in drafts])
            kv_tokens = int(lengths.sum()) + sum(len(row.prompt) for row in rows)
            options = {"budget": budget, "overhead_s": self._overhead_s}
            windows, pays = choose_windows(
                np.array(survival), available, self.cost, kv_tokens, **options
            )
            # Where nothing pays, it is looked for again after a while, less and less often.
            self._pause = self._backoff = 0 if pays else min(2 * self._backoff + 1, MAX_BACKOFF)
            drafts = [
                draft[:n] if n else None for draft, n in zip(drafts, windows.tolist(), strict=True)
            ]
        seconds = self.clock.perf_counter() - started
        self._spent_s += seconds
        self._overhead_s += 0.1 * (seconds - self._overhead_s)
        return drafts

    def observe(
        self,
        rows: list[Row],
        tokens: list[np.ndarray],
        num_draft: np.ndarray,
        num_accepted: np.ndarray,
    ) -> None:
        """As the engine's `Proposer` has it: learn from what was accepted, and take in the new
        tokens."""
        if not num_draft.any():
            self._unread.append((rows, tokens))
            return
        started = self.clock.perf_counter()
        self.take_in()
        tracked = [self._rows.get(id(row)) for row in rows]
        self._count_drafts(tracked, num_draft, num_accepted)
        for each, gained, drafted, accepted in zip(
            tracked, tokens, num_draft.tolist(), num_accepted.tolist(), strict=True
        ):
            if each is not None:
                self._take_in(each, gained, 1, drafted, accepted)
        self._spent_s += self.clock.perf_counter() - started

    def take_in(self) -> None:
        """What rows have gained without drafts."""
        gained: dict[int, list[np.ndarray]] = {}
        for rows, tokens in self._unread:
            for row, of_row in zip(rows, tokens, strict=True):
                gained.setdefault(id(row), []).append(of_row)
        self._unread.clear()
        for name, parts in gained.items():
            if (tracked := self._rows.get(name)) is not None:
                together = parts[0] if len(parts) == 1 else np.concatenate(parts)
                self._take_in(tracked, together, len(parts), 0, 0)

    def _take_in(
        self, tracked: TrackedRow, gained: np.ndarray, forwards: int, drafted: int, accepted: int
    ) -> None:
        """What a row has gained in so many forwards."""
        begin, end = tracked.num_gained, tracked.num_gained + len(gained)
        tracked.num_gained = end
        draft, counts = tracked.draft, self.acceptance
        if draft is not None and tracked.is_aligned:
            # Gained tokens that are known to be the draft's.
            of_draft = accepted if drafted and tracked.kind[0] == ALIGNED else 0
            rest = draft.tokens[begin + of_draft : end]
            tracked.is_aligned = rest.tolist() == gained[of_draft:].tolist()
        elif draft is not None and tracked.is_counted and begin < len(draft.tokens):
            is_own = drafted and tracked.kind[0] == SOURCE_NAMES[OWN]
            counts.after_divergence[0] += len(gained)
            counts.after_divergence[1] += accepted if is_own else 0
        if tracked.is_counted:
            counts.row_forwards += forwards
            counts.gained_tokens += len(gained)
        for source in self.sources:
            if source.is_enabled:
                source.observe(tracked, gained)

    def _count_drafts(
        self, tracked: list[TrackedRow | None], drafted: np.ndarray, accepted: np.ndarray
    ) -> None:
        """What came of the drafts of a forward's rows; int64 [R] both."""
        counts = self.acceptance
        tallies: dict[tuple, list[int]] = {}  # drafted, accepted and verified tokens
        lengths: list[int] = []  # of what was accepted
        for each, draft, right in zip(tracked, drafted.tolist(), accepted.tolist(), strict=True):
            if each is None or not draft:
                continue
            tally = tallies.setdefault((each.kind, each.is_counted), [0, 0, 0])
            tally[0] += draft
            tally[1] += right
            tally[2] += min(right + 1, draft)
            if each.is_counted:
                lengths.append(right)
        for (kind, is_counted), (draft, right, verified) in tallies.items():
            self.survival.observe(kind, verified, right)
            if not is_counted:
                continue
            counts.draft_tokens += draft
            counts.accepted_tokens += right
            counts.covered_tokens += verified
            _add(counts.by_source, kind[0], draft, right)
            if kind[0] == ALIGNED:
                _add(counts.by_age, kind[1], draft, right)
                counts.before_divergence[0] += verified
                counts.before_divergence[1] += right
        bins = WINDOWS.searchsorted(lengths, side="right") - 1
        counts.accepted_lengths += np.bincount(bins, minlength=len(WINDOWS))


def _add(table: dict, key, num_draft: int, num_accepted: int) -> None:
    entry = table.setdefault(key, [0, 0])
    entry[0] += num_draft
    entry[1] += num_accepted


def make_proposer(
    method: str,
    history: History,
    cost: CostModel,
    *,
    has_drafts: bool,
    always: bool = False,
    clock=time,
) -> Proposer:
    """With the sources of `speculative.method`, in order of trust: own drafts, where samples have
    any, and suffix matches."""
    sources: list[DraftSource] = []
    if has_drafts:
        sources.append(OwnDrafts())
    if "suffix" in method:
        sources.append(SuffixMatches(history))
    return Proposer(sources, cost, always=always, clock=clock)
