"""The feed of a rollout's rows, as the loop sees it."""

from collections.abc import Iterable
from typing import Any

from bubblespec.engine.engine import Engine
from bubblespec.idle.task import RankView
from bubblespec.types import Row


class RowFeed:
    """Feeds the rows of one rollout on one rank.

    By default all rows go into the engine at once, and are complete when they leave it.
    """

    engine: Engine
    is_running = False
    """Whether rows may have to wait for something outside the engine."""

    def start(self, view: RankView, proposer: Any) -> None:
        """Begin with the rows of `view.unfinished`, in their order. proposer: see `RolloutPlan`."""
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
