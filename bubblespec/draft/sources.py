"""Draft sources: what tokens may come next in a row.

`OwnDrafts` proposes the draft that the sample has, up to the first difference from its response.
`SuffixMatches` looks for the end of the row in that draft and in other texts, before a difference
and after it. A source decides about time only: the engine accepts just what a row would have
sampled. Imports speculation's own parts alone.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bubblespec.draft.suffix import SOURCE_NAMES, GroupIndex, History
from bubblespec.types import Draft, Row, SampleId

ALIGNED = "aligned"  # the row has followed its draft from the start
MAX_AGE = 8  # drafts of so many updates or more are judged alike
MATCH_EDGES = (2, 4, 8, 16)  # matches that reach the same of these lengths are judged alike


class Survival:
    """Probability that the next token of a draft is accepted, by kind of proposal.

    An exponentially weighted share that starts at a prior. Between rollouts it drifts back to the
    prior, and fast for a kind of which proposals came but none was tried, so that a source that was
    given up is tried again after some rollouts."""

    PRIOR_WEIGHT = 8.0
    MEMORY = 400.0  # trials
    DRIFT, UNTRIED_DRIFT = 0.05, 0.5  # per rollout

    def __init__(self):
        self._counts: dict[tuple, np.ndarray] = {}  # [trials, accepted] by kind
        self._asked: set[tuple] = set()  # in this rollout, as are the next
        self._tried: set[tuple] = set()

    def estimate(self, kind: tuple, prior: float) -> float:
        """The probability for a kind, which is `prior` where nothing was observed of it."""
        self._asked.add(kind)
        trials, accepted = self._counts.get(kind, (0.0, 0.0))
        return float((accepted + self.PRIOR_WEIGHT * prior) / (trials + self.PRIOR_WEIGHT))

    def observe(self, kind: tuple, num_draft: int, num_accepted: int) -> None:
        """Of `num_draft` tokens `num_accepted` were accepted; those after the first wrong one say
        nothing."""
        trials = min(num_accepted + 1, num_draft)
        keep = max(0.0, 1.0 - trials / self.MEMORY)
        before = self._counts.get(kind, np.zeros(2))
        self._counts[kind] = keep * before + (trials, num_accepted)
        self._tried.add(kind)

    def begin(self) -> None:
        """A new rollout: drift back to the priors."""
        for kind, counts in self._counts.items():
            was_left_out = kind in self._asked and kind not in self._tried
            counts *= 1.0 - (self.UNTRIED_DRIFT if was_left_out else self.DRIFT)
        self._asked.clear()
        self._tried.clear()

    @property
    def sources(self) -> set[str]:
        """Names of those that have ever had a trial."""
        return {kind[0] for kind in self._counts}

    def state_dict(self) -> dict[str, np.ndarray]:
        """K kinds as JSON texts [K]; trials and accepted, float64 [K, 2]."""
        kinds = [json.dumps(kind) for kind in self._counts]
        counts = np.array(list(self._counts.values()), np.float64).reshape(-1, 2)
        return {"kinds": np.array(kinds, np.str_), "counts": counts}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state."""
        kinds = (tuple(json.loads(kind)) for kind in state["kinds"].tolist())
        self._counts = dict(zip(kinds, state["counts"].copy(), strict=True))


@dataclass(eq=False)
class TrackedRow:
    """What is known of a row that proposals are made for."""

    row: Row
    draft: Draft | None
    """Its sample's draft, where drafts are used."""
    is_counted: bool
    """Whether it is of this step, and counts in `Acceptance`."""
    age: int = 0
    """Updates of the weights since the draft was last extended."""
    is_aligned: bool = False
    """It has followed the draft from the start."""
    num_gained: int = 0
    """Tokens since it is tracked."""
    kind: tuple | None = None
    """Of the proposal under verification: source, and whatever else its survival depends on."""


class Proposal(NamedTuple):
    """Tokens that may come next in a row."""

    tokens: np.ndarray
    """int, at least one."""
    kind: tuple
    """Proposals of one kind are taken to be accepted alike: (name of the source, length of the
    match, age, ...)."""


