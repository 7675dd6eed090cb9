"""Finished or running runs, read from their folders and compared: what ablation.ipynb and
bubble_anatomy.ipynb work on.

A run's folder holds config.yaml and metrics.jsonl, as train.py leaves them; with run.timeline_steps
also timeline/step_*.json.
"""

import glob
import itertools
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.shared import markdown
from bubblespec.config import Config, flatten
from bubblespec.config.file import load_config
from bubblespec.errors import InputError, log
from bubblespec.telemetry.timeline import LABELS

# Metrics that every step's line has.
NEEDED = ("timing_s/gen", "timing_s/bubble", "timing_s/step", "rollout/digest")
SOURCES = {
    "none": "no drafts",
    "bubble": "drafts from idle time",
    "suffix": "suffix matches",
    "quantized": "quantised copy",
    "drafter": "learned drafter",
}


@dataclass
class Run:
    """A run as its folder records it."""

    name: str
    folder: str
    config: Config
    steps: list[dict]
    """Lines of metrics.jsonl of training steps, by step."""
    evaluations: list[dict]
    """Lines of evaluations, whose `step` counts updates."""

    @property
    def method(self) -> str:
        return self.config.speculative.method

    @property
    def label(self) -> str:
        """Name of the run, and its drafts in words."""
        parts = [SOURCES.get(name, name) for name in self.method.split("+")]
        return f"{self.name}: {', '.join(parts)}"

    def column(self, key: str) -> np.ndarray:
        """Return a metric of all steps, float64 [steps]; NaN where a line has none."""
        return np.array(
            [math.nan if line.get(key) is None else line[key] for line in self.steps], float
        )

    @property
    def rollout_s(self) -> np.ndarray:
        """Seconds of rollouts with waiting and moving drafts, float64 [steps]."""
        return (
            self.column("timing_s/gen")
            + self.column("timing_s/bubble")
            + np.nan_to_num(self.column("timing_s/exchange"))
        )


def read_runs(folder: str) -> list[Run]:
    """Return all runs in a folder, those without speculation first; log what is left out.

    Raises InputError where the folder holds no run, and for files that are damaged.
    """
    if not os.path.isdir(folder):
        raise InputError(f"RUNS: no folder at {folder}")
    if os.path.isfile(os.path.join(folder, "metrics.jsonl")):
        raise InputError(
            f"RUNS: {folder} is one run's folder; give the folder that holds the folders of several"
        )
    problems, runs = [], []
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if not os.path.isdir(path) or name.startswith("."):
            continue
        needed = ("metrics.jsonl", "config.yaml")
        missing = [file for file in needed if not os.path.isfile(os.path.join(path, file))]
        if missing:
            problems.append(f"{path} has no {missing[0]}")
            continue
        run = read_run(path)
        if run.steps:
            runs.append(run)
        else:
            problems.append(f"{path} has not finished a step yet")
    if not runs:
        why = "; ".join(problems) or "it has no subfolders"
        raise InputError(f"RUNS: no run in {folder}: {why}")
    for problem in problems:
        log(f"left out: {problem}")
    return sorted(runs, key=lambda run: (run.method != "none", run.name))


