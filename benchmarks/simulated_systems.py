"""The published systems side by side, simulated: python benchmarks/simulated_systems.py --json OUT
[--lengths 8k,16k] ...

Eight H200s by a roofline, 64 prompts of 8 responses per step, lognormal lengths whose mean is an
eighth of the maximum, first mismatch of a draft after 500 tokens, and a mean acceptance length of 2
by suffix matches after it. Each system is one switch of this trainer, or several; what is compared
are seconds of rollout for each token that is trained on, with those without any mechanism and with
prompts in turn. Updates take no time, so streamed gradients are missing. A learned drafter is as
good as --drafter says, and a token of the quantised copy's chain as --quantized says, from the
first step on.

A simulated token stands for max / --longest real ones, so prompts, responses and first mismatches
are that much shorter, an attended position costs that much more, and seconds count that many times.

--picture draws the systems by length, --ablation the combination of all with each part taken out or
changed, for the first of --sizes, at 16k if that is among --lengths, else at the last. Runs are
added to the file of --json one by one, and what it has already is not run again.
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

from benchmarks import shared
from bubblespec.errors import InputError, log
from bubblespec.tools.simulate.command import synthetic_run, totals
from bubblespec.tools.simulate.recorded import load_copy_cost, load_cost
from bubblespec.tools.simulate.run import counted, simulate
from bubblespec.tools.simulate.runner import CopyModel, Cost, DrafterModel
from bubblespec.tools.simulate.workload import Spec, parse
from notebooks import report_pictures

SIZES = ("7b", "32b")
RANKS, GENERATIONS = 8, 8
SHARE_OF_LONGEST = 8  # the mean of the lengths is so much below their maximum
PROMPT, MISMATCH, ACCEPT_LENGTH, EDITED = 256, 500, 2.0, 0.2
K = 1000

METHOD, TAIL = "speculative.method", "tail_batching.enabled"
RATIO, PLACEMENT = "tail_batching.over_sampling_ratio", "rollout.placement"
TP = "rollout.tp_tail_max_rows"
PROMPTS, SAMPLES = "rollout.num_prompts_per_step", "rollout.num_generations"
PLAIN = {METHOD: "none", PLACEMENT: "in_turn", TP: 0}
DEFAULT = {METHOD: "bubble+suffix+quantized", PLACEMENT: "balanced", TP: "auto"}
ALL = {**DEFAULT, METHOD: "bubble+suffix+quantized+drafter", TAIL: True, RATIO: 1.25}


class System(NamedTuple):
    """Keys that differ from no mechanism with prompts in turn."""

    keys: dict[str, Any] = {}  # noqa: RUF012
    drafter: DrafterModel | None = None  # drafter in place of the one of --drafter
    second_epoch: bool = False  # whether the second of two epochs counts alone
    paper: str = ""  # speed-up that its paper reports, of its own hardware


SYSTEMS = {
    "plain": System(),
    "drafts of idle time": System(
        {METHOD: "bubble+suffix"},
        paper="BubbleSpec (2605.08862): rollouts up to 1.8x, decoding steps -50%",
    ),
    "drafts of the epoch before": System(
        {METHOD: "suffix"},
        second_epoch=True,
        paper="RhymeRL (2508.18588), HistoSpec alone: 1.50x (2.34x over 1.56x)",
    ),
    "balanced placement": System(
        {PLACEMENT: "balanced"},
        paper="RhymeRL, HistoPipe: 1.43x, two-tier 1.56x (a step off-policy)",
    ),
    "learned drafter": System({METHOD: "drafter"}, paper="TLT (2511.16665): 1.7x end to end"),
    "tail batching": System(
        {TAIL: True, RATIO: 1.25},
        paper="RollPacker (2509.21009), prompts deferred only: 1.14x / 1.64x / 2.60x at "
        "8k / 16k / 32k; all 2.03x to 2.56x",
    ),
    "quantised copy": System(
        {METHOD: "quantized"}, paper="EfficientRollout (2606.18967): 1.24x, with int4 on 8 A100s"
    ),
    "TP tail": System({TP: "auto"}),
    "drafts of idle time, copy": System({METHOD: DEFAULT[METHOD]}),
    "default": System(DEFAULT),
    "learned drafter, copy": System({METHOD: "quantized+drafter"}),
    "default, drafter": System({**DEFAULT, METHOD: ALL[METHOD]}),
    "all": System(ALL),
    "all, acceptance length 3": System(ALL, DrafterModel(3.0)),
}
LABELS = {
    "plain": "no drafts, prompts in turn",
    "drafts of idle time": "drafts from idle time",
    "drafts of the epoch before": "drafts from the previous epoch",
    "drafts of idle time, copy": "drafts from idle time, quantised copy",
    "default": "default: drafts from idle time, copy, placement, TP tail",
    "learned drafter, copy": "learned drafter, quantised copy",
    "default, drafter": "default of a model that has a drafter",
    "all": "all: default, learned drafter, tail batching",
    "without drafts of idle time": "without drafts from idle time",
    "without any drafts but the drafter's": "with the drafter's drafts alone",
    "ratio 1.5": "over-sampling ratio 1.5 in place of 1.25",
    "ratio auto": "over-sampling ratio auto",
}
BASELINES = {"plain": SYSTEMS["plain"], "plain, second epoch": System(second_epoch=True)}
CHANGED = "all, acceptance length 3"  # what the changes are made to
CHANGES = {
    "without tail batching": {TAIL: False},
    "without the drafter": {METHOD: "bubble+suffix+quantized"},
    "without the copy": {METHOD: "bubble+suffix+drafter"},
    "without drafts of idle time": {METHOD: "suffix+quantized+drafter"},
    "without any drafts but the drafter's": {METHOD: "drafter"},
    "without placement": {PLACEMENT: "in_turn"},
    "without the TP tail": {TP: 0},
    "ratio 1.5": {RATIO: 1.5},
    "ratio auto": {RATIO: "auto"},
}
# In pictures.
SHOWN = ("plain", "drafts of idle time", "drafts of the epoch before", "balanced placement")
SHOWN += ("learned drafter", "quantised copy", "tail batching", "default", "all")
RUN_S = 60  # seconds of one run, with 500 simulated tokens (a core of an AMD EPYC)


def scaled_costs(name: str, num_ranks: int, scale: float) -> dict[str, Cost | None]:
    """Return what `simulate` takes of a --cost-model.

    Rows of these forwards have `scale` positions for each in their load."""
    alone, together = load_cost(name), load_cost(name, num_ranks)
    costs = {"cost": alone, "together": together, "copy_cost": load_copy_cost(name)}

    def scaled(cost: Cost) -> Cost:
        return lambda load: cost(load._replace(positions=scale * load.positions))

    return {key: cost and scaled(cost.seconds) for key, cost in costs.items()}


def shortened(spec: Spec, scale: float) -> Spec:
    """Return a workload, a token of which stands for `scale` tokens of `spec`."""
    return dataclasses.replace(
        spec,
        mean=spec.mean / scale,
        max=round(spec.max / scale),
        prompt=max(round(spec.prompt / scale), 2),
        run=max(spec.run / scale, 1.0),
    )


def simulate_run(arguments: argparse.Namespace, size: str, longest: int, system: System) -> dict:
    """Return totals of one system in real seconds and simulated tokens.

    longest: maximum number of tokens of a real response."""
    scale = longest / arguments.longest
    spec = Spec(
        mean=longest / SHARE_OF_LONGEST,
        max=longest,
        prompt=PROMPT,
        run=MISMATCH,
        accept_length=ACCEPT_LENGTH,
        steps=arguments.steps,
        epochs=2 if system.second_epoch else 1,
        edited=EDITED,
        seed=arguments.seed,
    )
    keys = PLAIN | system.keys | {PROMPTS: arguments.prompts, SAMPLES: GENERATIONS}
    config, workload = synthetic_run(
        shortened(spec, scale), [f"{key}={value}" for key, value in keys.items()]
    )
    steps = simulate(
        config,
        workload,
        num_ranks=RANKS,
        drafter=system.drafter or parse(DrafterModel, arguments.drafter, "--drafter"),
        quantized=parse(CopyModel, arguments.quantized, "--quantized"),
        **scaled_costs(f"h200:{size}", RANKS, scale),
    )
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
    """Return (size, longest, name, system) of each run."""
    systems = (BASELINES | SYSTEMS).items()
    runs = [(size, longest, *named) for size in sizes for longest in lengths for named in systems]
    best, longest = SYSTEMS[CHANGED], 16 * K if 16 * K in lengths else lengths[-1]
    for name, change in CHANGES.items() if has_changes else ():
        changed = best._replace(keys=best.keys | change)
        runs.append((sizes[0], longest, f"{CHANGED}; {name}", changed))
    return runs


def compare(runs: list[dict]) -> None:
    """Add each run's speed-up over the run without mechanisms of its size and lengths."""
    by_name = {(run["size"], run["longest"], run["system"]): run for run in runs}
    for run in runs:
        system = (BASELINES | SYSTEMS).get(run["system"], System())
        name = "plain, second epoch" if system.second_epoch else "plain"
        baseline = by_name[run["size"], run["longest"], name]
        run["speedup"] = baseline["seconds_per_token"] / run["seconds_per_token"]


