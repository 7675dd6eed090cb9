"""All that is to be measured on one GPU, in one command of under 8 minutes: python
benchmarks/gpu_suite.py [--json OUT]

No network, no downloads: models have random weights in the shapes of Qwen2.5-1.5B and 7B. Needs
torch, transformers and numpy; the last part, `trainer`, all of requirements.txt. Each part is a
generator of rows with its own time, after which it stops; a part that fails costs the rest of its
own rows. The file is written after every part. With --cpu, or without a GPU, the same parts run at
tiny sizes: their figures mean nothing, but they run. docs/results/README.md says what each part is
for.

Shape legend: R rows, N packed tokens of a forward.
"""

import argparse
import gc
import importlib.util
import json
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from bubblespec.dist.ranks import Ranks
from bubblespec.draft.proposer import make_proposer
from bubblespec.draft.suffix import History
from bubblespec.engine.engine import Engine
from bubblespec.engine.graphs import ForwardGraphs, can_capture, capture, rehearse
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import forward_hidden, output_head, prepare_model
from bubblespec.engine.noise import gumbel, stream_keys
from bubblespec.engine.packing import pack_rows, pack_sequences
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams, sample
from bubblespec.engine.tensor_parallel import TPGroup
from bubblespec.errors import InputError
from bubblespec.planner.costs import CostModel
from bubblespec.rollout.board import ProgressBoard, RankState
from bubblespec.types import Draft, Row, SampleId

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOTAL_S = 460.0
CPU_PATIENCE = 10.0  # times the budget of a part: the small form takes seconds on most machines
PROCESSES_S = 120.0
MAX_RANKS = 8
NUM_SUMS = 50  # one after the other in a graph
TICK_STEPS = 60
SHAPE_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
HEAD_KEYS = ("num_attention_heads", "num_key_value_heads", "tie_word_embeddings")
SHAPES = {  # SHAPE_KEYS, HEAD_KEYS
    "1.5B": (1536, 8960, 28, 151_936, 12, 2, True),
    "7B": (3584, 18_944, 28, 152_064, 28, 4, False),
    "tiny": (48, 64, 2, 300, 4, 2, True),
}


class Figure(NamedTuple):
    """One row of the table."""

    case: str
    value: float | None
    """None if it could not be measured, for the reason in `note`."""
    unit: str = ""
    note: str = ""


@dataclass
class Bench:
    """Device and sizes of all measurements."""

    device: torch.device
    dtype: torch.dtype
    kernels: list[str]
    """Attention kernels that are available: SDPA first, the one that the engine uses last."""
    is_small: bool
    """Tiny sizes, for a CPU."""
    _models: dict[str, PreTrainedModel] = field(default_factory=dict)

    @property
    def kernel(self) -> str:
        return self.kernels[-1]

    @property
    def policy(self) -> str:
        return "tiny" if self.is_small else "1.5B"

    @property
    def has_graphs(self) -> bool:
        return can_capture(self.device, self.kernel)

    def sizes(self, small: tuple, large: tuple) -> tuple:
        return small if self.is_small else large

    def model(self, name: str) -> PreTrainedModel:
        """One at a time stays in memory."""
        if name not in self._models:
            self.forget()
            self._models[name] = build(name, self.device, self.dtype)
        return self._models[name]

    def forget(self) -> None:
        self._models.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def engine(self, model: PreTrainedModel, rows: int, length: int, **options) -> Engine:
        options |= {"max_batch_tokens": max(2048, rows), "kernel": self.kernel}
        return Engine(ModelRunner(model, rows, length, 0, **options))

    def seconds(self, action: Callable[[], object], repeats: int = 10, warm_up: int = 2) -> float:
        """Median wall time of one call, until the device has done it."""
        times = []
        for _ in range(warm_up + repeats):
            started = time.perf_counter()
            action()
            self.wait()
            times.append(time.perf_counter() - started)
        return statistics.median(times[warm_up:])

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def make_bench(on_cpu: bool) -> Bench:
    if on_cpu:
        return Bench(torch.device("cpu"), torch.float32, ["sdpa"], True)
    operator = torch.ops.aten._flash_attention_forward.default._schema.arguments
    kernels = ["sdpa"] + ["varlen"] * any(a.name == "seqused_k" for a in operator)
    kernels += ["flash_attn"] * (importlib.util.find_spec("flash_attn") is not None)
    return Bench(torch.device("cuda"), torch.bfloat16, kernels, False)


