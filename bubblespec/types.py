"""What is generated: prompts, groups, ids of samples, rows and drafts; and the work of a forward.

Plain data. This module imports no other module of the package."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

HEADS = "_bubblespec_heads"  # of a model: tensors of its heads that predict further tokens, by name


class SampleId(NamedTuple):
    """Id of a response and, with the run's seed, the key of its noise.

    Under equal weights equal ids have equal responses, on any rank and at any time."""

    prompt_id: int
    """Prompt id (63 bits), stable across runs on the same data."""
    draw_index: int
    """Number of earlier draws of this prompt in the data order, below 2**31."""
    sample: int
    """Number within its group, below 2**12."""


@dataclass
class Prompt:
    """One prompt of the data."""

    prompt_id: int
    """Prompt id (63 bits), stable across runs on the same data."""
    text: str | list[dict]
    """String or chat messages."""
    token_ids: tuple[int, ...]
    columns: dict
    """Columns that reward functions get alongside prompt and response."""


class Group(NamedTuple):
    """One draw of a prompt by a step."""

    prompt: Prompt
    draw_index: int
    """Number of earlier draws of this prompt in the data order."""

    @property
    def name(self) -> tuple[int, int]:
        """(prompt_id, draw_index), unique within a run."""
        return self.prompt.prompt_id, self.draw_index

    def sample(self, number: int) -> SampleId:
        """Return the id of one of the group's responses."""
        return SampleId(self.prompt.prompt_id, self.draw_index, number)


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
    finish: str | None = None
    """"stop", "length", or None while unfinished."""
    draft: "Draft | None" = None
    """Draft of the row, by which its proposals begin."""
    number: int = -1
    """Number within its rollout: index in the launch, or behind it for a row of a coming step."""
    has_turns: bool = False
    """Whether a stop token ends a turn, after which an environment may add tokens."""


@dataclass
class Draft:
    """Tokens of a sample under older weights."""

    tokens: np.ndarray
    """int32."""
    is_finished: bool
    """Whether the draft is a complete response."""
    version: int = 0
    """Updates of the weights that last extended the draft."""
    reward: float = 0.0
    """Reward, where the draft is a response of an earlier epoch."""


class StepBatch(NamedTuple):
    """Groups that a rollout starts, and how many of them are trained on."""

    groups: list[Group]
    num_trained: int
    """Number of groups that the step trains on, in the order of their longest response. Others are
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


def completion_mask(logprob: np.ndarray) -> np.ndarray:
    """Return which tokens of a response were sampled, bool [L]. logprob: [L], see `Row`."""
    return ~np.isnan(logprob)


class Load(NamedTuple):
    """The work of a forward."""

    rows: int
    """Active rows."""
    tokens: int
    """Tokens fed."""
    wide_rows: int = 0
    """Rows that feed more than one token."""
    positions: int = 0
    """Positions attended to, summed over rows."""
    prompt_tokens: int = 0
    """Prompt tokens among the tokens fed."""
    draft_tokens: int = 0
    """Draft tokens among the tokens fed."""
