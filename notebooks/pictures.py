"""Pictures of runs and samples, one figure per function; report_pictures.py has benchmarks."""

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from bubblespec.telemetry.timeline import COLOURS, GAPS, LABELS, draw_lanes
from notebooks.reading import Run, compare, num_response_tokens, seconds_by_kind, seconds_so_far

PLAIN, DRAFTED = "#5aa5e0", "#1b9e77"  # as decode and verify in timelines
STAGES = {
    "gen": ("generate", "#5aa5e0"),
    "bubble": ("idle (wait for the slowest rank)", "#c8c8c8"),
    "reward": ("rewards, exchange", "#e78ac3"),
    "train": ("train", "#7b52ab"),
    "sync": ("sum gradients", "#1a1a1a"),
}
SOURCES = {
    "aligned": ("its own draft", "#1b9e77"),
    "own": ("its own draft, found again by suffix match", "#7fcdbb"),
    "sibling": ("other samples of the prompt", "#f2c230"),
    "self": ("its own text", "#e3701a"),
    "history": ("earlier epochs", "#8c510a"),
    "drafter": ("the learned drafter", "#9c8ade"),
}
RULES = ("#8c8c8c", "#1b9e77", "#d62728")  # no tail batching, ours, and deferred prompts resampled
SIZE = 9