def table(runs: list[dict], size: str) -> str:
    """Return the speed-ups of a size as Markdown: a line per system, a column per length."""
    of_size = {(run["system"], run["longest"]): run for run in runs if run["size"] == size}
    lengths = sorted({longest for _, longest in of_size})
    rows = []
    for name, system in SYSTEMS.items():
        row = {"": LABELS.get(name, name)}
        for longest in lengths:
            run = of_size.get((name, longest))
            row[f"{longest // K}k"] = f"{run['speedup']:.2f}x" if run else ""
        rows.append(row | {"its paper reports": system.paper})
    return shared.markdown(rows)


def changes_of(runs: list[dict]) -> dict[str, dict]:
    """Return the best combination and its changes, by name."""
    prefix = f"{CHANGED}; "
    by_name = {run["system"]: run for run in runs}
    changed = {name: by_name[prefix + name] for name in CHANGES if prefix + name in by_name}
    if not changed:
        return {}
    where = [next(iter(changed.values()))[key] for key in ("size", "longest")]
    (best,) = (r for r in runs if [r["size"], r["longest"], r["system"]] == [*where, CHANGED])
    return {CHANGED: best} | changed


def table_of_changes(runs: list[dict]) -> str:
    """Return the best combination and its changes as Markdown."""
    columns = {"": "{label}", "rollouts": "{speedup:.2f}x", "short round": "{short_round_s:.1f} s"}
    columns |= {"long round": "{long_round_s:.1f} s", "idle time": "{idle_share:.2f}"}
    rows = [{"label": LABELS.get(name, name)} | run for name, run in changes_of(runs).items()]
    return shared.tabulate(rows, columns) if rows else ""


