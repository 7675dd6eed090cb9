"""Reward functions and how they are called.

A reward function has TRL's signature `f(prompts, completions, completion_ids, **columns) -> list[float | None]`: prompts and
completions are strings, or lists of chat messages if the prompt is a chat; every further column of the data arrives as
a keyword with one value a sample. None means that the function does not apply to that sample.
"""

import importlib
import inspect
import math
import re
import threading
import traceback
from collections.abc import Callable, Collection

import numpy as np

from bubblespec.errors import InputError

RewardFunction = Callable[..., list[float | None]]

# Seconds for one comparison by math-verify, which would work out a completion such as 9^{9^9} for ever.
MATH_LIMIT_S = 5


def load_reward(path: str) -> RewardFunction:
    """Import `package.module.function`. Raises InputError naming the path."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise InputError(f"reward.functions: '{path}' is not a dotted path such as my_module.my_reward")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # the module's own code runs here
        raise InputError(
            f"reward.functions: cannot import '{path}': {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    if not callable(function) or isinstance(function, type):
        raise InputError(f"reward.functions: '{path}' is not a function")
    return function


def check_arguments(path: str, function: RewardFunction, columns: Collection[str], source: str) -> None:
    """Raises InputError if the function cannot be called with the samples and these columns of the data (`source`, for the
    error): before the run starts, rather than after its first rollout."""
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


def score(
    functions: dict[str, RewardFunction],
    prompts: list,
    completions: list[str],
    completion_ids: list[list[int]],
    columns: list[dict],
) -> np.ndarray:
    """Rewards float64 [samples, functions], NaN where a function does not apply.

    A list of the wrong length or a value that is not a finite number is an InputError that names the function: both would
    otherwise broadcast or spread silently. So is an exception in a function, which stays the error's cause.
    """
    as_messages = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    names = sorted({name for row in columns for name in row})
    by_name = {name: [row.get(name) for row in columns] for name in names}
    rewards = np.full((len(prompts), len(functions)), np.nan)
    for number, (path, function) in enumerate(functions.items()):
        try:
            values = function(prompts=prompts, completions=as_messages, completion_ids=completion_ids, **by_name)
        except Exception as error:
            traceback.print_exc()  # the user's own code: one line is not enough to find the mistake
            raise InputError(f"reward {path}: raised {_describe(error)}") from error
        try:
            length = None if isinstance(values, (str, bytes, dict, set)) else len(values)
        except TypeError:
            length = None
        if length is None:
            raise InputError(f"reward {path}: returned {type(values).__name__}, not a list with one value a sample")
        if length != len(prompts):
            raise InputError(f"reward {path}: returned {length} values for {len(prompts)} samples")
        for i, value in enumerate(values):
            if value is None:
                continue
            try:
                if isinstance(value, (str, bytes)):
                    raise TypeError("text that float() would read")
                rewards[i, number] = float(value)
            except (TypeError, ValueError, OverflowError):
                raise InputError(f"reward {path}: value {value!r} for sample {i} is not a number or None") from None
            if not math.isfinite(rewards[i, number]):
                raise InputError(f"reward {path}: value {value} for sample {i} is not finite")
    return rewards


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


def overlong_penalty(lengths: np.ndarray, max_length: int, buffer_length: int, factor: float) -> np.ndarray:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), float64 [S], 0 or negative.

    lengths: response tokens. Nothing up to max_length - buffer_length, then linearly down to -factor at max_length.
    """
    if buffer_length == 0:
        return np.zeros(len(lengths))
    excess = np.clip(lengths - (max_length - buffer_length), 0, None)
    return -factor * excess / buffer_length


def exact_match(prompts, completions, completion_ids, answer, **columns) -> list[float]:
    """1 if the final answer, or the whole completion if nothing is tagged as one, equals the column `answer` as text, else 0."""
    texts = [text_of(c) for c in completions]
    found = [text.strip() if final_answer(text) is None else final_answer(text) for text in texts]
    return [float(f == str(a).strip()) for f, a in zip(found, answer, strict=True)]


def reasoning_gym_score(prompts, completions, completion_ids, task, entry, **columns) -> list[float]:
    """The score that reasoning-gym's own scorer of the sample's task gives to the final answer; 0 to 1."""
    import reasoning_gym

    scores = []
    for completion, name, item in zip(completions, task, entry, strict=True):
        scores.append(reasoning_gym.get_score_answer_fn(name)(answer=final_answer(text_of(completion)), entry=item))
    return scores


def answer_format(prompts, completions, completion_ids, **columns) -> list[float]:
    """1 if the completion ends with exactly one `<answer>...</answer>`, else 0."""
    pattern = re.compile(r"(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)+</answer>\s*", re.DOTALL)
    return [float(pattern.fullmatch(text_of(c)) is not None) for c in completions]


def math_equivalence(prompts, completions, completion_ids, answer, **columns) -> list[float | None]:
    """1 if the completion's answer equals the column `answer` as mathematics (the math-verify library), else 0; None if the
    reference itself cannot be parsed. Of a reference with its solution, as GSM8K has, what follows the last #### counts."""
    from math_verify import parse, verify

    # The library's time-outs are signals, which only the main thread may set.
    limit_s = MATH_LIMIT_S if threading.current_thread() is threading.main_thread() else None
    scores: list[float | None] = []
    for completion, reference in zip(completions, answer, strict=True):
        gold = [] if reference is None else parse(f"${_reference_answer(reference)}$", parsing_timeout=limit_s)
        if not gold:
            scores.append(None)
            continue
        text = text_of(completion)
        tagged = final_answer(text)
        found = parse(text if tagged is None else f"${tagged}$", parsing_timeout=limit_s)
        scores.append(float(verify(gold, found, timeout_seconds=limit_s)))
    return scores


def _reference_answer(reference) -> str:
    return str(reference).rpartition("####")[2].strip()


def text_of(completion: str | list[dict]) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def final_answer(text: str) -> str | None:
    """What stands in the last `<answer>` tags, or None without any."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


def _describe(error: Exception) -> str:
    """Kind, place and text of an exception in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}: {' '.join(str(error).split())}"
