"""Kernels of linear layers: torchrun --nproc_per_node=2 benchmarks/linear_layers.py --config F
[--json OUT] [overrides]

What model.cpu_linear=auto chooses at the start of a run, and whole steps with it and with torch's
products alone, in turn: rollouts and updates from one barrier to the next. Give
optim.learning_rate=0 for the same samples
in both arms, but for near ties.
"""

import argparse
import json
import os
import sys
import time

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


from benchmarks.shared import main, make_parser
from bubblespec.config import load_config
from bubblespec.dist.ranks import ranks_from_environment
from bubblespec.errors import InputError
from bubblespec.learn.advantages import estimate_advantages
from bubblespec.setup import build
from bubblespec.trainer import Trainer

ARMS = ("torch", "auto")


def take_step(trainer: Trainer, step: int) -> tuple[float, float]:
    """Seconds of its rollout with rewards, and of its update, on the slowest rank."""
    loss, ranks = trainer.config.loss, trainer.ranks
    ranks.barrier()
    begin = time.perf_counter()
    record = trainer.sampler.sample(step)
    ranks.barrier()
    sampled = time.perf_counter()
    advantages = estimate_advantages(record.rewards, loss.advantage_estimator, loss.scale_rewards)
    trainer.learner.update(record.samples, advantages.ravel(), step)
    ranks.barrier()
    return sampled - begin, time.perf_counter() - sampled


def run(arguments: argparse.Namespace, folder: str) -> None:
    configs = {
        arm: load_config(
            arguments.config,
            [*arguments.overrides, f"model.cpu_linear={arm}", f"run.output_dir={folder}/{arm}"],
        )
        for arm in ARMS
    }
    config = configs["auto"]
    with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks:
        trainers = {arm: build(configs[arm], ranks) for arm in ARMS}
        if trainers["auto"].linear is None:
            raise InputError(
                "model.dtype, model.device: there is a choice in float32 on a CPU alone"
            )
        if ranks.is_main:
            print(
                "used:",
                {shape: tuple(plan) for shape, plan in trainers["auto"].linear["plans"].items()},
                flush=True,
            )
        steps: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
        for step in range(config.run.max_steps):
            for arm in ARMS if step % 2 else reversed(ARMS):
                steps[arm].append(take_step(trainers[arm], step))
            if ranks.is_main:
                print(
                    step,
                    {arm: tuple(round(part, 3) for part in steps[arm][-1]) for arm in ARMS},
                    flush=True,
                )
        if ranks.is_main:
            report(
                arguments,
                {arm: np.array(of_arm[1:] or of_arm) for arm, of_arm in steps.items()},
            )  # the first warms up


def report(arguments: argparse.Namespace, times: dict[str, np.ndarray]) -> None:
    """times: [steps, 2] of each arm, rollout and update."""
    ratio = {"rollout": 0, "update": 1}
    result = {
        name: float(times["torch"][:, part].sum() / times["auto"][:, part].sum())
        for name, part in ratio.items()
    }
    result["speedup"] = float(times["torch"].sum() / times["auto"].sum())
    result["speedup_median_step"] = float(
        np.median(times["torch"].sum(axis=1) / times["auto"].sum(axis=1))
    )
    print(", ".join(f"{name} {value:.3f}x" for name, value in result.items()))
    if arguments.json:
        whole = result | {
            "steps": {arm: of_arm.tolist() for arm, of_arm in times.items()},
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(whole | {"config": arguments.config, "overrides": arguments.overrides}, file)


if __name__ == "__main__":
    parser = make_parser("Whole steps with the chosen kernels of linear layers, and with torch's")
    sys.exit(main(run, parser))
