"""What is generated: prompts, groups, ids of samples, rows, drafts, and a step's samples.

Plain data. This module imports no other module of the package.
"""

import hashlib
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import numpy as np


class SampleId(NamedTuple):
    """Id of a response and, with the run's seed, the key of its noise. Under equal weights a
    response is the same wherever and whenever it is generated."""

    uid: int
    """Prompt id (63 bits), stable across runs on the same data."""
    visit: int
    """Number of earlier draws of this prompt in the data order, below 2**31."""
    sample: int
    """Number within its group, below 2**12."""


@dataclass
class Prompt:
    """One prompt of the data."""

    uid: int
    """See `SampleId`."""
    text: str | list[dict]
    """String or chat messages."""
    token_ids: tuple[int, ...]
    columns: dict
    """Columns that reward functions get alongside prompt and response."""


class Group(NamedTuple):
    """One draw of a prompt by a step."""

    prompt: Prompt
    visit: int
    """See `SampleId`."""

    @property
    def name(self) -> tuple[int, int]:
        """(uid, visit), unique within a run."""
        return self.prompt.uid, self.visit

    def sample(self, number: int) -> SampleId:
        """Return the id of one of the group's responses."""
        return SampleId(self.prompt.uid, self.visit, number)


def ids_of(groups: list[Group], num_generations: int) -> list[SampleId]:
    """Return the id of each sample in canonical order: by group, then by number."""
    return [group.sample(number) for group in groups for number in range(num_generations)]


@dataclass(eq=False)
class Row:
    """One response, to be generated or complete. A row with tokens continues after them."""

    id: SampleId
    prompt: tuple[int, ...]
    max_new_tokens: int
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64, the response with its stop token."""
    logprob: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    """float32, of each token under the distribution that it was drawn from; NaN for tokens of an
    environment."""
    full_logprob: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    """float32, of each token under the policy at the sampling temperature, without truncation; NaN
    like `logprob`."""
    finish: str | None = None
    """"stop", "length", or None while unfinished."""
    has_turns: bool = False
    """Whether a stop token ends a turn, after which an environment may add tokens."""


@dataclass
class Draft:
    """Tokens of a sample under older weights."""

    tokens: np.ndarray
    """int32."""
    is_finished: bool
    """Whether the draft is a complete response."""
    version: int
    """Updates of the weights that last extended the draft."""


class Launch(NamedTuple):
    """Groups that a rollout starts, and how many of them are trained on."""

    groups: list[Group]
    num_trained: int
    """How many groups the step trains on: those that finish first by length. The rest are
    deferred."""
    num_generations: int
    """Responses per group."""

    @property
    def selects(self) -> bool:
        """Whether some groups are deferred."""
        return self.num_trained < len(self.groups)

    @property
    def ids(self) -> list[SampleId]:
        """Id of each sample, by group, then by number."""
        return ids_of(self.groups, self.num_generations)


@dataclass
class Samples:
    """S = groups x generations responses in canonical order: by group, then by number."""

    groups: list[Group]
    num_generations: int
    tokens: list[np.ndarray]
    """int32, one array per sample, with the stop token."""
    logprob: list[np.ndarray]
    """float32, see `Row`."""
    full_logprob: list[np.ndarray]
    """float32, see `Row`."""
    is_truncated: np.ndarray
    """bool [S], whether the length limit cut the response off."""
    rewards: np.ndarray
    """float64 [S, functions], NaN where a function does not apply."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def ids(self) -> list[SampleId]:
        """Id of each sample."""
        return ids_of(self.groups, self.num_generations)

    def prompt_of(self, index: int) -> Prompt:
        """Return the prompt of sample `index`."""
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
        """Of these, the tokens that were sampled, int64 [S]."""
        return count_sampled(self.full_logprob)

    def of_groups(self, numbers: list[int]) -> "Samples":
        """Return the samples of some of the groups, in the given order."""
        size = self.num_generations
        rows = [n * size + j for n in numbers for j in range(size)]
        return Samples(
            [self.groups[n] for n in numbers],
            size,
            [self.tokens[row] for row in rows],
            [self.logprob[row] for row in rows],
            [self.full_logprob[row] for row in rows],
            self.is_truncated[rows],
            self.rewards[rows],
        )

    def __add__(self, other: "Samples") -> "Samples":
        """Append the groups of another step or rollout."""
        return Samples(
            self.groups + other.groups,
            self.num_generations,
            self.tokens + other.tokens,
            self.logprob + other.logprob,
            self.full_logprob + other.full_logprob,
            np.concatenate((self.is_truncated, other.is_truncated)),
            np.concatenate((self.rewards, other.rewards)),
        )


def is_sampled(logprob: np.ndarray) -> np.ndarray:
    """Return which tokens of a response were sampled, bool [L]. logprob: [L], see `Row`."""
    return ~np.isnan(logprob)


def count_sampled(logprobs: list[np.ndarray]) -> np.ndarray:
    """Count the sampled tokens of each response, int64 [S]. logprobs: see `Row`."""
    return np.array([np.count_nonzero(is_sampled(logprob)) for logprob in logprobs])


def digest(samples: Samples) -> str:
    """Return the SHA-256 of id, length and tokens of all samples, ordered by id: equal digests mean
    equal tokens."""
    sha = hashlib.sha256()
    named = zip(samples.ids, samples.tokens, strict=True)
    for name, tokens in sorted(named, key=itemgetter(0)):
        sha.update(np.array([*name, len(tokens)], "<i8").tobytes())
        sha.update(tokens.astype("<i4").tobytes())
    return sha.hexdigest()


def has_rewards(rewards: np.ndarray) -> np.ndarray:
    """Return which groups have rewards for all samples, bool [groups]; the update leaves the others
    out. rewards: [groups, generations], NaN where a sample has none."""
    return ~np.isnan(rewards).any(axis=1)


def has_zero_std(rewards: np.ndarray) -> np.ndarray:
    """Return which groups have equal rewards, bool [groups]: compared within the group they give no
    gradient. rewards: [groups, generations]."""
    return np.ptp(rewards, axis=1) < 1e-8
