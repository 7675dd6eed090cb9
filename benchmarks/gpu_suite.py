"""All that is to be measured on one GPU, in one command of under 8 minutes: python
benchmarks/gpu_suite.py [--json OUT]

No network, no downloads: models have random weights in the shapes of Qwen2.5-1.5B and 7B. Needs
torch, transformers and numpy; the last part, `trainer`, all of requirements.txt. Each part has its
own time, after which it stops, and a part that fails costs the rest of its own rows. The file is
written after every part. With --cpu, or without a GPU, the same parts run at tiny sizes: their
figures mean nothing, but they run. docs/results/README.md says what each part is for.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata

import numpy as np
import torch
import transformers
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import gpu_parts, gpu_shared, gpu_ticks
from benchmarks.gpu_parts import NEEDS_CUDA, SHAPES, Bench, Figure, build, make_bench
from bubblespec.engine.model import forward_hidden, output_head
from bubblespec.engine.packing import pack_sequences
from bubblespec.errors import InputError

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOTAL_S = 460.0
CPU_PATIENCE = 10.0  # the small form takes seconds a part, but who knows on what machine


def trainer(bench: Bench) -> Iterator[Figure]:
    """What the trainer's tests cannot see on a CPU: fused AdamW and the driver's count of free
    memory."""
    bench.forget()
    for check in (adamw, free_memory):
        try:
            yield check(bench)
        except Exception as error:
            yield Figure(check.__name__, None, note=one_line(error))


def adamw(bench: Bench) -> Figure:
    """The first update of a bfloat16 model's float32 masters, which is -lr * g / (|g| + epsilon)
    for a gradient g."""
    from bubblespec.config import OptimConfig
    from bubblespec.learn.optimizer import Optimizer

    model = build(SHAPES[bench.policy] | {"num_hidden_layers": 2}, bench.device, torch.bfloat16)
    model.requires_grad_(True)
    config = OptimConfig(learning_rate=1e-3, max_grad_norm=0.0)
    optimizer = Optimizer(model, config, 10)
    tokens = torch.arange(60, device=bench.device)
    hidden = forward_hidden(model, tokens, pack_sequences([60], bench.device))
    torch.nn.functional.cross_entropy(
        output_head(model)(hidden[:-1]).float(), tokens[1:]
    ).backward()
    wanted = {
        param: master.double()
        - config.learning_rate
        * (g := optimizer.grads[param].double())
        / (g.abs() + config.adam_epsilon)
        for param, master in optimizer.updated.items()
    }
    optimizer.step(0)
    off = max(
        float((optimizer.updated[param] - value).abs().max()) for param, value in wanted.items()
    )
    is_fused = optimizer.adamw.param_groups[0]["fused"]
    return Figure(
        "AdamW, first update",
        off / config.learning_rate,
        "of the step",
        f"largest error; fused: {bool(is_fused)}",
    )


def free_memory(bench: Bench) -> Figure:
    if bench.device.type != "cuda":
        return Figure("free memory", None, note=NEEDS_CUDA)
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info()
    filler = torch.empty(1 << 30, dtype=torch.uint8, device=bench.device)
    after = torch.cuda.mem_get_info()[0]
    del filler
    return Figure(
        "free memory",
        (before - after) / 2**30,
        "GiB less",
        f"after taking 1 GiB, of {total / 2**30:.1f} GiB",
    )


# Seconds of each part on a GPU.
PARTS: dict[str, tuple[Callable[[Bench], Iterator[Figure]], float]] = {
    "parity": (gpu_parts.parity, 40.0),
    "forward": (gpu_parts.forwards, 70.0),
    "decode": (gpu_parts.decoding, 70.0),
    "windows": (gpu_parts.windows, 50.0),
    "noise": (gpu_parts.noise, 15.0),
    "composition": (gpu_parts.composition, 50.0),
    "paired": (gpu_parts.paired, 50.0),
    "ticks": (gpu_ticks.ticks, 45.0),
    "shared": (gpu_shared.shared, 40.0),
    "trainer": (trainer, 30.0),
}


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def run_part(name: str, bench: Bench, end: float) -> dict:
    """Rows of a part, printed as they come, until `end` (time.perf_counter) or its own."""
    part, budget_s = PARTS[name]
    budget_s *= CPU_PATIENCE if bench.is_small else 1.0
    started, rows, error = time.perf_counter(), [], None
    try:
        for figure in part(bench) if started < end else ():
            rows.append(figure._asdict())
            tqdm.write(line(name, figure))
            if time.perf_counter() > min(end, started + budget_s):
                error = "stopped: its time was over"
                break
    except Exception as problem:  # whatever a driver or a kernel comes up with
        error = one_line(problem)
    if not rows and not error:
        error = "left out: no time was left"
    if error:
        rows.append(Figure(name, None, note=error)._asdict())
        tqdm.write(line(name, Figure(name, None, note=error)))
    return {"rows": rows, "seconds": time.perf_counter() - started, "error": error}


def line(part: str, figure: Figure) -> str:
    value = "-" if figure.value is None else f"{figure.value:.4g}"
    return f"| {part} | {figure.case} | {value} {figure.unit} | {figure.note} |"


def environment(bench: Bench) -> dict:
    """Where this ran, and on what."""

    def said_by(*command: str) -> str | None:
        try:
            return (
                subprocess.run(
                    command, capture_output=True, text=True, check=True, cwd=ROOT
                ).stdout.strip()
                or None
            )
        except (OSError, subprocess.CalledProcessError):
            return None

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    has_gpu = bench.device.type == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name()
        if has_gpu
        else f"{platform.machine()}, {os.cpu_count()} CPUs",
        "driver": said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if has_gpu
        else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }
        | {
            "transformers": transformers.__version__,
            "numpy": np.__version__,
            "flash_attn": version("flash-attn"),
        },
        "commit": said_by("git", "describe", "--always", "--dirty", "--abbrev=12"),
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
    result = environment(bench) | {"parts": {}}
    print(
        ", ".join(
            f"{key} {value}" for key, value in result.items() if key not in ("parts", "is_small")
        )
    )
    print("| part | case | figure | note |\n|---|---|---|---|", flush=True)
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
    parser.add_argument(
        "--cpu", action="store_true", help="tiny sizes on the CPU, also where there is a GPU"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    torch.set_num_threads(1)
    try:
        run(parser.parse_args())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
