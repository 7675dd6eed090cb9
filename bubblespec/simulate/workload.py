"""What is generated in a simulated run: the prompts of each step, their responses, and what drafts
of them say."""

import dataclasses
import math
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np

from bubblespec.errors import InputError
from bubblespec.simulate.drafter import DrafterModel
from bubblespec.simulate.drafting import STOP, TEXT, VOCABULARY, DraftModel, edited, keyed_random
from bubblespec.simulate.shared import SharedModel
from bubblespec.types import Group, Launch, Prompt, SampleId, Samples

SHARED_VARIANCE = (
    0.5  # of the logarithm of a made-up length, what the samples of a prompt have in common
)
MIN_LENGTH = 4


@dataclass(frozen=True)
class Synthetic:
    """Made-up responses: lengths are lognormal, tokens random, every prompt occurs once an
    epoch."""

    mean: float = 2000.0
    """Of the lengths before they are cut."""
    max: int = 16000
    """Tokens at which they are cut."""
    sigma: float = 1.0
    """Standard deviation of their logarithm."""
    prompt: int = 256
    """Tokens of a prompt, on average."""
    run: float = 500.0
    """See `DraftModel`; the next two as well."""
    tokens_a_pass: float = 2.0
    drift: int = 0
    """0 or 1."""
    steps: int = 6
    """Of the run."""
    epochs: int = 1
    """Of equally many steps."""
    edited: float = 0.2
    """Share of a response's tokens that is replaced, inserted or omitted against the same sample of
    the epoch before (RhymeRL, arXiv 2508.18588, finds responses of adjacent epochs very
    similar)."""
    seed: int = 0

    def __post_init__(self):
        for name, least, most in (
            ("mean", 1, 1e6),
            ("max", MIN_LENGTH, 1 << 20),
            ("sigma", 0, 5),
            ("prompt", 2, 1 << 20),
            ("run", 1, math.inf),
            ("tokens_a_pass", 1, 1000),
            ("drift", 0, 1),
            ("steps", 1, 10_000),
            ("epochs", 1, 10_000),
            ("edited", 0, 1),
            ("seed", 0, (1 << 31) - 1),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise InputError(f"{name}: {value} must be from {least:g} to {most:g}")
        if self.steps % self.epochs:
            raise InputError(
                f"epochs: {self.steps} steps are not {self.epochs} epochs of equally many"
            )


def parse(kind: type, text: str, option: str):
    """A dataclass of numbers from `name=value,name=value`. Raises InputError."""
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    given = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in fields:
            raise InputError(f"{option}: unknown name {name!r}; valid are {', '.join(fields)}")
        try:
            given[name] = fields[name](value)
        except ValueError as error:
            raise InputError(f"{option}: {name}={value} is no {fields[name].__name__}") from error
    try:
        return kind(**given)
    except InputError as error:
        raise InputError(f"{option}: {error}") from error


class Planned:
    """A workload as the `StepSchedule` of its steps, as far as their rollouts need one;
    `batch(step)` gives their prompts, and `is_endless` says that it does so for any step."""

    is_endless = False

    @property
    def deferred(self) -> list[Group]:
        """See `StepSchedule`."""
        return []

    def launch(self, step: int) -> Launch:
        """See `StepSchedule`."""
        return Launch(
            self._groups(step), self.num_prompts, self.num_generations, self.num_generations
        )

    def upcoming(self, step: int, depth: int, used: list[Group] | None = None) -> list[list[Group]]:
        """See `StepSchedule`."""
        return [self._groups(coming) for coming in range(step + 1, step + 1 + depth)]

    def finish(self, samples: Samples, deferred: dict[SampleId, int]) -> None:
        """See `StepSchedule`. What is drawn when is known from the start."""

    def metrics(self) -> dict[str, float]:
        """See `StepSchedule`."""
        return {}

    def first_visits(self) -> Counter[int]:
        """How often prompts had been drawn before the first step, by uid."""
        return Counter()

    def stop_of(self, tokens: np.ndarray) -> int:
        """The token that ends a response, or another one where it is cut off."""
        return int(tokens[-1]) if int(tokens[-1]) in self.stop_token_ids else self.stop_token_ids[0]

    def _groups(self, step: int) -> list[Group]:
        return [Group(prompt, self.visit(step, prompt.uid)) for prompt in self.batch(step)]


class Workload(Planned):
    """Steps first_step .. first_step + num_steps - 1, and any further ones. A made-up one; see
    `recorded` for one from a run.

    stop_token_ids: tokens that end responses; max_prompt_length, max_length: tokens of the longest
    prompt and response that may occur.
    """

    first_step = 0
    stop_token_ids = (STOP,)
    is_endless = True

    def __init__(self, spec: Synthetic, num_prompts: int, num_generations: int):
        self.spec, self.num_prompts, self.num_generations = spec, num_prompts, num_generations
        self.num_steps, self.max_length = spec.steps, spec.max
        self.max_prompt_length = 2 * spec.prompt
        self.steps_per_epoch = spec.steps // spec.epochs if spec.epochs > 1 else sys.maxsize
        self.drafts = DraftModel(spec.run, spec.tokens_a_pass, bool(spec.drift), spec.seed)
        self.drafter = DrafterModel()
        self.shared: SharedModel | None = None  # where the shared tail is simulated
        self._batches: dict[int, list[Prompt]] = {}
        self._responses: dict[tuple[int, int, int], np.ndarray] = {}

    def batch(self, step: int) -> list[Prompt]:
        batch = self._batches.get(step)
        if batch is None:
            batch = self._batches[step] = [
                self._prompt(step, number) for number in range(self.num_prompts)
            ]
        return batch

    def _prompt(self, step: int, number: int) -> Prompt:
        first = step % self.steps_per_epoch  # when the prompt occurs first
        uid = first * self.num_prompts + number + 1
        random = keyed_random(self.spec.seed, first, uid, 0, TEXT)
        length = int(random.integers(max(self.spec.prompt // 2, 1), self.spec.prompt * 3 // 2 + 1))
        return Prompt(uid, "", tuple(random.integers(0, VOCABULARY, length).tolist()), {})

    def visit(self, step: int, uid: int) -> int:
        """How often the prompt has been drawn before this step."""
        return step // self.steps_per_epoch

    def step_of(self, sample: SampleId) -> int:
        """The step that a sample belongs to."""
        return (sample.uid - 1) // self.num_prompts + sample.visit * self.steps_per_epoch

    def response(self, step: int, uid: int, sample: int) -> np.ndarray:
        """The tokens of a response, int64, with the stop token where it is not cut off."""
        key = (step, uid, sample)
        tokens = self._responses.get(key)
        if tokens is None:
            tokens = self._responses[key] = self._make(step, uid, sample)
        return tokens

    def _make(self, step: int, uid: int, sample: int) -> np.ndarray:
        spec = self.spec
        if step >= self.steps_per_epoch:
            before = self._make(step - self.steps_per_epoch, uid, sample)
            return edited(
                before,
                spec.max,
                STOP,
                0,
                share=spec.edited,
                random=keyed_random(spec.seed, step, uid, sample + 1, TEXT),
            )
        common = keyed_random(spec.seed, step, uid, 1 << 12, TEXT).standard_normal()
        random = keyed_random(spec.seed, step, uid, sample + 1, TEXT)
        score = (
            math.sqrt(SHARED_VARIANCE) * common
            + math.sqrt(1 - SHARED_VARIANCE) * random.standard_normal()
        )
        # The mean of a lognormal is exp(mu + sigma**2 / 2).
        length = max(
            round(spec.mean * math.exp(spec.sigma * score - spec.sigma**2 / 2)), MIN_LENGTH
        )
        tokens = random.integers(0, VOCABULARY, min(length, spec.max))
        if length <= spec.max:
            tokens[-1] = STOP
        return tokens

    def draft(
        self, step: int, uid: int, sample: int, age: int, limit: int, so_far: np.ndarray
    ) -> np.ndarray:
        """The whole draft as weights `age` updates before those of its step continue it after
        `so_far`; age 0 is the response."""
        true = self.response(step, uid, sample)[:limit]
        if age <= 0:
            return true
        return self.drafts.text((step, uid, sample), true, limit, self.stop_of(true), age, so_far)

    def rewards(self, step: int, uid: int) -> np.ndarray:
        """Of all samples of a prompt, float64 [generations]."""
        return np.zeros(self.num_generations)

    def forget(self, step: int) -> None:
        """No rank needs this step or an earlier one any more; of deferred prompts it is made
        again."""
        for key in [key for key in self._responses if key[0] <= step]:
            del self._responses[key]
        for old in [old for old in self._batches if old <= step]:
            del self._batches[old]
