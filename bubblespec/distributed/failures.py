"""Failures of ranks: name the missing rank, print an error once, and end all ranks."""

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from bubblespec.distributed.processes import STOP_SIGNALS
from bubblespec.errors import EndsRun, InputError, RankTimeout, log, one_line, trace_of

GRACE_S = 1.0  # a timed-out rank's wait for others to time out, if no rank is behind
# A broken connection is noticed at once, while others may still be in a forward. torchrun kills all
# 30 s after a rank has died.
BROKEN_S = 20.0
CONNECT_S = 30.0
LOOK_S = 1.0  # interval of checks whether another rank has ended with an error
FOLLOW_S = 3.0  # time for this rank to notice the end by itself, and to print its place
LEAVE_S = 10.0  # time to print and report an error

STORE_HAS_ENDED = "the job's key-value store is gone: its launcher or rank 0 has ended"

_leaving = threading.Lock()


class Watchdog:
    """Every rank's place in the program, in the job's key-value store, where others can read it.

    `count`: collectives and ticks that this rank has entered. All ranks enter the same ones in the
    same order, so a hanging job waits for the rank with the lowest count."""

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size, self.count = rank, world_size, 0
        self._store = dist.PrefixStore("watchdog", _own_store())

    def enter(self, place: str) -> None:
        """Note that this rank enters its next collective or tick. Takes microseconds: no answer."""
        self.count += 1
        self._store.set(f"at/{self.rank}", f"{self.count} {place}")

    def request_stop(self) -> None:
        self._store.set("stop", "1")

    def is_stop_requested(self) -> bool:
        return self._store.check(["stop"])

    def fail(
        self, place: str, reason: str, deadline: float, describe: Callable[[int], str] | None = None
    ) -> NoReturn:
        """End the job: all ranks raise the first failure report as RankTimeout, and one prints it.

        deadline: end of the time-out (time.monotonic); after a broken connection it may be earlier.
        describe: returns what is known of a missing rank, by default its last place."""
        try:
            missing = self._missing_ranks(min(deadline, time.monotonic() + BROKEN_S))
            names = " and ".join(f"rank {rank}" for rank in missing) or "no rank"
            describe = describe or (lambda rank: f"in {self._last(rank)[1]}")
            last = "; ".join(map(describe, missing)) or "none"
            line = self._report(f"{names} missing in {place} ({reason}); last heard: {last}")
        except RuntimeError:
            line = f"{STORE_HAS_ENDED} ({reason})"
        error = RankTimeout(line)
        log_once(error)
        raise error

    def _report(self, line: str) -> str:
        """Make this line the job's failure report, if there is none; return the report."""
        return self._store.compare_set("report", "", line).decode()

    def end_others(self, error: BaseException) -> None:
        """Report that this rank ends with an error; others then end in `follow`."""
        self._report(f"rank {self.rank} failed ({one_line(error)})")
        self._store.set("has_failed", "1")

    def follow(self, is_over: threading.Event) -> None:
        """End this rank once another one has ended with an error, whatever it waits for.

        NCCL does not notice that a rank has left. Runs in a thread until the end of the run."""
        has_failed = False
        try:
            while not has_failed and not is_over.wait(LOOK_S):
                has_failed = self._store.check(["has_failed"])
            line = self._report("") if has_failed else ""
        except RuntimeError:
            line = STORE_HAS_ENDED
        if line and not is_over.wait(FOLLOW_S):
            leave(RankTimeout(line))

    def _missing_ranks(self, deadline: float) -> list[int]:
        """Return the ranks that have not entered this collective, at a time-out.

        After a broken connection, wait for a report, the deadline, or all ranks but one to
        notice it."""
        self._store.set(f"ended/{self.rank}", "1")
        others = [r for r in range(self.world_size) if r != self.rank]
        while True:
            silent = [r for r in others if not self._store.check([f"ended/{r}"])]
            behind = [r for r in silent if self._last(r)[0] < self.count]
            late_s = time.monotonic() - deadline
            is_over = len(silent) <= 1 or late_s > (0 if behind else GRACE_S)
            if is_over or self._store.check(["report"]):
                return behind or silent
            time.sleep(0.02)

    def _last(self, rank: int) -> tuple[int, str]:
        if not self._store.check([f"at/{rank}"]):
            return 0, "the start"
        count, _, place = self._store.get(f"at/{rank}").decode().partition(" ")
        return int(count), place


