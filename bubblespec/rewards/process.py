"""A reward worker's process: it computes one sample with one function at a time, for the trainer
(workers.py).

It imports the modules of the reward functions and nothing else of weight. A function may keep
processes from one call to the next, such as a pool: as many as ran after its first call. If a later
call leaves more of them, it is answered, and then the trainer ends the worker with all its
processes and replaces it.
"""

import contextlib
import json
import os
import pickle
import socket
import sys
import time

from bubblespec.dist.processes import children_of, descendants_of
from bubblespec.errors import InputError
from bubblespec.rewards.functions import RewardFailure, Sample, call_one, load_reward

# a tenth of a core on which a rank decodes, all of an idle one. At 19 a reward may run into its
# time-out
NICENESS = 10
GIVE_WAY_LIMIT_S = 5.0
EXIT_GRACE_S = 0.1  # for processes to end that a call has started
MOST_ZOMBIES = 64


def main() -> None:
    """Answer the trainer's questions until the connection closes."""
    descriptor, paths = int(sys.argv[2]), sys.argv[4:]
    sys.argv = sys.argv[:1]
    _prefer_as_oom_victim()
    _give_way()
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
    stream, own_pid, number, called, num_allowed = (
        connection.makefile("rb"),
        os.getpid(),
        0,
        set(),
        0,
    )
    while header := stream.read(8):
        work = stream.read(int.from_bytes(header, "little"))
        number += 1
        began_s = time.monotonic()
        function, value = _compute(functions, work)
        ended_s = time.monotonic()
        if os.getpid() != own_pid:
            os._exit(0)  # a child that the function has forked, and which returned as well
        with contextlib.suppress(Exception):  # the function may have closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        has_lingering = _has_lingering(num_allowed)
        if has_lingering and function not in called:
            num_allowed, has_lingering = len(_started_processes()[0]), False
        called.add(function)
        failure = None
        if isinstance(value, RewardFailure):
            value, failure = None, (value.kind, value.message[:2000], value.trace[-10_000:])
        reply = {
            "number": number,
            "value": value,
            "failure": failure,
            "seconds": ended_s - began_s,
            "ended_s": ended_s,
        }
        _reply(connection, reply | {"has_lingering": has_lingering})


def _compute(functions: list, work: bytes) -> tuple[int | None, float | RewardFailure | None]:
    """The number of the function that `work` asks for, and its value."""
    function = None
    try:
        function, sample = pickle.loads(work)
        return function, call_one(functions[function], Sample(*sample))
    except BaseException as error:  # from unpickling, or of a kind that is no Exception
        return function, RewardFailure(
            "exception", f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        )


def _started_processes() -> tuple[list[int], int]:
    """Processes that run under the keeper beside this one, and the number of zombies among its
    descendants."""
    if sys.platform != "linux":
        return [], 0
    keeper = os.getppid()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # no child, and mostly no orphan either
        if children_of(keeper) == [os.getpid()]:
            return [], 0
    running, num_ended = descendants_of(keeper)
    return [pid for pid in running if pid != os.getpid()], num_ended


def _has_lingering(num_allowed: int) -> bool:
    """Whether more than `num_allowed` processes still run. Those that are about to end get
    EXIT_GRACE_S seconds for it."""
    deadline = time.monotonic() + EXIT_GRACE_S
    while True:
        running, num_ended = _started_processes()
        if len(running) <= num_allowed and num_ended <= MOST_ZOMBIES:
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(0.005)


def _reply(connection: socket.socket, reply: dict) -> None:
    connection.sendall(json.dumps(reply).encode() + b"\n")


def _give_way() -> None:
    """Lower the priority of this process and of what it starts, so that they take few cycles from
    ranks that decode."""
    os.nice(NICENESS)
    # Linux may share the cores among sessions first ("autogroup", sched(7)), and this process has a
    # session of its own.
    deadline = time.monotonic() + GIVE_WAY_LIMIT_S
    while time.monotonic() < deadline:
        try:
            with open("/proc/self/autogroup", "w") as file:
                file.write(str(NICENESS))
            return
        except BlockingIOError:  # allowed to users ten times a second, all of them together
            time.sleep(0.05)
        except OSError:  # without autogroups, or another system
            return


def _prefer_as_oom_victim() -> None:
    """If memory runs out, let Linux kill a worker, which is replaced, rather than the trainer."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # another system
        pass
