"""Reward functions: loaded, checked, called, combined; and the shipped ones.

A reward function has TRL's signature `f(prompts, completions, completion_ids, **columns) ->
list[float | None]`: prompts and completions are strings, or lists of chat messages if the prompt is
a chat; every further column of the data is a keyword argument with one value per sample. None means
that the function does not apply to that sample. An `async` function is awaited. TRL's further
arguments (OF_TRL) are passed to a function that names them. A call has the
responses of one whole group, all of one prompt, so a function may compare them. A function that is
declared `@per_sample` is called as soon as a response is finished, with any samples, and a sample
for which it fails costs no other sample its reward.
"""

import copy
import inspect
import math
import pickle
import re
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from bubblespec.config.imports import call, import_function, import_quietly
from bubblespec.errors import InputError, is_interrupt, shown, trace_of

RewardFunction = Callable[..., list[float | None]]

ARGUMENTS = ("prompts", "completions", "completion_ids")
OF_TRL = ("trainer_state", "log_extra", "log_metric")


class Sample(NamedTuple):
    """One response, as a reward function gets it."""

    prompt: str | list[dict]
    """Text, or chat messages."""
    completion: str
    """The response as text, without special tokens."""
    completion_ids: list[int]
    columns: dict
    """Other columns of the prompt's row, by name."""
    environment: bytes = pickle.dumps(None)
    """Environment of the episode, pickled; None unless a function takes environments."""
    progress: tuple[int, int] = (0, 0)
    """Finished steps, and run.max_steps."""


class RewardFailure(NamedTuple):
    """A reward that could not be computed."""

    kind: str
    """exception, result (not one value per sample), value (no finite number), timeout, crash (of
    the process), or environment."""
    message: str
    trace: str = ""
    """Traceback of the exception, if there was one."""


Reward = float | None | RewardFailure
"""A finite number, or None where the function does not apply."""


class Answer(NamedTuple):
    """The result of one function for one sample."""

    reward: Reward
    seconds: float
    """Time inside the function."""
    ended_s: float
    """Time at which it returned or was killed, by time.monotonic, which processes share."""
    columns: Mapping[str, Any] = MappingProxyType({})
    """What the function has logged of the sample by `log_extra`."""
    metrics: Sequence[tuple[str, float]] = ()
    """Calls of `log_metric`, in the answer for the first sample of a call."""


def per_sample(function: RewardFunction) -> RewardFunction:
    """Declare that the value of a sample does not depend on the others in the call."""
    function.per_sample = True  # type: ignore[attr-defined]  # functions have attributes
    return function


def sees_groups(function: RewardFunction) -> bool:
    """Whether every call must have one whole group."""
    return not getattr(function, "per_sample", False)


def takes_environments(function: RewardFunction) -> bool:
    """Whether the function has an argument `environments`."""
    signature = _signature_of(function)
    return signature is not None and "environments" in signature.parameters


def named_of_trl(function: RewardFunction) -> list[str]:
    """Return which of TRL's further arguments the function names."""
    signature = _signature_of(function)
    return [name for name in OF_TRL if signature and name in signature.parameters]


def _signature_of(function: Callable) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):  # some that are written in C have none
        return None


def load_reward(path: str, key: str = "reward.functions") -> RewardFunction:
    """Import `package.module.function`. Raises InputError naming the path and the key."""
    return import_function(key, path, "my_module.my_reward")


def check_arguments(
    path: str,
    function: RewardFunction,
    columns: Collection[str],
    source: str,
    has_environments: bool = False,
    key: str = "reward.functions",
) -> None:
    """Raise InputError if the function cannot be called with samples that have these columns.

    source: of the data, for the error; has_environments: whether responses are episodes; key: that
    names the function."""
    signature = _signature_of(function)
    given = dict.fromkeys([*ARGUMENTS, *columns, *named_of_trl(function)])
    if has_environments and takes_environments(function):
        given["environments"] = None
    try:
        if signature is not None:
            signature.bind(**given)
    except TypeError as error:
        has = f"the columns {sorted(columns)}" if columns else "no further columns"
        raise InputError(
            f"{key}: {path} cannot be called with prompts, completions, completion_ids "
            f"and {has} of {source}: {shown(error, str)}"
        ) from error


def score(
    function: RewardFunction, samples: list[Sample], logs: list[tuple[dict, list]] | None = None
) -> list[Reward]:
    """Return one reward per sample, by one call with copies of their prompts and columns.

    If the call raises, all samples of a group fail; a function per sample is called again for each
    sample alone. logs: get the columns and metrics that the function logs, by sample."""
    names = sorted({name for sample in samples for name in sample.columns}.difference(ARGUMENTS))
    logs = [({}, []) for _ in samples] if logs is None else logs
    of_trl = _arguments_of_trl(samples[0].progress, logs)
    try:
        columns = {name: of_trl[name] for name in named_of_trl(function)}
        columns |= {name: [copy.deepcopy(s.columns.get(name)) for s in samples] for name in names}
        if takes_environments(function):
            columns["environments"] = [pickle.loads(s.environment) for s in samples]
        returned = call(
            function,
            prompts=[copy.deepcopy(s.prompt) for s in samples],
            completions=[_completion_of(s) for s in samples],
            completion_ids=[s.completion_ids[:] for s in samples],
            **columns,
        )
    except BaseException as error:  # such as SystemExit, CancelledError, panics of extensions
        if is_interrupt(error):
            raise
        if len(samples) == 1 or sees_groups(function):
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{frame.filename}:{frame.lineno}"
            message = f"raised {type(error).__name__} at {place}: {shown(error, str)}"
            return [RewardFailure("exception", message, trace_of(error))] * len(samples)
        for columns, metrics in logs:
            columns.clear()
            metrics.clear()
        pairs = zip(samples, logs, strict=True)
        return [reward for sample, log in pairs for reward in score(function, [sample], [log])]
    try:
        if isinstance(returned, str | bytes | dict | set) or len(returned) != len(samples):
            raise TypeError
        values = list(returned)
    except Exception:  # of its own methods
        wanted = f"a list of {len(samples)} values, one per sample"
        problem = f"returned {shown(returned)}, not {wanted}"
        return [RewardFailure("result", problem)] * len(samples)
    return [_checked(value) for value in values]


