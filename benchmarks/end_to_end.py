"""Whole steps, by what is switched on: torchrun --nproc_per_node=2 benchmarks/end_to_end.py --config F --json OUT [overrides]

Each arm is a training run of its own, from the same weights; the arms take their steps in turn, each time in another order, so
that a busy moment of the machine meets all of them. Counted are seconds from barrier to barrier of whole steps: rollouts,
rewards, gradients, the optimizer; evaluations (run.eval_steps) are made between them, and not counted. As steps of short and long
rounds are of different size, speeds are of seconds for each token that is trained on. The first steps count.
"""

import argparse
import json
import os
import sys
import time

import matplotlib
import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks.shared import check_arms, main, make_parser
from bubblespec.config import load_config
from bubblespec.errors import InputError
from bubblespec.learn.advantages import estimate_advantages
from bubblespec.ranks.collectives import Ranks, ranks_from_environment
from bubblespec.set_up import set_up
from bubblespec.trainer import Trainer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OFF = ("speculative.method=none", "tail_batching.enabled=false", "optim.stream_gradients=false")
DRAFTS, TAIL, STREAMED = "speculative.method=bubble+suffix", "tail_batching.enabled=true", "optim.stream_gradients=true"
ARMS = {
    "plain": (),
    "drafts": (DRAFTS,),
    "tail": (TAIL,),
    "streamed": (STREAMED,),
    "drafts+streamed": (DRAFTS, STREAMED),
    "all": (DRAFTS, TAIL, STREAMED),
}


class Arm:
    """One training run, step by step."""

    def __init__(self, name: str, trainer: Trainer):
        self.name, self.trainer = name, trainer
        self.seconds, self.tokens = [], []  # of each step
        self.curve: list[tuple[float, float]] = []  # seconds of steps so far, held-out reward

    def evaluate(self) -> None:
        """Where run.eval_steps wants it."""
        run, done = self.trainer.config.run, len(self.seconds)
        if run.eval_steps and (done % run.eval_steps == 0 or done == run.max_steps):
            self.curve.append((sum(self.seconds), self.trainer.evaluate()["eval/reward"]))

    def step(self, ranks: Ranks) -> None:
        """One whole step, on all ranks."""
        trainer, loss, step = self.trainer, self.trainer.config.loss, len(self.seconds)
        ranks.barrier()
        began_s = time.perf_counter()
        record = trainer.sampler.sample(step)
        advantages = estimate_advantages(record.rewards, loss.advantage_estimator, loss.scale_rewards)
        trainer.update(record, advantages.ravel())
        ranks.barrier()
        self.seconds.append(float(ranks.gather(np.array([time.perf_counter() - began_s])).max()))
        self.tokens.append(int(record.generated.lengths.sum()))
        self.evaluate()

    def result(self) -> dict:
        """Of the whole run."""
        return {
            "seconds_per_token": sum(self.seconds) / sum(self.tokens),
            "seconds": self.seconds,
            "tokens": self.tokens,
            "curve": self.curve,
        }


def run_seed(arguments: argparse.Namespace, ranks: Ranks, seed: int, folder: str) -> dict[str, dict]:
    """All arms of a seed."""
    arms = []
    for name in arguments.arms.split(","):
        overrides = [*OFF, *ARMS[name], *arguments.overrides, f"run.seed={seed}", f"run.output_dir={folder}/{seed}_{name}"]
        arms.append(Arm(name, set_up(load_config(arguments.config, overrides), ranks)))
    num_steps = arms[0].trainer.config.run.max_steps
    for arm in arms:
        arm.evaluate()
    for step in range(num_steps):
        for arm in arms[step % len(arms) :] + arms[: step % len(arms)]:
            arm.step(ranks)
        if ranks.is_main and ((step + 1) % 10 == 0 or step + 1 == num_steps):
            text = ", ".join(f"{arm.name} {1e6 * arm.result()['seconds_per_token']:.0f}" for arm in arms)
            print(f"seed {seed}, {step + 1} steps, us/token: {text}", flush=True)
    return {arm.name: arm.result() for arm in arms}


def summarise(seeds: dict[int, dict[str, dict]]) -> dict[str, dict]:
    """By arm: the speed-up over the first arm, of each seed and the median; and the held-out reward at the end, on average."""
    first = next(iter(next(iter(seeds.values()))))
    summary = {}
    for name in next(iter(seeds.values())):
        speedups = [arms[first]["seconds_per_token"] / arms[name]["seconds_per_token"] for arms in seeds.values()]
        rewards = [arms[name]["curve"][-1][1] for arms in seeds.values() if arms[name]["curve"]]
        summary[name] = {
            "speedup": float(np.median(speedups)),
            "speedups": speedups,
            "reward": float(np.mean(rewards)) if rewards else None,
            "rewards": rewards,
        }
    return summary


def draw(seeds: dict[int, dict[str, dict]], path: str) -> None:
    """Held-out reward over seconds of training: a thin line for each seed, a thick one for their mean."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for number, name in enumerate(next(iter(seeds.values()))):
        curves = np.array([arms[name]["curve"] for arms in seeds.values()])  # [seeds, evaluations, 2]
        for curve in curves:
            axes.plot(*curve.T, color=f"C{number}", alpha=0.25, linewidth=1)
        axes.plot(*curves.mean(axis=0).T, "o-", color=f"C{number}", label=name, markersize=4)
    axes.set_xlabel("seconds of training, without evaluations")
    axes.set_ylabel("held-out reward")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def report(arguments: argparse.Namespace, seeds: dict[int, dict[str, dict]]) -> None:
    summary = summarise(seeds)
    for name, arm in summary.items():
        of_seeds = ", ".join(f"{speedup:.2f}" for speedup in arm["speedups"])
        print(
            f"{name:10} {arm['speedup']:.2f}x ({of_seeds})  held-out {arm['reward']:.3f}"
            if arm["rewards"]
            else f"{name:10} {arm['speedup']:.2f}x"
        )
    if arguments.picture:
        draw(seeds, arguments.picture)
    if arguments.json:
        last = list(summary.values())[-1]
        result = {"speedup": last["speedup"], "arms": summary, "config": arguments.config, "overrides": arguments.overrides}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({**result, "seeds": seeds}, file)


def run(arguments: argparse.Namespace, folder: str) -> None:
    check_arms(arguments, ARMS)
    config = load_config(arguments.config, arguments.overrides)
    if arguments.picture and not config.run.eval_steps:
        raise InputError("--picture: there is nothing to draw with run.eval_steps=0")
    with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks:
        seeds = {seed: run_seed(arguments, ranks, seed, folder) for seed in map(int, arguments.seeds.split(","))}
        if ranks.is_main:
            report(arguments, seeds)


if __name__ == "__main__":
    parser = make_parser("Seconds of whole steps, by what is switched on")
    parser.add_argument("--picture", help="PNG of held-out reward over seconds")
    parser.add_argument("--seeds", default="0", help="of the runs, with commas between")
    arms = f"the others are compared with the first; of {', '.join(ARMS)}"
    parser.add_argument("--arms", default=",".join(ARMS), help=arms)
    sys.exit(main(run, parser))
