"""Where reward functions are called: in worker processes, or in this one (`InProcess`).

A job is one call: a function and one sample, or a group of them. Jobs begin in the order in which
they come, each in the next worker that is free. A worker that takes too long or dies costs its
current job alone (distributed/worker.py).
"""

import pickle
import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from bubblespec.distributed.worker import Worker, WorkerFailure, WorkerTimeout, close_workers
from bubblespec.errors import InputError, one_line
from bubblespec.rewards.functions import (
    Answer,
    RewardFailure,
    RewardFunction,
    Sample,
    answers_of,
    load_reward,
    sees_groups,
)


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
