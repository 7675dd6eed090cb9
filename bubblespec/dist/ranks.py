"""Ranks: start and end of the process group, the collectives that the trainer uses, time-outs and
stop signals.

A rank that hangs or has died is named by the others, within `run.timeout_s`. SIGTERM, SIGINT and
SIGHUP only set a flag, which the ranks exchange at the next `Ranks.barrier_or_stop`. A single
process works too.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from bubblespec.dist.cuda import set_cuda_defaults
from bubblespec.dist.processes import die_with_parent
from bubblespec.errors import EndsRun, InputError, RankTimeout, log

# torch 2.13 renames the collective; 2.11 has the old name only.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

MAX_NAP_S = 1e-3  # between polls: a blocking wait reacts neither to the time-out nor to signals
GRACE_S = 1.0  # that a rank that has timed out waits for others to, if no rank is behind
# A broken connection is noticed at once, while others may still be in a forward. torchrun kills all
# 30 s after a rank has died.
BROKEN_S = 20.0
CONNECT_S = 30.0
SAME_CTRL_C_S = 1.0  # one Ctrl-C may reach a rank twice, from the terminal and from the launcher


class StopRequested(Exception):
    """A rank has been told to stop. All ranks raise this at the same place, between two updates."""


class Watchdog:
    """The place of every rank in the program, noted in the job's key-value store, where others can
    read it if the rank hangs.

    `count`: collectives and ticks that this rank has entered. All ranks enter the same ones in the
    same order, so the others wait for the rank with the lowest count.
    """

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size, self.count = rank, world_size, 0
        self._store = dist.PrefixStore("watchdog", dist.distributed_c10d._get_default_store())

    def enter(self, place: str) -> None:
        """Note that this rank enters its next collective or tick. Takes microseconds, as it awaits
        no answer."""
        self.count += 1
        self._store.set(f"at/{self.rank}", f"{self.count} {place}")

    def request_stop(self) -> None:
        """Note that the run is to stop, for ranks that wait outside a collective."""
        self._store.set("stop", "1")

    def is_stop_requested(self) -> bool:
        """Whether any rank has noted it. Asks the store: a fraction of a millisecond."""
        return self._store.check(["stop"])

    def fail(
        self, place: str, reason: str, deadline: float, describe: Callable[[int], str] | None = None
    ) -> NoReturn:
        """End the job: all ranks raise the first failure report as RankTimeout, and one prints it.

        deadline: the end of the time-out (time.monotonic), which a broken connection does not wait
        for. describe(rank): what is known of a missing rank, by default its last place.
        """
        try:
            missing = self._missing_ranks(min(deadline, time.monotonic() + BROKEN_S))
            names = " and ".join(f"rank {rank}" for rank in missing) or "no rank"
            last = "; ".join((describe or self._last_place)(rank) for rank in missing) or "of none"
            line = f"{names} missing in {place} ({reason}); last heard: {last}"
            line = self._store.compare_set("report", "", line).decode()
        except RuntimeError:
            line = f"the job's key-value store has ended, with its launcher or rank 0 ({reason})"
        error = RankTimeout(line)
        log_once(error)
        raise error

    def _missing_ranks(self, deadline: float) -> list[int]:
        """At a time-out: the ranks that have not entered this collective.

        After a broken connection others may be about to: wait until all ranks but one have noticed
        it, or until the deadline. Returns early once there is a report, as the rank that has
        written it may have ended already.
        """
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

    def _last_place(self, rank: int) -> str:
        return f"in {self._last(rank)[1]}"


class Ranks:
    """This process among all ranks, and their collectives, which raise RankTimeout. With one rank
    they are the identity."""

    def __init__(self, device: torch.device, timeout_s: float = 1800.0):
        """timeout_s: seconds that a collective may wait for the slowest rank."""
        self.device, self.timeout_s = device, timeout_s
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.is_main = self.rank == 0
        self.place = "set-up"  # what the ranks are doing, for the message that names a missing one
        self.must_stop = False  # this rank has been told to stop; `barrier_or_stop` tells others
        # Called before the process group ends: NCCL waits for graphs with its collectives to go.
        self.before_end: list[Callable[[], None]] = []
        # of rollouts: the `time` module, or a substitute with perf_counter, monotonic and sleep
        self.clock = time
        self.watchdog = Watchdog(self.rank, self.world_size) if self.world_size > 1 else None

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum_(torch.zeros(1, device=self.device))

    def barrier_or_stop(self) -> None:
        """Wait for all ranks. Raises StopRequested on all of them if any has been told to stop."""
        wishes = self.sum_(torch.tensor([float(self.must_stop)], device=self.device))
        if wishes.item():
            raise StopRequested

    def is_told_to_stop(self) -> bool:
        """Whether any rank has been told to stop, for use while this rank waits outside a
        collective. It then sets `must_stop`, so that all stop at the next `barrier_or_stop`."""
        if self.watchdog is not None:
            with contextlib.suppress(RuntimeError):  # the store has ended: the next one reports it
                if self.must_stop:
                    self.watchdog.request_stop()
                self.must_stop |= self.watchdog.is_stop_requested()
        return self.must_stop

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            self.complete(lambda: dist.all_reduce(tensor, async_op=True))
        return tensor

    def broadcast_(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The tensor of rank `source` into that of all ranks, in place."""
        if self.world_size > 1:
            self.complete(lambda: dist.broadcast(tensor.detach(), source, async_op=True))
        return tensor

    def gather(self, array: np.ndarray) -> np.ndarray:
        """Stack equally shaped numeric arrays of all ranks: [world_size, ...]."""
        if self.world_size == 1:
            return array[None].copy()
        local = torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
        everyone = local.new_empty(self.world_size * local.numel())
        self.complete(lambda: all_gather(everyone, local.reshape(-1), async_op=True))
        return everyone.cpu().numpy().reshape(self.world_size, *array.shape)

    def gather_ragged(self, array: np.ndarray) -> list[np.ndarray]:
        """One-dimensional arrays of any lengths from all ranks, as a list by rank (padded on the
        way, nothing pickled)."""
        sizes = self.gather(np.array([len(array)]))[:, 0]
        padded = np.zeros(max(int(sizes.max()), 1), array.dtype)
        padded[: len(array)] = array
        return [row[:size] for row, size in zip(self.gather(padded), sizes, strict=True)]

    def gather_text(self, text: str) -> list[str]:
        """A text of every rank, as a list by rank."""
        encoded = np.frombuffer(text.encode(), np.uint8)
        return [row.tobytes().decode() for row in self.gather_ragged(encoded)]

    def agree(self, find: Callable[[], str | None]) -> str | None:
        """What `find` returns on rank 0, on all ranks, or the InputError that it raises there."""
        answer = {}
        if self.is_main:
            try:
                answer = {"value": find()}
            except InputError as error:
                answer = {"error": str(error)}
        answer = json.loads(self.gather_text(json.dumps(answer))[0])
        if "error" in answer:
            raise InputError(answer["error"])
        return answer["value"]

    def complete(self, start: Callable[[], dist.Work]) -> None:
        """Start a collective with async_op=True and wait for its end; a rank that does not come to
        it is named."""
        with self.watch() as deadline:
            work, nap_s = start(), 1e-5
            while not work.is_completed():
                if time.monotonic() > deadline:
                    self.watchdog.fail(self.place, f"no answer for {self.timeout_s:g} s", deadline)
                if self.must_stop:
                    self.watchdog.request_stop()
                time.sleep(nap_s)
                nap_s = min(1.5 * nap_s, MAX_NAP_S)
            # complete: raises if it failed, and orders the CUDA stream behind the collective
            work.wait()

    @contextlib.contextmanager
    def watch(self) -> Iterator[float]:
        """Around collectives, also those of another library, so that a failure names the missing
        rank. Yields the end of the time-out, which other libraries enforce by themselves."""
        deadline = time.monotonic() + self.timeout_s
        if self.world_size > 1:
            self.watchdog.enter(self.place)
        try:
            yield deadline
        except (RankTimeout, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:  # gloo: a rank has left, or its own time-out
            if self.world_size == 1:
                raise
            self.watchdog.fail(self.place, one_line(error), deadline)


def one_line(error: Exception) -> str:
    """The message of a failed collective, without its place in the sources."""
    return str(error).splitlines()[0].rsplit("] ")[-1].split(". ")[0]


@contextlib.contextmanager
def ranks_from_environment(device: str, timeout_s: float) -> Iterator[Ranks]:
    """Join the process group that torchrun describes in the environment; NCCL on GPUs, gloo on CPU.

    Raises InputError if `device` asks for a GPU that is not there, and RankTimeout if a rank does
    not come. An EndsRun of the block is printed here.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("model.device: cuda, but torch sees no GPU; use cpu or auto")
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if use_cuda and max(local_rank + 1, local_world_size) > torch.cuda.device_count():
        raise InputError(
            f"--nproc_per_node: {local_world_size} ranks, but only {torch.cuda.device_count()} "
            "GPUs; each needs one of its own"
        )
    target = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        set_cuda_defaults()
        torch.cuda.set_device(target)
    if "RANK" in os.environ:  # with torchrun
        die_with_parent()  # an orphan would keep writing to the files of the next run
        # Gloo's time-out frees the thread that waits in the collective, for a clean exit. NCCL's
        # watchdog would end the process before `complete` has said why, so it comes last.
        limit = timedelta(seconds=2 * timeout_s if use_cuda else timeout_s)
        store, rank, world_size = _store_of_launcher()
        store.set_timeout(limit)
        group = {"store": store, "rank": rank, "world_size": world_size, "timeout": limit}
        try:
            dist.init_process_group("nccl" if use_cuda else "gloo", **group)
        except RuntimeError as error:
            raise RankTimeout(f"a rank is missing at the start ({one_line(error)})") from error
    ranks = Ranks(target, timeout_s)
    try:
        yield ranks
        ranks.place = "the end of the run"
        ranks.barrier()  # not after an error: other ranks may hang until the launcher ends them
    except EndsRun as error:
        log_once(error)
        raise
    finally:
        for free in ranks.before_end:
            free()
        if dist.is_initialized():
            dist.destroy_process_group()


def log_once(error: EndsRun) -> None:
    """Print an error, unless it has been printed. Only the first rank with an error prints it, as
    most errors are on all ranks.

    Returns once it is on the screen: as soon as one rank ends, the launcher kills the others,
    including the one that prints.
    """
    if error.is_logged:
        return
    error.is_logged = True
    try:
        store = _store_of_all()
        if store is not None and store.add("num_errors", 1) > 1:
            store.wait(["error_is_logged"], timedelta(seconds=CONNECT_S))
            return
    except RuntimeError:  # it may have ended with its rank or launcher
        store = None
    if store is None and os.environ.get("LOCAL_RANK", "0") != "0":
        return
    log(f"error: {error}")
    if store is not None:
        with contextlib.suppress(RuntimeError):
            store.set("error_is_logged", "1")


def _store_of_all() -> dist.Store | None:
    """The key-value store of the job: of the process group or, before there is one, of the
    launcher; None if there is neither."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if "RANK" in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _store_of_launcher()[0]
    return None


def _store_of_launcher() -> tuple[dist.Store, int, int]:
    """The key-value store, this rank and the number of ranks. The launcher makes the store before
    it starts ranks, so a missing one means that the launcher has died.

    torchrun may use one store for all restarts of the ranks: each gets a namespace of its own, as
    the addresses of dead ranks are in it.
    """
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=CONNECT_S)))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"restart {restart}", store), rank, world_size


@contextlib.contextmanager
def signals_stop(ranks: Ranks) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP set `ranks.must_stop`, however often they come, so that a save
    runs to its end.

    Only a second Ctrl-C ends a rank at once. Signals that a parent has set to be ignored (nohup)
    stay ignored.
    """
    first_ctrl_c: list[float] = []

    def note(number: int, frame) -> None:
        ranks.must_stop = True
        if number == signal.SIGINT:
            first_ctrl_c.append(time.monotonic())
            if first_ctrl_c[-1] - first_ctrl_c[0] > SAME_CTRL_C_S:
                raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
