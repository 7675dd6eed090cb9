"""Samples of a step; records of forwards, spans of time, drafts, idle time, rollouts and steps.

Plain data, measured and counted on one rank, for metrics, timelines and the planner."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from bubblespec.types import Draft, Group, Load, Prompt, SampleId, completion_mask, ids_of


@dataclass
class Samples:
    """S = groups x generations responses in canonical order: by group, then by number."""

    groups: list[Group]
    num_generations: int
    tokens: list[np.ndarray]
    """Response tokens with the stop token, int32, one array per sample."""
    logprob: list[np.ndarray]
    """float32, see `Row`."""
    is_truncated: np.ndarray
    """Whether the length limit cut the response off, bool [S]."""
    rewards: np.ndarray
    """float64 [S, functions], NaN where a function does not apply."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def ids(self) -> list[SampleId]:
        return ids_of(self.groups, self.num_generations)

    def prompt_of(self, index: int) -> Prompt:
        return self.groups[index // self.num_generations].prompt

    @property
    def lengths(self) -> np.ndarray:
        """Response tokens of each sample, int64 [S]."""
        return np.array([len(t) for t in self.tokens])

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of all samples."""
        prompt_tokens = sum(len(group.prompt.token_ids) for group in self.groups)
        return int(self.lengths.sum()) + prompt_tokens * self.num_generations

    @property
    def num_sampled(self) -> np.ndarray:
        """Sampled tokens of each response, int64 [S]."""
        return count_sampled(self.logprob)

    def of_groups(self, numbers: list[int]) -> "Samples":
        size = self.num_generations
        rows = [n * size + j for n in numbers for j in range(size)]
        return Samples(
            [self.groups[n] for n in numbers],
            size,
            [self.tokens[row] for row in rows],
            [self.logprob[row] for row in rows],
            self.is_truncated[rows],
            self.rewards[rows],
        )

    def __add__(self, other: "Samples") -> "Samples":
        return Samples(
            self.groups + other.groups,
            self.num_generations,
            self.tokens + other.tokens,
            self.logprob + other.logprob,
            np.concatenate((self.is_truncated, other.is_truncated)),
            np.concatenate((self.rewards, other.rewards)),
        )


def count_sampled(logprobs: list[np.ndarray]) -> np.ndarray:
    """Count the sampled tokens of each response, int64 [S]. logprobs: see `Row`."""
    return np.array([np.count_nonzero(completion_mask(logprob)) for logprob in logprobs])


def digest(samples: Samples) -> str:
    """Return the SHA-256 of id, length and tokens of all samples, ordered by id."""
    sha = hashlib.sha256()
    named = zip(samples.ids, samples.tokens, strict=True)
    for name, tokens in sorted(named, key=itemgetter(0)):
        sha.update(np.array([*name, len(tokens)], "<i8").tobytes())
        sha.update(tokens.astype("<i4").tobytes())
    return sha.hexdigest()


def has_rewards(rewards: np.ndarray) -> np.ndarray:
    """Return which groups of rewards [groups, generations] have no NaN, bool; only these train."""
    return ~np.isnan(rewards).any(axis=1)


def has_zero_std(rewards: np.ndarray) -> np.ndarray:
    """Return which groups have equal rewards [groups, generations], and so no gradient, bool."""
    return np.ptp(rewards, axis=1) < 1e-8


def combine(rewards: np.ndarray, weights: list[float]) -> np.ndarray:
    """Return the weighted sum over the functions that apply: [samples, functions] -> [samples].

    NaN where none applies: training such a sample on 0 would be a silent mistake. 0 without
    functions, for a loss without rewards."""
    if not weights:
        return np.zeros(len(rewards))
    total = np.nansum(rewards * np.asarray(weights), axis=1)
    return np.where(np.isnan(rewards).all(axis=1), np.nan, total)


def overlong_penalty(lengths: np.ndarray, max_length: int, buffer_length: int) -> np.ndarray:
    """Return the soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), float64 [S].

    It is 0 up to max_length - buffer_length response tokens, and falls to -1 at max_length."""
    if buffer_length == 0:
        return np.zeros(len(lengths))
    excess = np.clip(lengths - (max_length - buffer_length), 0, None)
    return -excess / buffer_length


class Span(NamedTuple):
    """A stretch of time of one rank."""

    kind: str
    begin_s: float
    """Time of the rank's clock, time.perf_counter."""
    end_s: float


def total_s(spans: Iterable[Span], kind: str) -> float:
    return sum(end - begin for name, begin, end in spans if name == kind)


class ForwardRecord(NamedTuple):
    """One forward of a rollout on one rank: its load, its rows and its time."""

    begin_s: float
    """End of the preceding forward or wait: the host's work in between is included."""
    end_s: float
    engine_s: float
    """Seconds in the engine, less propose_s."""
    propose_s: float
    """Seconds spent on proposals: queries and updates."""
    load: Load
    own_rows: int
    """Unfinished rows of this step on this rank before the forward."""
    ahead_rows: int
    """Rows drafted for coming steps."""
    looked_up_rows: int
    """Rows for which drafts were requested."""

    @property
    def kind(self) -> str:
        """Kind in timelines; co-scheduled drafts are alongside rows of this step."""
        if self.ahead_rows:
            return "draft (co-scheduled)" if self.own_rows else "draft (idle)"
        load = self.load
        return "prefill" if load.prompt_tokens else "verify" if load.draft_tokens else "decode"