def leave(error: BaseException) -> NoReturn:
    """Print an error, report it to torchrun and to the other ranks, and end this process at once.

    Nothing is shut down: the process group and the interpreter may wait in NCCL for ranks that will
    not come, and in gloo until its time-out. Reward workers end with this process."""
    code = error.exit_code if isinstance(error, EndsRun) else 1
    if isinstance(error, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    _ignore_signals()
    _leaving.acquire()  # for good, as `Watchdog.follow` may come here too
    try:
        guard = threading.Timer(LEAVE_S, os._exit, (code,))  # the screen or the store may hang
        guard.daemon = True
        guard.start()
        if isinstance(error, EndsRun):
            log_once(error)
        else:
            log(trace_of(error).rstrip())
        write_torchrun_error(error)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        Watchdog(dist.get_rank(), dist.get_world_size()).end_others(error)
    finally:
        os._exit(code)


def report(error: EndsRun) -> int:
    """Print an error outside a process group, and write torchrun's file; return the exit code."""
    if "RANK" in os.environ:
        _ignore_signals()
    log_once(error)
    write_torchrun_error(error)
    return error.exit_code


def write_torchrun_error(error: BaseException) -> None:
    """Write the error to TORCHELASTIC_ERROR_FILE, so that torchrun's summary shows it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        is_line = isinstance(error, EndsRun)
        text = "\n".join(error.lines()) if is_line else trace_of(error)
        # The earliest is shown as the root cause, in whole seconds: not a rank that was left alone.
        second = int(time.time()) + isinstance(error, RankTimeout)
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            details = {"py_callstack": text, "timestamp": str(second)}
            message = str(error) if is_line else one_line(error)
            json.dump({"message": {"message": message, "extraInfo": details}}, file)


def _ignore_signals() -> None:
    """Ignore torchrun's SIGTERM for another rank's end: it would replace text and exit code."""
    for number in STOP_SIGNALS:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(number, signal.SIG_IGN)


def log_once(error: EndsRun) -> None:
    """Print an error on the first rank that has one, as most are on all ranks.

    Return once it is on the screen: the launcher kills all ranks as soon as one ends."""
    if error.is_logged:
        return
    error.is_logged = True
    try:
        store = _store_of_all()
        if store is not None and store.add("num_errors", 1) > 1:
            store.wait(["error_is_logged"], timedelta(seconds=CONNECT_S))
            return
    except (RuntimeError, InputError):  # it may have ended with its rank or launcher
        store = None
    if store is None and os.environ.get("LOCAL_RANK", "0") != "0":
        return
    log("\n".join(error.lines()))
    if store is not None:
        with contextlib.suppress(RuntimeError):
            store.set("error_is_logged", "1")


def _store_of_all() -> dist.Store | None:
    """Return the store of the process group or, before there is one, of the launcher, or None."""
    if dist.is_initialized():
        return _own_store()
    if "RANK" in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _store_of_launcher()[0]
    return None


def _own_store() -> dist.Store:
    """Return the store of the process group, on a connection of its own.

    The main thread may hold the group's: NCCL waits there for a rank's first collective."""
    return _clone_of(dist.distributed_c10d._get_default_store())


@functools.lru_cache(maxsize=1)  # a new connection would wait for a store that has ended
def _clone_of(store: Any) -> dist.Store:  # `clone` is in no type of torch's
    return store.clone()


def _store_of_launcher() -> tuple[dist.Store, int, int]:
    """Return the key-value store, this rank and the number of ranks. Raises what `check_host` does.

    The launcher makes the store before it starts ranks, and may keep it for restarts: each gets
    a namespace of its own, as the addresses of dead ranks are in the store."""
    check_host("MASTER_ADDR", os.environ.get("MASTER_ADDR", "localhost"))
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=CONNECT_S)))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"restart {restart}", store), rank, world_size


def check_host(key: str, host: str) -> None:
    """Raise InputError for a host name without an address, to which torch tries to connect on."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "malformed"
        raise InputError(f"{key}: the host name '{host}' has no address ({reason})") from error


def join_store() -> tuple[dist.Store, int, int]:
    """Return what `_store_of_launcher` does.

    Raises InputError for wrong variables, and RankTimeout, which every rank prints, without a
    store."""
    try:
        return _store_of_launcher()
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{one_line(error)}; torchrun sets these variables") from error
    except RuntimeError as error:
        address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        missing = RankTimeout(
            f"rank {os.environ['RANK']}: no key-value store of all ranks at {address} within "
            f"{CONNECT_S:g} s; start the ranks together, with torchrun"
        )
        log(f"error: {missing}")  # no other rank can be told of it
        missing.is_logged = True
        raise missing from error
