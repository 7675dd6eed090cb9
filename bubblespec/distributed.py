"""Ranks: start and end of the process group, and the few collectives that the trainer uses. A single process works too."""

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from bubblespec.errors import InputError
from bubblespec.processes import die_with_parent

# torch 2.13 renames the collective; 2.11 has the old name only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Ranks:
    """This process among all: `rank`, `world_size`, `device`. With one process every collective is the identity."""

    def __init__(self, device: torch.device):
        self.device = device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.is_main = self.rank == 0

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The tensor of rank `source` into that of all ranks, in place."""
        if self.world_size > 1:
            dist.broadcast(tensor.detach(), source)
        return tensor

    def gather(self, array: np.ndarray) -> np.ndarray:
        """Stack equally shaped numeric arrays of all ranks: [world_size, ...]."""
        if self.world_size == 1:
            return array[None].copy()
        own = torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
        everyone = own.new_empty(self.world_size * own.numel())
        _all_gather(everyone, own.reshape(-1))
        return everyone.cpu().numpy().reshape(self.world_size, *array.shape)

    def gather_ragged(self, array: np.ndarray) -> list[np.ndarray]:
        """One-dimensional arrays of any lengths from all ranks, as a list by rank (padded on the way, nothing pickled)."""
        sizes = self.gather(np.array([len(array)]))[:, 0]
        padded = np.zeros(max(int(sizes.max()), 1), array.dtype)
        padded[: len(array)] = array
        return [row[:size] for row, size in zip(self.gather(padded), sizes, strict=True)]


@contextlib.contextmanager
def ranks_from_environment(device: str, timeout_s: float) -> Iterator[Ranks]:
    """Join the process group that torchrun describes in the environment; NCCL on GPUs, gloo on CPU.

    Raises InputError if `device` asks for a GPU that is not there. An InputError of the block is printed here, by the first rank
    that has one: most of them strike all ranks alike.
    """
    local_rank, local_world_size = (int(os.environ.get(name, n)) for name, n in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("model.device: cuda, but torch sees no GPU; use cpu or auto")
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if use_cuda and max(local_rank + 1, local_world_size) > torch.cuda.device_count():
        raise InputError(
            f"--nproc_per_node: {local_world_size} ranks, but only {torch.cuda.device_count()} GPUs; each needs one of its own"
        )
    target = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(target)
    if "RANK" in os.environ:
        die_with_parent()  # with torchrun: orphans would go on and write beside the run that is started next
        dist.init_process_group("nccl" if use_cuda else "gloo", timeout=timedelta(seconds=timeout_s))
    try:
        yield Ranks(target)
    except InputError as error:
        say_once(error)
        raise
    finally:
        if dist.is_initialized():
            # After an error the other ranks may hang in a collective; the launcher ends them when this process exits.
            if sys.exc_info()[0] is None:
                dist.barrier()
            dist.destroy_process_group()


def say_once(error: InputError) -> None:
    """Print an error unless it, or another rank's, has been printed. Without a process group that is the first rank of a machine.

    At once, and not at the end: the launcher kills the other ranks as soon as it sees one end.
    """
    if error.is_said:
        return
    error.is_said = True
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # the store may have ended with the rank that held it
            is_first = dist.distributed_c10d._get_default_store().add("num_input_errors", 1) == 1
    if is_first:
        print(f"error: {error}", file=sys.stderr, flush=True)
