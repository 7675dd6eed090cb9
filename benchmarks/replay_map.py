"""Where speculation pays, and what bounds it: python benchmarks/replay_map.py --json OUT [--figure FILE] [--jobs N]

Simulated rollouts (bubblespec.replay), analytic cost: a 7B on H200s from its data sheet, not measured. Every cell is one run of a
few steps with made-up lengths, `none` against the default method, for

- lengths: lognormal with mean 2,000 up to 16,000 tokens, and mean 8,000 up to 64,000;
- ranks: 8, 16 and 64, with the same number of rows each;
- drafts: tokens to the first mismatch (infinite, 2,000, 500); after it about 2 tokens a pass by suffix matches;
- verification: what a draft token costs beside the roofline, which has it free while weights are being read, in multiples of a
  token's computing.

What bounds a cell is what would help it most: perfect drafts (acceptance), free verification (verification), or, where both
together would make it less than a tenth faster, neither (bubble volume: there is no more idle time to draft in).
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time

from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from bubblespec.config import config_of_sections
from bubblespec.errors import InputError
from bubblespec.replay.__main__ import BLANK, describe_cost, nested, totals
from bubblespec.replay.analytic import GPUS, MODELS, analytic_cost
from bubblespec.replay.simulate import simulate
from bubblespec.replay.workload import Synthetic, Workload

LENGTHS = {"2k to 16k": (2000.0, 16000), "8k to 64k": (8000.0, 64000)}
RUNS = (float("inf"), 2000.0, 500.0)
VERIFICATION = (0.0, 1.0, 4.0)
HARDWARE = ("h200", "7b", 3e-3, 0.8, 0.5)
TOKEN_S = 2 * MODELS["7b"][0] / (0.5 * GPUS["h200"][1])
GENERATIONS = 8
BOUNDS = {"bubble volume": "B", "acceptance": "A", "verification": "V"}
SLACK = 1.1  # a bound counts if its end would make this much faster


def cost_with(verification: float):
    cost = analytic_cost(*HARDWARE)
    cost.rates["draft_tokens"] = verification * TOKEN_S
    cost.propose = [200e-6, 10e-6]
    cost.__post_init__()
    return cost


def simulate_cell(cell: tuple) -> tuple[tuple, dict]:
    """cell: method, lengths, ranks, run, verification, rows a rank, steps. Returns it with its totals."""
    method, lengths, num_ranks, run, verification, rows, steps = cell
    mean, longest = LENGTHS[lengths]
    spec = Synthetic(mean=mean, max=longest, run=run, tokens_a_pass=2.0, steps=steps)
    prompts = num_ranks * rows // GENERATIONS
    rollout = {"num_prompts_per_step": prompts, "num_generations": GENERATIONS, "max_completion_length": longest}
    rollout["max_batch_tokens"] = 8192
    sections = nested(BLANK) | {"rollout": rollout, "speculative": {"method": method}}
    sections |= {"bubble": {"max_draft_tokens": 1 << 28}}  # host memory is not what this map is about
    workload, started = Workload(spec, prompts, GENERATIONS), time.perf_counter()
    found = totals(simulate(config_of_sections(sections, [], "the map"), workload, cost_with(verification), num_ranks))
    return cell, found | {"real_s": time.perf_counter() - started}


def sweep(ranks: list[int], lengths: list[str], rows: int, steps: int, jobs: int) -> list[dict]:
    plain = [("none", size, n, RUNS[0], 0.0, rows, steps) for size, n in itertools.product(lengths, ranks)]
    drafted = [
        ("bubble+suffix", size, n, run, verification, rows, steps)
        for size, n, run, verification in itertools.product(lengths, ranks, RUNS, VERIFICATION)
    ]
    cells = sorted([*plain, *drafted], key=lambda cell: -cell[2] * LENGTHS[cell[1]][0])  # the longest first
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        found = dict(tqdm(pool.imap_unordered(simulate_cell, cells), total=len(cells), unit="run"))
    results = []
    for cell in drafted:
        _, size, n, run, verification, *_ = cell
        none, ours = found["none", size, n, RUNS[0], 0.0, rows, steps], found[cell]
        results.append(
            {
                "lengths": size,
                "ranks": n,
                "run": run if run < float("inf") else None,
                "verification": verification,
                "speedup": none["seconds"] / ours["seconds"],
                "forwards_ratio": none["forwards"] / ours["forwards"],
                "none": none,
                "bubble+suffix": ours,
            }
        )
    for result in results:
        result["bound"] = bound_of(result, results)
    return results


def bound_of(result: dict, results: list[dict]) -> str:
    """What would help a cell most, by the other cells of its lengths and ranks."""

    def speedup(run: float | None, verification: float) -> float:
        place = {"lengths": result["lengths"], "ranks": result["ranks"], "run": run, "verification": verification}
        return next(other["speedup"] for other in results if place.items() <= other.items())

    run, verification, own = result["run"], result["verification"], SLACK * result["speedup"]
    if speedup(None, 0.0) < own:
        return "bubble volume"
    return "acceptance" if speedup(None, verification) >= speedup(run, 0.0) else "verification"


def draw_map(results: list[dict], title: str):
    """A figure with a panel for each lengths and number of ranks: drafts by verification, coloured by speed-up, with what bounds
    it."""
    from matplotlib.figure import Figure

    lengths, ranks = (list(dict.fromkeys(result[name] for result in results)) for name in ("lengths", "ranks"))
    figure = Figure(figsize=(1.5 + 3.1 * len(ranks), 1.3 + 2.5 * len(lengths)), dpi=140, layout="constrained")
    panels = figure.subplots(len(lengths), len(ranks), squeeze=False, sharex=True, sharey=True)
    highest = max(result["speedup"] for result in results)
    runs = [run if run < float("inf") else None for run in RUNS]
    for panel, (size, n) in zip(panels.ravel(), itertools.product(lengths, ranks), strict=True):
        at = {(r["run"], r["verification"]): r for r in results if r["lengths"] == size and r["ranks"] == n}
        grid = [[at[run, verification]["speedup"] for verification in VERIFICATION] for run in runs]
        image = panel.imshow(grid, cmap="YlGnBu", vmin=0.9, vmax=highest, aspect="auto")
        for (row, run), (column, verification) in itertools.product(enumerate(runs), enumerate(VERIFICATION)):
            cell = at[run, verification]
            colour = "white" if cell["speedup"] > 0.9 + 0.6 * (highest - 0.9) else "black"
            text = f"{cell['speedup']:.2f}x\n{BOUNDS[cell['bound']]}"
            panel.text(column, row, text, ha="center", va="center", fontsize=9, color=colour)
        panel.set_title(f"{n} ranks, {size} tokens", fontsize=9)
        panel.set_xticks(range(len(VERIFICATION)), [f"{v:g}" for v in VERIFICATION])
        panel.set_yticks(range(len(runs)), ["never" if run is None else f"{run:,.0f}" for run in runs])
    for panel in panels[-1]:
        panel.set_xlabel("cost of a draft token", fontsize=9)
    for panel in panels[:, 0]:
        panel.set_ylabel("tokens to the\nfirst mismatch", fontsize=9)
    figure.colorbar(image, ax=panels, label="rollout speed-up over none", shrink=0.8)
    meaning = ", ".join(f"{letter} = {name}" for name, letter in BOUNDS.items())
    figure.suptitle(f"{title}\nbounded by: {meaning}", fontsize=9)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description="Map of simulated speed-ups")
    parser.add_argument("--json", required=True)
    parser.add_argument("--figure")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--rows", type=int, default=16, help=f"a rank, a multiple of {GENERATIONS}")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    try:
        for path in filter(None, (arguments.json, arguments.figure)):
            if os.path.exists(path):
                raise InputError(f"{path} exists")
        if min(*arguments.ranks, arguments.steps, arguments.jobs, arguments.rows) < 1 or arguments.rows % GENERATIONS:
            raise InputError(f"--ranks, --steps, --jobs: at least 1; --rows: a multiple of {GENERATIONS}")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    started = time.perf_counter()
    results = sweep(arguments.ranks, arguments.lengths, arguments.rows, arguments.steps, arguments.jobs)
    spent = time.perf_counter() - started
    title = f"Simulated, {describe_cost(cost_with(0.0))}\n{arguments.rows} rows a rank, {arguments.steps} steps"
    report = {"title": title, "rows": arguments.rows, "steps": arguments.steps, "real_s": spent, "cells": results}
    with open(arguments.json, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
    print("| lengths | ranks | first mismatch | cost of a draft token | speed-up | forwards | waiting | bound |")
    print("|---|---|---|---|---|---|---|---|")
    for r in results:
        waiting = f"{r['none']['bubble_ratio']:.2f} to {r['bubble+suffix']['bubble_ratio']:.2f}"
        print(
            f"| {r['lengths']} | {r['ranks']} | {r['run'] or 'never'} | {r['verification']:g} | {r['speedup']:.2f}x "
            f"| {r['forwards_ratio']:.2f}x | {waiting} | {r['bound']} |"
        )
    print(f"\n{len(results)} cells in {spent:.0f} s with {arguments.jobs} jobs")
    if arguments.figure:
        draw_map(results, title).savefig(arguments.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
