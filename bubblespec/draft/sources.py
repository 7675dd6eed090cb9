"""Draft sources: what tokens may come next in a row.

`OwnDrafts` proposes the draft that the sample has, up to the first difference from its response.
`SuffixMatches` looks for the end of the row in that draft and in other texts, before a difference
and after it. A source decides about time only: the engine accepts just what a row would have
sampled.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bubblespec.draft.store import History
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
        self.counts: dict[tuple, np.ndarray] = {}  # [trials, accepted] by kind
        self._is_tried: dict[tuple, bool] = {}  # of the kinds that came up in this rollout

    def estimate(self, kind: tuple, prior: float) -> float:
        """The probability for a kind, which is `prior` where nothing was observed of it."""
        self._is_tried.setdefault(kind, False)
        trials, accepted = self.counts.get(kind, (0.0, 0.0))
        return float((accepted + self.PRIOR_WEIGHT * prior) / (trials + self.PRIOR_WEIGHT))

    def observe(self, kind: tuple, trials: int, num_accepted: int) -> None:
        """Of `trials` tokens `num_accepted` were accepted, those after a first wrong one left out:
        they say nothing."""
        keep = max(0.0, 1.0 - trials / self.MEMORY)
        before = self.counts.get(kind, np.zeros(2))
        self.counts[kind] = keep * before + (trials, num_accepted)
        self._is_tried[kind] = True

    def begin(self) -> None:
        """A new rollout: drift back to the priors."""
        for kind, counts in self.counts.items():
            counts *= 1.0 - (self.DRIFT if self._is_tried.get(kind, True) else self.UNTRIED_DRIFT)
        self._is_tried.clear()

    def state_dict(self) -> dict[str, np.ndarray]:
        """K kinds as JSON texts [K]; trials and accepted, float64 [K, 2]."""
        kinds = [json.dumps(kind) for kind in self.counts]
        counts = np.array(list(self.counts.values()), np.float64).reshape(-1, 2)
        return {"kinds": np.array(kinds, np.str_), "counts": counts}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state."""
        kinds = (tuple(json.loads(kind)) for kind in state["kinds"].tolist())
        self.counts = dict(zip(kinds, state["counts"].copy(), strict=True))


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
    """Tokens that it is known to have."""
    kind: tuple | None = None
    """Of its latest proposal: source, and whatever else its survival depends on."""
    text: "SampleText | None" = None
    """What `SuffixMatches` knows of its sample."""


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


@dataclass(eq=False)
class SampleGroup:
    """The samples of a prompt, which match in each other's texts."""

    number: int
    members: list[TrackedRow] = field(default_factory=list)
    is_indexed: bool = False


@dataclass(eq=False)
class SampleText:
    """What a sample has said."""

    group: SampleGroup
    row: int = -1
    """In the index; -1 until its group is indexed."""
    num_known: int = 0
    """Tokens so far."""
    gained: list[np.ndarray] = field(default_factory=list)
    """The latest of them, which the index lacks."""


class SuffixMatches(DraftSource):
    """What followed the row's last tokens elsewhere: in its draft, its group, its prompt, or
    responses of earlier epochs. A group's texts are indexed when one of its rows first asks."""

    def __init__(self, history: History):
        self.history = history
        self.begin()

    def begin(self) -> None:
        """Forget rows and groups; the history stays."""
        self.index = SuffixIndex()
        self._groups: dict[tuple[int, int], SampleGroup] = {}  # by (uid, visit)
        self._texts: dict[SampleId, SampleText] = {}
        self._lacking: set[SampleText] = set()  # rows of the index that have gained tokens since

    def track(self, tracked: TrackedRow) -> None:
        """Its draft and tokens are matched against from now on. It may have been tracked before,
        with fewer tokens."""
        name, tokens = tracked.row.id, tracked.row.tokens
        group = self._groups.setdefault(name[:2], SampleGroup(len(self._groups)))
        tracked.text = self._texts.setdefault(name, SampleText(group))
        group.members.append(tracked)
        if group.is_indexed:
            self._add(tracked)
        if len(tokens) > tracked.text.num_known:
            self.observe(tracked, tokens[tracked.text.num_known :])

    def propose(
        self, rows: list[TrackedRow], lengths: list[int], limits: list[int]
    ) -> list[Proposal | None]:
        """What follows the longest match."""
        if not rows:
            return []
        for tracked in rows:
            if tracked.text.row < 0:
                self._index_group(tracked.text.group)
        self._take_in()
        numbers = np.array([tracked.text.row for tracked in rows], np.int64)
        found, text = self.index.propose(numbers, np.array(limits, np.int64)), self.index.text
        reached = (found.match[:, None] >= MATCH_EDGES).sum(axis=1)
        columns = (found.begin, found.begin + found.count, found.source, reached)
        return [
            Proposal(text[begin:end], KINDS[source][edges]) if begin < end else None
            for begin, end, source, edges in zip(*(c.tolist() for c in columns), strict=True)
        ]

    def observe(self, tracked: TrackedRow, tokens: np.ndarray) -> None:
        """Taken into the index when rows next ask."""
        text = tracked.text
        text.gained.append(tokens)
        text.num_known += len(tokens)
        if text.row >= 0:
            self._lacking.add(text)

    def _index_group(self, group: SampleGroup) -> None:
        first = group.members[0].row
        # Preferred by reward, then recency: the most trusted are the last to come in.
        earlier = sorted(self.history.get(first.id.uid), key=lambda pair: pair[1])
        texts = [*(tokens for tokens, _ in earlier), np.array(first.prompt, np.int32)]
        kinds = [HISTORY] * len(earlier) + [SELF]
        owners = [HISTORY_OWNER] * len(earlier) + [PROMPT_OWNER]
        self.index.add_texts(texts, group.number, owners, kinds)
        group.is_indexed = True
        for tracked in group.members:
            self._add(tracked)

    def _add(self, tracked: TrackedRow) -> None:
        """A member of an indexed group."""
        row, text = tracked.row, tracked.text
        if text.row < 0:
            text.row = self.index.add_row(text.group.number, row.id.sample, row.max_new_tokens)
            if text.gained:
                self._lacking.add(text)
        if tracked.draft is not None:
            self.index.add_draft(text.row, tracked.draft.tokens)

    def _take_in(self) -> None:
        """What rows of the index have gained."""
        if not self._lacking:
            return
        rows = np.array([text.row for text in self._lacking], np.int64)
        counts = np.array([sum(map(len, text.gained)) for text in self._lacking], np.int64)
        tokens = np.concatenate([part for text in self._lacking for part in text.gained])
        self.index.extend(rows, tokens, counts)
        for text in self._lacking:
            text.gained.clear()
        self._lacking.clear()