class DraftSource:
    """One place where draft tokens come from; by default it knows nothing.

    It is asked for the rows that no source before it has a proposal for, and for those whose
    proposal is accepted less often than `chance`."""

    is_enabled = True
    """Without it, the source is neither asked nor told about new tokens."""
    chance = 0.0
    """Expected acceptance rate below which it replaces another source's proposal."""

    def begin(self) -> None:
        """A new rollout: forget all rows."""

    def track(self, tracked: TrackedRow) -> None:
        """Proposals for a row will be asked for from now on; it may have tokens already, and may
        have been tracked before with fewer."""

    def propose(
        self, rows: list[TrackedRow], lengths: list[int], limits: list[int]
    ) -> Sequence[Proposal | None]:
        """A proposal for each row. lengths: response tokens so far; limits: maximum number of
        tokens to propose, at least 1."""
        return [None] * len(rows)

    def observe(self, tracked: TrackedRow, tokens: np.ndarray) -> None:
        """A row has gained `tokens`, int [at least 1]."""


class OwnDrafts(DraftSource):
    """The sample's own draft, as long as the row follows it; made with the same noise, so almost
    always right."""

    def propose(
        self, rows: list[TrackedRow], lengths: list[int], limits: list[int]
    ) -> list[Proposal | None]:
        """What comes next in the draft."""
        proposals: list[Proposal | None] = []
        for row, length, limit in zip(rows, lengths, limits, strict=True):
            tokens = row.draft.tokens[length : length + limit] if row.is_aligned else ()
            kind = (ALIGNED, min(row.age, MAX_AGE))
            proposals.append(Proposal(tokens, kind) if len(tokens) else None)
        return proposals


class SuffixMatches(DraftSource):
    """What followed the row's last tokens elsewhere: in its draft, its group, its prompt, or
    responses of earlier epochs."""

    def __init__(self, history: History):
        self.history = history
        self._members: dict[tuple[int, int], list[TrackedRow]] = {}  # by (uid, visit)
        # Built when one of their rows first needs them.
        self._groups: dict[tuple[int, int], GroupIndex] = {}
        # (sample, tokens) that a group lacks.
        self._not_indexed: dict[tuple[int, int], list[tuple[int, np.ndarray]]] = {}
        self._num_known: dict[SampleId, int] = {}  # tokens of each sample so far

    def begin(self) -> None:
        """Forget rows and groups; the history stays."""
        self._members.clear()
        self._groups.clear()
        self._not_indexed.clear()
        self._num_known.clear()

    def track(self, tracked: TrackedRow) -> None:
        """Its draft and tokens are matched against from now on. It may have been tracked before,
        with fewer tokens."""
        uid, visit, sample = tracked.row.id
        self._members.setdefault((uid, visit), []).append(tracked)
        if tracked.draft is not None and (uid, visit) in self._groups:
            self._groups[uid, visit].add_draft(sample, tracked.draft.tokens)
        known = self._num_known.get(tracked.row.id, 0)
        if len(tracked.row.tokens) > known:
            self.observe(tracked, tracked.row.tokens[known:])

    def propose(
        self, rows: list[TrackedRow], lengths: list[int], limits: list[int]
    ) -> list[Proposal | None]:
        """What follows the longest match."""
        proposals: list[Proposal | None] = []
        for tracked, limit in zip(rows, limits, strict=True):
            tokens, match, source = self._group(tracked.row).propose(tracked.row.id.sample, limit)
            kind = (SOURCE_NAMES[source], sum(match >= edge for edge in MATCH_EDGES))
            proposals.append(Proposal(tokens, kind) if len(tokens) else None)
        return proposals

    def observe(self, tracked: TrackedRow, tokens: np.ndarray) -> None:
        """Taken into the index when the group is next asked."""
        uid, visit, sample = tracked.row.id
        self._not_indexed.setdefault((uid, visit), []).append((sample, tokens))
        self._num_known[tracked.row.id] = self._num_known.get(tracked.row.id, 0) + len(tokens)

    def _group(self, row: Row) -> GroupIndex:
        """The row's group index with all tokens of all its rows in it."""
        key = row.id[:2]
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = GroupIndex(self.history.get(row.id.uid), prompt=row.prompt)
            for tracked in self._members[key]:
                if tracked.draft is not None:
                    group.add_draft(tracked.row.id.sample, tracked.draft.tokens)
        gained: dict[int, list[np.ndarray]] = {}  # by sample, so that each grows but once
        for sample, tokens in self._not_indexed.pop(key, ()):
            gained.setdefault(sample, []).append(tokens)
        for sample, parts in gained.items():
            group.extend(sample, np.concatenate(parts) if len(parts) > 1 else parts[0])
        return group
