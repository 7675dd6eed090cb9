"""What gpu_suite.py measures: each part is a generator of rows, so that what it has found before a
failure counts.

Every part has a small form that runs on a CPU. Models have random weights in the shapes of Qwen2.5,
made on the device.

Shape legend: R rows, N packed tokens of a forward.
"""

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from bubblespec.draft.proposer import make_proposer
from bubblespec.draft.suffix import History
from bubblespec.engine.engine import Engine
from bubblespec.engine.graphs import ForwardGraphs, can_capture
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import forward_hidden, output_head, prepare_model
from bubblespec.engine.noise import gumbel, stream_keys
from bubblespec.engine.packing import pack_rows
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams, sample
from bubblespec.planner.costs import CostModel
from bubblespec.types import Draft, Row, SampleId

NEEDS_CUDA = "needs CUDA"
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 2}
SHAPES = {
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "vocab_size": 151_936,
        **HEADS,
    },
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "vocab_size": 152_064,
    }
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "tiny": {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
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

    def model(self, name: str) -> PreTrainedModel:
        """One at a time stays in memory."""
        if name not in self._models:
            self.forget()
            self._models[name] = build(SHAPES[name], self.device, self.dtype)
        return self._models[name]

    def forget(self) -> None:
        self._models.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def engine(self, model: PreTrainedModel, rows: int, length: int, **options) -> Engine:
        batch_tokens = max(2048, rows)
        return Engine(
            ModelRunner(
                model, rows, length, 0, max_batch_tokens=batch_tokens, kernel=self.kernel, **options
            )
        )

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
    shape: dict, device: torch.device, dtype: torch.dtype, max_length: int = 4096
) -> PreTrainedModel:
    options = {"tie_word_embeddings": True, "max_position_embeddings": max_length}
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**options | shape), dtype=dtype).eval()
    model.requires_grad_(False)
    prepare_model(model, max_length)
    return model


def make_rows(model: PreTrainedModel, count: int, prompt: int, new: int | np.ndarray) -> list[Row]:
    """Rows with different random prompts of `prompt` tokens, so that no prefill is shared, and up
    to `new` response tokens."""
    prompts = (
        np.random.default_rng(7).integers(1, model.config.vocab_size, (count, prompt)).tolist()
    )
    limits = np.broadcast_to(new, count).tolist()
    return [
        Row(SampleId(100 + i, 0, 0), tuple(p), n)
        for i, (p, n) in enumerate(zip(prompts, limits, strict=True))
    ]


