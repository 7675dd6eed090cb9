"""What the shared tail costs and gains, for gpu_suite.py: sums over ranks, and steps of all ranks
together against one rank's.

With one card NCCL has one rank, which has all of the weights: what is measured is the overhead of
exchanges and sampling.
"""

from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel

from benchmarks.gpu_parts import NEEDS_CUDA, SHAPES, Bench, Figure, build, make_rows, start_decoding
from benchmarks.gpu_processes import run_processes
from bubblespec.dist.ranks import Ranks
from bubblespec.engine.engine import Engine
from bubblespec.engine.graphs import capture, rehearse
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.engine.tensor_parallel import TPGroup

MOST_RANKS = 8
SUMS = 50  # one after the other in a graph


def shared(bench: Bench) -> Iterator[Figure]:
    """Sums of hidden states over ranks, eager and in a graph; steps of few rows, of one rank and of
    all together."""
    bench.forget()
    if bench.device.type == "cuda":
        yield from run_processes(measure, "nccl", min(torch.cuda.device_count(), MOST_RANKS), False)
    else:
        yield from run_processes(measure, "gloo", 2, True)


@torch.inference_mode()
def measure(bench: Bench, ranks: Ranks) -> list[Figure]:
    """On all ranks together."""
    model, tp = build(SHAPES[bench.policy], bench.device, bench.dtype), TPGroup(ranks)
    where = f"{ranks.world_size} ranks"
    figures = []
    for tokens in (1, 16) if bench.is_small else (1, 16, 64, 256):
        tensor = torch.zeros(
            tokens, model.config.hidden_size, dtype=bench.dtype, device=bench.device
        )
        note = f"{tensor.numel() * tensor.element_size()} bytes"
        eager_s = bench.seconds(lambda t=tensor: tp.sum_(t))
        figures.append(Figure(f"{where}, sum of {tokens} tokens, eager", eager_s * 1e6, "us", note))
        case = f"{where}, sum of {tokens} tokens, in a graph"
        if not tp.can_capture:
            figures.append(Figure(case, None, note=NEEDS_CUDA))
            continue
        graph_s = bench.seconds(recorded_sums(tp, tensor)) / SUMS
        figures.append(Figure(case, graph_s * 1e6, "us", f"{note}; of {SUMS} in a row"))
    for rows in (1, 4) if bench.is_small else (1, 4, 16):
        for kind, is_shared in (("alone", False), ("together", True)):
            for launched in ("eager", "graphs"):
                figures.append(
                    step(
                        bench,
                        model,
                        tp,
                        rows,
                        is_shared,
                        f"{where}, {rows} rows {kind}, {launched}",
                    )
                )
    return figures


def recorded_sums(tp: TPGroup, tensor: torch.Tensor) -> Callable[[], None]:
    """Replays SUMS sums, one after the other."""

    def sums() -> torch.Tensor:
        for _ in range(SUMS):
            tp.sum_(tensor)
        return tensor

    rehearse(sums)
    return capture(sums, None)[0]


def step(
    bench: Bench, model: PreTrainedModel, tp: TPGroup, rows: int, is_shared: bool, case: str
) -> Figure:
    """A step of the engine with so many rows. Alone, every rank has them; together, all of them
    have the same ones."""
    is_eager = case.endswith("eager")
    if not is_eager and not tp.can_capture:
        return Figure(case, None, note=NEEDS_CUDA)
    options = {"kernel": bench.kernel, "enforce_eager": is_eager}
    runner = ModelRunner(model, rows, 256, 0, tp=tp if is_shared else None, **options)
    engine = Engine(runner)
    start_decoding(engine, make_rows(model, rows, 64, 150))
    step_s = bench.seconds(lambda: engine.step(SamplingParams()))
    note = (
        ""
        if is_eager
        else "cannot be captured"
        if runner.graphs.is_off
        else f"{len(runner.graphs.shapes)} graphs"
    )
    engine.release()
    return Figure(case, step_s * 1e3, "ms a step", note)
