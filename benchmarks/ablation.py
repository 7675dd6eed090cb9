"""What each part of the speculation is worth: python benchmarks/ablation.py [--config F] [--json
OUT] [--only NAME ...]

Runs benchmarks/paired_rollout.py on two ranks once for every variant, each against `none` in the
same run, and prints a table. Read the ratios with a margin: the variants run one after the other,
and a busy machine moves each of them by some percent.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

from tqdm import tqdm

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DEFAULT = "speculative.method=bubble+suffix"
SMALL = [
    "rollout.num_prompts_per_step=8",
    "rollout.num_generations=4",
    "run.max_steps=30",
]  # 16 rows a rank
VARIANTS = {
    "default": [],
    "no drafts ahead (suffix alone)": ["speculative.method=suffix"],
    "prefix only (bubble alone)": ["speculative.method=bubble"],
    "hard bubbles only": ["speculative.planning=idle_only"],
    "look-ahead 0": ["bubble.lookahead=0"],
    "look-ahead 1": ["bubble.lookahead=1"],
    "look-ahead 2": ["bubble.lookahead=2"],
    "look-ahead 4": ["bubble.lookahead=4"],
    "look-ahead 8": ["bubble.lookahead=8"],
    "fixed windows of 4": ["speculative.planning=always"],
    "fixed windows of 16": ["speculative.planning=always"],
    "point mass rule": ["speculative.rule=point_mass"],
    "useless drafts": ["--useless-drafts"],
}


def paired(config: str, overrides: list[str]) -> dict:
    """One run of the paired benchmark. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "result.json")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node=2",
            "--standalone",
        ]
        command += [
            os.path.join(ROOT, "benchmarks", "paired_rollout.py"),
            "--config",
            config,
            "--json",
            out,
            *overrides,
        ]
        subprocess.run(
            command,
            check=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        with open(out, encoding="utf-8") as file:
            return json.load(file)


def row(name: str, result: dict) -> str:
    steps = result["steps"]
    drafted = sum(
        s["rollout/spec_accepted_tokens"] + s["rollout/spec_wasted_tokens"] for s in steps
    )
    accepted = sum(s["rollout/spec_accepted_tokens"] for s in steps)
    return (
        f"| {name} | {result['speedup']:.2f} | {result['speedup_median_step']:.2f} | {-100 * result['forward_reduction']:.0f}% "
        f"| {accepted / max(drafted, 1):.2f} | {sum(s['bubble/drafted_tokens'] for s in steps)} "
        f"| {result['differing_rows']} of {result['rows']} |"
    )


def ages(result: dict) -> str:
    """Acceptance of aligned drafts by age, as of the last step."""
    last, prefix = result["steps"][-1], "drafts/accept_rate/age_"
    rates = {
        int(key[len(prefix) :]): share for key, share in last.items() if key.startswith(prefix)
    }
    return ", ".join(f"{age}: {share:.2f}" for age, share in sorted(rates.items()))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default=os.path.join(ROOT, "configs", "tiny_cpu_bulk.yaml"))
    parser.add_argument("--json")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("overrides", nargs="*", default=SMALL)
    arguments = parser.parse_intermixed_args()
    results = {}
    for name in tqdm(arguments.only, unit="run"):
        try:
            results[name] = paired(
                arguments.config, [DEFAULT, *(arguments.overrides or SMALL), *VARIANTS[name]]
            )
        except subprocess.CalledProcessError as error:
            print(
                f"error: {name}: the run ended with exit code {error.returncode}", file=sys.stderr
            )
            return 1
    print(
        "| variant | speed-up | median step | forwards | accepted | drafted ahead | rows that differ |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, result in results.items():
        print(row(name, result))
    if "default" in results:
        print(f"\nAcceptance of drafts by age in steps: {ages(results['default'])}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
