"""Worker processes for reward functions, on the trainer's side: a function that hangs or crashes
does not harm the trainer.

A unit of work is one sample and one function; units are begun in the order in which they come. Each
worker process has a thread here that sends it one unit at a time and waits for the answer. A worker
that takes too long or dies is killed with all that it has started, and replaced; only its current
unit is lost. Workers are started with exec, not forked: the trainer has threads of CUDA and of the
process group. Between each worker (`bubblespec.rewards.process`) and the trainer is a keeper
process (`fork_with_keeper`).
"""

import contextlib
import json
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from bubblespec.errors import InputError, log
from bubblespec.rewards.functions import RewardFailure, Sample

START_LIMIT_S = 300.0  # to start Python and import the functions
START_ATTEMPTS = 3
# RollPacker's bounds of the adaptive time-out and its factor on the slowest correct answer (arXiv
# 2509.21009).
ADAPTIVE_FACTOR, ADAPTIVE_LEAST_S, ADAPTIVE_MOST_S = 1.5, 2.0, 30.0
LONGEST_ANSWER = 1 << 20  # bytes; real ones are far shorter
POLL_STOP_S = 0.2  # how often a waiting trainer checks whether the run is to stop
MOST_SHOWN = 1 << 16  # bytes printed by the functions that are shown for each batch
# Arguments: sys.path, the worker's socket, the trainer's process, paths of functions.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from bubblespec.dist.processes import fork_with_keeper
fork_with_keeper(int(sys.argv[3]), int(sys.argv[2]))
from bubblespec.rewards.process import main
main()
"""


class Answer(NamedTuple):
    """A worker's answer to one unit."""

    value: float | None
    """The reward; None where the function does not apply or has failed."""
    failure: RewardFailure | None
    """Why there is no reward."""
    seconds: float
    """Time inside the function."""
    ended_s: float
    """When it returned or was given up, by time.monotonic, which all processes of a machine
    share."""


class Kind(NamedTuple):
    """Calls that are expected to take alike: those that share a time-out where it is adaptive."""

    function: int
    """Its place among the functions."""
    task: str | None
    """What the sample's column `task` says, as text; None without one."""


