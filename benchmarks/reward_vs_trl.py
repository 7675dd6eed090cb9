"""Held-out reward against wall time, TRL beside us: python benchmarks/reward_vs_trl.py --config F
--json OUT --picture PNG

The arms are those of trl_arms.py; each has a job for each seed, and the jobs take turns. What is
drawn over the seconds of an arm's steps is the mean reward of the weights it had then, on this
trainer's held-out problems, whose answers are drawn with the same noise for all arms
(eval.num_prompts, eval.num_generations, eval.temperature). Neither saving nor evaluating counts.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile

import matplotlib
import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks.trl_arms import ARMS, add_arguments, check, job, weights_file
from bubblespec.config import load_config
from bubblespec.dist.ranks import ranks_from_environment
from bubblespec.errors import InputError
from bubblespec.setup import build
from bubblespec.trainer import Trainer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LAST = {"seconds": "{:.0f}", "rewards": "{:.3f}"}


def held_out(trainer: Trainer, file: str | None = None) -> float:
    """Mean reward, of the trainer's own policy or of weights in a file."""
    if file is not None:
        trainer.learner.model.load_state_dict(torch.load(file))
    return trainer.evaluate()["eval/reward"]


def run_arm(arguments: argparse.Namespace, trainer: Trainer, arm: str, seed: int) -> dict:
    """{"seconds", "rewards"} by evaluation, the first of them before the first step; or
    {"error"}."""
    with tempfile.TemporaryDirectory() as folder:
        done = job(
            arguments, arm, [*arguments.overrides, f"run.seed={seed}"], folder, arguments.every
        )
        if "error" in done:
            return done
        ends = np.cumsum(done["seconds"])
        numbers = range(arguments.every, arguments.steps + 1, arguments.every)
        rewards = [held_out(trainer, weights_file(folder, n)) for n in numbers]
    return {
        "seconds": [0.0, *(float(ends[n - 1]) for n in numbers)],
        "rewards": rewards,
        "step_seconds": done["seconds"],
    }


def time_to(curve: dict, reward: float) -> float | None:
    """Seconds until a reward is reached, on straight lines between evaluations; None where it is
    not."""
    seconds, rewards = curve["seconds"], curve["rewards"]
    for n, (before, after) in enumerate(itertools.pairwise(rewards)):
        if before < reward <= after:
            return seconds[n] + (seconds[n + 1] - seconds[n]) * (reward - before) / (after - before)
    return None


def draw(curves: dict[str, list[dict]], path: str) -> None:
    """A thin line for each seed, a thick one for their mean."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for number, (arm, of_seeds) in enumerate(curves.items()):
        for curve in of_seeds:
            axes.plot(
                curve["seconds"], curve["rewards"], color=f"C{number}", linewidth=0.7, alpha=0.5
            )
        mean = [
            np.mean([curve[key] for curve in of_seeds], axis=0) for key in ("seconds", "rewards")
        ]
        axes.plot(*mean, "o-", color=f"C{number}", markersize=3, label=arm)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("held-out reward")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--picture", required=True, help="PNG")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=["trl", "none", "bubble+suffix", "all"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluations")
    parser.add_argument(
        "--reward", type=float, default=0.8, help="the seconds until this are compared"
    )
    arguments = parser.parse_intermixed_args()
    try:
        if not 0 < arguments.every <= arguments.steps:
            raise InputError(
                f"--every: {arguments.every} of {arguments.steps} steps leaves nothing to evaluate"
            )
        check(load_config(arguments.config, arguments.overrides))
        with tempfile.TemporaryDirectory() as folder:
            # Weights come and go: no copies of them for other kernels.
            overrides = [
                *arguments.overrides,
                "model.cpu_linear=torch",
                "speculative.method=none",
                f"run.output_dir={folder}",
            ]
            config = load_config(arguments.config, overrides)
            with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks:
                trainer = build(config, ranks)
                before = held_out(trainer)
                curves: dict[str, list[dict]] = {arm: [] for arm in arguments.arms}
                for seed in tqdm(arguments.seeds, unit="seed"):
                    for arm in arguments.arms:
                        curve = run_arm(arguments, trainer, arm, seed)
                        if "error" in curve:
                            raise InputError(f"{arm}: {curve['error']}")
                        curve["rewards"].insert(0, before)
                        curves[arm].append(curve)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    first = arguments.arms[0]
    times = {
        arm: [time_to(curve, arguments.reward) for curve in of_seeds]
        for arm, of_seeds in curves.items()
    }
    print(
        f"| arm | seconds of {arguments.steps} steps | held-out reward | seconds until {arguments.reward} | against {first} |"
    )
    print("|---" * 5 + "|")
    for arm, of_seeds in curves.items():
        ratios = [a / b for a, b in zip(times[first], times[arm], strict=True) if a and b]
        totals, last = (
            " ".join(form.format(curve[key][-1]) for curve in of_seeds)
            for key, form in LAST.items()
        )
        until = " ".join("-" if t is None else f"{t:.1f}" for t in times[arm])
        print(
            f"| {arm} | {totals} | {last} | {until} | {f'{np.median(ratios):.2f}x' if ratios else '-'} |"
        )
    draw(curves, arguments.picture)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "config": arguments.config,
                    "overrides": arguments.overrides,
                    "curves": curves,
                    "times": times,
                },
                file,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
