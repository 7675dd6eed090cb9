"""Systems side by side: torchrun --nproc_per_node=2 benchmarks/systems.py --config F --json OUT
[--picture PNG] [overrides]

Each system is a training run of its own, from the same weights; the runs take their steps in turn,
each time in an order drawn anew, so that a busy moment of the machine meets all of them, and none
always finds what the same one leaves in the caches. `again` is `plain` once more: what it gains or
loses is chance. With --one-by-one each run makes all its steps before the next one is set up, for
models of which one run alone fits the memory: put `again` last, to see what the machine did
meanwhile.

Counted are seconds from barrier to barrier of whole steps: rollouts, rewards, gradients, the
optimizer; evaluations (run.eval_steps) are made between them, and not counted, nor is the warm
start of a drafter. As steps of short and long rounds are of different size, speeds are of seconds
for each token that is trained on. The first steps count, unless --skip says otherwise: a system
that learns from an earlier epoch is measured in the second one.
"""

import argparse
import gc
import json
import os
import sys
import time
from typing import NamedTuple

import matplotlib
import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks.shared import main, make_parser
from benchmarks.tail_batching import measure
from bubblespec import memory
from bubblespec.config import load_config
from bubblespec.dist.ranks import Ranks, ranks_from_environment
from bubblespec.errors import InputError
from bubblespec.learn.advantages import estimate_advantages
from bubblespec.setup import build
from bubblespec.trainer import Trainer

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class System(NamedTuple):
    """What is switched on, and what its paper reports."""

    overrides: tuple[str, ...]
    paper: str


OFF = (
    "speculative.method=none",
    "tail_batching.enabled=false",
    "optim.stream_gradients=false",
    "rollout.placement=in_turn",
)
DRAFTS, DRAFTER = "speculative.method=bubble+suffix", "speculative.method=drafter"
TAIL, STREAMED, BALANCED = (
    "tail_batching.enabled=true",
    "optim.stream_gradients=true",
    "rollout.placement=balanced",
)
RACE = "tail_batching.response_over_sampling_ratio=1.25"
ALL = "speculative.method=bubble+suffix+drafter"
# The papers' own hardware, models and baselines: what each is about, not what to expect of a
# machine.
BUBBLESPEC = "rollouts up to 1.8x, -50% decoding steps (arXiv 2605.08862)"
RHYMERL = "2.6x end to end; placement alone 1.43x (arXiv 2508.18588)"
TLT = "1.7x end to end (arXiv 2511.16665)"
ROLLPACKER = "2.0x to 2.6x end to end (arXiv 2509.21009); {}"
SYSTEMS = {
    "plain": System((), ""),
    "again": System((), ""),
    "bubble": System(("speculative.method=bubble",), BUBBLESPEC),
    "history": System(("speculative.method=suffix",), RHYMERL),
    "drafts": System((DRAFTS,), BUBBLESPEC),
    "placement": System((BALANCED,), RHYMERL),
    "drafter": System((DRAFTER,), TLT),
    "tail": System(
        (TAIL,),
        ROLLPACKER.format(
            "prompts deferred only, rollouts 1.14x / 1.64x / 2.60x at 8k / 16k / 32k"
        ),
    ),
    "race": System(
        (TAIL, RACE), ROLLPACKER.format("biased race as well, rollouts 1.7x / 3.1x / 4.0x")
    ),
    "streamed": System((STREAMED,), ROLLPACKER.format("streamed gradients alone 1.08x")),
    "all": System((ALL, TAIL, BALANCED), ""),
    "all+streamed": System((ALL, TAIL, BALANCED, STREAMED), ""),
}
# race: rows of 1.25 times the responses; RollPacker's ablation in rollout seconds 82/277/673
# without and 47/88/170 with both.