def draw_systems(runs: list[dict], heading: str) -> Figure:
    """Draw speed-ups by maximum length: a panel for each size, a line for each system.

    Bars, the default first, where there is one length of one size."""
    if len({(run["size"], run["longest"]) for run in runs}) == 1:
        by_name = {run["system"]: run["speedup"] for run in runs}
        shown = ["default", *(name for name in SYSTEMS if name in by_name and name != "default")]
        return report_pictures.draw_parts(
            {LABELS.get(name, name): by_name[name] for name in shown}, heading
        )
    panels: dict[str, dict] = {}
    for run in sorted(runs, key=lambda run: run["longest"]):
        if run["system"] in SHOWN:
            lines = panels.setdefault(f"{run['size'].upper()} model", {})
            label = LABELS.get(run["system"], run["system"])
            lines.setdefault(label, []).append((run["longest"], run["speedup"]))
    return report_pictures.draw_lengths(panels, heading)


def draw_changes(runs: list[dict], heading: str) -> Figure:
    """Draw the best combination, and what is left without each of its parts."""
    bars = {
        LABELS.get(name, name): run["speedup"]
        for name, run in changes_of(runs).items()
        if name == CHANGED or name.startswith("without")
    }
    return report_pictures.draw_parts(bars, heading)


def heading_of(settings: dict) -> str:
    """Return the heading of pictures."""
    prompts = f"{settings['prompts']} prompts x {GENERATIONS} responses per step"
    return f"Simulated, not measured: {RANKS} H200s by a roofline; {prompts}"


