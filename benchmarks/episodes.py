"""Episodes whose tools take their time, in three ways: torchrun --nproc_per_node=2
benchmarks/episodes.py --config configs/tiny_episodes.yaml [--json OUT] [overrides]

For each training step the *same batch* is rolled out with the *same weights*

- in lock-step, as TRL does it: once all rows of a rank have ended a turn, tools run one call after
  another, and then all rows go on;
- overlapped: rows that wait are left out, and calls run in `environment.num_workers` processes;
- with drafts as well, made in the idle time of the step before by the same rule as in training,

in an order that changes from step to step; the tokens are compared; then the policy is trained on
them. The first step, which has no drafts, is left out of the medians. A call takes 50 ms to 2 s
(`benchmarks/slow_game.py`). Wall time is the slowest rank's, with the exchange of drafts;
`longest_chain_s`, what the calls of one row take at most, is a bound for all ways.
"""

import argparse
import dataclasses
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from functools import partial

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import shared, slow_game
from benchmarks.paired_rollout import learn, timed
from bubblespec.engine.engine import Engine
from bubblespec.errors import InputError
from bubblespec.mechanisms.episodes.environments import Environments, Observation
from bubblespec.mechanisms.episodes.episodes import Episodes
from bubblespec.records import RolloutRecord
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.trainer import Trainer

ARMS = ("lock_step", "overlapped", "drafts")
COUNTS = ("turns", "environment_s", "waiting_s", "idle_s")
DEFAULTS = ["environment.factory=benchmarks.slow_game.SlowGame", "environment.num_workers=8"]


class LockStep(Environments):
    """Runs calls one after another, once all rows wait, and holds results until the last."""

    def __init__(self, config, tokenizer):
        num_workers = min(config.num_workers, 1)
        super().__init__(dataclasses.replace(config, num_workers=num_workers), tokenizer)
        self._held: dict[Hashable, np.ndarray] = {}
        self._answers: list[tuple[Hashable, Observation]] = []
        self.tool_s: Counter[Hashable] = Counter()

    def act(self, name: Hashable, ids: np.ndarray) -> None:
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
        for name, answer in answers:
            self.tool_s[name] += answer.seconds
        return answers


def step_in_all_ways(trainer: Trainer, plain: Engine, lock_step: LockStep, step: int) -> dict:
    """Roll out a step once per arm, then learn from it."""
    config, ranks, sampler = trainer.config, trainer.ranks, trainer.sampler
    (mechanism,) = (each for each in sampler.mechanisms if each.name == "episodes")
    launch, state = sampler.schedule.launch(step), sampler.state_dict()
    plan = sampler.plan(launch, step, launch.groups)
    scoring, plan.scoring = plan.scoring, None  # not in what is timed
    length, prompts = config.rollout.max_completion_length, [of.prompt for of in launch.groups]
    plans = {}
    for arm in ARMS:
        rows = {index: plan.table.make_row(index, length) for index in plan.rows}
        for index, row in rows.items():
            row.draft = plan.rows[index].draft
        plans[arm] = replace(plan, rows=rows, works=[])
    records: dict[str, RolloutRecord] = {}

    def roll_out(arm: str) -> int:
        if arm == "drafts":
            records[arm] = sampler.rollout(plans[arm]).record
            return records[arm].own_forwards
        own = plans[arm]
        environments = lock_step if arm == "lock_step" else mechanism.environments
        own.feed = episodes = Episodes(sampler, environments, prompts)
        own.proposer = own.cost = None
        records[arm] = RolloutLoop(plain, ranks, None, own).run()
        scoring.outcomes |= episodes.outcomes
        return records[arm].own_forwards

    result = {"step": step, "rows": len(plan.table.rank_of)}
    for arm in np.roll(ARMS, step).tolist():
        sampler.load_state_dict(state)
        timing = timed(trainer, partial(roll_out, arm))
        result[f"{arm}_s"], result[f"{arm}_forwards"] = timing
        if arm == "drafts":
            time.sleep(slow_game.LONGEST_S)  # calls of drafts that were left unfinished
            next_state = sampler.state_dict()
    sampler.load_state_dict(next_state)
    wanted, others = plans["lock_step"].rows, [own.rows for own in plans.values()]
    pairs = [(row.tokens, wanted[at].tokens) for own in others for at, row in own.items()]
    chain_s = max((lock_step.tool_s[row] for row in wanted.values()), default=0.0)
    result["longest_chain_s"] = float(ranks.all_gather(np.array([chain_s])).max())
    local = {name: getattr(records["drafts"].extras["episodes"], name) for name in COUNTS}
    local["differing_rows"] = sum(not np.array_equal(*pair) for pair in pairs)
    local["drafted_tokens"] = records["drafts"].drafted_tokens
    totals = ranks.all_gather(np.array(list(local.values()), np.float64)).sum(axis=0)
    learn(trainer, replace(plans["overlapped"], scoring=scoring))
    return result | dict(zip(local, totals.tolist(), strict=True))


def summarise(steps: list[dict]) -> dict:
    """Return medians over all steps but the first, which has no drafts."""
    timed_steps = steps[1:] or steps
    median_s = {arm: float(np.median([s[f"{arm}_s"] for s in timed_steps])) for arm in ARMS}
    return {
        "median_s": median_s,
        "overlap": median_s["lock_step"] / median_s["overlapped"],
        "drafts": median_s["overlapped"] / median_s["drafts"],
        "longest_chain_s": float(np.median([s["longest_chain_s"] for s in timed_steps])),
        "differing_rows": int(sum(s["differing_rows"] for s in steps)),
        "rows": sum(s["rows"] for s in steps),
    }


def run(arguments: argparse.Namespace, folder: str) -> None:
    arguments.overrides = [*DEFAULTS, *arguments.overrides]
    config = shared.run_config(arguments, folder)
    if "bubble" not in config.speculative.sources:
        raise InputError(f"speculative.method: {config.speculative.method} makes no drafts")
    with shared.open_trainer(config) as trainer:
        ranks, steps, plain = trainer.ranks, [], shared.plain_engine(trainer)
        lock_step = LockStep(config.environment, trainer.sampler.scorer.tokenizer)
        gc.collect()
        gc.freeze()  # as in a run, see Trainer.open
        for step in range(config.run.max_steps):
            steps.append(s := step_in_all_ways(trainer, plain, lock_step, step))
            seconds = ", ".join(f"{arm} {s[f'{arm}_s']:.2f} s" for arm in ARMS)
            shared.log(f"step {step}: {seconds}", ranks)
        lock_step.close()
        if ranks.is_main:
            summary = summarise(steps)
            print(shared.markdown([{arm: f"{s:.2f} s" for arm, s in summary["median_s"].items()}]))
            print(
                f"overlap {summary['overlap']:.2f}x over lock-step; over that, drafts "
                f"{summary['drafts']:.2f}x; "
                f"{summary['differing_rows']} of {summary['rows']} rows differ; the calls of one "
                f"row alone take up to {summary['longest_chain_s']:.2f} s"
            )
            shared.write_result(arguments, summary | {"steps": steps})


if __name__ == "__main__":
    sys.exit(shared.main(run, shared.make_parser("Episodes with slow tools, in three ways")))
