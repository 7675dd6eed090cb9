"""One worker process, for environments or rewards, and how it is asked: JSON replies within a time
limit and a size; killed with all that it has started.

It is started with exec, not forked: the trainer has threads of CUDA and of the process group.
Between the two is a supervisor process (`fork_with_supervisor`).
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
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
    """A worker that must be replaced. The message says why."""

    def __init__(self, message: str, is_timeout: bool):
        super().__init__(message)
        self.is_timeout = is_timeout
        """It took too long; otherwise its process has ended, or sent what is no reply."""


class WorkerProcess:
    """A worker, as seen from the trainer. Every wait for it has a time limit.

    `process` is its supervisor, which ends as the worker does. What user code prints goes to the
    trainer's standard error.
    """

    def __init__(self, module: str, argument: Any):
        """module: has `make_answer(argument)`, see `serve`; argument: plain data."""
        ours, theirs = socket.socketpair()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # The order of sets of strings depends on this seed: replies must not depend on the worker.
        constants = {"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
        path = json.dumps([p for p in sys.path if isinstance(p, str)])
        arguments = [path, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, *arguments, module, json.dumps(argument)],
                bufsize=0,
                stdin=subprocess.PIPE,  # its end tells the supervisor to end them all
                stdout=2,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **threads, **constants},
                start_new_session=True,  # no SIGINT from the terminal
            )
        self._connection = Connection(ours.detach())

    def problem(self) -> str | None:
        """Wait until it is ready. Why it is not, or None."""
        try:
            return self._receive(START_LIMIT_S)
        except WorkerFailure as failure:
            return str(failure)

    def ask(self, request: bytes, limit_s: float) -> Any:
        """The reply to one request. Raises WorkerFailure, after which it must be ended."""
        with contextlib.suppress(OSError):  # it has ended, as will be found next
            self._connection.send_bytes(request)
        return self._receive(limit_s)

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
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was ended by {signal.Signals(-code).name}"


def serve(descriptor: int, parent: int, module: str, argument: str) -> None:
    """What a worker runs: replies to requests, by the function that the module's `make_answer`
    returns for the argument, until the connection closes."""
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
    """As JSON: the trainer must not unpickle what user code could have made."""
    connection.send_bytes(json.dumps(reply).encode())
