"""All that is to be measured on one GPU, in one command of under 8 minutes: python
benchmarks/gpu_suite.py [--json OUT]

No network, no downloads: models have random weights in the shapes of Qwen2.5-1.5B and 7B. Needs
torch, transformers and numpy. Each part is a generator of rows; a part that fails costs the rest
of its own rows, and after TOTAL_S there are no more. The file is written after every part. With
--cpu, or without a GPU, the same parts run at tiny sizes: their figures mean nothing, but they run.
docs/results/README.md says what each part is for.

Shape legend: R rows, N packed tokens of a forward.
"""

import argparse
import gc
import importlib.util
import itertools
import os
import pickle
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import metadata

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import shared
from benchmarks.gpu_bench import Bench, Figure, make_bench, make_rows, start_decoding
from benchmarks.shared import commit, write_json
from bubblespec.dist.ranks import Ranks
from bubblespec.engine.graphs import ForwardGraphs, capture, rehearse
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import forward_hidden
from bubblespec.engine.packing import pack_rows
from bubblespec.engine.ragged import packed
from bubblespec.engine.sampling import SamplingParams
from bubblespec.engine.tensor_parallel import TPGroup
from bubblespec.errors import InputError
from bubblespec.rollout.board import ProgressBoard, RankState

TOTAL_S = 460.0
NUM_SUMS = 50  # one after the other in a graph


def copy_bandwidth(bench: Bench) -> float:
    """Bytes per second, read and written, of a copy on the device."""
    size = (1 << 24) if bench.is_small else (1 << 31)
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * size / bench.seconds(lambda: target.copy_(source))


@torch.inference_mode()
def forwards(bench: Bench) -> Iterator[Figure]:
    """Forwards of N tokens, over 512 cached positions per row, against the time to read weights,
    keys and values once."""
    model = bench.model(bench.policy)
    slots, cached = bench.sizes((8, 40), (256, 512))
    bandwidth = copy_bandwidth(bench)
    yield Figure("copy bandwidth", bandwidth / 1e9, "GB/s")
    embedding = model.get_input_embeddings().weight
    weights = [p for p in model.base_model.parameters() if p is not embedding]
    weight_bytes = sum(p.numel() * p.element_size() for p in weights)
    cache = KVCache(slots, 2 * cached, num_spare=1)
    caches = (*cache.keys.values(), *cache.values.values())
    entry_bytes = sum(t[0, 0].numel() * t.element_size() for t in caches)
    captured = ForwardGraphs(model, cache, bench.kernel, 2048) if bench.has_graphs else None
    for num_tokens in bench.sizes((1, 2, 8, 16), tuple(1 << n for n in range(12))):
        rows = min(num_tokens, slots)
        count, start = np.full(rows, num_tokens // rows), np.full(rows, cached)
        tokens = np.random.default_rng(0).integers(1, model.config.vocab_size, num_tokens)

        def eager(start=start, count=count, tokens=tokens):
            packing = pack_rows(cache, start, count, bench.device)
            on_device = torch.from_numpy(tokens).to(bench.device)
            return forward_hidden(model, on_device, packing, bench.kernel)

        def replay(start=start, count=count, tokens=tokens):
            return captured.forward(tokens, pack_rows(cache, start, count, bench.device))

        limit_s = (weight_bytes + int((start + count).sum()) * entry_bytes) / bandwidth
        actions = {"eager": eager}
        if captured is not None:
            started = time.perf_counter()
            replay()
            bench.wait()
            if num_tokens == 1:
                note = f"{len(captured.shapes)} graphs"
                yield Figure("capture", time.perf_counter() - started, "s", note)
            packing = pack_rows(cache, start, count, bench.device)
            if captured.problem is None and captured.shape_of(packing) is not None:
                actions["graph"] = replay
        for name, action in actions.items():
            forward_s = bench.seconds(action)
            note = f"{forward_s / limit_s:.2f}x reading weights and keys"
            yield Figure(f"{num_tokens} tokens, {name}", forward_s * 1e3, "ms", note)


def decoding(bench: Bench) -> Iterator[Figure]:
    """Whole engine steps of R decoding rows, sampling included."""
    for name in bench.sizes(("tiny",), ("1.5B", "7B")):
        model = bench.model(name)
        for rows in bench.sizes((1, 8), (1, 8, 64, 256)):
            for eager in (True, False) if bench.has_graphs else (True,):
                engine = bench.engine(model, rows, 256, enforce_eager=eager)
                start_decoding(engine, make_rows(model, rows, 64, 150))
                repeats = 4 if bench.is_small else 20
                step_s = bench.seconds(partial(engine.step, SamplingParams()), repeats=repeats)
                case = f"{name}, {rows} rows, {'eager' if eager else 'graphs'}"
                yield Figure(case, rows / step_s, "tokens/s", f"{step_s * 1e3:.2f} ms per step")
                engine.release()


class FixedDrafts:
    """Proposes drafts of one length. wanted: the tokens of each row by its uid, or None for
    meaningless ones."""

    def __init__(self, length: int, wanted: dict[int, np.ndarray] | None = None):
        self.length, self.wanted = length, wanted

    def propose(self, rows, lengths, room, budget):
        if self.wanted is None:
            return packed([np.ones(self.length, np.int64)] * len(rows))
        places = zip(rows, lengths, strict=True)
        return packed([self.wanted[row.id.uid][n : n + self.length] for row, n in places])

    def observe(self, rows, tokens, num_gained, num_draft, num_accepted):
        pass


def windows(bench: Bench) -> Iterator[Figure]:
    """Whole engine steps in which each of R rows verifies a draft of w tokens."""
    model = bench.model(bench.policy)
    for rows in bench.sizes((2,), (1, 8, 64)):
        engine = bench.engine(model, rows, 640)
        start_decoding(engine, make_rows(model, rows, 64, 500))
        for window in bench.sizes((0, 3), (0, 1, 3, 7, 15, 31)):
            if rows * (window + 1) > engine.max_num_batched_tokens:
                continue
            step = partial(engine.step, SamplingParams(), FixedDrafts(window) if window else None)
            step_s, (_, load) = bench.seconds(step, repeats=3 if bench.is_small else 10), step()
            note = f"{load.tokens} tokens fed"
            yield Figure(f"{rows} rows, window {window}", step_s * 1e3, "ms per step", note)
        engine.release()


def composition(bench: Bench) -> Iterator[Figure]:
    """How many tokens change with the batch that a row is in: rows alone against rows together,
    decoded or verified, with graphs and without. Rows count up to their first difference, after
    which the texts have nothing in common."""
    model = bench.model(bench.policy)
    rows, length = bench.sizes((4, 20), (48 if bench.has_graphs else 12, 96))

    def generate(slots: int, eager: bool, drafts: FixedDrafts | None = None) -> dict:
        engine = bench.engine(model, slots, 192, enforce_eager=eager)
        made = engine.run(make_rows(model, rows, 32, length), SamplingParams(), drafts)
        engine.release()
        return {row.id.uid: row.tokens for row in made}

    alone = generate(1, eager=not bench.has_graphs)
    cases: dict[str, tuple] = {f"alone > {rows} rows": (rows, True)}
    if bench.has_graphs:
        cases[f"alone > {rows} rows, graphs"] = (rows, False)
    for window in (1, 7):
        drafts = FixedDrafts(window, alone)
        cases[f"alone > {rows} rows, windows of {window}"] = (rows, True, drafts)
    for case, arguments in cases.items():
        other, compared, parted = generate(*arguments), 0, 0
        for uid, tokens in alone.items():
            differs = np.flatnonzero(tokens != other[uid])
            compared += int(differs[0]) + 1 if len(differs) else len(tokens)
            parted += len(differs) > 0
        note = f"{parted} of {rows} rows part; {compared} tokens; {bench.dtype}"
        yield Figure(case, parted / compared, "of tokens", note)


# Several processes: one process has one process group.


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
                options = {"tp": group, "enforce_eager": launched == "eager"}
                engine = bench.engine(model, rows, 256, **options)
                start_decoding(engine, make_rows(model, rows, 64, 150))
                step_s = bench.seconds(partial(engine.step, SamplingParams()))
                engine.release()
                figures.append(Figure(case, step_s * 1e3, "ms per step"))
    return figures


PARTS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "forward": forwards,
    "decode": decoding,
    "windows": windows,
    "composition": composition,
    "ticks": ticks,
    "tp_tail": tp_tail,
}


