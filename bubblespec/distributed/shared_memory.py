"""Collectives of small arrays in memory that the ranks of one machine share.

The TP tail and all gathers wait for them; ticks of rollouts are polled. A collective of gloo takes
hundreds of microseconds through sockets and threads. Here a rank writes its numbers, sets a flag,
waits for the flags of the others and reads: a few microseconds for the sums of a layer of a small
model. Sums are in the order of ranks, so they are bit-identical."""

import contextlib
import os
import platform
import secrets
import time

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.errors import log

PLACE_BYTES = 1 << 20  # bytes of a rank in one exchange; larger arrays take several
CACHE_LINE = 64  # bytes between flags, so that ranks do not write to one line
# A waiting rank first spins this many times, then yields its core, and then sleeps between checks:
# with more ranks than cores, the awaited rank may not be running.
NUM_SPINS, NUM_YIELDS, NAP_S, MAX_NAP_S = 200, 200, 5e-5, 5e-4
LOOK_S = 0.5  # interval of a waiting rank's checks that the other processes are alive


def map_shared(ranks: Ranks, num_bytes: int) -> np.ndarray | None:
    """Map zeros on all ranks, uint8 [num_bytes]; all ranks call it together.

    Return None, on all ranks, if they are not on one machine, or if it has no room."""
    path, mapped, handle = "", None, None
    name = f"bubblespec-{secrets.token_hex(8)}"
    if ranks.is_main:
        try:  # a file without a name: nothing is left of it, whenever a rank is killed
            handle = os.memfd_create(name)
            # Allocated now: to write where no memory is left ends a process at once.
            os.posix_fallocate(handle, 0, num_bytes)
            path = f"/proc/{os.getpid()}/fd/{handle}"
        except (OSError, AttributeError) as error:
            reason = getattr(error, "strerror", None) or "unavailable on this system"
            log(f"warning: no shared memory: {reason}; ranks use gloo instead")
    path, name = ranks.gather_text(path)[0], ranks.gather_text(name)[0]
    with contextlib.suppress(OSError, ValueError):  # not there: made on another machine, or nowhere
        if name in os.readlink(path):
            mapped = np.asarray(np.memmap(path, np.uint8, "r+", shape=(num_bytes,)))
    is_common = ranks.all_gather(np.array([mapped is not None], np.uint8)).all()
    if handle is not None:
        os.close(handle)  # the memory stays as long as it is mapped
    return mapped if is_common else None


def has_ended(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


class SharedCollectives:
    """Sums and gathers over the ranks of one machine; all ranks call the same in the same order.

    They raise RankTimeout with the name of a rank that has died or does not come. Exchange n uses
    the places n % 2 of all ranks. A rank reaches a place again only after all have begun exchange
    n + 1, and so have read the numbers of exchange n."""

    def __init__(self, ranks: Ranks, mapped: np.ndarray):
        """Join the collectives of all ranks, in memory of `map_shared`."""
        self._ranks, size = ranks, ranks.world_size
        flags = mapped[: size * CACHE_LINE].view(np.int64).reshape(size, -1)
        self._reached, self._pids = flags[:, 0], flags[:, 1]
        self._places = mapped[size * CACHE_LINE :].reshape(2, size, PLACE_BYTES)
        self._count = 0
        self._pids[ranks.rank] = os.getpid()
        ranks.barrier()

    def post(self, own: np.ndarray) -> None:
        """Begin an exchange with this rank's array, of one size on all ranks, <= PLACE_BYTES."""
        self._count += 1
        self._look_at = time.monotonic() + LOOK_S
        # arrays of all ranks, [P, n]: once the exchange is complete, until the next but one
        self.posted = self._places[self._count % 2, :, : own.nbytes].view(own.dtype)
        self.posted[self._ranks.rank] = own
        self._reached[self._ranks.rank] = self._count

    def is_complete(self) -> bool:
        """Whether all ranks have posted. Raises RuntimeError for a missing rank that has ended."""
        if self._reached.min() >= self._count:
            return True
        if time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            for rank in np.flatnonzero(self._reached < self._count).tolist():
                if has_ended(int(self._pids[rank])) and self._reached[rank] < self._count:
                    raise RuntimeError(f"the process of rank {rank} has ended")
        return False

    def all_reduce_(self, array: np.ndarray) -> None:
        """Sum over ranks, in place. array: contiguous, of one dimension."""
        room = PLACE_BYTES // array.itemsize
        for begin in range(0, len(array), room):
            own = array[begin : begin + room]
            first, *others = self._exchange(own)
            own[:] = first
            for of_rank in others:
                own += of_rank

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """Stack equally shaped arrays of all ranks: [P, ...]."""
        flat = np.ascontiguousarray(array).reshape(-1)
        everyone = np.empty((len(self._reached), len(flat)), flat.dtype)
        room = PLACE_BYTES // flat.itemsize
        for begin in range(0, len(flat), room):
            own = slice(begin, begin + room)
            everyone[:, own] = self._exchange(flat[own])
        return everyone.reshape(len(everyone), *array.shape)

    def _exchange(self, own: np.ndarray) -> np.ndarray:
        """Exchange arrays with all ranks; return `posted`."""
        self.post(own)
        looks, nap_s, ranks = 0, NAP_S, self._ranks
        deadline = time.monotonic() + ranks.timeout_s
        try:
            while not self.is_complete():
                looks += 1
                if looks > NUM_SPINS + NUM_YIELDS:
                    time.sleep(nap_s)
                    nap_s = min(1.05 * nap_s, MAX_NAP_S)
                    if ranks.must_stop:
                        ranks.watchdog.request_stop()
                elif looks > NUM_SPINS:
                    os.sched_yield()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no answer for {ranks.timeout_s:g} s")
        except RuntimeError as error:
            ranks.watchdog.fail(ranks.activity, str(error), time.monotonic())
        return self.posted


def open_collectives(ranks: Ranks) -> SharedCollectives | None:
    """Create the collectives; all ranks call it together.

    Return None, on all ranks, if memory cannot be shared, or on processors on which a flag may be
    visible before the numbers written earlier."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    mapped = map_shared(ranks, ranks.world_size * (CACHE_LINE + 2 * PLACE_BYTES))
    return None if mapped is None else SharedCollectives(ranks, mapped)
