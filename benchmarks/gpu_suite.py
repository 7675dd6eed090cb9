"""Measure one GPU next to what is expected, in ten minutes: python benchmarks/gpu_suite.py

Models have random weights in published shapes. Needs torch, transformers, numpy and pytest, and no
network; the doctor, paired runs and training need a run's other packages, too. Parts come in the
order of their worth. Each is a generator of rows with a share of the minutes, in a process of its
own: a part that fails, hangs or takes longer costs its own rows alone. What was left out is listed
at the end, and the exit code is 1 if a part failed. docs/lab/README.md says what each is for.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from typing import NamedTuple

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import gpu_forwards, gpu_programs, gpu_ranks, shared
from benchmarks.gpu_bench import LEFT_OUT, Bench, Figure, left_out, make_bench
from benchmarks.shared import commit, write_json
from bubblespec.engine import ops
from bubblespec.errors import InputError

MINUTES = 10.0
INTERRUPT = 1.5  # limits after which a part is left in the middle of a row
STOP_S = 30.0  # seconds beyond, after which its process is killed
LEAVE_S = 5.0  # seconds in which programs of a killed part end their own
ENVIRONMENT = ("date", "hardware", "versions", "commit", "kernel")  # printed
FAILED, NO_TIME = "failed", "no time"
TORCH = "model.kernels=torch"  # the key that parts without a configuration read


class Part(NamedTuple):
    """A generator of rows, and the seconds of MINUTES after which no further row is measured."""

    measure: Callable[[Bench], Iterator[Figure]]
    limit_s: float
    is_run: bool = False  # whether it has a configuration, which `section.key=value` overrides


PARTS = {
    "doctor": Part(gpu_programs.doctor, 40.0, True),
    "tests": Part(gpu_programs.gpu_tests, 60.0),
    "decode": Part(gpu_forwards.decoding, 90.0),
    "paired": Part(gpu_programs.paired, 120.0, True),
    "updates": Part(gpu_programs.updates, 60.0),
    "ranks": Part(gpu_ranks.tp_tail, 50.0),
    "kernels": Part(gpu_forwards.kernels, 40.0),
    "profile": Part(gpu_forwards.profile, 40.0),
    "train": Part(gpu_programs.training, 70.0, True),
    "composition": Part(gpu_forwards.composition, 30.0),
}


def measure(name: str, end_s: float, on_cpu: bool, overrides: list[str], path: str) -> None:
    """Measure a part's rows in this process; print each, and write the result so far."""
    result, started = load(path), time.perf_counter()
    part = result["parts"][name] = {"rows": [], "seconds": 0.0, "error": None}

    def add(figure: Figure) -> None:
        print_row(name, figure)
        part["rows"].append(figure._asdict())
        part["seconds"] = time.perf_counter() - started
        store(path, result)

    def interrupt(*_) -> None:
        raise TimeoutError("interrupted in the middle of a row")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(INTERRUPT * (end_s - started), 1.0))
    try:
        if TORCH in overrides:
            ops.replaced |= dict.fromkeys(ops.OPERATIONS, TORCH)
        bench = make_bench(on_cpu)
        bench.end_s, bench.overrides = end_s, tuple(overrides)
        if "date" not in result:
            result |= environment(bench)
        unread = [key for key in overrides if key != TORCH]
        if unread and not PARTS[name].is_run:
            add(left_out(name, f"it does not read {', '.join(unread)}"))
            return
        for figure in PARTS[name].measure(bench):
            add(figure)
            if bench.left_s < 0:
                raise TimeoutError(f"stopped after {len(part['rows'])} rows")
    except (TimeoutError, subprocess.TimeoutExpired) as problem:
        part["error"] = f"{NO_TIME}: {problem}"[:200]
    except Exception as problem:  # whatever a driver or a kernel comes up with
        text = " ".join(str(problem).split())
        part["error"] = f"{FAILED}: {type(problem).__name__}: {text}"[:200]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    if part["error"]:
        add(Figure(name, None, note=part["error"]))


