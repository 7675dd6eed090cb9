"""The published systems side by side, simulated: python benchmarks/simulated_systems.py --json OUT
[--lengths 8k,16k] ...

Eight H200s by their data sheet (see configs/cost), 64 prompts of 8 responses a step, lognormal
lengths whose mean is an eighth of the maximum, first mismatch of a draft after 500 tokens, and 2
tokens a forward by suffix matches after it. Each system is one switch of this trainer; what is
compared are seconds of rollout for each token that is trained on, with those of plain order with
prompts in turn. Updates take no time in the simulator, so streamed gradients are not there, and
neither is what all systems have in common. A learned drafter is as good as --drafter says, and
there from the first step on.

Lengths are scaled down: a simulated token stands for max / --longest real ones. So prompts,
responses and first mismatches are that much shorter, an attended position costs that much more, and
seconds count so many times.

OUT keeps every run: what is in it is not run again. --picture draws the systems by length,
--ablation the best combination with each part taken out or changed, which is simulated for the
first of --sizes, at 16k if that is among --lengths, else at the last.
"""

import argparse
import dataclasses
import json
import os
import sys
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks.shared import main
from bubblespec.config import Config, config_of_sections
from bubblespec.errors import InputError
from bubblespec.memory import most_slots
from bubblespec.simulate.__main__ import BLANK, describe_cost, nested, totals
from bubblespec.simulate.cost import ForwardCost
from bubblespec.simulate.drafter import DrafterModel
from bubblespec.simulate.run import SimulatedStep, counted, simulate
from bubblespec.simulate.workload import Synthetic, Workload, parse

SIZES = ("7b", "32b")
FOLDER = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "configs", "cost"
)
RANKS, GENERATIONS = 8, 8
SHARE_OF_LONGEST = 8  # the mean of the lengths is so much below their maximum
PROMPT, MISMATCH, TOKENS_A_PASS, EDITED = 256, 500, 2.0, 0.2
K = 1000

IDLE, TAIL = "speculative.method", "tail_batching.enabled"
RATIO, PLACEMENT = "tail_batching.over_sampling_ratio", "rollout.placement"
BEST = {IDLE: "bubble+suffix+drafter", TAIL: True, RATIO: 1.25, PLACEMENT: "balanced"}


