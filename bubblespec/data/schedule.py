"""Which groups make up a step, and which ones come next: the same on every rank, and part of what a
checkpoint saves.

A schedule names groups by prompt and visit. What it decides depends on the data, the step and the
responses that have had their turn, never on a clock or a rank: any number of ranks on any machine
trains on the same tokens.
"""

import math
from collections import Counter

import numpy as np

from bubblespec.data.prompts import PromptSet
from bubblespec.types import Group, Launch, Prompt, SampleId, Samples


class StepSchedule:
    """Every step takes the next prompts of the data order and trains on all of them. `TailBatching`
    is another rule."""

    def __init__(self, prompts: PromptSet, seed: int, num_prompts: int, num_generations: int):
        """num_prompts: that a step is trained on; num_generations: responses of each."""
        self.prompts = prompts
        self.seed = seed
        self.num_prompts = num_prompts
        self.num_generations = num_generations
        self._visits: Counter[int] = Counter()  # of all groups drawn in finished steps, by uid

    @property
    def deferred(self) -> list[Group]:
        """Groups that were launched and whose turn is still to come, the oldest first."""
        return []

    def launch(self, step: int) -> Launch:
        """What the rollout of a step starts."""
        groups = self._draw(step * self.num_prompts, self.num_prompts, Counter())
        return Launch(groups, self.num_prompts, self.num_generations)

    def upcoming(self, step: int, depth: int, used: list[Group] | None = None) -> list[list[Group]]:
        """What the up to `depth` steps after `step` will start, as far as is known while `step` is
        generated, nearest first. Replacements that it is still going to draw are not foreseen.

        used: all groups that `step` has drawn so far, by default those of `launch`.
        """
        used = self.launch(step).groups if used is None else used
        drawn = Counter(group.prompt.uid for group in used)
        return [
            self._draw(coming * self.num_prompts, self.num_prompts, drawn)
            for coming in range(step + 1, step + 1 + depth)
        ]

    def replacements(self, step: int, count: int, used: list[Group]) -> list[Group]:
        """Up to `count` further groups for a step that has used some (dynamic sampling): of other
        prompts, none of them deferred, in an order of the step's own."""
        used_uids = {group.prompt.uid for group in (*used, *self.deferred)}
        prompts = self.prompts.extra(self.seed, step, count, used_uids)
        return self._named(prompts, Counter())

    def finish(self, samples: Samples, deferred: dict[SampleId, int]) -> None:
        """A step that was launched is over. samples: those that have had their turn, which are
        never drawn again under the same name; deferred: see `StepRecord`."""
        self._visits.update(group.prompt.uid for group in samples.groups)

    def metrics(self) -> dict[str, float]:
        """Of the step that is over, where there is anything to say."""
        return {}

    def state_dict(self) -> dict[str, np.ndarray]:
        """All that the rule depends on apart from the data and the configuration."""
        return save_visits(self._visits)

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state."""
        uids, visits = state["uids"].tolist(), state["visits"].tolist()
        self._visits = Counter(dict(zip(uids, visits, strict=True)))

    def _draw(self, begin: int, count: int, drawn: Counter[int]) -> list[Group]:
        """Groups `begin` .. `begin + count` - 1 of the data order. drawn: see `_named`."""
        first, offset = divmod(begin, self.num_prompts)
        steps = range(first, first + math.ceil((offset + count) / self.num_prompts))
        batches = (self.prompts.batch(self.seed, step, self.num_prompts) for step in steps)
        prompts = [prompt for batch in batches for prompt in batch]
        return self._named(prompts[offset : offset + count], drawn)

    def _named(self, prompts: list[Prompt], drawn: Counter[int]) -> list[Group]:
        """The next visit of each prompt. drawn: visits that are not over yet, by uid, to which
        these are added."""
        groups = []
        for prompt in prompts:
            groups.append(Group(prompt, self._visits[prompt.uid] + drawn[prompt.uid]))
            drawn[prompt.uid] += 1
        return groups


def save_visits(visits: Counter[int]) -> dict[str, np.ndarray]:
    """uids and their visits, int64 [prompts drawn so far]."""
    return {
        "uids": np.array(list(visits), np.int64),
        "visits": np.array(list(visits.values()), np.int64),
    }
