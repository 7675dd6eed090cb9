"""Worker processes that call the user's code: environments and rewards. Replies are JSON, within a
time limit and a size; a worker that fails is killed with all that it has started, and replaced.

A worker is started with exec, not forked: the trainer has threads of CUDA and of the process group.
Between the two is a supervisor process (`fork_with_supervisor`).
"""

import contextlib
import importlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from bubblespec.distributed.processes import fork_with_supervisor
from bubblespec.errors import InputError

START_LIMIT_S = 300.0  # to start Python and import what the user has named
# A tenth of a core on which a rank decodes, all of an idle one. At 19 a call may time out.
NICENESS = 10
MAX_REPLY_BYTES = 1 << 24
# Arguments: sys.path, the worker's connection, the trainer's process, then those of `serve`.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from bubblespec.distributed.worker import serve
serve(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
"""


class WorkerFailure(Exception):
    """Why a worker must be replaced."""

    def __init__(self, message: str, is_timeout: bool):
        super().__init__(message)
        self.is_timeout = is_timeout
        """Whether the time limit has passed; otherwise the process has ended, or its reply is
        malformed."""


class Worker:
    """A worker process with its replacements, and the thread that runs its jobs.

    A job is a function of the worker, called in that thread; it is to catch all exceptions. What is
    left of the jobs when the worker is closed is not run.
    """

    def __init__(self, module: str, argument: Any, key: str, jobs: queue.SimpleQueue | None = None):
        """module, argument: see `serve`; key: of the configuration, for errors; jobs: a queue that
        several workers share."""
        self.jobs: queue.SimpleQueue[Callable[[Worker], None] | None]
        self.jobs = queue.SimpleQueue() if jobs is None else jobs
        self.process: WorkerProcess | None = None
        self.is_closed = False
        self._make_process, self._key = partial(WorkerProcess, module, argument), key
        self._lock = threading.Lock()  # of process and is_closed
        self._thread = threading.Thread(target=self._run_jobs, name=f"worker {key}", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Start a process, if there is none, and wait until it is ready. Raises InputError if it
        cannot import what it needs, and OSError if it cannot be started."""
        if self.process is not None:
            return
        process = self._make_process()
        with self._lock:
            self.process = process
            if self.is_closed:
                process.kill()
        if problem := process.problem():
            self.end()
            raise InputError(f"{self._key}: a worker process could not be started: {problem}")

    def ask(self, request: bytes, limit_s: float) -> Any:
        """Return the process's reply to a request. Raises WorkerFailure, and then the process has
        ended."""
        assert self.process is not None, "start it first"
        try:
            return self.process.ask(request, limit_s)
        except WorkerFailure:
            self.end()
            raise

    def end(self) -> None:
        """End the process, if there is one; the next `start` replaces it."""
        with self._lock:
            process, self.process = self.process, None
        if process is not None:
            process.end()

    def close(self) -> None:
        """Kill the process, also a busy one; the thread reaps it."""
        with self._lock:
            self.is_closed = True
            if self.process is not None:
                self.process.kill()

    def _run_jobs(self) -> None:
        with contextlib.suppress(InputError, OSError):  # the first job tries again
            self.start()
        while (job := self.jobs.get()) is not None and not self.is_closed:
            job(self)
        self.end()

    def join(self) -> None:
        """Wait until the thread has ended, after `close`."""
        self._thread.join(timeout=30)


def close_workers(workers: Sequence[Worker]) -> None:
    """End workers, also busy ones. Can be called again."""
    for worker in workers:
        worker.close()
    for worker in workers:  # which may share their queue
        worker.jobs.put(None)
    for worker in workers:
        worker.join()


class WorkerProcess:
    """A worker process, as seen from the trainer. Every wait for it has a time limit.

    The supervisor ends as the worker does. What user code prints goes to the trainer's standard
    error.
    """

    def __init__(self, module: str, argument: Any):
        """module, argument: see `serve`."""
        ours, theirs = socket.socketpair()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # The order of sets of strings depends on this seed: replies must not depend on the worker.
        constants = {"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
        path = json.dumps([p for p in sys.path if isinstance(p, str)])
        arguments = [path, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self.supervisor = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, *arguments, module, json.dumps(argument)],
                bufsize=0,
                stdin=subprocess.PIPE,  # its end tells the supervisor to end them all
                stdout=2,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **threads, **constants},
                start_new_session=True,  # no SIGINT from the terminal
            )
        assert self.supervisor.stdin is not None
        self._connection, self._input = Connection(ours.detach()), self.supervisor.stdin

    def problem(self) -> str | None:
        """Wait until the process is ready; return why it is not, or None."""
        try:
            return self._receive(START_LIMIT_S)
        except WorkerFailure as failure:
            return str(failure)

    def ask(self, request: bytes, limit_s: float) -> Any:
        """Return the reply to a request. Raises WorkerFailure, after which it must be ended."""
        with contextlib.suppress(OSError):  # it has ended, as will be found next
            self._connection.send_bytes(request)
        return self._receive(limit_s)

    def kill(self) -> None:
        """Request its supervisor to kill it with all that it has started."""
        with contextlib.suppress(OSError, ValueError):  # it has ended, or has been waited for
            self._input.write(b"\n")

    def end(self) -> None:
        """Kill it and wait until nothing is left."""
        self.kill()
        try:
            self.supervisor.wait(timeout=30)
        except subprocess.TimeoutExpired:  # the kernel may be in its way
            self.supervisor.kill()
        self._connection.close()
        self._input.close()

    def _receive(self, limit_s: float) -> Any:
        deadline = time.monotonic() + limit_s
        try:
            while (remaining_s := deadline - time.monotonic()) > 0:
                if self._connection.poll(min(remaining_s, 1.0)):
                    return json.loads(self._connection.recv_bytes(2 * MAX_REPLY_BYTES))
        except (OSError, EOFError, ValueError) as error:
            raise WorkerFailure(f"its process {self._how_it_ended()}", False) from error
        raise WorkerFailure(f"no answer within {limit_s:.6g} s", True)

    def _how_it_ended(self) -> str:
        try:
            code = self.supervisor.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was ended by {signal.Signals(-code).name}"


def serve(descriptor: int, parent: int, module: str, argument: str) -> None:
    """Reply to requests in a worker until the connection closes, by the function that the module's
    `make_answer` returns for the argument, which is JSON."""
    fork_with_supervisor(parent, descriptor)
    connection = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    sys.argv = sys.argv[:1]
    os.nice(NICENESS)
    # If memory runs out it is the first to go, and is replaced. Where Linux first shares the cores
    # among sessions ("autogroup", sched(7)), its session gets less of them.
    for path, value in (("oom_score_adj", "1000"), ("autogroup", str(NICENESS))):
        with contextlib.suppress(OSError), open(f"/proc/self/{path}", "w") as file:
            file.write(value)
    try:
        answer = importlib.import_module(module).make_answer(json.loads(argument))
    except InputError as error:
        _send(connection, str(error))
        return
    _send(connection, None)
    with contextlib.suppress(EOFError):
        while True:
            _send(connection, answer(connection.recv_bytes()))


def _send(connection: Connection, reply: Any) -> None:
    """Send JSON: the trainer must not unpickle what user code could have made."""
    connection.send_bytes(json.dumps(reply).encode())
