"""Where speculation pays, and what bounds it: python benchmarks/replay_map.py FILE.json [--ranks 8
16] [--steps 4] ...

Simulated rollouts, analytic cost: a 7B on H200s from its data sheet, not measured. Every cell is
one run of a few steps with made-up lengths, `none` against the default method, for

- lengths: lognormal with mean 2,000 up to 16,000 tokens, and mean 8,000 up to 64,000;
- ranks: with the same number of rows each;
- drafts: tokens to the first mismatch (`inf`, 2000, 500, ...); after it about 2 tokens a pass by
  suffix matches. With --drift the chance of a mismatch grows with a draft's age in updates, as it
  does where a learning rate is what makes drafts wrong;
- verification: what a draft token costs beside the roofline, which has it free while weights are
  being read, in multiples of a token's computing.

FILE keeps every run. What is in it is not run again, so that a map can be made in several commands,
and goes on after one that was stopped. The table has all of it; --figure draws the cells without
drift.

What bounds a cell is what would help it most: perfect drafts (acceptance), free verification
(verification), or, where both together would make it less than a tenth faster, neither (bubble
volume: there is no more idle time to draft in).
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from typing import NamedTuple

from tqdm import tqdm

from bubblespec.config import config_of_sections
from bubblespec.errors import InputError
from bubblespec.simulate.__main__ import BLANK, describe_cost, nested, totals
from bubblespec.simulate.analytic import GPUS, MODELS, analytic_cost
from bubblespec.simulate.run import simulate
from bubblespec.simulate.workload import Synthetic, Workload

LENGTHS = {"2k to 16k": (2000.0, 16000), "8k to 64k": (8000.0, 64000)}
MISMATCHES = (math.inf, 2000.0, 500.0)
VERIFICATION = (0.0, 1.0, 4.0)
HARDWARE, COMPUTE_SHARE = ("h200", "7b", 3e-3, 0.8), 0.5
TOKEN_S = 2 * MODELS["7b"][0] / (0.5 * GPUS["h200"][1])
GENERATIONS = 8
BOUNDS = {"bubble volume": "B", "acceptance": "A", "verification": "V"}
SLACK = 1.1  # a bound counts if its end would make this much faster


class Place(NamedTuple):
    """Settings that two compared runs have in common."""

    lengths: str
    """A key of LENGTHS."""
    ranks: int
    rows: int
    """Responses of each rank in a step."""
    steps: int


class Run(NamedTuple):
    """One simulated run."""

    place: Place
    method: str
    """speculative.method; with `none` the other fields have their defaults."""
    mismatch: float | None = None
    """Tokens to a draft's first mismatch; None for never, as JSON has no infinity."""
    drift: int = 0
    """1 if the chance of a mismatch grows with the draft's age."""
    verification: float = 0.0
    """Cost of verifying a draft token, in multiples of a token's computing."""


def cost_with(verification: float):
    cost = analytic_cost(*HARDWARE, compute_share=COMPUTE_SHARE)
    cost.rates["draft_tokens"] = verification * TOKEN_S
    cost.propose = [200e-6, 10e-6]
    cost.__post_init__()
    return cost


def title() -> str:
    return f"Simulated, {describe_cost(cost_with(0.0))}"


def simulate_run(run: Run) -> tuple[Run, dict]:
    """The run with its totals, and the seconds that simulating it took."""
    place, (mean, longest) = run.place, LENGTHS[run.place.lengths]
    mismatch = math.inf if run.mismatch is None else run.mismatch
    spec = Synthetic(
        mean=mean, max=longest, run=mismatch, tokens_a_pass=2.0, drift=run.drift, steps=place.steps
    )
    prompts = place.ranks * place.rows // GENERATIONS
    rollout = {
        "num_prompts_per_step": prompts,
        "num_generations": GENERATIONS,
        "max_completion_length": longest,
    }
    rollout["max_batch_tokens"] = 8192
    sections = nested(BLANK) | {"rollout": rollout, "speculative": {"method": run.method}}
    sections |= {
        "bubble": {"max_draft_tokens": 1 << 28}
    }  # host memory is not what this map is about
    workload, started = Workload(spec, prompts, GENERATIONS), time.perf_counter()
    steps = simulate(
        config_of_sections(sections, [], "the map"),
        workload,
        cost_with(run.verification),
        place.ranks,
    )
    step_s = [round(step.seconds, 3) for step in steps]
    return run, totals(steps) | {
        "step_s": step_s,
        "real_s": round(time.perf_counter() - started, 1),
    }