def drafts_of(settings: dict) -> str:
    """Return a heading's line on the drafts whose quality is given."""
    drafter = parse(DrafterModel, settings["drafter"], "--drafter").accept_length
    text = f"given, not simulated: the learned drafter's mean acceptance length, {drafter:g}"
    if "quantized" in settings:  # not in earlier files
        copy = parse(CopyModel, settings["quantized"], "--quantized").acceptance
        text += f",\nand the chance that a token of the copy is right, {copy:g}"
    return text


def known_runs(path: str | None, settings: dict) -> list[dict]:
    """Return the runs that a file has already, none without one. Raises InputError."""
    if not path or not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    if report["settings"] != settings:
        raise InputError(f"--json: {path} has runs with other settings")
    return report["runs"]


def run(arguments: argparse.Namespace, folder: str) -> None:
    sizes = shared.check_names("--sizes", arguments.sizes, dict.fromkeys(SIZES))
    lengths = [as_tokens(text) for text in arguments.lengths.split(",")]
    if arguments.longest < 100 or arguments.steps % 2 or arguments.prompts < RANKS:
        raise InputError(f"--longest: at least 100; --steps: even; --prompts: at least {RANKS}")
    parse(DrafterModel, arguments.drafter, "--drafter")
    parse(CopyModel, arguments.quantized, "--quantized")
    names = ("longest", "steps", "prompts", "seed", "drafter", "quantized")
    settings = {name: getattr(arguments, name) for name in names}
    runs = known_runs(arguments.json, settings)
    known = {(run["size"], run["longest"], run["system"]) for run in runs}
    wanted = wanted_runs(sizes, lengths, bool(arguments.ablation))
    missing = [named for named in wanted if named[:3] not in known]
    seconds = RUN_S * len(missing) * arguments.longest / 500 * arguments.steps / 10
    log(f"{len(missing)} runs, about {max(round(seconds / 60), 1)} min of one core")
    for size, longest, name, system in tqdm(missing, unit="run"):
        found = simulate_run(arguments, size, longest, system)
        runs.append({"size": size, "longest": longest, "system": name} | found)
        shared.write_json(arguments.json, {"settings": settings, "runs": runs})
    compare(runs)
    shared.write_json(arguments.json, {"settings": settings, "runs": runs})
    for size in sizes:
        print(f"{size}\n{table(runs, size)}\n")
    print(table_of_changes(runs))
    heading = heading_of(settings)
    if arguments.picture:
        figure = draw_systems(runs, f"{heading}\n{drafts_of(settings)}")
        figure.savefig(arguments.picture, dpi=120)
    if arguments.ablation:
        draw_changes(runs, heading).savefig(arguments.ablation, dpi=120)


def as_tokens(text: str) -> int:
    """Return the number of tokens that 16k or 16000 stands for. Raises InputError."""
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
    parser.add_argument("--quantized", default="acceptance=0.93", metavar="NAME=VALUE")
    parser.add_argument("--picture", help="PNG of the systems by length")
    parser.add_argument("--ablation", help="PNG of the best combination without its parts")
    return parser


if __name__ == "__main__":
    sys.exit(shared.main(run, make_parser()))
