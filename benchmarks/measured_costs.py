"""Compare the roofline with measured forwards: python benchmarks/measured_costs.py FILE.csv

The columns are those of sd_toggle's sweeps (docs/lab/simulator.md). A sweep times vLLM's layers
on an A100, for rows that all have the same context; columns for anything else may be absent.
"""

import argparse
import csv
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import geometric_mean, median
from typing import NamedTuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import shared
from bubblespec.errors import InputError, one_line
from bubblespec.mechanisms.tp_tail.shards import shard_heads
from bubblespec.tools.simulate.roofline import (
    AROUND,
    FITTED,
    GPUS,
    MODELS,
    OVERLAP,
    OWN,
    TILE_QUERIES,
    Attention,
    Fit,
    GPUCost,
    Model,
    Products,
    roofline,
)
from bubblespec.types import Load

# By engine; "graph" is ours without the host, as its prototype was measured.
FITS = {"bubblespec": OWN, "graph": OWN, "vllm": FITTED, "gpt-fast": FITTED}
DECODE, VERIFY, COPY = "target_decode", "target_verify", "drafter_decode"
BITS = {DECODE: 16, VERIFY: 16, COPY: 4}
OTHER_MODES = ("target_decode_sd",)  # steps of runs that end, with fewer rows than are named
NEEDED = ("model", "batch", "seq", "mode", "median_ms")
# vLLM's cascade attention (use_cascade_attention): from so many common positions and rows on;
# queries and keys of a block by which it is compared with single rows.
CASCADE_POSITIONS, CASCADE_ROWS, CASCADE_TILE = 256, 8, 128
# Positions whose keys rows do not share, as blocks are shared only if they are full.
UNSHARED = 16
COLUMNS = {
    "model": "{model}",
    "mode": "{mode}",
    "forwards": "{count}",
    "median error": "{off:.1%}",
    "mean ratio": "{ratio:.2f}",
    "within 30%": "{near} of {count}",
    "furthest": "{furthest:.2f} ({worst.rows} rows x {worst.fed} at {worst.context})",
}


SHAPE = Model._fields[:-1]  # columns of a model without states


class Case(NamedTuple):
    """A measured forward."""

    model: str
    shape: Model
    mode: str
    rows: int
    context: int  # positions of each row
    drafts: int  # draft tokens of a row in this pass, which a row verifies or the copy drafts
    shared: int  # positions at the begin of the context that are the same in all rows
    gpu: str
    num_ranks: int
    engine: str
    seconds: float

    @property
    def fed(self) -> int:
        """Tokens that a row feeds."""
        return 1 + self.drafts if self.mode == VERIFY else 1


def read_cases(path: str) -> tuple[list[Case], int]:
    """Return the forwards of a CSV file, and how many lines are left out. Raises InputError."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: {one_line(error)}") from error
    missing = [name for name in NEEDED if not lines or name not in lines[0]]
    if missing:
        raise InputError(f"{path} has no {', '.join(missing)}")
    cases = []
    for number, line in enumerate(lines, 2):
        try:
            for name in NEEDED:
                if not line[name]:
                    raise InputError(f"no {name}")
            if line["mode"] not in OTHER_MODES and float(line["batch"]) != 0:  # 0: all batches
                cases.append(_case(line))
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
    if not cases:
        raise InputError(f"{path} has no line of {', '.join(BITS)}")
    return cases, len(lines) - len(cases)


def _case(line: dict[str, str]) -> Case:
    def number(name: str, default: int, least: int) -> int:
        value = float(line.get(name) or default)
        if not (value >= least and value.is_integer()):
            raise InputError(f"{name}: {line.get(name)} must be an integer from {least} on")
        return int(value)

    def choice(name: str, default: str, valid: Sequence[str]) -> str:
        value = line.get(name) or default
        if value not in valid:
            raise InputError(f"{name}: {value!r}; valid are {', '.join(valid)}")
        return value

    context, milliseconds = number("seq", -1, 0), float(line["median_ms"])
    if not 0 < milliseconds < math.inf:
        raise InputError(f"median_ms: {line['median_ms']} must be above 0")
    mode, shape = choice("mode", "", tuple(BITS)), _shape(line)
    num_ranks = number("ranks", 1, 1)
    shard_heads(shape.heads, shape.kv_heads, 0, num_ranks)  # or TPUnsupported
    return Case(
        line["model"],
        shape,
        mode,
        number("batch", -1, 1),
        context,
        number("gamma", 0, mode == VERIFY),
        min(number("shared", context, 0), context),
        choice("gpu", "a100", tuple(GPUS)),
        num_ranks,
        choice("engine", "vllm", tuple(FITS)),
        milliseconds / 1e3,
    )


def _shape(line: dict[str, str]) -> Model:
    """Return the shape by columns, or by the model's name."""
    if all(line.get(name) for name in SHAPE):
        return Model(*(int(line[name]) for name in SHAPE))
    name = line["model"].rsplit("/", 1)[-1].lower().removesuffix("-instruct").removesuffix("-hf")
    name = name.removeprefix("qwen2.5-").removeprefix("meta-")
    if name not in MODELS:
        raise InputError(f"unknown model {line['model']!r}; give the columns {', '.join(SHAPE)}")
    return MODELS[name]


