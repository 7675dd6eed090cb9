"""The samples of a step, and their digest, lengths and rewards."""

import hashlib
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from bubblespec.types import Group, Prompt, SampleId, ids_of, is_sampled


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
    return np.array([np.count_nonzero(is_sampled(logprob)) for logprob in logprobs])


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
