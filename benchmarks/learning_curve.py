"""Draw the learning curves of runs: python benchmarks/learning_curve.py RUN_DIR [RUN_DIR ...]
--output FILE.png"""

import argparse
import json
import os

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read(run_dir: str) -> list[dict]:
    with open(os.path.join(run_dir, "metrics.jsonl"), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    figure, (rewards, lengths) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for number, run in enumerate(arguments.runs):
        lines, colour = read(run), f"C{number}"
        steps = [line for line in lines if "reward" in line]
        evaluations = [line for line in lines if "eval/reward" in line]
        name = os.path.basename(os.path.normpath(run))
        x = [s["step"] for s in steps]
        rewards.plot(x, [s["reward"] for s in steps], color=colour, alpha=0.35, linewidth=1)
        rewards.plot(
            [e["step"] for e in evaluations],
            [e["eval/reward"] for e in evaluations],
            "o-",
            color=colour,
            label=name,
        )
        if number == 0:
            for key, label in (
                ("median", "median"),
                ("p99", "99th percentile"),
                ("max", "longest"),
            ):
                lengths.plot(
                    x, [s[f"completions/{key}_length"] for s in steps], label=label, linewidth=1
                )
            lengths.set_title(f"response tokens, {name}", fontsize=10)
    rewards.set_title("reward: training (thin), held-out (dots)", fontsize=10)
    rewards.set_ylim(0, 1.02)
    lengths.set_ylim(0, lengths.get_ylim()[1] * 1.2)  # room for the legend
    for axes in (rewards, lengths):
        axes.set_xlabel("step")
        axes.legend(
            frameon=False,
            fontsize=8,
            ncols=3,
            loc="lower right" if axes is rewards else "upper right",
        )
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(arguments.output, dpi=110)


if __name__ == "__main__":
    main()
