"""Compile what the operations of triton_ops.py launch for GPUs that are not there: a driver that
names one, and launches that end with the compiled kernel. To be run by itself, without triton's
interpreter: `report` does."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

from bubblespec.engine.kv_cache import LayerCache
from bubblespec.engine.ops.softmax import AttentionOptions
from bubblespec.engine.ops.view import AttentionMetadata, Norm

ROOT = Path(__file__).resolve().parents[2]
# Bytes of shared memory that a block may have, by capability (CUDA C++ Programming Guide).
LIMITS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


class Kernel(NamedTuple):
    """What the compiler and ptxas say about a kernel."""

    name: str
    shared: int  # bytes
    stages: int
    registers: int
    spilled: int  # bytes
    copies: int  # asynchronous ones to shared memory
    widest: int  # bits of the widest load
    products: int  # of matrices, on tensor cores


def report(cases: list[tuple], cache: Path) -> list[list[Kernel]]:
    """The kernels of each case (capability, operation, arguments of its function below)."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.helpers.triton_compile", json.dumps(cases)]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=7200
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [[Kernel(*kernel) for kernel in kernels] for kernels in json.loads(run.stdout)]


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def make_view(max_q: int, max_keys: int) -> AttentionMetadata:
    whole = [zeros(number, dtype=torch.int32) for number in (8, 3, 2)]
    place, table = zeros(8, dtype=torch.int64), zeros(4, 20, dtype=torch.int32)
    return AttentionMetadata(place, *whole, table, max_q=max_q, max_keys=max_keys, split=512)


def attend(
    ops, tokens: int, group: int, sizes, window: int | None = None, keys: int = 4096,
    cap: float | None = None, has_sinks: bool = False, chunk: int | None = None,
):  # fmt: skip
    """tokens: of a sequence; group: query heads of a key/value head; sizes: of keys and values."""
    page = zeros(3, 2 * 256 * sum(sizes))  # of two heads
    parts = page.split([2 * 256 * size for size in sizes], dim=1)
    cache = (
        part.view(3, 2, 256, size).transpose(1, 2) for part, size in zip(parts, sizes, strict=True)
    )
    packing = SimpleNamespace(view=make_view(tokens, keys))
    query = zeros(8, 2 * group, sizes[0])
    sinks = zeros(2 * group) if has_sinks else None
    options = AttentionOptions(1.0, window, cap, sinks, chunk)
    ops.attend(query, packing, LayerCache(*cache, None), options)


