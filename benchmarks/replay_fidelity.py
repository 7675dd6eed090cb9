"""Simulated rollouts against measured ones: python benchmarks/replay_fidelity.py --runs RUN_DIR ...
[--cores 2] [--json OUT]

RUN_DIRs are output_dirs of runs with trace.enabled, of one configuration but for
speculative.method: some with `none` and some with another, all of the same steps and ranks. The
cost of forwards is fitted on the median run of each method; the workload is that of the first run
with drafts. Then both methods are simulated, and compared with the median run of each: seconds of
all rollouts from their begin to the end of the slowest rank's, and the ratio of the two methods.
The spread of the measured runs (least and most) is given beside it: no simulation can be nearer
than that.

Where more ranks than cores run, the forwards of their traces are slow already: give --cores, and
--cost-runs with fewer ranks.
"""

import argparse
import dataclasses
import json
import os
import sys

import numpy as np

from bubblespec.config import config_of_sections
from bubblespec.errors import InputError
from bubblespec.simulate.__main__ import nested
from bubblespec.simulate.cost import cost_from_traces
from bubblespec.simulate.recorded import RecordedWorkload
from bubblespec.simulate.run import simulate
from bubblespec.telemetry.trace import FOLDER, read_meta, read_table


def total_of_slowest(run_dir: str, column: str) -> float:
    """Sum over a run's rollouts of a column of the trace's steps, each of the rank where it is
    largest."""
    table = read_table(os.path.join(run_dir, FOLDER), "steps")
    step, values = table["step"].to_numpy(), table[column].to_numpy()
    return float(sum(values[step == number].max() for number in np.unique(step)))


def measured_s(run_dir: str) -> float:
    """Seconds of all rollouts of a run."""
    return total_of_slowest(run_dir, "total_s")


def compare(
    run_dirs: list[str], cores: int | None = None, cost_runs: list[str] | None = None
) -> dict:
    """The figures that `main` prints. Raises InputError for runs that do not match."""
    metas = {run: read_meta(os.path.join(run, FOLDER)) for run in run_dirs}
    by_method: dict[str, list[str]] = {}
    for run, meta in metas.items():
        by_method.setdefault(meta["config"]["speculative.method"], []).append(run)
    if len(by_method) != 2 or "none" not in by_method:
        raise InputError(
            f"--runs: methods {', '.join(sorted(by_method))}; give runs of none and of one other"
        )
    if len({meta["world_size"] for meta in metas.values()}) > 1:
        raise InputError("--runs: their numbers of ranks differ")
    method = next(name for name in by_method if name != "none")
    workload = RecordedWorkload(by_method[method][0])
    for run in run_dirs:
        if RecordedWorkload(run).digests != workload.digests:
            raise InputError(f"--runs: {run} has other tokens than {by_method[method][0]}")
    median_runs = [sorted(runs, key=measured_s)[len(runs) // 2] for runs in by_method.values()]
    cost = cost_from_traces([os.path.join(run, FOLDER) for run in cost_runs or median_runs])
    config = config_of_sections(nested(workload.config), [], "meta.json")
    result = {
        "ranks": workload.world_size,
        "steps": workload.num_steps,
        "cost_error_median": cost.error_median,
        "methods": {},
    }
    for name in ("none", method):
        arm = dataclasses.replace(
            config, speculative=dataclasses.replace(config.speculative, method=name)
        )
        steps = simulate(arm, workload, cost, workload.world_size, cores=cores)
        if any(step.digest != workload.digests[step.step] for step in steps):
            raise AssertionError("the simulated responses are not those of the run")
        seconds = [measured_s(run) for run in by_method[name]]
        simulated = sum(step.seconds for step in steps)
        result["methods"][name] = {
            "measured_s": seconds,
            "simulated_s": simulated,
            "error": simulated / float(np.median(seconds)) - 1,
            "forwards": sum(step.forwards for step in steps),
            "measured_forwards": [
                int(total_of_slowest(run, "own_forwards")) for run in by_method[name]
            ],
        }
    plain, other = result["methods"].values()
    result["measured_ratio"] = float(
        np.median(plain["measured_s"]) / np.median(other["measured_s"])
    )
    result["simulated_ratio"] = plain["simulated_s"] / other["simulated_s"]
    result["ratio_error"] = result["simulated_ratio"] / result["measured_ratio"] - 1
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", required=True)
    parser.add_argument("--cores", type=int)
    parser.add_argument(
        "--cost-runs", nargs="+", metavar="RUN_DIR", help="fit the cost of forwards on these"
    )
    parser.add_argument("--json")
    arguments = parser.parse_args()
    try:
        result = compare(arguments.runs, arguments.cores, arguments.cost_runs)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{result['ranks']} ranks, {result['steps']} steps; a forward's cost is off by {result['cost_error_median']:.0%} (median)"
    )
    print(
        "| method | measured s: median (least to most) | simulated s | error | forwards measured | simulated |"
    )
    print("|---" * 6 + "|")
    for name, row in result["methods"].items():
        seconds = row["measured_s"]
        print(
            f"| {name} | {np.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {row['simulated_s']:.2f} "
            f"| {row['error']:+.1%} | {int(np.median(row['measured_forwards']))} | {row['forwards']} |"
        )
    ratios = f"measured {result['measured_ratio']:.2f}x, simulated {result['simulated_ratio']:.2f}x"
    print(f"ratio: {ratios} ({result['ratio_error']:+.1%})")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