def read(path: str) -> dict[Run, dict]:
    """The runs of a file, none where there is no file. Raises InputError for a file of another
    cost."""
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    if report.get("title") != title():
        raise InputError(f"{path}: its runs are of {report.get('title')!r}, not {title()!r}")
    return {Run(Place(*entry.pop("place")), *entry.pop("run")): entry for entry in report["runs"]}


def write(path: str, runs: dict[Run, dict]) -> None:
    report = {
        "title": title(),
        "runs": [{"place": run.place, "run": run[1:], **figures} for run, figures in runs.items()],
    }
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
    os.replace(f"{path}.part", path)


def sweep(path: str, wanted: list[Run], jobs: int) -> dict[Run, dict]:
    """Simulate the runs that the file lacks, and add each to it as it ends. Returns all runs of the
    file."""
    runs = read(path)
    missing = [run for run in dict.fromkeys(wanted) if run not in runs]
    missing.sort(
        key=lambda run: -run.place.ranks * run.place.steps * LENGTHS[run.place.lengths][0]
    )  # the longest first
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for run, figures in tqdm(
            pool.imap_unordered(simulate_run, missing), total=len(missing), unit="run"
        ):
            runs[run] = figures
            write(path, runs)
    return runs


def cells_of(runs: dict[Run, dict]) -> list[dict]:
    """Every run with drafts beside the one without; `bound` is None where the runs that would tell
    are missing."""
    cells = []
    for run, ours in runs.items():
        none = runs.get(Run(run.place, "none"))
        if run.method == "none" or none is None:
            continue
        cells.append(
            run.place._asdict()
            | {"mismatch": run.mismatch, "drift": run.drift, "verification": run.verification}
        )
        cells[-1] |= {
            "speedup": none["seconds"] / ours["seconds"],
            "forwards_ratio": none["forwards"] / ours["forwards"],
        }
        cells[-1] |= {
            "waiting": (none["bubble_ratio"], ours["bubble_ratio"]),
            "real_s": ours["real_s"],
        }
    for cell in cells:
        cell["bound"] = bound_of(cell, cells)
    order = list(LENGTHS)
    cells.sort(
        key=lambda c: (
            order.index(c["lengths"]),
            c["ranks"],
            c["drift"],
            -(c["mismatch"] or math.inf),
            c["verification"],
        )
    )
    return cells


def bound_of(cell: dict, cells: list[dict]) -> str | None:
    """What bounds a cell, by the other cells of its lengths and ranks."""

    def speedup(mismatch: float | None, verification: float) -> float | None:
        other = cell | {
            "mismatch": mismatch,
            "verification": verification,
            "drift": cell["drift"] if mismatch else 0,
        }
        names = (*Place._fields, "mismatch", "drift", "verification")
        return next(
            (c["speedup"] for c in cells if all(c[name] == other[name] for name in names)), None
        )

    best, perfect = speedup(None, 0.0), speedup(None, cell["verification"])
    free = speedup(cell["mismatch"], 0.0)
    if best is None or perfect is None or free is None:
        return None
    if best < SLACK * cell["speedup"]:
        return "bubble volume"
    return "acceptance" if perfect >= free else "verification"


