"""Speculation against none, paired: torchrun --nproc_per_node=2 benchmarks/paired_rollout.py
--config F [--json OUT] [overrides]

For each training step the *same batch* is rolled out with the *same weights* twice, without and
with speculation, in alternating order; the tokens are compared; then the policy is trained on them
and the next step follows. Wall time is from one barrier to the next, so it is the slowest rank's,
with the exchange of drafts in it. With --useless-drafts all drafts are replaced by random tokens:
what speculation costs at worst.
"""

import argparse
import dataclasses
import gc
import os
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks.shared import main, make_parser, plain_engine, write_json
from bubblespec.config_file import load_config
from bubblespec.distributed.ranks import ranks_from_environment
from bubblespec.engine.engine import Engine
from bubblespec.errors import InputError
from bubblespec.idle.draft_ahead import DraftAhead
from bubblespec.learn.advantages import estimate_advantages
from bubblespec.records import StepRecord
from bubblespec.rewards.scorer import Scoring
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.rollout.table import RowTable
from bubblespec.samples import Samples
from bubblespec.setup import build
from bubblespec.telemetry.report import speculation_metrics
from bubblespec.trainer import Trainer
from bubblespec.types import Row

PAPER = (
    "paper (arXiv 2605.08862, its own hardware): decoding steps -50%, rollout throughput up to 1.8x"
)


def timed(trainer: Trainer, action) -> tuple[float, int]:
    """Seconds on the slowest rank, and its forwards (the most of any rank while it had rows of its
    own)."""
    trainer.ranks.barrier()
    started = time.perf_counter()
    forwards = action()
    trainer.ranks.barrier()
    elapsed = time.perf_counter() - started
    return elapsed, int(trainer.ranks.gather(np.array([forwards])).max())


def make_drafts_useless(trainer: Trainer) -> None:
    finish, rng = DraftAhead.finish, np.random.default_rng(trainer.ranks.rank)
    vocab_size = trainer.learner.model.get_input_embeddings().num_embeddings

    def finish_useless(task, ranks):
        for name, draft in task.drafts.items():
            random = rng.integers(0, vocab_size, len(draft.tokens)).astype(np.int32)
            task.drafts[name] = dataclasses.replace(draft, tokens=random)
        finish(task, ranks)

    DraftAhead.finish = finish_useless


def paired_step(
    trainer: Trainer,
    plain: Engine,
    step: int,
    inspect: Callable[[list[Row], list[Row]], None] | None = None,
) -> dict:
    """Roll out a step twice, then learn from it. inspect(rows of none, rows of speculation): before
    the weights change."""
    config, ranks, sampler = trainer.config, trainer.ranks, trainer.sampler
    stats, launch = sampler.stats, sampler.schedule.launch(step)
    table, plain_rows, scoring = sampler.begin(launch, step, sampler.store)
    rows = {
        "none": plain_rows,
        "speculation": {
            index: table.make_row(index, config.rollout.max_completion_length)
            for index in plain_rows
        },
    }
    outcome = {}

    def without():
        loop = RolloutLoop(plain, ranks, sampler.params, rows["none"], table)
        return loop.run().own_forwards

    def speculative():
        outcome["rollout"], tasks = sampler.roll_out(
            table, rows["speculation"], step, launch.groups
        )
        outcome["exchange"] = sampler.conclude(
            outcome["rollout"], tasks, table, rows["speculation"], step
        )
        return outcome["rollout"].own_forwards

    arms = [("none", without), ("speculation", speculative)]
    result = {"step": step}
    for arm, action in arms if step % 2 == 0 else reversed(arms):
        result[f"{arm}_s"], result[f"{arm}_forwards"] = timed(trainer, action)
    pairs = [(row, rows["speculation"][place]) for place, row in rows["none"].items()]
    differing = sum(not np.array_equal(a.tokens, b.tokens) for a, b in pairs)
    result["differing_rows"] = int(ranks.sum_(torch.tensor(differing)).item())
    if inspect is not None:
        inspect(*map(list, zip(*pairs, strict=True)))
    samples, rewards = learn(trainer, table, rows["none"], scoring, step)
    record = StepRecord(
        step=step,
        samples=samples,
        rewards=rewards,
        generated=samples,
        all_rewards=rewards,
        owners=table.rank_of,
        batch_sizes=[len(launch.groups)],
        rollouts=[outcome["rollout"]],
        stages=[],
        spans=[outcome["exchange"]],
        drafts={},
    )
    known = {"store_tokens": sampler.store.num_tokens, "accepted_by_age": stats.survival.by_age}
    result |= speculation_metrics(ranks, record, **known)
    result |= {
        "rows": len(samples),
        "tokens": int(samples.lengths.sum()),
        "longest": int(samples.lengths.max()),
    }
    return result | {"exchange_s": result["timing_s/exchange"], "reward": float(rewards.mean())}


