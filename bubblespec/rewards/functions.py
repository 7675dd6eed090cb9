"""Reward functions: how they are loaded, checked and called, how their values are combined, and
those that are shipped.

A reward function has TRL's signature `f(prompts, completions, completion_ids, **columns) ->
list[float | None]`: prompts and completions are strings, or lists of chat messages if the prompt is
a chat; every further column of the data is a keyword argument with one value per sample. None means
that the function does not apply to that sample. A call may have any number of samples: one in a
worker process, in the main process all of a rank's that are finished and not scored yet. What a
function gives a sample must not depend on the others.
"""

import importlib
import inspect
import math
import re
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from bubblespec.errors import InputError

RewardFunction = Callable[..., list[float | None]]

# How a reward can fail: the function raised, returned no finite number, took too long, or ended its
# process.
FAILURE_KINDS = ("exception", "value", "timeout", "crash")

# Seconds for one comparison by math-verify, which would evaluate a completion such as 9^{9^9}
# forever.
MATH_LIMIT_S = 5


def load_reward(path: str) -> RewardFunction:
    """Import `package.module.function`. Raises InputError naming the path."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise InputError(
            f"reward.functions: '{path}' is not a dotted path such as my_module.my_reward"
        )
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # the module's own code runs here
        raise InputError(
            f"reward.functions: cannot import '{path}': {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    if not callable(function) or isinstance(function, type):
        raise InputError(f"reward.functions: '{path}' is not a function")
    return function


def check_arguments(
    path: str, function: RewardFunction, columns: Collection[str], source: str
) -> None:
    """Raises InputError if the function cannot be called with the samples and these columns of the
    data (`source`, for the error): before the run starts, rather than after its first rollout."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some that are written in C have none
        return
    try:
        signature.bind(prompts=[], completions=[], completion_ids=[], **dict.fromkeys(columns))
    except TypeError as error:
        has = f"the columns {sorted(columns)}" if columns else "no further columns"
        raise InputError(
            f"reward.functions: {path} cannot be called with prompts, completions, completion_ids and {has} of {source}: {error}"
        ) from error


class Sample(NamedTuple):
    """What a reward function is given of one response."""

    prompt: str | list[dict]
    """Text, or chat messages."""
    completion: str
    """The response as text, without special tokens."""
    completion_ids: list[int]
    """Its tokens."""
    columns: dict
    """Other columns of the prompt's row, by name."""


class RewardFailure(Exception):
    """A reward that could not be computed. kind: one of FAILURE_KINDS; trace: the exception's
    traceback, if there was one."""

    def __init__(self, kind: str, message: str, trace: str = ""):
        super().__init__(message)
        self.kind, self.message, self.trace = kind, message, trace


def call(function: RewardFunction, samples: list[Sample]) -> list[float | RewardFailure | None]:
    """One value per sample: a finite number, None, or the failure if the returned value is neither.

    Raises RewardFailure if the whole call fails: an exception, or a result that is no list of the
    right length.
    """
    as_messages = [
        s.completion
        if isinstance(s.prompt, str)
        else [{"role": "assistant", "content": s.completion}]
        for s in samples
    ]
    names = sorted({name for sample in samples for name in sample.columns})
    columns = {name: [sample.columns.get(name) for sample in samples] for name in names}
    ids = [sample.completion_ids for sample in samples]
    try:
        values = function(
            prompts=[s.prompt for s in samples],
            completions=as_messages,
            completion_ids=ids,
            **columns,
        )
    except (Exception, SystemExit) as error:
        raise RewardFailure(
            "exception", f"raised {_describe(error)}", traceback.format_exc()
        ) from error
    try:
        length = None if isinstance(values, (str, bytes, dict, set)) else len(values)
    except TypeError:
        length = None
    if length is None:
        raise RewardFailure(
            "value", f"returned {type(values).__name__}, not a list with one value a sample"
        )
    if length != len(samples):
        raise RewardFailure("value", f"returned {length} values for {len(samples)} samples")
    return [None if value is None else _number(value) for value in values]


def score(
    functions: dict[str, RewardFunction],
    samples: list[Sample],
    failures: list[tuple[int, int, RewardFailure]] | None = None,
) -> np.ndarray:
    """Rewards float64 [samples, functions], NaN where a function does not apply. All samples are in
    one call.

    A failure is raised as an InputError that names the function. With a list of `failures` it is
    appended there instead, as (sample, function, failure), with NaN as the reward; a call that
    fails as a whole is then repeated sample by sample, to find the samples for which it fails.
    """
    rewards = np.full((len(samples), len(functions)), np.nan)
    for number, (path, function) in enumerate(functions.items()):
        try:
            values = call(function, samples)
        except RewardFailure as failure:
            if failures is None:
                print(
                    failure.trace, end="", file=sys.stderr
                )  # the user's own code: one line is not enough to find the mistake
                raise InputError(f"reward {path}: {failure}") from (failure.__cause__ or failure)
            values = [call_one(function, sample) for sample in samples]
        for i, value in enumerate(values):
            if isinstance(value, RewardFailure):
                if failures is None:
                    raise InputError(f"reward {path}: sample {i}: {value}") from value
                failures.append((i, number, value))
            elif value is not None:
                rewards[i, number] = value
    return rewards


