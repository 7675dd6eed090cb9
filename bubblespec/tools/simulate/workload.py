"""Prompts and responses of a simulated run, and the texts of other weights.

Other weights generate the response up to a first mismatch, and then an edited text: each token
changes with a probability of distance**drift / run. Whether a token stays is one number per
position, compared with that probability, which grows with the distance in updates: drafts by older
weights get less far. After the mismatch tokens are replaced, inserted and omitted, so that
positions shift; suffix matching follows the text for a while and loses it again. All of this is a
function of (seed, step, prompt_id, sample), the distance in updates, and the tokens so far.
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from bubblespec.errors import InputError
from bubblespec.types import Group, Prompt, Row, SampleId

VOCABULARY = 1 << 15  # of synthetic tokens: so many that no text has an n-gram twice by chance
STOP = VOCABULARY  # the token that ends a synthetic response
OBSERVED = 1 << 24  # tokens from here on are an environment's; a stop token before them ends a turn
TEXT, MISMATCH, EDITS, TURNS, TOOLS = range(5)  # uses of random numbers
LATER = 1 << 12  # above all sample numbers: the k-th later version of a sample is named + k * LATER
# Mean acceptance length of `SuffixIndex` on texts of which such a share is edited, with windows of
# 128 tokens (18,000 tokens each).
ACCEPT_LENGTH = (1.0, 1.10, 1.18, 1.29, 1.44, 1.68, 2.01, 2.60, 3.78, 7.24, 14.4)
EDITED = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
SHARED_VARIANCE = 0.5  # of log length, what the samples of a prompt have in common
MIN_LENGTH = 4
SPARE_STEPS = 5  # of prompts, for tail batching: it launches up to four times as many
NOTHING = np.empty(0, np.int64)

Key = tuple[int, int, int]
"""Step, prompt_id and sample of a response."""


@dataclass(frozen=True)
class Spec:
    """A workload: lengths are lognormal, tokens random, every prompt occurs once per epoch.

    For a recorded workload only `run`, `accept_length` and `seed` matter."""

    mean: float = 2000.0  # mean length before truncation
    max: int = 16000  # largest length; longer responses are truncated
    sigma: float = 1.0  # standard deviation of the logarithm of lengths
    prompt: int = 256  # mean tokens of a prompt
    run: float = 500.0  # mean tokens to the first mismatch with weights one update away; inf: none
    drift: float = 0.5
    """Power of the distance in updates by which mismatches are more frequent; 0: none. Measured,
    see docs/simulator.md."""
    accept_length: float = 2.0  # about so many tokens per forward after it, by suffix matches
    steps: int = 6  # steps of the run
    epochs: int = 1  # epochs, each with equally many steps
    edited: float = 0.2  # share of tokens that differs from the same sample of the epoch before
    turns: float = 1.0  # mean turns of an episode; 1 for responses without tools
    observation: int = 50  # tokens of an observation between two turns
    tool_s: float = 0.2  # median seconds of a tool call
    tool_sigma: float = 1.0  # standard deviation of the logarithm of these seconds
    seed: int = 0

    def __post_init__(self):
        at_least_0 = dict.fromkeys(("sigma", "drift", "edited", "seed", "tool_s", "tool_sigma"), 0)
        minimum = {"max": MIN_LENGTH, "prompt": 2, **at_least_0}
        for name, value in vars(self).items():
            if not value >= minimum.get(name, 1):
                raise InputError(f"{name}: {value} must be at least {minimum.get(name, 1)}")
        if self.edited > 1 or math.isinf(self.mean + self.sigma):
            raise InputError("edited: a share; mean and sigma: finite")
        if self.steps % self.epochs:
            raise InputError(f"epochs: {self.steps} steps are not {self.epochs} equal epochs")

    def random(self, key: Key, use: int) -> np.random.Generator:
        """Return the generator of one use by one response."""
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, *key, use))))

    def tool_seconds(self, key: Key, length: int) -> float:
        """Return the seconds of the call after a turn that ends at this length of the response."""
        return self.tool_s * math.exp(
            self.tool_sigma * self.random(key, TOOLS + length).standard_normal()
        )

    def other(self, key: Key, true: np.ndarray, limit: int, stop: int, distance: int) -> np.ndarray:
        """Return the text by weights `distance` updates away, int64 [L]; negative for older ones.

        Two later versions have nothing in common after their first mismatches. true: int64 [L], the
        response, cut at `limit` tokens if its last is not `stop`."""
        step, prompt_id, sample = key
        key = (step, prompt_id, sample + max(distance, 0) * LATER)
        hazard = abs(distance) ** self.drift / self.run if distance else 0.0
        chance = -math.expm1(-hazard)
        leaves = self.random(key, MISMATCH).random(len(true)) < chance
        leaves[:-1] &= ~_is_fixed(true, stop)[:-1]
        leaves[-1] &= true[-1] < OBSERVED
        at = int(leaves.argmax())
        return self.diverged(key, true, limit, stop, at) if leaves[at] else true

    def diverged(self, key: Key, true: np.ndarray, limit: int, stop: int, at: int) -> np.ndarray:
        """Return a text whose first mismatch with `true` is token `at`."""
        share = float(np.interp(self.accept_length, ACCEPT_LENGTH, EDITED))
        if self.accept_length > ACCEPT_LENGTH[-1]:
            share *= ACCEPT_LENGTH[-1] / self.accept_length
        return edited(true, limit, stop, at, share=share, random=self.random(key, EDITS))


def edited(
    true: np.ndarray, limit: int, stop: int, at: int, *, share: float, random: np.random.Generator
) -> np.ndarray:
    """Return a text whose first mismatch with `true` is token `at`.

    After the mismatch a share of the tokens is replaced, inserted or omitted; with a share of 1 all
    are replaced. Turns and observations stay as in `true`. The text ends with `stop` if `true` does
    and `limit` tokens have room for it."""
    rest = true[at:-1] if true[-1] == stop else true[at:]
    edit = np.where(random.random(len(rest)) < share, random.integers(1, 4, len(rest)), 0)
    keep, replace, insert, omit = range(4)
    if share == 1.0:
        edit[:] = replace
    edit[_is_fixed(rest, stop)] = keep
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


def _is_fixed(text: np.ndarray, stop: int) -> np.ndarray:
    """Return which tokens edits keep, bool [L]: ends of turns, and observations."""
    return (text == stop) | (text >= OBSERVED)


@dataclass
class Workload:
    """Steps of prompts with their responses, numbered from 0; stands in for a `PromptSet`."""

    batches: list[list[Prompt]]
    """Prompts by step. Tail batching draws from those beyond `num_steps`, too."""
    responses: dict[Key, np.ndarray]  # int64 [L], with the stop token unless truncated
    steps: dict[tuple[int, int], int]  # of visits in the order of the data, by prompt_id and visit
    num_steps: int
    max_prompt_length: int
    spec: Spec
    stop_token_ids: tuple[int, ...] = (STOP,)
    recorded_drafts: dict[Key, np.ndarray] = field(default_factory=dict)  # completed
    rewards: dict[Key, float] = field(default_factory=dict)  # rewards by response; 0 for all others
    prompts = ()
    """Prompts that a saved state may name: none."""

    @property
    def num_prompts(self) -> int:
        return len(self.batches[0])

    @property
    def num_generations(self) -> int:
        return max(sample for _, _, sample in self.responses) + 1

    @property
    def has_tools(self) -> bool:
        """Whether responses are episodes with tool calls."""
        return self.spec.turns > 1

    def batch(self, seed: int, step: int, num_prompts: int) -> list[Prompt]:
        """As `PromptSet.batch`; empty for steps beyond the end, into which planners may look."""
        return self.batches[step] if step < len(self.batches) else []

    def key(self, sample: SampleId) -> Key:
        return self.steps[sample.prompt_id, sample.draw_index], sample.prompt_id, sample.sample


class SimulatedTexts:
    """What each sample says under the weights of each step, on one rank.

    Before a sample is launched, weights of older steps draft it. If it is deferred, the weights of
    the step that finishes it are newer than its own and say something else; its tokens from its own
    step, and what was drafted in between, are its drafts."""

    def __init__(self, workload: Workload):
        self.workload, self.version = workload, 0
        self._launched: dict[tuple[int, int], int] = {}  # by group: its step, until it is trained

    def begin(self, step: int, groups: Iterable[Group]) -> None:
        """Begin a step that launches or continues these groups."""
        self.version = step
        for group in groups:
            self._launched.setdefault(group.name, step)

    def end(self, groups: Iterable[Group]) -> None:
        """Forget groups that have been trained on."""
        for group in groups:
            del self._launched[group.name]

    def text(self, sample: SampleId, limit: int, so_far: np.ndarray = NOTHING) -> np.ndarray:
        """Return `so_far` as continued by the present weights, int64 [L <= limit]."""
        workload, key, known = self.workload, self.workload.key(sample), len(so_far)
        true, launched = workload.responses[key][:limit], self._launched.get(sample[:2])
        if launched == self.version:
            return true
        stops = workload.stop_token_ids
        stop = int(true[-1]) if true[-1] in stops else stops[0]
        if launched is None and key in workload.recorded_drafts:
            text = workload.recorded_drafts[key][:limit]
        else:
            before = min(self.version - key[0], -1)
            distance = before if launched is None else self.version - launched
            text = workload.spec.other(key, true, limit, stop, distance)
        if np.array_equal(so_far, text[:known]):
            return text
        if known >= len(text):  # `so_far` is longer
            return np.append(so_far, stop)[:limit]
        similar = workload.spec.diverged(key, text, limit, stop, known)
        return np.concatenate((so_far, similar[known:]))

    def of_row(self, row: Row) -> np.ndarray:
        """Return the row's tokens to its end, beginning with those so far."""
        return self.text(row.id, row.max_new_tokens, row.tokens)


