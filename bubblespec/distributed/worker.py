"""Worker processes that call the user's code: environments and rewards.

Replies are JSON, within a time limit and a size. A worker that fails is killed with all that it has
started, and replaced. Workers are started with exec, not forked: the trainer has threads of CUDA
and of the process group. Between the two is a supervisor process (`fork_with_supervisor`)."""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from bubblespec.distributed.processes import fork_with_supervisor
from bubblespec.errors import InputError

START_LIMIT_S = 300.0  # to start Python and import what the user has named
# A wait is made of short looks, and none counts as more than this many: while all processes are
# paused (SIGSTOP, a container, a laptop), the clock goes on.
MAX_LOOKS = 2
# A tenth of a core on which a rank decodes, all of an idle one. At 19 a call may time out.
NICENESS = 10
MAX_REPLY_BYTES = 1 << 24
# Arguments: the folder of this package, of which another may be installed; sys.path, the worker's
# connection, the trainer's process, then those of `serve`.
_BOOT = """
import sys
sys.path.insert(0, sys.argv[1])
import bubblespec
del sys.path[0]
import json
sys.path[:] = json.loads(sys.argv[2])
from bubblespec.distributed.worker import serve
serve(int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
"""
_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class WorkerFailure(Exception):
    """A worker's process has ended, or its reply is malformed, so that it must be replaced."""


class WorkerTimeout(WorkerFailure):
    """A worker has not replied within its time limit."""


class Worker:
    """A worker process with its replacements, and the thread that runs its jobs.

    A job is a function of the worker, called in that thread; it catches all exceptions. Jobs in
    the queue when the worker is closed are not run. User code prints to the trainer's standard
    error."""

    def __init__(self, module: str, argument: Any, key: str, jobs: SimpleQueue | None = None):
        """Start the thread.

        module, argument: see `serve`; key: of the configuration, for errors; jobs: a queue that
        several workers may share."""
        self.jobs: SimpleQueue[Callable[[Worker], None] | None]
        self.jobs = SimpleQueue() if jobs is None else jobs
        self.supervisor: subprocess.Popen | None = None  # of the present process; ends as it does
        self.is_closed = False
        self._arguments, self._key = (module, json.dumps(argument)), key
        self._connection: Connection
        self._lock = threading.Lock()  # of supervisor and is_closed
        self.thread = threading.Thread(target=self._run_jobs, name=f"worker {key}", daemon=True)
        self.thread.start()

    def start(self) -> None:
        """Start a process if there is none, and wait until it is ready.

        Raises InputError if it cannot import what it needs, OSError if it cannot be started."""
        if self.supervisor is not None:
            return
        ours, theirs = socket.socketpair()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # The order of sets of strings depends on this seed: replies must not depend on the worker.
        constants = {"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
        path = json.dumps([p for p in sys.path if isinstance(p, str)])
        arguments = [_FOLDER, path, str(theirs.fileno()), str(os.getpid()), *self._arguments]
        self._connection = Connection(ours.detach())
        with theirs, self._lock:
            self.supervisor = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", _BOOT, *arguments],
                bufsize=0,
                stdin=subprocess.PIPE,  # at its end the supervisor kills them all
                stdout=2,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **threads, **constants},
                start_new_session=True,  # no SIGINT from the terminal
            )
            if self.is_closed:
                self._kill()
        try:
            problem = self._receive(START_LIMIT_S)
        except WorkerFailure as failure:
            problem = str(failure)
        if problem:
            self.end()
            raise InputError(f"{self._key}: a worker process could not be started: {problem}")

    def ask(self, request: bytes, limit_s: float) -> Any:
        """Return the process's reply. Raises WorkerFailure, and then the process has ended."""
        with contextlib.suppress(OSError):  # it has ended, as will be found next
            self._connection.send_bytes(request)
        try:
            return self._receive(limit_s)
        except WorkerFailure:
            self.end()
            raise

    def end(self) -> None:
        """Kill the process, if there is one, and wait until nothing is left of it."""
        with self._lock:
            self._kill()
            supervisor, self.supervisor = self.supervisor, None
        if supervisor is None:
            return
        try:
            supervisor.wait(timeout=30)
        except subprocess.TimeoutExpired:  # the kernel may be in its way
            supervisor.kill()
        self._connection.close()
        assert supervisor.stdin is not None
        supervisor.stdin.close()

    def close(self) -> None:
        """Request the end of the thread, and of the process even if it is busy."""
        with self._lock:
            self.is_closed = True
            self._kill()

    def _run_jobs(self) -> None:
        with contextlib.suppress(InputError, OSError):  # the first job tries again
            self.start()
        while (job := self.jobs.get()) is not None and not self.is_closed:
            job(self)
        self.end()

    def _kill(self) -> None:
        if self.supervisor is not None and self.supervisor.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                self.supervisor.stdin.write(b"\n")

    def _receive(self, limit_s: float) -> Any:
        try:
            if comes_within(limit_s, self._connection.poll):
                return json.loads(self._connection.recv_bytes(2 * MAX_REPLY_BYTES))
        except (OSError, EOFError, ValueError) as error:
            raise WorkerFailure(f"its process {self._how_it_ended()}") from error
        raise WorkerTimeout(f"no answer within {limit_s:.6g} s")

    def _how_it_ended(self) -> str:
        assert self.supervisor is not None
        try:
            code = self.supervisor.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was ended by {signal.Signals(-code).name}"


def comes_within(limit_s: float, poll: Callable[[float], object]) -> bool:
    """Whether `poll`, which waits for as many seconds, finds something within the limit.

    A jump of the clock counts as at most a quarter of the limit."""
    waited_s, look_s = 0.0, min(limit_s / 8, 1.0)
    while waited_s < limit_s:
        begin_s = time.monotonic()
        if poll(look_s):
            return True
        waited_s += min(time.monotonic() - begin_s, MAX_LOOKS * look_s)
    return False


def close_workers(workers: Sequence[Worker]) -> None:
    """End workers, also busy ones. Can be called again."""
    for worker in workers:
        worker.close()
    for worker in workers:  # which may share their queue
        worker.jobs.put(None)
    for worker in workers:
        worker.thread.join(timeout=30)


def serve(descriptor: int, parent: int, module: str, argument: str) -> None:
    """Reply to requests until the connection closes, by what the module's `make_answer` returns."""
    fork_with_supervisor(parent, descriptor)
    connection = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    sys.argv = sys.argv[:1]
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a KeyboardInterrupt is the user's own
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
    for request in _requests(connection):
        _send(connection, answer(request))


def _requests(connection: Connection) -> Iterator[bytes]:
    with contextlib.suppress(EOFError, OSError):
        while True:
            yield connection.recv_bytes()


def _send(connection: Connection, reply: Any) -> None:
    """Send JSON: the trainer must not unpickle what user code could have made."""
    data = json.dumps(reply).encode()
    with contextlib.suppress(OSError):  # it has ended, and this process does next
        connection.send_bytes(data)
