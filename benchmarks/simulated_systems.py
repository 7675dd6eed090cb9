"""The published systems side by side, simulated: python benchmarks/simulated_systems.py --json OUT
[--lengths 8k,16k] ...

Eight H200s by a roofline, 64 prompts of 8 responses per step, lognormal lengths whose mean is an
eighth of the maximum, first mismatch of a draft after 500 tokens, and a mean acceptance length of 2
by suffix matches after it. Each system is one switch of this trainer; what is compared are seconds
of rollout for each token that is trained on, with those without tail batching and with prompts in
turn. Updates take no time, so streamed gradients are not there. A learned drafter is as good as
--drafter says, and there from the first step on.

Lengths are scaled down: a simulated token stands for max / --longest real ones. So prompts,
responses and first mismatches are that much shorter, an attended position costs that much more, and
seconds count that many times.

--picture draws the systems by length, --ablation the best combination with each part taken out or
changed, for the first of --sizes, at 16k if that is among --lengths, else at the last.
"""

import argparse
import os
import sys
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks.shared import check_names, main, markdown, write_json
from bubblespec.errors import InputError
from bubblespec.tools.simulate.command import synthetic_run, totals
from bubblespec.tools.simulate.roofline import roofline
from bubblespec.tools.simulate.run import SimulatedStep, counted, simulate
from bubblespec.tools.simulate.runner import Cost, DrafterModel
from bubblespec.tools.simulate.workload import Spec, parse

SIZES = ("7b", "32b")
RANKS, GENERATIONS = 8, 8
SHARE_OF_LONGEST = 8  # the mean of the lengths is so much below their maximum
PROMPT, MISMATCH, ACCEPT_LENGTH, EDITED = 256, 500, 2.0, 0.2
K = 1000

IDLE, TAIL = "speculative.method", "tail_batching.enabled"
RATIO, PLACEMENT = "tail_batching.over_sampling_ratio", "rollout.placement"
PROMPTS, SAMPLES = "rollout.num_prompts_per_step", "rollout.num_generations"
BEST = {IDLE: "bubble+suffix+drafter", TAIL: True, RATIO: 1.25, PLACEMENT: "balanced"}


class System(NamedTuple):
    """Something that is switched on."""

    keys: dict[str, Any] = {}  # noqa: RUF012
    """Of the configuration, over no tail batching with prompts in turn."""
    drafter: DrafterModel | None = None
    """In place of the one of --drafter."""
    second_epoch: bool = False
    """What counts is the second of two epochs."""
    paper: str = ""
    """What its paper reports, of its own hardware."""


SYSTEMS = {
    "plain": System(),
    "drafts of idle time": System(
        {IDLE: "bubble+suffix"},
        paper="BubbleSpec (2605.08862): rollouts up to 1.8x, decoding steps -50%",
    ),
    "drafts of the epoch before": System(
        {IDLE: "suffix"},
        second_epoch=True,
        paper="RhymeRL (2508.18588), HistoSpec alone: 1.50x (2.34x over 1.56x)",
    ),
    "balanced placement": System(
        {PLACEMENT: "balanced"},
        paper="RhymeRL, HistoPipe: 1.43x, two-tier 1.56x (a step off-policy)",
    ),
    "learned drafter": System({IDLE: "drafter"}, paper="TLT (2511.16665): 1.7x end to end"),
    "tail batching": System(
        {TAIL: True, RATIO: 1.25},
        paper="RollPacker (2509.21009), prompts deferred only: 1.14x / 1.64x / 2.60x at "
        "8k / 16k / 32k; all 2.03x to 2.56x",
    ),
    "all": System(BEST),
    "all, acceptance length 3": System(BEST, DrafterModel(3.0)),
}
# In pictures, where they are not words already.
LABELS = {
    "plain": "no drafts, prompts in turn",
    "drafts of idle time": "drafts from idle time",
    "drafts of the epoch before": "drafts from the previous epoch",
    "all": "all together",
    "all, acceptance length 3": "all together, acceptance length 3",
    "without drafts of idle time": "without drafts from idle time",
    "without any drafts but the drafter's": "with the drafter's drafts alone",
    "ratio 1.125": "over-sampling ratio 1.125 in place of 1.25",
    "ratio 1.5": "over-sampling ratio 1.5",
    "ratio auto": "over-sampling ratio auto",
}
BASELINES = {"plain": SYSTEMS["plain"], "plain, second epoch": System(second_epoch=True)}
CHANGED = "all, acceptance length 3"  # what the changes are made to
CHANGES = {
    "without tail batching": {TAIL: False},
    "without the drafter": {IDLE: "bubble+suffix"},
    "without drafts of idle time": {IDLE: "suffix+drafter"},
    "without any drafts but the drafter's": {IDLE: "drafter"},
    "without placement": {PLACEMENT: "in_turn"},
    "ratio 1.125": {RATIO: 1.125},
    "ratio 1.5": {RATIO: 1.5},
    "ratio auto": {RATIO: "auto"},
    "one slot per row": {"rollout.max_num_seqs": 64},
    "four slots per row": {"rollout.max_num_seqs": 256},
}