@torch.inference_mode(False)  # some of the weights are changed later
def build(
    name: str, device: torch.device, dtype: torch.dtype, num_layers: int | None = None
) -> PreTrainedModel:
    """num_layers: in place of those of the shape."""
    config = dict(zip(SHAPE_KEYS + HEAD_KEYS, SHAPES[name], strict=True))
    config["num_hidden_layers"] = num_layers or config["num_hidden_layers"]
    torch.manual_seed(0)
    with torch.device(device):
        config = Qwen2Config(max_position_embeddings=4096, **config)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.requires_grad_(False)
    prepare_model(model, 4096)
    return model


def make_rows(model: PreTrainedModel, count: int, prompt: int, new: int | np.ndarray) -> list[Row]:
    """Rows with different random prompts of `prompt` tokens, so that no prefill is shared, and up
    to `new` response tokens."""
    rng = np.random.default_rng(7)
    prompts = rng.integers(1, model.config.vocab_size, (count, prompt)).tolist()
    limits = np.broadcast_to(new, count).tolist()
    return [
        Row(SampleId(100 + i, 0, 0), tuple(prompts[i]), limit) for i, limit in enumerate(limits)
    ]


def start_decoding(engine: Engine, rows: list[Row]) -> None:
    engine.add(rows)
    engine.step(SamplingParams())
    while len(engine.decoding()) < len(rows):
        engine.step(SamplingParams())


def parity(bench: Bench) -> Iterator[Figure]:
    """Every kernel in the model's type against SDPA in float32 with the same weights, on prompts,
    windows and decoding rows."""
    num_layers = 2 if bench.is_small else 8
    models = {
        dtype: build(bench.policy, bench.device, dtype, num_layers)
        for dtype in (torch.float32, torch.bfloat16)
    }
    # Exact: bfloat16 fits float32.
    models[torch.float32].load_state_dict(models[torch.bfloat16].state_dict())
    mixes = ([40, 1, 90, 7], [1, 1, 1, 1], [8, 1, 0, 17], [1, 70, 2, 1])
    tokens = np.random.default_rng(0).integers(1, SHAPES[bench.policy][3], 300)

    @torch.inference_mode()
    def logits(dtype: torch.dtype, kernel: str, uses_graph: bool) -> torch.Tensor:
        model, start, parts = models[dtype], np.zeros(4, np.int64), []
        cache = KVCache(4, 256, num_spare=1)
        captured = ForwardGraphs(model, cache, kernel, 512) if uses_graph else None
        for count in mixes:
            packing = pack_rows(cache, start.copy(), np.array(count), bench.device)
            fed = tokens[: sum(count)]
            if captured:
                hidden = captured.forward(fed, packing)
            else:
                on_device = torch.from_numpy(fed).to(bench.device)
                hidden = forward_hidden(model, on_device, packing, kernel)
            parts.append(output_head(model)(hidden[: sum(count)]).float())
            start += count
        return torch.cat(parts)

    exact = logits(torch.float32, "sdpa", False)
    note = f"largest logit {float(exact.abs().max()):.2f}"
    for kernel in bench.kernels:
        for uses_graph in (False, True) if can_capture(bench.device, kernel) else (False,):
            off = float((logits(torch.bfloat16, kernel, uses_graph) - exact).abs().max())
            yield Figure(f"bfloat16 {kernel}{', graphs' * uses_graph}", off, "logits", note)


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
        if captured is not None and num_tokens == 1:
            torch.cuda.empty_cache()
            free, started = torch.cuda.mem_get_info()[0], time.perf_counter()
            replay()
            bench.wait()
            megabytes = (free - torch.cuda.mem_get_info()[0]) / 1e6
            note = f"{len(captured.shapes)} graphs, {megabytes:.0f} MB"
            yield Figure("capture", time.perf_counter() - started, "s", note)
        for name, action in (("eager", eager), ("graph", replay)):
            case = f"{num_tokens} tokens, {name}"
            if name == "graph" and captured is None:
                continue
            packing = pack_rows(cache, start, count, bench.device)
            if name == "graph" and (captured.is_off or captured.shape_of(packing) is None):
                note = "cannot be captured" if captured.is_off else "too large"
                yield Figure(case, None, note=note)
                continue
            forward_s = bench.seconds(action)
            note = f"{forward_s / limit_s:.2f}x reading weights and keys"
            yield Figure(case, forward_s * 1e3, "ms", note)