def run_part(name: str, bench: Bench, end: float) -> dict:
    """Rows of a part, printed as they come, until `end` (time.perf_counter)."""
    gc.collect()  # the model of the part before
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    started, rows, error = time.perf_counter(), [], None

    def add(figure: Figure) -> None:
        rows.append(figure._asdict())
        value = "-" if figure.value is None else f"{figure.value:.4g}"
        print(f"| {name} | {figure.case} | {value} {figure.unit} | {figure.note} |", flush=True)

    try:
        for figure in PARTS[name](bench):
            add(figure)
            if time.perf_counter() > end:
                error = "stopped: no time was left"
                break
    except Exception as problem:  # whatever a driver or a kernel comes up with
        error = f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:200]
    if error:
        add(Figure(name, None, note=error))
    return {"rows": rows, "seconds": time.perf_counter() - started, "error": error}


def environment(bench: Bench) -> dict:
    """Where this ran, and on what."""
    packages = ("torch", "transformers", "numpy", "flash-attn")
    is_there = [importlib.util.find_spec(name.replace("-", "_")) is not None for name in packages]
    versions = {name: metadata.version(name) for name in itertools.compress(packages, is_there)}
    is_cuda = bench.device.type == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name() if is_cuda else f"{os.cpu_count()} CPUs",
        "versions": versions | {"python": platform.python_version(), "cuda": torch.version.cuda},
        "commit": commit(),
        "kernels": bench.kernels,
        "is_small": bench.is_small,
    }


def run(arguments: argparse.Namespace) -> None:
    if arguments.json:
        try:
            open(arguments.json, "x").close()
        except OSError as error:
            raise InputError(f"--json: {arguments.json}: {error.strerror}") from error
    bench = make_bench(arguments.cpu or not torch.cuda.is_available())
    result = environment(bench)
    print(", ".join(f"{key} {value}" for key, value in result.items() if key != "is_small"))
    print("| part | case | figure | note |\n|---|---|---|---|", flush=True)
    result["parts"] = {}
    end = time.perf_counter() + TOTAL_S
    for name in arguments.only:
        if time.perf_counter() > end:
            break
        result["parts"][name] = run_part(name, bench, end)
        write_json(arguments.json, result)


def main() -> int:
    parser = argparse.ArgumentParser(description="All that is to be measured on one GPU")
    parser.add_argument("--json", help="write the figures there; the file must not exist")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    torch.set_num_threads(1)
    return shared.main(lambda arguments, _: run(arguments), parser)


if __name__ == "__main__":
    sys.exit(main())
