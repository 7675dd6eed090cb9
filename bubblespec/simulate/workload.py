"""What is generated in a simulated run: the prompts of each step, their responses, and what drafts
of them say."""

import dataclasses
import functools
import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from bubblespec.errors import InputError
from bubblespec.simulate.drafting import (
    STOP,
    TEXT,
    VOCABULARY,
    DraftModel,
    Key,
    edited,
    keyed_random,
)
from bubblespec.types import Group, Prompt, SampleId

SHARED_VARIANCE = 0.5  # of log length, what the samples of a prompt have in common
MIN_LENGTH = 4
NOTHING = np.empty(0, np.int64)


class Workload:
    """Steps of prompts with their responses, numbered from 0.

    num_prompts, num_generations: of a step; num_steps: of the run; stop_token_ids: tokens that end
    responses; max_prompt_length, max_length: upper bounds in tokens; drafts: what other weights
    say.
    """

    num_prompts: int
    num_generations: int
    num_steps: int
    max_prompt_length: int
    max_length: int
    stop_token_ids: tuple[int, ...] = (STOP,)
    drafts: DraftModel
    is_endless = False
    """Whether there are prompts beyond the last step."""

    def batch(self, seed: int, step: int, num_prompts: int) -> list[Prompt]:
        """The prompts of a step, as `PromptSet.batch`."""
        raise NotImplementedError

    def step_of(self, sample: SampleId) -> int:
        """The step that a sample belongs to in the order of the data."""
        raise NotImplementedError

    def response(self, step: int, uid: int, sample: int) -> np.ndarray:
        """The tokens of a response, int64 [L], with the stop token where it is not cut off."""
        raise NotImplementedError

    @property
    def prompts(self) -> list[Prompt]:
        """As of `PromptSet`: those that a saved state may name, here none."""
        return []

    def first_visits(self) -> Counter[int]:
        """How often each prompt was drawn before the first step, by uid."""
        return Counter()

    def rewards(self, step: int, uid: int) -> np.ndarray:
        """Of all samples of a prompt, float64 [generations]."""
        return np.zeros(self.num_generations)

    def recorded_draft(self, key: Key, limit: int) -> np.ndarray | None:
        """The draft that a recorded run had of a response, or None."""
        return None

    def stop_of(self, tokens: np.ndarray) -> int:
        """The token that ends a response, or would."""
        return int(tokens[-1]) if tokens[-1] in self.stop_token_ids else self.stop_token_ids[0]


class Texts:
    """What each sample says under the weights of each step, on one rank.

    Before a sample is launched, weights of older steps draft it. If it is deferred, the weights of
    the step that finishes it are newer than its own and say something else; its tokens from its own
    step, and what was drafted in between, are its drafts.
    """

    def __init__(self, workload: Workload):
        self.workload, self.version = workload, 0
        self._launched: dict[tuple[int, int], int] = {}  # by group: its step, until it is trained

    def begin(self, step: int, groups: Iterable[Group]) -> None:
        """A step launches these groups, or continues them."""
        self.version = step
        for group in groups:
            self._launched.setdefault(group.name, step)

    def end(self, groups: Iterable[Group]) -> None:
        """Groups have been trained on."""
        for group in groups:
            del self._launched[group.name]

    def text(self, sample: SampleId, limit: int, so_far: np.ndarray = NOTHING) -> np.ndarray:
        """What the present weights say if they continue `so_far`, with it, int64 [L <= limit]."""
        workload, home = self.workload, self.workload.step_of(sample)
        key = (home, sample.uid, sample.sample)
        true = workload.response(*key)[:limit]
        stop, launched = workload.stop_of(true), self._launched.get(sample[:2])
        if launched == self.version:
            return true
        distance = min(self.version - home, -1) if launched is None else self.version - launched
        text = workload.recorded_draft(key, limit) if launched is None else None
        if text is None:
            text = workload.drafts.text(key, true, limit, stop, distance)
        return workload.drafts.continued(key, text, limit, stop, so_far)


