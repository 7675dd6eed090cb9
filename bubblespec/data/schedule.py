"""Which groups make up a step, and which ones come next: the same on every rank, and part of what a
checkpoint saves.

A schedule names groups by prompt and visit. What it decides depends on the data, the step and the
responses that have had their turn, never on a clock or a rank: any number of ranks on any machine
trains on the same tokens. tail_batching.py has another one.
"""

from collections import Counter
from typing import Protocol

import numpy as np

from bubblespec.data.prompts import PromptSet
from bubblespec.types import Group, Launch, Prompt, SampleId, Samples


class StepSchedule(Protocol):
    """The rule of a run."""

    def launch(self, step: int) -> Launch:
        """What the rollout of a step starts."""

    def upcoming(self, step: int, depth: int, used: list[Group] | None = None) -> list[list[Group]]:
        """What the up to `depth` steps after `step` will start, as far as is known while `step` is
        generated, nearest first.

        used: all groups that `step` has drawn so far, by default those of `launch`.
        """

    def replacements(self, step: int, count: int, used: list[Group]) -> list[Group]:
        """Up to `count` further groups for a step that has used some, of other prompts (dynamic
        sampling)."""

    @property
    def deferred(self) -> list[Group]:
        """Groups that were launched and whose turn is still to come, the oldest first."""

    def finish(self, samples: Samples, deferred: dict[SampleId, int]) -> None:
        """A step that was launched is over. samples: those that have had their turn, which are
        never drawn again under the same name; deferred: see `StepRecord`."""

    def metrics(self) -> dict[str, float]:
        """Of the step that is over, where there is anything to say."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """All that the rule depends on besides the data and the configuration."""

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state."""


class InOrder:
    """Every step takes the next prompts of the data order, and trains on all of them."""

    def __init__(self, prompts: PromptSet, seed: int, num_prompts: int, num_generations: int):
        """num_prompts: of a step; num_generations: responses of each."""
        self.prompts = prompts
        self.seed = seed
        self.num_prompts = num_prompts
        self.num_generations = num_generations
        self.deferred: list[Group] = []
        self._visits: Counter[int] = Counter()  # of the steps that are over, by uid

    def launch(self, step: int) -> Launch:
        """See `StepSchedule`."""
        groups = self._draw(step, Counter())
        return Launch(groups, self.num_prompts, self.num_generations, self.num_generations)

    def upcoming(self, step: int, depth: int, used: list[Group] | None = None) -> list[list[Group]]:
        """See `StepSchedule`. Replacements that `step` is still going to draw are not foreseen."""
        used = self.launch(step).groups if used is None else used
        drawn = Counter(group.prompt.uid for group in used)
        return [self._draw(coming, drawn) for coming in range(step + 1, step + 1 + depth)]

    def replacements(self, step: int, count: int, used: list[Group]) -> list[Group]:
        """See `StepSchedule`. In an order of the step's own."""
        prompts = self.prompts.extra(self.seed, step, count, {group.prompt.uid for group in used})
        return name_groups(prompts, self._visits, Counter())

    def finish(self, samples: Samples, deferred: dict[SampleId, int]) -> None:
        """See `StepSchedule`."""
        self._visits.update(group.prompt.uid for group in samples.groups)

    def metrics(self) -> dict[str, float]:
        """See `StepSchedule`."""
        return {}

    def state_dict(self) -> dict[str, np.ndarray]:
        """See `save_visits`."""
        return save_visits(self._visits)

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """See `StepSchedule`."""
        self._visits = load_visits(state)

    def _draw(self, step: int, drawn: Counter[int]) -> list[Group]:
        prompts = self.prompts.batch(self.seed, step, self.num_prompts)
        return name_groups(prompts, self._visits, drawn)


def name_groups(prompts: list[Prompt], visits: Counter[int], drawn: Counter[int]) -> list[Group]:
    """The next visit of each prompt. visits: by uid; drawn: further ones that are not over yet, to
    which these are added."""
    groups = []
    for prompt in prompts:
        groups.append(Group(prompt, visits[prompt.uid] + drawn[prompt.uid]))
        drawn[prompt.uid] += 1
    return groups


def save_visits(visits: Counter[int]) -> dict[str, np.ndarray]:
    """uids and their visits, int64 [prompts drawn so far]."""
    return {
        "uids": np.array(list(visits), np.int64),
        "visits": np.array(list(visits.values()), np.int64),
    }


def load_visits(state: dict[str, np.ndarray]) -> Counter[int]:
    """The same, from a saved state."""
    return Counter(dict(zip(state["uids"].tolist(), state["visits"].tolist(), strict=True)))
