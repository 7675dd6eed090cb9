"""The metrics of a run, by the table in metrics.toml: names, texts, and reductions over ranks."""

import functools
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
OWN_GROUPS: tuple[str, ...] = tuple(f"{group}/" for group in TABLE.pop("own_groups"))
# Of an array with the values of all ranks. `ratio`: of pairs (part, whole), 0 of nothing; `each`:
# the mean, and every rank's under a name of its own; `mean/max`: of pairs, see placement_error.
REDUCTIONS: dict[str, Callable[[np.ndarray], Any]] = {
    name: functools.partial(getattr(np, name), axis=0) for name in ("sum", "mean", "max", "argmax")
}
REDUCTIONS |= {
    "each": REDUCTIONS["mean"],
    "ratio": lambda found: found[:, 0].sum() / (found[:, 1].sum() or 1),
    "mean/max": lambda found: found[:, 0].mean() / max(found[:, 1].max(), 1e-9),
}


def _pattern(names: str) -> str:
    text = re.sub(r"\{(.*?)\}", lambda m: f"({m[1].replace(',', '|')})", names)
    text = text.replace(", ", "|").replace("NAME", "[^/]+")
    return re.sub(r"(?<=[_@])[KNR]\b", r"\\d+", text)


# TensorBoard's group of each metric to watch first.
WATCHED = {name: row["group"] for name, row in TABLE["Watch first"].items()}
ROWS = [
    row | {"pattern": _pattern(names)}
    for title, rows in TABLE.items()
    if title != "Watch first"
    for names, row in rows.items()
]
ROWS.sort(key=lambda row: "[^/]" in row["pattern"])  # names before any NAME


@functools.cache
def row_of(key: str) -> dict[str, Any]:
    """Return the row of a metric; an empty one if the table has none."""
    return next((row for row in ROWS if re.fullmatch(row["pattern"], key)), {})


def over_ranks(own: dict[str, Any], gather_text: Callable[[str], list[str]]) -> dict[str, Any]:
    """Return the metrics of all ranks from those of this one; all ranks call it together.

    They are reduced by their rows. A rank may lack some, and what is no number is left out. Those
    without a reduction are equal on all ranks already. gather_text: see `Ranks`."""
    reduced = {key: value for key, value in own.items() if "ranks" in row_of(key)}
    text = json.dumps(reduced, default=lambda value: value.tolist())
    by_rank = [json.loads(text) for text in gather_text(text)]
    metrics = {key: value for key, value in own.items() if key not in reduced}
    for key in dict.fromkeys(key for of_rank in by_rank for key in of_rank):
        found = np.array([of_rank[key] for of_rank in by_rank if key in of_rank])
        reduction = row_of(key)["ranks"]
        value = REDUCTIONS[reduction](found)
        if not np.isnan(value).any():
            metrics[key] = value.tolist()
        if reduction == "each" and len(by_rank) > 1:
            metrics |= {f"{key}/rank_{rank}": of for rank, of in enumerate(found.tolist())}
    return metrics
