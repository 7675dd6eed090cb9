"""Worker processes for reward functions: one that hangs or crashes does not harm the trainer.

A unit of work is one sample and one function; units are begun in the order in which they come. Each
worker process has a thread in the trainer that sends it one unit at a time and waits for the
answer. A worker that takes too long or dies is killed with all that it has started, and replaced;
only its current unit is lost. Workers are started with exec, not forked: the trainer has threads of
CUDA and of the process group. Between each worker and the trainer is a supervisor process
(`fork_with_supervisor`). `main`, at the end, is what a worker runs.
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

from bubblespec.errors import InputError, log, one_line
from bubblespec.rewards.functions import (
    Reward,
    RewardFailure,
    Sample,
    failure_of,
    load_reward,
    score,
)

# The adaptive time-out's factor on the slowest correct answer, and its bounds (RollPacker, arXiv
# 2509.21009).
ADAPTIVE_FACTOR, MIN_ADAPTIVE_S, MAX_ADAPTIVE_S = 1.5, 2.0, 30.0
START_LIMIT_S = 300.0  # to start Python and import the functions
MAX_ANSWER = 1 << 20  # bytes; real ones are far shorter
MAX_SHOWN = 1 << 16  # bytes printed by the functions that are shown for each batch
MAX_MESSAGE = 2000  # characters of a failure's message that are sent
MAX_TRACE = 10_000
# A tenth of a core on which a rank decodes, all of an idle one. At 19 a reward may time out.
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


class Answer(NamedTuple):
    """What became of one unit."""

    reward: Reward
    seconds: float
    """Time inside the function."""
    ended_s: float
    """When it returned or was given up, by time.monotonic, which all processes of a machine
    share."""


class Kind(NamedTuple):
    """Calls that share an adaptive time-out."""

    function: int
    """Its index."""
    task: str
    """The data's column `task`."""


class RewardWorkers:
    """`num_workers` processes that call the functions at `paths`. To be used by one thread."""

    def __init__(
        self, paths: list[str], num_workers: int, timeout_s: float, is_adaptive: bool = False
    ):
        """timeout_s, is_adaptive: see `RewardConfig`."""
        self.paths, self.timeout_s, self.is_adaptive = paths, timeout_s, is_adaptive
        self._slowest: dict[Kind, float] = {}  # seconds of an answer with a reward above 0
        self._units: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()  # of all below
        self._workers: set[_Worker] = set()
        self._is_closed = False
        self._num_printed = 0  # bytes, in this batch
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
        future = Future()
        self._units.put((future, Kind(function, str(sample.columns.get("task"))), work))
        return future

    def limit_s(self, kind: Kind, is_first: bool) -> float:
        """Seconds for the next call of a kind; is_first: it is the worker's first, which may have
        things to import."""
        if not self.is_adaptive:
            return self.timeout_s
        slowest_s = None if is_first else self._slowest.get(kind)
        return min(self.timeout_s, adaptive_timeout(slowest_s))

    def end_batch(self) -> None:
        """Report what was not shown of the functions' output."""
        with self._lock:
            num_omitted, self._num_printed = self._num_printed - MAX_SHOWN, 0
        if num_omitted > 0:
            log(
                f"\nwarning: {num_omitted} bytes that reward functions printed are left out; "
                f"{MAX_SHOWN} of each batch are shown"
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
                answer = worker.ask(work, self.limit_s(kind, is_first))
            except (InputError, OSError) as error:  # none can be started
                future.set_exception(error)
                continue
            worker.called.add(kind)
            if not is_first and isinstance(answer.reward, float) and answer.reward > 0:
                with self._lock:
                    self._slowest[kind] = max(self._slowest.get(kind, 0.0), answer.seconds)
            if worker.is_spent:
                self._end(worker)
                worker = None
            future.set_result(answer)
        if worker is not None:
            self._end(worker)

    def _start(self) -> "_Worker":
        """A worker that is ready, or one with a `problem`."""
        with self._lock:
            worker = _Worker(self.paths, self._show)
            self._workers.add(worker)
            if self._is_closed:
                worker.kill()
        worker.wait_until_ready()
        return worker

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
    above 0; None: there is none yet."""
    if slowest_correct_s is None:
        return MAX_ADAPTIVE_S
    return min(max(ADAPTIVE_FACTOR * slowest_correct_s, MIN_ADAPTIVE_S), MAX_ADAPTIVE_S)


class _Worker:
    """A worker process, as seen from the trainer. Every wait for it has a time limit.

    `process` is its supervisor, which ends as the worker does.
    """

    def __init__(self, paths: list[str], show):
        self.is_spent = False  # must be replaced
        self.called: set[Kind] = set()
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
                stdin=subprocess.PIPE,  # its end tells the supervisor to end them all
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
            self.problem = self._receive(START_LIMIT_S)
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
            value, failure, *times = self._receive(limit_s)
            return Answer(RewardFailure(*failure) if failure else value, *times)
        except TimeoutError:
            failure = RewardFailure("timeout", f"no answer within {limit_s:.6g} s")
        except (OSError, EOFError, ValueError, TypeError):
            failure = RewardFailure("crash", f"its process {self._how_it_ended()}")
        self.is_spent = True
        ended_s = time.monotonic()
        return Answer(failure, ended_s - begin_s, ended_s)

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
        self._forward_output()
        for file in (self._connection, self.process.stdin, self.process.stdout):
            file.close()

    def _receive(self, limit_s: float):
        """The next answer. Raises TimeoutError, EOFError or OSError if the worker has ended,
        ValueError if it is no answer."""
        deadline = time.monotonic() + limit_s
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
    for file in (sys.stdout, sys.stderr):
        file.reconfigure(line_buffering=True)  # it may be killed
    try:
        functions, problem = [load_reward(path) for path in paths], None
    except InputError as error:
        problem = str(error)
    _send(connection, problem)
    own_pid = os.getpid()
    while problem is None:
        try:
            number, sample = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        began_s, failure = time.monotonic(), None
        try:
            (value,) = score(functions[number], [sample])
        except BaseException as error:  # of a kind that is no Exception
            value = failure_of(error)
        ended_s = time.monotonic()
        if os.getpid() != own_pid:
            os._exit(0)  # a child that the function has forked, and which returned as well
        with contextlib.suppress(Exception):  # the function may have closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        if isinstance(value, RewardFailure):
            failure = (value.kind, value.message[:MAX_MESSAGE], value.trace[-MAX_TRACE:])
            value = None
        _send(connection, (value, failure, ended_s - began_s, ended_s))


def _send(connection: Connection, reply) -> None:
    """As JSON: the trainer must not unpickle what a reward function could have made."""
    connection.send_bytes(json.dumps(reply).encode())
