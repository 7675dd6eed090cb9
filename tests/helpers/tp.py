"""Ranks that compute a forward together, as threads of a test."""

import threading
from collections.abc import Callable

import torch


class Meeting:
    """Meeting point of `size` threads that exchange tensors."""

    def __init__(self, size: int):
        self.size, self.brought = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadTPGroup:
    """The `TPGroup` of one thread. Each rank adds up in its own order, so that rounding differs."""

    can_capture = False

    def __init__(self, meeting: Meeting, rank: int):
        self.meeting, self.rank, self.size, self.num_sums = meeting, rank, meeting.size, 0

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.meeting.brought[self.rank] = tensor.clone()
        self.meeting.barrier.wait()
        brought = torch.stack(self.meeting.brought)
        self.meeting.barrier.wait()
        return brought

    def gather_text(self, text: str) -> list[str]:
        padded = text.encode().ljust(1000, b"\0")
        rows = self.gather(torch.frombuffer(bytearray(padded), dtype=torch.uint8))
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in rows]

    def connect(self, tensor: torch.Tensor) -> None:
        self.all_reduce_(tensor)

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        total = torch.zeros_like(tensor)
        for part in self.gather(tensor).roll(self.rank, 0):
            total += part
        return tensor.copy_(total)


def run_together(size: int, work: Callable[[ThreadTPGroup], object]) -> list:
    """Return the results of work(tp) by rank; raise the error of the first rank that fails."""
    meeting, results, errors = Meeting(size), [None] * size, []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadTPGroup(meeting, rank))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
