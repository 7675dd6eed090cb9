"""Where reward functions are called: in worker processes, where one that hangs or crashes does not
harm the trainer, or in this one (`InProcess`).

A unit of work is one call: a function and one sample, or a group of them; units are begun in the
order in which they come. Each worker process has a thread in the trainer that sends it one unit at
a time and waits for the answer. A worker that takes too long or dies is killed with all that it has
started, and replaced; only its current unit is lost. Workers are started with exec, not forked: the
trainer has threads of CUDA and of the process group. Between each worker and the trainer is a
supervisor process (`fork_with_supervisor`). `main`, at the end, is what a worker runs.
"""

import contextlib
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from multiprocessing.connection import Connection

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

START_LIMIT_S = 300.0  # to start Python and import the functions
# A worker gets a tenth of a core on which a rank decodes, and all of an idle one. At 19 a reward
# may time out.
NICENESS = 10
# Arguments: sys.path, the worker's connection, the trainer's process, paths of functions.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from bubblespec.dist.processes import fork_with_supervisor
fork_with_supervisor(int(sys.argv[3]), int(sys.argv[2]))
from bubblespec.rewards.workers import main
main()
"""


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
        self._workers: set[_Worker] = set()
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
                f"({one_line(error)}); give 0"
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
            answers = worker.ask(work, num_samples, self.timeout_s)
            if worker.is_broken:
                self._end(worker)
                worker = None
            future.set_result(answers)
        if worker is not None:
            self._end(worker)

    def _start(self) -> "_Worker":
        """A worker that is ready. Raises InputError if the functions cannot be imported."""
        with self._lock:
            worker = _Worker(self.paths)
            self._workers.add(worker)
            if self._is_closed:
                worker.kill()
        if problem := worker.problem():
            self._end(worker)
            raise InputError(f"reward.functions: a worker process could not be started: {problem}")
        return worker

    def _end(self, worker: "_Worker") -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.end()


class _Worker:
    """A worker process, as seen from the trainer. Every wait for it has a time limit.

    `process` is its supervisor, which ends as the worker does. What the functions print goes to the
    trainer's standard error.
    """

    def __init__(self, paths: list[str]):
        self.is_broken = False  # after a time-out or crash it must be replaced
        ours, theirs = socket.socketpair()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # The order of sets of strings depends on this seed: rewards must not depend on the worker.
        constants = {"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
        arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid()), *paths]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, *arguments],
                bufsize=0,
                stdin=subprocess.PIPE,  # its end tells the supervisor to end them all
                stdout=2,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **threads, **constants},
                start_new_session=True,  # no SIGINT from the terminal
            )
        self._connection = Connection(ours.detach())

    def problem(self) -> str | None:
        """Wait for the imports. Why they failed, or None."""
        try:
            return self._receive(START_LIMIT_S)
        except TimeoutError:
            return f"not ready within {START_LIMIT_S:g} s"
        except (OSError, EOFError):
            return self._how_it_ended()

    def ask(self, work: bytes, num_samples: int, limit_s: float) -> list[Answer]:
        """Compute one unit in at most limit_s seconds per sample."""
        begin_s, limit_s = time.monotonic(), num_samples * limit_s
        try:
            self._connection.send_bytes(work)
            return [
                Answer(RewardFailure(*r) if isinstance(r, list) else r, seconds, ended_s)
                for r, seconds, ended_s in self._receive(limit_s)
            ]
        except TimeoutError:
            failure = RewardFailure("timeout", f"no answer within {limit_s:.6g} s")
        except (OSError, EOFError, ValueError, TypeError):
            failure = RewardFailure("crash", f"its process {self._how_it_ended()}")
        self.is_broken, ended_s = True, time.monotonic()
        return [Answer(failure, (ended_s - begin_s) / num_samples, ended_s)] * num_samples

    def kill(self) -> None:
        """Ask its supervisor to kill it with all that it has started."""
        with contextlib.suppress(OSError, ValueError):  # it has ended, or has been waited for
            self.process.stdin.write(b"\n")

    def end(self) -> None:
        """Kill it and wait until nothing is left."""
        self.kill()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:  # the kernel may be in its way
            self.process.kill()
        self._connection.close()
        self.process.stdin.close()

    def _receive(self, limit_s: float):
        """The next answer. Raises TimeoutError, EOFError or OSError if the worker has ended."""
        deadline = time.monotonic() + limit_s
        while (remaining_s := deadline - time.monotonic()) > 0:
            if self._connection.poll(min(remaining_s, 1.0)):
                return json.loads(self._connection.recv_bytes())
        raise TimeoutError

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was ended by {signal.Signals(-code).name}"


def main() -> None:
    """Answer the trainer's requests until the connection closes. Arguments: see `_BOOT`."""
    connection, paths = Connection(int(sys.argv[2])), sys.argv[4:]
    os.set_inheritable(connection.fileno(), False)
    sys.argv = sys.argv[:1]
    os.nice(NICENESS)
    # If memory runs out it is the first to go, and is replaced. Where Linux first shares the cores
    # among sessions ("autogroup", sched(7)), its session gets less of them.
    for path, value in (("oom_score_adj", "1000"), ("autogroup", str(NICENESS))):
        with contextlib.suppress(OSError), open(f"/proc/self/{path}", "w") as file:
            file.write(value)
    try:
        functions, problem = [load_reward(path) for path in paths], None
    except InputError as error:
        problem = str(error)
    _send(connection, problem)
    while problem is None:
        try:
            number, samples = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        _send(connection, answers_of(functions[number], samples, time))


def _send(connection: Connection, reply) -> None:
    """As JSON: the trainer must not unpickle what a reward function could have made."""
    connection.send_bytes(json.dumps(reply).encode())