def figure_of(width: float, height: float, rows: int = 1, columns: int = 1, **options):
    """Make a figure, without pyplot, and an array of its axes [rows * columns]."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns, **options)).ravel()
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=SIZE)
    return figure, axes


def legend_below(figure, columns: int, *what) -> None:
    options = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    figure.legend(*what, fontsize=SIZE, **options)


def label_axes(axes, title: str, x: str = "", y: str = "") -> None:
    axes.set_title(title, fontsize=SIZE + 1)
    axes.set_xlabel(x, fontsize=SIZE)
    axes.set_ylabel(y, fontsize=SIZE)


def draw_origins(panels: dict[str, list[list[bool]]]) -> Figure:
    """Draw responses as rows of pixels, coloured by whether a draft gave the token."""
    figure, axes = figure_of(10, 3.2, 1, len(panels), sharex=True, sharey=True)
    longest = max(len(row) for rows in panels.values() for row in rows)
    for one, (title, rows) in zip(axes, panels.items(), strict=True):
        image = np.ones((len(rows), longest, 4))
        for i, row in enumerate(rows):
            image[i, : len(row)] = [to_rgba(DRAFTED if is_drafted else PLAIN) for is_drafted in row]
        one.imshow(image, aspect="auto", interpolation="nearest")
        label_axes(one, title, "response token")
    axes[0].set_ylabel("response", fontsize=SIZE)
    labels = {PLAIN: "sampled by a forward of its own", DRAFTED: "accepted draft token"}
    handles = [Patch(facecolor=colour, label=label) for colour, label in labels.items()]
    legend_below(figure, 2, handles, list(labels.values()))
    return figure


def draw_law(law: np.ndarray, counts: np.ndarray, names: list[str]) -> Figure:
    """Draw a distribution over tokens, and counts with two standard errors. Both: [tokens]."""
    figure, (axes,) = figure_of(8, 3.2)
    axes.bar(names, law, width=0.8, color="#dddddd", label="the policy: softmax of its logits")
    error = 2 * np.sqrt(law * (1 - law) / counts.sum())
    style = {"fmt": "o", "markersize": 3, "linewidth": 1}
    style["label"] = "samples, with drafts (two standard errors)"
    axes.errorbar(names, counts / counts.sum(), error, **style)
    label_axes(axes, "", "next token", "share of samples")
    axes.legend(frameon=False, fontsize=SIZE)
    return figure


def draw_trap(law: np.ndarray, lengths: dict[str, np.ndarray], longest: int = 25) -> Figure:
    """Draw histograms of response lengths by title, against `law`, [lengths] from 1."""
    figure, axes = figure_of(10, 5, 2, 2, sharex=True, sharey=True)
    mean = law @ np.arange(1, len(law) + 1)
    place = np.arange(1, longest + 1)
    for one, (title, found) in zip(axes, lengths.items(), strict=True):
        share = np.bincount(found, minlength=len(law) + 1)[1:] / len(found)
        one.bar(place, share[:longest], width=0.9, color="#9ecae1", label="responses")
        style = {"color": "#222222", "linewidth": 1.2, "label": "distribution of the policy"}
        one.plot(place, law[:longest], **style)
        for x, of, style in ((mean, "policy's", ":"), (found.mean(), "responses'", "-")):
            colour = "#d62728" if style == "-" else "#222222"
            one.axvline(x, color=colour, linestyle=style, label=f"{of} mean {x:.2f}")
        label_axes(one, title, "response length (tokens)", "share of responses")
        one.label_outer()
        one.legend(frameon=False, fontsize=SIZE - 1)
    return figure


def draw_ratios(ratios: dict[str, np.ndarray]) -> Figure:
    """Draw the mean length trained on up to each step, over the policy's, by rule: [steps]."""
    figure, (axes,) = figure_of(10, 3.6)
    axes.axhline(1.0, color="#222222", linewidth=1)
    for (name, ratio), colour in zip(ratios.items(), RULES, strict=True):
        axes.plot(np.arange(1, len(ratio) + 1), ratio, label=name, color=colour, linewidth=1.6)
    title = "mean length of all responses trained on so far, over that of the policy"
    label_axes(axes, title, "steps")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=SIZE, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_quantiles(lengths: dict[str, np.ndarray], true: np.ndarray) -> Figure:
    """Draw how often lengths were trained on, over how often they occur, in tenths of `true`.

    lengths: int64 [responses] by rule; true: int64 [responses].
    """
    figure, (axes,) = figure_of(10, 3.6)
    edges = np.unique(np.quantile(true, [*np.linspace(0, 0.9, 10), 0.95, 0.99]).astype(int))

    def shares(found: np.ndarray) -> np.ndarray:
        place = np.maximum(np.searchsorted(edges, found, side="right") - 1, 0)
        return np.bincount(place, minlength=len(edges)) / len(found)

    axes.axhline(1.0, color="#222222", linewidth=1)
    for (name, found), colour in zip(lengths.items(), RULES, strict=True):
        style = {"markersize": 4, "color": colour, "linewidth": 1.6}
        axes.plot(range(len(edges)), shares(found) / shares(true), "o-", label=name, **style)
    axes.set_xticks(range(len(edges)), [f"{edge}+" for edge in edges])
    title = "how often responses were trained on, over how often the policy gives them"
    label_axes(axes, title, "length of the response (tokens)")
    axes.set_ylim(0, None)
    axes.legend(frameon=False, fontsize=SIZE, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_timelines(timelines: dict[str, list[np.ndarray]], columns: int = 5) -> Figure:
    """Draw lanes of steps by title, on one scale of seconds. columns: of the legend."""
    height = 1.1 + sum(0.8 + 0.3 * len(lanes) for lanes in timelines.values())
    figure, axes = figure_of(10, height, len(timelines), sharex=True)
    handles = {}
    for one, (title, lanes) in zip(axes, timelines.items(), strict=True):
        handles |= {patch.get_label(): patch for patch in draw_lanes(one, lanes)}
        one.set_title(title, fontsize=SIZE + 1, loc="left")
        one.set_xlabel("")
    axes[-1].set_xlim(0, max(lane[:, 2].max() for lanes in timelines.values() for lane in lanes))
    axes[-1].set_xlabel("seconds since the step began", fontsize=SIZE)
    ordered = [handles[name] for name in [*LABELS.values(), GAPS] if name in handles]
    legend_below(figure, columns, ordered, [patch.get_label() for patch in ordered])
    return figure


def draw_kinds(timelines: dict[str, list[np.ndarray]]) -> Figure:
    """Draw seconds of a step by kind, mean over ranks: a stacked bar per timeline."""
    figure, (axes,) = figure_of(10, 1.0 + 0.5 * len(timelines))
    colours = {LABELS[kind]: colour for kind, colour in COLOURS.items()}
    colours, handles = colours | {GAPS: "#f7f7f7"}, {}
    for place, lanes in enumerate(timelines.values()):
        left, seconds = 0.0, seconds_by_kind(lanes)
        for kind, colour in colours.items():
            if kind in seconds:
                outline = {"edgecolor": "#999999", "linewidth": 0.4}
                bar = axes.barh(place, seconds[kind], left=left, color=colour, **outline)
                handles[kind] = bar
                left += seconds[kind]
        axes.text(left, place, f"  {left:.2f} s", va="center", fontsize=SIZE)
    _bars_down(axes, list(timelines), "seconds (mean of the ranks)")
    axes.set_xlim(0, 1.1 * axes.dataLim.x1)
    ordered = [kind for kind in colours if kind in handles]
    legend_below(figure, 6, [handles[kind] for kind in ordered], ordered)
    return figure


def draw_stages(runs: list[Run]) -> Figure:
    """Draw seconds of whole runs by stage: a stacked bar per run, and its speed-up."""
    figure, (axes,) = figure_of(10, 1.0 + 0.45 * len(runs))
    left = np.zeros(len(runs))
    for stage, (label, colour) in STAGES.items():
        seconds = np.array([np.nansum(run.column(f"timing_s/{stage}")) for run in runs])
        axes.barh(np.arange(len(runs)), seconds, left=left, color=colour, label=label)
        left += seconds
    for place, run in enumerate(runs):
        speedup = compare(run, runs[0]).step_speedup
        text = f"  {left[place]:.1f} s, {speedup:.2f}x"
        axes.text(left[place], place, text, va="center", fontsize=SIZE)
    _bars_down(axes, [run.label for run in runs], "seconds of training steps (mean of the ranks)")
    axes.set_xlim(0, 1.15 * left.max())
    legend_below(figure, len(STAGES))
    return figure


def draw_tail(runs: list[Run]) -> Figure:
    """Draw seconds and forwards of rollouts over the longest response: a point per step."""
    figure, axes = figure_of(10, 3.4, 1, 2)
    titles = {"seconds": "time of a rollout", "forwards": "forwards on the slowest rank"}
    for one, (unit, title) in zip(axes, titles.items(), strict=True):
        for run in runs:
            values = run.rollout_s if unit == "seconds" else run.column("rollout/forwards")
            longest = run.column("completions/max_length")
            one.plot(longest, values, "o", markersize=4, label=run.label)
        label_axes(one, title, "longest response of the step (tokens)", unit)
        one.set_ylim(0)
    legend_below(figure, 2, *axes[0].get_legend_handles_labels())
    return figure


def draw_drafts(run: Run) -> Figure:
    """Draw response tokens of every step by source of drafts, or none."""
    figure, (axes,) = figure_of(10, 3.2)
    left, steps = np.zeros(len(run.steps)), run.column("step")
    for source, (label, colour) in SOURCES.items():
        rate, drafted = (run.column(f"drafts/{source}/{key}") for key in ("accept_rate", "tokens"))
        tokens = np.nan_to_num(rate * drafted)
        if tokens.any():
            axes.bar(steps, tokens, bottom=left, width=0.85, color=colour, label=label)
            left += tokens
    rest, label = num_response_tokens(run) - left, "sampled by a forward of its own"
    axes.bar(steps, rest, bottom=left, width=0.85, color=PLAIN, label=label)
    label_axes(axes, "", "step", "response tokens")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(figure, 3)
    return figure


def draw_steps(runs: list[Run]) -> Figure:
    """Draw seconds of every step's rollout, a line per run."""
    figure, (axes,) = figure_of(10, 2.8)
    for number, run in enumerate(runs):
        style = {"linewidth": 1.3, "color": f"C{number}", "label": run.label}
        axes.plot(run.column("step"), run.rollout_s, **style)
    label_axes(axes, "", "step", "seconds of the rollout")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0)
    legend_below(figure, 2)
    return figure


