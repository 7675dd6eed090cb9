"""Measure one GPU next to what is expected, in under 45 minutes: python benchmarks/gpu_suite.py

Models have random weights in the shapes of Qwen2.5-0.5B, 1.5B and 7B. Needs torch, transformers,
numpy and pytest, and no network. Each part is a generator of rows with a time limit; a part that
fails or takes longer costs its own rows alone. docs/results/README.md says what each part is for.
"""

import argparse
import gc
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from typing import NamedTuple

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import gpu_forwards, gpu_programs, gpu_ranks, shared
from benchmarks.gpu_bench import Bench, Figure, make_bench
from benchmarks.shared import commit, write_json
from bubblespec.errors import InputError

TOTAL_S = 44 * 60.0


class Part(NamedTuple):
    """A generator of rows, and the seconds after which no further row is measured."""

    measure: Callable[[Bench], Iterator[Figure]]
    limit_s: float


PARTS = {
    "tests": Part(gpu_programs.gpu_tests, 240.0),
    "checks": Part(gpu_programs.checks, 40.0),
    "attention": Part(gpu_forwards.attention, 240.0),
    "decode": Part(gpu_forwards.decoding, 300.0),
    "windows": Part(gpu_forwards.windows, 100.0),
    "profile": Part(gpu_forwards.profile, 200.0),
    "captures": Part(gpu_ranks.captures, 300.0),
    "programs": Part(gpu_programs.programs, 300.0),
    "updates": Part(gpu_programs.updates, 200.0),
    "sampling": Part(gpu_programs.sampling, 180.0),
    "forward": Part(gpu_forwards.forwards, 120.0),
    "composition": Part(gpu_forwards.composition, 120.0),
    "ticks": Part(gpu_ranks.ticks, 120.0),
    "tp_tail": Part(gpu_ranks.tp_tail, 180.0),
}


def run_part(name: str, bench: Bench, end: float) -> dict:
    """Measure a part's rows and print each, until its limit or the time `end`."""
    gc.collect()  # the model of the part before
    if bench.is_cuda:
        torch.cuda.empty_cache()
    started, rows, error = time.perf_counter(), [], None

    def add(figure: Figure) -> None:
        rows.append(figure._asdict())
        measured = "-" if figure.value is None else f"{figure.value:.4g}"
        expected = "" if figure.expected is None else f"{figure.expected:.4g}"
        cells = (name, figure.case, measured, expected, figure.unit, figure.note)
        print(f"| {' | '.join(cells)} |", flush=True)

    try:
        for figure in PARTS[name].measure(bench):
            add(figure)
            if time.perf_counter() > min(end, started + PARTS[name].limit_s):
                error = "stopped: no time was left"
                break
    except Exception as problem:  # whatever a driver or a kernel comes up with
        error = f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:200]
    if error:
        add(Figure(name, None, note=error))
    return {"rows": rows, "seconds": time.perf_counter() - started, "error": error}


def environment(bench: Bench) -> dict:
    """Return the machine's hardware and versions, and the commit."""
    packages = ["torch", "transformers", "numpy"]
    packages += ["flash-attn"] * (importlib.util.find_spec("flash_attn") is not None)
    versions = {name: metadata.version(name) for name in packages}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name() if bench.is_cuda else f"{os.cpu_count()} CPUs",
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
    print("| part | case | measured | expected | unit | note |\n|---|---|---|---|---|---|")
    result["parts"] = {}
    end = time.perf_counter() + TOTAL_S
    for name in arguments.only:
        if time.perf_counter() > end:
            break
        result["parts"][name] = run_part(name, bench, end)
        write_json(arguments.json, result)


def main() -> int:
    parser = argparse.ArgumentParser(description="What to measure first on one GPU")
    parser.add_argument("--json", help="write the figures there; the file must not exist")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    torch.set_num_threads(1)
    return shared.main(lambda arguments, _: run(arguments), parser)


if __name__ == "__main__":
    sys.exit(main())