def answers_of(function: RewardFunction, samples: list[Sample], clock) -> list[Answer]:
    """Return the answers from one call, timed by the clock."""
    begin_s = clock.monotonic()
    logs: list[tuple[dict, list]] = [({}, []) for _ in samples]
    rewards = score(function, samples, logs)
    end_s = clock.monotonic()
    each_s, pairs = (end_s - begin_s) / len(samples), zip(rewards, logs, strict=True)
    return [Answer(reward, each_s, end_s, *log) for reward, log in pairs]


def _arguments_of_trl(progress: tuple[int, int], logs: list[tuple[dict, list]]) -> dict[str, Any]:
    """Return TRL's further arguments of one call, by name. logs: what they write to, by sample."""

    def log_extra(column: str, values: Sequence) -> None:
        for (columns, _), value in zip(logs, values, strict=True):
            value = value.item() if hasattr(value, "item") else value  # of numpy or torch
            is_plain = isinstance(value, str | int | float | None)
            columns[str(column)] = value if is_plain else shown(value, str)

    def log_metric(name: str, value: float) -> None:
        logs[0][1].append((str(name), float(value)))

    state = SimpleNamespace(global_step=progress[0], max_steps=progress[1])
    return dict(zip(OF_TRL, (state, log_extra, log_metric), strict=True))


def _completion_of(sample: Sample) -> str | list[dict]:
    """Return the completion: a string, or chat messages if the prompt is a chat."""
    if isinstance(sample.prompt, str):
        return sample.completion
    return [{"role": "assistant", "content": sample.completion}]


def _checked(value) -> Reward:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # of its own __float__, as a meta tensor's
        number = math.nan
    if math.isfinite(number):
        return number
    return RewardFailure("value", f"value {shown(value)} is neither a finite number nor None")


def combine(rewards: np.ndarray, weights: list[float]) -> np.ndarray:
    """Return the weighted sum over the functions that apply: [samples, functions] -> [samples].

    NaN where none applies: training such a sample on 0 would be a silent mistake. 0 without
    functions, for a loss without rewards."""
    if not weights:
        return np.zeros(len(rewards))
    total = np.nansum(rewards * np.asarray(weights), axis=1)
    return np.where(np.isnan(rewards).all(axis=1), np.nan, total)


def overlong_penalty(lengths: np.ndarray, max_length: int, buffer_length: int) -> np.ndarray:
    """Return the soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), float64 [S].

    lengths: response tokens. The penalty is 0 up to max_length - buffer_length, and falls linearly
    to -1 at max_length."""
    if buffer_length == 0:
        return np.zeros(len(lengths))
    excess = np.clip(lengths - (max_length - buffer_length), 0, None)
    return -excess / buffer_length


@per_sample
def exact_match(prompts, completions, completion_ids, answer, **columns) -> list[float | None]:
    """Return 1 where the final answer equals the column `answer` as text, else 0.

    Without `<answer>` tags the whole completion is the answer."""
    texts = [text_of(c) for c in completions]
    given = [text.strip() if final_answer(text) is None else final_answer(text) for text in texts]
    return [float(g == str(a).strip()) for g, a in zip(given, answer, strict=True)]


@per_sample
def reasoning_gym_score(
    prompts, completions, completion_ids, task, entry, **columns
) -> list[float | None]:
    """Return the score from 0 to 1 of the final answer by reasoning-gym's scorer of the task."""
    reasoning_gym = import_quietly("reasoning_gym")
    return [
        reasoning_gym.get_score_answer_fn(name)(answer=final_answer(text_of(c)), entry=item)
        for c, name, item in zip(completions, task, entry, strict=True)
    ]


@per_sample
def answer_format(prompts, completions, completion_ids, **columns) -> list[float | None]:
    """Return 1 where the completion ends with exactly one `<answer>...</answer>`, else 0."""
    pattern = re.compile(r"(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)+</answer>\s*", re.DOTALL)
    return [float(pattern.fullmatch(text_of(c)) is not None) for c in completions]


def text_of(completion: str | list[dict]) -> str:
    """Return the text of a completion, which is a string or chat messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def final_answer(text: str) -> str | None:
    """Return the text in the last `<answer>` tags, or None without any."""
    for part in reversed(text.split("</answer>")[:-1]):
        _, tag, answer = part.partition("<answer>")
        if tag:
            return answer.strip()
    return None
