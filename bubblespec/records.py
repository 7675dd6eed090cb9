"""What has happened: forwards and what they had to do, spans of time, what came of proposals and of
idle time, rollouts, steps.

Plain data: what was measured and counted on one rank, for the metrics, for timelines, and for those
who learn from it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from bubblespec.types import Draft, SampleId, Samples


class Load(NamedTuple):
    """What a forward has to do."""

    rows: int
    """Active rows."""
    tokens: int
    """Tokens fed."""
    wide_rows: int = 0
    """Rows that feed more than one token."""
    positions: int = 0
    """Positions attended to, summed over rows."""
    prompt_tokens: int = 0
    """Of the tokens, those of prompts."""
    draft_tokens: int = 0
    """Of the tokens, those of drafts."""


class Span(NamedTuple):
    """A stretch of time of one rank."""

    kind: str
    begin_s: float
    """By the rank's clock, time.perf_counter."""
    end_s: float


def total_s(spans: Iterable[Span], kind: str) -> float:
    """Seconds of all spans of a kind."""
    return sum(end - begin for name, begin, end in spans if name == kind)


class ForwardRecord(NamedTuple):
    """One forward of a rollout on one rank: what it had to do, for whom, and how long it took."""

    begin_s: float
    """Where the forward before it, or a wait, has ended, by the rank's clock: the host's work in
    between is in it."""
    end_s: float
    engine_s: float
    """Seconds in the engine, less propose_s."""
    propose_s: float
    """Seconds of looking for proposals, and of taking in what came of them."""
    rows: int
    """This and the next five: see `Load`."""
    tokens: int
    wide_rows: int
    positions: int
    prompt_tokens: int
    draft_tokens: int
    own_rows: int
    """Rows of this step on this rank that were unfinished before it."""
    ahead_rows: int
    """The same of rows drafted for coming steps."""
    looked_up_rows: int
    """Rows for which a proposal was looked for."""

    @property
    def kind(self) -> str:
        """For timelines: draft (co-scheduled), which is alongside rows of this step, draft (idle),
        prefill, verify or decode."""
        if self.ahead_rows:
            return "draft (co-scheduled)" if self.own_rows else "draft (idle)"
        return "prefill" if self.prompt_tokens else "verify" if self.draft_tokens else "decode"


# Lower bounds of the bins of `Acceptance.accepted_lengths`, in tokens.
ACCEPT_BINS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Where a proposal comes from: the sample's own draft up to their first difference (aligned), else
# suffix matches in that draft (own), in another sample's draft or tokens (sibling), in the prompt
# or the row's tokens (self), in earlier epochs; the drafter.
SOURCES = ("aligned", "own", "sibling", "self", "history", "drafter")


