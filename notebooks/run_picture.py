"""Draw a run, or several next to each other: python -m notebooks.run_picture RUN ... [--output PNG]

RUN is a run's folder, or a configuration whose run.output_dir has one. By default the picture is
run.png in the first folder. `make train` ends with it.
"""

import argparse
import os
import sys

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bubblespec.config.file import load_config
from bubblespec.errors import InputError
from notebooks.pictures import SIZE, STAGES, figure_of, label_axes
from notebooks.reading import Run, read_run

LENGTHS = {
    "completions/max_length": "longest",
    "completions/p99_length": "99th percentile",
    "completions/median_length": "median",
}
DRAWN = ("gen", "bubble", "train")  # of STAGES; the others take little time


def draw_run(runs: list[Run]) -> Figure:
    """Draw rewards of all runs, and response lengths and seconds of the first."""
    figure, (rewards, lengths, seconds) = figure_of(11, 3.2, 1, 3)
    for number, run in enumerate(runs):
        style = {"color": f"C{number}"}
        rewards.plot(run.column("step"), run.column("reward"), alpha=0.35, linewidth=1, **style)
        updates = [line["step"] for line in run.evaluations]
        held_out = [line.get("eval/reward", np.nan) for line in run.evaluations]
        rewards.plot(updates, held_out, "o-", label=run.name, **style)
    label_axes(rewards, "reward: each step (pale), held-out (dots)", "step")
    if len(runs) > 1:
        rewards.legend(fontsize=SIZE, frameon=False, loc="lower right")
    run, named = runs[0], f": {runs[0].name}" if len(runs) > 1 else ""
    steps = run.column("step")
    for (key, label), line in zip(LENGTHS.items(), ("-", "--", "-"), strict=True):
        lengths.plot(steps, run.column(key), line, label=label, linewidth=1.2)
    lengths.legend(fontsize=SIZE, frameon=False)
    label_axes(lengths, f"response tokens{named}", "step")
    parts = {STAGES[stage]: run.column(f"timing_s/{stage}") for stage in DRAWN}
    labels, colours = zip(*parts, strict=True)
    seconds.stackplot(steps, *parts.values(), labels=labels, colors=colours)
    seconds.legend(fontsize=SIZE, frameon=False, loc="upper right")
    label_axes(seconds, f"seconds per step, mean over ranks{named}", "step")
    for one in (rewards, lengths, seconds):
        one.xaxis.set_major_locator(MaxNLocator(integer=True))
        one.set_ylim(0)
    for one in (lengths, seconds):
        one.set_ylim(0, 1.3 * one.get_ylim()[1])  # room for the legend
    return figure


def main() -> int:
    parser = argparse.ArgumentParser("python -m notebooks.run_picture", description="Draw a run.")
    parser.add_argument("run", nargs="+", help="a run's folder, or its configuration")
    parser.add_argument("--output", help="PNG to write (default: run.png in the first folder)")
    arguments = parser.parse_args()
    try:
        folders = [
            path if os.path.isdir(path) else load_config(path).run.output_dir
            for path in arguments.run
        ]
        runs = [read_run(folder) for folder in folders]
        if empty := [run.folder for run in runs if not run.steps]:
            raise InputError(f"{empty[0]} has not finished a step yet")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    output = arguments.output or os.path.join(folders[0], "run.png")
    draw_run(runs).savefig(output, dpi=110)
    print(f"picture of the run: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