def scaled(cost: Cost, scale: float) -> Cost:
    """Return the cost of forwards whose rows have `scale` positions for each in their load."""
    return lambda load: cost(load._replace(positions=scale * load.positions))


def simulate_steps(
    arguments: argparse.Namespace, size: str, longest: int, system: System
) -> tuple[list[SimulatedStep], float]:
    """The steps of one system in simulated seconds and tokens, and how many real ones each of them
    stands for. longest: tokens that real responses have at most."""
    scale = longest / arguments.longest
    spec = Spec(
        mean=arguments.longest / SHARE_OF_LONGEST,
        max=arguments.longest,
        prompt=max(round(PROMPT / scale), 2),
        run=max(MISMATCH / scale, 1.0),
        accept_length=ACCEPT_LENGTH,
        steps=arguments.steps,
        epochs=2 if system.second_epoch else 1,
        edited=EDITED,
        seed=arguments.seed,
    )
    keys = {PLACEMENT: "in_turn", IDLE: "none"} | system.keys
    keys |= {PROMPTS: arguments.prompts, SAMPLES: GENERATIONS}
    config, workload = synthetic_run(spec, [f"{key}={value}" for key, value in keys.items()])
    cost = scaled(roofline("h200", size).seconds, scale)
    drafter = system.drafter or parse(DrafterModel, arguments.drafter, "--drafter")
    return simulate(config, workload, cost, RANKS, drafter=drafter), scale


