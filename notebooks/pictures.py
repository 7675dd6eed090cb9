"""The notebooks' pictures. Every function makes one figure and returns it; a notebook shows what
its cell's last line returns."""

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from bubblespec.telemetry.timeline import COLOURS, draw_lanes
from notebooks.reading import Run, compare, num_response_tokens, seconds_by_kind, seconds_so_far

PLAIN, DRAFTED, NOTHING = (
    "#5aa5e0",
    "#1b9e77",
    "#ffffff",
)  # the first two as decode and verify in timelines
STAGES = {
    "gen": ("generate", "#5aa5e0"),
    "bubble": ("wait for the slowest", "#c8c8c8"),
    "reward": ("reward, exchange", "#e78ac3"),
}
STAGES |= {"train": ("train", "#7b52ab"), "sync": ("sync", "#1a1a1a")}
SOURCES = {
    "aligned": ("its own draft", "#1b9e77"),
    "own": ("own draft, re-synchronised", "#7fcdbb"),
}
SOURCES |= {
    "sibling": ("siblings", "#f2c230"),
    "self": ("itself", "#e3701a"),
    "history": ("earlier epochs", "#8c510a"),
}
RULES = ("#8c8c8c", "#1b9e77", "#d62728")  # plain order, ours, and deferred prompts drawn anew
SIZE = 9


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **options):
    """A figure without pyplot, which would keep it; its axes as an array [rows * columns]."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns, **options)).ravel()
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=SIZE)
    return figure, axes


def _legend_below(figure, columns: int, *what) -> None:
    options = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    figure.legend(*what, fontsize=SIZE, **options)


def _label(axes, title: str, x: str = "", y: str = "") -> None:
    axes.set_title(title, fontsize=SIZE + 1)
    axes.set_xlabel(x, fontsize=SIZE)
    axes.set_ylabel(y, fontsize=SIZE)


def draw_origins(panels: dict[str, list[list[bool]]]) -> Figure:
    """Where tokens came from: panels by title, in each a row of pixels a response, coloured by
    whether a draft gave the token."""
    figure, axes = _figure(10, 3.2, 1, len(panels), sharex=True, sharey=True)
    longest = max(len(row) for rows in panels.values() for row in rows)
    for one, (title, rows) in zip(axes, panels.items(), strict=True):
        image = np.ones((len(rows), longest, 4))
        for i, row in enumerate(rows):
            image[i, : len(row)] = [to_rgba(DRAFTED if is_drafted else PLAIN) for is_drafted in row]
        one.imshow(image, aspect="auto", interpolation="nearest")
        _label(one, title, "response token")
    axes[0].set_ylabel("response", fontsize=SIZE)
    handles = [
        Patch(facecolor=PLAIN, label="sampled after its forward"),
        Patch(facecolor=DRAFTED, label="accepted draft token"),
    ]
    _legend_below(figure, 2, handles, [patch.get_label() for patch in handles])
    return figure


def draw_law(law: np.ndarray, counts: np.ndarray, names: list[str]) -> Figure:
    """Bars of a law over tokens, and what was counted, with whiskers of two standard errors. law,
    counts: [tokens]."""
    figure, (axes,) = _figure(8, 3.2)
    axes.bar(names, law, width=0.8, color="#dddddd", label="softmax of the logits")
    error = 2 * np.sqrt(law * (1 - law) / counts.sum())
    style = {"fmt": "o", "markersize": 3, "linewidth": 1, "label": "with drafts"}
    axes.errorbar(names, counts / counts.sum(), error, **style)
    _label(axes, "", "next token", "share of samples")
    axes.legend(frameon=False, fontsize=SIZE)
    return figure


def draw_trap(law: np.ndarray, lengths: dict[str, np.ndarray], longest: int = 25) -> Figure:
    """Histograms of response lengths against their law. law: [lengths], from 1; lengths: responses
    by title."""
    figure, axes = _figure(10, 5, 2, 2, sharex=True, sharey=True)
    mean = law @ np.arange(1, len(law) + 1)
    place = np.arange(1, longest + 1)
    for one, (title, found) in zip(axes, lengths.items(), strict=True):
        share = np.bincount(found, minlength=len(law) + 1)[1:] / len(found)
        one.bar(place, share[:longest], width=0.9, color="#9ecae1", label="responses")
        one.plot(place, law[:longest], color="#222222", linewidth=1.2, label="law of the policy")
        for x, of, style in ((mean, "true", ":"), (found.mean(), "their", "-")):
            colour = "#222222" if of == "true" else "#d62728"
            one.axvline(x, color=colour, linestyle=style, label=f"{of} mean {x:.2f}")
        _label(one, title, "response length (tokens)", "share of responses")
        one.label_outer()
        one.legend(frameon=False, fontsize=SIZE - 1)
    return figure


def draw_ratios(ratios: dict[str, np.ndarray]) -> Figure:
    """Mean length of what rules have trained on up to each step, over the policy's; one line a
    rule. ratios: [steps]."""
    figure, (axes,) = _figure(10, 3.6)
    axes.axhline(1.0, color="#222222", linewidth=1)
    for (name, ratio), colour in zip(ratios.items(), RULES, strict=True):
        axes.plot(np.arange(1, len(ratio) + 1), ratio, label=name, color=colour, linewidth=1.6)
    _label(axes, "mean length of all responses trained on so far, over that of the policy", "steps")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=SIZE, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_quantiles(lengths: dict[str, np.ndarray], true: np.ndarray) -> Figure:
    """How often responses of some lengths were trained on, over how often they occur, in tenths of
    the true lengths. lengths: int64 [responses] by rule; true: int64 [responses]."""
    figure, (axes,) = _figure(10, 3.6)
    edges = np.unique(np.quantile(true, [*np.linspace(0, 0.9, 10), 0.95, 0.99]).astype(int))

    def shares(found: np.ndarray) -> np.ndarray:
        place = np.maximum(np.searchsorted(edges, found, side="right") - 1, 0)
        return np.bincount(place, minlength=len(edges)) / len(found)

    axes.axhline(1.0, color="#222222", linewidth=1)
    for (name, found), colour in zip(lengths.items(), RULES, strict=True):
        style = {"markersize": 4, "color": colour, "linewidth": 1.6}
        axes.plot(range(len(edges)), shares(found) / shares(true), "o-", label=name, **style)
    axes.set_xticks(range(len(edges)), [f"{edge}+" for edge in edges])
    _label(
        axes,
        "how often responses were trained on, over how often the policy gives them",
        "length of the response (tokens)",
    )
    axes.set_ylim(0, None)
    axes.legend(frameon=False, fontsize=SIZE, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_timelines(timelines: dict[str, list[np.ndarray]]) -> Figure:
    """The lanes of one step or several, by title, on one scale of seconds."""
    lanes_in_all = sum(len(lanes) for lanes in timelines.values())
    figure, axes = _figure(
        10, 1.1 + 0.8 * len(timelines) + 0.3 * lanes_in_all, len(timelines), sharex=True
    )
    handles = {}
    for one, (title, lanes) in zip(axes, timelines.items(), strict=True):
        handles |= {patch.get_label(): patch for patch in draw_lanes(one, lanes)}
        one.set_title(title, fontsize=SIZE + 1, loc="left")
        one.set_xlabel("")
    axes[-1].set_xlim(0, max(lane[:, 2].max() for lanes in timelines.values() for lane in lanes))
    axes[-1].set_xlabel("seconds since the step began", fontsize=SIZE)
    ordered = [handles[kind] for kind in COLOURS if kind in handles]
    _legend_below(figure, 5, ordered, [patch.get_label() for patch in ordered])
    return figure


def draw_kinds(timelines: dict[str, list[np.ndarray]]) -> Figure:
    """Seconds of a step by kind, mean over ranks: a stacked bar a timeline."""
    figure, (axes,) = _figure(10, 1.0 + 0.5 * len(timelines))
    colours, handles = COLOURS | {"between": "#f7f7f7"}, {}
    for place, lanes in enumerate(timelines.values()):
        left = 0.0
        seconds = seconds_by_kind(lanes)
        for kind, colour in colours.items():
            if kind in seconds:
                handles[kind] = axes.barh(
                    place,
                    seconds[kind],
                    left=left,
                    color=colour,
                    edgecolor="#999999",
                    linewidth=0.4,
                )
                left += seconds[kind]
    _bars_down(axes, list(timelines), "seconds (mean of the ranks)")
    ordered = [kind for kind in colours if kind in handles]
    labels = ["between forwards" if kind == "between" else kind for kind in ordered]
    _legend_below(figure, 6, [handles[kind] for kind in ordered], labels)
    return figure


def draw_stages(runs: list[Run]) -> Figure:
    """Seconds of whole runs by stage, mean over ranks: a stacked bar a run, with its speed-up over
    the first one's steps."""
    figure, (axes,) = _figure(10, 1.0 + 0.45 * len(runs))
    left = np.zeros(len(runs))
    for stage, (label, colour) in STAGES.items():
        seconds = np.array([np.nansum(run.column(f"timing_s/{stage}")) for run in runs])
        axes.barh(np.arange(len(runs)), seconds, left=left, color=colour, label=label)
        left += seconds
    for place, run in enumerate(runs):
        speedup = compare(run, runs[0]).step_speedup
        axes.text(
            left[place], place, f"  {left[place]:.1f} s, {speedup:.2f}x", va="center", fontsize=SIZE
        )
    _bars_down(axes, [run.name for run in runs], "seconds of training steps (mean of the ranks)")
    axes.set_xlim(0, 1.15 * left.max())
    _legend_below(figure, len(STAGES))
    return figure