class Arm:
    """One training run, step by step."""

    def __init__(self, name: str, trainer: Trainer):
        self.name, self.trainer = name, trainer
        self.steps: list[dict] = []
        self.curve: list[tuple[float, float]] = []  # seconds of steps so far, held-out reward

    def evaluate(self) -> None:
        """Where run.eval_steps wants it."""
        run, done = self.trainer.config.run, len(self.steps)
        if run.eval_steps and (done % run.eval_steps == 0 or done == run.max_steps):
            self.curve.append(
                (sum(step["step_s"] for step in self.steps), self.trainer.evaluate()["eval/reward"])
            )

    def step(self, ranks: Ranks) -> None:
        """One whole step, on all ranks."""
        trainer, loss, step = self.trainer, self.trainer.config.loss, len(self.steps)
        ranks.barrier()
        began_s = time.perf_counter()
        record = trainer.sampler.sample(step)
        advantages = estimate_advantages(
            record.rewards, loss.advantage_estimator, loss.scale_rewards
        )
        trainer.update(record, advantages.ravel())
        ranks.barrier()
        counts = [rollout.acceptance for rollout in record.rollouts]
        gained = np.array(
            [[sum(c.gained_tokens for c in counts), sum(c.row_forwards for c in counts)]]
        )
        gained, row_forwards = ranks.gather(gained).sum(axis=(0, 1)).tolist()
        self.steps.append(
            {
                "step_s": float(ranks.gather(np.array([time.perf_counter() - began_s])).max()),
                **measure(ranks, record),
                "gained_tokens": gained,
                "row_forwards": row_forwards,
                **trainer.sampler.schedule.metrics(),
            }
        )
        self.evaluate()

    def result(self, skip: int = 0) -> dict:
        """Of all steps but the first `skip`."""
        total = {
            name: sum(step[name] for step in self.steps[skip:])
            for name in (
                "step_s",
                "seconds",
                "idle",
                "forwards",
                "tokens",
                "gained_tokens",
                "row_forwards",
            )
        }
        engine, needs = (
            self.trainer.sampler.engine,
            memory.estimate(self.trainer.config, self.trainer.learner.model, 1),
        )
        bytes_ = needs.lasting + engine.num_slots * needs.slot + max(needs.rollout, needs.training)
        return {
            "seconds_per_token": total["step_s"] / total["tokens"],
            "rollout_seconds_per_token": total["seconds"] / total["tokens"],
            "forwards_per_token": total["forwards"] / total["tokens"],
            "idle_ratio": total["idle"] / total["seconds"],
            "tokens_a_pass": total["gained_tokens"] / total["row_forwards"]
            if total["row_forwards"]
            else 1.0,
            "length_ratio": self.steps[-1].get("tail/length_ratio", 1.0),
            "memory_gb": bytes_ / 1e9,
            "seconds": [step["step_s"] for step in self.steps],
            "tokens": [step["tokens"] for step in self.steps],
            "curve": self.curve,
        }


def run_seed(
    arguments: argparse.Namespace, ranks: Ranks, seed: int, folder: str
) -> dict[str, dict]:
    """All systems with a seed."""
    names, results = arguments.systems.split(","), {}
    for together in [[name] for name in names] if arguments.one_by_one else [names]:
        results.update(run_arms(arguments, ranks, seed, folder, together))
        for free in ranks.before_end:  # each holds a run's model
            free()
        ranks.before_end.clear()
        gc.unfreeze()
        gc.collect()  # the runs that are over, with their weights, before the next are set up
    return results


def run_arms(
    arguments: argparse.Namespace, ranks: Ranks, seed: int, folder: str, names: list[str]
) -> dict[str, dict]:
    """Systems whose steps are made in turn."""
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
        if ranks.is_main and ((step + 1) % 10 == 0 or step + 1 == num_steps):
            text = ", ".join(
                f"{arm.name} {1e6 * arm.result()['seconds_per_token']:.0f}" for arm in arms
            )
            print(f"seed {seed}, {step + 1} steps, us/token: {text}", flush=True)
    results = {arm.name: arm.result(arguments.skip) for arm in arms}
    for arm in arms:
        arm.trainer.sampler.scorer.close()
    return results


def summarise(seeds: dict[int, dict[str, dict]]) -> dict[str, dict]:
    """By system: medians over the seeds, speed-ups over the first system; and the held-out reward
    at the end, on average."""
    runs = list(seeds.values())
    first = next(iter(runs[0]))
    summary = {}
    for name in runs[0]:
        whole, rollout = (
            [arms[first][key] / arms[name][key] for arms in runs]
            for key in ("seconds_per_token", "rollout_seconds_per_token")
        )
        rewards = [arms[name]["curve"][-1][1] for arms in runs if arms[name]["curve"]]
        numbers = [key for key, value in runs[0][name].items() if isinstance(value, float)]
        summary[name] = {
            "speedup": float(np.median(whole)),
            "speedups": whole,
            "rollout_speedup": float(np.median(rollout)),
            **{key: float(np.median([arms[name][key] for arms in runs])) for key in numbers},
            "reward": float(np.mean(rewards)) if rewards else None,
            "rewards": rewards,
            "paper": SYSTEMS[name].paper,
        }
    return summary