def simulate_run(arguments: argparse.Namespace, size: str, longest: int, system: System) -> dict:
    """Figures of one system: totals in real seconds and simulated tokens. See `simulate_steps`."""
    steps, scale = simulate_steps(arguments, size, longest, system)
    steps = steps[len(steps) // 2 :] if system.second_epoch else counted(steps)
    found = totals(steps)
    for name in ("seconds", "seconds_per_token"):
        found[name] *= scale
    for name, is_long in (("short", False), ("long", True)):
        of_kind = [step.seconds for step in steps if step.is_long_round == is_long]
        found[f"{name}_round_s"] = scale * float(np.mean(of_kind)) if of_kind else None
    return found


def wanted_runs(
    sizes: list[str], lengths: list[int], has_changes: bool
) -> list[tuple[str, int, str, System]]:
    """(size, longest, name, system)."""
    systems = (BASELINES | SYSTEMS).items()
    runs = [(size, longest, *named) for size in sizes for longest in lengths for named in systems]
    best, longest = SYSTEMS[CHANGED], 16 * K if 16 * K in lengths else lengths[-1]
    for name, change in CHANGES.items() if has_changes else ():
        changed = best._replace(keys=best.keys | change)
        runs.append((sizes[0], longest, f"{CHANGED}; {name}", changed))
    return runs


def compare(runs: list[dict]) -> None:
    """Give each run its speed-up over the run without mechanisms of its size and lengths."""
    by_name = {(run["size"], run["longest"], run["system"]): run for run in runs}
    for run in runs:
        system = (BASELINES | SYSTEMS).get(run["system"], System())
        name = "plain, second epoch" if system.second_epoch else "plain"
        baseline = by_name[run["size"], run["longest"], name]
        run["speedup"] = baseline["seconds_per_token"] / run["seconds_per_token"]


def table(runs: list[dict], size: str) -> str:
    """Speed-ups of a size as Markdown: a line per system, a column per length."""
    of_size = {(run["system"], run["longest"]): run for run in runs if run["size"] == size}
    lengths = sorted({longest for _, longest in of_size})
    rows = []
    for name, system in SYSTEMS.items():
        row = {"": LABELS.get(name, name)}
        for longest in lengths:
            run = of_size.get((name, longest))
            row[f"{longest // K}k"] = f"{run['speedup']:.2f}x" if run else ""
        rows.append(row | {"its paper reports": system.paper})
    return markdown(rows)


def changes_of(runs: list[dict]) -> dict[str, dict]:
    """The best combination and its changes, by name."""
    prefix = f"{CHANGED}; "
    by_name = {run["system"]: run for run in runs}
    changed = {name: by_name[prefix + name] for name in CHANGES if prefix + name in by_name}
    if not changed:
        return {}
    where = [next(iter(changed.values()))[key] for key in ("size", "longest")]
    (best,) = (r for r in runs if [r["size"], r["longest"], r["system"]] == [*where, CHANGED])
    return {CHANGED: best} | changed


def table_of_changes(runs: list[dict]) -> str:
    """As Markdown."""
    rows = []
    for name, run in changes_of(runs).items():
        row = {"": LABELS.get(name, name), "rollouts": f"{run['speedup']:.2f}x"}
        for kind in ("short", "long"):
            seconds = run[f"{kind}_round_s"]
            row[f"{kind} round"] = f"{seconds:.1f} s" if seconds else ""
        rows.append(row | {"idle time": f"{run['idle_share']:.2f}"})
    return markdown(rows) if rows else ""


def draw_systems(runs: list[dict], heading: str) -> Figure:
    """A panel for each size: speed-up by maximum length, a line for each system with its value at
    the greatest length, and in the last panel its name."""
    sizes = list(dict.fromkeys(run["size"] for run in runs))
    figure = Figure(figsize=(3.2 + 3.9 * len(sizes), 4.4), layout="constrained")
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for panel, size in zip(panels, sizes, strict=True):
        ends = {}
        for number, name in enumerate(SYSTEMS):
            named = [run for run in runs if (run["size"], run["system"]) == (size, name)]
            points = sorted((run["longest"], run["speedup"]) for run in named)
            style = {"color": f"C{number - 1}", "marker": "o"}
            if name == "plain":
                style = {"color": "#888888", "linestyle": "--"}
            panel.plot(*zip(*points, strict=True), markersize=4, **style)
            ends[name] = (points[-1][1], style["color"])
        lengths = sorted({run["longest"] for run in runs if run["size"] == size})
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, [f"{longest // K}k" for longest in lengths])
        panel.minorticks_off()
        panel.set_title(f"{size.upper()} model", fontsize=10)
        panel.set_xlabel("longest response (tokens)")
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_ylim(0, 1.08 * max(run["speedup"] for run in runs))
        heights = spread([height for height, _ in ends.values()], 0.042 * panel.get_ylim()[1])
        for (name, (value, colour)), height in zip(ends.items(), heights, strict=True):
            text = f"{value:.2f}x"
            if panel is panels[-1]:
                text += f"  {LABELS.get(name, name)}"
            beside = {"transform": panel.get_yaxis_transform(), "va": "center", "fontsize": 8}
            panel.text(1.02, height, text, color=colour, **beside)
    panels[0].set_ylabel("speed-up of rollouts")
    figure.suptitle(heading, fontsize=9)
    return figure


def spread(heights: list[float], gap: float) -> list[float]:
    """The heights, moved up where two are closer than `gap`."""
    moved, last = [0.0] * len(heights), -float("inf")
    for i in sorted(range(len(heights)), key=heights.__getitem__):
        last = max(heights[i], last + gap)
        moved[i] = last
    return moved