class RewardWorkers:
    """`num_workers` processes that call the functions at `paths`. To be used by one thread."""

    def __init__(
        self, paths: list[str], num_workers: int, timeout_s: float, is_adaptive: bool = False
    ):
        self.paths, self.timeout_s, self.is_adaptive = paths, timeout_s, is_adaptive
        self._units: queue.SimpleQueue = queue.SimpleQueue()
        self._answers: queue.SimpleQueue = queue.SimpleQueue()
        self._num_pending = 0
        self._batch = 0  # number of the current batch; answers to earlier ones are dropped
        self._slowest: dict[Kind, float] = {}  # seconds of the slowest correct answer
        self._lock = threading.Lock()  # of the two below
        self._workers: set[_Worker] = set()
        self._is_closed = False
        self._output_lock = threading.Lock()  # of the two below
        self._room, self._num_omitted = MOST_SHOWN, 0  # bytes of what functions print
        self._has_warned = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"reward worker {n}", daemon=True)
            for n in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: Hashable, function: int, sample: Sample) -> None:
        """Queue one sample for one function, given by its place in `paths`. `key` comes back with
        the answer."""
        try:
            work = pickle.dumps((function, sample))
        except Exception as error:  # objects with code of their own
            raise InputError(
                f"reward.num_workers: a sample's columns cannot be sent to a worker ({type(error).__name__}: "
                f"{' '.join(str(error).split())}); give 0"
            ) from error
        self._num_pending += 1
        self._units.put((self._batch, key, Kind(function, _task_of(sample)), work))

    def take(self) -> list[tuple[Hashable, Answer]]:
        """The pending answers that are there by now: each is handed out once, here or in `collect`.
        Never waits, and leaves an error that ends the run to `collect`."""
        taken = []
        for _ in range(self._answers.qsize()):  # only the trainer's thread takes from it
            answer = self._answers.get()
            if isinstance(answer, BaseException):
                self._answers.put(answer)
            elif self._accept(answer):
                taken.append(answer[1:])
        return taken

    def collect(
        self, must_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Hashable, Answer]]:
        """All pending answers, as they come in. Every unit gets one, within its time-out plus the
        start of a worker.

        must_stop: called every POLL_STOP_S seconds; once it is true, pending answers are abandoned.
        """
        poll_at = time.monotonic() + POLL_STOP_S
        while self._num_pending:
            if time.monotonic() >= poll_at:
                if must_stop():
                    self._abandon_pending()
                    break
                poll_at = time.monotonic() + POLL_STOP_S
            try:
                answer = self._answers.get(timeout=max(poll_at - time.monotonic(), 0))
            except queue.Empty:
                continue
            if isinstance(answer, BaseException):
                self._answers.put(answer)  # for whoever asks again
                raise answer
            if self._accept(answer):
                yield answer[1:]
        self._count_output()

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
        self._count_output()

    def limit_s(self, kind: "Kind", is_first: bool) -> float:
        """Seconds for the next call of a kind. If it is the first in that worker it may have things
        to import."""
        if not self.is_adaptive:
            return self.timeout_s
        return min(self.timeout_s, adaptive_timeout(None if is_first else self._slowest.get(kind)))

    def show(self, descriptor: int, text: bytes) -> None:
        """Copy what a worker has printed to this process's standard output (1) or error (2), up to
        a limit. Never blocks: text that nobody reads there is omitted too."""
        with self._output_lock:
            shown, num_sent = text[: self._room], 0
            self._room -= len(shown)
            with contextlib.suppress(OSError):
                while num_sent < len(shown) and select.select([], [descriptor], [], 0)[1]:
                    num_sent += os.write(descriptor, shown[num_sent : num_sent + select.PIPE_BUF])
                if len(shown) < len(text) and not self._num_omitted:
                    os.write(descriptor, b"\n")
            self._num_omitted += len(text) - num_sent

    def _count_output(self) -> None:
        """Report at the end of a batch how much was not shown."""
        with self._output_lock:
            count, self._num_omitted, self._room = self._num_omitted, 0, MOST_SHOWN
        if count:
            log(
                f"warning: {count} bytes that reward functions printed are left out; {MOST_SHOWN} of each batch are shown"
            )

    def _accept(self, answer: tuple) -> bool:
        """Whether an answer is to a unit of the current batch, which is then no longer pending."""
        is_own = answer[0] == self._batch
        self._num_pending -= is_own
        return is_own

    def _abandon_pending(self) -> None:
        self._batch += 1
        self._num_pending = 0
        with contextlib.suppress(queue.Empty):
            while True:
                self._units.get_nowait()

    def _serve(self) -> None:
        """Feed one worker until the end, replacing it when needed. Runs in a thread."""
        worker = None
        try:
            while True:
                worker = worker or self._start()
                unit = self._units.get() if worker else None
                if unit is None:
                    return
                batch, key, kind, work = unit
                answer = worker.ask(work, self.limit_s(kind, kind not in worker.called))
                if (
                    answer.failure is None
                    and answer.value
                    and answer.value > 0
                    and kind in worker.called
                ):
                    with self._lock:
                        self._slowest[kind] = max(self._slowest.get(kind, 0.0), answer.seconds)
                worker.called.add(kind)
                if worker.is_spent:
                    self._stop(worker)
                    if worker.has_lingering and not self._has_warned:
                        self._has_warned = True
                        log(
                            f"warning: reward {self.paths[kind.function]}: a call has left processes behind; they are ended with "
                            "their worker, which is replaced (said once)"
                        )
                    worker = None
                self._answers.put((batch, key, answer))
        except BaseException as error:  # else `collect` would wait forever
            self._answers.put(error)
        finally:
            if worker is not None:
                self._stop(worker)

    def _start(self) -> "_Worker | None":
        """A worker that has imported the functions; None once the pool is closed. Raises
        InputError."""
        for _ in range(START_ATTEMPTS):
            with self._lock:
                if self._is_closed:
                    return None
                worker = _Worker(self.paths, self.show)
                self._workers.add(worker)
            problem = worker.wait_until_ready()
            if problem is None:
                return worker
            self._stop(worker)
        with self._lock:
            if self._is_closed:
                return None
        raise InputError(f"reward.functions: a worker process could not be started: {problem}")

    def _stop(self, worker: "_Worker") -> None:
        with self._lock:
            self._workers.discard(worker)
            worker.end()


def adaptive_timeout(slowest_correct_s: float | None) -> float:
    """RollPacker's time-out, from the seconds of the slowest answer so far that earned a reward
    above 0; None: no such answer."""
    if slowest_correct_s is None:
        return ADAPTIVE_MOST_S
    return min(max(ADAPTIVE_FACTOR * slowest_correct_s, ADAPTIVE_LEAST_S), ADAPTIVE_MOST_S)


def _task_of(sample: Sample) -> str | None:
    task = sample.columns.get("task")
    return None if task is None else str(task)


