"""Reward functions that hang, crash, raise and lie, in worker processes: each costs its sample
alone, and no process is left. Time-outs are so long that a busy machine does not reach them."""

import math
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import Future
from multiprocessing.connection import Connection

import pytest

from bubblespec.distributed import worker as worker_process
from bubblespec.distributed.worker import NICENESS
from bubblespec.errors import InputError
from bubblespec.rewards.functions import Answer, RewardFailure, RewardWorkers, Sample
from tests.helpers.checks import PATIENCE_S, is_alive, pids_in, wait_until
from tests.helpers.clocks import ClockThatSkips

OBEY = "tests.helpers.misbehaving_rewards.obey"


@pytest.fixture
def make_workers():
    """make_workers(paths, num_workers, timeout_s) -> RewardWorkers, closed at the end."""
    made = []

    def make(paths=(OBEY,), num_workers=1, timeout_s=PATIENCE_S, **options) -> RewardWorkers:
        made.append(RewardWorkers(list(paths), num_workers, timeout_s, **options))
        return made[-1]

    yield make
    for workers in made:
        workers.close()


def sample(text: str, **columns) -> Sample:
    return Sample("p", text, [1], columns)


def answer_of(future: Future) -> Answer:
    (answer,) = future.result(PATIENCE_S)
    return answer


def ask(workers: RewardWorkers, texts: list[str]) -> list[Answer]:
    futures = [workers.submit(0, [sample(text)]) for text in texts]
    return [answer_of(future) for future in futures]


def outcomes(workers: RewardWorkers, texts: list[str]) -> list:
    rewards = [answer.reward for answer in ask(workers, texts)]
    return [r.kind if isinstance(r, RewardFailure) else r for r in rewards]


# what a function is told | kind of the failure, and a part of its message
FAILURES = {
    "raise first\nsecond": ("exception", "first second"),
    "exit 0": ("exception", "raised SystemExit at "),
    "interrupt": ("exception", "raised KeyboardInterrupt at "),
    "allocate": ("exception", "raised MemoryError at "),
    "wrong nan": ("value", "value nan is neither"),
    "wrong two": ("result", "not a list of 1 values"),
    "die exit code": ("crash", "ended with exit code 3"),
    "die closed": ("crash", "its process "),
    "die segfault": ("crash", "was ended by SIGSEGV"),
    "die killed": ("crash", "was ended by SIGKILL"),
}


def test_failure_costs_one_sample_and_is_described(make_workers, tmp_path):
    """With one worker, so that what comes after a crash needs its replacement. An orphan that holds
    the connection does not hide a crash, and ends with its worker."""
    path = tmp_path / "orphan"
    failures = FAILURES | {f"die orphan {path}": ("crash", "ended with exit code 4")}
    texts = [text for bad in failures for text in (bad, "value 0.1", "none")]
    rewards = [answer.reward for answer in ask(make_workers(), texts)]
    assert rewards[1::3] == [0.1] * len(failures) and rewards[2::3] == [None] * len(failures)
    for failure, (kind, part) in zip(rewards[::3], failures.values(), strict=True):
        assert failure.kind == kind and part in failure.message
        assert ("in act" in failure.trace) == (kind == "exception")
    assert len(pids_in(path)) == 1 and not is_alive(*pids_in(path))


@pytest.fixture
def clock(monkeypatch) -> ClockThatSkips:
    clock = ClockThatSkips()
    monkeypatch.setattr(worker_process, "time", clock)
    monkeypatch.setattr(worker_process, "MAX_LOOKS", math.inf)  # what it skips counts
    return clock


def test_hanging_worker_is_killed_with_all_children(make_workers, clock, tmp_path):
    """Workers ignore SIGTERM, are stuck in C, or have children; other samples are scored."""
    notes = {how: tmp_path / how for how in ("sleeping", "in-C", "children")}
    workers = make_workers(num_workers=3, timeout_s=900.0)
    hanging = [workers.submit(0, [sample(f"hang {how} {path}")]) for how, path in notes.items()]
    others = [workers.submit(0, [sample(f"value {number}")]) for number in range(3)]
    wait_until(lambda: [len(pids_in(path)) for path in notes.values()] == [1, 1, 4])
    clock.skipped += workers.timeout_s
    timeout = RewardFailure("timeout", "no answer within 900 s")
    assert [answer_of(future).reward for future in hanging] == [timeout] * 3
    assert [answer_of(future).reward for future in others] == [0.0, 1.0, 2.0]
    assert not any(is_alive(pid) for path in notes.values() for pid in pids_in(path))


