"""Results of benchmarks as tables, for systems.ipynb and drafter.ipynb."""

import json

from benchmarks.shared import tabulate
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
    "quantized": "drafts from a quantised copy",
    "default": "the default",
    "scored after": "the default, reward models score after rollouts",
    "plain scored after": "no drafts, reward models score after rollouts",
    "placement": "balanced placement",
    "drafter": "learned drafter",
    "tail": "tail batching",
    "tail+placement": "tail batching, placement",
    "tail+drafts": "tail batching, drafts",
    "shared": "last rows shared by all ranks",
    "streamed": "streamed gradients",
    "all": "all but streamed gradients",
    "all+streamed": "all together",
    "no idle drafts": "the default without drafts from idle time",
    "no suffix matches": "the default without suffix matches",
    "no copy": "the default without the quantised copy",
    "no placement": "the default without placement",
    "no TP tail": "the default without the TP tail",
}


def label_of(system: str) -> str:
    """Return a system of benchmarks/systems.py in words."""
    return SYSTEMS.get(system, system)


def read_report(path: str, keys: tuple[str, ...]) -> dict:
    """Return a benchmark's JSON. Raises InputError if it cannot be read or lacks a key."""
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
    """Return training runs of the systems, from `benchmarks/systems.py`, as a Markdown table."""
    columns = {
        "system": "{label}",
        "whole steps": "{speedup:.2f}x",
        "rollouts": "{rollout_speedup:.2f}x",
        "idle time": "{idle_ratio:.0%}",
        "mean acceptance length": "{tokens_a_pass:.2f}",
        "length ratio": "{length_ratio:.3f}",
        "held-out reward": "{reward:.3f}",
        "its paper": "{paper}",
    }
    systems = report["systems"].items()
    return tabulate([{"label": label_of(name)} | system for name, system in systems], columns)


def chains_table(report: dict) -> str:
    """Return the gain of the drafter's chains, by rows generated together, as a Markdown table."""
    columns = {
        "rows together": "{rows}",
        "mean acceptance length": "{tokens_a_forward:.2f}",
        "mean length of a chain": "{chain_length:.1f} tokens",
        "speed-up": "{speedup:.2f}x",
        "rows with other tokens": "{differing_rows}",
    }
    return tabulate(report["by_rows"], columns)