def call_one(function: RewardFunction, sample: Sample) -> float | RewardFailure | None:
    """The value of one sample; see `call`."""
    try:
        return call(function, [sample])[0]
    except RewardFailure as failure:
        return failure


def combine(rewards: np.ndarray, weights: list[float]) -> np.ndarray:
    """Weighted sum over the functions that apply: [samples, functions] -> [samples].

    Raises InputError where none applies: training such a sample on 0 would be a silent mistake.
    """
    nothing = np.flatnonzero(np.isnan(rewards).all(axis=1))
    if len(nothing):
        raise InputError(
            f"reward.functions: all of them returned None for {len(nothing)} samples; each needs at least one reward"
        )
    return np.nansum(rewards * np.asarray(weights), axis=1)


def overlong_penalty(
    lengths: np.ndarray, max_length: int, buffer_length: int, factor: float
) -> np.ndarray:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), float64 [S], 0 or negative.

    lengths: response tokens. Nothing up to max_length - buffer_length, then linearly down to
    -factor at max_length.
    """
    if buffer_length == 0:
        return np.zeros(len(lengths))
    excess = np.clip(lengths - (max_length - buffer_length), 0, None)
    return -factor * excess / buffer_length


def exact_match(prompts, completions, completion_ids, answer, **columns) -> list[float]:
    """1 if the final answer, or the whole completion if nothing is tagged as one, equals the column
    `answer` as text, else 0."""
    texts = [text_of(c) for c in completions]
    given = [text.strip() if final_answer(text) is None else final_answer(text) for text in texts]
    return [float(g == str(a).strip()) for g, a in zip(given, answer, strict=True)]


def reasoning_gym_score(
    prompts, completions, completion_ids, task, entry, **columns
) -> list[float]:
    """The score that reasoning-gym's own scorer of the sample's task gives to the final answer; 0
    to 1."""
    import reasoning_gym

    scores = []
    for completion, name, item in zip(completions, task, entry, strict=True):
        scores.append(
            reasoning_gym.get_score_answer_fn(name)(
                answer=final_answer(text_of(completion)), entry=item
            )
        )
    return scores


def answer_format(prompts, completions, completion_ids, **columns) -> list[float]:
    """1 if the completion ends with exactly one `<answer>...</answer>`, else 0."""
    pattern = re.compile(r"(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)+</answer>\s*", re.DOTALL)
    return [float(pattern.fullmatch(text_of(c)) is not None) for c in completions]


def math_equivalence(prompts, completions, completion_ids, answer, **columns) -> list[float | None]:
    """1 if the completion's answer equals the column `answer` as mathematics (the math-verify
    library), else 0; None if the reference itself cannot be parsed. Of a reference with its
    solution, as GSM8K has, what follows the last #### counts."""
    from math_verify import parse, verify

    # The library's time-outs are signals, which only the main thread may set.
    limit_s = MATH_LIMIT_S if threading.current_thread() is threading.main_thread() else None
    scores: list[float | None] = []
    for completion, reference in zip(completions, answer, strict=True):
        gold = (
            []
            if reference is None
            else parse(f"${_reference_answer(reference)}$", parsing_timeout=limit_s)
        )
        if not gold:
            scores.append(None)
            continue
        text = text_of(completion)
        tagged = final_answer(text)
        parsed = parse(text if tagged is None else f"${tagged}$", parsing_timeout=limit_s)
        scores.append(float(verify(gold, parsed, timeout_seconds=limit_s)))
    return scores


def _reference_answer(reference) -> str:
    return str(reference).rpartition("####")[2].strip()


def text_of(completion: str | list[dict]) -> str:
    """The text of a completion, given as a string or as chat messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def final_answer(text: str) -> str | None:
    """The text in the last `<answer>` tags, or None if there are none."""
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return answers[-1].strip() if answers else None


def _number(value) -> float | RewardFailure:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("text that float() would read")
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return RewardFailure("value", f"value {value!r:.200} is not a number or None")
    return (
        number if math.isfinite(number) else RewardFailure("value", f"value {value} is not finite")
    )


def _describe(error: BaseException) -> str:
    """Kind, place and text of an exception in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}: {' '.join(str(error).split())}"
