"""The interface of scoring, as rollouts see it; see rewards/scorer.py and tools/simulate/run.py."""

from concurrent.futures import Future
from typing import Protocol

import numpy as np

from bubblespec.types import Launch, Row


class Scoring(Protocol):
    """The scores of one rollout's rows on one rank."""

    outcomes: dict[Row, Future]
    """Outcomes of the rows' episodes, where rows are episodes."""

    def on_finished(self, row: Row) -> None:
        """Begin to score a complete row that is trained on."""

    def take_scored(self) -> list[tuple[Row, np.ndarray]]:
        """Return rows scored since the last call, with their scores, float64 [functions]."""

    def collect(self, rows: list[Row]) -> np.ndarray:
        """Return all scores of complete rows, float64 [rows, functions], on all ranks together.

        In an evaluation those of eval.functions come after the rewards."""


class Scorer(Protocol):
    """What begins the scoring of each rollout."""

    takes_environments: bool
    """Whether functions take the environments of episodes."""

    @property
    def names(self) -> list[str]:
        """Names of the rewards."""

    def sees_groups(self, step: int | None) -> bool:
        """Whether functions see whole groups, so that one rank must generate all of a group.

        step: None in an evaluation."""

    def begin(self, launch: Launch, step: int | None) -> Scoring:
        """Begin with a rollout. step: None in an evaluation."""

    def take_metrics(self) -> dict[str, float]:
        """Return metrics since the last call, once per step."""
