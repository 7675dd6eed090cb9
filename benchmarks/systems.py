"""Systems side by side: torchrun --nproc_per_node=2 benchmarks/systems.py --config F --json OUT
[--picture PNG] [overrides]

Each system is a training run of its own, from the same weights. The runs take their steps in turn,
each time in another random order, so that a busy moment of the machine meets all of them. `again`
repeats `plain`: what it gains or loses is noise. With --one-by-one each run makes all its steps
before the next one is set up, for models of which one run alone fits the memory: put `again` last.

Seconds of whole steps count, from barrier to barrier, without evaluations (run.eval_steps) and the
warm start of a drafter. Short and long rounds differ in size, so speed is compared by seconds per
trained token, up to the last long round, after which almost nothing that has been paid for is
waiting. With --skip the first steps do not count: a system that learns from an earlier epoch is
measured in the second one. With optim.learning_rate=0 all systems generate the same samples.
"""

import argparse
import gc
import os
import sys
import time
from typing import NamedTuple

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import shared
from bubblespec import memory
from bubblespec.config import Config, flatten
from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks, ranks_from_environment
from bubblespec.errors import InputError
from bubblespec.learn.advantages import estimate_advantages
from bubblespec.mechanisms import Run, functions
from bubblespec.records import StepRecord, total_s
from bubblespec.setup import build
from bubblespec.trainer import Trainer
from notebooks.report_pictures import draw_training


class System(NamedTuple):
    """What is switched on, and what its paper reports of its own hardware and baseline."""

    overrides: tuple[str, ...]
    paper: str = ""


OFF = (
    "speculative.method=none",
    "tail_batching.enabled=false",
    "optim.stream_gradients=false",
    "rollout.placement=in_turn",
    "rollout.tp_tail_max_rows=0",
)
DRAFTS, DRAFTER = "speculative.method=bubble+suffix", "speculative.method=drafter"
SCORED_AFTER = "reward.model_in_idle_time=false"
TAIL, BALANCED = "tail_batching.enabled=true", "rollout.placement=balanced"
STREAMED, SHARED = "optim.stream_gradients=true", "rollout.tp_tail_max_rows=auto"
DEFAULTS = flatten(Config())
DEFAULT = tuple(f"{key}={DEFAULTS[key]}" for key in (option.partition("=")[0] for option in OFF))
ALL = (*DEFAULT, f"speculative.method={DEFAULTS['speculative.method']}+drafter", TAIL, BALANCED)
BUBBLESPEC = "rollouts up to 1.8x, -50% decoding steps (arXiv 2605.08862)"
RHYMERL = "2.6x end to end; placement alone 1.43x (arXiv 2508.18588)"
TLT = "1.7x end to end (arXiv 2511.16665)"
ROLLPACKER = "2.0x to 2.6x end to end (arXiv 2509.21009); "
DEFERRED = "prompts deferred only, rollouts 1.14x / 1.64x / 2.60x at 8k / 16k / 32k"
SYSTEMS = {
    "plain": System(()),
    "again": System(()),
    "torch kernels": System(("model.cpu_linear=torch",)),
    "bubble": System(("speculative.method=bubble",), BUBBLESPEC),
    "history": System(("speculative.method=suffix",), RHYMERL),
    "drafts": System((DRAFTS,), BUBBLESPEC),
    "quantized": System(("speculative.method=quantized",)),
    "default": System(DEFAULT),
    "scored after": System((*DEFAULT, SCORED_AFTER)),
    "plain scored after": System((SCORED_AFTER,)),
    "placement": System((BALANCED,), RHYMERL),
    "drafter": System((DRAFTER,), TLT),
    "tail": System((TAIL,), ROLLPACKER + DEFERRED),
    "tail+placement": System((TAIL, BALANCED)),
    "tail+drafts": System((TAIL, DRAFTS)),
    "shared": System((SHARED,)),
    "streamed": System((STREAMED,), ROLLPACKER + "streamed gradients alone 1.08x"),
    "all": System(ALL),
    "all+streamed": System((*ALL, STREAMED)),
    "no idle drafts": System((*DEFAULT, "speculative.method=suffix+quantized")),
    "no suffix matches": System((*DEFAULT, "speculative.method=bubble+quantized")),
    "no copy": System((*DEFAULT, DRAFTS)),
    "no placement": System((*DEFAULT, "rollout.placement=in_turn")),
    "no TP tail": System((*DEFAULT, "rollout.tp_tail_max_rows=0")),
}
COLUMNS = {
    "system": "{system}",
    "whole steps": "{speedup:.2f}x",
    "rollouts": "{rollout_speedup:.2f}x",
    "us/token": "{us_per_token:.0f}",
    "idle time": "{idle_ratio:.1%}",
    "tokens per row and forward": "{tokens_a_pass:.2f}",
    "length ratio": "{length_ratio:.3f}",
    "memory": "{memory_gb:.1f} GB",
    "held-out reward": "{reward:.3f}",
    "its paper": "{paper}",
}
SUMS = ("step_s", "seconds", "idle", "forwards", "tokens", "gained_tokens", "row_forwards")


