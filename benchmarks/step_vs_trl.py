"""A whole training step against TRL's GRPOTrainer: python benchmarks/step_vs_trl.py --config F
[--json OUT] [overrides]

The arms are those of trl_arms.py, which says what they have in common and what a step is. Each arm
is a job of its own; the jobs follow each other in turn, forwards and backwards. The first steps of
a job are not counted, and the others' medians are taken. Tokens a step and tokens a second are
given beside the seconds: with tail batching a short and a long round are steps of very different
size, so what counts there are seconds for each token that is trained on."""

import argparse
import json
import os
import statistics
import sys

import numpy as np
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks.trl_arms import ARMS, add_arguments, check, job
from bubblespec.config import load_config
from bubblespec.errors import InputError


def summarise(jobs: dict[str, list[dict]], num_warmup: int) -> dict[str, dict]:
    """Medians over the counted steps of all jobs of an arm, or its error; and how much faster than
    TRL: all steps together, the median over steps, which have the same prompts in every arm but
    those with tail batching, and by tokens a second."""
    summary = {}
    base = [run["seconds"][num_warmup:] for run in jobs.get("trl", []) if "error" not in run]
    for arm, runs in jobs.items():
        errors = [run["error"] for run in runs if "error" in run]
        if errors or not runs:
            summary[arm] = {"error": (errors or ["not run"])[0]}
            continue
        counted = {
            key: [value for run in runs for value in run[key][num_warmup:]]
            for key in runs[0]
            if isinstance(runs[0][key], list)
        }
        summary[arm] = {key: statistics.median(values) for key, values in counted.items()}
        summary[arm]["tokens_per_second"] = sum(counted["tokens"]) / sum(counted["seconds"])
        summary[arm]["peak_memory_gb"] = max(run["peak_memory_gb"] for run in runs)
        summary[arm]["steps"] = len(counted["seconds"])
        seconds = [run["seconds"][num_warmup:] for run in runs]
        if len(base) == len(seconds):
            ratios = np.concatenate(base) / np.concatenate(seconds)
            summary[arm]["speedup"] = float(np.sum(base) / np.sum(seconds))
            summary[arm]["speedup_median_step"] = float(np.median(ratios))
    trl = summary.get("trl", {}).get("tokens_per_second")
    for s in summary.values():
        if trl and "tokens_per_second" in s:
            s["speedup_by_tokens"] = s["tokens_per_second"] / trl
    return summary


def print_table(summary: dict[str, dict]) -> None:
    print(
        "| arm | seconds a step | processor seconds, rank 0 | tokens a step | median, longest | tokens/s "
        "| against trl: all steps, median step, by tokens | peak GB | reward |"
    )
    print("|---" * 9 + "|")
    for arm, s in summary.items():
        if "error" in s:
            print(f"| {arm} | does not run: {s['error']} | | | | | | | |")
            continue
        ratio = (
            f"{s['speedup']:.2f}x, {s['speedup_median_step']:.2f}x, {s['speedup_by_tokens']:.2f}x"
            if "speedup" in s
            else "-"
        )
        print(
            f"| {arm} | {s['seconds']:.2f} | {s['processor_seconds']:.2f} | {s['tokens']:.0f} "
            f"| {s['median_length']:.0f}, {s['longest']:.0f} | {s['tokens_per_second']:.0f} "
            f"| {ratio} | {s['peak_memory_gb']:.2f} | {s['rewards']:.2f} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=["trl", "trl-cb", "none", "bubble+suffix", "all"]
    )
    parser.add_argument("--rounds", type=int, default=1, help="jobs of each arm")
    parser.add_argument("--warmup", type=int, default=1, help="first steps that are not counted")
    arguments = parser.parse_intermixed_args()
    try:
        if not 0 <= arguments.warmup < arguments.steps:
            raise InputError(
                f"--warmup: {arguments.warmup} of {arguments.steps} steps leaves none to count"
            )
        check(load_config(arguments.config, arguments.overrides))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    jobs: dict[str, list[dict]] = {arm: [] for arm in arguments.arms}
    order = [
        arm
        for turn in range(arguments.rounds)
        for arm in (arguments.arms if turn % 2 == 0 else arguments.arms[::-1])
    ]
    for arm in tqdm(order, unit="job"):
        jobs[arm].append(job(arguments, arm, arguments.overrides))
    summary = summarise(jobs, arguments.warmup)
    print_table(summary)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "config": arguments.config,
                    "overrides": arguments.overrides,
                    "summary": summary,
                    "jobs": jobs,
                },
                file,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