def decoding(bench: Bench) -> Iterator[Figure]:
    """Whole engine steps of R decoding rows, sampling included, and the share of head, noise and
    sampling in them."""
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
            share_s = sampling_seconds(bench, model, rows)
            note = f"{share_s * 1e3:.2f} ms with the head"
            yield Figure(f"{name}, {rows} rows, sampling", share_s / step_s, "of a step", note)


def noise_keys(bench: Bench, count: int) -> torch.Tensor:
    index = np.arange(count)
    return torch.from_numpy(stream_keys(0, index, index, index, index)).to(bench.device)


@torch.inference_mode()
def sampling_seconds(bench: Bench, model: PreTrainedModel, rows: int) -> float:
    """From hidden states to tokens, noise included."""
    hidden = torch.randn(rows, model.config.hidden_size, device=bench.device, dtype=bench.dtype)
    position = torch.zeros(rows, dtype=torch.int64, device=bench.device)
    keys, head = noise_keys(bench, rows), output_head(model)
    return bench.seconds(lambda: sample(head(hidden), keys, position, SamplingParams()))


class FixedDrafts:
    """Proposes drafts of one length. wanted: the tokens of each row by its uid, or None for
    meaningless ones."""

    def __init__(self, length: int, wanted: dict[int, np.ndarray] | None = None):
        self.length, self.wanted = length, wanted

    def propose(self, rows, lengths, room, budget):
        if self.wanted is None:
            return [np.ones(self.length, np.int64)] * len(rows)
        return [
            self.wanted[row.id.uid][n : n + self.length]
            for row, n in zip(rows, lengths, strict=True)
        ]

    def observe(self, rows, tokens, num_draft, num_accepted):
        pass


def windows(bench: Bench) -> Iterator[Figure]:
    """Whole engine steps in which each of R rows verifies a draft of w tokens."""
    model = bench.model(bench.policy)
    for rows in bench.sizes((2,), (1, 8, 64)):
        engine = bench.engine(model, rows, 640)
        start_decoding(engine, make_rows(model, rows, 64, 500))
        for window in bench.sizes((0, 3), (0, 1, 3, 7, 15, 31)):
            if rows * (window + 1) > engine.max_batch_tokens:
                continue
            step = partial(engine.step, SamplingParams(), FixedDrafts(window) if window else None)
            step_s, (_, load) = bench.seconds(step, repeats=3 if bench.is_small else 10), step()
            note = f"{load.tokens} tokens fed"
            yield Figure(f"{rows} rows, window {window}", step_s * 1e3, "ms per step", note)
        engine.release()


def noise(bench: Bench) -> Iterator[Figure]:
    """Gumbel noise for a vocabulary of 152,064."""
    for rows in bench.sizes((1, 2), (1, 8, 64, 256)):
        keys = noise_keys(bench, rows)
        row_s = bench.seconds(lambda k=keys: gumbel(k, 152_064), repeats=5) / rows
        note = f"{row_s / 152_064 * 1e12:.1f} ps per token"
        yield Figure(f"{rows} rows", row_s * 1e3, "ms per row", note)


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


