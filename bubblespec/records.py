"""What the parts of a run hand to each other: samples and their names, rows, forwards, spans of time, rollouts and steps.

Plain data. This module imports none of the package's others, so each of them may import it.
"""

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


class Span(NamedTuple):
    """A stretch of time on one rank."""

    kind: str
    """What it was spent on; timeline.COLOURS has them all."""
    begin_s: float
    """By this rank's time.perf_counter."""
    end_s: float
    """By the same clock."""


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
