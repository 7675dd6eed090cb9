"""What benchmarks have written as JSON, read for systems.ipynb and drafter.ipynb."""

import json

from benchmarks.shared import markdown
from bubblespec.errors import InputError

SIMULATED_KEYS = ("settings", "runs")  # of benchmarks/simulated_systems.py
REAL_KEYS = ("systems", "seeds", "config")  # of benchmarks/systems.py
DRAFTER_KEYS = ("accepted", "by_rows", "steps", "config")  # of benchmarks/drafter.py
# What benchmarks/systems.py switches on, in words.
SYSTEMS = {
    "plain": "no drafts",
    "again": "no drafts, once more",
    "torch kernels": "no drafts, torch's kernels",
    "bubble": "drafts from idle time",
    "history": "drafts from the previous epoch",
    "drafts": "drafts from idle time, suffix matches",
    "default": "drafts and balanced placement (the default)",
    "placement": "balanced placement",
    "drafter": "learned drafter",
    "tail": "tail batching",
    "tail+placement": "tail batching, placement",
    "tail+drafts": "tail batching, drafts",
    "streamed": "streamed gradients",
    "all": "all but streamed gradients",
    "all+streamed": "all together",
}


def label_of(system: str) -> str:
    """A system of benchmarks/systems.py in words."""
    return SYSTEMS.get(system, system)


def read_report(path: str, keys: tuple[str, ...]) -> dict:
    """A benchmark's JSON. Raises InputError for a file that is not there or has not all of the
    keys."""
    try:
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    missing = [key for key in keys if not isinstance(report, dict) or key not in report]
    if missing:
        raise InputError(f"{path}: it has no {missing[0]}; is it of another benchmark?")
    return report


def systems_table(report: dict) -> str:
    """Training runs of the systems, from `benchmarks/systems.py`, as a Markdown table."""
    rows = []
    for name, system in report["systems"].items():
        row = {"system": label_of(name), "whole steps": f"{system['speedup']:.2f}x"}
        row["rollouts"] = f"{system['rollout_speedup']:.2f}x"
        row["idle time"] = f"{system['idle_ratio']:.0%}"
        row["mean acceptance length"] = f"{system['tokens_a_pass']:.2f}"
        row["length ratio"] = f"{system['length_ratio']:.3f}"
        reward = system["reward"]
        row["held-out reward"] = "-" if reward is None else f"{reward:.3f}"
        rows.append(row | {"its paper": system["paper"]})
    return markdown(rows)


def chains_table(report: dict) -> str:
    """What the drafter's chains bring, by the rows generated together, as a Markdown table."""
    rows = []
    for count in report["by_rows"]:
        row = {"rows together": str(count["rows"])}
        row["mean acceptance length"] = f"{count['tokens_a_forward']:.2f}"
        row["mean length of a chain"] = f"{count['chain_length']:.1f} tokens"
        row["speed-up"] = f"{count['speedup']:.2f}x"
        rows.append(row | {"rows with other tokens": str(count["differing_rows"])})
    return markdown(rows)