def paired(bench: Bench) -> Iterator[Figure]:
    """A rollout with a tail of lengths, without and with drafts that slightly other weights have
    made; all rows on one rank."""
    model = bench.model(bench.policy)
    count, longest = bench.sizes((6, 24), (64, 512))
    normal = statistics.NormalDist()
    quantile = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    limits = np.exp(0.93 * (quantile - quantile[-1])) * longest
    limits = np.maximum(limits, 2).astype(np.int64)
    plain, speculative = (bench.engine(model, count, longest + 64) for _ in range(2))
    proposer = make_proposer("bubble+suffix", History(0), CostModel(), has_drafts=True)

    def run(engine: Engine, drafts: dict[int, Draft] | None) -> tuple[list[Row], float, int]:
        rows, forwards = make_rows(model, count, 32, limits), engine.num_forwards
        if drafts is not None:
            proposer.begin()
            for row in rows:
                proposer.track(row, drafts[row.id.uid], version=1)
        engine.reset()
        bench.wait()
        started = time.perf_counter()
        engine.add(rows)
        while not engine.is_idle:
            forward_started = time.perf_counter()
            _, load = engine.step(SamplingParams(), None if drafts is None else proposer)
            if drafts is not None:
                proposer.cost.observe(*load[:4], time.perf_counter() - forward_started)
        bench.wait()
        return rows, time.perf_counter() - started, engine.num_forwards - forwards

    try:
        older, _, _ = run(plain, None)
        drafts = {row.id.uid: Draft(row.tokens.astype(np.int32), True, 0) for row in older}
        generator = torch.Generator(bench.device).manual_seed(1)
        options = {"generator": generator, "device": bench.device}
        with torch.no_grad():
            for param in model.parameters():
                if param.ndim > 1:
                    change = torch.randn(param.shape, dtype=param.dtype, **options)
                    param.add_(change, alpha=2e-3 * float(param.std()))
        for _ in range(2):  # the second turn counts: graphs are captured, and costs are known
            wanted, none_s, none_forwards = run(plain, None)
            got, spec_s, spec_forwards = run(speculative, drafts)
        pairs = zip(wanted, got, strict=True)
        differing = sum(not np.array_equal(a.tokens, b.tokens) for a, b in pairs)
        note = f"{none_forwards} forwards, {count} rows, {int(limits.sum())} tokens"
        yield Figure("none", none_s, "s", note)
        note = f"{spec_forwards} forwards; {differing} rows part at near ties"
        yield Figure("bubble+suffix", spec_s, "s", note)
        note = "drafts are given, their making is not in it"
        yield Figure("speed-up", none_s / spec_s, "x", note)
        acceptance = proposer.acceptance
        share = acceptance.accepted_tokens / max(acceptance.draft_tokens, 1)
        note = f"{acceptance.draft_tokens} drafted"
        yield Figure("drafted tokens accepted", share, "", note)
    finally:
        bench.forget()  # these weights are of no further use


# Several processes: one process has one process group.