def draw_changes(runs: list[dict], heading: str) -> Figure:
    """Bars: the best combination, and what is left of it without each of its parts, fastest
    first."""
    bars = {
        LABELS.get(name, name): run["speedup"]
        for name, run in changes_of(runs).items()
        if name == CHANGED or name.startswith("without")
    }
    bars = dict(sorted(bars.items(), key=lambda bar: -bar[1]))
    figure = Figure(figsize=(8, 1.0 + 0.42 * len(bars)), layout="constrained")
    axes = figure.subplots()
    colours = ["#1b9e77" if name == LABELS[CHANGED] else "#5aa5e0" for name in bars]
    values = axes.barh(list(bars), list(bars.values()), color=colours)
    axes.bar_label(values, fmt="%.2fx", padding=3)
    axes.axvline(1.0, color="#888888", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(bars.values()))
    axes.set_xlabel("speed-up of rollouts over no drafts, prompts in turn")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(heading, fontsize=9)
    return figure


def heading_of(settings: dict) -> str:
    """What pictures say above themselves."""
    prompts = f"{settings['prompts']} prompts x {GENERATIONS} responses per step"
    return f"Simulated, not measured: {RANKS} H200s by a roofline; {prompts}"


def drafter_of(settings: dict) -> str:
    """What the learned drafter is given, for the same place."""
    drafter = parse(DrafterModel, settings["drafter"], "--drafter")
    text = f"the learned drafter's mean acceptance length is given: {drafter.accept_length:g}"
    return f"{text}, where nothing else is said"


def run(arguments: argparse.Namespace, folder: str) -> None:
    sizes = check_names("--sizes", arguments.sizes, dict.fromkeys(SIZES))
    lengths = [as_tokens(text) for text in arguments.lengths.split(",")]
    if arguments.longest < 100 or arguments.steps % 2 or arguments.prompts < RANKS:
        raise InputError(f"--longest: at least 100; --steps: even; --prompts: at least {RANKS}")
    parse(DrafterModel, arguments.drafter, "--drafter")
    settings = {name: getattr(arguments, name) for name in ("longest", "steps", "prompts", "seed")}
    runs = []
    for size, longest, name, system in tqdm(wanted_runs(sizes, lengths, bool(arguments.ablation))):
        found = simulate_run(arguments, size, longest, system)
        runs.append({"size": size, "longest": longest, "system": name} | found)
    compare(runs)
    written = settings | {"drafter": arguments.drafter}
    write_json(arguments.json, {"settings": written, "runs": runs})
    for size in sizes:
        print(f"{size}\n{table(runs, size)}\n")
    print(table_of_changes(runs))
    heading = heading_of(settings)
    if arguments.picture:
        figure = draw_systems(runs, f"{heading}\n{drafter_of(written)}")
        figure.savefig(arguments.picture, dpi=120)
    if arguments.ablation:
        draw_changes(runs, heading).savefig(arguments.ablation, dpi=120)


def as_tokens(text: str) -> int:
    """Of 16k or 16000. Raises InputError."""
    number = text.removesuffix("k")
    if not number.isdigit() or not 0 < int(number) <= 1 << 20:
        raise InputError(f"--lengths: {text!r} is no number of tokens, like 16k")
    return int(number) * (K if text.endswith("k") else 1)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Published systems, simulated on eight H200s")
    parser.add_argument("--json", help="file for the runs")
    parser.add_argument("--lengths", default="8k,16k,32k,64k", help="of the longest response")
    parser.add_argument("--sizes", default="7b,32b", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--longest", type=int, default=500, help="simulated tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafter", default="accept_length=2.5,share=0.05", metavar="NAME=VALUE")
    parser.add_argument("--picture", help="PNG of the systems by length")
    parser.add_argument("--ablation", help="PNG of the best combination without its parts")
    return parser


if __name__ == "__main__":
    sys.exit(main(run, make_parser()))