def draw(seeds: dict[int, dict[str, dict]], summary: dict[str, dict], path: str) -> None:
    """Speed-ups of whole steps and of rollouts; and held-out reward over seconds of training, the
    mean of all seeds."""
    has_curves = all(system["rewards"] for system in summary.values())
    figure, axes = plt.subplots(
        1, 1 + has_curves, figsize=(6 + 5 * has_curves, 4), layout="constrained", squeeze=False
    )
    bars, names = axes[0, 0], list(summary)
    for number, name in enumerate(names):
        system = summary[name]
        bars.barh(number, system["speedup"], 0.6, color=f"C{number % 10}")
        bars.plot(
            system["speedups"], [number] * len(system["speedups"]), ".", color="black", markersize=4
        )
        bars.plot(system["rollout_speedup"], number, "|", color="black", markersize=14)
    bars.axvline(1, color="grey", linewidth=0.8)
    bars.set_yticks(range(len(names)), names)
    bars.invert_yaxis()
    bars.set_xlabel("speed-up of whole steps (dots: seeds; line: rollouts alone)")
    for number, name in enumerate(names if has_curves else []):
        curves = np.array(
            [arms[name]["curve"] for arms in seeds.values()]
        )  # [seeds, evaluations, 2]
        axes[0, 1].plot(
            *curves.mean(axis=0).T, "o-", color=f"C{number % 10}", label=name, markersize=3
        )
    if has_curves:
        axes[0, 1].set_xlabel("seconds of training, without evaluations")
        axes[0, 1].set_ylabel("held-out reward")
        axes[0, 1].legend(frameon=False, loc="lower right", fontsize="small")
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(arguments: argparse.Namespace, seeds: dict[int, dict[str, dict]]) -> None:
    """Print the table, and write what was asked for."""
    summary = summarise(seeds)
    print(
        "system            whole  rollouts  us/token   idle  tokens/pass  length ratio  memory  held-out  paper"
    )
    for name, system in summary.items():
        reward = f"{system['reward']:.3f}" if system["rewards"] else "-"
        print(
            f"{name:17} {system['speedup']:4.2f}x  {system['rollout_speedup']:7.2f}x  {1e6 * system['seconds_per_token']:8.0f}  "
            f"{system['idle_ratio']:5.1%}  {system['tokens_a_pass']:11.2f}  {system['length_ratio']:12.3f}  "
            f"{system['memory_gb']:3.1f} GB  {reward:>8}  {system['paper']}"
        )
    if arguments.picture:
        draw(seeds, summary, arguments.picture)
    if arguments.json:
        result = {
            "systems": summary,
            "config": arguments.config,
            "overrides": arguments.overrides,
            "skip": arguments.skip,
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({**result, "seeds": seeds}, file)


def run(arguments: argparse.Namespace, folder: str) -> None:
    if unknown := set(arguments.systems.split(",")) - SYSTEMS.keys():
        raise InputError(
            f"--systems: {', '.join(sorted(unknown))} unknown; valid are {', '.join(SYSTEMS)}"
        )
    config = load_config(arguments.config, arguments.overrides)
    if not 0 <= arguments.skip < config.run.max_steps:
        raise InputError(
            f"--skip: {arguments.skip}; give at least 0 and less than run.max_steps = {config.run.max_steps}"
        )
    with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks:
        seeds = {
            seed: run_seed(arguments, ranks, seed, folder)
            for seed in map(int, arguments.seeds.split(","))
        }
        if ranks.is_main:
            report(arguments, seeds)


if __name__ == "__main__":
    parser = make_parser("Seconds of whole steps and of rollouts, by system")
    parser.add_argument("--picture", help="PNG of speed-ups, and of held-out reward over seconds")
    parser.add_argument("--seeds", default="0", help="of the runs, with commas between")
    parser.add_argument("--skip", type=int, default=0, help="first steps that do not count")
    parser.add_argument(
        "--one-by-one",
        action="store_true",
        help="one system after the other, not their steps in turn",
    )
    systems = f"the others are compared with the first; of {', '.join(SYSTEMS)}"
    parser.add_argument(
        "--systems",
        default="plain,bubble,history,placement,drafter,tail,race,streamed,all",
        help=systems,
    )
    sys.exit(main(run, parser))
