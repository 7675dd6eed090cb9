"""Pictures of benchmarks' results and of simulations, for notebooks and --picture."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from notebooks.pictures import DRAFTED, PLAIN, SIZE, figure_of, label_axes, legend_below
from notebooks.reports import label_of

GREY = "#8c8c8c"
BASELINE = {"color": GREY, "linestyle": "--"}
COLOURS = [*(f"C{number}" for number in (0, 1, 2, 3, 4, 5, 6, 8, 9)), "#1a1a1a"]  # not grey


def draw_training(arms: dict[str, dict], seeds: dict) -> Figure:
    """Draw training runs by system: speed-up over the first, and held-out reward over seconds.

    Where the first has been run again, a band shows how far two equal runs are apart. See
    benchmarks/systems.py.
    """
    figure, axes = figure_of(11, 1.6 + 0.32 * len(arms), 1, 2, width_ratios=(1.15, 1))
    baseline, bars = next(iter(arms)), axes[0]
    names = sorted(arms, key=lambda name: -arms[name]["speedup"])
    others = [name for name in names if name not in (baseline, "again")]
    colours = dict(zip(others, COLOURS, strict=False))
    colours |= dict.fromkeys({baseline, "again"} & arms.keys(), GREY)
    for place, name in enumerate(names):
        arm = arms[name]
        bars.barh(place, arm["speedup"], height=0.7, color=colours[name], alpha=0.75)
        bars.plot(arm["speedups"], [place] * len(arm["speedups"]), "k.", markersize=4)
        reach = max(arm["speedups"])
        bars.text(reach, place, f"  {arm['speedup']:.2f}x", va="center", fontsize=SIZE)
    bars.axvline(1.0, color="#555555", linewidth=1, linestyle=":")
    title = "speed of whole steps (dots: seeds)"
    if "again" in arms:
        widest = max(max(ratio, 1 / ratio) for ratio in arms["again"]["speedups"])
        bars.axvspan(1 / widest, widest, color="#000000", alpha=0.15, linewidth=0)
        title += f"; grey band: two equal runs, {widest - 1:.1%} apart"
    bars.set_yticks(range(len(names)), [label_of(name) for name in names], fontsize=SIZE)
    bars.invert_yaxis()
    bars.set_xlim(0, 1.15 * max(max(arm["speedups"]) for arm in arms.values()))
    label_axes(bars, title, f"speed-up over {label_of(baseline)}, by seconds per token")
    draw_curves(
        axes[1],
        {name: [of_seed[name]["curve"] for of_seed in seeds.values()] for name in names},
        colours,
    )
    axes[1].set_title("held-out reward, same colours", fontsize=SIZE + 1)
    return figure


def draw_curves(
    axes, curves: dict[str, list[list[tuple[float, float]]]], colours: dict[str, str]
) -> None:
    """Draw held-out reward over seconds by arm: pale lines for seeds, dots for their mean.

    curves: (seconds, reward) of each evaluation, for each seed of an arm.
    """
    for name, of_seeds in curves.items():
        found = [np.array(curve) for curve in of_seeds if curve]
        for curve in found if len(found) > 1 else ():
            axes.plot(*curve.T, color=colours[name], alpha=0.3, linewidth=1)
        if found:
            style = {"color": colours[name], "linewidth": 1.5, "markersize": 4, "label": name}
            axes.plot(*np.mean(found, axis=0).T, "o-", **style)
    label_axes(axes, "", "seconds of training, without evaluations", "held-out reward")


def draw_rewards(curves: dict[str, list[list[tuple[float, float]]]], heading: str) -> Figure:
    """Draw held-out reward over seconds of training, see `draw_curves`."""
    figure, (axes,) = figure_of(7, 4.4)
    draw_curves(axes, curves, {name: f"C{number}" for number, name in enumerate(curves)})
    axes.set_title(f"{heading}\npale: seeds; dots: their mean", fontsize=SIZE)
    legend_below(figure, 2)
    return figure


def draw_acceptance(accepted: dict[str, list[float]]) -> Figure:
    """Draw the probability that the first n tokens of a chain are right, by noise of drafting."""
    figure, (axes,) = figure_of(7, 3.4)
    labels = {"coupled": "with the row's own noise", "point_mass": "with other noise"}
    for number, (name, shares) in enumerate(accepted.items()):
        place = np.arange(1, len(shares) + 1) + 0.4 * (number - (len(accepted) - 1) / 2)
        label = f"{labels.get(name, name)}: mean acceptance length {1 + sum(shares):.2f}"
        colour = (DRAFTED, "#b0b0b0")[number % 2]
        bars = axes.bar(place, shares, width=0.38, color=colour, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=SIZE - 1)
    axes.set_xticks(range(1, len(shares) + 1))
    axes.set_ylim(0, 1)
    label_axes(axes, "", "first n tokens of a chain", "probability that all are right")
    legend_below(figure, 2)
    return figure


def draw_adaptation(steps: list[dict]) -> Figure:
    """Draw the mean acceptance length of the drafter trained in idle time, and of a static copy."""
    steps = [step for step in steps if "adapted" in step]
    figure, (axes,) = figure_of(7, 3.0)
    for name, label, colour, style in (
        ("adapted", "trained in idle time", DRAFTED, "o-"),
        ("static", "a copy, as the warm start left it", GREY, "s--"),
    ):
        values = [step[name] for step in steps]
        numbers = [step["step"] for step in steps]
        axes.plot(numbers, values, style, color=colour, label=label, markersize=4)
    label_axes(axes, "", "step", "mean acceptance length")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(1, None)
    legend_below(figure, 2)
    return figure


def draw_lengths(panels: dict[str, dict[str, list[tuple[int, float]]]], heading: str) -> Figure:
    """Draw speed-ups by maximum length, the baseline first.

    panels: by title, points of each line by label. Values stand at the ends of lines, and labels in
    the last panel.
    """
    figure, axes = figure_of(3.2 + 3.9 * len(panels), 4.4, 1, len(panels), sharey=True)
    top = 1.08 * max(y for of in panels.values() for line in of.values() for _, y in line)
    for one, (title, lines) in zip(axes, panels.items(), strict=True):
        for number, points in enumerate(lines.values()):
            style = {"color": f"C{number - 1}", "marker": "o"} if number else BASELINE
            one.plot(*zip(*points, strict=True), markersize=4, **style)
        lengths = sorted({length for points in lines.values() for length, _ in points})
        one.set_xscale("log", base=2)
        one.set_xticks(lengths, [f"{length // 1000}k" for length in lengths])
        one.minorticks_off()
        one.set_ylim(0, top)
        label_axes(one, title, "longest response (tokens)")
        ends = [points[-1][1] for points in lines.values()]
        heights = spread(ends, 0.042 * top)
        for label, value, height, line in zip(lines, ends, heights, one.lines, strict=True):
            text = f"{value:.2f}x" + (f"  {label}" if one is axes[-1] else "")
            beside = {"transform": one.get_yaxis_transform(), "va": "center", "fontsize": SIZE - 1}
            one.text(1.02, height, text, color=line.get_color(), **beside)
    axes[0].set_ylabel("speed-up of rollouts", fontsize=SIZE)
    figure.suptitle(heading, fontsize=SIZE)
    return figure


def spread(heights: list[float], gap: float) -> list[float]:
    """Return the heights, moved up where two are closer than `gap`."""
    moved, last = [0.0] * len(heights), -float("inf")
    for i in sorted(range(len(heights)), key=heights.__getitem__):
        moved[i] = last = max(heights[i], last + gap)
    return moved


def draw_parts(speedups: dict[str, float], heading: str) -> Figure:
    """Draw bars, fastest first: a combination, which is the first, and what is left of it."""
    best = next(iter(speedups))
    bars = dict(sorted(speedups.items(), key=lambda bar: -bar[1]))
    figure, (axes,) = figure_of(8, 1.0 + 0.42 * len(bars))
    colours = [DRAFTED if name == best else PLAIN for name in bars]
    axes.bar_label(
        axes.barh(list(bars), list(bars.values()), color=colours), fmt="%.2fx", padding=3
    )
    axes.axvline(1.0, linewidth=1, **BASELINE)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(bars.values()))
    label_axes(axes, "", "speed-up of rollouts over no drafts, prompts in turn")
    figure.suptitle(heading, fontsize=SIZE)
    return figure


def draw_scaling(
    found: dict[float, tuple[float, float]], label: str, idle_of: str = "without drafts"
) -> Figure:
    """Draw speed-up and idle share of rollouts by the value that was varied."""
    figure, axes = figure_of(10, 3.0, 1, 2)
    values = list(found)
    units = ("speed-up of rollouts by drafts", f"idle share, {idle_of}")
    for number, (one, unit) in enumerate(zip(axes, units, strict=True)):
        figures = [pair[number] for pair in found.values()]
        one.plot(values, figures, "o-", color=f"C{number}", markersize=5)
        for value, height in zip(values, figures, strict=True):
            text = f"{height:.0%}" if number else f"{height:.2f}x"
            above = {"textcoords": "offset points", "xytext": (0, 7), "ha": "center"}
            one.annotate(text, (value, height), fontsize=SIZE, **above)
        one.set_xscale("log", base=2)
        one.set_xticks(values, [f"{value:g}" for value in values])
        one.set_ylim(0, 1.25 * max(figures))
        one.margins(x=0.08)
        label_axes(one, "simulated", label, unit)
    axes[0].axhline(1.0, color="#999999", linewidth=1, linestyle=":")
    return figure
