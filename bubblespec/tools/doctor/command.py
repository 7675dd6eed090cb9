"""Check whether this machine can run a configuration, on one rank or on all:

python -m bubblespec doctor --config FILE [section.key=value ...]

torchrun --nproc_per_node=8 -m bubblespec doctor --config FILE [section.key=value ...]

Every check prints lines: `ok`, `slower` where a slower fallback is used, or `failed`; the last two
name the key that matters. A failed check stops only the checks that need it.
Nothing is left on disk.
"""

import json
import os
import shlex
import tempfile
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks, ranks_from_environment
from bubblespec.errors import EndsRun, RankTimeout, RunFailed, log, one_line
from bubblespec.loading import with_dtype
from bubblespec.tools import make_parser, parse
from bubblespec.tools.doctor.checks import CHECKS, local_ranks
from bubblespec.tools.doctor.forwards import Case, Check, Line, failed

TIMEOUT_S = 300.0  # that a rank waits for another, at most: run.timeout_s may be hours


def examine(case: Case) -> list[str]:
    """Run all checks on all ranks together, print their lines and return the names that failed.

    The names are equal on all ranks. Raises RunFailed where a rank no longer answers."""
    failures: list[str] = []
    passed: set[str | None] = {None}
    is_apart = False  # ranks have missed a collective, and there can be no further one
    for name, check in CHECKS.items():
        if is_apart or check.needs not in passed:
            why = "ranks are out of step" if is_apart else f"{check.needs} failed"
            of_ranks = [[failed(f"not made, as {why}")]]
        else:
            if case.ranks.is_main:
                log(f"doctor: {name} ...")
            case.ranks.activity = f"the check of {name}"
            of_ranks, is_apart = compare(case.ranks, name, *attempt(check, case))
            if any(line.verdict == "failed" for lines in of_ranks for line in lines):
                failures.append(name)
            else:
                passed.add(name)
        if case.ranks.is_main:
            show(name, of_ranks)
    return failures


def attempt(check: Check, case: Case) -> tuple[list[Line], bool]:
    """Return this rank's lines, errors included, and whether it timed out waiting for others."""
    lines: list[Line] = []
    is_late = False
    try:
        lines.extend(check.make(case))  # lines before an error are kept
    except EndsRun as error:  # an InputError names the key
        is_late = isinstance(error, RankTimeout)
        lines.append(failed(f"{error}; {check.avoid}" if is_late else str(error)))
    except Exception as error:  # any error of a driver, a kernel or a library
        lines.append(failed(f"{one_line(error)}; {check.avoid}"))
    return lines, is_late


def compare(
    ranks: Ranks, name: str, lines: list[Line], is_late: bool
) -> tuple[list[list[Line]], bool]:
    """Return the lines of all ranks, by rank, and whether any was late. Raises RunFailed.

    They are exchanged through the job's key-value store, as a failed rank may have left others
    alone in a collective."""
    if ranks.world_size == 1:
        return [lines], is_late
    store = dist.PrefixStore("doctor", dist.distributed_c10d._get_default_store())
    keys = [f"{name}/{rank}" for rank in range(ranks.world_size)]
    store.set(keys[ranks.rank], json.dumps((lines, is_late)))
    # Another one may wait for this rank for as long as a collective may, and begin to later.
    deadline = time.monotonic() + 2 * ranks.timeout_s
    while not store.check(keys):
        if time.monotonic() > deadline:
            silent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise RunFailed(f"{name}: no answer from rank {', '.join(silent)}")
        time.sleep(1e-3)
    answers = [json.loads(store.get(key)) for key in keys]
    return [[Line(*line) for line in of] for of, _ in answers], any(late for _, late in answers)


def show(name: str, of_ranks: list[list[Line]]) -> None:
    """Print the lines of rank 0, and problems that only other ranks found."""
    for rank, lines in enumerate(of_ranks):
        for verdict, text in lines:
            if rank == 0 or (verdict != "ok" and (verdict, text) not in of_ranks[0]):
                text = text if rank == 0 else f"rank {rank}: {text}"
                print(f"{name:<11} {verdict}: {text}", flush=True)


def next_command(config_path: str, overrides: list[str], ranks: Ranks) -> str:
    """Return the training command: on as many ranks or, without a launcher, on all GPUs."""
    num_local, num_machines = local_ranks(), ranks.world_size // local_ranks()
    if "RANK" not in os.environ and ranks.device.type == "cuda":
        num_local = torch.cuda.device_count()
    nodes = [f"--nnodes={num_machines}"] * (num_machines > 1)
    launcher = ["torchrun", *nodes, f"--nproc_per_node={num_local}", "train.py"]
    return shlex.join([*launcher, "--config", config_path, *overrides])


def main(arguments: list[str]) -> None:
    """Run all checks. Raises RunFailed if one fails."""
    given = parse(make_parser("doctor"), arguments)
    config = load_config(given.config, given.overrides)
    timeout_s = min(config.run.timeout_s, TIMEOUT_S)
    with (
        ranks_from_environment(config.model.device, timeout_s) as ranks,
        tempfile.TemporaryDirectory() as folder,
    ):
        config = with_dtype(config, ranks.device.type)
        own = replace(config.run, output_dir=folder, timeout_s=timeout_s)
        own.resume_from_checkpoint = "none"
        case = Case(replace(config, run=own), ranks)
        if names := examine(case):
            raise RunFailed(f"checks that failed: {', '.join(names)}")
        if ranks.is_main:
            print("no check failed; this trains:", flush=True)
            print(next_command(given.config, given.overrides, ranks), flush=True)
