"""Ticks through memory that the ranks of one machine share: a write and a few reads, and no thread
beside the forwards.

An all-gather over gloo takes a rank about half a millisecond to post, and its threads as much again
of cores that all compute. Here each rank has two places in a mapped file. It writes its numbers for
tick n into place n % 2, with their checksum and, last, n; a tick is complete for whoever finds all
ranks' n in them. A place is written again two ticks later, which a rank only comes to once all have
posted the tick in between, and so have read this one. The roll call is not told of ticks: it would
have to ask the job's store, which takes longer than the tick.
"""

import contextlib
import mmap
import os
import secrets
import tempfile
import zlib

import numpy as np

from bubblespec.dist.ranks import Ranks
from bubblespec.dist.progress import INTERVAL_S, ProgressBoard, RankState

MAX_NUMBERS = 1 << 20  # of a rank in a tick; memory is taken for those that are written
HEADER = 3  # tick + 1, numbers, checksum
LOOK_S = 0.5  # a rank that waits looks this often whether the others are alive


class SharedMemory:
    """What the ranks have in common: by rank and place a header and numbers. Made by
    `open_shared`."""

    def __init__(self, mapped: mmap.mmap, num_ranks: int):
        self.pids = np.frombuffer(mapped, np.int64, num_ranks, offset=8)
        size, begin = HEADER + MAX_NUMBERS, 8 * (1 + num_ranks)
        words = np.frombuffer(mapped, np.int64, 2 * num_ranks * size, offset=begin).reshape(
            num_ranks, 2, size
        )
        self.headers, self.numbers = words[:, :, :HEADER], words.view(np.float64)[:, :, HEADER:]

    def write(self, rank: int, tick: int, numbers: np.ndarray) -> None:
        """Post a rank's numbers. Raises ValueError if they are too many."""
        if len(numbers) > MAX_NUMBERS:
            raise ValueError(f"{len(numbers)} numbers in a tick; there is room for {MAX_NUMBERS}")
        self.numbers[rank, tick % 2, : len(numbers)] = numbers
        self.headers[rank, tick % 2, 1:] = len(numbers), zlib.crc32(numbers.tobytes())
        self.headers[rank, tick % 2, 0] = tick + 1

    def read(self, rank: int, tick: int) -> np.ndarray | None:
        """A copy of what a rank has posted to a tick; None if it has not, or not all of it is to be
        seen yet."""
        posted, count, checksum = self.headers[rank, tick % 2].tolist()
        if posted != tick + 1:
            return None
        numbers = self.numbers[rank, tick % 2, :count].copy()
        return numbers if zlib.crc32(numbers.tobytes()) == checksum else None


def open_shared(ranks: Ranks) -> SharedMemory | None:
    """Called by all ranks together; None, for all of them, where they are not on one machine or it
    has no room."""
    size = 8 * (1 + ranks.world_size + 2 * ranks.world_size * (HEADER + MAX_NUMBERS))
    path, token = "", secrets.randbits(62) + 1
    if ranks.is_main:
        with contextlib.suppress(OSError):
            handle, path = tempfile.mkstemp(
                prefix="bubblespec-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
            )
            os.truncate(handle, size)
            os.pwrite(handle, token.to_bytes(8, "little"), 0)
            os.close(handle)
    path, _, token = ranks.gather_text(f"{path}\n{token}")[0].partition("\n")
    mapped = None
    with contextlib.suppress(OSError, ValueError), open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), size)
    sees = mapped is not None and int.from_bytes(mapped[:8], "little") == int(
        token
    )  # not a file of that name elsewhere
    is_common = bool(ranks.gather(np.array([sees], np.uint8)).all())
    if ranks.is_main and path:
        os.unlink(path)  # it is there as long as it is mapped
    if not is_common:
        return None
    shared = SharedMemory(mapped, ranks.world_size)
    shared.pids[ranks.rank] = os.getpid()
    ranks.barrier()
    return shared


class SharedBoard(ProgressBoard):
    """The progress board over shared memory."""

    def __init__(
        self, shared: SharedMemory, ranks: Ranks, timeout_s: float, interval_s: float = INTERVAL_S
    ):
        self._shared, self._tick = shared, 0  # of the whole run
        self._look_at = 0.0
        super().__init__(ranks, timeout_s, interval_s=interval_s)

    def _connect(self, backend: str | None) -> None:
        self._numbers = np.empty(0)

    def _allocate(self, num_numbers: int) -> None:
        self._numbers = np.empty(num_numbers)

    def _post(self) -> None:
        self._states: list[np.ndarray | None] = [None] * self.ranks.world_size
        self._look_at = self._clock.monotonic() + LOOK_S
        self._shared.write(self.ranks.rank, self._tick, self._numbers)

    def _is_complete(self) -> bool:
        for rank, state in enumerate(self._states):
            if state is None:
                self._states[rank] = self._shared.read(rank, self._tick)
        missing = [rank for rank, state in enumerate(self._states) if state is None]
        if missing and self._clock.monotonic() > self._look_at:
            self._look_at = self._clock.monotonic() + LOOK_S
            for rank in missing:
                if has_ended(int(self._shared.pids[rank])):
                    raise RuntimeError(f"the process of rank {rank} has ended")
        return not missing

    def _receive(self) -> list[RankState]:
        self._tick += 1
        return [RankState.from_numbers(state) for state in self._states]


def has_ended(pid: int) -> bool:
    """Whether a process of this machine is no more; one that nobody has waited for yet counts as
    ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0] in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def make_board(ranks: Ranks, timeout_s: float, backend: str) -> ProgressBoard:
    """Called by all ranks together. backend: see `BubbleConfig.progress_backend`."""
    if backend == "shm":
        shared = open_shared(ranks) if ranks.world_size > 1 else None
        if shared is not None:
            return SharedBoard(shared, ranks, timeout_s)
        backend = "gloo"
    return ProgressBoard(ranks, timeout_s, backend)
