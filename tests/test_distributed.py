"""Ranks as gloo processes that only meet: signals make all stop at the same place, and a rank that
is missing is named."""

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bubblespec.distributed import failures
from bubblespec.distributed import ranks as distributed
from bubblespec.distributed.processes import end_early
from bubblespec.distributed.ranks import Ranks, StopRequested, ranks_from_environment, signals_stop
from bubblespec.errors import InputError, RankTimeout
from bubblespec.rollout.board import ProgressSync, RankState
from tests.helpers import warm
from tests.helpers.checks import is_alive, pids_in, wait_until
from tests.helpers.clocks import Clock, ClockThatSkips
from tests.helpers.ranks import run_ranks
from tests.helpers.warm import launch

HANG_S = 120.0  # a time-out that no test waits for


@pytest.fixture
def usual_signals():
    """As a shell starts a command in the foreground: in the background it has it ignore Ctrl-C, and
    nohup a hang-up."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_only_request_stop(usual_signals, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(distributed, "time", clock)
    ranks = Ranks(torch.device("cpu"))
    before = signal.getsignal(signal.SIGTERM)
    with signals_stop(ranks):
        assert not ranks.must_stop
        ranks.barrier_or_stop()
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGHUP):
            signal.raise_signal(number)
        assert ranks.must_stop
        with pytest.raises(StopRequested):
            ranks.barrier_or_stop()
        ranks.barrier()  # a save's collectives go on
        clock.sleep(0.9)
        signal.raise_signal(signal.SIGINT)
        clock.sleep(0.2)  # from here on it is not the same Ctrl-C any more
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    "activity, when", [("training of step 3", "after this update"), ("rollout of step 3", "now")]
)
def test_stop_is_answered_while_main_thread_is_in_c(usual_signals, capfd, activity, when):
    """A read in C in place of a long forward: no handler of Python runs before its end."""
    ranks, (reader, writer) = Ranks(torch.device("cpu")), os.pipe()
    ranks.activity, said, requested, is_blocked = activity, [], [], threading.Event()

    def stop():
        is_blocked.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            wait_until(lambda: said.append(capfd.readouterr().err) or "\n" in "".join(said))
            requested.append(ranks.must_stop)
        finally:
            os.write(writer, b"x")

    with signals_stop(ranks):
        thread = threading.Thread(target=stop)
        thread.start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # another thread gets it
        is_blocked.set()
        try:
            ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        thread.join()
        assert ranks.must_stop and requested == [False]
        signal.raise_signal(signal.SIGHUP)  # nothing new
    line = f"SIGTERM: stopping {when}, then saving; a second Ctrl-C ends the run unsaved\n"
    assert "".join([*said, capfd.readouterr().err]) == line
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signal_of_a_scheduler_requests_stop(number):
    ranks = Ranks(torch.device("cpu"))
    with signals_stop(ranks):
        signal.raise_signal(number)
        with pytest.raises(StopRequested):
            ranks.barrier_or_stop()
    assert ranks.exit_code == 128 + number


def as_process_1(path) -> None:
    os.getpid = lambda: 1
    end_early()
    with open("/proc/self/stat") as file:
        path.write_text(file.read().split()[0])
    signal.pause()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signal_ends_process_1_with_its_code(tmp_path, number):
    """From Linux it gets those alone that have a handler."""
    path = tmp_path / "child"
    init = warm.start(as_process_1, path)
    wait_until(lambda: pids_in(path))
    assert pids_in(path) != [init.pid]
    os.kill(init.pid, number)
    init.join(warm.TIMEOUT_S)
    assert init.exitcode == 128 + number and not any(map(is_alive, pids_in(path)))


ADDRESS = SimpleNamespace(family=socket.AF_INET)
INTERFACES = {"lo": [ADDRESS], "eth0": [ADDRESS], "eth1": [SimpleNamespace(family=17)]}


@pytest.mark.parametrize(
    "backend, right, wrong",
    [
        ("gloo", ["lo", "eth0,lo", ""], ["eth", "eth1", "lo,eth1", "ib0"]),
        ("nccl", ["eth", "ib,eth0", "=eth0", "^ib", "^eth", ""], ["ib", "eth1", "=eth", "=ib0"]),
    ],
)
def test_interface_without_address_is_refused(monkeypatch, backend, right, wrong):
    monkeypatch.setattr("psutil.net_if_addrs", lambda: INTERFACES)
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    for value in right:
        monkeypatch.setenv(variable, value)
        distributed.check_interface(backend)
    for value in wrong:
        monkeypatch.setenv(variable, value)
        with pytest.raises(InputError, match=f"^{variable}: .* {value} .*; here: lo, eth0$"):
            distributed.check_interface(backend)


def test_ignored_signals_stay_ignored(usual_signals):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ranks = Ranks(torch.device("cpu"))
    with signals_stop(ranks):
        signal.raise_signal(signal.SIGHUP)
        assert not ranks.must_stop


def fork(path) -> int:
    """Start a child that waits for ever, and note its number."""
    child = os.fork()
    while child == 0:
        signal.pause()
    path.write_text(str(child))
    return child


def test_forked_child_ends_by_sigterm(tmp_path):
    """`Pool.terminate` waits for that."""
    with signals_stop(Ranks(torch.device("cpu"))):
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        child = fork(tmp_path / "child")
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    os.kill(child, signal.SIGTERM)
    wait_until(lambda: not is_alive(child))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def fork_and_wait(path) -> None:
    with signals_stop(Ranks(torch.device("cpu"))):
        fork(path)
        signal.pause()


def test_forked_child_ends_with_killed_rank(tmp_path):
    path = tmp_path / "child"
    rank = warm.start(fork_and_wait, path)
    wait_until(lambda: pids_in(path))
    rank.kill()
    wait_until(lambda: not any(map(is_alive, pids_in(path))))


COLLECTIVES = {
    "sum": lambda ranks: ranks.all_reduce_(torch.ones(1000)),
    "gather_ragged": lambda ranks: ranks.gather_ragged(np.arange(ranks.rank)),
}


def meets_without(ranks: Ranks, collective: str, fate: str, missing: int) -> str:
    """After some rounds `missing` hangs or dies in the middle of a step; what the others raise."""
    ranks.timeout_s, store = HANG_S, dist.distributed_c10d._get_default_store()
    clock = failures.time = distributed.time = ClockThatSkips()
    for round_ in range(5):
        ranks.activity = f"round {round_}"
        COLLECTIVES[collective](ranks)
    ranks.activity = "training of step 7"
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=HANG_S))  # as in a run
    survivors = [rank for rank in range(ranks.world_size) if rank != missing]
    if ranks.rank == missing:
        store.set("hangs", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP if fate == "hangs" else signal.SIGKILL)
    if fate == "dies" and ranks.rank == (missing + 1) % ranks.world_size:
        # In a forward while the third rank sees the connection break.
        with contextlib.suppress(dist.DistStoreError):
            store.wait([f"watchdog/ended/{(missing + 2) % 3}"], timedelta(seconds=1))

    def nap(seconds: float) -> None:
        """In the collective, or while others may still see it break. The time-out comes once all
        have come who will."""
        time.sleep(seconds)
        counts = [ranks.watchdog._last(rank)[0] for rank in survivors]
        has_begun = store.check(["hangs" if fate == "hangs" else f"watchdog/ended/{ranks.rank}"])
        if has_begun and min(counts) == max(counts) > ranks.watchdog._last(missing)[0]:
            clock.skipped = (HANG_S if fate == "hangs" else failures.BROKEN_S) + 1

    clock.sleep = nap
    try:
        COLLECTIVES[collective](ranks)
    except RankTimeout as error:
        if fate == "hangs":
            store.set(f"said/{ranks.rank}", "")
            store.wait([f"said/{rank}" for rank in survivors])
            with contextlib.suppress(ProcessLookupError):  # frees the threads in the collective
                os.kill(int(store.get("hangs")), signal.SIGKILL)
        return str(error)
    raise AssertionError("no time-out")


@pytest.mark.parametrize(
    "collective, fate, missing", [("gather_ragged", "hangs", 1), ("sum", "dies", 0)]
)
def test_rank_missing_from_collective_is_named(tmp_path, capfd, collective, fate, missing):
    results = run_ranks(tmp_path, meets_without, 3, collective, fate, missing, missing=missing)
    line, *others = [result for result in results if result]
    assert others == [line]
    assert line.startswith(f"rank {missing} missing in training of step 7 (")
    assert line.endswith("last heard: in round 4")
    assert capfd.readouterr().err.count(f"error: {line}\n") == 1 and "\n" not in line
    # A broken connection is not waited for.
    assert (f"no answer for {HANG_S:g} s" in line) == (fate == "hangs")


SLOW_TO_SAY = """
import sys, time
from bubblespec.distributed import failures
from bubblespec.errors import InputError

