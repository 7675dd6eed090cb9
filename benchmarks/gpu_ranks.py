"""Parts of the GPU suite on several ranks, each a process of its own."""

import itertools
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.gpu_bench import Bench, Figure, make_bench
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.graphs import capture, rehearse
from bubblespec.engine.sampling import SamplingParams
from bubblespec.mechanisms.tp_tail.shards import ShardedForward, TPGroup
from bubblespec.rollout.board import ProgressBoard, RankState

NUM_SUMS = 50  # one after the other in a graph


def run_processes(
    measure: Callable[[Bench, Ranks], list[Figure]], backend: str, world_size: int, is_small: bool
) -> list[Figure]:
    """Return what `measure` returns on rank 0. With NCCL each process has a card of its own."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, world_size, backend, is_small, measure)
        torch.multiprocessing.spawn(run_rank, arguments, world_size)
        with open(os.path.join(folder, "result"), "rb") as file:
            return pickle.load(file)


def run_rank(
    rank: int, folder: str, world_size: int, backend: str, is_small: bool, measure: Callable
) -> None:
    """Measure in a process group; rank 0 writes what it returns into the folder."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    options = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=60)}
    dist.init_process_group(backend, f"file://{folder}/store", **options)
    bench = make_bench(is_small)
    result = measure(bench, Ranks(bench.device, 60.0))
    if rank == 0:
        with open(os.path.join(folder, "result"), "wb") as file:
            pickle.dump(result, file)
    dist.barrier()
    dist.destroy_process_group()


def on_all_cards(
    bench: Bench, measure: Callable[[Bench, Ranks], list[Figure]], min_cards: int
) -> list[Figure]:
    """Measure with NCCL on all cards or, with fewer than `min_cards`, in two processes of gloo."""
    num_cards = torch.cuda.device_count() if bench.is_cuda else 0
    backend, world_size = ("nccl", num_cards) if num_cards >= min_cards else ("gloo", 2)
    return run_processes(measure, backend, world_size, bench.is_small)


def ticks(bench: Bench) -> Iterator[Figure]:
    """Time decode steps with progress ticks between them."""
    yield from on_all_cards(bench, measure_ticks, min_cards=2)


def tp_tail(bench: Bench) -> Iterator[Figure]:
    """Time sums over ranks, and steps of one rank and of all together, eager and in graphs.

    One card has one rank, which has all weights: the overhead of exchanges and sampling.
    """
    yield from on_all_cards(bench, measure_tp, min_cards=1)


def measure_ticks(bench: Bench, ranks: Ranks) -> list[Figure]:
    """Time a decode step of 8 rows, without and with a progress board that never pauses."""
    model = bench.model(bench.policy, 2 if bench.is_small else 14)
    engine = bench.decoding_engine(model, 8, 32, 480)
    for _ in range(5):
        engine.step(SamplingParams())
    num_steps = 10 if bench.is_small else 60
    board = ProgressBoard(ranks, 60.0, dist.get_backend(), interval_s=0.0)
    where, figures = f"{dist.get_backend()}, {ranks.world_size} processes", []
    for has_ticks in (False, True):
        ranks.barrier()
        bench.wait()
        started = time.perf_counter()
        for _ in range(num_steps):
            engine.step(SamplingParams())
            while has_ticks and board.poll(lambda: RankState(8)) is not None:
                pass
        bench.wait()
        step_ms = 1e3 * (time.perf_counter() - started) / num_steps
        note = f"{board.num_ticks} ticks in {num_steps} steps" if has_ticks else ""
        case = f"{where}, {'ticks' if has_ticks else 'no ticks'}"
        figures.append(Figure(case, step_ms, "ms per step", note))
    while not board.is_over:
        board.wait(lambda: RankState(0))
    return figures


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
                tp.sum_(tensor)
            return tensor

        case = f"{where}, sum of {tokens} tokens"
        note = f"{tensor.numel() * tensor.element_size()} bytes"
        eager_us = 1e6 * bench.seconds(partial(sums, 1))
        figures.append(Figure(f"{case}, eager", eager_us, "us", note))
        if tp.can_capture:
            rehearse(partial(sums, NUM_SUMS))
            graph_us = 1e6 * bench.seconds(capture(partial(sums, NUM_SUMS), None)[0]) / NUM_SUMS
            figures.append(Figure(f"{case}, in a graph", graph_us, "us", note))
    for rows in bench.sizes((1, 4), (1, 4, 16)):
        for kind, launched in itertools.product(("alone", "together"), launches):
            is_eager, forward = launched == "eager", None
            if kind == "together":
                forward = ShardedForward(model, tp, enforce_eager=is_eager)
            options = {"enforce_eager": is_eager, "forward": forward}
            engine = bench.decoding_engine(model, rows, 64, 192, **options)
            engine.step(SamplingParams())
            step_ms = 1e3 * bench.seconds(partial(engine.step, SamplingParams()))
            engine.release()
            case = f"{where}, {rows} rows {kind}, {launched}"
            figures.append(Figure(case, step_ms, "ms per step"))
    return figures