class FlashAttention(Attention):
    """Seconds of FlashAttention-2 in vLLM.

    Query heads share blocks, and few long rows are split, only if each row feeds one token."""

    def seconds(self, rows: float, tokens: float, positions: float) -> float:
        fed = max(tokens / rows, 1.0)
        waves = rows * self.kv_heads / self.num_processors / OVERLAP
        if fed > 1.0:
            blocks = rows * math.ceil(fed / TILE_QUERIES) * self.heads
            waves = max(math.ceil(blocks / self.num_processors) / OVERLAP, 1.0)
        return max(self.computed_s(waves, positions / rows, fed), positions * self.position_s)


def cost_of(
    gpu: str,
    model: str | Model,
    num_ranks: int = 1,
    *,
    engine: str,
    bits: int = 16,
    fit: Fit | None = None,
) -> GPUCost:
    """Return the roofline of an engine, of FITS: "vllm" is its layers alone, as its forwards were
    measured, "gpt-fast" has no host time and samples for nothing. fit: by default the engine's."""
    fit = fit or FITS[engine]
    cost = roofline(gpu, model, num_ranks, bits=bits, fit=fit)
    if engine == "bubblespec":
        return cost
    cost = replace(cost, host_s=0.0, verify_s=(0.0, 0.0))
    if engine == "graph":
        return cost
    return replace(
        cost,
        head=Products(0.0, 0.0, fit.knee) if engine == "vllm" else cost.head,
        attention=FlashAttention(**vars(cost.attention)),
        constant_s=cost.constant_s - AROUND * fit.layer_s,
        sample_s=0.0,
    )


def predict(case: Case, fit: Fit | None = None) -> float:
    """Return the seconds of a case by the roofline."""
    bits, rows = BITS[case.mode], case.rows
    cost = cost_of(case.gpu, case.shape, case.num_ranks, engine=case.engine, bits=bits, fit=fit)
    tokens, wide_rows = rows * case.fed, rows * (case.fed > 1)
    load = Load(rows, tokens, wide_rows, rows * case.context, 0, tokens - rows)
    seconds = cost.seconds(load)
    if case.engine != "vllm" or case.shared <= UNSHARED or rows == 1:
        return seconds
    alone_s = cost.attention.seconds(rows, tokens, load.positions)
    return seconds - alone_s + _sharing_s(case, cost, fit or FITTED)


def _sharing_s(case: Case, cost: GPUCost, fit: Fit) -> float:
    """Return the seconds of vLLM's attention where rows have keys in common.

    In cascade attention the queries of all rows are one sequence over these keys. Otherwise rows
    of one query read them from the L2 cache."""
    attention, rows, shared = cost.attention, case.rows, case.shared - UNSHARED
    tokens, positions = rows * case.fed, float(rows * case.context)
    if case.mode != COPY and _is_cascade(case, cost):
        common_s = attention.seconds(1, tokens, shared + (tokens - 1) / 2)
        rest_s = attention.seconds(rows, tokens, positions - rows * shared)
        return common_s + rest_s + attention.layers * fit.cascade_s
    if case.fed == 1:
        positions -= rows * shared * (1 - 1 / fit.shared_speed)
    return attention.seconds(rows, tokens, positions)


def _is_cascade(case: Case, cost: GPUCost) -> bool:
    attention, shared = cost.attention, case.shared - UNSHARED
    if case.rows < CASCADE_ROWS or shared < CASCADE_POSITIONS:
        return False
    tiles = math.ceil(shared / CASCADE_TILE)
    blocks = attention.heads * math.ceil(case.rows / CASCADE_TILE)
    single = case.rows * attention.kv_heads * tiles
    processors = attention.num_processors
    return case.fed > 1 or math.ceil(blocks / processors) * tiles < math.ceil(single / processors)


def compare(cases: Sequence[Case], fit: Fit | None = None) -> str:
    """Return a table of fitted against measured seconds, a line per model and mode."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.model, case.mode), []).append(case)
    rows = []
    for (model, mode), group in groups.items():
        ratios = {case: predict(case, fit) / case.seconds for case in group}
        errors = {case: abs(ratio - 1) for case, ratio in ratios.items()}
        worst = max(errors, key=errors.__getitem__)
        row = {"model": model, "mode": mode, "count": len(group), "worst": worst}
        row |= {"off": median(errors.values()), "ratio": geometric_mean(ratios.values())}
        row["near"] = sum(error <= 0.3 for error in errors.values())
        rows.append(row | {"furthest": ratios[worst]})
    return shared.tabulate(rows, COLUMNS)


def run(arguments: argparse.Namespace, folder: str) -> None:
    cases, num_left_out = read_cases(arguments.file)
    print(compare(cases))
    if num_left_out:
        print(f"left out: {num_left_out} lines of {', '.join(OTHER_MODES)} or of all batches")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GPU costs next to measured ones")
    parser.add_argument(
        "file", metavar="FILE.csv", help="a forward per line, see docs/lab/simulator.md"
    )
    sys.exit(shared.main(run, parser))