def draw_tail(runs: list[Run]) -> Figure:
    """What a rollout's seconds and forwards follow: the longest response. A point a step and
    run."""
    figure, axes = _figure(10, 3.4, 1, 2)
    titles = {"seconds": "time of a rollout", "forwards": "forwards on the slowest rank"}
    for one, (unit, title) in zip(axes, titles.items(), strict=True):
        for run in runs:
            values = run.rollout_s if unit == "seconds" else run.column("rollout/forwards")
            longest = run.column("completions/max_length")
            one.plot(longest, values, "o", markersize=4, label=run.name)
        _label(one, title, "longest response of the step (tokens)", unit)
        one.set_ylim(0)
        one.legend(frameon=False, fontsize=SIZE)
    return figure


def draw_drafts(run: Run) -> Figure:
    """Response tokens of every step by where they came from: sources of drafts, or a forward of
    their own."""
    figure, (axes,) = _figure(10, 3.2)
    left, steps = np.zeros(len(run.steps)), run.column("step")
    for source, (label, colour) in SOURCES.items():
        tokens = np.nan_to_num(
            run.column(f"drafts/{source}/accept_rate") * run.column(f"drafts/{source}/tokens")
        )
        if tokens.any():
            axes.bar(steps, tokens, bottom=left, width=0.85, color=colour, label=label)
            left += tokens
    axes.bar(
        steps,
        num_response_tokens(run) - left,
        bottom=left,
        width=0.85,
        color=PLAIN,
        label="sampled after a forward",
    )
    _label(axes, "", "step", "response tokens")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_below(figure, 6)
    return figure


