"""Reward functions in processes of their own, so that what a function does to its process is not done to the trainer.

A unit of work is one sample and one function. Each worker process has a thread here that feeds it one unit at a time and waits
for the answer; a worker that takes too long or dies is killed with all that it has started, and replaced, and only the unit it
was at is lost. Workers are started with exec, not forked: the trainer has threads of CUDA and of the process group. They import
the modules of the reward functions and nothing else of weight. Between each and the trainer is a keeper (`fork_with_keeper`).

A worker may keep processes from one call to the next, such as a pool: as many as ran after the first call of a function. Where a
call leaves more, the worker has answered, but is ended with all of them and replaced.
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

from bubblespec.errors import InputError, say
from bubblespec.ranks.processes import children_of, descendants_of
from bubblespec.rewards.functions import RewardFailure, Sample, call_one, load_reward

START_LIMIT_S = 300.0  # to start Python and import the functions
START_ATTEMPTS = 3
# RollPacker's bounds of the adaptive time-out and its factor on the slowest correct answer (arXiv 2509.21009).
ADAPTIVE_FACTOR, ADAPTIVE_LEAST_S, ADAPTIVE_MOST_S = 1.5, 2.0, 30.0
LONGEST_ANSWER = 1 << 20  # bytes; ours are far shorter
ASK_S = 0.2  # between looks at whether the run is to stop
MOST_SHOWN = 1 << 16  # bytes of a batch that the functions print
LEFT_GRACE_S = 0.1  # for processes to end that a call has left
MOST_ZOMBIES = 64
# Arguments: sys.path, the worker's socket, the trainer's process, paths of functions.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from bubblespec.ranks.processes import fork_with_keeper
fork_with_keeper(int(sys.argv[3]), int(sys.argv[2]))
from bubblespec.rewards.workers import main
main()
"""


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
        self._batch = 0  # answers to earlier ones are dropped
        self._slowest: dict[int, float] = {}  # seconds of the slowest correct answer, by function
        self._lock = threading.Lock()  # of the two below
        self._workers: set[_Worker] = set()
        self._is_closed = False
        self._output_lock = threading.Lock()  # of the two below
        self._room, self._num_left_out = MOST_SHOWN, 0  # bytes of what functions print
        self._has_warned = False
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
        self._units.put((self._batch, key, function, work))

    def collect(self, must_stop: Callable[[], bool] = lambda: False) -> Iterator[tuple[Hashable, Answer]]:
        """All answers that are still out, as they come in. Every unit has one, in its time-out and the start of a worker.

        must_stop: asked every ASK_S seconds; if true the answers that are still out are given up, whatever the workers are at.
        """
        ask_at = time.monotonic() + ASK_S
        while self._num_pending:
            if time.monotonic() >= ask_at:
                if must_stop():
                    self._give_up()
                    break
                ask_at = time.monotonic() + ASK_S
            try:
                answer = self._answers.get(timeout=max(ask_at - time.monotonic(), 0))
            except queue.Empty:
                continue
            if isinstance(answer, BaseException):
                self._answers.put(answer)  # for whoever asks again
                raise answer
            batch, key, value = answer
            if batch == self._batch:
                self._num_pending -= 1
                yield key, value
        self._count_output()

    def close(self) -> None:
        """End all workers, whatever they are at. Can be called again."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                worker.kill()  # its thread is waiting for it, and reaps it
        for _ in self._threads:
            self._units.put(None)
        for thread in self._threads:
            thread.join(timeout=30)
        self._count_output()

    def limit_s(self, function: int, is_first: bool) -> float:
        """Seconds for a function's next call. If it is the first in that worker it may have things to import."""
        if not self.is_adaptive:
            return self.timeout_s
        return min(self.timeout_s, adaptive_timeout(None if is_first else self._slowest.get(function)))

    def show(self, descriptor: int, text: bytes) -> None:
        """What a worker has printed goes to this process's standard output (1) or error (2), up to a limit. It is never waited
        for: what nobody reads there is left out too."""
        with self._output_lock:
            shown, num_sent = text[: self._room], 0
            self._room -= len(shown)
            with contextlib.suppress(OSError):
                while num_sent < len(shown) and select.select([], [descriptor], [], 0)[1]:
                    num_sent += os.write(descriptor, shown[num_sent : num_sent + select.PIPE_BUF])
                if len(shown) < len(text) and not self._num_left_out:
                    os.write(descriptor, b"\n")
            self._num_left_out += len(text) - num_sent

    def _count_output(self) -> None:
        """Say at the end of a batch how much was not shown."""
        with self._output_lock:
            count, self._num_left_out, self._room = self._num_left_out, 0, MOST_SHOWN
        if count:
            say(f"warning: {count} bytes that reward functions printed are left out; {MOST_SHOWN} of each batch are shown")

    def _give_up(self) -> None:
        self._batch += 1
        self._num_pending = 0
        with contextlib.suppress(queue.Empty):
            while True:
                self._units.get_nowait()

    def _serve(self) -> None:
        """Keep one worker at work until the end."""
        worker = None
        try:
            while True:
                worker = worker or self._start()
                unit = self._units.get() if worker else None
                if unit is None:
                    return
                batch, key, function, work = unit
                answer = worker.ask(work, self.limit_s(function, function not in worker.called))
                if answer.failure is None and answer.value and answer.value > 0 and function in worker.called:
                    with self._lock:
                        self._slowest[function] = max(self._slowest.get(function, 0.0), answer.seconds)
                worker.called.add(function)
                if worker.is_spent:
                    self._stop(worker)
                    if worker.has_left_processes and not self._has_warned:
                        self._has_warned = True
                        say(
                            f"warning: reward {self.paths[function]}: a call has left processes behind; they are ended with "
                            "their worker, which is replaced (said once)"
                        )
                    worker = None
                self._answers.put((batch, key, answer))
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
    """RollPacker's time-out, from the seconds of the slowest answer so far that earned a reward above 0; None: no such answer."""
    if slowest_correct_s is None:
        return ADAPTIVE_MOST_S
    return min(max(ADAPTIVE_FACTOR * slowest_correct_s, ADAPTIVE_LEAST_S), ADAPTIVE_MOST_S)