def read_run(folder: str) -> Run:
    """Return a run, without a torn last line, as a kill leaves it. Raises InputError."""
    config = load_config(os.path.join(folder, "config.yaml"))
    path = os.path.join(folder, "metrics.jsonl")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    numbered = enumerate(text.split("\n"), start=1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    steps, evaluations = {}, {}
    for number, line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == lines[-1][0]:
                log(f"left out: the last line of {path}, which is torn")
                break
            raise InputError(f"{path}, line {number}: not JSON: {error.msg}") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise InputError(f"{path}, line {number}: not a line of metrics: it names no step")
        is_evaluation = any(key.startswith("eval/") for key in record)
        absent = [key for key in NEEDED if key not in record]
        if absent and not is_evaluation:
            raise InputError(f"{path}, line {number}: not a line of metrics: it has no {absent[0]}")
        (evaluations if is_evaluation else steps)[record["step"]] = record
    name = os.path.basename(os.path.normpath(folder))
    in_order = ([found[s] for s in sorted(found)] for found in (steps, evaluations))
    return Run(name, folder, config, *in_order)


@dataclass
class Comparison:
    """A run against another, over the steps that both have.

    Speed-ups are times of the other divided by times of this run; NaN where a time is missing.
    """

    num_steps: int
    rollout_speedup: float
    """Speed-up of all rollouts together."""
    median_speedup: float
    """Speed-up of the median step's rollout."""
    step_speedup: float
    """Speed-up of all whole steps together."""
    forwards: float
    """Relative change of the forwards on the slowest rank."""
    num_same: int
    """Steps of equal digests, so of equal tokens."""
    first_difference: int | None
    """First step of other tokens."""

    @property
    def tokens(self) -> str:
        if self.first_difference is None:
            return f"the same in all {self.num_steps} steps"
        same = f"{self.num_same} of {self.num_steps} the same"
        return f"differ from step {self.first_difference} on ({same})"


def compare(run: Run, other: Run) -> Comparison:
    """Compare `run` with `other`. Raises InputError if they have no step in common."""
    common = sorted({line["step"] for line in run.steps} & {line["step"] for line in other.steps})
    if not common:
        raise InputError(f"RUNS: {run.name} and {other.name} have no step in common")
    mine, others = (
        replace(r, steps=[line for line in r.steps if line["step"] in common]) for r in (run, other)
    )
    ratio = others.rollout_s / mine.rollout_s
    digests = [[line["rollout/digest"] for line in r.steps] for r in (mine, others)]
    differing = [step for step, a, b in zip(common, *digests, strict=True) if a != b]

    def total(run: Run, key: str) -> float:
        return run.column(key).sum()

    return Comparison(
        num_steps=len(common),
        rollout_speedup=float(others.rollout_s.sum() / mine.rollout_s.sum()),
        median_speedup=float(np.median(ratio)),
        step_speedup=float(total(others, "timing_s/step") / total(mine, "timing_s/step")),
        forwards=float(total(mine, "rollout/forwards") / total(others, "rollout/forwards") - 1),
        num_same=len(common) - len(differing),
        first_difference=differing[0] if differing else None,
    )


def accepted_share(run: Run) -> float:
    """Return the accepted share of all verified draft tokens; NaN where there is none."""
    accepted, wasted = (
        np.nansum(run.column(f"rollout/spec_{kind}_tokens")) for kind in ("accepted", "wasted")
    )
    return float(accepted / (accepted + wasted)) if accepted + wasted else math.nan


def num_response_tokens(run: Run) -> np.ndarray:
    """Return response tokens by step, float64 [steps]. The run has no dynamic sampling."""
    rollout = run.config.rollout
    num_rows = rollout.num_prompts_per_step * rollout.num_generations
    return run.column("completions/mean_length") * num_rows


def ablation_table(runs: list[Run], baseline: Run) -> str:
    """Return every run against the baseline, as a Markdown table."""
    rows = []
    for run in runs:
        c = compare(run, baseline)
        row = {"run": run.name, "method": run.method, "rollouts": f"{run.rollout_s.sum():.1f} s"}
        row["rollout speed-up"] = _or_dash(c.rollout_speedup, "{:.2f}x")
        row["median step"] = _or_dash(c.median_speedup, "{:.2f}x")
        row["whole steps"] = _or_dash(c.step_speedup, "{:.2f}x")
        row["forwards"] = _or_dash(c.forwards, "{:+.0%}")
        row["drafted tokens accepted"] = _or_dash(accepted_share(run), "{:.2f}")
        rows.append(row | {f"tokens against {baseline.name}": c.tokens})
    return markdown(rows)


def settings_table(runs: list[Run]) -> str:
    """Return the keys that differ between runs, but run.output_dir, as a Markdown table."""
    flat = [flatten(run.config) for run in runs]
    keys = [key for key in flat[0] if len({str(f[key]) for f in flat}) > 1]
    keys = [key for key in keys if key != "run.output_dir"]
    pairs = zip(runs, flat, strict=True)
    return markdown([{"run": run.name} | {key: str(f[key]) for key in keys} for run, f in pairs])


def time_to(curve: Iterable[tuple[float, float]], reward: float) -> float | None:
    """Return the seconds until a reward, on straight lines between evaluations; None if never."""
    for (begin_s, before), (end_s, after) in itertools.pairwise(curve):
        if before < reward <= after:
            return begin_s + (end_s - begin_s) * (reward - before) / (after - before)
    return None


def held_out_curve(run: Run) -> list[tuple[float, float]]:
    """Return seconds of training steps before each evaluation, and its reward."""
    seconds = seconds_so_far(run, np.array([line["step"] for line in run.evaluations]))
    rewards = [line.get("eval/reward", math.nan) for line in run.evaluations]
    return list(zip(seconds.tolist(), rewards, strict=True))


def learning_table(runs: list[Run], reward_to_reach: float | None = None) -> str:
    """Return training and held-out rewards of every run, as a Markdown table."""
    rows = []
    for run in runs:
        reward, share = run.column("reward"), max(1, len(run.steps) // 10)
        held_out = [line.get("eval/reward", math.nan) for line in run.evaluations] or [math.nan]
        tenths = [part[~np.isnan(part)] for part in (reward[:share], reward[-share:])]
        first, last = (part.mean() if len(part) else math.nan for part in tenths)
        figures = {
            "reward, first tenth": first,
            "reward, last tenth": last,
            "held out, first": held_out[0],
            "held out, last": held_out[-1],
        }
        row = {"run": run.name, "steps": str(len(run.steps))}
        row |= {name: _or_dash(float(x), "{:.3f}") for name, x in figures.items()}
        row["seconds of steps"] = f"{run.column('timing_s/step').sum():.1f}"
        if reward_to_reach is not None:
            found = time_to(held_out_curve(run), reward_to_reach)
            row[f"seconds until {reward_to_reach}"] = "-" if found is None else f"{found:.1f}"
        rows.append(row)
    return markdown(rows)


def seconds_so_far(run: Run, updates: np.ndarray) -> np.ndarray:
    """Return the seconds of training steps before as many updates, float64; NaN beyond the run."""
    ends = {
        line["step"]: total
        for line, total in zip(run.steps, np.cumsum(run.column("timing_s/step")), strict=True)
    }
    return np.array([0.0 if n == 0 else ends.get(int(n), math.nan) for n in updates])


def read_timeline(run: Run, step: int) -> list[np.ndarray]:
    """Return a step's lanes: by rank, kind (place in KINDS), begin and end of events in seconds.

    Each is float64 [events, 3]. Raises InputError.
    """
    path = os.path.join(run.folder, "timeline", f"step_{step:05d}.json")
    try:
        with open(path, encoding="utf-8") as file:
            events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
        names = list(LABELS.values())
        lanes = [
            [
                (names.index(e["name"]), e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
                for e in events
                if e["tid"] == rank
            ]
            for rank in sorted({e["tid"] for e in events})
        ]
    except FileNotFoundError as error:
        raise InputError(f"no {path}: the run was not told run.timeline_steps=[{step}]") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a timeline of train.py") from error
    return [np.array(lane) for lane in lanes]


def timeline_steps(run: Run) -> list[int]:
    """Return the steps of which there is a timeline."""
    paths = glob.glob(os.path.join(glob.escape(run.folder), "timeline", "step_*.json"))
    return sorted(int(os.path.basename(path)[5:-5]) for path in paths)


def common_timelines(one: Run, other: Run) -> list[int]:
    """Return the steps of which both runs have a timeline. Raises InputError if there is none."""
    steps = sorted(set(timeline_steps(one)) & set(timeline_steps(other)))
    if not steps:
        raise InputError(
            f"RUNS: {one.folder} and {other.folder} have no timeline of a common step; "
            "set run.timeline_steps for both"
        )
    return steps


def seconds_by_kind(lanes: list[np.ndarray]) -> dict[str, float]:
    """Return seconds of a step by kind, mean over ranks; "between forwards" is without events."""
    end = max(lane[:, 2].max() for lane in lanes)
    seconds = {}
    for number, kind in enumerate(LABELS.values()):
        events = [lane[lane[:, 0] == number] for lane in lanes]
        seconds[kind] = sum(float((rows[:, 2] - rows[:, 1]).sum()) for rows in events)
    seconds = {kind: total / len(lanes) for kind, total in seconds.items() if total}
    return seconds | {"between forwards": end - sum(seconds.values())}


def _or_dash(value: float, form: str) -> str:
    return "-" if math.isnan(value) else form.format(value)
