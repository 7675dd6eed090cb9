"""What a forward feeds, and what computes it.

Shape legend: R active rows, N tokens in a forward, M rows that sample in it, S draft tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from bubblespec.engine.pages import Pages
from bubblespec.engine.sampling import SamplingParams, Verified
from bubblespec.types import Row


class Load(NamedTuple):
    """The work of a forward."""

    rows: int  # active rows
    tokens: int  # tokens fed
    wide_rows: int = 0  # rows that feed more than one token
    positions: int = 0  # positions attended to, summed over rows
    prompt_tokens: int = 0  # prompt tokens among the tokens fed
    draft_tokens: int = 0  # draft tokens among the tokens fed


@dataclass
class Batch:
    """What a forward feeds, all on the host."""

    start: np.ndarray  # int64 [R], positions of each active row that have keys and values
    count: np.ndarray  # int64 [R], new tokens of each
    index: np.ndarray  # int64 [2, N], slot and position of each new token, row after row
    tokens: np.ndarray  # int64 [N], the new tokens
    slots: np.ndarray  # int64 [M], ascending, of rows that sample: they feed all known tokens
    generated: np.ndarray  # int64 [M], response tokens that these rows have
    num_draft: np.ndarray  # int64 [M], draft tokens of these rows
    draft: np.ndarray  # int64 [S], the drafts one after the other
    load: Load


class Runner(Protocol):
    """What computes a forward: a model (`ModelRunner`), or in virtual time a recorded text."""

    num_slots: int
    max_length: int  # prompt plus response in tokens
    max_num_batched_tokens: int  # in a forward, at least num_slots
    pages: Pages | None  # of keys and values; None where each slot has room for a whole row

    def launch(self, batch: Batch, params: SamplingParams) -> Callable[[], Verified]:
        """Feed the batch and return the call that waits for its end and verifies its drafts."""

    def place(self, slot: int, row: Row) -> None:
        """Note that a row, with its tokens so far in it, comes into a slot."""

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first `length` positions of a row to slot `target`, where the row continues."""

    def share(self, source: np.ndarray, target: np.ndarray, length: np.ndarray) -> None:
        """Give slots `target` the first `length` positions of slots `source`, int64 [n] each."""

    def reset(self) -> None:
        """Note that no slot has a row, and that the weights may have changed."""

    def release(self) -> None:
        """Give the memory of keys and values back until the next forward. No slot has a row."""
