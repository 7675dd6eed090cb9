"""Arrays of rows of unequal lengths, one after the other; copies from and to a device; waits."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each element's row and offset in the row, int64 [sum of counts] each."""
    row = np.arange(len(counts)).repeat(counts)
    return row, np.arange(len(row)) - (counts.cumsum() - counts)[row]


def spans(begin: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the places of rows' elements, int64 [sum of counts], from `begin` on in each row."""
    stop = counts.cumsum()
    return np.arange(stop[-1] if len(stop) else 0) + (begin - stop + counts).repeat(counts)


def packed(rows: Sequence[np.ndarray | None]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate rows, int64 [sum of counts]; return their lengths, too. None is an empty row."""
    counts = np.array([0 if row is None else len(row) for row in rows], np.int64)
    parts = [np.empty(0, np.int64), *(row for row in rows if row is not None)]
    return np.concatenate(parts, dtype=np.int64), counts


def unpacked(elements: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Split an array into the rows of `packed`."""
    return np.split(elements, counts.cumsum()[:-1]) if len(counts) else []


def doubled(column: np.ndarray) -> np.ndarray:
    """Append as many zeros as there are elements."""
    longer = np.zeros((2 * len(column), *column.shape[1:]), column.dtype)  # not touched yet
    longer[: len(column)] = column
    return longer


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to a GPU without waiting for its queued work; on a CPU share the array's memory."""
    # The array may be changed at once: the call has read memory that is not pinned.
    return torch.from_numpy(array).to(device, non_blocking=True)


def staged(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy as `to_device` does, through pinned memory: a GPU is not waited for whatever the size.

    torch's allocator keeps that memory until the copy has ended."""
    if device.type != "cuda":
        return torch.from_numpy(array)
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def to_host(*vectors: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Return vectors of one length; from a GPU in one copy, as float64, exact for token ids."""
    if vectors[0].device.type == "cpu":
        return tuple(vector.numpy() for vector in vectors)
    return tuple(torch.stack([vector.double() for vector in vectors]).cpu().numpy())


def reading(tensor: torch.Tensor) -> Callable[[], np.ndarray]:
    """Begin to copy a tensor to the host; return the call that waits for the copy.

    The tensor may be overwritten by work that is queued later."""
    if tensor.device.type != "cuda":
        copied = tensor.clone()
        return lambda: wait(copied, None)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    is_done = torch.cuda.Event()
    is_done.record()
    return lambda: wait(pinned, is_done)


def wait(copied: torch.Tensor, is_done: torch.cuda.Event | None) -> np.ndarray:
    """Wait for the end of a copy."""
    if is_done is not None:
        is_done.synchronize()
    return copied.numpy()


def median_s(
    action: Callable[[], object],
    device: torch.device | None = None,
    clock: Any = time,
    warm_up: int = 3,
    num_timed: int = 20,
) -> float:
    """Return the median seconds of a call, until the device is done: calls behind the first ones.

    device: None for calls that return when they are done."""
    seconds = []
    for _ in range(warm_up + num_timed):
        began_s = clock.perf_counter()
        action()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock.perf_counter() - began_s)
    return float(np.median(seconds[warm_up:]))