@dataclass(frozen=True)
class Synthetic:
    """Lengths are lognormal, tokens random, every prompt occurs once per epoch."""

    mean: float = 2000.0
    """Of the lengths before they are cut."""
    max: int = 16000
    """Tokens at which they are cut."""
    sigma: float = 1.0
    """Standard deviation of their logarithm."""
    prompt: int = 256
    """Tokens of a prompt, on average."""
    run: float = 500.0
    """`mean_run` of `DraftModel`; the next is of it as well."""
    accept_length: float = 2.0
    steps: int = 6
    """Of the run."""
    epochs: int = 1
    """Of equally many steps."""
    edited: float = 0.2
    """Share of a response's tokens that differs from the same sample of the epoch before."""
    seed: int = 0

    def __post_init__(self):
        minimum = {"max": MIN_LENGTH, "prompt": 2, "sigma": 0, "edited": 0, "seed": 0}
        for name, value in vars(self).items():
            if not value >= minimum.get(name, 1):
                raise InputError(f"{name}: {value} must be at least {minimum.get(name, 1)}")
        if self.edited > 1 or math.isinf(self.mean + self.sigma):
            raise InputError("edited: a share; mean and sigma: finite")
        if self.steps % self.epochs:
            raise InputError(f"epochs: {self.steps} steps are not {self.epochs} equal epochs")


class SyntheticWorkload(Workload):
    """See `Synthetic`."""

    is_endless = True

    def __init__(self, spec: Synthetic, num_prompts: int, num_generations: int):
        self.spec, self.num_prompts, self.num_generations = spec, num_prompts, num_generations
        self.num_steps, self.max_length = spec.steps, spec.max
        self.max_prompt_length = 2 * spec.prompt
        self.steps_per_epoch = spec.steps // spec.epochs if spec.epochs > 1 else sys.maxsize
        self.drafts = DraftModel(spec.run, spec.accept_length, spec.seed)
        self.batch, self.response = functools.cache(self._batch), functools.cache(self._response)

    def _batch(self, seed: int, step: int, num_prompts: int) -> list[Prompt]:
        first = step % self.steps_per_epoch  # the step that has the same prompts first
        uids = range(first * self.num_prompts + 1, (first + 1) * self.num_prompts + 1)
        return [self._prompt(first, uid) for uid in uids]

    def _prompt(self, step: int, uid: int) -> Prompt:
        random = keyed_random(self.spec.seed, step, uid, 0, TEXT)
        mean = self.spec.prompt
        length = int(random.integers(max(mean // 2, 1), mean * 3 // 2 + 1))
        return Prompt(uid, "", tuple(random.integers(0, VOCABULARY, length).tolist()), {})

    def step_of(self, sample: SampleId) -> int:
        return (sample.uid - 1) // self.num_prompts + sample.visit * self.steps_per_epoch

    def _response(self, step: int, uid: int, sample: int) -> np.ndarray:
        spec, random = self.spec, keyed_random(self.spec.seed, step, uid, sample + 1, TEXT)
        if step >= self.steps_per_epoch:
            before = self.response(step - self.steps_per_epoch, uid, sample)
            return edited(before, spec.max, STOP, 0, share=spec.edited, random=random)
        common = keyed_random(spec.seed, step, uid, 1 << 12, TEXT).standard_normal()
        own = random.standard_normal()
        score = math.sqrt(SHARED_VARIANCE) * common + math.sqrt(1 - SHARED_VARIANCE) * own
        # The mean of a lognormal is exp(mu + sigma**2 / 2).
        length = round(spec.mean * math.exp(spec.sigma * score - spec.sigma**2 / 2))
        length = max(length, MIN_LENGTH)
        tokens = random.integers(0, VOCABULARY, min(length, spec.max))
        if length <= spec.max:
            tokens[-1] = STOP
        return tokens


def parse(kind: type, text: str, option: str):
    """A dataclass of numbers from `name=value,name=value`. Raises InputError."""
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    given = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in types:
            raise InputError(f"{option}: unknown name {name!r}; valid are {', '.join(types)}")
        try:
            given[name] = types[name](value)
        except ValueError as error:
            raise InputError(f"{option}: {name}={value} is no {types[name].__name__}") from error
    try:
        return kind(**given)
    except InputError as error:
        raise InputError(f"{option}: {error}") from error
