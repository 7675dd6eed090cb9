"""Parts of the GPU suite on forwards: decode steps, kernels, profile, composition.

Shape legend: R rows, N packed tokens of a forward, H query heads, K key/value heads, D head
dimension.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch
from torch.autograd import DeviceType

from benchmarks import host_time
from benchmarks.gpu_bench import SHAPE_KEYS, SHAPES, Bench, Figure, left_out, make_rows
from bubblespec.engine import graphs
from bubblespec.engine.arrays import packed
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.kv_cache import PAGE, CachePacking, KVCache, pack_rows
from bubblespec.engine.ops import ops_for
from bubblespec.engine.ops.softmax import AttentionOptions
from bubblespec.engine.pages import Pages
from bubblespec.engine.sampling import Noise, sample, stream_counters, stream_keys
from bubblespec.tools.simulate.roofline import GPUS, HOST_S, SAMPLE_S

# Models, and the positions that each row attends to; docs/lab/gpu-times.md has expected times.
CONTEXTS = {"1.5B": 3072, "7B": 4096, "0.5B": 400}
DECODING_ROWS = (16, 128)
# Further cases: one row, and many that verify at a short context.
MORE_CASES = {"1.5B": ((1, 512), (64, 512)), "7B": ((1, 4096),), "0.5B": ((1, 400),)}
WINDOWS = (0, 3, 7)  # draft tokens of each row
NO_ROOM = "does not fit on this card"
CALLS = 20  # of a kernel in one graph
HOST_GAP_US = 20.0  # longer gaps between kernels are the host's
# By parts of a kernel's name; attention first, as FlashAttention's names tell of CUTLASS.
KINDS = {
    "attention": ("_attend", "_merge", "flash", "fmha", "attention"),
    "sampling": ("_sample",),
    "operations of layers": ("_add_norm", "_rope_store", "_gated"),
    "products": ("gemm", "gemv", "nvjet", "cutlass", "cublas", "linear", "matmul", "addmm"),
    "copies": ("memcpy", "memset", "aten::copy_"),
}


def decoding(bench: Bench) -> Iterator[Figure]:
    """Time whole engine steps, sampling included, of rows that decode and of rows that verify."""
    yield from copy_bandwidth(bench)
    for name in bench.sizes(("tiny",), tuple(CONTEXTS)):
        cases = [(rows, CONTEXTS.get(name)) for rows in DECODING_ROWS] + [*MORE_CASES.get(name, ())]
        model = None
        for rows, context in bench.sizes(((2, 40),), tuple(cases)):
            if not bench.decoding_fits(name, rows, context):
                yield left_out(f"{name}, {rows} rows at {context}", NO_ROOM)
                continue
            model = model or bench.model(name)
            made = bench.decoding_engine(ModelForward(model), rows, context, WINDOWS[-1])
            case = f"{name}, {rows} rows at {context}"
            yield first_step(made, case)
            for window in WINDOWS:
                drafts = FixedDrafts(window) if window else None
                step = partial(made.step, SamplingParams(), drafts)
                ms, (_, load) = 1e3 * bench.seconds(step), step()
                cost = bench.cost(name)
                expected, note = cost and 1e3 * cost.seconds(load), f"{load.tokens / ms:.1f} per ms"
                yield Figure(f"{case}, window {window}", ms, "ms per step", note, expected)
            made.release()


def first_step(engine: Engine, case: str) -> Figure:
    """Time the first step, which captures all graphs."""
    started = time.perf_counter()
    engine.step(SamplingParams())
    seconds, captured = time.perf_counter() - started, engine.runner.graphs
    pool = None if captured is None else captured.pool
    note = "no graphs" if pool is None else pool.problem or f"{len(pool.shapes)} graphs"
    return Figure(f"{case}, first step", seconds, "s", note)


def copy_bandwidth(bench: Bench) -> Iterator[Figure]:
    """Measure reading and writing of memory, on which all that is expected depends."""
    source = torch.zeros(
        1 << (24 if bench.is_small else 31), dtype=torch.uint8, device=bench.device
    )
    target = torch.empty_like(source)
    bandwidth = 2 * len(source) / bench.seconds(lambda: target.copy_(source))
    expected = GPUS[bench.gpu].memory / 1e9 if bench.gpu else None
    yield Figure("copy bandwidth", bandwidth / 1e9, "GB/s", "expected: data sheet", expected)


class FixedDrafts:
    """Proposes drafts of one length: tokens of `wanted` by prompt_id, or meaningless ones."""

    def __init__(self, length: int, wanted: Mapping[int, np.ndarray] | None = None):
        self.length, self.wanted = length, wanted

    def propose(self, rows, lengths, room, budget, ahead):
        if self.wanted is None:
            counts = np.full(len(rows), self.length)
            return np.ones(int(counts.sum()), np.int64), counts
        places = zip(rows, lengths, strict=True)
        return packed([self.wanted[row.id.prompt_id][n : n + self.length] for row, n in places])

    def observe(self, rows, tokens, num_gained, num_draft, num_accepted):
        pass


def kernels(bench: Bench) -> Iterator[Figure]:
    """Time attention of one layer, and sampling, as calls in one graph."""
    for name in bench.sizes(("tiny",), ("7B", "1.5B", "0.5B")):
        cost = bench.cost(name)
        for rows in bench.sizes((2,), (16, 128, 1)):
            for context in bench.sizes((300,), (4096,)):
                for fed in bench.sizes((1, 4), (1, 4, 8)):
                    us = 1e6 * graph_s(bench, attention_call(bench, name, rows, context, fed))
                    load = rows, rows * fed, rows * context
                    expected = cost and 1e6 * cost.attention.seconds(*load) / cost.attention.layers
                    case = f"attention, {name}, {rows} rows at {context}, {fed} tokens each"
                    yield Figure(case, us, "us per layer", "", expected)
    for count in bench.sizes((1, 4), (1, 16, 128, 512)):
        ms = 1e3 * graph_s(bench, sampling_call(bench, count, SamplingParams()))
        expected = 1e3 * SAMPLE_S * count if bench.gpu else None
        yield Figure(f"sampling, {count} positions", ms, "ms", "", expected)
    call = sampling_call(bench, count, SamplingParams(top_p=0.9))
    yield Figure(f"sampling, {count} positions, top_p", 1e3 * bench.seconds(call), "ms", "no graph")


def graph_s(bench: Bench, action: Callable[[], object]) -> float:
    """Return the seconds of one of CALLS calls in a graph or, without graphs, of one by itself."""
    if not bench.has_graphs:
        return bench.seconds(action)

    def calls() -> None:
        for _ in range(CALLS):
            action()

    action()  # what it keeps for later calls comes from the host
    graphs.rehearse(calls)
    return bench.seconds(graphs.capture(calls)) / CALLS


@torch.inference_mode()
def attention_call(
    bench: Bench, name: str, rows: int, context: int, fed: int
) -> Callable[[], torch.Tensor]:
    """Return a call of a layer's attention, with tiles as in graphs; each row feeds `fed` tokens.

    It returns [N, H, D]."""
    shape = dict(zip(SHAPE_KEYS, SHAPES[name], strict=True))
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    size, length = shape["hidden_size"] // heads, -(-context // PAGE) * PAGE
    # Pages on every device: without a GPU they are gathered.
    cache = KVCache(rows, length, 1, Pages.for_rows(rows, length, PAGE))
    count = np.full(rows, fed)
    packing = pack_rows(cache, context - count, count, bench.device)
    query = torch.randn(rows * fed, heads, size, dtype=bench.dtype, device=bench.device)
    layer = cache.layer(0, query[:, :kv_heads], query[:, :kv_heads])
    layer.keys.normal_()
    layer.values.normal_()
    if bench.has_graphs:
        use_tiles(packing, heads // kv_heads)
    attend = ops_for(bench.device, bench.dtype).attend
    options = AttentionOptions(size**-0.5)
    return torch.inference_mode()(partial(attend, query, packing, layer, options))


def use_tiles(packing: CachePacking, fold: int) -> None:
    """Let attention have the tiles that a graph for these rows would have."""
    tokens = [max(tile // fold, 1) for tile in graphs.TILES]
    widest = int(packing.count.max())
    view = packing.view
    fitting = next((most for most in tokens if widest <= most), tokens[-1])
    vars(packing)["view"] = view._replace(max_q=max(fitting, view.max_q))


def sampling_call(bench: Bench, count: int, params: SamplingParams) -> Callable[[], object]:
    """Return a call that samples random logits of the policy's vocabulary."""
    logits = torch.randn(count, SHAPES[bench.policy][3], dtype=bench.dtype, device=bench.device)
    position, zeros = np.arange(count), np.zeros(count, np.int64)
    ops, ids = ops_for(bench.device, bench.dtype), (zeros, zeros, zeros, position)
    if bench.has_graphs and not params.truncates:
        words = torch.from_numpy(stream_counters(*ids).view(np.int32)).to(bench.device)
        return partial(ops.draw, logits, Noise(words, 0), params)
    keys = torch.from_numpy(stream_keys(0, *ids)).to(bench.device)
    generated = torch.from_numpy(position).to(bench.device)
    return partial(sample, logits, keys, generated, params, ops.best_and_sum)


