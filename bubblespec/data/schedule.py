"""The schedule: the order of the prompts, which groups make up a step, and which come next.

The batch of step t is a pure function of (seed, t), so any rank can compute the batch of any later
step, which drafting ahead needs. The schedule depends on the data, the step and the responses that
were trained on, never on a clock or a rank: any number of ranks on any machine trains on the same
tokens. Checkpoints save its state."""

import functools
import itertools
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from bubblespec.errors import InputError
from bubblespec.records import Samples
from bubblespec.types import Group, Prompt, SampleId, StepBatch

_EXTRA = 1 << 40  # first epoch of the orders of extra prompts, beyond any real epoch


@functools.lru_cache(maxsize=4)  # this epoch, the next, and extra prompts: all used repeatedly
def _shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the numbers below `count` in an order drawn with the key (seed, epoch); read-only."""
    words = np.array((seed, epoch), np.uint64)  # a list with a number above 2**63 becomes floats
    order = np.random.Generator(np.random.Philox(key=words)).permutation(count)
    order.flags.writeable = False
    return order


@dataclass
class PromptSet:
    """Prompts short enough to train on."""

    prompts: list[Prompt]
    num_dropped: int
    """Prompts left out because they have more than `max_prompt_length` tokens."""
    num_duplicates: int = 0
    """Prompts left out because they are held out, too; the held-out rows themselves not counted."""

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, seed: int, step: int, num_prompts: int) -> list[Prompt]:
        """Return the prompts of `step`, by epochs that are shuffled by (seed, epoch).

        An epoch leaves out a remainder too small for a batch, so no prompt occurs twice in a batch
        (its noise keys would collide)."""
        steps_per_epoch = len(self.prompts) // num_prompts
        if steps_per_epoch == 0:
            too_long = f"; {self.num_dropped} more exceed rollout.max_prompt_length"
            raise InputError(
                f"rollout.num_prompts_per_step: {num_prompts}, but the data has "
                f"{len(self.prompts)} usable prompts{too_long if self.num_dropped else ''}"
            )
        epoch, index = divmod(step, steps_per_epoch)
        order = _shuffled(len(self.prompts), seed, epoch)
        return [self.prompts[i] for i in order[index * num_prompts : (index + 1) * num_prompts]]

    def extra(self, seed: int, step: int, num_prompts: int, used: set[int]) -> list[Prompt]:
        """Return up to `num_prompts` further prompts for `step`, a pure function of the arguments.

        Uids in `used` are left out: their noise keys would be used again."""
        shuffled = (self.prompts[i] for i in _shuffled(len(self.prompts), seed, _EXTRA + step))
        unused = (prompt for prompt in shuffled if prompt.prompt_id not in used)
        return list(itertools.islice(unused, num_prompts))


class StepSchedule:
    """The plain rule, from which others derive: every step trains on the next prompts in order."""

    defers = False
    """Whether steps may leave groups to later ones, with their tokens so far as drafts."""

    def __init__(self, prompts: PromptSet, seed: int, num_prompts: int, num_generations: int):
        """num_prompts: prompts that a step is trained on; num_generations: responses of each."""
        self.prompts, self.seed = prompts, seed
        self.num_prompts, self.num_generations = num_prompts, num_generations
        self._visits: Counter[int] = Counter()  # of all groups of finished steps, by prompt_id

    @property
    def deferred(self) -> list[Group]:
        """Groups that were launched and are still to be trained on, oldest first."""
        return []

    def launch(self, step: int) -> StepBatch:
        groups = self._draw(step * self.num_prompts, self.num_prompts, Counter())
        return StepBatch(groups, self.num_prompts, self.num_generations)

    def upcoming(self, step: int, depth: int, used: list[Group] | None = None) -> list[list[Group]]:
        """Return the known groups of up to `depth` steps after `step`, nearest first.

        Replacements that `step` will still draw are not foreseen. used: all groups that `step` has
        drawn so far, by default those of `launch`."""
        used = self.launch(step).groups if used is None else used
        drawn = Counter(group.prompt.prompt_id for group in used)
        return [
            self._draw(coming * self.num_prompts, self.num_prompts, drawn)
            for coming in range(step + 1, step + 1 + depth)
        ]

    def replacements(self, step: int, count: int, used: list[Group]) -> list[Group]:
        """Return up to `count` further groups for a step (dynamic sampling).

        Their prompts are neither used nor deferred, and come in an order of the step's own."""
        used_uids = {group.prompt.prompt_id for group in (*used, *self.deferred)}
        prompts = self.prompts.extra(self.seed, step, count, used_uids)
        return self._named(prompts, Counter())

    def finish(self, samples: Samples, deferred: dict[SampleId, int]) -> None:
        """End a launched step. samples: trained on, or replaced; deferred: see `StepRecord`."""
        self._visits.update(group.prompt.prompt_id for group in samples.groups)

    @property
    def epoch(self) -> float:
        """Mean number of finished visits of a prompt."""
        return self._visits.total() / len(self.prompts)

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, np.ndarray]:
        return save_visits(self._visits)

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        prompt_ids, visits = state["uids"].tolist(), state["visits"].tolist()
        self._visits = Counter(dict(zip(prompt_ids, visits, strict=True)))

    def _draw(self, begin: int, count: int, drawn: Counter[int]) -> list[Group]:
        """Return groups `begin` .. `begin + count` - 1 of the data order. drawn: see `_named`."""
        first, offset = divmod(begin, self.num_prompts)
        steps = range(first, first + math.ceil((offset + count) / self.num_prompts))
        batches = (self.prompts.batch(self.seed, step, self.num_prompts) for step in steps)
        prompts = [prompt for batch in batches for prompt in batch]
        return self._named(prompts[offset : offset + count], drawn)

    def _named(self, prompts: list[Prompt], drawn: Counter[int]) -> list[Group]:
        """Return the next visit of each prompt, and add it to `drawn`, unfinished ones by id."""
        groups = []
        for prompt in prompts:
            groups.append(Group(prompt, self._visits[prompt.prompt_id] + drawn[prompt.prompt_id]))
            drawn[prompt.prompt_id] += 1
        return groups


def save_visits(visits: Counter[int]) -> dict[str, np.ndarray]:
    return {
        "uids": np.array(list(visits), np.int64),
        "visits": np.array(list(visits.values()), np.int64),
    }
