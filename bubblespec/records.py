"""What the parts of a run hand to each other: samples and their names, rows, forwards, spans of time, rollouts and steps.

Plain data. This module imports none of the package's others, so each of them may import it.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class SampleId(NamedTuple):
    """The name of a response; with the run's seed, the key of its noise. A response is the same wherever and whenever it is
    generated, as long as the weights are."""

    uid: int
    """Of the prompt, 63 bits; the same in every run on the same data."""
    visit: int
    """How often the data order has drawn this prompt before, below 2**31."""
    sample: int
    """Number within its group, below 2**12."""


@dataclass
class Prompt:
    """One prompt of the data."""

    uid: int
    """63 bits, stable across runs."""
    text: str | list[dict]
    """A string or chat messages."""
    token_ids: tuple[int, ...]
    columns: dict
    """What the reward functions are given beside prompt and response."""


@dataclass(eq=False)
class Row:
    """One response to generate, and afterwards the response. A row with tokens goes on after them."""

    id: SampleId
    prompt: tuple[int, ...]
    max_new_tokens: int
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64, the response with its stop token."""
    logprob: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    """float32, of each token under the distribution that it was drawn from."""
    full_logprob: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    """float32, of each token under the policy at the sampling temperature, without truncation."""
    finish: str | None = None
    """"stop", "length", or None while it is not finished."""


@dataclass
class Draft:
    """The tokens that older weights gave a sample."""

    tokens: np.ndarray
    """int32."""
    is_finished: bool
    """It ends as a response does."""
    version: int
    """Updates of the weights that last extended it."""
    holder: int = -1
    """The rank that has it in its engine, to go on with it in the next rollout, or -1."""


class Load(NamedTuple):
    """What a forward has to do."""

    rows: int
    """Active rows."""
    tokens: int
    """Tokens fed."""
    wide_rows: int
    """Rows that feed more than one token."""
    positions: int
    """Positions attended to, summed over rows."""
    prompt_tokens: int
    """Of the tokens, those of prompts."""
    draft_tokens: int
    """Of the tokens, those of drafts."""


class Group(NamedTuple):
    """A prompt as one step draws it: its samples are those of this visit."""

    prompt: Prompt
    visit: int
    """How often the data order has drawn the prompt before."""

    @property
    def name(self) -> tuple[int, int]:
        """uid and visit: no two groups of a run have the same."""
        return self.prompt.uid, self.visit

    def sample(self, number: int) -> SampleId:
        """The name of one of its responses."""
        return SampleId(self.prompt.uid, self.visit, number)


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
    """Where the forward before it, or a wait, has ended, by the rank's clock: the host's work in between is in it."""
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
        """For timelines: draft soft (beside rows of this step), draft hard (without), prefill, verify or decode."""
        if self.ahead_rows:
            return "draft soft" if self.own_rows else "draft hard"
        return "prefill" if self.prompt_tokens else "verify" if self.draft_tokens else "decode"


# Numbers of active rows, each up to the next, by which chains of the drafter are counted.
CHAIN_ROWS = (1, 2, 3, 5, 9, 17, 33, 65)
# Lower bounds of the bins of `Acceptance.accepted_lengths`, in tokens.
ACCEPT_BINS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Lower bounds of the stretches of a response in which acceptance is counted, in tokens: later tokens may be harder to foresee.
POSITIONS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Where a proposal comes from: the sample's own draft up to their first difference (aligned), else suffix matches in that draft
# (own), in another sample's draft or tokens (sibling), in the prompt or the row's tokens (self), in earlier epochs; the drafter.
SOURCES = ("aligned", "own", "sibling", "self", "history", "drafter")


@dataclass
class Acceptance:
    """What came of proposals in one rollout on one rank. Counts rows of its step, not those drafted for coming ones."""

    row_forwards: int = 0
    """Decodes and verifications, one for each row of a forward."""
    gained_tokens: int = 0
    """Tokens that rows gained in them."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    covered_tokens: int = 0
    """Tokens for which there was a proposal, right or wrong."""
    before_divergence: np.ndarray = field(default_factory=lambda: np.zeros((len(POSITIONS), 2), np.int64))
    """Tokens tried and accepted of drafts up to their first difference from the response, which is counted as tried; by where in
    the response the verification began (POSITIONS), int64 [positions, 2]."""
    after_divergence: list[int] = field(default_factory=lambda: [0, 0])
    """[tokens gained, those that the own draft gave] of rows behind that difference, as far as their draft reaches."""
    by_source: dict[str, list[int]] = field(default_factory=dict)
    """[proposed, accepted] by name (SOURCES)."""
    by_age: dict[int, list[int]] = field(default_factory=dict)
    """[proposed, accepted] of aligned drafts, by the updates since they were last extended."""
    accepted_lengths: np.ndarray = field(default_factory=lambda: np.zeros(len(ACCEPT_BINS), np.int64))
    """Verifications by accepted tokens, int64 [bins]."""


@dataclass
class IdleUse:
    """What came of one use of idle time in one rollout on one rank."""

    seconds: float = 0.0
    """That this rank has spent on it, in hard bubbles and, where it slowed rows of its own down, beside them."""
    expected_s: float = 0.0
    """Of wall time, that the offers which this rank was given were expected to save."""
    brought_s: float = 0.0
    """Of wall time, that the use as a whole is estimated to have saved in this rollout's step; the same on every rank."""


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
    """In which all ranks together decoded the last rows of all of them (shared_tail.py); its forwards are not in `forwards`."""
    shared_rows: int = 0
    """Of this rank, that were unfinished when it began."""
    shared_forwards: int = 0
    num_ticks: int = 0
    drafted_tokens: int = 0
    """For coming steps."""
    taken_rows: int = 0
    """Rows that came from another rank."""
    first_taken_s: float = math.inf
    """When the first of them came, to a rank that had finished its own."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    idle: dict[str, IdleUse] = field(default_factory=dict)
    """By the name of the use."""

    @property
    def own_forwards(self) -> int:
        """Forwards while rows of this step were unfinished on this rank."""
        return sum(forward.own_rows > 0 for forward in self.forwards)

    @property
    def hard_forwards(self) -> int:
        """Forwards after that: in a hard bubble."""
        return len(self.forwards) - self.own_forwards

    @property
    def own_s(self) -> float:
        """Seconds until this rank's rows of this step were done."""
        return max((forward.end_s for forward in self.forwards if forward.own_rows), default=self.began_s) - self.began_s

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
        started = [
            Span(
                "take over" if f.own_rows and f.begin_s >= self.first_taken_s else f.kind,
                f.end_s - f.engine_s - f.propose_s,
                f.end_s,
            )
            for f in self.forwards
        ]
        for span in sorted((*started, *self.waits, *self.slices, *self.shared), key=lambda span: span.begin_s):
            if spans and spans[-1].kind == span.kind:
                span = Span(span.kind, spans.pop().begin_s, span.end_s)
            spans.append(span)
        return spans