def profile(bench: Bench) -> Iterator[Figure]:
    """Time kernels of a decode step by kind and the gaps between them, then the host by itself."""
    for name in bench.sizes(("tiny",), ("1.5B", "7B")):
        model, context = None, CONTEXTS.get(name, 40)
        for rows in bench.sizes((2,), DECODING_ROWS):
            if not bench.decoding_fits(name, rows, context):
                yield left_out(f"{name}, {rows} rows at {context}", NO_ROOM)
                continue
            model = model or bench.model(name)
            yield from step_profile(bench, name, model, rows, context)
    for rows in bench.sizes((8,), (16, 128)):
        forwards = 3 if bench.is_small else 30
        expected = 1e3 * HOST_S if bench.gpu else None
        for has_drafts in (False, True):
            seconds, _ = host_time.step_seconds(rows, forwards, has_drafts)
            case = f"host, {rows} rows, {'own and suffix' if has_drafts else 'no'} drafts"
            note = "scheduling and proposals; expected: all of the host without drafts"
            yield Figure(case, 1e3 * float(np.median(seconds[:, 0])), "ms per step", note, expected)


def step_profile(bench: Bench, name: str, model, rows: int, context: int) -> Iterator[Figure]:
    """Time kernels of decode steps by kind."""
    num_steps, engine = 5, bench.decoding_engine(ModelForward(model), rows, context)
    for _ in range(3):
        engine.step(SamplingParams())
    found = kernels_of(bench, lambda: [engine.step(SamplingParams()) for _ in range(num_steps)])
    engine.release()
    expected: dict[str, float] = {}
    if (cost := bench.cost(name)) is not None:
        seconds = {"attention": cost.attention.seconds(rows, rows, rows * context)}
        seconds["products"] = cost.layers.seconds(rows) + cost.head.seconds(rows)
        seconds |= {"sampling": cost.sample_s * rows, "host": HOST_S}
        expected = {kind: 1e3 * of_s for kind, of_s in seconds.items()}
    for kind, ms in time_by_kind(found).items():
        case = f"{name}, {rows} rows at {context}, {kind}"
        yield Figure(case, ms / num_steps, "ms per step", "", expected.get(kind))