@dataclass
class Acceptance:
    """What came of proposals in one rollout on one rank. Counts rows of its step, not those drafted
    for coming ones."""

    row_forwards: int = 0
    """Decodes and verifications, one for each row of a forward."""
    gained_tokens: int = 0
    """Tokens that rows gained in them."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    covered_tokens: int = 0
    """Tokens for which there was a proposal, right or wrong."""
    before_divergence: list[int] = field(default_factory=lambda: [0, 0])
    """[tokens tried, those accepted] of drafts up to their first difference from the response,
    which is counted as tried."""
    after_divergence: list[int] = field(default_factory=lambda: [0, 0])
    """[tokens gained, those that the own draft gave] of rows behind that difference, as far as
    their draft reaches."""
    by_source: dict[str, list[int]] = field(default_factory=dict)
    """[proposed, accepted] by name (SOURCES)."""
    by_age: dict[int, list[int]] = field(default_factory=dict)
    """[proposed, accepted] of aligned drafts, by the updates since they were last extended."""
    accepted_lengths: np.ndarray = field(
        default_factory=lambda: np.zeros(len(ACCEPT_BINS), np.int64)
    )
    """Verifications by accepted tokens, int64 [bins]."""


@dataclass
class IdleUse:
    """What came of one use of idle time in one rollout on one rank."""

    seconds: float = 0.0
    """That this rank has spent on it, waiting or alongside rows of its own."""
    expected_s: float = 0.0
    """Of wall time, that the jobs which this rank was given were expected to save."""
    saved_s: float = 0.0
    """Of wall time, that the use as a whole is estimated to have saved in this rollout's step; the
    same on every rank."""


@dataclass
class RolloutRecord:
    """One rollout on one rank, as it happened. Times are those of the rank's clock, in seconds."""

    began_s: float = 0.0
    ended_s: float = 0.0
    forwards: list[ForwardRecord] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    """With nothing to do until the next tick."""
    slices: list[Span] = field(default_factory=list)
    """Pieces of idle work that took no forwards."""
    shared: list[Span] = field(default_factory=list)
    """In which all ranks together decoded the last rows of all of them (tp_tail.py)."""
    shared_forwards: list[ForwardRecord] = field(default_factory=list)
    """Of all ranks together; they are not in `forwards`. Their load is that of all ranks' rows,
    own_rows and looked_up_rows are this rank's."""
    num_ticks: int = 0
    drafted_tokens: int = 0
    """For coming steps."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    modelled_s: float = 0.0
    """Of wall time, that the cost model expects of the same responses without drafts; the same on
    every rank."""
    saved_s: float = 0.0
    """Seconds of wall time that the cost model expects to have been saved; the same on every
    rank."""
    idle: dict[str, IdleUse] = field(default_factory=dict)
    """By the name of the use."""
    extras: dict[str, Any] = field(default_factory=dict)
    """What mechanisms record for metrics of their own."""

    @property
    def own_forwards(self) -> int:
        """Forwards while rows of this step were unfinished on this rank."""
        return sum(forward.own_rows > 0 for forward in self.forwards)

    @property
    def own_s(self) -> float:
        """Seconds until this rank's rows of this step were done."""
        ends = (forward.end_s for forward in self.forwards if forward.own_rows)
        return max(ends, default=self.began_s) - self.began_s

    @property
    def wait_s(self) -> float:
        """Seconds with nothing to do."""
        return total_s(self.waits, "wait")

    @property
    def total_s(self) -> float:
        """Seconds from begin to end."""
        return self.ended_s - self.began_s

    @property
    def spans(self) -> list[Span]:
        """What the rank did when, in order of time; forwards of one kind in a row are one span."""
        spans: list[Span] = []
        found = [Span(f.kind, f.end_s - f.engine_s - f.propose_s, f.end_s) for f in self.forwards]
        found += self.waits + self.slices + self.shared
        for span in sorted(found, key=lambda span: span.begin_s):
            if spans and spans[-1].kind == span.kind:
                span = Span(span.kind, spans.pop().begin_s, span.end_s)
            spans.append(span)
        return spans


@dataclass
class StepRecord:
    """A step as this rank saw it. Samples and rewards are the same on all ranks, times are not."""

    step: int
    samples: Samples
    """What is trained on."""
    rewards: np.ndarray
    """float64 [groups, generations], of those, combined."""
    generated: Samples
    """Everything that had its turn, groups that dynamic sampling has replaced included, but none
    that is deferred."""
    all_rewards: np.ndarray
    """float64 [groups, generations], of everything."""
    owners: np.ndarray
    """int64 [samples], the rank that generated each sample of `generated`."""
    batch_sizes: list[int]
    """Groups of each of the step's rollouts."""
    rollouts: list[RolloutRecord]
    stages: list[Span]
    """gen, wait and reward, once for each rollout, and train: one after the other."""
    spans: list[Span]
    """What was done in them in detail, apart from the forwards: exchange, sync."""
    drafts: dict[SampleId, Draft]
    """Those that the samples of the step had before they were generated."""
    expected_s: float = math.nan
    """In which this rank was expected to be done with its rows; NaN where nobody knew."""
    advantages: np.ndarray | None = None
    """float64 [samples], of `samples`, once the update has had them."""
    deferred: dict[SampleId, int] = field(default_factory=dict)
    """Samples that were launched and have not had their turn, with the tokens that they had when
    the rollout ended."""

    @property
    def seconds(self) -> float:
        """Of all stages so far."""
        return self.stages[-1].end_s - self.stages[0].begin_s
