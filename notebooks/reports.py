"""What benchmarks have written as JSON, read for systems.ipynb and drafter.ipynb."""

import json

from bubblespec.errors import InputError
from notebooks.reading import markdown

SIMULATED_KEYS = ("settings", "runs")  # of benchmarks/simulated_systems.py
REAL_KEYS = ("arms", "seeds", "config")  # of benchmarks/end_to_end.py
DRAFTER_KEYS = ("accepted", "by_rows", "steps", "config")  # of benchmarks/drafter.py


def read_report(path: str, keys: tuple[str, ...]) -> dict:
    """A benchmark's JSON. Raises InputError for a file that is not there or has not all of the keys."""
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


def arms_table(report: dict) -> str:
    """Whole steps of arms of `benchmarks/end_to_end.py`, as a Markdown table."""
    rows = []
    for name, arm in report["arms"].items():
        of_seeds = ", ".join(f"{speedup:.2f}x" for speedup in arm["speedups"])
        rows.append([name, f"{arm['speedup']:.2f}x", of_seeds, "-" if arm["reward"] is None else f"{arm['reward']:.3f}"])
    return markdown(["arm", "whole steps", "each seed", "held-out reward at the end"], rows)


def chains_table(report: dict) -> str:
    """What chains give where so many rows are generated together, as a Markdown table."""
    rows = [
        [
            str(count["rows"]),
            f"{count['tokens_a_forward']:.2f}",
            f"{count['chain_length']:.1f}",
            f"{count['speedup']:.2f}x",
            f"{count['differing_rows']}",
        ]
        for count in report["by_rows"]
    ]
    return markdown(["rows together", "tokens a forward and row", "mean length of chains", "speed-up", "rows that differ"], rows)