@pytest.mark.parametrize("timeout_s", [2.0, 900.0])
def test_pause_of_all_processes_is_no_timeout(
    make_workers, clock, monkeypatch, tmp_path, timeout_s
):
    """The clock jumps by many time-outs during one look of the waiting thread."""
    monkeypatch.setattr(worker_process, "MAX_LOOKS", 2)
    mark, poll, workers = tmp_path / "mark", Connection.poll, make_workers(timeout_s=PATIENCE_S)
    assert outcomes(workers, ["value 1"]) == [1.0], "a worker has started"
    looks = []

    def pause(connection: Connection, seconds: float) -> bool:
        looks.append(seconds)
        if len(looks) == 1:
            clock.skipped += 10 * timeout_s
            return False
        mark.touch()
        return poll(connection, PATIENCE_S)  # the machine may be slow

    monkeypatch.setattr(Connection, "poll", pause)
    workers.timeout_s = timeout_s
    assert outcomes(workers, [f"wait {mark}"]) == [1.0]
    assert sum(looks) <= timeout_s, "looks are shorter than the time-out"


def test_workers_are_light_reproducible_and_of_low_priority(make_workers, monkeypatch):
    """No torch, one thread, the main one (math-verify's limits are signals), sets of strings in the
    order of PYTHONHASHSEED=0, and a low priority."""
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    command = [sys.executable, "-c", "print(hash('a string') >> 16)"]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    wanted = {"torch": 0.0, "threads": 1.0, "main thread": 1.0, "hash": float(done.stdout)}
    wanted |= {"nice": min(os.nice(0) + NICENESS, 19)}
    assert outcomes(make_workers(), [f"report {fact}" for fact in wanted]) == list(wanted.values())


def test_output_of_functions_is_shown(make_workers, capfd):
    assert outcomes(make_workers(), ["say"]) == [1.0]
    assert sorted(capfd.readouterr().err.splitlines()) == ["said", "to error", "to output"]


def test_function_without_import_in_worker_ends_the_run(make_workers):
    workers = make_workers(["no_such_module.f"])
    for _ in range(2):
        with pytest.raises(InputError, match=r"reward.functions: .*no_such_module"):
            ask(workers, ["value 1"])


def test_columns_without_pickle_are_refused(make_workers):
    with pytest.raises(InputError, match=r"reward.num_workers: .*set 0"):
        make_workers().submit(0, [sample("value 1", column=lambda: 0)])


# Nothing is left

WAYS = ("fork", "setsid", "twice", "command")


@pytest.mark.parametrize("end", ["die exit code", "close"])
def test_detached_process_ends_with_the_worker(make_workers, tmp_path, end):
    """Processes that leave their group, session or parent and ignore SIGTERM end with a crash, and
    with `close` of idle and busy workers."""
    path, mark = tmp_path / "pids", tmp_path / "mark"
    workers = make_workers(timeout_s=900.0)
    assert outcomes(workers, [f"leave {'+'.join(WAYS)} {path}"])[0] > 0
    assert len(pids_in(path)) == len(WAYS) and all(is_alive(pid) for pid in pids_in(path))
    if end == "die exit code":
        assert outcomes(workers, [end]) == ["crash"]
    else:
        future = workers.submit(0, [sample(f"hang in-C {mark}")])
        wait_until(lambda: pids_in(mark))
        workers.close()
        assert answer_of(future).reward.kind == "crash"
    assert not any(is_alive(pid) for pid in pids_in(path) + pids_in(mark))
    workers.close()
    workers.close()


SCRIPT = f"""
import os, sys, time
from bubblespec.rewards.functions import RewardWorkers, Sample
workers = RewardWorkers(["{OBEY}"], 3, 3600.0)
for text in ("leave {"+".join(WAYS)} ", "hang in-C ", "hang sleeping "):
    workers.submit(0, [Sample("p", text + sys.argv[1], [1], {{}})])
while not all(worker.supervisor for worker in workers.workers):
    time.sleep(0.01)
print(*[worker.supervisor.pid for worker in workers.workers], flush=True)
sys.stdin.readline()
raise SystemExit(5)
"""


def test_worker_of_a_killed_trainer_ends_in_silence():
    """The connection is reset if the trainer has not read everything."""
    ours, theirs = map(Connection, (end.detach() for end in socket.socketpair()))
    theirs.send_bytes(b"unread")
    ours.close()
    assert list(worker_process._requests(theirs)) == []
    worker_process._send(theirs, "reply")


@pytest.mark.parametrize("is_killed", [True, False])
def test_workers_end_with_the_trainer(tmp_path, is_killed):
    """Killed, or at the end of its interpreter after an error, while workers hang."""
    path = tmp_path / "pids"
    command, pipe = [sys.executable, "-c", SCRIPT, str(path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as trainer:
        supervisors = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(supervisors) == 3
        wait_until(lambda: len(pids_in(path)) == 2 + len(WAYS))
        pids = [*supervisors, *pids_in(path)]
        assert all(is_alive(pid) for pid in pids)
        if is_killed:
            trainer.kill()
        else:
            trainer.stdin.write("\n")
            trainer.stdin.close()
        assert trainer.wait(timeout=PATIENCE_S) == (-signal.SIGKILL if is_killed else 5)
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
