"""A forward as it is planned, what it feeds, and what computes it.

A runner with a `depth` above 0 computes a forward before the host has the results of the one
before. Such a forward is planned by bounds: how many tokens its rows have by then, and whether they
have ended, is known where their tokens are, on the device. There a row's plan moves on by the
tokens that the row has gained meanwhile (engine/rows.py).

Shape legend: R active rows, N tokens in a forward, M rows that sample in it, S draft tokens, P
tokens of proposals, T positions sampled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bubblespec.engine.pages import Pages
from bubblespec.engine.sampling import Drawn, SamplingParams
from bubblespec.types import Load, Row


class Plan(NamedTuple):
    """A forward by what the host knows when it is planned: sizes, slots and proposals."""

    start: np.ndarray  # int64 [R], position of each active row's first new token
    count: np.ndarray  # type: ignore[assignment]  # tuple.count is not used
    """int64 [R], new tokens of each, drafts included."""
    known: np.ndarray  # int64 [R], tokens that each row is known to have; it may have more
    slots: np.ndarray  # int64 [M], ascending, of rows that sample: they feed all known tokens
    num_proposed: np.ndarray  # int64 [M], tokens of these rows' proposals, which follow known ones
    proposals: np.ndarray  # int64 [P], the proposals one after the other
    load: Load

    @property
    def num_sampled(self) -> np.ndarray:
        """Positions sampled for each row that samples, int64 [M]: as many as may count."""
        return (self.start + self.count - self.known)[self.slots] + 1


class Texts(NamedTuple):
    """Rows whose text the host has written: begun, continued behind an environment's tokens."""

    slots: np.ndarray  # int64 [W]
    length: np.ndarray  # int64 [W], tokens that each row has
    prompt_length: np.ndarray  # int64 [W]
    total: np.ndarray  # int64 [W], tokens at which it ends, prompt included
    tokens: np.ndarray  # int64 [sum of lengths], row after row


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


class Runner:
    """What computes a forward: a model (`ModelRunner`), or in virtual time a recorded text."""

    num_slots: int
    max_length: int  # prompt plus response in tokens
    max_num_batched_tokens: int  # in a forward, at least num_slots
    pages: Pages | None  # of keys and values; None where each slot has room for a whole row
    is_shared = False  # whether ranks compute each forward together

    @property
    def keeps_rows(self) -> bool:
        """Whether forwards are launched by plans, see `launch_ahead`."""
        return False

    @property
    def depth(self) -> int:
        """Forwards that are launched before the results of the one before are read."""
        return 0

    def launch(self, batch: Batch, params: SamplingParams) -> Callable[[], Drawn]:
        """Feed the batch and return the call that waits for its end."""
        raise NotImplementedError

    def launch_ahead(
        self, plan: Plan, texts: Texts, params: SamplingParams, batch: Batch | None
    ) -> Callable[[], Drawn]:
        """Feed a plan's rows from where they stand by then.

        texts: rows whose text has changed other than by forwards; batch: what is fed, where `depth`
        is 0. Of each row that samples `Plan.num_sampled` positions are drawn; those behind its
        draft (rows.py) are invalid."""
        raise NotImplementedError

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