def measure(ranks: Ranks, record: StepRecord) -> dict:
    """Measure a step's rollouts: seconds on the slowest rank, and what was trained on."""
    stages, rollouts = record.stages, record.rollouts
    waited_s = sum(rollout.wait_s for rollout in rollouts) + total_s(stages, "wait")
    gen_s = total_s(stages, "gen") + total_s(stages, "wait") + total_s(record.spans, "exchange")
    counts = [rollout.acceptance for rollout in rollouts]
    local = {
        "seconds": gen_s,
        "idle": waited_s,
        "forwards": sum(rollout.own_forwards for rollout in rollouts),
        "gained_tokens": sum(c.gained_tokens for c in counts),
        "row_forwards": sum(c.row_forwards for c in counts),
    }
    by_rank = dict(zip(local, ranks.all_gather(np.array([*local.values()], float)).T, strict=True))
    total = {name: float(values.sum()) for name, values in by_rank.items()}
    total |= {name: float(by_rank[name].max()) for name in ("seconds", "forwards")}
    total["idle"] /= ranks.world_size
    return total | {"tokens": int(record.generated.lengths.sum())}


class Arm:
    """One training run, step by step."""

    def __init__(self, name: str, trainer: Trainer):
        self.name, self.trainer = name, trainer
        self.steps: list[dict] = []
        self.curve: list[tuple[float, float]] = []  # seconds of steps so far, held-out reward

    def evaluate(self) -> None:
        """Evaluate where run.eval_steps says so."""
        run, done = self.trainer.config.run, len(self.steps)
        if run.eval_steps and (done % run.eval_steps == 0 or done == run.max_steps):
            reward = self.trainer.evaluate().metrics["eval/reward"]
            self.curve.append((sum(step["step_s"] for step in self.steps), reward))

    def step(self, ranks: Ranks) -> None:
        """Make one whole step, on all ranks."""
        trainer, loss, step = self.trainer, self.trainer.config.loss, len(self.steps)
        ranks.barrier()
        began_s = time.perf_counter()
        record = trainer.sampler.sample(step)
        advantages = estimate_advantages(
            record.rewards, loss.advantage_estimator, loss.scale_rewards, record.samples
        )
        trainer.update(record, advantages.ravel())
        ranks.barrier()
        step_s = float(ranks.all_gather(np.array([time.perf_counter() - began_s])).max())
        planned = trainer.sampler.schedule.metrics()
        self.steps.append({"step_s": step_s} | measure(ranks, record) | planned)
        self.evaluate()

    def result(self, skip: int = 0) -> dict:
        """Return figures of all steps but the first `skip`, up to the last long round."""
        longs = [i for i, step in enumerate(self.steps) if step.get("tail/is_long_round")]
        end = longs[-1] + 1 if longs and longs[-1] >= skip else len(self.steps)
        counted = self.steps[skip:end]
        total = {name: sum(step[name] for step in counted) for name in SUMS}
        trainer, model = self.trainer, self.trainer.learner.model
        needs = memory.estimate(trainer.config, model, 1)
        for add in functions("add_needs"):
            needs = add(needs, Run(trainer.config, trainer.ranks, model))
        engine, slots = trainer.sampler.engine, trainer.sampler.engine.num_slots
        if engine.pages is not None:
            slots = engine.pages.num_pages / memory.cache_unit(trainer.config, needs, True)[2]
        num_bytes = needs.lasting + slots * needs.slot + max(needs.rollout, needs.training)
        return {
            "seconds_per_token": total["step_s"] / total["tokens"],
            "rollout_seconds_per_token": total["seconds"] / total["tokens"],
            "forwards_per_token": total["forwards"] / total["tokens"],
            "idle_ratio": total["idle"] / total["seconds"],
            "tokens_a_pass": total["gained_tokens"] / max(total["row_forwards"], 1) or 1.0,
            "length_ratio": counted[-1].get("tail/length_ratio", 1.0),
            "memory_gb": num_bytes / 1e9,
            "seconds": [step["step_s"] for step in self.steps],
            "tokens": [step["tokens"] for step in self.steps],
            "curve": self.curve,
        }


