"""A reward worker's process: it computes one sample with one function at a time, for the trainer
(workers.py).

It imports the modules of the reward functions and nothing else of weight. A function may keep
processes from one call to the next, such as a pool: as many as ran after its first call. If a later
call leaves more, the trainer ends the worker with all its processes and replaces it.
"""

import contextlib
import json
import os
import pickle
import sys
import time
from multiprocessing.connection import Connection

from bubblespec.dist.processes import descendants_of
from bubblespec.errors import InputError
from bubblespec.rewards.functions import RewardFailure, failure_of, load_reward, score

# A tenth of a core on which a rank decodes, all of an idle one. At 19 a reward may time out.
NICENESS = 10
EXIT_GRACE_S = 0.1  # for processes that a call has started to end
MAX_MESSAGE = 2000  # characters of a failure's message that are sent
MAX_TRACE = 10_000


def main() -> None:
    """Answer the trainer's requests until the connection closes. Arguments: see `workers._BOOT`."""
    connection, paths = Connection(int(sys.argv[2])), sys.argv[4:]
    os.set_inheritable(connection.fileno(), False)
    sys.argv = sys.argv[:1]
    _give_way()
    for file in (sys.stdout, sys.stderr):
        file.reconfigure(line_buffering=True)  # it may be killed
    try:
        functions = [load_reward(path) for path in paths]
    except InputError as error:
        _send(connection, str(error))
        return
    _send(connection, None)
    own_pid, num_allowed, called = os.getpid(), 0, set()
    while True:
        try:
            number, sample = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        began_s = time.monotonic()
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
        num_leftovers = _num_leftovers(num_allowed)
        if number not in called:
            num_allowed = max(num_allowed, num_leftovers)
        called.add(number)
        failure = None
        if isinstance(value, RewardFailure):
            failure = (value.kind, value.message[:MAX_MESSAGE], value.trace[-MAX_TRACE:])
            value = None
        _send(connection, (value, failure, ended_s - began_s, ended_s, num_leftovers > num_allowed))


def _send(connection: Connection, reply) -> None:
    """As JSON: the trainer must not unpickle what a reward function could have made."""
    connection.send_bytes(json.dumps(reply).encode())


def _num_leftovers(num_allowed: int) -> int:
    """Processes that run under the keeper apart from this one. If they are more than allowed, those
    about to end get EXIT_GRACE_S seconds for it."""
    deadline = time.monotonic() + EXIT_GRACE_S
    while True:
        running, _ = descendants_of(os.getppid())
        count = len(running) - (os.getpid() in running)
        if count <= num_allowed or time.monotonic() > deadline:
            return count
        time.sleep(0.005)


def _give_way() -> None:
    """Let this process and what it starts take few cycles from ranks that decode, and be the first
    to go if memory runs out: the trainer replaces it. Linux only."""
    os.nice(NICENESS)
    # Linux may share the cores among sessions first ("autogroup", sched(7)), and this process has a
    # session of its own. It may be set ten times a second, by all processes of a user together.
    for path, value in (("oom_score_adj", "1000"), ("autogroup", str(NICENESS))):
        for _ in range(100):
            try:
                with open(f"/proc/self/{path}", "w") as file:
                    file.write(value)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # another system
                break
