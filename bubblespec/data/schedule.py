"""The schedule: which groups make up a step, and which come next.

Its decisions depend on the data, the step and the responses that were trained on, never on a clock
or a rank: any number of ranks on any machine trains on the same tokens. Checkpoints save its state.
"""

import math
from collections import Counter

import numpy as np

from bubblespec.data.prompts import PromptSet
from bubblespec.samples import Samples
from bubblespec.types import Group, Launch, Prompt, SampleId


class StepSchedule:
    """The plain rule: every step trains on the next prompts of the data order.

    `TailBatching` is another rule."""

    def __init__(self, prompts: PromptSet, seed: int, num_prompts: int, num_generations: int):
        """num_prompts: prompts that a step is trained on; num_generations: responses of each."""
        self.prompts, self.seed = prompts, seed
        self.num_prompts, self.num_generations = num_prompts, num_generations
        self._visits: Counter[int] = Counter()  # of all groups drawn in finished steps, by uid

    @property
    def deferred(self) -> list[Group]:
        """Groups that were launched and are still to be trained on, oldest first."""
        return []

    def launch(self, step: int) -> Launch:
        """Return the groups that the rollout of a step starts."""
        groups = self._draw(step * self.num_prompts, self.num_prompts, Counter())
        return Launch(groups, self.num_prompts, self.num_generations)

    def upcoming(self, step: int, depth: int, used: list[Group] | None = None) -> list[list[Group]]:
        """Return the known groups of up to `depth` steps after `step`, nearest first.

        Replacements that `step` will still draw are not foreseen. used: all groups that `step` has
        drawn so far, by default those of `launch`."""
        used = self.launch(step).groups if used is None else used
        drawn = Counter(group.prompt.uid for group in used)
        return [
            self._draw(coming * self.num_prompts, self.num_prompts, drawn)
            for coming in range(step + 1, step + 1 + depth)
        ]

    def replacements(self, step: int, count: int, used: list[Group]) -> list[Group]:
        """Return up to `count` further groups for a step (dynamic sampling).

        Their prompts are neither used nor deferred, and come in an order of the step's own."""
        used_uids = {group.prompt.uid for group in (*used, *self.deferred)}
        prompts = self.prompts.extra(self.seed, step, count, used_uids)
        return self._named(prompts, Counter())

    def finish(self, samples: Samples, deferred: dict[SampleId, int]) -> None:
        """End a launched step. samples: trained on, or replaced; deferred: see `StepRecord`."""
        self._visits.update(group.prompt.uid for group in samples.groups)

    @property
    def epoch(self) -> float:
        """Mean number of finished visits of a prompt."""
        return self._visits.total() / len(self.prompts)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the finished step."""
        return {}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return all state apart from data and configuration."""
        return save_visits(self._visits)

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Load a saved state."""
        uids, visits = state["uids"].tolist(), state["visits"].tolist()
        self._visits = Counter(dict(zip(uids, visits, strict=True)))

    def _draw(self, begin: int, count: int, drawn: Counter[int]) -> list[Group]:
        """Return groups `begin` .. `begin + count` - 1 of the data order. drawn: see `_named`."""
        first, offset = divmod(begin, self.num_prompts)
        steps = range(first, first + math.ceil((offset + count) / self.num_prompts))
        batches = (self.prompts.batch(self.seed, step, self.num_prompts) for step in steps)
        prompts = [prompt for batch in batches for prompt in batch]
        return self._named(prompts[offset : offset + count], drawn)

    def _named(self, prompts: list[Prompt], drawn: Counter[int]) -> list[Group]:
        """Return the next visit of each prompt, and add it to `drawn`, unfinished visits by uid."""
        groups = []
        for prompt in prompts:
            groups.append(Group(prompt, self._visits[prompt.uid] + drawn[prompt.uid]))
            drawn[prompt.uid] += 1
        return groups


def save_visits(visits: Counter[int]) -> dict[str, np.ndarray]:
    """Return uids and their visits, int64 [prompts drawn so far]."""
    return {
        "uids": np.array(list(visits), np.int64),
        "visits": np.array(list(visits.values()), np.int64),
    }
