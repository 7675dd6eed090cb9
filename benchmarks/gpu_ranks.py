"""The part of the GPU suite on several ranks, each a process of its own."""

import itertools
import os
import pickle
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.gpu_bench import Bench, Figure, left_out, make_bench
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.graphs import capture, rehearse
from bubblespec.mechanisms.tp_tail.shards import ShardedForward, TPGroup

NUM_SUMS = 50  # one after the other in a graph


def tp_tail(bench: Bench) -> Iterator[Figure]:
    """Time sums over ranks, and steps of one rank and of all together, eager and in graphs.

    Ranks are all cards, with NCCL, or on a CPU two processes."""
    world_size = torch.cuda.device_count() if bench.is_cuda else 2
    if world_size == 1:
        yield left_out("several ranks", "one GPU only")
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (folder, world_size, bench.is_small), world_size)
        with open(os.path.join(folder, "result"), "rb") as file:
            yield from pickle.load(file)


def run_rank(rank: int, folder: str, world_size: int, is_small: bool) -> None:
    """Measure in a process group; rank 0 writes figures into the folder."""
    torch.set_num_threads(1)
    if not is_small:
        torch.cuda.set_device(rank)
    options = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=60)}
    backend = "gloo" if is_small else "nccl"
    dist.init_process_group(backend, f"file://{folder}/store", **options)
    bench = make_bench(is_small)
    result = measure_tp(bench, Ranks(bench.device, 60.0))
    if rank == 0:
        with open(os.path.join(folder, "result"), "wb") as file:
            pickle.dump(result, file)
    dist.barrier()
    dist.destroy_process_group()


@torch.inference_mode()
def measure_tp(bench: Bench, ranks: Ranks) -> list[Figure]:
    """Time the parts of a TP tail, on all ranks together."""
    model, tp = bench.model(bench.policy), TPGroup(ranks)
    where, figures = f"{ranks.world_size} ranks", []
    launches = ("eager", "graphs") if tp.can_capture else ("eager",)
    for tokens in bench.sizes((1, 16), (1, 16, 64, 256)):
        hidden_size = model.config.hidden_size
        tensor = torch.zeros(tokens, hidden_size, dtype=bench.dtype, device=bench.device)

        def sums(count: int, tensor=tensor) -> torch.Tensor:
            for _ in range(count):
                tp.all_reduce_(tensor)
            return tensor

        case = f"{where}, sum of {tokens} tokens"
        note = f"{tensor.numel() * tensor.element_size()} bytes"
        eager_us = 1e6 * bench.seconds(partial(sums, 1))
        figures.append(Figure(f"{case}, eager", eager_us, "us", note))
        if tp.can_capture:
            rehearse(partial(sums, NUM_SUMS))
            graph_us = 1e6 * bench.seconds(capture(partial(sums, NUM_SUMS))) / NUM_SUMS
            figures.append(Figure(f"{case}, in a graph", graph_us, "us", note))
    for rows in bench.sizes((1, 4), (1, 4, 16)):
        for kind, launched in itertools.product(("alone", "together"), launches):
            make = ModelForward if kind == "alone" else partial(ShardedForward, tp=tp)
            forward = make(model, enforce_eager=launched == "eager")
            engine = bench.decoding_engine(forward, rows, 64)
            engine.step(SamplingParams())
            step_ms = 1e3 * bench.seconds(partial(engine.step, SamplingParams()))
            engine.release()
            case = f"{where}, {rows} rows {kind}, {launched}"
            figures.append(Figure(case, step_ms, "ms per step"))
    return figures