class System(NamedTuple):
    """Something that is switched on."""

    overrides: dict[str, Any] = {}  # noqa: RUF012
    """Keys of the configuration, over plain order with prompts in turn."""
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
        paper="RollPacker (2509.21009), prompts deferred only: 1.14x / 1.64x / 2.60x at 8k / 16k / 32k; all 2.03x to 2.56x",
    ),
    "all": System(BEST),
    "all, 3 tokens a pass": System(BEST, DrafterModel(3.0)),
}
BASELINES = {"plain": SYSTEMS["plain"], "plain, second epoch": System(second_epoch=True)}
CHANGES = {
    "without tail batching": {TAIL: False},
    "without the drafter": {IDLE: "bubble+suffix"},
    "without drafts of idle time": {IDLE: "suffix+drafter"},
    "without any drafts but the drafter's": {IDLE: "drafter"},
    "without placement": {PLACEMENT: "in_turn"},
    "rows taken over": {PLACEMENT: "balanced+take_over"},
    "ratio 1.125": {RATIO: 1.125},
    "ratio 1.5": {RATIO: 1.5},
    "ratio auto": {RATIO: "auto"},
    "look-ahead 1": {"bubble.lookahead": 1},
    "look-ahead 4": {"bubble.lookahead": 4},
    "one slot a row": {"rollout.num_slots": 64},
    "four slots a row": {"rollout.num_slots": 256},
}
CHANGED = "all, 3 tokens a pass"  # what the changes are made to


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all runs of a file have in common."""

    longest: int
    """Simulated tokens of the longest response."""
    steps: int
    prompts: int
    """Of a step."""
    seed: int
    drafter: DrafterModel


def scaled(cost: ForwardCost, scale: float) -> ForwardCost:
    """Of forwards whose rows have `scale` positions for each one that they seem to have."""
    rates = {
        name: rate * (scale if name in ("positions", "pairs") else 1.0)
        for name, rate in cost.rates.items()
    }
    return dataclasses.replace(cost, rates=rates)


def simulate_run(setting: Setting, size: str, longest: int, system: System) -> dict:
    """Figures of one system. longest: tokens that real responses have at most."""
    scale = longest / setting.longest
    spec = Synthetic(
        mean=setting.longest / SHARE_OF_LONGEST,
        max=setting.longest,
        prompt=max(round(PROMPT / scale), 2),
        run=max(MISMATCH / scale, 1.0),
        tokens_a_pass=TOKENS_A_PASS,
        steps=setting.steps,
        epochs=2 if system.second_epoch else 1,
        edited=EDITED,
        seed=setting.seed,
    )
    workload = Workload(spec, setting.prompts, GENERATIONS)
    drafter = workload.drafter = system.drafter or setting.drafter
    given = {
        "rollout.num_prompts_per_step": setting.prompts,
        "rollout.num_generations": GENERATIONS,
    }
    given |= {
        "rollout.max_completion_length": setting.longest,
        "rollout.max_prompt_length": 2 * spec.prompt,
    }
    given |= {"rollout.max_batch_tokens": 8192, PLACEMENT: "in_turn", IDLE: "none"}
    given["bubble.max_draft_tokens"] = 1 << 28  # host memory is not what this is about
    config = config_of_sections(nested(BLANK | given | system.overrides), [], "a system")
    cost = scaled(ForwardCost.load(os.path.join(FOLDER, f"h200_{size}.json")), scale)
    steps = simulate(config, workload, cost, RANKS)
    return figures(
        steps[len(steps) // 2 :] if system.second_epoch else counted(steps),
        config,
        cost,
        drafter,
        scale=scale,
    )


def figures(
    steps: list[SimulatedStep],
    config: Config,
    cost: ForwardCost,
    drafter: DrafterModel,
    *,
    scale: float,
) -> dict:
    """Totals in real seconds and simulated tokens, and two bounds on the seconds: of the longest
    row of each step by itself, and of all tokens in forwards without a free slot."""
    found = totals(steps)
    mean = found["response_tokens"] / (
        len(steps) * config.rollout.num_prompts_per_step * GENERATIONS
    )
    slots = (
        most_slots(config, RANKS)
        if config.rollout.num_slots == "auto"
        else int(config.rollout.num_slots)
    )
    full_s = cost.seconds((slots, slots, 0, slots * mean / 2, 0, 0)) / slots
    longest_s = sum(
        step.longest_tokens * alone_s(config, cost, drafter, step.longest_tokens) for step in steps
    )
    found |= {"longest_s": longest_s, "full_s": found["response_tokens"] / RANKS * full_s}
    for name, is_long in (("short", False), ("long", True)):
        of_kind = [step.seconds for step in steps if step.is_long_round == is_long]
        found[f"{name}_round_s"] = scale * float(np.mean(of_kind)) if of_kind else None
    for name in ("seconds", "seconds_per_token", "longest_s", "full_s"):
        found[name] *= scale
    return found


def alone_s(config: Config, cost: ForwardCost, drafter: DrafterModel, length: int) -> float:
    """Seconds for each token of a row that is alone on its rank, beyond the first mismatch of its
    draft."""
    method, plain_s = config.speculative.method, cost.seconds((1, 1, 0, length / 2, 0, 0))
    found = [plain_s]
    if "suffix" in method or config.tail_batching.enabled:
        found.append(plain_s / TOKENS_A_PASS)
    if "drafter" in method:
        gained = 1 + np.cumsum(drafter.accepted())
        for count, tokens in enumerate(gained.tolist(), start=1):
            forward_s = cost.seconds((1, 1 + count, 1, length / 2, 0, count))
            found.append((forward_s + count * drafter.share * plain_s) / tokens)
    return min(found)


def wanted_runs(
    sizes: list[str], lengths: list[int], has_changes: bool
) -> list[tuple[str, int, str, System]]:
    """(size, longest, name, system), baselines before what is compared with them."""
    systems = BASELINES | SYSTEMS
    runs = [
        (size, longest, name, system)
        for size in sizes
        for longest in lengths
        for name, system in systems.items()
    ]
    if has_changes:
        of_best = SYSTEMS[CHANGED]
        longest = 16 * K if 16 * K in lengths else lengths[-1]
        for name, change in CHANGES.items():
            runs.append(
                (
                    sizes[0],
                    longest,
                    f"{CHANGED}; {name}",
                    of_best._replace(overrides=of_best.overrides | change),
                )
            )
    return runs


def read(path: str | None, settings: dict) -> list[dict]:
    """The runs of a file, none where there is no file. Raises InputError for a file of other
    settings."""
    if path is None or not os.path.exists(path):
        return []
    try:
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        found, runs = report["settings"], report["runs"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"--json: {path} exists and is no file of this benchmark") from error
    if found != settings:
        other = ", ".join(name for name in settings if found.get(name) != settings[name])
        raise InputError(f"--json: {path} has runs of another {other}; give another file")
    return runs


def write(path: str | None, settings: dict, runs: list[dict]) -> None:
    if path is None:
        return
    report = {
        "settings": settings,
        "papers": {name: system.paper for name, system in SYSTEMS.items()},
        "runs": runs,
    }
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
    os.replace(f"{path}.part", path)


def compare(runs: list[dict]) -> None:
    """Give each run its speed-up over the plain one of its size and lengths."""
    by_name = {(run["size"], run["longest"], run["system"]): run for run in runs}
    for run in runs:
        name = run["system"] if run["system"] in BASELINES else "plain"
        if run["system"] in SYSTEMS and SYSTEMS[run["system"]].second_epoch:
            name = "plain, second epoch"
        run["speedup"] = (
            by_name[run["size"], run["longest"], name]["seconds_per_token"]
            / run["seconds_per_token"]
        )


def table(runs: list[dict], size: str) -> str:
    """Speed-ups of a size as Markdown: a line a system, a column a length."""
    of_size = {(run["system"], run["longest"]): run for run in runs if run["size"] == size}
    lengths = sorted({longest for _, longest in of_size})
    lines = [
        ["", *(f"{longest // K}k" for longest in lengths), "reported"],
        ["---"] * (len(lengths) + 2),
    ]
    for name, system in SYSTEMS.items():
        cells = [
            f"{of_size[name, n]['speedup']:.2f}x" if (name, n) in of_size else "" for n in lengths
        ]
        lines.append([name, *cells, system.paper])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def changes_of(runs: list[dict]) -> dict[str, dict]:
    """The best combination and its changes, by name."""
    changed = {
        run["system"].partition("; ")[2]: run
        for run in runs
        if run["system"].startswith(f"{CHANGED}; ")
    }
    if not changed:
        return {}
    one = next(iter(changed.values()))
    best = next(
        run
        for run in runs
        if (run["size"], run["longest"], run["system"]) == (one["size"], one["longest"], CHANGED)
    )
    return {CHANGED: best} | changed


def table_of_changes(runs: list[dict]) -> str:
    """As Markdown, with what bounds each: shares of the seconds that the longest rows alone, and
    full forwards, would take."""
    lines = [
        [
            "",
            "rollouts",
            "short round",
            "long round",
            "waiting",
            "longest rows alone",
            "forwards without a free slot",
        ]
    ]
    lines.append(["---"] * len(lines[0]))
    for name, run in changes_of(runs).items():
        rounds = [
            f"{run[f'{kind}_round_s']:.1f} s" if run[f"{kind}_round_s"] else ""
            for kind in ("short", "long")
        ]
        shares = [f"{run[bound] / run['seconds']:.2f}" for bound in ("longest_s", "full_s")]
        lines.append(
            [name, f"{run['speedup']:.2f}x", *rounds, f"{run['bubble_ratio']:.2f}", *shares]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw_systems(runs: list[dict], heading: str) -> Figure:
    """A figure with a panel for each size: speed-up by maximum length, a line for each system."""
    sizes = list(dict.fromkeys(run["size"] for run in runs))
    figure = Figure(figsize=(2.6 + 3.6 * len(sizes), 4.2), layout="constrained")
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)
    for panel, size in zip(panels[0], sizes, strict=True):
        for number, name in enumerate(SYSTEMS):
            points = sorted(
                (run["longest"], run["speedup"])
                for run in runs
                if (run["size"], run["system"]) == (size, name)
            )
            style = (
                {"color": "#888888", "linestyle": "--"}
                if name == "plain"
                else {"color": f"C{number - 1}", "marker": "o"}
            )
            panel.plot(
                [longest for longest, _ in points],
                [speedup for _, speedup in points],
                label=name,
                markersize=4,
                **style,
            )
        lengths = sorted({run["longest"] for run in runs if run["size"] == size})
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, [f"{longest // K}k" for longest in lengths])
        panel.minorticks_off()
        panel.set_title(size.upper(), fontsize=10)
        panel.set_xlabel("longest response (tokens)")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_ylabel("rollouts: speed-up over plain")
    panels[0, 0].set_ylim(bottom=0)
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(),
        loc="outside right center",
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(heading, fontsize=9)
    return figure


def draw_changes(runs: list[dict], heading: str) -> Figure:
    """A figure of bars: the best combination, and what is left of it without each of its parts."""
    bars = {
        name: run["speedup"]
        for name, run in changes_of(runs).items()
        if name == CHANGED or name.startswith("without")
    }
    figure = Figure(figsize=(8, 1.0 + 0.42 * len(bars)), layout="constrained")
    axes = figure.subplots()
    colours = ["#1b9e77"] + ["#5aa5e0"] * (len(bars) - 1)
    drawn = axes.barh(list(bars), list(bars.values()), color=colours)
    axes.bar_label(drawn, fmt="%.2fx", padding=3)
    axes.axvline(1.0, color="#888888", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(bars.values()))
    axes.set_xlabel("rollouts: speed-up over plain")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(heading, fontsize=9)
    return figure


def heading_of(settings: dict) -> str:
    """What pictures say above themselves."""
    return f"Simulated: {RANKS} H200s by their data sheet, not measured; {settings['prompts']} prompts x {GENERATIONS} responses"


def run(arguments: argparse.Namespace, folder: str) -> None:
    sizes, lengths = (
        arguments.sizes.split(","),
        [as_tokens(text) for text in arguments.lengths.split(",")],
    )
    if unknown := [size for size in sizes if size not in SIZES]:
        raise InputError(f"--sizes: {', '.join(unknown)} unknown; valid are {', '.join(SIZES)}")
    if (
        arguments.longest < 100
        or arguments.steps < 2
        or arguments.steps % 2
        or arguments.prompts < RANKS
    ):
        raise InputError(
            f"--longest: at least 100; --steps: an even number; --prompts: at least {RANKS}"
        )
    drafter = parse(DrafterModel, arguments.drafter, "--drafter")
    setting = Setting(
        arguments.longest, arguments.steps, arguments.prompts, arguments.seed, drafter
    )
    costs = {
        size: describe_cost(ForwardCost.load(os.path.join(FOLDER, f"h200_{size}.json")))
        for size in SIZES
    }
    settings = dataclasses.asdict(setting) | {"costs": costs}
    runs, wanted = (
        read(arguments.json, settings),
        wanted_runs(sizes, lengths, bool(arguments.ablation)),
    )
    known = {(entry["size"], entry["longest"], entry["system"]) for entry in runs}
    missing = [one for one in wanted if one[:3] not in known]
    for size, longest, name, system in (bar := tqdm(missing, unit="run")):
        bar.set_description(f"{size}, {longest // K}k, {name}")
        found = simulate_run(setting, size, longest, system)
        runs.append({"size": size, "longest": longest, "system": name} | found)
        write(arguments.json, settings, runs)
    compare(runs)
    write(arguments.json, settings, runs)
    for size in dict.fromkeys(entry["size"] for entry in runs):
        print(
            f"{costs[size]}; {RANKS} ranks, {arguments.prompts} prompts x {GENERATIONS}\n{table(runs, size)}\n"
        )
    if changes_of(runs):
        print(table_of_changes(runs))
    for path, draw in ((arguments.picture, draw_systems), (arguments.ablation, draw_changes)):
        if path:
            draw(runs, heading_of(settings)).savefig(path, dpi=120)


def as_tokens(text: str) -> int:
    """Of 16k or 16000. Raises InputError."""
    number = text.removesuffix("k")
    if not number.isdigit() or not 0 < int(number) <= 1 << 20:
        raise InputError(f"--lengths: {text!r} is no number of tokens, like 16k")
    return int(number) * (K if text.endswith("k") else 1)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="The published systems side by side, simulated on eight H200s"
    )
    parser.add_argument("--json", help="the runs; what it has is kept, what is missing is added")
    parser.add_argument(
        "--lengths", default="8k,16k,32k,64k", help="tokens of the longest response"
    )
    parser.add_argument("--sizes", default="7b,32b", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument(
        "--longest",
        type=int,
        default=500,
        help="simulated tokens that stand for the longest response",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--drafter", default="tokens_a_pass=2.5,share=0.05", metavar="NAME=VALUE,..."
    )
    parser.add_argument("--picture", help="PNG of the systems by length")
    parser.add_argument("--ablation", help="PNG of the best combination without each of its parts")
    return parser


if __name__ == "__main__":
    sys.exit(main(run, make_parser()))
