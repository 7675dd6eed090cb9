"""Reward functions in processes of their own, so that what a function does to its process is not done to the trainer.

A unit of work is one sample and one function. Each worker process has a thread here that feeds it one unit at a time and waits
for the answer; a worker that takes too long or dies is killed with all that it has started, and replaced, and only the unit it
was at is lost. Workers are started with exec, not forked: the trainer has threads of CUDA and of the process group. They import
the modules of the reward functions and nothing else of weight.
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
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from bubblespec.errors import InputError
from bubblespec.processes import die_with_parent, kill_group
from bubblespec.rewards import RewardFailure, Sample, call_one, load_reward

START_LIMIT_S = 300.0  # to start Python and import the functions
START_ATTEMPTS = 3
# RollPacker's bounds of the adaptive time-out and its factor on the slowest correct answer (arXiv 2509.21009).
ADAPTIVE_FACTOR, ADAPTIVE_LEAST_S, ADAPTIVE_MOST_S = 1.5, 2.0, 30.0
LONGEST_ANSWER = 1 << 20  # bytes; ours are far shorter
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from bubblespec.reward_workers import main; main()"


class Answer(NamedTuple):
    """value: the reward, or None where the function does not apply or failed; seconds: inside the function."""

    value: float | None
    failure: RewardFailure | None
    seconds: float


class RewardWorkers:
    """`num_workers` processes that call the functions at `paths`. To be used by one thread."""

    def __init__(self, paths: list[str], num_workers: int, timeout_s: float, is_adaptive: bool = False):
        self.paths, self.timeout_s, self.is_adaptive = paths, timeout_s, is_adaptive
        self._units: queue.SimpleQueue = queue.SimpleQueue()
        self._answers: queue.SimpleQueue = queue.SimpleQueue()
        self._num_pending = 0
        self._slowest: dict[int, float] = {}  # seconds of the slowest correct answer, by function
        self._lock = threading.Lock()  # of the two below
        self._workers: set[_Worker] = set()
        self._is_closed = False
        self._threads = [threading.Thread(target=self._serve, name=f"reward worker {n}", daemon=True) for n in range(num_workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, key: Hashable, function: int, sample: Sample) -> None:
        """Queue one sample for one function, given by its place in `paths`. `key` comes back with the answer."""
        try:
            work = pickle.dumps((function, sample))
        except Exception as error:  # objects with code of their own
            raise InputError(
                f"reward.num_workers: a sample's columns cannot be sent to a worker ({type(error).__name__}: "
                f"{' '.join(str(error).split())}); give 0"
            ) from error
        self._num_pending += 1
        self._units.put((key, function, work))

    def collect(self) -> Iterator[tuple[Hashable, Answer]]:
        """All answers that are still out, as they come in. Every unit has one, in its time-out and the start of a worker."""
        while self._num_pending:
            answer = self._answers.get()
            if isinstance(answer, BaseException):
                self._answers.put(answer)  # for whoever asks again
                raise answer
            self._num_pending -= 1
            yield answer

    def close(self) -> None:
        """End all workers, whatever they are at. Can be called again."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                kill_group(worker.process.pid)  # its thread is waiting for it, and reaps it
        for _ in self._threads:
            self._units.put(None)
        for thread in self._threads:
            thread.join(timeout=30)

    def limit_s(self, function: int, is_first: bool) -> float:
        """Seconds for a function's next call. If it is the first in that worker it may have things to import."""
        if not self.is_adaptive:
            return self.timeout_s
        return min(self.timeout_s, adaptive_timeout(None if is_first else self._slowest.get(function)))

    def _serve(self) -> None:
        """Keep one worker at work until the end."""
        worker = None
        try:
            while True:
                worker = worker or self._start()
                unit = self._units.get() if worker else None
                if unit is None:
                    return
                key, function, work = unit
                answer = worker.ask(work, self.limit_s(function, function not in worker.called))
                if answer.failure is None and answer.value and answer.value > 0 and function in worker.called:
                    with self._lock:
                        self._slowest[function] = max(self._slowest.get(function, 0.0), answer.seconds)
                worker.called.add(function)
                if answer.failure is not None and answer.failure.kind in ("timeout", "crash"):
                    self._stop(worker)
                    worker = None
                self._answers.put((key, answer))
        except BaseException as error:  # it must not be waited for for ever
            self._answers.put(error)
        finally:
            if worker is not None:
                self._stop(worker)

    def _start(self) -> "_Worker | None":
        """A worker that has imported the functions; None if there is to be none any more. Raises InputError."""
        for _ in range(START_ATTEMPTS):
            with self._lock:
                if self._is_closed:
                    return None
                worker = _Worker(self.paths)
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
    """RollPacker's time-out, from the seconds of the slowest answer so far that earned a reward above 0; None: no such answer."""
    if slowest_correct_s is None:
        return ADAPTIVE_MOST_S
    return min(max(ADAPTIVE_FACTOR * slowest_correct_s, ADAPTIVE_LEAST_S), ADAPTIVE_MOST_S)