class _Worker:
    """A worker process, as seen from the trainer. Every wait has a time limit.

    `process` is its keeper, which ends as the worker does.
    """

    def __init__(self, paths: list[str], show: Callable[[int, bytes], None]):
        self.called: set[Kind] = set()
        self.is_spent = False  # must be replaced
        self.has_lingering = False  # the last call has left processes behind
        self._show = show
        self._buffer = bytearray()
        self._num_asked = 0
        self._socket, theirs = socket.socketpair()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # The order of sets of strings depends on this seed: rewards must not depend on the worker.
        environment = {
            **os.environ,
            **threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONHASHSEED": "0",
        }
        arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid()), *paths]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *arguments],
                bufsize=0,
                stdin=subprocess.PIPE,  # its end tells the keeper to end them all
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # no SIGINT from the terminal
            )
        self._outputs = {self.process.stdout.fileno(): 1, self.process.stderr.fileno(): 2}
        self._poll = select.poll()
        for descriptor in (self._socket.fileno(), *self._outputs):
            os.set_blocking(descriptor, False)
            self._poll.register(descriptor, select.POLLIN)

    def wait_until_ready(self) -> str | None:
        """Wait for the imports. Returns an error message, or None."""
        try:
            return self._receive(time.monotonic() + START_LIMIT_S).get("problem")
        except TimeoutError:
            return f"not ready within {START_LIMIT_S:g} s"
        except (OSError, EOFError, ValueError):
            return self._how_it_ended()

    def ask(self, work: bytes, limit_s: float) -> Answer:
        """Compute one unit in at most limit_s seconds. After a time-out or crash the worker must be
        replaced."""
        started = time.monotonic()
        self._num_asked += 1
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(len(work).to_bytes(8, "little") + work)
            reply = self._receive(started + limit_s)
            if reply["number"] != self._num_asked:
                raise ValueError("an answer to something else")
            self.is_spent = self.has_lingering = bool(reply["has_lingering"])
            failure = RewardFailure(*reply["failure"]) if reply["failure"] else None
            return Answer(reply["value"], failure, reply["seconds"], reply["ended_s"])
        except TimeoutError:
            failure = RewardFailure("timeout", f"no answer within {limit_s:.6g} s")
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            failure = RewardFailure("crash", f"its process {self._how_it_ended()}")
        self.is_spent = True
        ended = time.monotonic()
        return Answer(None, failure, ended - started, ended)

    def kill(self) -> None:
        """Ask its keeper to kill it with all that it has started."""
        with contextlib.suppress(OSError, ValueError):  # it has ended, or has been waited for
            self.process.stdin.write(b"\n")

    def end(self) -> None:
        """Kill it and wait until nothing is left."""
        self.kill()
        try:
            self.process.wait(timeout=30)
        except (
            subprocess.TimeoutExpired
        ):  # the kernel may be in its way; it will not answer any more
            self.process.kill()
        for descriptor in self._outputs:
            self._show_output(descriptor)
        for file in (self._socket, self.process.stdin, self.process.stdout, self.process.stderr):
            file.close()

    def _receive(self, deadline: float) -> dict:
        """The next answer. Raises TimeoutError, EOFError if the worker has ended, ValueError if it
        is no answer."""
        while b"\n" not in self._buffer:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError
            ready = [descriptor for descriptor, _ in self._poll.poll(1000 * min(remaining_s, 1.0))]
            for descriptor in (
                self._outputs.keys() & ready
            ):  # what was printed before an answer is in the pipe when that comes
                self._show_output(descriptor)
            if self._socket.fileno() not in ready:
                if (
                    not ready and self._exit_status()
                ):  # a process that it has started keeps the socket open
                    raise EOFError
                continue
            chunk = self._socket.recv(1 << 16)
            if not chunk:
                raise EOFError
            self._buffer += chunk
            if len(self._buffer) > LONGEST_ANSWER:
                raise ValueError("an answer without end")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _show_output(self, descriptor: int) -> None:
        """Pass on what is in the pipe, which holds no more than is read here at once."""
        with contextlib.suppress(BlockingIOError, KeyError):
            text = os.read(descriptor, 1 << 16)
            self._show(self._outputs[descriptor], text)
            if not text:  # closed
                self._poll.unregister(descriptor)

    def _exit_status(self) -> os.waitid_result | None:
        """None while it runs. Does not reap it, which `end` does."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def _how_it_ended(self) -> str:
        deadline = time.monotonic() + 5
        while not (status := self._exit_status()) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not status:
            return "closed its connection"
        if status.si_code == os.CLD_EXITED:
            return f"ended with exit code {status.si_status}"
        return f"was ended by {signal.Signals(status.si_status).name}"
