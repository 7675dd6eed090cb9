"""What is generated: prompts and groups of responses, the names of responses, rows in the making,
drafts, and a step's samples.

Plain data. This module imports none of the package's others, so each of them may import it.
"""

import hashlib
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import numpy as np


class SampleId(NamedTuple):
    """The name of a response; with the run's seed, the key of its noise. A response is the same
    wherever and whenever it is generated, as long as the weights are."""

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
    """What the reward functions are given alongside prompt and response."""


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


def ids_of(groups: list[Group], num_generations: int) -> list[SampleId]:
    """The name of each sample in canonical order: by group, then by number."""
    return [group.sample(number) for group in groups for number in range(num_generations)]


@dataclass(eq=False)
class Row:
    """One response to generate, and afterwards the response. A row with tokens continues after
    them."""

    id: SampleId
    prompt: tuple[int, ...]
    max_new_tokens: int
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64, the response with its stop token."""
    logprob: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    """float32, of each token under the distribution that it was drawn from; NaN if it was not
    sampled, but is an environment's."""
    full_logprob: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    """float32, of each token under the policy at the sampling temperature, without truncation; NaN
    as `logprob`."""
    finish: str | None = None
    """"stop", "length", or None while it is not finished."""
    has_turns: bool = False
    """A stop token ends a turn, after which an environment may have something to say: tokens whose
    log-probabilities are NaN."""


@dataclass
class Draft:
    """The tokens that older weights gave a sample."""

    tokens: np.ndarray
    """int32."""
    is_finished: bool
    """It ends as a response does."""
    version: int
    """Updates of the weights that last extended it."""


class Launch(NamedTuple):
    """What a rollout starts, and how much of it is trained on."""

    groups: list[Group]
    num_trained: int
    """Of the groups: those whose longest response is shortest. The others are deferred to a later
    step."""
    num_generations: int
    """Responses of each group."""

    @property
    def selects(self) -> bool:
        """Whether some of it is not trained on in this step."""
        return self.num_trained < len(self.groups)

    @property
    def ids(self) -> list[SampleId]:
        """The name of each sample, by group, then by number."""
        return ids_of(self.groups, self.num_generations)


@dataclass
class Samples:
    """S = groups x generations responses in canonical order: by group, then by number."""

    groups: list[Group]
    num_generations: int
    tokens: list[np.ndarray]
    """int, one array per sample, with the stop token."""
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
        return ids_of(self.groups, self.num_generations)

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of sample `index`."""
        return self.groups[index // self.num_generations].prompt

    @property
    def lengths(self) -> np.ndarray:
        """Response tokens of each sample, int64 [S]."""
        return np.array([len(t) for t in self.tokens])

    @property
    def num_sampled(self) -> np.ndarray:
        """Of these, the tokens that were sampled, int64 [S]."""
        return count_sampled(self.full_logprob)

    def of_groups(self, numbers: list[int]) -> "Samples":
        """The samples of some of the groups, in the order given."""
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
        """The other's groups after these."""
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
    """Which tokens of a response were sampled, bool [L]; the others are an environment's.
    logprob: [L], see `Row`."""
    return ~np.isnan(logprob)


def count_sampled(logprobs: list[np.ndarray]) -> np.ndarray:
    """Sampled tokens of each response, int64 [S]. logprobs: of each, see `Row`."""
    return np.array([np.count_nonzero(is_sampled(logprob)) for logprob in logprobs])


def digest(samples: Samples) -> str:
    """SHA-256 over the name, length and token ids of all samples, ordered by name: equal digests
    are equal tokens."""
    sha = hashlib.sha256()
    named = zip(samples.ids, samples.tokens, strict=True)
    for name, tokens in sorted(named, key=itemgetter(0)):
        sha.update(np.array([*name, len(tokens)], "<i8").tobytes())
        sha.update(tokens.astype("<i4").tobytes())
    return sha.hexdigest()


def has_rewards(rewards: np.ndarray) -> np.ndarray:
    """Whether all of a group's samples have a reward, bool [groups]. A group that lacks one is left
    out of the update.

    rewards: [groups, generations], NaN where a sample has none.
    """
    return ~np.isnan(rewards).any(axis=1)


def has_zero_std(rewards: np.ndarray) -> np.ndarray:
    """Whether a group's samples all got the same reward, bool [groups]: compared within their group
    they give no gradient.

    rewards: [groups, generations].
    """
    return np.ptp(rewards, axis=1) < 1e-8