class _Worker:
    """A worker process, as seen from the trainer. Every wait has an end."""

    def __init__(self, paths: list[str]):
        self.called: set[int] = set()  # functions
        self._buffer = bytearray()
        self._num_asked = 0
        self._socket, theirs = socket.socketpair()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # The order of sets of strings depends on this seed: rewards must not depend on the worker.
        environment = {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
        arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid()), *paths]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # a group of its own, which dies with it; and no SIGINT from the terminal
            )

    def wait_until_ready(self) -> str | None:
        """Waits for the imports. Returns what has gone wrong, if anything has."""
        try:
            return self._receive(time.monotonic() + START_LIMIT_S).get("problem")
        except TimeoutError:
            return f"not ready within {START_LIMIT_S:g} s"
        except (OSError, EOFError, ValueError):
            return self._how_it_ended()

    def ask(self, work: bytes, limit_s: float) -> Answer:
        """Have one unit done, in at most limit_s seconds. After a time-out or crash the worker is of no more use."""
        started = time.monotonic()
        self._num_asked += 1
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(len(work).to_bytes(8, "little") + work)
            reply = self._receive(started + limit_s)
            if reply["number"] != self._num_asked:
                raise ValueError("an answer to something else")
            failure = RewardFailure(*reply["failure"]) if reply["failure"] else None
            return Answer(reply["value"], failure, reply["seconds"])
        except TimeoutError:
            failure = RewardFailure("timeout", f"no answer within {limit_s:.3g} s")
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            failure = RewardFailure("crash", f"its process {self._how_it_ended()}")
        return Answer(None, failure, time.monotonic() - started)

    def end(self) -> None:
        kill_group(self.process.pid)
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may be in its way; it will not answer any more
            self.process.wait(timeout=30)

    def _receive(self, deadline: float) -> dict:
        """The next answer. Raises TimeoutError, EOFError if the worker has ended, ValueError if it is no answer."""
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(min(left, 1.0))
            try:
                chunk = self._socket.recv(1 << 16)
            except TimeoutError:
                if self._has_ended():  # and a process that it has left behind holds the socket open
                    raise EOFError from None
                continue
            if not chunk:
                raise EOFError
            self._buffer += chunk
            if len(self._buffer) > LONGEST_ANSWER:
                raise ValueError("an answer without end")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _has_ended(self) -> bool:
        """Without waiting for it in the system's sense: see `kill_group`."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _how_it_ended(self) -> str:
        deadline = time.monotonic() + 5
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._has_ended():
            return "closed its connection"
        found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found.si_code == os.CLD_EXITED:
            return f"ended with exit code {found.si_status}"
        return f"was ended by {signal.Signals(found.si_status).name}"


# In the worker process


def main() -> None:
    """Answer the parent's questions until the connection closes. Arguments: sys.path, socket, parent, paths of functions."""
    descriptor, parent, paths = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    sys.argv = sys.argv[:1]
    die_with_parent()
    if os.getppid() != parent:  # it had died before we asked
        return
    _be_first_to_go()
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    try:
        functions = [load_reward(path) for path in paths]
    except InputError as error:
        _reply(connection, {"problem": str(error)})
        return
    _reply(connection, {})
    stream, me, number = connection.makefile("rb"), os.getpid(), 0
    while header := stream.read(8):
        work = stream.read(int.from_bytes(header, "little"))
        number += 1
        started = time.perf_counter()
        value = _work(functions, work)
        seconds = time.perf_counter() - started
        if os.getpid() != me:
            os._exit(0)  # a child that the function has forked and let return
        failure = None
        if isinstance(value, RewardFailure):
            value, failure = None, (value.kind, value.message[:2000], value.trace[-10_000:])
        _reply(connection, {"number": number, "value": value, "failure": failure, "seconds": seconds})


def _work(functions: list, work: bytes) -> float | RewardFailure | None:
    try:
        function, sample = pickle.loads(work)
        return call_one(functions[function], Sample(*sample))
    except BaseException as error:  # from unpickling, or of a kind that is no Exception
        return RewardFailure("exception", f"raised {type(error).__name__}: {' '.join(str(error).split())}")


def _reply(connection: socket.socket, reply: dict) -> None:
    connection.sendall(json.dumps(reply).encode() + b"\n")


def _be_first_to_go() -> None:
    """If memory runs out, Linux is to end a worker, which is replaced, and not the trainer."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # another system
        pass
