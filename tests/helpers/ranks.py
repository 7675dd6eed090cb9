"""Ranks as processes of a test, on loopback: in a gloo group, or with a card each in one of NCCL.
The test process holds the key-value store, as torchrun does."""

import json
from datetime import timedelta

import torch
import torch.distributed as dist

from bubblespec.distributed.ranks import Ranks
from tests.helpers.warm import start

PARENT_STORE = -1


def start_rank(
    scenario,
    rank: int,
    world_size: int,
    port: int,
    store_rank: int,
    folder,
    arguments,
    device: str = "cpu",
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == store_rank, wait_for_workers=False)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    ranks = Ranks(torch.device(device))
    result = scenario(ranks, *arguments)
    for free in ranks.before_end:
        free()
    with open(folder / f"{rank}.json", "w", encoding="utf-8") as file:
        json.dump(result, file)
    dist.destroy_process_group()  # must not wait for the ranks that are missing


def run_ranks(
    folder,
    scenario,
    world_size: int,
    *arguments,
    missing: int | None = None,
    store_rank: int = PARENT_STORE,
    timeout_s: float = 240,
    device: str = "cpu",
) -> list:
    """What scenario(ranks, *arguments) returned on each rank; None for a `missing` one."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    if store_rank != PARENT_STORE:
        del server  # the rank takes over the port
    common = (world_size, port, store_rank, folder, arguments, device)
    processes = [start(start_rank, scenario, rank, *common) for rank in range(world_size)]
    try:
        for rank, process in enumerate(processes):
            if rank != missing:
                process.join(timeout_s)
                assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    texts = [
        None if rank == missing else (folder / f"{rank}.json").read_text()
        for rank in range(world_size)
    ]
    return [text and json.loads(text) for text in texts]
