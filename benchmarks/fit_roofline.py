"""Fit the simulator's roofline: python benchmarks/fit_roofline.py SWEEP.csv [OTHERS.csv ...]
[--picture PNG]

Least squares of the errors' logarithms, over decoding, verifying and the int4 copy of the first
file, with a loss that outliers hardly move. The others are compared only. Of the copy, the passes
with 3 and 7 draft tokens count: those with 11 and 15 pad rows to sizes of graphs that are unknown.
The shares of the bandwidth are not fitted: one model cannot tell them from `layer_s` (0.75 to 0.9
fit as well), and 0.8 is what suits gpt-fast's figures on several GPUs (docs/lab/simulator.md).
"""

import argparse
import math
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import least_squares

from benchmarks.measured_costs import (
    COPY,
    DECODE,
    FITS,
    VERIFY,
    Case,
    compare,
    cost_of,
    predict,
    read_cases,
)
from bubblespec.tools.simulate.roofline import Fit
from bubblespec.types import Load

FIXED = ("memory_share", "keys_share")
COPY_PASSES = (3, 7)
FACTOR = 2.0  # constants are sought between those of FITS / FACTOR and * FACTOR
OUTLIER = 0.05  # error from which on errors count linearly
TICKS_MS = (3, 5, 10, 15, 20, 30, 50, 100)
PANELS = {DECODE: "decode", VERIFY: "verify, 3 to 15 draft tokens per row", COPY: "int4 copy"}
# gpt-fast's README (BSD-3): tokens per second of Llama-2-7B, bfloat16, by number of A100-80GB.
GPT_FAST = {1: 104.9, 2: 168.8, 4: 254.0, 8: 328.4}
SOURCE = (
    "Measured by others: vLLM 0.11.2 on an A100-SXM4-80GB, sd_toggle/configs of "
    "furiosa-ai/EfficientRollout, commit 0ff0bc5,\nApache-2.0 (arXiv 2606.18967), 1 to 64 rows, "
    "contexts of 256 to 4,096; Llama-2-7B on several A100s: README of gpt-fast."
)


def fit_cases(cases: list[Case]) -> Fit:
    """Return the constants with which the roofline fits best; starts from the engine's."""
    start = FITS[cases[0].engine]
    names = [name for name in Fit._fields if name not in FIXED]

    def constants(logarithms: np.ndarray) -> Fit:
        return start._replace(**dict(zip(names, np.exp(logarithms).tolist(), strict=True)))

    def errors(logarithms: np.ndarray) -> list[float]:
        fit = constants(logarithms)
        return [math.log(predict(case, fit) / case.seconds) for case in cases]

    begin = np.log([getattr(start, name) for name in names])
    limits = begin - math.log(FACTOR), begin + math.log(FACTOR)
    found = least_squares(errors, begin, loss="soft_l1", f_scale=OUTLIER, bounds=limits)
    return constants(found.x)


def draw(cases: list[Case], fit: Fit, fitted_model: str) -> Figure:
    """Draw fitted against measured milliseconds, a panel per mode, and gpt-fast's tokens/s."""
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    *panels, last = figure.subplots(1, 1 + len(PANELS))
    models = list(dict.fromkeys(case.model for case in cases))
    for axes, (mode, title) in zip(panels, PANELS.items(), strict=True):
        for model in models:
            points = [
                (1e3 * case.seconds, 1e3 * predict(case, fit))
                for case in cases
                if (case.model, case.mode) == (model, mode)
            ]
            label = f"{model}, {'fitted' if model == fitted_model else 'left out of the fit'}"
            axes.plot(*zip(*points, strict=True), ".", alpha=0.6, markersize=5, label=label)
        of_mode = [1e3 * case.seconds for case in cases if case.mode == mode]
        ends = np.array([0.9 * min(of_mode), 1.1 * max(of_mode)])
        axes.fill_between(ends, 0.7 * ends, 1.3 * ends, color="0.92", zorder=0, label="within 30%")
        axes.plot(ends, ends, color="0.5", linewidth=1, zorder=1)
        axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="fitted, ms")
        axes.set_title(title)
        ticks = [ms for ms in TICKS_MS if ends[0] <= ms <= ends[1]]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, labels=list(map(str, ticks)))
            axis.set_ticks([], minor=True)
    panels[0].legend(fontsize=8)
    costs = {n: cost_of("a100", "llama-2-7b", n, engine="gpt-fast", fit=fit) for n in GPT_FAST}
    speeds = [1 / cost.seconds(Load(1, 1, 0, 128)) for cost in costs.values()]
    last.plot([*GPT_FAST], [*GPT_FAST.values()], "o", label="measured")
    last.plot([*GPT_FAST], speeds, "x", label="fitted")
    last.set(
        xlabel="A100s together", xticks=[*GPT_FAST], ylim=(0, None), ylabel="tokens per second"
    )
    last.set_title("one row on several GPUs")
    last.legend(fontsize=8)
    figure.suptitle("Forwards: the simulator's roofline against measurements of others")
    figure.supxlabel(SOURCE, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the simulator's roofline")
    parser.add_argument("files", nargs="+", metavar="SWEEP.csv")
    parser.add_argument("--picture", metavar="PNG")
    arguments = parser.parse_args()
    cases, *others = (read_cases(path)[0] for path in arguments.files)
    fit = fit_cases([case for case in cases if case.mode != COPY or case.drafts in COPY_PASSES])
    print("\n".join(f"{name:18} {value:.3g}" for name, value in fit._asdict().items()))
    everything = sum(others, cases)
    print(compare(everything, fit))
    if arguments.picture:
        draw(everything, fit, cases[0].model).savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    main()
