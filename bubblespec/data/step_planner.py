"""Which groups make up a step, and which ones come next: the same on every rank, and part of what a checkpoint saves.

A planner names groups by prompt and visit. What it decides depends on the data, the step and the groups that have had their turn,
never on a clock or a rank: any number of ranks on any machine trains on the same tokens.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from bubblespec.data.prompts import PromptSet
from bubblespec.records import Group


class StepPlanner(Protocol):
    """The rule of a run."""

    def launch(self, step: int) -> list[Group]:
        """The groups that the rollout of a step starts."""

    def upcoming(self, step: int, depth: int, used: list[Group] | None = None) -> list[list[Group]]:
        """What the up to `depth` steps after `step` will start, as far as is known while `step` is generated, nearest first.

        used: all groups that `step` has drawn so far, by default those of `launch`.
        """

    def replacements(self, step: int, count: int, used: list[Group]) -> list[Group]:
        """Up to `count` further groups for a step that has used some, of other prompts (dynamic sampling)."""

    def finish(self, groups: Iterable[Group]) -> None:
        """These groups have had their turn: they are never drawn again under the same name."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """All that the rule depends on beside the data and the configuration."""

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state."""


class InOrder:
    """Every step takes the next prompts of the data order, and trains on all of them."""

    def __init__(self, prompts: PromptSet, seed: int, num_prompts: int):
        """num_prompts: of a step."""
        self.prompts, self.seed, self.num_prompts = prompts, seed, num_prompts
        self._visits: Counter[int] = Counter()  # by uid

    def launch(self, step: int) -> list[Group]:
        """See `StepPlanner`."""
        return self._draw(step, Counter())

    def upcoming(self, step: int, depth: int, used: list[Group] | None = None) -> list[list[Group]]:
        """See `StepPlanner`. Replacements that `step` is still going to draw are not foreseen."""
        drawn = Counter(group.prompt.uid for group in (self.launch(step) if used is None else used))  # and not over yet
        batches = []
        for coming in range(step + 1, step + 1 + depth):
            batches.append(self._draw(coming, drawn))
            drawn.update(group.prompt.uid for group in batches[-1])
        return batches

    def replacements(self, step: int, count: int, used: list[Group]) -> list[Group]:
        """See `StepPlanner`. In an order of the step's own."""
        drawn = self.prompts.extra(self.seed, step, count, {group.prompt.uid for group in used})
        return [Group(prompt, self._visits[prompt.uid]) for prompt in drawn]

    def finish(self, groups: Iterable[Group]) -> None:
        """See `StepPlanner`."""
        self._visits.update(group.prompt.uid for group in groups)

    def state_dict(self) -> dict[str, np.ndarray]:
        """uids and their visits, int64 [prompts drawn so far]."""
        return {"uids": np.array(list(self._visits), np.int64), "visits": np.array(list(self._visits.values()), np.int64)}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """See `StepPlanner`."""
        self._visits = Counter(dict(zip(state["uids"].tolist(), state["visits"].tolist(), strict=True)))

    def _draw(self, step: int, drawn: Counter[int]) -> list[Group]:
        """The prompts of a step. drawn: visits, by uid, on top of those that are over."""
        prompts = self.prompts.batch(self.seed, step, self.num_prompts)
        return [Group(prompt, self._visits[prompt.uid] + drawn[prompt.uid]) for prompt in prompts]