# Lower bounds of the bins of `Acceptance.accepted_lengths`, in tokens.
ACCEPT_BINS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Source of a proposal: the sample's own draft up to the first difference (aligned), else suffix
# matches in that draft (own), in another sample's draft or tokens (sibling), in the prompt or the
# row's tokens (self), in earlier epochs (history). Sources of mechanisms have their own names.
SOURCES = ("aligned", "own", "sibling", "self", "history")


@dataclass
class Acceptance:
    """Acceptance of drafts in one rollout on one rank, without rows drafted for coming steps."""

    row_forwards: int = 0
    """Decodes and verifications, counted once per row of a forward."""
    gained_tokens: int = 0
    """Tokens that rows gained in these forwards."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    covered_tokens: int = 0
    """Tokens with a proposal, right or wrong."""
    by_source: dict[str, list[int]] = field(default_factory=dict)
    """[proposed, accepted] tokens by source (SOURCES)."""
    accepted_lengths: np.ndarray = field(
        default_factory=lambda: np.zeros(len(ACCEPT_BINS), np.int64)
    )
    """Verifications by accepted tokens, int64 [bins]."""


@dataclass
class IdleUse:
    """One use of idle time in one rollout on one rank."""

    seconds: float = 0.0
    """Seconds of this rank, waiting or alongside rows of its own."""
    expected_s: float = 0.0
    """Predicted seconds saved by the jobs assigned to this rank."""
    saved_s: float = 0.0
    """Estimated seconds saved in this rollout's step by this use of all ranks; NaN if unknown."""


@dataclass
class RolloutRecord:
    """One rollout on one rank. Times are seconds of the rank's clock."""

    began_s: float = 0.0
    ended_s: float = 0.0
    forwards: list[ForwardRecord] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    """Spans with nothing to do until the next tick."""
    slices: list[Span] = field(default_factory=list)
    """Pieces of idle work that took no forwards."""
    shared: list[Span] = field(default_factory=list)
    """Spans in which all ranks decoded the last rows together, after a take-over."""
    shared_forwards: list[ForwardRecord] = field(default_factory=list)
    """Forwards of all ranks together, not in `forwards`. The load is that of all ranks' rows;
    own_rows and looked_up_rows are this rank's."""
    num_ticks: int = 0
    drafted_tokens: int = 0
    """Tokens drafted for coming steps."""
    drafts_begun: int = 0
    """Drafts begun or continued alongside rows of this step."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    modelled_s: float = 0.0
    """Seconds that the cost model predicts for the same responses without drafts; the same on every
    rank."""
    saved_s: float = 0.0
    """`modelled_s` minus the measured seconds; the same on every rank."""
    idle: dict[str, IdleUse] = field(default_factory=dict)
    """Uses of idle time, by name."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Records of mechanisms, for their own metrics."""

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
    def host_s(self) -> float:
        """Seconds between the forwards of this rank's rows: ticks, and starts of drafts."""
        own = (f for f in self.forwards if f.own_rows)
        return sum(f.end_s - f.begin_s - f.engine_s - f.propose_s for f in own)

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
        """Activities in order of time; successive forwards of one kind are one span."""
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
    """A step on one rank. Samples and rewards are the same on all ranks, times are not."""

    step: int
    samples: Samples
    """Samples that are trained on."""
    rewards: np.ndarray
    """float64 [groups, generations], combined rewards of `samples`."""
    generated: Samples
    """All samples but deferred ones, with the groups that dynamic sampling has replaced."""
    all_rewards: np.ndarray
    """float64 [groups, generations], combined rewards of `generated`."""
    owners: np.ndarray
    """int64 [samples], the rank that generated each sample of `generated`."""
    batch_sizes: list[int]
    """Groups per rollout of the step."""
    rollouts: list[RolloutRecord]
    stages: list[Span]
    """Successive spans: gen, wait and reward for each rollout, then train."""
    spans: list[Span]
    """Details within the stages, apart from forwards: exchange, sync."""
    drafts: dict[SampleId, Draft]
    """Drafts that the step's samples had before they were generated."""
    expected_s: float = math.nan
    """Predicted seconds until this rank finishes its rows; NaN if unknown."""
    advantages: np.ndarray = field(default_factory=lambda: np.empty(0))
    """float64 [samples], of `samples`; set by the update."""
    deferred: dict[SampleId, int] = field(default_factory=dict)
    """Deferred samples, with their length when the rollout ended."""
    logged: dict[SampleId, dict] = field(default_factory=dict)
    """Columns that reward functions have logged of samples."""

    @property
    def seconds(self) -> float:
        """Seconds of all stages so far."""
        return self.stages[-1].end_s - self.stages[0].begin_s