def learn(
    trainer: Trainer, table: RowTable, rows: dict[int, Row], scoring: Scoring, step: int
) -> tuple[Samples, np.ndarray]:
    """Train the policy on a step's rows. Returns the samples and their rewards by group."""
    config, sampler = trainer.config, trainer.sampler
    samples = sampler.gather(table, rows, scoring)
    rewards = sampler.combined(samples.rewards, samples.lengths)
    rewards = rewards.reshape(len(table.launch.groups), -1)
    advantages = estimate_advantages(
        rewards, config.loss.advantage_estimator, config.loss.scale_rewards, samples
    ).ravel()
    trainer.learner.update(samples, advantages, step)
    sampler.observe_samples(samples, rewards.ravel())
    sampler.schedule.finish(samples, {})
    return samples, rewards


def summarise(steps: list[dict]) -> dict:
    total = {
        key: sum(s[key] for s in steps)
        for key in ("none_s", "speculation_s", "none_forwards", "speculation_forwards")
    }
    ratios = [s["none_s"] / s["speculation_s"] for s in steps]
    return {
        "speedup": total["none_s"] / total["speculation_s"],
        "speedup_median_step": float(np.median(ratios)),
        "forward_reduction": 1 - total["speculation_forwards"] / total["none_forwards"],
        "differing_rows": sum(s["differing_rows"] for s in steps),
        "rows": sum(s["rows"] for s in steps),
        **total,
    }


def run(arguments: argparse.Namespace, folder: str) -> None:
    config = load_config(arguments.config, [*arguments.overrides, f"run.output_dir={folder}"])
    with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks:
        trainer = build(config, ranks)
        if not trainer.sampler.needs_timings:
            raise InputError("speculative.method: none, and no TP tail; nothing to compare")
        if arguments.useless_drafts:
            make_drafts_useless(trainer)
        plain = plain_engine(trainer)
        with trainer.open():
            trainer.warm_start()
        steps = []
        gc.collect()
        gc.freeze()  # as in a run, see Trainer.open
        if ranks.is_main:
            print("step   none s   spec s  ratio   forwards longest accepted/forward  drafted")
        for step in range(config.run.max_steps):
            s = paired_step(trainer, plain, step)
            steps.append(s)
            if ranks.is_main:
                forwards = f"{s['none_forwards']}>{s['speculation_forwards']}"
                ratio = s["none_s"] / s["speculation_s"]
                seconds = f"{s['none_s']:8.2f} {s['speculation_s']:8.2f} {ratio:6.2f}"
                print(
                    f"{step:4} {seconds} {forwards:>10} {s['longest']:7} "
                    f"{s['rollout/spec_accept_length']:16.2f} {s['bubble/drafted_tokens']:8}",
                    flush=True,
                )
        if ranks.is_main:
            summary = summarise(steps)
            print(
                f"total: {summary['speedup']:.2f}x wall time "
                f"(median step {summary['speedup_median_step']:.2f}x), "
                f"{-100 * summary['forward_reduction']:.0f}% forwards on the slowest rank, "
                f"{summary['differing_rows']} of {summary['rows']} rows differ\n{PAPER}"
            )
            settings = {"config": arguments.config, "overrides": arguments.overrides}
            write_json(arguments.json, summary | settings | {"steps": steps})


if __name__ == "__main__":
    parser = make_parser("Rollouts with speculation, and without")
    parser.add_argument("--useless-drafts", action="store_true")
    sys.exit(main(run, parser))