def rope_store(ops, heads: int, size: int, rotary: int, has_norms: bool = False):
    cache = zeros(2, 2, 2, 256, size).transpose(2, 3)
    tables = (zeros(9, rotary // 2, dtype=torch.float32),) * 2 if rotary else None
    norms = (norm_of(size), norm_of(size)) if has_norms else None
    packing = SimpleNamespace(view=make_view(1, 512))
    ops.rope_store(
        zeros(8, heads + 4, size), packing, LayerCache(*cache, None), tables, head_norms=norms
    )


def norm_of(columns: int, has_offset: bool = False) -> Norm:
    return Norm(zeros(columns), 1e-6, torch.tensor(1e-6), has_offset)


def add_norm(ops, columns: int, has_offset: bool = False):
    ops.add_norm(zeros(8, columns), zeros(8, columns), norm_of(columns, has_offset))


def gated(ops, act: str):
    ops.gated(zeros(8, 9728), act)


def sample(ops, vocabulary: int, is_greedy: bool = False):
    from bubblespec.engine.ops import triton_sampling

    keys = zeros(8, 4, dtype=torch.int32)
    triton_sampling.sample(zeros(8, vocabulary), keys, seed=7, is_greedy=is_greedy)


def add_to(ops, size: int):
    training().add_to(zeros(size, dtype=torch.float32), zeros(size))


def round_into(ops, size: int):
    training().round_into(zeros(size), zeros(size, dtype=torch.float32))


def add_norm_backward(ops, columns: int):
    x, norm = zeros(8, columns).requires_grad_(), norm_of(columns)
    total, out = training().AddNorm.apply(x, x, norm.weight.requires_grad_(), norm)
    (total + out).sum().backward()


def rotate(ops, size: int, rotary: int):
    tables = (zeros(9, rotary // 2),) * 2
    position = zeros(8, dtype=torch.int64)
    training().rotate(zeros(8, 16, size), 14, position, tables, is_back=True)


def gated_backward(ops, act: str):
    training().Gated.apply(zeros(8, 9728).requires_grad_(), act).sum().backward()


def head(ops, vocabulary: int, beta: float | None = None):
    logits, target = zeros(8, vocabulary).requires_grad_(), zeros(8, dtype=torch.int64)
    how = None if beta is None else logits, vocabulary - 7, 0.7, beta or 0.0
    training().HeadValues.apply(logits, target, *how).sum().backward()


def training():
    from bubblespec.engine.ops import triton_training

    return triton_training


def rows(ops, num_stops: int):
    from bubblespec.engine.ops import triton_rows
    from bubblespec.engine.ops.view import AttentionMetadata, RowState

    int32 = partial(zeros, dtype=torch.int32)
    shapes = [(8, 64), (4, 8), (8, 4), (512,), (3, 8), (64,), (64, 4), (64,)]
    state = RowState(*(int32(*shape) for shape in shapes), zeros(128, dtype=torch.float64))
    view = AttentionMetadata(int32(64), int32(64), int32(9), int32(8), int32(9, 5), 4, 80, 64)
    triton_rows.stand(state)
    triton_rows.fill(state, int32(64), view, 16, 640)
    triton_rows.sampled(state, 64)
    token, stops = zeros(64, dtype=torch.int64), zeros(num_stops, dtype=torch.int32)
    triton_rows.accept(state, token, stops)


def states(ops, heads: int, size: int, max_q: int, has_beta: bool = True):
    from bubblespec.engine.ops import triton_states

    rows = triton_states.plan(make_view(max_q, 512), zeros(5, 2, dtype=torch.int32), 16, 640)
    wide, float32 = 3 * heads * size, partial(zeros, dtype=torch.float32)
    x = zeros(8, wide + 16)[:, :wide]
    mixed = triton_states.convolve(rows, max_q, zeros(5, 19, wide), x, zeros(wide, 4), None, True)
    q, k, v = mixed.unflatten(1, (3, heads, size)).unbind(1)
    waiting = triton_states.Waiting(
        float32(5, heads, size, size),
        zeros(5, 2, heads, 16, size),
        float32(5, heads, 16, size),
        float32(5, 2, heads, 16),
    )
    rates = float32(8, heads), float32(8, heads) if has_beta else None
    out = triton_states.advance(rows, waiting, q, k, v, *rates, 0.5, is_unit=has_beta)
    ops.gated_norm(out, v, norm_of(size))
    a, b = x[:, : 2 * heads].chunk(2, 1)
    ops.rates(a, b, zeros(heads), zeros(heads), 2.0)


class Driver:
    """Stands in for a CUDA driver; a device's number is its capability."""

    capability = 90

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def main(cases: list[list]) -> list[list[Kernel]]:
    import triton
    from triton.runtime.jit import JITFunction

    from bubblespec.engine.ops import triton_ops

    driver, compile_and_launch = Driver(), JITFunction.run
    kernels: list[Kernel] = []
    examined: dict[int, Kernel] = {}  # a kernel is compiled once
    triton.runtime.driver.set_active(driver)
    triton_ops.shared_memory = lambda device: LIMITS[driver.capability]
    triton.knobs.nvidia.dump_ptxas_log = True

    def compile_alone(function, *arguments, grid, warmup, **options):
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = compile_and_launch(function, *arguments, grid=grid, warmup=True, **options)
        if id(kernel) not in examined:
            examined[id(kernel)] = examine(kernel, log.getvalue())
        kernels.append(examined[id(kernel)])

    JITFunction.run = compile_alone
    reports = []
    for driver.capability, operation, *arguments in cases:
        kernels.clear()
        globals()[operation](triton_ops, *arguments)
        reports.append(list(kernels))
    return reports


def examine(kernel, log: str) -> Kernel:
    ptx = kernel.asm["ptx"]
    registers, spilled = (
        int(re.search(pattern, log)[1]) for pattern in (r"Used (\d+) reg", r"(\d+) bytes spill st")
    )
    loads = re.findall(r"\bld\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)
    widest = max(int(number or 1) * int(bits) for number, bits in loads)
    products = len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx))
    name, shared, stages = kernel.metadata.name, kernel.metadata.shared, kernel.metadata.num_stages
    copies = len(re.findall(r"\bcp\.async\.c[ag]", ptx))
    return Kernel(name, shared, stages, registers, spilled, copies, widest, products)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
