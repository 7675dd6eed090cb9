"""Worker processes for reward functions, on the trainer's side: a function that hangs or crashes
does not harm the trainer.

A unit of work is one sample and one function; units are begun in the order in which they come. Each
worker process has a thread here that sends it one unit at a time and waits for the answer. A worker
that takes too long or dies is killed with all that it has started, and replaced; only its current
unit is lost. Workers are started with exec, not forked: the trainer has threads of CUDA and of the
process group. Between each worker (worker_process.py) and the trainer is a keeper process
(`fork_with_keeper`).
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
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

from bubblespec.errors import InputError, log
from bubblespec.rewards.functions import Reward, RewardFailure, Sample, one_line

START_LIMIT_S = 300.0  # to start Python and import the functions
START_ATTEMPTS = 3
# RollPacker's adaptive time-out (arXiv 2509.21009): its factor on the slowest correct answer, and
# its bounds.
ADAPTIVE_FACTOR = 1.5
MIN_ADAPTIVE_S = 2.0
MAX_ADAPTIVE_S = 30.0
MAX_ANSWER = 1 << 20  # bytes; real ones are far shorter
MAX_SHOWN = 1 << 16  # bytes printed by the functions that are shown for each batch
# Arguments: sys.path, the worker's connection, the trainer's process, paths of functions.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from bubblespec.dist.processes import fork_with_keeper
fork_with_keeper(int(sys.argv[3]), int(sys.argv[2]))
from bubblespec.rewards.worker_process import main
main()
"""


class Answer(NamedTuple):
    """A worker's answer to one unit."""

    reward: Reward
    seconds: float
    """Time inside the function."""
    ended_s: float
    """When it returned or was given up, by time.monotonic, which all processes of a machine
    share."""
    has_leftovers: bool = False
    """It has left processes behind."""


class Kind(NamedTuple):
    """Calls that are expected to take equally long: they share an adaptive time-out."""

    function: int
    """Its index."""
    task: str | None
    """What the sample's column `task` says, as text; None without one."""


class RewardWorkers:
    """`num_workers` processes that call the functions at `paths`. To be used by one thread."""

    def __init__(
        self, paths: list[str], num_workers: int, timeout_s: float, is_adaptive: bool = False
    ):
        self.paths, self.timeout_s, self.is_adaptive = paths, timeout_s, is_adaptive
        self._units: queue.SimpleQueue = queue.SimpleQueue()
        self._slowest: dict[Kind, float] = {}  # seconds of the slowest correct answer
        self._lock = threading.Lock()  # of all below
        self._workers: set[_Worker] = set()
        self._is_closed = False
        self._num_printed = self._num_leaving = 0  # bytes, and calls with leftovers, in this batch
        self._threads = [
            threading.Thread(target=self._serve, name=f"reward worker {n}", daemon=True)
            for n in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: int, sample: Sample) -> Future:
        """Queue one sample for one function, given by its index. Its `Answer` comes within the
        time-out, once a worker is free; or an InputError, if none can be started. It can be
        cancelled while it is queued."""
        try:
            work = pickle.dumps((function, sample))
        except Exception as error:  # objects with code of their own
            raise InputError(
                "reward.num_workers: a sample's columns cannot be sent to a worker "
                f"({one_line(error)}); give 0"
            ) from error
        task, future = sample.columns.get("task"), Future()
        kind = Kind(function, None if task is None else str(task))
        self._units.put((future, kind, work))
        return future

    def end_batch(self) -> None:
        """Report what was not shown of the functions' output, and calls that left processes."""
        with self._lock:
            num_omitted, num_leaving = self._num_printed - MAX_SHOWN, self._num_leaving
            self._num_printed = self._num_leaving = 0
        if num_omitted > 0:
            log(
                f"\nwarning: {num_omitted} bytes that reward functions printed are left out; "
                f"{MAX_SHOWN} of each batch are shown"
            )
        if num_leaving:
            log(
                f"warning: {num_leaving} calls of reward functions left processes behind; these "
                "were ended with their workers, which were replaced"
            )

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
        self.end_batch()

    def limit_s(self, kind: Kind, is_first: bool) -> float:
        """Seconds for the next call of a kind. The first in a worker may have things to import."""
        if not self.is_adaptive:
            return self.timeout_s
        return min(self.timeout_s, adaptive_timeout(None if is_first else self._slowest.get(kind)))

    def _serve(self) -> None:
        """Feed one worker until the end, replacing it when needed. Runs in a thread."""
        worker = None
        with contextlib.suppress(OSError):  # it is tried again for the first unit
            worker = self._start()
        while (unit := self._units.get()) is not None and not self._is_closed:
            future, kind, work = unit
            if not future.set_running_or_notify_cancel():
                continue
            try:
                worker = worker or self._start()
                is_first = kind not in worker.called
                worker.called.add(kind)
                answer = worker.ask(work, self.limit_s(kind, is_first))
            except (InputError, OSError) as error:  # none can be started
                future.set_exception(error)
                continue
            is_correct = isinstance(answer.reward, float) and answer.reward > 0
            with self._lock:
                self._num_leaving += answer.has_leftovers
                if is_correct and not is_first:
                    self._slowest[kind] = max(self._slowest.get(kind, 0.0), answer.seconds)
            if worker.is_spent or answer.has_leftovers:
                self._end(worker)
                worker = None
            future.set_result(answer)
        if worker is not None:
            self._end(worker)

    def _start(self) -> "_Worker":
        """A worker that is ready, or one with a `problem`."""
        for attempt in range(START_ATTEMPTS):
            with self._lock:
                worker = _Worker(self.paths, self._show)
                self._workers.add(worker)
                if self._is_closed:
                    worker.kill()
            worker.wait_until_ready()
            if worker.problem is None or self._is_closed or attempt == START_ATTEMPTS - 1:
                return worker
            self._end(worker)
        raise AssertionError("unreachable")

    def _end(self, worker: "_Worker") -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.end()

    def _show(self, text: bytes) -> None:
        """Copy what a worker has printed to standard error, up to a limit per batch."""
        with self._lock:
            room = max(MAX_SHOWN - self._num_printed, 0)
            self._num_printed += len(text)
        with contextlib.suppress(OSError):
            os.write(2, text[:room])


