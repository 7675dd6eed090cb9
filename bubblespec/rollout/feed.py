"""The feed of a rollout's rows, and the interface of their proposer, as the loop sees both."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from bubblespec.engine.engine import Engine, Proposer
from bubblespec.idle.task import RankView
from bubblespec.records import Acceptance
from bubblespec.types import Row


class RolloutProposer(Proposer, Protocol):
    """A source of draft tokens over a rollout; see draft/proposer.py."""

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance of drafts in this rollout so far."""

    def take_spent(self) -> tuple[float, int]:
        """Return seconds spent and rows queried since the last call."""

    def catch_up(self, is_free: bool) -> None:
        """Do postponed work. is_free: a GPU computes meanwhile."""

    def extend(self, row: Row, ids: np.ndarray) -> None:
        """Note tokens that an environment has appended to a row."""


class RowFeed:
    """Feeds the rows of one rollout on one rank.

    By default all rows go into the engine at once, and are complete when they leave it.
    """

    engine: Engine
    is_running = False
    """Whether rows may have to wait for something outside the engine."""

    def start(self, view: RankView, proposer: RolloutProposer | None) -> None:
        """Begin with the rows of `view.unfinished`, in their order."""
        self.engine = view.engine
        self.engine.add(list(view.unfinished))

    def advance(self, finished: Iterable[Row] = ()) -> list[Row]:
        """Return complete rows. finished: rows that the engine has just returned."""
        return list(finished)

    def drop(self, row: Row) -> None:
        """Take an unfinished row out of the rollout; the row keeps its tokens."""
        self.engine.drop(row)

    def wait(self) -> None:
        """Wait a moment for whatever blocks rows. Called while `is_running`."""

    def close(self) -> None:
        """End the rollout."""