class Launch(NamedTuple):
    """What a rollout starts, and how much of it is trained on."""

    groups: list[Group]
    num_trained: int
    """Of the groups: those whose longest response is shortest. The others are deferred to a later step."""
    num_generations: int
    """Responses of each group."""
    num_kept: int
    """Of these, the shortest that its group is trained on; all, but for the race within a group."""

    @property
    def selects(self) -> bool:
        """Whether some of it is not trained on in this step."""
        return self.num_trained < len(self.groups) or self.num_kept < self.num_generations

    @property
    def ids(self) -> list[SampleId]:
        """The name of each sample, by group, then by number."""
        return [group.sample(number) for group in self.groups for number in range(self.num_generations)]


@dataclass
class Samples:
    """S = groups x generations responses in canonical order: by group, then by number."""

    groups: list[Group]
    num_generations: int
    numbers: np.ndarray
    """int64 [S], of each sample within its group."""
    tokens: list[np.ndarray]
    """int, one array a sample, with the stop token."""
    logprob: list[np.ndarray]
    """float32, see `Row`; the next too."""
    full_logprob: list[np.ndarray]
    is_truncated: np.ndarray
    """bool [S], cut off by the length limit."""
    rewards: np.ndarray
    """float64 [S, functions], NaN where a function does not apply."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def ids(self) -> list[SampleId]:
        """The name of each sample."""
        groups = (group for group in self.groups for _ in range(self.num_generations))
        return [group.sample(number) for group, number in zip(groups, self.numbers.tolist(), strict=True)]

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of sample `index`."""
        return self.groups[index // self.num_generations].prompt

    @property
    def lengths(self) -> np.ndarray:
        """Response tokens of each sample, int64 [S]."""
        return np.array([len(t) for t in self.tokens])

    def of_groups(self, numbers: list[int]) -> "Samples":
        """The samples of some of the groups, in the order given."""
        rows = [n * self.num_generations + j for n in numbers for j in range(self.num_generations)]
        return Samples(
            [self.groups[n] for n in numbers],
            self.num_generations,
            self.numbers[rows],
            *([values[i] for i in rows] for values in (self.tokens, self.logprob, self.full_logprob)),
            self.is_truncated[rows],
            self.rewards[rows],
        )

    def __add__(self, other: "Samples") -> "Samples":
        """The other's groups after these."""
        return Samples(
            self.groups + other.groups,
            self.num_generations,
            np.concatenate((self.numbers, other.numbers)),
            self.tokens + other.tokens,
            self.logprob + other.logprob,
            self.full_logprob + other.full_logprob,
            np.concatenate((self.is_truncated, other.is_truncated)),
            np.concatenate((self.rewards, other.rewards)),
        )


def digest(samples: Samples) -> str:
    """SHA-256 over the name, length and token ids of all samples, ordered by name: equal digests are equal tokens."""
    sha = hashlib.sha256()
    for name, tokens in sorted(zip(samples.ids, samples.tokens, strict=True), key=lambda entry: entry[0]):
        sha.update(np.array([*name, len(tokens)], "<i8").tobytes())
        sha.update(tokens.astype("<i4").tobytes())
    return sha.hexdigest()


def has_zero_std(rewards: np.ndarray) -> np.ndarray:
    """Whether a group's samples all got the same reward, bool [groups]: compared within their group they give no gradient.

    rewards: [groups, generations].
    """
    return np.ptp(rewards, axis=1) < 1e-8


@dataclass
class StepRecord:
    """A step as this rank saw it. Samples and rewards are the same on all ranks, times are not."""

    step: int
    samples: Samples
    """What is trained on."""
    rewards: np.ndarray
    """float64 [groups, generations], of those, combined."""
    generated: Samples
    """Everything that had its turn, groups that dynamic sampling has replaced included, but none that is deferred."""
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
    """What was done in them in detail, beside the forwards: exchange, sync."""
    drafts: dict[SampleId, Draft]
    """Those that the samples of the step had before they were generated."""
    used: list[Group]
    """All groups that the step has launched."""
    expected_s: float = math.nan
    """In which this rank was expected to be done with its rows; NaN where nobody knew."""
    deferred: dict[SampleId, int] = field(default_factory=dict)
    """Samples that were launched and have not had their turn, with the tokens that they had when the rollout ended."""

    @property
    def seconds(self) -> float:
        """Of all stages so far."""
        return self.stages[-1].end_s - self.stages[0].begin_s