def draw_steps(runs: list[Run]) -> Figure:
    """Seconds of every step's rollout, a line a run."""
    figure, (axes,) = _figure(10, 2.8)
    for number, run in enumerate(runs):
        axes.plot(
            run.column("step"), run.rollout_s, linewidth=1.3, color=f"C{number}", label=run.name
        )
    _label(axes, "", "step", "seconds of the rollout")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0)
    axes.legend(frameon=False, fontsize=SIZE, ncols=len(runs))
    return figure


def draw_scaling(
    found: dict[float, tuple[float, float]], label: str, waiting_of: str = "none"
) -> Figure:
    """Speed-up, and share of the rollouts spent waiting, over what was varied: {value: (speed-up,
    share)}."""
    figure, axes = _figure(10, 3.0, 1, 2)
    values = list(found)
    units = ("rollout speed-up over none", f"share spent waiting, {waiting_of}")
    for number, (one, unit) in enumerate(zip(axes, units, strict=True)):
        figures = [pair[number] for pair in found.values()]
        one.plot(values, figures, "o-", color=f"C{number}", markersize=5)
        one.set_xscale("log", base=2)
        one.set_xticks(values, [f"{value:g}" for value in values])
        one.set_ylim(0, 1.1 * max(figures))
        _label(one, "simulated", label, unit)
    axes[0].axhline(1.0, color="#999999", linewidth=1, linestyle=":")
    return figure


def draw_learning(runs: list[Run]) -> Figure:
    """Training reward (thin) and held-out reward (dots), over steps and over seconds. Equal curves
    lie on one another, the first one widest."""
    figure, axes = _figure(10, 3.4, 1, 2, sharey=True)
    for number, run in enumerate(runs):
        width = 1 + 3 * (len(runs) - 1 - number) / max(len(runs) - 1, 1)
        steps = run.column("step") + 1
        updates = np.array([line["step"] for line in run.evaluations], float)
        held_out = [line["eval/reward"] for line in run.evaluations]
        style = {"color": f"C{number}", "linewidth": width}
        seconds = [seconds_so_far(run, steps), seconds_so_far(run, updates)]
        for one, (x, x_held_out) in zip(axes, ([steps, updates], seconds), strict=True):
            one.plot(x, run.column("reward"), alpha=0.35, **style)
            one.plot(x_held_out, held_out, "o-", markersize=3 + width, label=run.name, **style)
    _label(axes[0], "over steps", "updates", "reward: training (pale), held-out (dots)")
    _label(axes[1], "over time", "seconds of training steps")
    axes[1].legend(frameon=False, fontsize=SIZE, loc="lower right")
    return figure