def run_processes(
    measure: Callable[[Bench, Ranks], object], backend: str, world_size: int, is_small: bool
) -> object:
    """What `measure`, a function of this module, returns on rank 0. With NCCL each process has a
    card of its own. Raises RuntimeError if they take too long, and what a process raises."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, world_size, backend, is_small, measure)
        context = torch.multiprocessing.spawn(run_rank, arguments, world_size, join=False)
        end_s = time.monotonic() + PROCESSES_S
        try:
            while not context.join(max(end_s - time.monotonic(), 0.0)):
                if time.monotonic() > end_s:
                    raise RuntimeError(f"{backend}: its processes took {PROCESSES_S:g} s")
        finally:
            for process in context.processes:
                process.kill()
        with open(os.path.join(folder, "result"), "rb") as file:
            return pickle.load(file)


def run_rank(
    rank: int, folder: str, world_size: int, backend: str, is_small: bool, measure: Callable
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    where = f"file://{folder}/store"
    dist.init_process_group(backend, where, rank=rank, world_size=world_size)
    bench = make_bench(is_small)
    result = measure(bench, Ranks(bench.device, 60.0))
    if rank == 0:
        with open(os.path.join(folder, "result"), "wb") as file:
            pickle.dump(result, file)
    dist.barrier()
    dist.destroy_process_group()


def num_cards(bench: Bench) -> int:
    return min(torch.cuda.device_count(), MAX_RANKS) if bench.device.type == "cuda" else 0


def ticks(bench: Bench) -> Iterator[Figure]:
    """Decode steps with a progress tick asked for between them: on all cards with NCCL, or with
    gloo between two processes on one."""
    bench.forget()
    backend, world_size = ("nccl", num_cards(bench)) if num_cards(bench) > 1 else ("gloo", 2)
    where = f"{backend}, {world_size} processes"
    found = run_processes(measure_ticks, backend, world_size, bench.is_small)
    without_s, with_s, num_ticks = found
    yield Figure(f"{where}, no ticks", without_s * 1e3, "ms per step")
    note = f"{num_ticks} ticks in {TICK_STEPS} steps"
    yield Figure(f"{where}, ticks", with_s * 1e3, "ms per step", note)


def measure_ticks(bench: Bench, ranks: Ranks) -> tuple[float, float, int]:
    """Seconds of a decode step of 8 rows, without and with the trainer's progress board, which does
    not pause between two ticks; and the number of ticks."""
    model = build(bench.policy, bench.device, bench.dtype, 2 if bench.is_small else 14)
    engine = bench.engine(model, 8, 512)
    start_decoding(engine, make_rows(model, 8, 32, 400))
    for _ in range(5):
        engine.step(SamplingParams())
    board = ProgressBoard(ranks, 60.0, dist.get_backend(), interval_s=0.0)
    working, done = RankState(8), RankState(0)
    seconds = []
    for has_ticks in (False, True):
        ranks.barrier()
        bench.wait()
        started = time.perf_counter()
        for _ in range(TICK_STEPS):
            engine.step(SamplingParams())
            while has_ticks and board.poll(lambda: working) is not None:
                pass
        bench.wait()
        seconds.append((time.perf_counter() - started) / TICK_STEPS)
    num_ticks = board.num_ticks
    while not board.is_over:
        board.wait(lambda: done)
    return (*seconds, num_ticks)


def tp_tail(bench: Bench) -> Iterator[Figure]:
    """Sums of hidden states over ranks, eager and in a graph; steps of few rows, of one rank and of
    all together. With one card NCCL has one rank, which has all of the weights: what is measured is
    the overhead of exchanges and sampling."""
    bench.forget()
    backend, world_size = ("nccl", num_cards(bench)) if num_cards(bench) else ("gloo", 2)
    yield from run_processes(measure_tp, backend, world_size, bench.is_small)


@torch.inference_mode()
def measure_tp(bench: Bench, ranks: Ranks) -> list[Figure]:
    """On all ranks together."""
    model, tp = build(bench.policy, bench.device, bench.dtype), TPGroup(ranks)
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
                graphs = engine.runner.graphs
                note = "cannot be captured" if graphs is not None and graphs.is_off else ""
                engine.release()
                figures.append(Figure(case, step_s * 1e3, "ms per step", note))
    return figures


def trainer(bench: Bench) -> Iterator[Figure]:
    """What the trainer's tests cannot see on a CPU: fused AdamW and the driver's count of free
    memory."""
    bench.forget()
    yield adamw(bench)
    if bench.device.type == "cuda":
        yield free_memory(bench)


def adamw(bench: Bench) -> Figure:
    """The first update of a bfloat16 model's float32 masters, which is -lr * g / (|g| + epsilon)
    for a gradient g."""
    from bubblespec.config import OptimConfig
    from bubblespec.learn.optimizer import Optimizer

    model = build(bench.policy, bench.device, torch.bfloat16, num_layers=2)
    model.requires_grad_(True)
    config = OptimConfig(learning_rate=1e-3, max_grad_norm=0.0)
    optimizer = Optimizer(model, config, 10)
    tokens = torch.arange(60, device=bench.device)
    hidden = forward_hidden(model, tokens, pack_sequences([60], bench.device))
    logits = output_head(model)(hidden[:-1]).float()
    torch.nn.functional.cross_entropy(logits, tokens[1:]).backward()
    wanted = {}
    for param, master in optimizer.updated.items():
        gradient = optimizer.grads[param].double()
        change = gradient / (gradient.abs() + config.adam_epsilon)
        wanted[param] = master.double() - config.learning_rate * change
    optimizer.step(0)
    off = max(float((optimizer.updated[p] - value).abs().max()) for p, value in wanted.items())
    note = f"largest error; fused: {bool(optimizer.adamw.param_groups[0]['fused'])}"
    return Figure("AdamW, first update", off / config.learning_rate, "of the step", note)


def free_memory(bench: Bench) -> Figure:
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info()
    filler = torch.empty(1 << 30, dtype=torch.uint8, device=bench.device)
    less = (before - torch.cuda.mem_get_info()[0]) / filler.numel()
    note = f"after taking 1 GiB, of {total / 2**30:.1f} GiB"
    return Figure("free memory", less, "GiB less", note)


# Seconds of each part on a GPU.
PARTS: dict[str, tuple[Callable[[Bench], Iterator[Figure]], float]] = {
    "parity": (parity, 40.0),
    "forward": (forwards, 70.0),
    "decode": (decoding, 70.0),
    "windows": (windows, 50.0),
    "noise": (noise, 15.0),
    "composition": (composition, 50.0),
    "paired": (paired, 50.0),
    "ticks": (ticks, 45.0),
    "tp_tail": (tp_tail, 40.0),
    "trainer": (trainer, 30.0),
}


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def run_part(name: str, bench: Bench, end: float) -> dict:
    """Rows of a part, printed as they come, until `end` (time.perf_counter) or its own."""
    part, budget_s = PARTS[name]
    budget_s *= CPU_PATIENCE if bench.is_small else 1.0
    started, rows, error = time.perf_counter(), [], None

    def add(figure: Figure) -> None:
        rows.append(figure._asdict())
        value = "-" if figure.value is None else f"{figure.value:.4g}"
        tqdm.write(f"| {name} | {figure.case} | {value} {figure.unit} | {figure.note} |")

    try:
        for figure in part(bench) if started < end else ():
            add(figure)
            if time.perf_counter() > min(end, started + budget_s):
                error = "stopped: its time was over"
                break
    except Exception as problem:  # whatever a driver or a kernel comes up with
        error = one_line(problem)
    if not rows and not error:
        error = "left out: no time was left"
    if error:
        add(Figure(name, None, note=error))
    return {"rows": rows, "seconds": time.perf_counter() - started, "error": error}


def environment(bench: Bench) -> dict:
    """Where this ran, and on what."""

    def output_of(*command: str) -> str | None:
        try:
            return subprocess.check_output(command, text=True, cwd=ROOT).strip() or None
        except (OSError, subprocess.CalledProcessError):
            return None

    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in ("torch", "transformers", "numpy", "flash-attn"):
        is_there = importlib.util.find_spec(package.replace("-", "_")) is not None
        versions[package] = metadata.version(package) if is_there else None
    hardware, driver = f"{platform.machine()}, {os.cpu_count()} CPUs", None
    if bench.device.type == "cuda":
        hardware = torch.cuda.get_device_name()
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        driver = output_of(*query)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware,
        "driver": driver,
        "versions": versions,
        "commit": output_of("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "kernels": bench.kernels,
        "is_small": bench.is_small,
    }


def run(arguments: argparse.Namespace) -> None:
    if unknown := [name for name in arguments.only if name not in PARTS]:
        raise InputError(f"--only: no part {unknown[0]}; parts are {', '.join(PARTS)}")
    if arguments.json and os.path.exists(arguments.json):
        raise InputError(f"--json: {arguments.json} exists already; give another file")
    if arguments.json and not os.path.isdir(os.path.dirname(os.path.abspath(arguments.json))):
        raise InputError(f"--json: no folder for {arguments.json}")
    bench = make_bench(arguments.cpu or not torch.cuda.is_available())
    result = environment(bench)
    print(", ".join(f"{key} {value}" for key, value in result.items() if key != "is_small"))
    print("| part | case | figure | note |\n|---|---|---|---|", flush=True)
    result["parts"] = {}
    end = time.perf_counter() + TOTAL_S
    for name in tqdm(arguments.only or list(PARTS), unit="part"):
        result["parts"][name] = run_part(name, bench, end)
        if arguments.json:
            with open(arguments.json, "w", encoding="utf-8") as file:
                json.dump(result, file, indent=1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write the figures there; the file must not exist")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help=", ".join(PARTS))
    torch.set_num_threads(1)
    try:
        run(parser.parse_args())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
