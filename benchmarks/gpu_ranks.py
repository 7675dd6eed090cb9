"""Parts of the GPU suite that need processes: one process has one process group, and reads the
settings of its memory once."""

import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.gpu_bench import Bench, Figure, make_bench, make_rows, start_decoding
from bubblespec.distributed.device import ALLOCATOR_VARIABLES
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.compiled import reduction_for
from bubblespec.engine.graphs import capture, rehearse
from bubblespec.engine.sampling import SamplingParams
from bubblespec.mechanisms.tp_tail.shards import ShardedForward, TPGroup
from bubblespec.rollout.board import ProgressBoard, RankState

NUM_SUMS = 50  # one after the other in a graph
NUM_CAPTURES = 4
SPIN_CYCLES = 1 << 31  # of a kernel of one block: about a second


def captures(bench: Bench) -> Iterator[Figure]:
    """Capture of all graphs of the largest model, given back and captured again, with memory in
    expandable segments and without; then decode steps next to a kernel that only spins."""
    for value in ("True", "False"):
        settings = dict.fromkeys(ALLOCATOR_VARIABLES, f"expandable_segments:{value}")
        with patch.dict(os.environ, settings):  # of the process that is started
            figures = run_processes(measure_captures, "gloo", 1, bench.is_small)
        for figure in figures:
            yield figure._replace(case=f"{figure.case}, expandable_segments {value}")
    if bench.device.type != "cuda":
        yield Figure("decode step next to a spinning block", None, note="needs a GPU")
        return
    engine = bench.engine(bench.model(bench.policy), 16, 512)
    start_decoding(engine, make_rows(engine.runner.model, 16, 64, 400))
    side = torch.cuda.Stream()
    for spins in (False, True):

        def step(spins=spins) -> None:
            if spins:
                with torch.cuda.stream(side):
                    torch.cuda._sleep(SPIN_CYCLES)
            engine.step(SamplingParams())

        times = []
        for _ in range(12):
            started = time.perf_counter()
            step()  # which waits for its own samples, not for the other stream
            times.append(time.perf_counter() - started)
            side.synchronize()
        case = f"decode step, {'next to a spinning block' if spins else 'alone'}"
        yield Figure(case, 1e3 * sorted(times)[len(times) // 2], "ms per step", "16 rows")
    engine.release()


def measure_captures(bench: Bench, ranks: Ranks) -> list[Figure]:
    """Seconds of the first forward after each release, and memory reserved then."""
    name, rows, length = ("tiny", 2, 64) if bench.is_small else ("7B", 128, 2048)
    engine, figures = bench.engine(bench.model(name), rows, length), []
    for number in range(NUM_CAPTURES):
        engine.add(make_rows(engine.runner.model, 1, 32, 8))
        bench.wait()
        started = time.perf_counter()
        engine.step(SamplingParams())
        bench.wait()
        seconds = time.perf_counter() - started
        graphs = engine.runner.graphs
        note = "no graphs" if graphs is None else f"{len(graphs.shapes)} graphs"
        if graphs is not None:
            note = f"{graphs.problem or note}; {torch.cuda.memory_reserved() / 1e9:.2f} GB reserved"
        figures.append(Figure(f"{name}, capture {number + 1}", seconds, "s", note))
        engine.release()
    return figures


def run_processes(
    measure: Callable[[Bench, Ranks], list[Figure]], backend: str, world_size: int, is_small: bool
) -> list[Figure]:
    """What `measure`, a function of this module, returns on rank 0. With NCCL each process has a
    card of its own. Raises what a process raises."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, world_size, backend, is_small, measure)
        torch.multiprocessing.spawn(run_rank, arguments, world_size)
        with open(os.path.join(folder, "result"), "rb") as file:
            return pickle.load(file)


def run_rank(
    rank: int, folder: str, world_size: int, backend: str, is_small: bool, measure: Callable
) -> None:
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


def num_cards(bench: Bench) -> int:
    return torch.cuda.device_count() if bench.device.type == "cuda" else 0


def ticks(bench: Bench) -> Iterator[Figure]:
    """Decode steps with a progress tick asked for between them: on all cards with NCCL, or with
    gloo between two processes on one."""
    backend, world_size = ("nccl", num_cards(bench)) if num_cards(bench) > 1 else ("gloo", 2)
    yield from run_processes(measure_ticks, backend, world_size, bench.is_small)


def measure_ticks(bench: Bench, ranks: Ranks) -> list[Figure]:
    """A decode step of 8 rows, without and with the trainer's progress board, which does not pause
    between two ticks."""
    model = bench.model(bench.policy, 2 if bench.is_small else 14)
    engine = bench.engine(model, 8, 512)
    start_decoding(engine, make_rows(model, 8, 32, 400))
    for _ in range(5):
        engine.step(SamplingParams())
    num_steps = 10 if bench.is_small else 60
    board = ProgressBoard(ranks, 60.0, dist.get_backend(), interval_s=0.0)
    working, done = RankState(8), RankState(0)
    seconds = []
    for has_ticks in (False, True):
        ranks.barrier()
        bench.wait()
        started = time.perf_counter()
        for _ in range(num_steps):
            engine.step(SamplingParams())
            while has_ticks and board.poll(lambda: working) is not None:
                pass
        bench.wait()
        seconds.append((time.perf_counter() - started) / num_steps)
    note = f"{board.num_ticks} ticks in {num_steps} steps"
    while not board.is_over:
        board.wait(lambda: done)
    where = f"{dist.get_backend()}, {ranks.world_size} processes"
    return [
        Figure(f"{where}, no ticks", seconds[0] * 1e3, "ms per step"),
        Figure(f"{where}, ticks", seconds[1] * 1e3, "ms per step", note),
    ]


def tp_tail(bench: Bench) -> Iterator[Figure]:
    """Sums of hidden states over ranks, eager and in a graph; steps of few rows, of one rank and of
    all together. With one card NCCL has one rank, which has all of the weights: what is measured is
    the overhead of exchanges and sampling."""
    backend, world_size = ("nccl", num_cards(bench)) if num_cards(bench) else ("gloo", 2)
    yield from run_processes(measure_tp, backend, world_size, bench.is_small)


@torch.inference_mode()
def measure_tp(bench: Bench, ranks: Ranks) -> list[Figure]:
    """On all ranks together."""
    model, tp = bench.model(bench.policy), TPGroup(ranks)
    where, figures = f"{ranks.world_size} ranks", []
    for tokens in bench.sizes((1, 16), (1, 16, 64, 256)):
        options = {"dtype": bench.dtype, "device": bench.device}
        tensor = torch.zeros(tokens, model.config.hidden_size, **options)

        def sums(count: int, tensor=tensor) -> torch.Tensor:
            for _ in range(count):
                tp.sum_(tensor)
            return tensor

        case = f"{where}, sum of {tokens} tokens"
        note = f"{tensor.numel() * tensor.element_size()} bytes"
        eager_s = bench.seconds(partial(sums, 1))
        figures.append(Figure(f"{case}, eager", eager_s * 1e6, "us", note))
        if not tp.can_capture:
            continue
        rehearse(partial(sums, NUM_SUMS))
        graph_s = bench.seconds(capture(partial(sums, NUM_SUMS), None)[0]) / NUM_SUMS
        figures.append(Figure(f"{case}, in a graph", graph_s * 1e6, "us", note))
    for rows in bench.sizes((1, 4), (1, 4, 16)):
        for kind, group in (("alone", None), ("together", tp)):
            for launched in ("eager", "graphs") if tp.can_capture else ("eager",):
                case = f"{where}, {rows} rows {kind}, {launched}"
                is_eager = launched == "eager"
                forward = None
                if group is not None:
                    reduce = reduction_for(bench.device, is_eager)
                    forward = ShardedForward(
                        model, group, bench.kernel, enforce_eager=is_eager, reduce=reduce
                    )
                engine = bench.engine(model, rows, 256, enforce_eager=is_eager, forward=forward)
                start_decoding(engine, make_rows(model, rows, 64, 150))
                step_s = bench.seconds(partial(engine.step, SamplingParams()))
                engine.release()
                figures.append(Figure(case, step_s * 1e3, "ms per step"))
    return figures
