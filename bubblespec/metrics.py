"""The metrics of a run, by the table in metrics.toml: names, texts, and reductions over ranks."""

import functools
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
OWN_GROUPS: tuple[str, ...] = tuple(f"{group}/" for group in TABLE.pop("own_groups"))
# Of an array with the values of all ranks. `ratio`: of pairs (part, whole), 0 of nothing; `each`:
# the mean, and every rank's under a name of its own; `mean/max`: of pairs, see placement_error.
REDUCTIONS: dict[str, Callable[[np.ndarray], Any]] = {
    "sum": lambda found: found.sum(axis=0),
    "mean": lambda found: found.mean(axis=0),
    "max": lambda found: found.max(axis=0),
    "argmax": lambda found: found.argmax(axis=0),
    "each": lambda found: found.mean(axis=0),
    "ratio": lambda found: found[:, 0].sum() / (found[:, 1].sum() or 1),
    "mean/max": lambda found: found[:, 0].mean() / max(found[:, 1].max(), 1e-9),
}


def names_in(names: str) -> Iterator[str]:
    """Yield the single names of a row."""
    for name in names.split(", "):
        before, brace, rest = name.partition("{")
        choices, _, after = rest.partition("}")
        for choice in choices.split(","):
            yield from names_in(f"{before}{choice}{after}") if brace else [before]


ROWS = {
    name: row if isinstance(row, dict) else {"text": row}
    for rows in TABLE.values()
    for names, row in rows.items()
    for name in names_in(names)
}
_PATTERNS = {
    name: re.compile(re.sub(r"(?<=[_@])[KNR]\b", r"\\d+", name.replace("NAME", "[^/]+")))
    for name in ROWS
}
CHARTS = {row["chart"]: list(names_in(names)) for names, row in TABLE["Watch first"].items()}
_AT_END = [
    name
    for rows in TABLE.values()
    for names, row in rows.items()
    if isinstance(row, dict) and (end := row.get("end"))
    for name in names_in(names if end is True else end)
]
# Rows of the table at the end, as far as a run has them; those of evaluations follow the scores.
EVAL_AT_END = [name for name in _AT_END if "eval" in name]
AT_END = [name for name in _AT_END if "eval" not in name]
EVAL_NAMES = {name[5:] for name in ROWS if re.fullmatch("eval/[a-z_]+", name)}  # of eval/NAME


@functools.cache
def row_of(key: str) -> dict[str, Any] | None:
    """Return the row of a metric, or None if the table has none."""
    matching = (name for name, pattern in _PATTERNS.items() if pattern.fullmatch(key))
    return ROWS.get(key) or ROWS.get(next(matching, ""))


def over_ranks(own: dict[str, Any], gather_text: Callable[[str], list[str]]) -> dict[str, Any]:
    """Return the metrics of all ranks from those of this one; all ranks call it together.

    They are reduced by their rows. A rank may lack some, and what is no number is left out. Those
    without a reduction are equal on all ranks already. gather_text: see `Ranks`."""
    how = {key: row["ranks"] for key in own if (row := row_of(key)) and "ranks" in row}
    text = json.dumps({key: own[key] for key in how}, default=lambda value: value.tolist())
    by_rank = [json.loads(text) for text in gather_text(text)]
    metrics = {key: value for key, value in own.items() if key not in how}
    for key in dict.fromkeys(key for of_rank in by_rank for key in of_rank):
        found = np.array([of_rank[key] for of_rank in by_rank if key in of_rank])
        reduction = row_of(key)["ranks"]
        value = REDUCTIONS[reduction](found)
        if not np.isnan(value).any():
            metrics[key] = value.tolist()
        if reduction == "each" and len(by_rank) > 1:
            metrics |= {f"{key}/rank_{rank}": of for rank, of in enumerate(found.tolist())}
    return metrics
