"""Episodes whose tools take their time, in four ways: torchrun --nproc_per_node=2
benchmarks/episodes.py --config configs/tiny_episodes.yaml [--json OUT] [overrides]

For each training step the *same batch* is rolled out with the *same weights*

- in lock-step, as TRL does it: once all rows of a rank have ended a turn, tools run one call after
  another, and then all rows go on;
- overlapped: rows that wait are left out, and calls run in `environment.num_workers` processes;
- with drafts that were made in the idle time of the step before, by the same rule as in training;
- with observation speculation as well,

in an order that changes from step to step, each from the same drafts and statistics; the tokens are
compared; then the policy is trained on them and the next step follows. The first step, which has no
drafts, is left out of the medians. A call takes 50 ms to 2 s (`benchmarks/slow_game.py`), in real
time. Wall time is from one barrier to the next, so it is the slowest rank's, with the exchange of
drafts in it.
"""

import argparse
import dataclasses
import gc
import os
import sys
import time
from collections.abc import Hashable
from contextlib import nullcontext
from functools import partial
from unittest import mock

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import slow_game
from benchmarks.paired_rollout import learn, timed
from benchmarks.shared import commit, main, make_parser, markdown, plain_engine, write_json
from bubblespec.config import load_config
from bubblespec.dist.ranks import ranks_from_environment
from bubblespec.engine.engine import Engine
from bubblespec.environments.environments import Environments, Observation
from bubblespec.errors import InputError
from bubblespec.records import RolloutRecord
from bubblespec.rollout.episodes import Episodes
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.setup import build
from bubblespec.trainer import Trainer

ARMS = ("lock_step", "overlapped", "drafts", "speculation")
COUNTS = ("turns", "environment_s", "waiting_s", "idle_s", "guesses", "guesses_kept")
DEFAULTS = ["environment.factory=benchmarks.slow_game.SlowGame", "environment.num_workers=8"]


class LockStep(Environments):
    """Calls wait for each other, and so do their results."""

    def __init__(self, config, tokenizer):
        num_workers = min(config.num_workers, 1)
        super().__init__(dataclasses.replace(config, num_workers=num_workers), tokenizer)
        self._held: dict[Hashable, np.ndarray] = {}
        self._answers: list[tuple[Hashable, Observation]] = []

    def act(self, name, ids) -> None:
        self._held[name] = ids

    def poll(self) -> list[tuple[Hashable, Observation]]:
        if len(self._held) == len(self._running):  # nobody generates any more
            for name, ids in self._held.items():
                super().act(name, ids)
            self._held.clear()
        self._answers += super().poll()
        if len(self._answers) < len(self._running):
            return []
        answers, self._answers = self._answers, []
        return answers


def step_in_all_ways(trainer: Trainer, plain: Engine, lock_step: LockStep, step: int) -> dict:
    """Roll out a step once per arm, then learn from it."""
    config, ranks, sampler = trainer.config, trainer.ranks, trainer.sampler
    launch, state = sampler.schedule.launch(step), sampler.state_dict()
    table, placed, scoring = sampler.begin(launch, step)
    length, prompts = config.rollout.max_completion_length, [of.prompt for of in launch.groups]
    rows = {arm: {index: table.make_row(index, length) for index in placed} for arm in ARMS}
    records: dict[str, RolloutRecord] = {}
    states = {}

    def without_drafts(arm: str) -> int:
        environments = lock_step if arm == "lock_step" else sampler.environments
        options = {"seed": config.run.seed, "clock": ranks.clock, "runs_drafts": False}
        episodes = Episodes(environments, plain, prompts, **options)
        loop = RolloutLoop(plain, ranks, sampler.params, episodes=episodes)
        records[arm] = loop.run(rows[arm], table)
        scoring.outcomes |= episodes.outcomes
        return records[arm].own_forwards

    def with_drafts(arm: str) -> int:
        records[arm], tasks = sampler.roll_out(table, rows[arm], step, launch.groups)
        sampler.conclude(records[arm], tasks, table, rows[arm], step)
        return records[arm].own_forwards

    result = {"step": step, "rows": len(table.rank_of)}
    shift = step % len(ARMS)
    for arm in ARMS[shift:] + ARMS[:shift]:
        has_drafts = arm in ("drafts", "speculation")
        if has_drafts:
            sampler.load_state_dict(state)
        no_guess = mock.patch.object(Episodes, "_guess", lambda *_: None)
        with no_guess if arm == "drafts" else nullcontext():
            timing = timed(trainer, partial(with_drafts if has_drafts else without_drafts, arm))
        result[f"{arm}_s"], result[f"{arm}_forwards"] = timing
        if has_drafts:
            states[arm] = sampler.state_dict()
            time.sleep(slow_game.LONGEST_S)  # calls of drafts that were left unfinished
    sampler.load_state_dict(states["speculation"])
    wanted = {index: row.tokens for index, row in rows["lock_step"].items()}
    local = {
        f"{arm}_differing_rows": sum(
            not np.array_equal(row.tokens, wanted[index]) for index, row in own.items()
        )
        for arm, own in rows.items()
    }
    local |= {f"{arm}_drafted_tokens": records[arm].drafted_tokens for arm in states}
    counts = records["speculation"].episodes
    local |= {name: getattr(counts, name) for name in COUNTS}
    totals = ranks.gather(np.array(list(local.values()), np.float64)).sum(axis=0)
    learn(trainer, launch, table, rows["overlapped"], scoring, step)
    return result | dict(zip(local, totals.tolist(), strict=True))