def make_synthetic(spec: Spec, num_prompts: int, num_generations: int) -> Workload:
    """Create the workload that `spec` describes."""
    steps_per_epoch = spec.steps // spec.epochs if spec.epochs > 1 else sys.maxsize
    batches: list[list[Prompt]] = []
    responses: dict[Key, np.ndarray] = {}
    steps: dict[tuple[int, int], int] = {}
    for step in range(spec.steps + SPARE_STEPS):
        epoch, first = divmod(step, steps_per_epoch)  # `first` has the same prompts first
        prompt_ids = range(first * num_prompts + 1, (first + 1) * num_prompts + 1)
        batches.append([])
        for prompt_id in prompt_ids:
            random = spec.random((first, prompt_id, 0), TEXT)
            length = random.integers(max(spec.prompt // 2, 1), spec.prompt * 3 // 2 + 1)
            ids = tuple(random.integers(0, VOCABULARY, length).tolist())
            batches[-1].append(Prompt(prompt_id, "", ids, {}))
            steps[prompt_id, epoch] = step
        for prompt_id, sample in itertools.product(prompt_ids, range(num_generations)):
            before = responses.get((step - steps_per_epoch, prompt_id, sample))
            responses[step, prompt_id, sample] = _response(spec, (step, prompt_id, sample), before)
    return Workload(batches, responses, steps, spec.steps, 2 * spec.prompt, spec)


def _response(spec: Spec, key: Key, before: np.ndarray | None) -> np.ndarray:
    """Create a response, edited from the same sample in the epoch before if there is one."""
    step, prompt_id, sample = key
    key = (step, prompt_id, sample + 1)
    random = spec.random(key, TEXT)
    if before is not None:
        return edited(before, spec.max, STOP, 0, share=spec.edited, random=random)
    common = spec.random((step, prompt_id, 1 << 12), TEXT).standard_normal()
    own = random.standard_normal()
    score = math.sqrt(SHARED_VARIANCE) * common + math.sqrt(1 - SHARED_VARIANCE) * own
    # The mean of a lognormal is exp(mu + sigma**2 / 2).
    length = round(spec.mean * math.exp(spec.sigma * score - spec.sigma**2 / 2))
    length = max(length, MIN_LENGTH)
    tokens = random.integers(0, VOCABULARY, min(length, spec.max))
    if length <= spec.max:
        tokens[-1] = STOP
    if spec.turns > 1:
        tokens = _with_turns(spec, tokens, spec.random(key, TURNS))[: spec.max]
    return tokens


def _with_turns(spec: Spec, tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Cut a response at random places into turns, with a stop token and an observation at each."""
    num_turns = min(1 + random.poisson(spec.turns - 1), len(tokens))
    if num_turns < 2:
        return tokens
    cuts = np.sort(random.choice(np.arange(1, len(tokens)), num_turns - 1, replace=False))
    observed = OBSERVED + random.integers(0, OBSERVED, (num_turns - 1, spec.observation))
    between = np.insert(observed, 0, STOP, axis=1)
    first, *later = np.split(tokens, cuts)
    return np.concatenate([first, *itertools.chain(*zip(between, later, strict=True))])


def parse(kind: type, text: str, option: str):
    """Parse `name=value,name=value` into a dataclass of numbers. Raises InputError."""
    types: dict[str, Any] = {
        field.name: (*get_args(field.type), field.type)[0] for field in dataclasses.fields(kind)
    }
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