class _Worker:
    """A worker process, as seen from the trainer. Every wait has an end.

    process: its keeper, which ends as the worker does; called: functions; is_spent: it is of no more use.
    """

    def __init__(self, paths: list[str], show: Callable[[int, bytes], None]):
        self.called: set[int] = set()
        self.is_spent = self.has_left_processes = False
        self._show = show
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
            self.is_spent = self.has_left_processes = bool(reply["has_left_processes"])
            failure = RewardFailure(*reply["failure"]) if reply["failure"] else None
            return Answer(reply["value"], failure, reply["seconds"])
        except TimeoutError:
            failure = RewardFailure("timeout", f"no answer within {limit_s:.6g} s")
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            failure = RewardFailure("crash", f"its process {self._how_it_ended()}")
        self.is_spent = True
        return Answer(None, failure, time.monotonic() - started)

    def kill(self) -> None:
        """Have its keeper end it, with all that it has started."""
        with contextlib.suppress(OSError, ValueError):  # it has ended, or has been waited for
            self.process.stdin.write(b"\n")

    def end(self) -> None:
        """Kill it and wait until nothing is left."""
        self.kill()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:  # the kernel may be in its way; it will not answer any more
            self.process.kill()
        for descriptor in self._outputs:
            self._show_output(descriptor)
        for file in (self._socket, self.process.stdin, self.process.stdout, self.process.stderr):
            file.close()

    def _receive(self, deadline: float) -> dict:
        """The next answer. Raises TimeoutError, EOFError if the worker has ended, ValueError if it is no answer."""
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            ready = [descriptor for descriptor, _ in self._poll.poll(1000 * min(left, 1.0))]
            for descriptor in self._outputs.keys() & ready:  # what was printed before an answer is in the pipe when that comes
                self._show_output(descriptor)
            if self._socket.fileno() not in ready:
                if not ready and self._has_ended():  # and a process that it has left behind holds the socket open
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
        """What is in the pipe by now, which holds no more than is read here at once."""
        with contextlib.suppress(BlockingIOError, KeyError):
            text = os.read(descriptor, 1 << 16)
            self._show(self._outputs[descriptor], text)
            if not text:  # closed
                self._poll.unregister(descriptor)

    def _has_ended(self) -> bool:
        """Without waiting for it in the system's sense, which `end` does."""
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
    """Answer the trainer's questions until the connection closes."""
    descriptor, paths = int(sys.argv[2]), sys.argv[4:]
    sys.argv = sys.argv[:1]
    _be_first_to_go()
    for file in (sys.stdout, sys.stderr):
        file.reconfigure(line_buffering=True)  # it may be killed
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    try:
        functions = [load_reward(path) for path in paths]
    except InputError as error:
        _reply(connection, {"problem": str(error)})
        return
    _reply(connection, {})
    stream, me, number, called, num_kept = connection.makefile("rb"), os.getpid(), 0, set(), 0
    while header := stream.read(8):
        work = stream.read(int.from_bytes(header, "little"))
        number += 1
        started = time.perf_counter()
        function, value = _work(functions, work)
        seconds = time.perf_counter() - started
        if os.getpid() != me:
            os._exit(0)  # a child that the function has forked and let return
        with contextlib.suppress(Exception):  # whatever it has made of them
            sys.stdout.flush()
            sys.stderr.flush()
        has_left = _has_left(num_kept)
        if has_left and function not in called:
            num_kept, has_left = len(_own_processes()[0]), False
        called.add(function)
        failure = None
        if isinstance(value, RewardFailure):
            value, failure = None, (value.kind, value.message[:2000], value.trace[-10_000:])
        reply = {"number": number, "value": value, "failure": failure, "seconds": seconds}
        _reply(connection, reply | {"has_left_processes": has_left})


def _work(functions: list, work: bytes) -> tuple[int | None, float | RewardFailure | None]:
    """Which function it was for, and its value."""
    function = None
    try:
        function, sample = pickle.loads(work)
        return function, call_one(functions[function], Sample(*sample))
    except BaseException as error:  # from unpickling, or of a kind that is no Exception
        return function, RewardFailure("exception", f"raised {type(error).__name__}: {' '.join(str(error).split())}")


def _own_processes() -> tuple[list[int], int]:
    """All that run under the keeper beside this process, and how many more have ended and were not waited for."""
    if sys.platform != "linux":
        return [], 0
    keeper = os.getppid()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # no child of ours at all, and mostly no orphan either
        if children_of(keeper) == [os.getpid()]:
            return [], 0
    running, num_ended = descendants_of(keeper)
    return [pid for pid in running if pid != os.getpid()], num_ended


def _has_left(num_kept: int) -> bool:
    """Whether more processes are left than may be kept. Those that are about to end get a moment for it."""
    deadline = time.monotonic() + LEFT_GRACE_S
    while True:
        running, num_ended = _own_processes()
        if len(running) <= num_kept and num_ended <= MOST_ZOMBIES:
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(0.005)


def _reply(connection: socket.socket, reply: dict) -> None:
    connection.sendall(json.dumps(reply).encode() + b"\n")


def _be_first_to_go() -> None:
    """If memory runs out, Linux is to end a worker, which is replaced, and not the trainer."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # another system
        pass