def summarise(steps: list[dict]) -> dict:
    """The first step has no drafts, so it is not timed."""
    timed_steps = steps[1:] or steps
    median_s = {arm: float(np.median([s[f"{arm}_s"] for s in timed_steps])) for arm in ARMS}
    guesses, kept = (sum(s[name] for s in timed_steps) for name in ("guesses", "guesses_kept"))
    return {
        "median_s": median_s,
        "overlap": median_s["lock_step"] / median_s["overlapped"],
        "drafts": median_s["overlapped"] / median_s["drafts"],
        "speculation": median_s["overlapped"] / median_s["speculation"],
        "speculation_over_lock_step": median_s["lock_step"] / median_s["speculation"],
        "guesses_kept_share": kept / max(guesses, 1),
        "differing_rows": int(sum(s[f"{arm}_differing_rows"] for s in steps for arm in ARMS)),
        "rows": sum(s["rows"] for s in steps),
    }


def run(arguments: argparse.Namespace, folder: str) -> None:
    overrides = [*DEFAULTS, *arguments.overrides]
    config = load_config(arguments.config, [*overrides, f"run.output_dir={folder}"])
    with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks:
        trainer = build(config, ranks)
        sampler = trainer.sampler
        if sampler.environments is None or "bubble" not in config.speculative.method:
            raise InputError("needs an environment, and bubble in speculative.method")
        if config.tail_batching.enabled:
            raise InputError("tail_batching.enabled: true, but all rows must be generated whole")
        plain, steps = plain_engine(trainer), []
        lock_step = LockStep(config.environment, sampler.scorer.tokenizer)
        gc.collect()
        gc.freeze()  # as in a run, see Trainer.open
        for step in range(config.run.max_steps):
            steps.append(s := step_in_all_ways(trainer, plain, lock_step, step))
            if ranks.is_main:
                seconds = ", ".join(f"{arm} {s[f'{arm}_s']:.2f} s" for arm in ARMS)
                print(f"step {step}: {seconds}", flush=True)
        for environments in (lock_step, sampler.environments):
            environments.close()
        if ranks.is_main:
            summary = summarise(steps)
            print(table_of(summary))
            settings = {"config": arguments.config, "overrides": overrides, "commit": commit()}
            write_json(arguments.json, summary | settings | {"steps": steps})


def table_of(summary: dict) -> str:
    """As Markdown, and what the drafts were good for."""
    median_s = summary["median_s"]
    rows = [
        {
            "rollout": arm,
            "median s": f"{seconds:.2f}",
            "against lock-step": f"{median_s['lock_step'] / seconds:.2f}x",
            "against overlapped": f"{median_s['overlapped'] / seconds:.2f}x",
        }
        for arm, seconds in median_s.items()
    ]
    kept, differing = summary["guesses_kept_share"], summary["differing_rows"]
    counts = f"{differing} of {summary['rows']} rows differ; {kept:.0%} of observations kept"
    return f"{markdown(rows)}\n{counts}"


if __name__ == "__main__":
    sys.exit(main(run, make_parser("Episodes with slow tools, in four ways")))
