"""Copies between host and device, and which of them wait for the other."""

from collections.abc import Callable

import numpy as np
import torch


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
