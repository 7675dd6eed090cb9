"""What progress ticks cost a decoding rank, for gpu_suite.py: in processes of their own, as a process has one process group."""

import multiprocessing
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from benchmarks.gpu_parts import NEEDS_CUDA, SHAPES, Bench, Figure, build, make_bench, make_rows, start_decoding
from bubblespec.engine.sampling import SamplingParams
from bubblespec.ranks.collectives import Ranks, all_gather
from bubblespec.ranks.progress import NUM_NUMBERS, ProgressBoard, RankState

TICK_STEPS = 60
PATIENCE_S = 120.0


def ticks(bench: Bench) -> Iterator[Figure]:
    """Decode steps with a progress tick asked for between them: gloo between two processes, NCCL in one."""
    bench.forget()
    for backend, world_size in (("gloo", 2), ("nccl", 1)):
        if backend == "nccl" and bench.device.type != "cuda":
            yield Figure("nccl, 1 process", None, note=NEEDS_CUDA)
            continue
        without_s, with_s, num_ticks = tick_processes(backend, world_size, bench.is_small)
        yield Figure(f"{backend}, {world_size} processes, no ticks", without_s * 1e3, "ms a step")
        yield Figure(
            f"{backend}, {world_size} processes, ticks", with_s * 1e3, "ms a step", f"{num_ticks} ticks in {TICK_STEPS} steps"
        )


def tick_processes(backend: str, world_size: int, is_small: bool) -> tuple[float, float, int]:
    """The result of `decode_with_ticks` on rank 0. Raises RuntimeError if a process fails."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (world_size, server.port, backend, is_small, sender)
    processes = [context.Process(target=decode_with_ticks, args=(r, *arguments), daemon=True) for r in range(world_size)]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not receiver.poll(0.1):
            if any(p.exitcode for p in processes) or time.monotonic() > deadline:
                raise RuntimeError(f"{backend}: a process ended early or took more than {PATIENCE_S:g} s")
        return receiver.recv()
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def decode_with_ticks(rank: int, world_size: int, port: int, backend: str, is_small: bool, sender) -> None:
    """One process: TICK_STEPS steps of 8 rows without ticks, then with them. Seconds a step of both, and ticks, to `sender`."""
    torch.set_num_threads(1)
    bench = make_bench(is_small)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    shape = SHAPES[bench.policy] | {"num_hidden_layers": 2 if is_small else 14}
    model = build(shape, bench.device, bench.dtype)
    engine = bench.engine(model, 8, 512)
    start_decoding(engine, make_rows(model, 8, 32, 400))
    for _ in range(5):
        engine.step(SamplingParams())
    between, finish = (nccl_tick if backend == "nccl" else board_tick)(bench)
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
    num_ticks = finish()
    if rank == 0:
        sender.send((*seconds, num_ticks))
    dist.barrier()
    dist.destroy_process_group()


def board_tick(bench: Bench) -> tuple[Callable[[], None], Callable[[], int]]:
    """The trainer's progress board, without its pause between two ticks: what to do after a step, and what ends it and gives the
    number of ticks."""
    board = ProgressBoard(Ranks(bench.device, 60.0), 60.0, "gloo", interval_s=0.0)
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
    """The collective of a tick as the board posts it on NCCL, which it does not with one rank: on a stream of its own."""
    local, everyone = (torch.zeros(NUM_NUMBERS, dtype=torch.float64, device=bench.device) for _ in range(2))
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
