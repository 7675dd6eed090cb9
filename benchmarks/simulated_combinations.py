"""Is the default as good as the best combination of its parts? Simulated:
python benchmarks/simulated_combinations.py --json OUT [--synthetic mean=2000,max=16000] [--all]

Parts are drafts from idle time, suffix matches, the quantised copy, placement and the TP tail. By
default: all of them, each taken out, each alone, and none; with --all every combination. The data's
order stays, so all train on the same samples; what is compared are seconds of rollout.
"""

import argparse
import itertools
import os
import sys

from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import shared
from bubblespec.errors import InputError
from bubblespec.tools.simulate.command import synthetic_run, totals
from bubblespec.tools.simulate.recorded import load_copy_cost, load_cost
from bubblespec.tools.simulate.run import simulate
from bubblespec.tools.simulate.workload import Spec, parse

SOURCES = ("bubble", "suffix", "quantized")
PARTS = (*SOURCES, "placement", "tail")


def combinations(has_all: bool) -> list[tuple[str, ...]]:
    """Return the combinations, all parts first."""
    if has_all:
        sizes = range(len(PARTS), -1, -1)
        return [parts for size in sizes for parts in itertools.combinations(PARTS, size)]
    less = [tuple(part for part in PARTS if part != out) for out in PARTS]
    return [PARTS, *less, *((part,) for part in PARTS), ()]


def overrides(parts: tuple[str, ...]) -> list[str]:
    """Return the keys of a combination."""
    method = "+".join(part for part in parts if part in SOURCES) or "none"
    keys = [f"speculative.method={method}"]
    if "placement" not in parts:
        keys.append("rollout.placement=in_turn")
    if "tail" not in parts:
        keys.append("rollout.tp_tail_max_rows=0")
    return keys


def run(arguments: argparse.Namespace, folder: str) -> None:
    spec = parse(Spec, arguments.synthetic, "--synthetic")
    if arguments.ranks < 2 or arguments.rows % arguments.generations:
        raise InputError("--ranks: at least 2; --rows: a multiple of --generations")
    num_prompts = arguments.ranks * arguments.rows // arguments.generations
    sizes = [f"rollout.num_prompts_per_step={num_prompts}"]
    sizes += [f"rollout.num_generations={arguments.generations}"]
    cost, copy_cost = load_cost(arguments.cost_model), load_copy_cost(arguments.cost_model)
    together = load_cost(arguments.cost_model, arguments.ranks)
    runs = []
    for parts in tqdm(combinations(arguments.all)):
        config, workload = synthetic_run(spec, sizes + overrides(parts))
        steps = simulate(
            config,
            workload,
            cost.seconds,
            arguments.ranks,
            together=together.seconds,
            copy_cost=None if copy_cost is None else copy_cost.seconds,
        )
        runs.append({"parts": "+".join(parts) or "none"} | totals(steps))
        print(f"{runs[-1]['parts']}: {runs[-1]['seconds']:.1f} s", file=sys.stderr, flush=True)
    plain_s, best_s = runs[-1]["seconds"], min(found["seconds"] for found in runs)
    for found in runs:
        found["speedup"] = plain_s / found["seconds"]
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    shared.write_json(arguments.json, {"settings": settings, "runs": runs})
    columns = {"parts": "{parts}", "speed-up": "{speedup:.2f}x", "idle time": "{idle_share:.2f}"}
    print(cost.source)
    print(shared.tabulate(runs, columns))
    print(f"all parts: {runs[0]['seconds'] / best_s - 1:.1%} slower than the best combination")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Combinations of the default's parts, simulated")
    parser.add_argument("--json", help="file for the runs")
    parser.add_argument("--synthetic", default="mean=500,max=4000", metavar="NAME=VALUE,...")
    parser.add_argument("--cost-model", default="h200:7b", metavar="GPU:MODEL")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16, help="responses per rank and step")
    parser.add_argument("--generations", type=int, default=8, help="responses per prompt")
    parser.add_argument("--all", action="store_true", help="every combination: 32 runs")
    return parser


if __name__ == "__main__":
    sys.exit(shared.main(run, make_parser()))
