"""Scheduling of rollouts against plain order: torchrun --nproc_per_node=2
benchmarks/tail_batching.py --config F [overrides]

Each arm is a run of its own, of the same weights at the beginning; they take their steps in turn,
each time in another order. If optim.learning_rate is 0 the weights stay the same, and all arms
generate the same samples, in an order of their own; else each trains its own policy. What counts is
seconds of rollout (waiting and exchange in it) for each token that is trained on, on the slowest
rank; short and long rounds count up to the last long one, when nothing that has been paid for is
waiting.
"""

import argparse
import json
import os
import sys

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks.shared import check_arms, main, make_parser
from bubblespec.config import load_config
from bubblespec.dist.ranks import Ranks, ranks_from_environment
from bubblespec.learn.advantages import estimate_advantages
from bubblespec.records import StepRecord, total_s
from bubblespec.setup import build
from bubblespec.trainer import Trainer

NONE, DRAFTS = "speculative.method=none", "speculative.method=bubble+suffix"
IN_ORDER, TAIL = "tail_batching.enabled=false", "tail_batching.enabled=true"
IN_TURN, BALANCED = "rollout.placement=in_turn", "rollout.placement=balanced"
ARMS = {
    "plain": (NONE, IN_ORDER, IN_TURN),
    "balanced": (NONE, IN_ORDER, BALANCED),
    "tail": (NONE, TAIL, IN_TURN),
    "drafts": (DRAFTS, IN_ORDER, IN_TURN),
    "tail+drafts": (DRAFTS, TAIL, IN_TURN),
    "tail+balanced": (NONE, TAIL, BALANCED),
    "all": (DRAFTS, TAIL, BALANCED),
}
PAPER = (
    "RollPacker (arXiv 2509.21009), prompts deferred only, its own hardware: "
    "1.14x / 1.64x / 2.60x at 8k / 16k / 32k tokens"
)


def measure(ranks: Ranks, record: StepRecord) -> dict:
    """A step's rollouts: seconds on the slowest rank, and what was trained on."""
    waited_s = sum(rollout.wait_s for rollout in record.rollouts) + total_s(record.stages, "wait")
    gen_s = (
        total_s(record.stages, "gen")
        + total_s(record.stages, "wait")
        + total_s(record.spans, "exchange")
    )
    forwards = sum(rollout.own_forwards for rollout in record.rollouts)
    by_rank = ranks.gather(np.array([gen_s, waited_s, forwards]))
    lengths = record.generated.lengths
    return {
        "seconds": float(by_rank[:, 0].max()),
        "idle": float(by_rank[:, 1].mean()),
        "forwards": int(by_rank[:, 2].max()),
        "tokens": int(lengths.sum()),
        "longest": int(lengths.max()),
    }


def take_step(trainer: Trainer, step: int, learns: bool) -> dict:
    """One step of an arm."""
    loss = trainer.config.loss
    trainer.ranks.barrier()
    record = trainer.sampler.sample(step)
    if learns:
        advantages = estimate_advantages(
            record.rewards, loss.advantage_estimator, loss.scale_rewards
        )
        trainer.learner.update(record.samples, advantages.ravel(), step)
    return measure(trainer.ranks, record) | trainer.sampler.schedule.metrics()


def summarise(steps: list[dict]) -> dict:
    """An arm up to its last long round, or all of it."""
    longs = [number for number, step in enumerate(steps) if step.get("tail/is_long_round")]
    counted = steps[: longs[-1] + 1] if longs else steps
    total = {
        name: sum(step[name] for step in counted)
        for name in ("seconds", "idle", "forwards", "tokens")
    }
    return {
        "seconds_per_token": total["seconds"] / total["tokens"],
        "idle_ratio": total["idle"] / total["seconds"],
        "forwards_per_token": total["forwards"] / total["tokens"],
        "length_ratio": counted[-1].get("tail/length_ratio", 1.0),
        "steps": len(counted),
        "long_rounds": len(longs),
    }


def run(arguments: argparse.Namespace, folder: str) -> None:
    check_arms(arguments, ARMS)
    names = arguments.arms.split(",")
    configs = [
        load_config(
            arguments.config, [*arguments.overrides, *ARMS[name], f"run.output_dir={folder}/{name}"]
        )
        for name in names
    ]
    with ranks_from_environment(configs[0].model.device, configs[0].run.timeout_s) as ranks:
        trainers = [build(config, ranks) for config in configs]
        learns = configs[0].optim.learning_rate > 0
        steps: dict[str, list[dict]] = {name: [] for name in names}
        for step in range(configs[0].run.max_steps):
            turn = step % len(names)
            for name, trainer in [*zip(names, trainers, strict=True)][turn:] + [
                *zip(names, trainers, strict=True)
            ][:turn]:
                steps[name].append(take_step(trainer, step, learns))
            if ranks.is_main and (step + 1) % 10 == 0:
                print(
                    f"{step + 1} steps: "
                    + ", ".join(f"{n} {sum(s['seconds'] for s in steps[n]):.1f} s" for n in names),
                    flush=True,
                )
        if ranks.is_main:
            report(arguments, {name: summarise(of_arm) for name, of_arm in steps.items()}, steps)


def report(
    arguments: argparse.Namespace, arms: dict[str, dict], steps: dict[str, list[dict]]
) -> None:
    first = next(iter(arms.values()))
    for name, arm in arms.items():
        arm["speedup"] = first["seconds_per_token"] / arm["seconds_per_token"]
        print(
            f"{name:10} {1e6 * arm['seconds_per_token']:8.1f} us/token  {arm['speedup']:.2f}x  "
            f"idle {arm['idle_ratio']:.1%}  forwards {arm['forwards_per_token'] / first['forwards_per_token'] - 1:+.0%}  "
            f"length ratio {arm['length_ratio']:.3f}  {arm['steps']} steps, "
            f"{arm['long_rounds']} long"
        )
    print(PAPER)
    if arguments.json:
        last = list(arms.values())[-1]
        result = {"speedup": last["speedup"], "length_ratio": last["length_ratio"], "arms": arms}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(
                {
                    **result,
                    "config": arguments.config,
                    "overrides": arguments.overrides,
                    "steps": steps,
                },
                file,
            )


if __name__ == "__main__":
    parser = make_parser("Seconds of rollout per trained token, by rule of what makes up a step")
    arms = f"the first is what the others are compared with; of {', '.join(ARMS)}"
    parser.add_argument("--arms", default="plain,tail", help=arms)
    sys.exit(main(run, parser))
