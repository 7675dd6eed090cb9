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

from bubblespec.draft.history import History
from bubblespec.draft.suffix import (
    HISTORY,
    HISTORY_OWNER,
    PROMPT_OWNER,
    SELF,
    SOURCE_NAMES,
    SuffixIndex,
)
from bubblespec.types import Draft, Row, SampleId

ALIGNED = "aligned"  # the row has followed its draft from the start
MAX_AGE = 8  # drafts of so many updates or more are judged alike
MATCH_EDGES = (2, 4, 8)  # matches that reach the same of these lengths are judged alike
KINDS = [[(name, n) for n in range(len(MATCH_EDGES) + 1)] for name in SOURCE_NAMES]


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

    def observe(self, kind: tuple, trials: int, num_accepted: int) -> None:
        """Of `trials` tokens `num_accepted` were accepted, those after a first wrong one left out:
        they say nothing."""
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
    number: int = 0
    """Of the sample in `SuffixMatches`, from 0."""
    group: int = 0
    """Number of its group there."""


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
    responses of earlier epochs. A group's texts are indexed when one of its rows first asks."""

    def __init__(self, history: History):
        self.history = history
        self.begin()

    def begin(self) -> None:
        """Forget rows and groups; the history stays."""
        self.index = SuffixIndex()
        self._group_of: dict[tuple[int, int], int] = {}  # by (uid, visit)
        self._members: list[list[TrackedRow]] = []  # by group, as are the next
        self._is_indexed: list[bool] = []
        self._gained: list[list[tuple[int, np.ndarray]]] = []  # tokens that the index lacks
        self._lacking: set[int] = set()  # indexed groups of which the index lacks tokens
        self._number_of: dict[SampleId, int] = {}
        self._row_of: list[int] = []  # in the index, by number of the sample; -1 for none yet
        self._num_known: list[int] = []  # tokens so far, by number of the sample

    def track(self, tracked: TrackedRow) -> None:
        """Its draft and tokens are matched against from now on. It may have been tracked before,
        with fewer tokens."""
        name = tracked.row.id
        tracked.group = self._group_of.setdefault(name[:2], len(self._members))
        tracked.number = self._number_of.setdefault(name, len(self._row_of))
        if tracked.group == len(self._members):
            self._members.append([])
            self._gained.append([])
            self._is_indexed.append(False)
        if tracked.number == len(self._row_of):
            self._row_of.append(-1)
            self._num_known.append(0)
        self._members[tracked.group].append(tracked)
        if self._is_indexed[tracked.group]:
            self._add(tracked)
        known = self._num_known[tracked.number]
        if len(tracked.row.tokens) > known:
            self.observe(tracked, tracked.row.tokens[known:])

    def propose(
        self, rows: list[TrackedRow], lengths: list[int], limits: list[int]
    ) -> list[Proposal | None]:
        """What follows the longest match."""
        if not rows:
            return []
        for group in {tracked.group for tracked in rows}:
            if not self._is_indexed[group]:
                self._index_group(group)
        self._take_in()
        numbers = np.array([self._row_of[tracked.number] for tracked in rows], np.int64)
        found, text = self.index.propose(numbers, np.array(limits, np.int64)), self.index.text
        reached = (found.match[:, None] >= MATCH_EDGES).sum(axis=1)
        columns = (found.begin, found.begin + found.count, found.source, reached)
        return [
            Proposal(text[begin:end], KINDS[source][edges]) if begin < end else None
            for begin, end, source, edges in zip(*(c.tolist() for c in columns), strict=True)
        ]

    def observe(self, tracked: TrackedRow, tokens: np.ndarray) -> None:
        """Taken into the index when rows next ask."""
        self._gained[tracked.group].append((tracked.number, tokens))
        self._num_known[tracked.number] += len(tokens)
        if self._is_indexed[tracked.group]:
            self._lacking.add(tracked.group)

    def _index_group(self, group: int) -> None:
        members = self._members[group]
        uid, prompt = members[0].row.id.uid, members[0].row.prompt
        # Preferred by reward, then recency: the most trusted are the last to come in.
        earlier = sorted(self.history.get(uid), key=lambda pair: pair[1])
        texts = [*(tokens for tokens, _ in earlier), np.array(prompt, np.int32)]
        kinds = [HISTORY] * len(earlier) + [SELF]
        owners = [HISTORY_OWNER] * len(earlier) + [PROMPT_OWNER]
        self.index.add_texts(texts, group, owners, kinds)
        self._is_indexed[group] = True
        self._lacking.add(group)
        for tracked in members:
            self._add(tracked)

    def _add(self, tracked: TrackedRow) -> None:
        """A member of an indexed group."""
        row, draft = tracked.row, tracked.draft
        if self._row_of[tracked.number] < 0:
            self._row_of[tracked.number] = self.index.add_row(
                tracked.group, row.id.sample, row.max_new_tokens
            )
        if draft is not None:
            self.index.add_draft(self._row_of[tracked.number], draft.tokens)

    def _take_in(self) -> None:
        """What rows of indexed groups have gained."""
        gained: dict[int, list[np.ndarray]] = {}  # by number, so that each grows but once
        for group in self._lacking:
            for number, tokens in self._gained[group]:
                gained.setdefault(number, []).append(tokens)
            self._gained[group].clear()
        self._lacking.clear()
        if gained:
            rows = np.array([self._row_of[number] for number in gained], np.int64)
            counts = np.array([sum(map(len, parts)) for parts in gained.values()], np.int64)
            tokens = np.concatenate([part for parts in gained.values() for part in parts])
            self.index.extend(rows, tokens, counts)
