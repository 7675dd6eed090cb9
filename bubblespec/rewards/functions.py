"""Reward functions: loaded, checked, and called, in worker processes or in this one (`InProcess`).

A reward that the ranks compute on their own devices is an `OwnPool` instead.

A reward function has TRL's signature `f(prompts, completions, completion_ids, **columns) ->
list[float | None]`: prompts and completions are strings, or lists of chat messages if the prompt is
a chat; every further column of the data is a keyword argument with one value per sample. None means
that the function does not apply to that sample. An `async` function is awaited. TRL's further
arguments (OF_TRL) are passed to a function that names them. A call has the responses of one whole
group, all of one prompt, so a function may compare them. A function that is declared `@per_sample`
is called as soon as a response is finished, with any samples, and a sample for which it fails costs
no other sample its reward.

A worker's job is one call: a function and one sample, or a group of them. Jobs begin in the order
in which they come, each in the next worker that is free. A worker that takes too long or dies costs
its current job alone (distributed/worker.py)."""

import contextlib
import copy
import inspect
import io
import math
import pickle
import queue
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, TextIO

from bubblespec.config.imports import call, import_function
from bubblespec.distributed.worker import Worker, WorkerFailure, WorkerTimeout, close_workers
from bubblespec.errors import InputError, is_interrupt, one_line, shown, trace_of

RewardFunction = Callable[..., list[float | None]]

ARGUMENTS = ("prompts", "completions", "completion_ids")
OF_TRL = ("trainer_state", "log_extra", "log_metric")
MARK = "reward trial: "  # before each line that a function prints in the trial at the start


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
    is_trial: bool = False
    """Whether the response is made up, to try the function at the start of a run."""


OF_CHATS = "prompts are chats, so the text of a completion is completion[0]['content']"


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


class OwnPool:
    """A reward that is computed on the ranks' own devices, and not by workers.

    Its values are per sample: none depends on the others that it is computed with."""

    per_sample = True

    def submit(self, samples: list[Sample]) -> Future:
        """Queue samples; the future has the `Answer` of each."""
        raise NotImplementedError

    def run(self) -> None:
        """Compute here all that this rank has queued."""
        raise NotImplementedError

    def finish(self, ranks: Any) -> None:
        """Compute what is left of all ranks, which call this together. Uses collectives."""
        raise NotImplementedError


def per_sample(function: RewardFunction) -> RewardFunction:
    """Declare that the value of a sample does not depend on the others in the call."""
    function.per_sample = True  # type: ignore[attr-defined]  # functions have attributes
    return function


def sees_groups(function: RewardFunction | OwnPool) -> bool:
    """Whether every call must have one whole group."""
    return not getattr(function, "per_sample", False)


def takes_environments(function: RewardFunction | OwnPool) -> bool:
    signature = _signature_of(function)
    return signature is not None and "environments" in signature.parameters


def named_of_trl(function: RewardFunction | OwnPool) -> list[str]:
    signature = _signature_of(function)
    return [name for name in OF_TRL if signature and name in signature.parameters]


def _signature_of(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):  # an OwnPool, and some that are written in C, have none
        return None


def load_reward(path: str, key: str = "reward.functions") -> RewardFunction:
    return import_function(key, path, "my_module.my_reward")


def check_arguments(
    path: str,
    function: RewardFunction | OwnPool,
    columns: Collection[str],
    source: str,
    has_environments: bool = False,
    key: str = "reward.functions",
) -> None:
    """Raise InputError if the function cannot be called with samples that have these columns.

    source: of the data; has_environments: whether responses are episodes; key: of the function."""
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
        columns = {name: [copy.deepcopy(s.columns.get(name)) for s in samples] for name in names}
        columns |= {name: of_trl[name] for name in named_of_trl(function)}  # as in TRL, these win
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
            if isinstance(samples[0].prompt, list) and "list" in str(error):
                message += f"; {OF_CHATS}"
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
    return [checked(value) for value in values]


def answers_of(function: RewardFunction, samples: list[Sample], clock) -> list[Answer]:
    """Return the answers from one call, timed by the clock."""
    begin_s = clock.monotonic()
    logs: list[tuple[dict, list]] = [({}, []) for _ in samples]
    with marked_prints() if samples[0].is_trial else contextlib.nullcontext():
        rewards = score(function, samples, logs)
    end_s = clock.monotonic()
    each_s, pairs = (end_s - begin_s) / len(samples), zip(rewards, logs, strict=True)
    return [Answer(reward, each_s, end_s, *log) for reward, log in pairs]