def kernels_of(bench: Bench, run: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Return name, begin and end in microseconds of each kernel, on a CPU of each operation."""
    activities = [torch.profiler.ProfilerActivity.CUDA] if bench.is_cuda else None
    with torch.profiler.profile(activities=activities) as profiled:
        run()
        bench.wait()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if (event.device_type == DeviceType.CUDA) == bench.is_cuda and event.cpu_parent is None
    ]


def time_by_kind(
    found: list[tuple[str, float, float]], kinds: dict[str, tuple[str, ...]] = KINDS
) -> dict[str, float]:
    """Return milliseconds by kind of kernel, between kernels, and of the host.

    found: name, begin and end in microseconds, one after the other on one stream."""
    us = dict.fromkeys((*kinds, "other kernels", "short gaps", "host"), 0.0)
    last = None
    for name, begin, end in sorted(found, key=lambda kernel: kernel[1]):
        is_of = (kind for kind, parts in kinds.items() if any(p in name.lower() for p in parts))
        us[next(is_of, "other kernels")] += end - begin
        gap = max(begin - last, 0.0) if last is not None else 0.0
        us["host" if gap >= HOST_GAP_US else "short gaps"] += gap
        last = end if last is None else max(last, end)
    return {kind: total / 1e3 for kind, total in us.items()}


def composition(bench: Bench) -> Iterator[Figure]:
    """Count tokens that change with the batch: rows alone against rows together.

    Rows count up to their first difference, after which the texts have nothing in common."""
    model = bench.model(bench.policy)
    rows, length = bench.sizes((4, 20), (48 if bench.has_graphs else 12, 96))

    def generate(slots: int, drafts: FixedDrafts | None = None) -> dict:
        engine = bench.engine(ModelForward(model), slots, 192)
        made = engine.run(make_rows(model, rows, 32, length), SamplingParams(), drafts)
        engine.release()
        return {row.id.prompt_id: row.tokens for row in made}

    alone = generate(1)
    cases: dict[str, FixedDrafts | None] = {f"alone > {rows} rows": None}
    cases |= {f"alone > {rows} rows, windows of {n}": FixedDrafts(n, alone) for n in (1, 7)}
    for case, drafts in cases.items():
        other, compared, parted = generate(rows, drafts), 0, 0
        for prompt_id, tokens in alone.items():
            differs = np.flatnonzero(tokens != other[prompt_id])
            compared += int(differs[0]) + 1 if len(differs) else len(tokens)
            parted += len(differs) > 0
        note = f"{parted} of {rows} rows part; {compared} tokens; {bench.dtype}"
        yield Figure(case, parted / compared, "of tokens", note)