def draw_learning(runs: list[Run]) -> Figure:
    """Draw training and held-out reward (dots), over steps and over seconds.

    Equal curves lie on one another, the first one widest. Training rewards of long runs are means
    of the last twentieth of the steps.
    """
    figure, axes = figure_of(10, 3.4, 1, 2, sharey=True)
    for number, run in enumerate(runs):
        width = 1 + 3 * (len(runs) - 1 - number) / max(len(runs) - 1, 1)
        steps = run.column("step")
        updates = np.array([line["step"] for line in run.evaluations], float)
        held_out = [line.get("eval/reward", np.nan) for line in run.evaluations]
        style = {"color": f"C{number}", "linewidth": width}
        seconds = [seconds_so_far(run, steps), seconds_so_far(run, updates)]
        num_averaged = max(1, len(steps) // 20)
        weights = np.full(num_averaged, 1 / num_averaged)
        reward = np.convolve(run.column("reward"), weights, "valid")
        for one, (x, x_held_out) in zip(axes, ([steps, updates], seconds), strict=True):
            one.plot(x[num_averaged - 1 :], reward, alpha=0.35, **style)
            one.plot(x_held_out, held_out, "o-", markersize=3 + width, label=run.label, **style)
    label_axes(axes[0], "over steps", "updates", "reward: training (pale), held-out (dots)")
    label_axes(axes[1], "over time", "seconds of training steps")
    legend_below(figure, 2, *axes[1].get_legend_handles_labels())
    return figure


def _bars_down(axes, names: list[str], unit: str) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=SIZE)
    axes.invert_yaxis()
    axes.set_xlabel(unit, fontsize=SIZE)