def print_row(part: str, figure: Figure) -> None:
    measured = "-" if figure.value is None else f"{figure.value:.4g}"
    expected = "" if figure.expected is None else f"{figure.expected:.4g}"
    cells = (part, figure.case, measured, expected, figure.unit, figure.note)
    print(f"| {' | '.join(cells)} |", flush=True)


def load(path: str) -> dict:
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def store(path: str, result: dict) -> None:
    """Write the result; a process that is killed meanwhile leaves the file as it was."""
    write_json(f"{path}.new", result)
    os.replace(f"{path}.new", path)


def launch(name: str, end_s: float, arguments: argparse.Namespace, path: str) -> str | None:
    """Measure a part in a process of its own; return what ended the process, if not its end."""
    command = [sys.executable, sys.argv[0], "--part", name, "--end-s", repr(end_s), "--json", path]
    command += [*arguments.overrides, *["--cpu"] * arguments.cpu]
    limit_s = INTERRUPT * (end_s - time.perf_counter()) + STOP_S
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return "killed, as it did not stop"
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks
            time.sleep(LEAVE_S)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else None


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


def run(arguments: argparse.Namespace, folder: str) -> int:
    """Measure one part after the other; return 1 if any has failed, else 0."""
    if arguments.part:
        measure(arguments.part, arguments.end_s, arguments.cpu, arguments.overrides, arguments.json)
        return 0
    path = arguments.json or os.path.join(folder, "result.json")
    try:
        open(path, "x").close()
    except OSError as error:
        raise InputError(f"--json: {path}: {error.strerror}") from error
    if arguments.minutes <= 0:
        raise InputError(f"--minutes: {arguments.minutes} must be above 0")
    end_s = time.perf_counter() + 60 * arguments.minutes
    store(path, {"overrides": arguments.overrides, "parts": {}})
    print(
        "| part | case | measured | expected | unit | note |\n|---|---|---|---|---|---|", flush=True
    )
    for name in arguments.only:
        limit_s = PARTS[name].limit_s * arguments.minutes / MINUTES
        started = time.perf_counter()
        if started >= end_s:
            break
        if problem := launch(name, min(started + limit_s, end_s), arguments, path):
            result = load(path)
            part = result["parts"].setdefault(name, {"rows": [], "seconds": 0.0})
            part |= {"error": f"{FAILED}: {problem}", "seconds": time.perf_counter() - started}
            figure = Figure(name, None, note=part["error"])
            print_row(name, figure)
            part["rows"].append(figure._asdict())
            store(path, result)
    result = load(path)
    missing = result["left_out"] = list_left_out(result["parts"], arguments.only)
    store(path, result)
    texts = (f"{key} {value}" for key, value in result.items() if key in ENVIRONMENT)
    print(f"\n{', '.join(texts)}\nLeft out: {'nothing' if not missing else ''}")
    print("".join(f"- {what}: {why}\n" for what, why in missing.items()), end="")
    errors = (part["error"] or "" for part in result["parts"].values())
    return int(any(error.startswith(FAILED) for error in errors))


def list_left_out(parts: dict, names: list[str]) -> dict[str, str]:
    """Return why each part, or case of a part, has no figures or not all of them."""
    missing = {}
    for name in names:
        part = parts.get(name, {"rows": [], "error": NO_TIME})
        if part["error"]:
            missing[name] = part["error"]
        for row in part["rows"]:
            if row["note"].startswith(LEFT_OUT):
                missing[f"{name}, {row['case']}"] = row["note"].removeprefix(LEFT_OUT)
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(description="What to measure first on one GPU")
    parser.add_argument("--json", help="write the figures there; the file must not exist")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all parts together")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("overrides", nargs="*", help="section.key=value of doctor, paired, train")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # of a process of its own
    parser.add_argument("--end-s", type=float, help=argparse.SUPPRESS)
    torch.set_num_threads(1)
    codes: list[int] = []
    code = shared.main(lambda *given: codes.append(run(*given)), parser)
    return code or codes[0]


if __name__ == "__main__":
    sys.exit(main())