def adaptive_timeout(slowest_correct_s: float | None) -> float:
    """RollPacker's time-out, from the seconds of the slowest answer so far that earned a reward
    above 0; None: no such answer."""
    if slowest_correct_s is None:
        return MAX_ADAPTIVE_S
    return min(max(ADAPTIVE_FACTOR * slowest_correct_s, MIN_ADAPTIVE_S), MAX_ADAPTIVE_S)


class _Worker:
    """A worker process, as seen from the trainer. Every wait for it has a time limit.

    `process` is its keeper, which ends as the worker does.
    """

    def __init__(self, paths: list[str], show):
        self.called: set[Kind] = set()
        self.is_spent = False  # must be replaced
        self.problem: str | None = None  # why it could not be started
        self._show = show
        ours, theirs = socket.socketpair()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # The order of sets of strings depends on this seed: rewards must not depend on the worker.
        constants = {"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
        arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid()), *paths]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *arguments],
                bufsize=0,
                stdin=subprocess.PIPE,  # its end tells the keeper to end them all
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **threads, **constants},
                start_new_session=True,  # no SIGINT from the terminal
            )
        self._connection = Connection(ours.detach())
        self._open = [self._connection, self.process.stdout]
        os.set_blocking(self.process.stdout.fileno(), False)

    def wait_until_ready(self) -> None:
        """Wait for the imports; sets `problem` if they fail."""
        try:
            self.problem = self._receive(time.monotonic() + START_LIMIT_S)
        except TimeoutError:
            self.problem = f"not ready within {START_LIMIT_S:g} s"
        except (OSError, EOFError, ValueError):
            self.problem = self._how_it_ended()

    def ask(self, work: bytes, limit_s: float) -> Answer:
        """Compute one unit in at most limit_s seconds. After a time-out or crash the worker must be
        replaced. Raises InputError if it could not be started."""
        if self.problem is not None:
            raise InputError(
                f"reward.functions: a worker process could not be started: {self.problem}"
            )
        begin_s = time.monotonic()
        try:
            self._connection.send_bytes(work)
            value, failure, *times = self._receive(begin_s + limit_s)
            return Answer(RewardFailure(*failure) if failure else value, *times)
        except TimeoutError:
            failure = RewardFailure("timeout", f"no answer within {limit_s:.6g} s")
        except (OSError, EOFError, ValueError, TypeError):
            failure = RewardFailure("crash", f"its process {self._how_it_ended()}")
        self.is_spent = True
        ended_s = time.monotonic()
        return Answer(failure, ended_s - begin_s, ended_s)

    def kill(self) -> None:
        """Ask its keeper to kill it with all that it has started."""
        with contextlib.suppress(OSError, ValueError):  # it has ended, or has been waited for
            self.process.stdin.write(b"\n")

    def end(self) -> None:
        """Kill it and wait until nothing is left."""
        self.kill()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:  # the kernel may be in its way
            self.process.kill()
        self._forward_output()
        for file in (self._connection, self.process.stdin, self.process.stdout):
            file.close()

    def _receive(self, deadline: float):
        """The next answer. Raises TimeoutError, EOFError or OSError if the worker has ended,
        ValueError if it is no answer."""
        while (remaining_s := deadline - time.monotonic()) > 0:
            ready = wait(self._open, min(remaining_s, 1.0))
            # What was printed before an answer is in the pipe when that comes.
            if self.process.stdout in ready:
                self._forward_output()
            if self._connection in ready:
                return json.loads(self._connection.recv_bytes(MAX_ANSWER))
        raise TimeoutError

    def _forward_output(self) -> None:
        """Show what is in the pipe, which holds no more than is read here at once."""
        text = self.process.stdout.read(1 << 16)  # None if there is nothing
        if text:
            self._show(text)
        elif text is not None and self.process.stdout in self._open:  # closed
            self._open.remove(self.process.stdout)

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was ended by {signal.Signals(-code).name}"
