"""What is generated in a simulated run: the prompts of each step, their responses, and what weights
of other steps say in place of a response: it, up to a first mismatch, and then an edited text.

Each token of a response is another one under other weights with a chance of 1 / mean_run. Whether a
token stays is one number per position, compared with that chance: drafts by all older weights get
equally far.

After the mismatch the text continues like the response, with tokens replaced, inserted and omitted,
so that positions shift; suffix matching finds its way in it for a while and loses it again. All of
this is a function of (seed, step, uid, sample), the distance, and the tokens so far.
"""

import dataclasses
import functools
import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from bubblespec.errors import InputError
from bubblespec.types import Group, Prompt, SampleId

VOCABULARY = 1 << 15  # of synthetic tokens: so many that no text has an n-gram twice by chance
STOP = VOCABULARY  # the token that ends a synthetic response
TEXT, MISMATCH, EDITS = range(3)  # uses of random numbers
LATER = 1 << 12  # above all sample numbers: the k-th later version of a sample is named + k * LATER
# Mean acceptance length of `SuffixIndex` on texts of which such a share is edited, with windows of
# 128 tokens (18,000 tokens each).
ACCEPT_LENGTH = (1.0, 1.10, 1.18, 1.29, 1.44, 1.68, 2.01, 2.60, 3.78, 7.24, 14.4)
EDITED = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
SHARED_VARIANCE = 0.5  # of log length, what the samples of a prompt have in common
MIN_LENGTH = 4
NOTHING = np.empty(0, np.int64)

Key = tuple[int, int, int]
"""Step, uid and sample of a response."""


@dataclass(frozen=True)
class DraftModel:
    """How the texts of other weights differ from a response."""

    mean_run: float = 500.0
    """Tokens to the first mismatch with other weights; infinite for none."""
    accept_length: float = 2.0
    """About what a row gains per forward after it, by suffix matches."""
    seed: int = 0

    def text(self, key: Key, true: np.ndarray, limit: int, stop: int, distance: int) -> np.ndarray:
        """All that weights `distance` updates away from the response's say, int64 [L]; older ones
        if it is negative. Two later versions have nothing in common after their first mismatches.

        true: int64 [L], the response, cut at `limit` tokens if its last is not `stop`.
        """
        step, uid, sample = key
        name = (step, uid, sample + max(distance, 0) * LATER)
        chance = -math.expm1(-min(abs(distance), 1) / self.mean_run)
        leaves = keyed_random(self.seed, *name, MISMATCH).random(len(true)) < chance
        at = int(leaves.argmax())
        return self.diverged(name, true, limit, stop, at) if leaves[at] else true

    def continued(
        self, key: Key, text: np.ndarray, limit: int, stop: int, so_far: np.ndarray
    ) -> np.ndarray:
        """What weights that would say `text` say if they continue `so_far`, with it: `text` itself,
        or if `so_far` has left it, a text like it."""
        known = len(so_far)
        if np.array_equal(so_far, text[:known]):
            return text
        if known >= len(text):  # it has outgrown it
            return np.append(so_far, stop)[:limit]
        return np.concatenate((so_far, self.diverged(key, text, limit, stop, known)[known:]))

    def diverged(self, key: Key, true: np.ndarray, limit: int, stop: int, at: int) -> np.ndarray:
        """The text whose first mismatch is token `at`."""
        share = float(np.interp(self.accept_length, ACCEPT_LENGTH, EDITED))
        if self.accept_length > ACCEPT_LENGTH[-1]:
            share *= ACCEPT_LENGTH[-1] / self.accept_length
        random = keyed_random(self.seed, *key, EDITS)
        return edited(true, limit, stop, at, share=share, random=random)


def edited(
    true: np.ndarray, limit: int, stop: int, at: int, *, share: float, random: np.random.Generator
) -> np.ndarray:
    """A text whose first mismatch with `true` is token `at`; after it a share of its tokens is
    replaced, inserted or omitted, all replaced with a share of 1.

    It ends with `stop` if `true` does and there is room for it within `limit` tokens.
    """
    rest = true[at:-1] if true[-1] == stop else true[at:]
    edit = np.where(random.random(len(rest)) < share, random.integers(1, 4, len(rest)), 0)
    keep, replace, insert, omit = range(4)
    if share == 1.0:
        edit[:] = replace
    if len(rest) and edit[0] in (keep, omit):
        edit[0] = replace
    copies = np.array([1, 1, 2, 0])[edit]
    text = np.repeat(rest, copies)
    new = (np.cumsum(copies) - copies)[(edit == replace) | (edit == insert)]
    # Another token than the one in its place.
    text[new] = (text[new] + random.integers(1, VOCABULARY, len(new))) % VOCABULARY
    room = limit - at
    if true[-1] != stop:  # its end is beyond the limit, and so is the draft's
        missing = max(room - len(text), 0)
        text = np.concatenate((text, random.integers(0, VOCABULARY, missing)))
    elif len(text) < room:
        if not len(text):  # the mismatch is the stop token: the text continues for a token
            text = random.integers(0, VOCABULARY, 1)
        text = np.append(text, stop)
    return np.concatenate((true[:at], text[:room])).astype(np.int64)


def keyed_random(seed: int, step: int, uid: int, sample: int, use: int) -> np.random.Generator:
    """Random numbers of one use by one sample."""
    seeds = np.random.SeedSequence((seed, step, uid, sample, use))
    return np.random.Generator(np.random.Philox(seeds))


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