def run_seed(
    arguments: argparse.Namespace, ranks: Ranks, seed: int, folder: str
) -> dict[str, dict]:
    """Return the results of all systems with a seed."""
    names, results = arguments.systems.split(","), {}
    for together in [[name] for name in names] if arguments.one_by_one else [names]:
        results |= run_arms(arguments, ranks, seed, folder, together)
        for free in ranks.before_end:  # each holds a run's model
            free()
        ranks.before_end.clear()
        gc.unfreeze()
        gc.collect()  # the runs that are over, with their weights, before the next are set up
    return results


def run_arms(
    arguments: argparse.Namespace, ranks: Ranks, seed: int, folder: str, names: list[str]
) -> dict[str, dict]:
    """Return the results of systems whose steps are made in turn."""
    arms = []
    for name in names:
        options = [*OFF, *SYSTEMS[name].overrides, *arguments.overrides]
        options += [f"run.seed={seed}", f"run.output_dir={folder}/{seed}_{name}"]
        arms.append(Arm(name, build(load_config(arguments.config, options), ranks)))
    num_steps = arms[0].trainer.config.run.max_steps
    for arm in arms:
        with arm.trainer.open():
            arm.trainer.warm_start()
        arm.evaluate()
    gc.freeze()  # as in a run, see Trainer.open
    for step in range(num_steps):
        for number in np.random.default_rng((seed, step)).permutation(len(arms)).tolist():
            arms[number].step(ranks)
        if (step + 1) % 10 == 0 or step + 1 == num_steps:
            us = [f"{arm.name} {1e6 * arm.result()['seconds_per_token']:.0f}" for arm in arms]
            shared.log(f"seed {seed}, {step + 1} steps, us/token: {', '.join(us)}", ranks)
    results = {arm.name: arm.result(arguments.skip) for arm in arms}
    for arm in arms:
        arm.trainer.sampler.scorer.close()
    return results


def summarise(seeds: dict[int, dict[str, dict]]) -> dict[str, dict]:
    """Return medians over the seeds, and speed-ups over the first system, by system."""
    runs = list(seeds.values())
    first, summary = next(iter(runs[0])), {}
    for name, any_run in runs[0].items():
        whole, rollout = (
            [arms[first][key] / arms[name][key] for arms in runs]
            for key in ("seconds_per_token", "rollout_seconds_per_token")
        )
        rewards = [arms[name]["curve"][-1][1] for arms in runs if arms[name]["curve"]]
        numbers = [key for key, value in any_run.items() if isinstance(value, float)]
        summary[name] = {
            **{key: float(np.median([arms[name][key] for arms in runs])) for key in numbers},
            "speedup": float(np.median(whole)),
            "speedups": whole,
            "rollout_speedup": float(np.median(rollout)),
            "reward": float(np.mean(rewards)) if rewards else None,
            "rewards": rewards,
            "paper": SYSTEMS[name].paper,
        }
    return summary


def run(arguments: argparse.Namespace, folder: str) -> None:
    shared.check_names("--systems", arguments.systems, SYSTEMS)
    config = load_config(arguments.config, arguments.overrides)
    if not 0 <= arguments.skip < config.run.max_steps:
        bound = f"at least 0 and less than run.max_steps = {config.run.max_steps}"
        raise InputError(f"--skip: {arguments.skip}; give {bound}")
    with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks:
        seeds = {
            seed: run_seed(arguments, ranks, seed, folder)
            for seed in map(int, arguments.seeds.split(","))
        }
        if not ranks.is_main:
            return
        summary = summarise(seeds)
        rows = [
            {"system": name, "us_per_token": 1e6 * s["seconds_per_token"], **s}
            for name, s in summary.items()
        ]
        print(shared.tabulate(rows, COLUMNS))
        if arguments.picture:
            draw_training(summary, seeds).savefig(arguments.picture, dpi=120)
        result = {"systems": summary, "skip": arguments.skip, "seeds": seeds}
        shared.write_result(arguments, result)


if __name__ == "__main__":
    parser = shared.make_parser("Seconds of whole steps and of rollouts, by system")
    parser.add_argument("--picture", help="PNG of speed-ups, and of held-out reward over seconds")
    parser.add_argument("--seeds", default="0", help="of the runs, with commas between")
    parser.add_argument("--skip", type=int, default=0, help="first steps that do not count")
    one_by_one = "one system after the other, not their steps in turn"
    parser.add_argument("--one-by-one", action="store_true", help=one_by_one)
    systems = f"the others are compared with the first; of {', '.join(SYSTEMS)}"
    default = "plain,bubble,history,quantized,placement,drafter,shared,tail,streamed,"
    default += "default,all,again"
    parser.add_argument("--systems", default=default, help=systems)
    sys.exit(shared.main(run, parser))