class _Marked(io.TextIOBase):
    """A text file that gets MARK at the beginning of each line."""

    def __init__(self, file: TextIO):
        self._file, self._is_in_line = file, False

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self._file.write(line if self._is_in_line else MARK + line)
            self._is_in_line = not line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self._file.flush()


@contextlib.contextmanager
def marked_prints() -> Iterator[None]:
    """Context in which what Python code prints is marked as of the trial."""
    out, err = _Marked(sys.stdout), _Marked(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


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
    if isinstance(sample.prompt, str):
        return sample.completion
    return [{"role": "assistant", "content": sample.completion}]


def checked(value) -> Reward:
    """Return the value as a finite number or None, or the failure that it is."""
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # of its own __float__, as a meta tensor's
        number = math.nan
    if math.isfinite(number):
        return number
    return RewardFailure("value", f"value {shown(value)} is neither a finite number nor None")


class InProcess:
    """Calls the functions in this process, unprotected.

    One call has a group, or all samples that were submitted since the last `run`."""

    def __init__(self, functions: Iterable[RewardFunction], clock):
        self._queued: list[tuple[RewardFunction, list]] = [(function, []) for function in functions]
        self._clock = clock

    def submit(self, function: int, samples: list[Sample]) -> Future:
        future: Future = Future()
        self._queued[function][1].append((future, samples))
        return future

    def run(self) -> None:
        """Make all calls that were submitted, however long they take."""
        for function, queued in self._queued:
            units = [[unit] for unit in queued] if sees_groups(function) else [queued[:]]
            queued.clear()
            for unit in filter(None, units):
                samples = [sample for _, own in unit for sample in own]
                answers = iter(answers_of(function, samples, self._clock))
                for future, own in unit:
                    future.set_result([next(answers) for _ in own])

    def close(self) -> None:
        """Do nothing: there are no workers."""


class RewardWorkers:
    """`num_workers` processes that call the functions at `paths`. To be used by one thread."""

    def __init__(self, paths: list[str], num_workers: int, timeout_s: float):
        """timeout_s: of a function for one sample."""
        self.timeout_s = timeout_s
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.workers = [
            Worker(__name__, paths, "reward.functions", self._jobs) for _ in range(num_workers)
        ]

    def submit(self, function: int, samples: list[Sample]) -> Future:
        """Queue one call of a function, given by its number; return the future of its answers.

        Once a worker is free, the list with the `Answer` of each sample comes within the time-out
        of as many, or an InputError if no worker can be started. Queued calls can be cancelled."""
        try:
            request = pickle.dumps((function, samples))
        except Exception as error:  # objects with code of their own
            raise InputError(
                "reward.num_workers: a sample's columns cannot be sent to a worker "
                f"({one_line(error)}); set 0"
            ) from error
        future: Future = Future()
        self._jobs.put(partial(self._call, future, request, len(samples)))
        return future

    def run(self) -> None:
        """Do nothing: workers call the functions when they are free."""

    def close(self) -> None:
        """End all workers, also busy ones. Can be called again."""
        close_workers(self.workers)

    def _call(self, future: Future, request: bytes, num_samples: int, worker: Worker) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            worker.start()
        except (InputError, OSError) as error:
            future.set_exception(error)
            return
        begin_s = time.monotonic()
        try:
            replies = worker.ask(request, num_samples * self.timeout_s)
            answers = [
                Answer(RewardFailure(*reward) if isinstance(reward, list) else reward, *times)
                for reward, *times in replies
            ]
        except (WorkerFailure, ValueError, TypeError) as error:  # of a malformed reply, too
            ended_s = time.monotonic()
            worker.end()
            kind = "timeout" if isinstance(error, WorkerTimeout) else "crash"
            failure = RewardFailure(kind, str(error))
            answers = [Answer(failure, (ended_s - begin_s) / num_samples, ended_s)] * num_samples
        future.set_result(answers)


def make_answer(paths: list[str]) -> Callable[[bytes], list[Answer]]:
    """Return the function by which a worker replies (`worker.serve`). Raises InputError."""
    functions = [load_reward(path) for path in paths]

    def answer(work: bytes) -> list[Answer]:
        function, samples = pickle.loads(work)
        return answers_of(functions[function], samples, time)

    return answer
