"""Where reward functions are called: in worker processes, where one that hangs or crashes does not
harm the trainer, or in this one (`InProcess`).

A unit of work is one call: a function and one sample, or a group of them; units are begun in the
order in which they come. Each worker process has a thread in the trainer that sends it one unit at
a time and waits for the answer. A worker that takes too long or dies is killed with all that it has
started, and replaced; only its current unit is lost (distributed/worker.py).
"""

import contextlib
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from bubblespec.distributed.worker import WorkerFailure, WorkerProcess
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
    """Calls the functions in this process, unprotected: for each group, or once for all samples
    that were submitted since the last `run`."""

    def __init__(self, functions: Iterable[RewardFunction], clock):
        self._queued: list = [(function, []) for function in functions]
        self._clock = clock

    def submit(self, function: int, samples: list[Sample]) -> Future:
        """See `RewardWorkers`."""
        self._queued[function][1].append((Future(), samples))
        return self._queued[function][1][-1][0]

    def run(self) -> None:
        """Compute all that was submitted, however long it takes."""
        for function, queued in self._queued:
            units = [[unit] for unit in queued] if sees_groups(function) else [queued[:]]
            queued.clear()
            for unit in filter(None, units):
                samples = [sample for _, of_unit in unit for sample in of_unit]
                answers = iter(answers_of(function, samples, self._clock))
                for future, of_unit in unit:
                    future.set_result([next(answers) for _ in of_unit])

    def close(self) -> None:
        """See `RewardWorkers`."""


class RewardWorkers:
    """`num_workers` processes that call the functions at `paths`. To be used by one thread."""

    def __init__(self, paths: list[str], num_workers: int, timeout_s: float):
        """timeout_s: of a function for one sample."""
        self.paths, self.timeout_s = paths, timeout_s
        self._units: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()  # of all below
        self._workers: set[WorkerProcess] = set()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"reward worker {n}", daemon=True)
            for n in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: int, samples: list[Sample]) -> Future:
        """Queue one call of a function, given by its index. A list with the `Answer` of each sample
        comes within the time-out of as many, once a worker is free; or an InputError, if none can
        be started. A call can be cancelled while it is queued."""
        try:
            work = pickle.dumps((function, samples))
        except Exception as error:  # objects with code of their own
            raise InputError(
                "reward.num_workers: a sample's columns cannot be sent to a worker "
                f"({one_line(error)}); set 0"
            ) from error
        future = Future()
        self._units.put((future, work, len(samples)))
        return future

    def run(self) -> None:
        """The workers need no push."""

    def close(self) -> None:
        """End all workers, also busy ones. Can be called again."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                worker.kill()  # its thread is waiting for it, and reaps it
        for _ in self._threads:
            self._units.put(None)
        for thread in self._threads:
            thread.join(timeout=30)

    def _serve(self) -> None:
        """Feed one worker until the end, replacing it when needed. Runs in a thread."""
        worker = None
        with contextlib.suppress(InputError, OSError):  # it is tried again for the first unit
            worker = self._start()
        while (unit := self._units.get()) is not None and not self._is_closed:
            future, work, num_samples = unit
            if not future.set_running_or_notify_cancel():
                continue
            try:
                worker = worker or self._start()
            except (InputError, OSError) as error:
                future.set_exception(error)
                continue
            begin_s = time.monotonic()
            try:
                replies = worker.ask(work, num_samples * self.timeout_s)
                answers = [answer_from(reply) for reply in replies]
            except (WorkerFailure, ValueError, TypeError) as error:
                ended_s = time.monotonic()
                self._end(worker)
                worker, is_timeout = None, getattr(error, "is_timeout", False)
                failure = RewardFailure("timeout" if is_timeout else "crash", str(error))
                answers = [Answer(failure, (ended_s - begin_s) / num_samples, ended_s)]
                answers *= num_samples
            future.set_result(answers)
        if worker is not None:
            self._end(worker)

    def _start(self) -> WorkerProcess:
        """A worker that is ready. Raises InputError if the functions cannot be imported."""
        with self._lock:
            worker = WorkerProcess(__name__, self.paths)
            self._workers.add(worker)
            if self._is_closed:
                worker.kill()
        if problem := worker.problem():
            self._end(worker)
            raise InputError(f"reward.functions: a worker process could not be started: {problem}")
        return worker

    def _end(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.end()


def answer_from(reply: list) -> Answer:
    """As it was before it became JSON. Raises ValueError or TypeError for what is none."""
    reward, seconds, ended_s = reply
    return Answer(RewardFailure(*reward) if isinstance(reward, list) else reward, seconds, ended_s)


def make_answer(paths: list[str]) -> Callable[[bytes], list[Answer]]:
    """What a worker replies with (`bubblespec.distributed.worker.serve`). Raises InputError."""
    functions = [load_reward(path) for path in paths]

    def answer(work: bytes) -> list[Answer]:
        function, samples = pickle.loads(work)
        return answers_of(functions[function], samples, time)

    return answer
