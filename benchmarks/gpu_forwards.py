"""Parts of the GPU suite on forwards: attention, decode steps, verification, profile, composition.

Shape legend: R rows, N packed tokens of a forward, H query heads, K key/value heads, D head
dimension.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.nn.functional import pad, scaled_dot_product_attention

from benchmarks.gpu_bench import SHAPE_KEYS, SHAPES, Bench, Figure, make_rows
from bubblespec.engine.attention import VARLEN_KERNELS, reads_pages
from bubblespec.engine.batch import Load
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.graphs import ForwardGraphs, capture, rehearse
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import forward_hidden
from bubblespec.engine.packing import PAGE, Varlen, pack_rows
from bubblespec.engine.ragged import packed
from bubblespec.engine.sampling import SamplingParams
from bubblespec.tools.simulate.roofline import HOST_S, roofline

# Models, and the positions that each row attends to: docs/gpu-guide.md has their expected times.
CONTEXTS = {"0.5B": 400, "1.5B": 3072, "7B": 4096}
DECODING_ROWS = (16, 128)
CALLS = 20  # of attention in one graph
WINDOW = 4
# Tokens of a row, tokens of a sequence, and the bound on the latter; above 1 heads are apart.
KINDS_OF_CALL = {
    "heads in groups": (1, 1, 1),
    "heads apart": (1, 1, 2),
    "windows as single tokens": (WINDOW, 1, 1),
    "windows as sequences": (WINDOW, WINDOW, WINDOW),
}
HOST_GAP_US = 20.0  # longer gaps between kernels are the host's
KINDS = {
    "products": ("gemm", "gemv", "nvjet", "cutlass", "cublas", "linear", "matmul"),
    "attention": ("flash", "fmha", "attention"),
    "copies": ("memcpy", "memset", "aten::copy_"),
}


def graph_s(bench: Bench, action: Callable[[], torch.Tensor]) -> float:
    """Return the seconds of one of CALLS calls in a graph or, without graphs, of one by itself."""
    if not bench.has_graphs:
        return bench.seconds(action)

    def calls() -> torch.Tensor:
        return [action() for _ in range(CALLS)][-1]

    rehearse(calls)
    return bench.seconds(capture(calls, None)[0]) / CALLS


def attention(bench: Bench) -> Iterator[Figure]:
    """Time one layer's attention: KINDS_OF_CALL, then rows in graphs with more or less room."""
    for name in bench.sizes(("tiny",), ("7B", "1.5B", "0.5B")):
        shape = dict(zip(SHAPE_KEYS, SHAPES[name], strict=True))
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        dimension = shape["hidden_size"] // heads
        for rows in bench.sizes((2,), (1, 16, 128)):
            for context in bench.sizes((300,), (512, 4096, 8192)):
                case = f"{name}, {rows} rows at {context}"
                cache = random_cache(bench, rows, context, kv_heads, dimension)
                for kind, (fed, per_sequence, max_q) in KINDS_OF_CALL.items():
                    query = cache[0].new_empty(rows * fed, heads, dimension).normal_()
                    table = cache[2].repeat_interleave(fed // per_sequence, 0)
                    sequences = (*cache[:2], table), [per_sequence] * len(table), len(table)
                    us = 1e6 * graph_s(bench, attend(bench, query, *sequences, context, max_q))
                    load = rows, rows * fed, rows * context
                    cost = bench.cost(name)
                    expected = cost and 1e6 * cost.attention.seconds(*load) / cost.attention.layers
                    yield Figure(f"{case}, {kind}", us, "us per layer", "", expected)
        for tokens in bench.sizes((8,), (64, 256, 512, 1024)):
            cache = random_cache(bench, 4, bench.sizes((512,), (4096,))[0], kv_heads, dimension)
            query = cache[0].new_empty(tokens, heads, dimension).normal_()
            context, counts = cache[2].shape[1] * PAGE, [tokens // 4] * 4
            for room, max_q in ((4, tokens // 4), (tokens, tokens)):
                case = f"{name}, 4 rows of {tokens // 4} tokens, room for {room} of {max_q}"
                call = attend(bench, query, cache, counts, room, context, max_q)
                yield Figure(case, 1e6 * graph_s(bench, call), "us per layer")


def random_cache(
    bench: Bench, rows: int, context: int, kv_heads: int, dimension: int
) -> tuple[torch.Tensor, ...]:
    """Return keys and values, [P, PAGE, K, D], and the pages of each row, int32 [R, P / R]."""
    pages = -(-context // PAGE)
    shape, options = (rows * pages, PAGE, kv_heads, dimension), {"device": bench.device}
    key, value = (torch.randn(shape, dtype=bench.dtype, **options) for _ in range(2))
    return key, value, torch.arange(rows * pages, dtype=torch.int32, **options).view(rows, pages)


def attend(
    bench: Bench, query: torch.Tensor, cache: tuple, counts: list[int], room: int, context: int,
    max_q: int,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """Return a call of the engine's kernel.

    query: [N, H, D]; cache: see `random_cache`; counts: new tokens by row of its table; room:
    sequences, the last of which are empty. SDPA, on a CPU, repeats keys where max_q is above 1.
    """
    key, value, table = cache
    rows, length = len(table), table.shape[1] * PAGE
    if bench.kernel == "sdpa":
        query = query.unflatten(0, (rows, -1)).transpose(1, 2)
        key, value = (t[table.long()].flatten(1, 2)[:, :context] for t in (key, value))
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        fold = query.shape[1] // key.shape[1]
        if max_q == 1:
            query = query.unflatten(1, (-1, fold)).flatten(2, 3)
        else:
            key, value = (t.repeat_interleave(fold, 1) for t in (key, value))
        return partial(scaled_dot_product_attention, query, key, value)
    count = torch.tensor(counts + [0] * (room - rows), device=bench.device)
    cu_q = pad(count.cumsum(0), (1, 0)).to(torch.int32)
    cu_k = pad(table[:, 0] * PAGE, (0, room + 1 - rows))  # where there are no pages
    varlen = Varlen(cu_q, cu_k, (count > 0).to(torch.int32) * context, max_q, length, length)
    if reads_pages(bench.kernel):
        varlen.block_table = pad(table, (0, 0, 0, room - rows))
    else:
        key, value = key.flatten(0, 1), value.flatten(0, 1)
    options = {"scaling": query.shape[-1] ** -0.5, "window": None}
    return partial(VARLEN_KERNELS[bench.kernel], varlen, query, key, value, **options)


def decode_cases(bench: Bench, names: tuple[str, ...]) -> Iterator[tuple]:
    """Yield each case, its model, rows and context, and a function that makes its engine."""
    for name in bench.sizes(("tiny",), names):
        model, context = bench.model(name), CONTEXTS.get(name, 40)
        for rows in bench.sizes((2,), DECODING_ROWS):
            tokens = min(rows * context, 8192)
            make = partial(bench.decoding_engine, model, rows, context, 64)
            case = f"{name}, {rows} rows at {context}"
            yield case, name, rows, context, partial(make, max_num_batched_tokens=tokens)


def decoding(bench: Bench) -> Iterator[Figure]:
    """Time whole engine steps of decoding rows, sampling included."""
    for case, name, rows, context, make in decode_cases(bench, tuple(CONTEXTS)):
        is_compared = bench.has_graphs and rows == DECODING_ROWS[0]
        for eager in (True, False) if is_compared else (not bench.has_graphs,):
            engine = make(enforce_eager=eager)
            step_s = bench.seconds(partial(engine.step, SamplingParams()))
            engine.release()
            expected = None
            if bench.cost(name) is not None:
                expected = 1e3 * decode_seconds(bench.gpu, name.lower(), rows, context)
            how, note = "eager" if eager else "graphs", f"{rows / step_s:.0f} tokens/s"
            yield Figure(f"{case}, {how}", step_s * 1e3, "ms per step", note, expected)


def decode_seconds(gpu: str, model: str, rows: int, context: int) -> float:
    """Return the seconds of a decode step: `rows` that each attend to `context` positions."""
    return roofline(gpu, model).seconds(Load(rows, rows, 0, rows * context, 0, 0))


class FixedDrafts:
    """Proposes drafts of one length: tokens of `wanted` by uid."""

    def __init__(self, length: int, wanted: Mapping[int, np.ndarray]):
        self.length, self.wanted = length, wanted

    def propose(self, rows, lengths, room, budget):
        places = zip(rows, lengths, strict=True)
        return packed([self.wanted[row.id.uid][n : n + self.length] for row, n in places])

    def observe(self, rows, tokens, num_gained, num_draft, num_accepted):
        pass


def windows(bench: Bench) -> Iterator[Figure]:
    """Time whole engine steps in which each row verifies a draft of as many tokens."""
    model, meaningless = bench.model(bench.policy), defaultdict(lambda: np.ones(640, np.int64))
    for rows in bench.sizes((2,), (1, 8, 64)):
        engine = bench.decoding_engine(model, rows, 64, 576)
        for window in bench.sizes((0, 3), (0, 1, 3, 7, 15, 31)):
            if rows * (window + 1) > engine.max_num_batched_tokens:
                continue
            drafts = FixedDrafts(window, meaningless) if window else None
            step = partial(engine.step, SamplingParams(), drafts)
            ms, (_, load) = 1e3 * bench.seconds(step), step()
            cost = bench.cost(bench.policy)
            expected = cost and 1e3 * cost.seconds(load)
            note = f"{load.tokens} tokens fed"
            yield Figure(f"{rows} rows, window {window}", ms, "ms per step", note, expected)
        engine.release()


def profile(bench: Bench) -> Iterator[Figure]:
    """Time kernels of a decode step by kind, and the gaps between them."""
    num_steps = 5
    kinds = [torch.profiler.ProfilerActivity.CUDA] if bench.is_cuda else None
    for case, name, rows, context, make in decode_cases(bench, ("1.5B", "7B")):
        engine = make()
        for _ in range(3):
            engine.step(SamplingParams())
        with torch.profiler.profile(activities=kinds) as profiled:
            for _ in range(num_steps):
                engine.step(SamplingParams())
            bench.wait()
        engine.release()
        kernels = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profiled.events()
            if (event.device_type == DeviceType.CUDA) == bench.is_cuda and event.cpu_parent is None
        ]
        cost, load = bench.cost(name), (rows, rows, rows * context)
        attention_ms = cost and 1e3 * cost.attention.seconds(*load)
        expected = {"attention": attention_ms, "host": cost and 1e3 * HOST_S}
        for kind, ms in time_by_kind(kernels).items():
            each_ms = ms / num_steps
            yield Figure(f"{case}, {kind}", each_ms, "ms per step", "", expected.get(kind))


def time_by_kind(kernels: list[tuple[str, float, float]]) -> dict[str, float]:
    """Return milliseconds by kind of kernel, between kernels, and of the host.

    kernels: name, begin and end in microseconds, one after the other on one stream.
    """
    us = dict.fromkeys((*KINDS, "other kernels", "short gaps", "host"), 0.0)
    last = None
    for name, begin, end in sorted(kernels, key=lambda kernel: kernel[1]):
        is_of = (kind for kind, parts in KINDS.items() if any(p in name.lower() for p in parts))
        us[next(is_of, "other kernels")] += end - begin
        gap = max(begin - last, 0.0) if last is not None else 0.0
        us["host" if gap >= HOST_GAP_US else "short gaps"] += gap
        last = end if last is None else max(last, end)
    return {kind: total / 1e3 for kind, total in us.items()}


@torch.inference_mode()
def forwards(bench: Bench) -> Iterator[Figure]:
    """Compare forwards over 512 cached positions with reading weights, keys and values once."""
    model = bench.model(bench.policy)
    slots, cached = bench.sizes((8, 40), (256, 512))
    num_bytes = 1 << (24 if bench.is_small else 31)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    bandwidth = 2 * len(source) / bench.seconds(lambda: target.copy_(source))  # read and written
    yield Figure("copy bandwidth", bandwidth / 1e9, "GB/s")
    embedding = model.get_input_embeddings().weight
    weights = [p for p in model.base_model.parameters() if p is not embedding]
    weight_bytes = sum(p.numel() * p.element_size() for p in weights)
    cache = KVCache(slots, 2 * cached, num_spare=1)
    caches = (*cache.keys.values(), *cache.values.values())
    entry_bytes = sum(t[0, 0].numel() * t.element_size() for t in caches)
    graphs = ForwardGraphs(ModelForward(model, bench.kernel), cache, 2048)
    for num_tokens in bench.sizes((1, 2, 8, 16), tuple(1 << n for n in range(12))):
        rows = min(num_tokens, slots)
        count, start = np.full(rows, num_tokens // rows), np.full(rows, cached)
        tokens = np.random.default_rng(0).integers(1, model.config.vocab_size, num_tokens)
        pack = partial(pack_rows, cache, start, count, bench.device)

        def eager(pack=pack, tokens=tokens) -> torch.Tensor:
            on_device = torch.from_numpy(tokens).to(bench.device)
            return forward_hidden(model, on_device, pack(), bench.kernel)

        def replay(pack=pack, tokens=tokens) -> torch.Tensor | None:
            return graphs.forward(tokens, pack())

        actions = {"eager": eager}
        if bench.has_graphs and replay() is not None:  # the first call captures all graphs
            actions["graph"] = replay
        limit_s = (weight_bytes + int((start + count).sum()) * entry_bytes) / bandwidth
        for name, action in actions.items():
            forward_s = bench.seconds(action)
            note = f"{forward_s / limit_s:.2f}x reading weights and keys"
            yield Figure(f"{num_tokens} tokens, {name}", forward_s * 1e3, "ms", note)


def composition(bench: Bench) -> Iterator[Figure]:
    """Count tokens that change with the batch: rows alone against rows together.

    Rows count up to their first difference, after which the texts have nothing in common.
    """
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