log = failures.log

def log_late(line):
    time.sleep(1)
    log(line)

failures.log = log_late
if "grouped" in sys.argv:
    failures.dist.init_process_group("gloo")
failures.log_once(InputError("wrong"))
sys.exit(2)
"""


@pytest.mark.parametrize("arguments", [[], ["grouped"]])
def test_error_is_printed_before_any_rank_ends(tmp_path, arguments):
    """Whichever rank prints it: the launcher kills all as soon as one has ended."""
    script = tmp_path / "slow_to_say.py"
    script.write_text(SLOW_TO_SAY)
    done = launch(3, [str(script), *arguments])
    assert done.returncode == 2 and done.stderr.count("error: wrong\n") == 1, done.stderr


def test_collective_is_awaited_until_time_out(monkeypatch, capsys):
    clock, store = Clock(), dist.HashStore()
    monkeypatch.setattr(distributed, "time", clock)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    ranks = Ranks(torch.device("cpu"), timeout_s=7.0)
    ranks.world_size, ranks.watchdog, ranks.activity = 2, distributed.Watchdog(0, 2), "the test"
    never = SimpleNamespace(is_completed=lambda: False)
    with pytest.raises(
        RankTimeout,
        match=r"^rank 1 missing in the test \(no answer for 7 s\); last heard: in the start$",
    ):
        ranks.complete(lambda: never)
    assert 7.0 < clock.now < 7.1 and capsys.readouterr().err.count("error: ") == 1


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_cuda_error_in_collective_is_raised_unchanged(kind):
    """Of this rank, or of a kernel before the collective: no other rank is missing."""
    error, ranks = kind("CUDA error"), Ranks(torch.device("cpu"))
    ranks.world_size = 2
    ranks.watchdog = SimpleNamespace(enter=lambda place: None, fail=lambda *_: pytest.fail("named"))

    def poll():
        raise error

    with pytest.raises(kind) as raised:
        ranks.complete(lambda: SimpleNamespace(is_completed=poll))
    assert raised.value is error


def test_missing_rank_at_start_is_one_error_line(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(distributed, "die_with_parent", lambda: None)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "RANK": "0"}
    address |= {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in address.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(RankTimeout, match=r"^a rank is missing at the start \(.+\)$"),
        ranks_from_environment("cpu", 0.5),
    ):
        pass


def stops_at(ranks: Ranks, stopped: int) -> list:
    """One rank is told to stop in a rollout with ticks, one in a wait; where each rank has got to,
    round after round."""
    seen = []
    board = ProgressSync(ranks, 60, interval_s=0)
    board.begin()
    while not board.is_over:
        while board.poll(lambda: RankState(1, must_stop=ranks.must_stop)) is not None:
            pass
        time.sleep(0.002 * (1 + ranks.rank))
        if ranks.rank == stopped and board.num_ticks == 3:
            ranks.must_stop = True
    seen.append([board.num_ticks, any(state.must_stop for state in board.last_states)])
    try:
        ranks.barrier_or_stop()
    except StopRequested:
        seen.append("stopped")
    ranks.must_stop = False
    ranks.barrier_or_stop()
    with signals_stop(ranks):
        if ranks.rank == stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        ranks.barrier()  # not a place to stop at
        try:
            ranks.barrier_or_stop()
        except StopRequested:
            seen.append("stopped again")
        ranks.barrier()
    return [*seen, *(of_rank.tolist() for of_rank in ranks.gather_ragged(np.arange(ranks.rank)))]


def test_all_ranks_stop_at_same_place(tmp_path):
    results = run_ranks(tmp_path, stops_at, 3, 1)
    assert results[0] == results[1] == results[2]
    (num_ticks, must_stop), *rest = results[0]
    assert must_stop and num_ticks > 3
    assert rest == ["stopped", "stopped again", [], [0], [0, 1]], "and go on together"