def parity(bench: Bench) -> Iterator[Figure]:
    """Every kernel in the model's type against SDPA in float32 with the same weights, on prompts,
    windows and decoding rows."""
    shape = SHAPES[bench.policy] | {"num_hidden_layers": 2 if bench.is_small else 8}
    models = {dtype: build(shape, bench.device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    models[torch.float32].load_state_dict(
        models[torch.bfloat16].state_dict()
    )  # exact: bfloat16 fits float32
    vocab, mixes = shape["vocab_size"], ([40, 1, 90, 7], [1, 1, 1, 1], [8, 1, 0, 17], [1, 70, 2, 1])
    tokens = torch.from_numpy(np.random.default_rng(0).integers(1, vocab, 300)).to(bench.device)

    @torch.inference_mode()
    def logits(dtype: torch.dtype, kernel: str, uses_graph: bool) -> torch.Tensor:
        model, start, parts = models[dtype], np.zeros(4, np.int64), []
        cache = KVCache(4, 256, num_spare=1)
        captured = ForwardGraphs(model, cache, kernel, 512) if uses_graph else None
        for count in mixes:
            packing = pack_rows(cache, start.copy(), np.array(count), bench.device)
            fed = tokens[: sum(count)]
            hidden = (
                captured.forward(fed.cpu().numpy(), packing)
                if captured
                else forward_hidden(model, fed, packing, kernel)
            )
            parts.append(output_head(model)(hidden[: sum(count)]).float())
            start += count
        return torch.cat(parts)

    exact = logits(torch.float32, "sdpa", False)
    scale = float(exact.abs().max())
    for kernel in ("sdpa", "varlen", "flash_attn"):
        if kernel not in bench.kernels:
            yield Figure(
                f"bfloat16 {kernel}",
                None,
                note=NEEDS_CUDA if bench.is_small else "not installed, or torch is too old",
            )
            continue
        for uses_graph in (False, True) if can_capture(bench.device, kernel) else (False,):
            difference = float((logits(torch.bfloat16, kernel, uses_graph) - exact).abs().max())
            yield Figure(
                f"bfloat16 {kernel}{', graphs' * uses_graph}",
                difference,
                "logits",
                f"largest logit {scale:.2f}",
            )


def weight_bytes(model: PreTrainedModel) -> int:
    """What a forward without the output head reads, but for the few rows of the embedding."""
    embedding = model.get_input_embeddings().weight
    return sum(
        p.numel() * p.element_size() for p in model.base_model.parameters() if p is not embedding
    )


def copy_bandwidth(bench: Bench) -> float:
    """Bytes a second, read and written, of a copy on the device."""
    source = torch.zeros(
        (1 << 24) if bench.is_small else (1 << 31), dtype=torch.uint8, device=bench.device
    )
    target = torch.empty_like(source)
    return 2 * len(source) / bench.seconds(lambda: target.copy_(source))


@torch.inference_mode()
def forwards(bench: Bench) -> Iterator[Figure]:
    """Forwards of N tokens, over 512 cached positions a row, against the time to read weights, keys
    and values once."""
    model = bench.model(bench.policy)
    slots, cached = (8, 40) if bench.is_small else (256, 512)
    bandwidth = copy_bandwidth(bench)
    yield Figure("copy bandwidth", bandwidth / 1e9, "GB/s")
    cache = KVCache(slots, 2 * cached, num_spare=1)
    captured = (
        ForwardGraphs(model, cache, bench.kernel, 2048)
        if can_capture(bench.device, bench.kernel)
        else None
    )
    for num_tokens in (
        (1, 2, 8, 16) if bench.is_small else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    ):
        rows = min(num_tokens, slots)
        count = np.full(rows, num_tokens // rows)
        start = np.full(rows, cached)
        tokens = np.random.default_rng(0).integers(1, model.config.vocab_size, num_tokens)

        def eager(tokens=tokens, start=start, count=count):
            packing = pack_rows(cache, start, count, bench.device)
            return forward_hidden(
                model, torch.from_numpy(tokens).to(bench.device), packing, bench.kernel
            )

        def replay(tokens=tokens, start=start, count=count):
            return captured.forward(tokens, pack_rows(cache, start, count, bench.device))

        eager_s = bench.seconds(eager)
        entry = sum(
            t[0, 0].numel() * t.element_size()
            for t in (*cache.keys.values(), *cache.values.values())
        )
        limit_s = (weight_bytes(model) + int((start + count).sum()) * entry) / bandwidth
        yield Figure(
            f"{num_tokens} tokens, eager",
            eager_s * 1e3,
            "ms",
            f"{eager_s / limit_s:.2f}x reading weights and keys",
        )
        if captured is None:
            yield Figure(
                f"{num_tokens} tokens, graph",
                None,
                note=NEEDS_CUDA if bench.is_small else f"none with {bench.kernel}",
            )
            continue
        if num_tokens == 1:
            torch.cuda.empty_cache()
            free, started = torch.cuda.mem_get_info()[0], time.perf_counter()
            replay()
            bench.wait()
            size, graphs = (free - torch.cuda.mem_get_info()[0]) / 1e6, len(captured.shapes)
            yield Figure(
                "capture", time.perf_counter() - started, "s", f"{graphs} graphs, {size:.0f} MB"
            )
        if (
            captured.is_off
            or captured.shape_of(pack_rows(cache, start, count, bench.device)) is None
        ):
            yield Figure(
                f"{num_tokens} tokens, graph",
                None,
                note="cannot be captured" if captured.is_off else "too large",
            )
            continue
        replay_s = bench.seconds(replay)
        yield Figure(
            f"{num_tokens} tokens, graph",
            replay_s * 1e3,
            "ms",
            f"{replay_s / limit_s:.2f}x reading weights and keys",
        )


def decoding(bench: Bench) -> Iterator[Figure]:
    """Whole engine steps of R decoding rows, sampling included, and the share of head, noise and
    sampling in them."""
    steps = 4 if bench.is_small else 20
    for name in ("tiny",) if bench.is_small else ("1.5B", "7B"):
        model = bench.model(name)
        for rows in (1, 8) if bench.is_small else (1, 8, 64, 256):
            for eager in (True, False) if can_capture(bench.device, bench.kernel) else (True,):
                engine = bench.engine(model, rows, 256, enforce_eager=eager)
                start_decoding(engine, make_rows(model, rows, 64, 150))
                step_s = bench.seconds(partial(engine.step, SamplingParams()), repeats=steps)
                case = f"{name}, {rows} rows, {'eager' if eager else 'graphs'}"
                yield Figure(case, rows / step_s, "tokens/s", f"{step_s * 1e3:.2f} ms a step")
                engine.release()
            sample_s = sampling_seconds(bench, model, rows)
            yield Figure(
                f"{name}, {rows} rows, sampling",
                sample_s / step_s,
                "of a step",
                f"{sample_s * 1e3:.2f} ms with the head",
            )


@torch.inference_mode()
def sampling_seconds(bench: Bench, model: PreTrainedModel, rows: int) -> float:
    """From hidden states to tokens, noise included."""
    hidden = torch.randn(rows, model.config.hidden_size, device=bench.device, dtype=bench.dtype)
    keys, position = (
        noise_keys(bench, rows),
        torch.zeros(rows, dtype=torch.int64, device=bench.device),
    )
    return bench.seconds(
        lambda: sample(output_head(model)(hidden), keys, position, SamplingParams())
    )


def start_decoding(engine: Engine, rows: list[Row]) -> None:
    engine.add(rows)
    engine.step(SamplingParams())
    while len(engine.decoding()) < len(rows):
        engine.step(SamplingParams())


def noise_keys(bench: Bench, count: int) -> torch.Tensor:
    index = np.arange(count)
    return torch.from_numpy(stream_keys(0, index, index, index, index)).to(bench.device)


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
    steps = 3 if bench.is_small else 10
    for rows in (2,) if bench.is_small else (1, 8, 64):
        engine = bench.engine(model, rows, 640)
        start_decoding(engine, make_rows(model, rows, 64, 500))
        for window in (0, 3) if bench.is_small else (0, 1, 3, 7, 15, 31):
            if rows * (window + 1) > engine.max_batch_tokens:
                continue
            step = partial(engine.step, SamplingParams(), FixedDrafts(window) if window else None)
            step_s, (_, load) = bench.seconds(step, repeats=steps), step()
            yield Figure(
                f"{rows} rows, window {window}",
                step_s * 1e3,
                "ms a step",
                f"{load.tokens} tokens fed",
            )
        engine.release()


def noise(bench: Bench) -> Iterator[Figure]:
    """Gumbel noise for a vocabulary of 152,064."""
    for rows in (1, 2) if bench.is_small else (1, 8, 64, 256):
        keys = noise_keys(bench, rows)
        noise_s = bench.seconds(lambda k=keys: gumbel(k, 152_064), repeats=5)
        yield Figure(
            f"{rows} rows",
            noise_s / rows * 1e3,
            "ms a row",
            f"{noise_s / rows / 152_064 * 1e12:.1f} ps a token",
        )


def composition(bench: Bench) -> Iterator[Figure]:
    """How many tokens change with the batch that a row is in: rows alone against rows together,
    decoded or verified, with graphs and without. Rows count up to their first difference, after
    which the texts have nothing in common."""
    model = bench.model(bench.policy)
    has_graphs = can_capture(bench.device, bench.kernel)
    rows, length = (4, 20) if bench.is_small else (48 if has_graphs else 12, 96)

    def generate(
        slots: int, eager: bool, drafts: FixedDrafts | None = None
    ) -> dict[int, np.ndarray]:
        engine = bench.engine(model, slots, 192, enforce_eager=eager)
        made = engine.run(make_rows(model, rows, 32, length), SamplingParams(), drafts)
        result = {row.id.uid: row.tokens for row in made}
        engine.release()
        return result

    alone = generate(1, eager=not has_graphs)
    cases: list[tuple[str, tuple]] = [(f"alone > {rows} rows", (rows, True))]
    if has_graphs:
        cases.append((f"alone > {rows} rows, graphs", (rows, False)))
    cases += [
        (f"alone > {rows} rows, windows of {w}", (rows, True, FixedDrafts(w, alone)))
        for w in (1, 7)
    ]
    for case, arguments in cases:
        other = generate(*arguments)
        compared, parted = 0, 0
        for uid, tokens in alone.items():
            differs = np.flatnonzero(tokens != other[uid])
            compared += int(differs[0]) + 1 if len(differs) else len(tokens)
            parted += len(differs) > 0
        yield Figure(
            case,
            parted / compared,
            "of tokens",
            f"{parted} of {rows} rows part; {compared} tokens; {bench.dtype}",
        )
    yield Figure("batch-invariant settings", None, note="the engine has no such switch")


def paired(bench: Bench) -> Iterator[Figure]:
    """A rollout with a tail of lengths, without and with drafts that slightly other weights have
    made; all rows on one rank."""
    model = bench.model(bench.policy)
    count, longest = (6, 24) if bench.is_small else (64, 512)
    quantile = [statistics.NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
    limits = np.maximum(np.exp(0.93 * (np.array(quantile) - quantile[-1])) * longest, 2).astype(
        np.int64
    )
    plain, speculative = (
        bench.engine(model, count, longest + 64),
        bench.engine(model, count, longest + 64),
    )
    proposer = make_proposer("bubble+suffix", History(0), CostModel(), has_drafts=True)

    def run(engine: Engine, observe: bool) -> tuple[list[Row], float, int]:
        rows, forwards = make_rows(model, count, 32, limits), engine.num_forwards
        if observe:
            proposer.begin()
            for row in rows:
                proposer.track(row, drafts[row.id.uid], version=1)
        engine.reset()
        bench.wait()
        started = time.perf_counter()
        engine.add(rows)
        while not engine.is_idle:
            forward_started = time.perf_counter()
            _, load = engine.step(SamplingParams(), proposer if observe else None)
            if observe:
                proposer.cost.observe(*load[:4], time.perf_counter() - forward_started)
        bench.wait()
        return rows, time.perf_counter() - started, engine.num_forwards - forwards

    try:
        drafts = {
            row.id.uid: Draft(row.tokens.astype(np.int32), True, 0) for row in run(plain, False)[0]
        }
        generator = torch.Generator(bench.device).manual_seed(1)
        with torch.no_grad():
            for param in model.parameters():
                if param.ndim > 1:
                    change = torch.randn(
                        param.shape, generator=generator, device=param.device, dtype=param.dtype
                    )
                    param.add_(change, alpha=2e-3 * float(param.std()))
        for _ in range(2):  # the second turn counts: graphs are captured, and costs are known
            wanted, none_s, none_forwards = run(plain, False)
            got, spec_s, spec_forwards = run(speculative, True)
        counts = proposer.acceptance
        differing = sum(
            not np.array_equal(a.tokens, b.tokens) for a, b in zip(wanted, got, strict=True)
        )
        yield Figure(
            "none",
            none_s,
            "s",
            f"{none_forwards} forwards, {count} rows, {int(limits.sum())} tokens",
        )
        yield Figure(
            "bubble+suffix",
            spec_s,
            "s",
            f"{spec_forwards} forwards; {differing} rows part at near ties",
        )
        yield Figure(
            "speed-up", none_s / spec_s, "x", "drafts are given, their making is not in it"
        )
        yield Figure(
            "drafted tokens accepted",
            counts.accepted_tokens / max(counts.draft_tokens, 1),
            "",
            f"{counts.draft_tokens} drafted",
        )
    finally:
        bench.forget()  # these weights are of no further use
