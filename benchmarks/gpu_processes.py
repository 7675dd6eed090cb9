"""Processes of the GPU suite that measure together: one process has one process group."""

import multiprocessing
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.gpu_parts import Bench, make_bench
from bubblespec.dist.ranks import Ranks

PATIENCE_S = 120.0


def run_processes(
    measure: Callable[[Bench, Ranks], object], backend: str, world_size: int, is_small: bool
) -> object:
    """What `measure`, a function of a module, returns on rank 0. With NCCL each process has a card
    of its own. Raises RuntimeError if a process fails."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (world_size, server.port, backend, is_small, measure, sender)
    processes = [
        context.Process(target=_run, args=(r, *arguments), daemon=True) for r in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not receiver.poll(0.1):
            if any(p.exitcode for p in processes) or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{backend}: a process ended early or took more than {PATIENCE_S:g} s"
                )
        return receiver.recv()
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def _run(
    rank: int, world_size: int, port: int, backend: str, is_small: bool, measure, sender
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    bench = make_bench(is_small)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    result = measure(bench, Ranks(bench.device, 60.0))
    if rank == 0:
        sender.send(result)
    dist.barrier()
    dist.destroy_process_group()
