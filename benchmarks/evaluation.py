"""Evaluations with drafts against plain ones: torchrun --nproc_per_node=2 benchmarks/evaluation.py
--config F [--json OUT]

A run as `train.py` makes it, but from the second on each evaluation is made twice under the same
weights, without and with drafts, in alternating order, and their tokens are compared. Seconds are
from one barrier to the next, so the slowest rank's, with scoring in them.
"""

import argparse
import dataclasses
import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks.shared import main, make_parser
from bubblespec.config import load_config
from bubblespec.dist.ranks import ranks_from_environment
from bubblespec.errors import InputError
from bubblespec.learn.advantages import estimate_advantages
from bubblespec.setup import build
from bubblespec.trainer import Trainer

ARMS = ("plain", "drafts")


def timed(trainer: Trainer, arm: str) -> dict:
    """One evaluation."""
    sampler = trainer.sampler
    if arm == "plain":
        plain = dataclasses.replace(
            sampler, speculation=dataclasses.replace(sampler.speculation, evaluation=None)
        )
        trainer = dataclasses.replace(trainer, sampler=plain)
    trainer.ranks.barrier()
    began_s = time.perf_counter()
    metrics = trainer.evaluate()
    trainer.ranks.barrier()
    return metrics | {"seconds": time.perf_counter() - began_s}


def paired(trainer: Trainer, number: int) -> dict:
    """An evaluation both ways."""
    made = {arm: timed(trainer, arm) for arm in (ARMS if number % 2 else ARMS[::-1])}
    plain, drafts = (made[arm] for arm in ARMS)
    return {
        "updates": trainer.num_updates,
        "plain_s": plain["seconds"],
        "drafts_s": drafts["seconds"],
        "plain_forwards": plain["eval/forwards"],
        "drafts_forwards": drafts["eval/forwards"],
        "accept_rate": drafts["eval/spec_accept_rate"],
        "is_same": plain["eval/digest"] == drafts["eval/digest"],
        "reward": drafts["eval/reward"],
    }


def summarise(evaluations: list[dict]) -> dict:
    total = {
        key: sum(e[key] for e in evaluations)
        for key in ("plain_s", "drafts_s", "plain_forwards", "drafts_forwards")
    }
    return {
        "speedup": total["plain_s"] / total["drafts_s"],
        "forward_reduction": 1 - total["drafts_forwards"] / total["plain_forwards"],
        "num_same_digests": sum(e["is_same"] for e in evaluations),
        **total,
    }


def run(arguments: argparse.Namespace, folder: str) -> None:
    config = load_config(arguments.config, [*arguments.overrides, f"run.output_dir={folder}"])
    with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks:
        trainer = build(config, ranks)
        if trainer.sampler.speculation is None or trainer.sampler.speculation.evaluation is None:
            raise InputError(
                f"speculative.method: {config.speculative.method}; give one with drafts to compare with none"
            )
        if not 0 < config.run.eval_steps <= config.run.max_steps:
            raise InputError(
                f"run.eval_steps: {config.run.eval_steps}; give at most run.max_steps = {config.run.max_steps}"
            )
        evaluations = []
        if ranks.is_main:
            print("updates  plain s  drafts s  ratio     forwards  accepted  same digest")
        trainer.evaluate()  # the first, which has no drafts yet
        for step in range(config.run.max_steps + 1):
            if step and (step % config.run.eval_steps == 0 or step == config.run.max_steps):
                e = paired(trainer, len(evaluations))
                evaluations.append(e)
                if ranks.is_main:
                    print(
                        f"{step:7} {e['plain_s']:8.2f} {e['drafts_s']:9.2f} {e['plain_s'] / e['drafts_s']:6.2f} "
                        f"{e['plain_forwards']:>6}>{e['drafts_forwards']:<5} {e['accept_rate']:8.3f}  {e['is_same']}",
                        flush=True,
                    )
            if step < config.run.max_steps:
                record = trainer.sampler.sample(step)
                loss = config.loss
                trainer.update(
                    record,
                    estimate_advantages(
                        record.rewards, loss.advantage_estimator, loss.scale_rewards
                    ).ravel(),
                )
        if ranks.is_main:
            summary = summarise(evaluations)
            print(
                f"total: {summary['speedup']:.2f}x wall time, {-100 * summary['forward_reduction']:.0f}% forwards on the slowest "
                f"rank, {summary['num_same_digests']} of {len(evaluations)} digests the same"
            )
            if arguments.json:
                with open(arguments.json, "w", encoding="utf-8") as file:
                    entry = {
                        "config": arguments.config,
                        "overrides": arguments.overrides,
                        "evaluations": evaluations,
                    }
                    json.dump(summary | entry, file)


if __name__ == "__main__":
    parser = make_parser("Evaluations with drafts, and plain ones")
    sys.exit(main(run, parser))