def draw_map(cells: list[dict], heading: str):
    """A figure with a panel for each lengths and number of ranks: drafts by verification, coloured
    by speed-up, with what bounds it. Cells with drift are left out, and of several lengths of a run
    all but the longest."""
    from matplotlib.figure import Figure

    longest: dict[tuple, int] = {}
    for cell in cells:
        panel = cell["lengths"], cell["ranks"]
        longest[panel] = max(longest.get(panel, 0), cell["steps"])
    cells = [
        cell
        for cell in cells
        if not cell["drift"] and cell["steps"] == longest[cell["lengths"], cell["ranks"]]
    ]
    panels_of = {
        (c["lengths"], c["ranks"]): f"{c['ranks']} ranks, {c['lengths']} tokens\n{c['steps']} steps"
        for c in cells
    }
    mismatches = sorted({c["mismatch"] or math.inf for c in cells}, reverse=True)
    prices = sorted({c["verification"] for c in cells})
    lengths = list(dict.fromkeys(size for size, _ in panels_of))
    ranks = sorted({n for _, n in panels_of})
    figure = Figure(
        figsize=(2.0 + 2.6 * len(ranks), 1.3 + 2.5 * len(lengths)), dpi=140, layout="constrained"
    )
    panels = figure.subplots(len(lengths), len(ranks), squeeze=False, sharex=True, sharey=True)
    highest = max(cell["speedup"] for cell in cells)
    for (i, size), (j, n) in itertools.product(enumerate(lengths), enumerate(ranks)):
        panel, grid = panels[i, j], [[math.nan] * len(prices) for _ in mismatches]
        for cell in cells:
            if (cell["lengths"], cell["ranks"]) != (size, n):
                continue
            row, column = (
                mismatches.index(cell["mismatch"] or math.inf),
                prices.index(cell["verification"]),
            )
            grid[row][column] = cell["speedup"]
            colour = "white" if cell["speedup"] > 0.9 + 0.6 * (highest - 0.9) else "black"
            text = "\n".join(filter(None, (f"{cell['speedup']:.2f}x", BOUNDS.get(cell["bound"]))))
            panel.text(column, row, text, ha="center", va="center", fontsize=9, color=colour)
        image = panel.imshow(grid, cmap="YlGnBu", vmin=0.9, vmax=highest, aspect="auto")
        panel.set_title(
            panels_of.get((size, n), f"{n} ranks, {size} tokens\nnot simulated"), fontsize=9
        )
        panel.set_xticks(range(len(prices)), [f"{v:g}" for v in prices])
        panel.set_yticks(
            range(len(mismatches)), ["never" if m == math.inf else f"{m:,.0f}" for m in mismatches]
        )
    for panel in panels[-1]:
        panel.set_xlabel("cost of a draft token", fontsize=9)
    for panel in panels[:, 0]:
        panel.set_ylabel("tokens to the\nfirst mismatch", fontsize=9)
    figure.colorbar(image, ax=panels, label="rollout speed-up over none", shrink=0.8)
    meaning = ", ".join(f"{letter} = {name}" for name, letter in BOUNDS.items())
    figure.suptitle(f"{heading}\nbounded by: {meaning}", fontsize=9)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description="Map of simulated speed-ups")
    parser.add_argument(
        "file", metavar="FILE.json", help="what it has is kept; what is missing is added"
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[8])
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument(
        "--mismatches", type=float, nargs="+", default=list(MISMATCHES), help="tokens, or inf"
    )
    parser.add_argument("--verification", type=float, nargs="+", default=list(VERIFICATION))
    parser.add_argument("--drift", action="store_true")
    parser.add_argument("--rows", type=int, default=8, help=f"a rank, a multiple of {GENERATIONS}")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--figure")
    arguments = parser.parse_args()
    try:
        if arguments.figure and os.path.exists(arguments.figure):
            raise InputError(f"{arguments.figure} exists")
        if (
            min(*arguments.ranks, arguments.steps, arguments.jobs, arguments.rows, 1) < 1
            or arguments.rows % GENERATIONS
        ):
            raise InputError(
                f"--ranks, --steps, --jobs: at least 1; --rows: a multiple of {GENERATIONS}"
            )
        if min(arguments.mismatches) < 1 or min(arguments.verification) < 0:
            raise InputError("--mismatches: at least 1; --verification: at least 0")
        places = [
            Place(size, n, arguments.rows, arguments.steps)
            for size in arguments.lengths
            for n in arguments.ranks
        ]
        wanted = [Run(place, "none") for place in places]
        for place, mismatch, price in itertools.product(
            places, arguments.mismatches, arguments.verification
        ):
            never = mismatch == math.inf
            drift = int(arguments.drift and not never)
            wanted.append(Run(place, "bubble+suffix", None if never else mismatch, drift, price))
        runs = sweep(arguments.file, wanted, arguments.jobs)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cells = cells_of(runs)
    print(
        "| lengths | ranks | steps | first mismatch | cost of a draft token | speed-up | forwards | waiting | bound |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for c in cells:
        mismatch = "never" if c["mismatch"] is None else f"{c['mismatch']:g}{' / age' * c['drift']}"
        print(
            f"| {c['lengths']} | {c['ranks']} | {c['steps']} | {mismatch} | {c['verification']:g} | {c['speedup']:.2f}x "
            f"| {c['forwards_ratio']:.2f}x | {c['waiting'][0]:.2f} to {c['waiting'][1]:.2f} | {c['bound'] or ''} |"
        )
    if arguments.figure:
        draw_map(cells, title()).savefig(arguments.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
