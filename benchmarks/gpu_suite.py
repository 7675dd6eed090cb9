"""Measure one GPU next to what is expected, in ten minutes: python benchmarks/gpu_suite.py

Models have random weights in the shapes of Qwen2.5-0.5B, 1.5B and 7B. Needs torch, transformers,
numpy and pytest, and no network; the paired runs and programs need a run's other packages, too.
Parts come in the order of their worth. Each is a generator of rows with a time limit; a part that
fails or takes longer costs its own rows alone. docs/results/README.md says what each part is for.
"""

import argparse
import gc
import importlib.util
import os
import platform
import signal
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

MINUTES = 10.0
INTERRUPT = 1.5  # limits after which a part is left in the middle of a row


class Part(NamedTuple):
    """A generator of rows, and the seconds of MINUTES after which no further row is measured."""

    measure: Callable[[Bench], Iterator[Figure]]
    limit_s: float


PARTS = {
    "tests": Part(gpu_programs.gpu_tests, 60.0),
    "decode": Part(gpu_forwards.decoding, 80.0),
    "paired": Part(gpu_programs.paired, 120.0),
    "kernels": Part(gpu_forwards.kernels, 40.0),
    "profile": Part(gpu_forwards.profile, 40.0),
    "updates": Part(gpu_programs.updates, 60.0),
    "programs": Part(gpu_programs.programs, 120.0),
    "composition": Part(gpu_forwards.composition, 30.0),
    "tp_tail": Part(gpu_ranks.tp_tail, 50.0),
}


def run_part(name: str, bench: Bench, limit_s: float, result: dict, path: str | None) -> None:
    """Measure a part's rows within a limit; print each, and write the result so far."""
    gc.collect()  # the model of the part before
    torch.cuda.empty_cache()  # does nothing without a GPU
    started = time.perf_counter()
    bench.end_s = started + limit_s
    part = result["parts"][name] = {"rows": [], "seconds": 0.0, "error": None}

    def add(figure: Figure) -> None:
        measured = "-" if figure.value is None else f"{figure.value:.4g}"
        expected = "" if figure.expected is None else f"{figure.expected:.4g}"
        cells = (name, figure.case, measured, expected, figure.unit, figure.note)
        print(f"| {' | '.join(cells)} |", flush=True)
        part["rows"].append(figure._asdict())
        part["seconds"] = time.perf_counter() - started
        write_json(path, result)

    def interrupt(*_) -> None:
        raise TimeoutError("interrupted: no time was left")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, INTERRUPT * limit_s)
    try:
        for figure in PARTS[name].measure(bench):
            add(figure)
            if bench.left_s < 0:
                part["error"] = "stopped: no time was left"
                break
    except Exception as problem:  # whatever a driver or a kernel comes up with
        part["error"] = f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:200]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    if part["error"]:
        add(Figure(name, None, note=part["error"]))


def environment(bench: Bench) -> dict:
    """Return the machine's hardware and versions, and the commit."""
    packages = ["torch", "transformers", "numpy"]
    optional = {"triton": "triton", "flash_attn": "flash-attn"}
    packages += [name for module, name in optional.items() if importlib.util.find_spec(module)]
    versions = {name: metadata.version(name) for name in packages}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name() if bench.is_cuda else f"{os.cpu_count()} CPUs",
        "versions": versions | {"python": platform.python_version(), "cuda": torch.version.cuda},
        "commit": commit(),
        "kernel": bench.kernel,
        "is_small": bench.is_small,
    }


def run(arguments: argparse.Namespace) -> None:
    if arguments.json:
        try:
            open(arguments.json, "x").close()
        except OSError as error:
            raise InputError(f"--json: {arguments.json}: {error.strerror}") from error
    if arguments.minutes <= 0:
        raise InputError(f"--minutes: {arguments.minutes} must be above 0")
    end_s = time.perf_counter() + 60 * arguments.minutes
    bench = make_bench(arguments.cpu or not torch.cuda.is_available())
    result = environment(bench)
    print(", ".join(f"{key} {value}" for key, value in result.items() if key != "is_small"))
    result["parts"] = {}
    print("| part | case | measured | expected | unit | note |\n|---|---|---|---|---|---|")
    for name in arguments.only:
        limit_s = PARTS[name].limit_s * arguments.minutes / MINUTES
        left_s = end_s - time.perf_counter()
        if left_s > 0:
            run_part(name, bench, min(limit_s, left_s), result, arguments.json)


def main() -> int:
    parser = argparse.ArgumentParser(description="What to measure first on one GPU")
    parser.add_argument("--json", help="write the figures there; the file must not exist")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all parts together")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    torch.set_num_threads(1)
    return shared.main(lambda arguments, _: run(arguments), parser)


if __name__ == "__main__":
    sys.exit(main())
