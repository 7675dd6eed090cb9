"""Is the default as good as the best combination of its parts? Simulated:
python benchmarks/simulated_combinations.py --json OUT [--synthetic mean=2000,max=16000,steps=8]
[--longest 500] [--all] [section.key=value ...]

Parts are drafts from idle time, suffix matches, the quantised copy, placement and the TP tail. By
default: all of them, each taken out, each alone, and none; with --all every combination. All train
on the same samples; what is compared are seconds of rollout for each token that is trained on, with
tail_batching.enabled=true up to the last long round.

--longest: tokens of the longest simulated response, each of which stands for several real ones as
in simulated_systems.py. With 500, the twelve runs take 3 (16 rows) to 10 minutes (128 rows) of one
core; without it 25 minutes with the default workload, and longer in proportion to max.
"""

import argparse
import itertools
import os
import sys

from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import shared
from benchmarks.simulated_systems import scaled_costs, shortened
from bubblespec.errors import InputError
from bubblespec.tools.simulate.command import synthetic_run, totals
from bubblespec.tools.simulate.recorded import load_cost
from bubblespec.tools.simulate.run import counted, simulate
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
    keys.append("rollout.placement=" + ("balanced" if "placement" in parts else "in_turn"))
    if "tail" not in parts:
        keys.append("rollout.tp_tail_max_rows=0")
    return keys


def run(arguments: argparse.Namespace, folder: str) -> None:
    spec = parse(Spec, arguments.synthetic, "--synthetic")
    if arguments.ranks < 2 or arguments.rows % arguments.generations:
        raise InputError("--ranks: at least 2; --rows: a multiple of --generations")
    scale = spec.max / (arguments.longest or spec.max)
    spec, num_prompts = shortened(spec, scale), arguments.ranks * arguments.rows
    sizes = [f"rollout.num_prompts_per_step={num_prompts // arguments.generations}"]
    sizes += [f"rollout.num_generations={arguments.generations}", *arguments.overrides]
    costs, runs = scaled_costs(arguments.cost_model, arguments.ranks, scale), []
    for parts in tqdm(combinations(arguments.all)):
        config, workload = synthetic_run(spec, sizes + overrides(parts))
        steps = simulate(config, workload, num_ranks=arguments.ranks, **costs)
        found = totals(counted(steps) if config.tail_batching.enabled else steps)
        found["seconds"] *= scale  # of as many tokens; seconds per token are those of a real one
        runs.append({"parts": "+".join(parts) or "none"} | found)
        print(f"{runs[-1]['parts']}: {found['seconds']:.1f} s", file=sys.stderr, flush=True)
    plain_s = runs[-1]["seconds_per_token"]
    for found in runs:
        found["speedup"] = plain_s / found["seconds_per_token"]
    best = max(found["speedup"] for found in runs)
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    shared.write_json(arguments.json, {"settings": settings, "runs": runs})
    columns = {"parts": "{parts}", "speed-up": "{speedup:.2f}x", "idle time": "{idle_share:.2f}"}
    print(load_cost(arguments.cost_model).source)
    print(shared.tabulate(runs, columns))
    print(f"all parts: {best / runs[0]['speedup'] - 1:.1%} slower than the best combination")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Combinations of the default's parts, simulated")
    parser.add_argument("--json", help="file for the runs")
    parser.add_argument("--synthetic", default="mean=500,max=4000", metavar="NAME=VALUE,...")
    parser.add_argument("--cost-model", default="h200:7b", metavar="GPU:MODEL")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16, help="responses per rank and step")
    parser.add_argument("--generations", type=int, default=8, help="responses per prompt")
    parser.add_argument("--longest", type=int, help="tokens of the longest simulated response")
    parser.add_argument("overrides", nargs="*", help="section.key=value, of every run")
    parser.add_argument("--all", action="store_true", help="every combination: 32 runs")
    return parser


if __name__ == "__main__":
    sys.exit(shared.main(run, make_parser()))