def draw_training(arms: dict[str, dict], seeds: dict) -> Figure:
    """Training runs by what is switched on: their whole steps' speed-up over the first (a dot a
    seed), and held-out reward over seconds of training. See benchmarks/systems.py."""
    figure, axes = _figure(10, 3.4, 1, 2)
    for number, arm in enumerate(arms.values()):
        axes[0].bar(number, arm["speedup"], width=0.7, color=f"C{number}", alpha=0.6)
        place = [number] * len(arm["speedups"])
        axes[0].plot(place, arm["speedups"], "o", color=f"C{number}", markersize=4)
    axes[0].axhline(1.0, color="#999999", linewidth=1, linestyle=":")
    axes[0].set_xticks(range(len(arms)), list(arms), fontsize=SIZE, rotation=30)
    _label(axes[0], "whole steps, seconds a token", "", f"speed-up over {next(iter(arms))}")
    curves = {name: [of_seed[name]["curve"] for of_seed in seeds.values()] for name in arms}
    draw_curves(axes[1], curves)
    return figure


def draw_curves(axes, curves: dict[str, list[list[tuple[float, float]]]]) -> None:
    """Held-out reward over seconds of training by arm: pale lines for seeds, dots for their mean.
    curves: (seconds, reward) of each evaluation, for each seed of an arm."""
    for number, (name, of_seeds) in enumerate(curves.items()):
        found = [np.array(curve) for curve in of_seeds if curve]
        for curve in found:
            axes.plot(*curve.T, color=f"C{number}", alpha=0.3, linewidth=1)
        if found:
            style = {"color": f"C{number}", "linewidth": 1.5, "markersize": 4, "label": name}
            axes.plot(*np.mean(found, axis=0).T, "o-", **style)
    unit = "seconds of training, without evaluations"
    _label(axes, "reward against time", unit, "held-out reward")
    if axes.lines:
        axes.legend(frameon=False, fontsize=SIZE, loc="lower right")


def draw_acceptance(accepted: dict[str, list[float]]) -> Figure:
    """Chance that the first n tokens of a chain are all right, by the noise that it was drawn with;
    see benchmarks/drafter.py."""
    figure, (axes,) = _figure(7, 3.0)
    labels = {"coupled": "the row's own noise", "point_mass": "other noise"}
    for number, (name, shares) in enumerate(accepted.items()):
        place = np.arange(1, len(shares) + 1) + 0.38 * (number - (len(accepted) - 1) / 2)
        tokens = f"{1 + sum(shares):.2f} tokens a pass"
        axes.bar(
            place,
            shares,
            width=0.36,
            color=(DRAFTED, "#b0b0b0")[number % 2],
            label=f"{labels.get(name, name)}: {tokens}",
        )
    axes.set_xticks(range(1, len(shares) + 1))
    axes.set_ylim(0, 1)
    _label(axes, "", "tokens of a chain", "chance that all are right")
    axes.legend(frameon=False, fontsize=SIZE)
    return figure


def draw_adaptation(steps: list[dict]) -> Figure:
    """Tokens a pass of the drafter that goes on learning in idle time, and of a copy that does not,
    on each step's responses; not of steps in which nothing was learnt from."""
    steps = [step for step in steps if "adapted" in step]
    figure, (axes,) = _figure(7, 2.8)
    for name, label, colour, style in (
        ("adapted", "trained in idle time", DRAFTED, "o-"),
        ("static", "as it was after the warm start", "#8c8c8c", "s--"),
    ):
        axes.plot(
            [step["step"] for step in steps],
            [step[name] for step in steps],
            style,
            color=colour,
            label=label,
            markersize=5,
        )
    _label(axes, "", "step", "tokens a pass")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(1, None)
    axes.legend(frameon=False, fontsize=SIZE)
    return figure


def _bars_down(axes, names: list[str], unit: str) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=SIZE)
    axes.invert_yaxis()
    axes.set_xlabel(unit, fontsize=SIZE)
