"""What progress ticks cost a decoding rank, for gpu_suite.py."""

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from benchmarks.gpu_parts import NEEDS_CUDA, SHAPES, Bench, Figure, build, make_rows, start_decoding
from benchmarks.gpu_processes import run_processes
from bubblespec.dist.ranks import Ranks, all_gather
from bubblespec.engine.sampling import SamplingParams
from bubblespec.rollout.board import NUM_NUMBERS, ProgressBoard, RankState

TICK_STEPS = 60


def ticks(bench: Bench) -> Iterator[Figure]:
    """Decode steps with a progress tick asked for between them: gloo between two processes, NCCL in
    one."""
    bench.forget()
    for backend, world_size, tick in (("gloo", 2, with_board), ("nccl", 1, with_nccl)):
        if backend == "nccl" and bench.device.type != "cuda":
            yield Figure("nccl, 1 process", None, note=NEEDS_CUDA)
            continue
        without_s, with_s, num_ticks = run_processes(tick, backend, world_size, bench.is_small)
        yield Figure(f"{backend}, {world_size} processes, no ticks", without_s * 1e3, "ms a step")
        yield Figure(
            f"{backend}, {world_size} processes, ticks",
            with_s * 1e3,
            "ms a step",
            f"{num_ticks} ticks in {TICK_STEPS} steps",
        )


def with_board(bench: Bench, ranks: Ranks) -> tuple[float, float, int]:
    """See `decode`."""
    return decode(bench, *board_tick(ranks))


def with_nccl(bench: Bench, ranks: Ranks) -> tuple[float, float, int]:
    """See `decode`."""
    return decode(bench, *nccl_tick(bench))


def decode(
    bench: Bench, between: Callable[[], None], finish: Callable[[], int]
) -> tuple[float, float, int]:
    """TICK_STEPS steps of 8 rows without ticks, then with them: seconds a step of both, and the
    number of ticks."""
    shape = SHAPES[bench.policy] | {"num_hidden_layers": 2 if bench.is_small else 14}
    model = build(shape, bench.device, bench.dtype)
    engine = bench.engine(model, 8, 512)
    start_decoding(engine, make_rows(model, 8, 32, 400))
    for _ in range(5):
        engine.step(SamplingParams())
    seconds = []
    for action in (lambda: None, between):
        dist.barrier()
        bench.wait()
        started = time.perf_counter()
        for _ in range(TICK_STEPS):
            engine.step(SamplingParams())
            action()
        bench.wait()
        seconds.append((time.perf_counter() - started) / TICK_STEPS)
    return (*seconds, finish())


def board_tick(ranks: Ranks) -> tuple[Callable[[], None], Callable[[], int]]:
    """The trainer's progress board, without its pause between two ticks: what to do after a step,
    and what ends it and gives the number of ticks."""
    board = ProgressBoard(ranks, 60.0, "gloo", interval_s=0.0)
    state, done = (RankState(unfinished_rows) for unfinished_rows in (8, 0))

    def between() -> None:
        while board.poll(lambda: state) is not None:
            pass

    def finish() -> int:
        num_ticks = board.num_ticks
        while not board.is_over:
            board.wait(lambda: done)
        return num_ticks

    return between, finish


def nccl_tick(bench: Bench) -> tuple[Callable[[], None], Callable[[], int]]:
    """The collective of a tick as the board posts it on NCCL, which it does not with one rank: on a
    stream of its own."""
    local, everyone = (
        torch.zeros(NUM_NUMBERS, dtype=torch.float64, device=bench.device) for _ in range(2)
    )
    stream, works = torch.cuda.Stream(), []

    def between() -> None:
        if works and not works[-1].is_completed():
            return
        with torch.cuda.stream(stream):
            local.copy_(torch.zeros(NUM_NUMBERS, dtype=torch.float64))
            works.append(all_gather(everyone, local, async_op=True))

    def finish() -> int:
        bench.wait()
        return len(works)

    return between, finish
