"""Estimate in virtual time, without the machine, whether speculation helps on a workload.

python -m bubblespec simulate --synthetic mean=2000,max=16000,run=500 --ranks 8 --cost-model h200:7b
[section.key=value ...]

python -m bubblespec simulate --trace RUN_DIR --ranks 8 --cost-model RUN_DIR [section.key=value ...]

With --reward-model, whether it helps that waiting ranks score responses.
"""

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

from bubblespec.config import Config
from bubblespec.config.file import config_of_sections
from bubblespec.errors import InputError, log
from bubblespec.telemetry.trace import FOLDER
from bubblespec.tools import make_parser, refuse_dashes
from bubblespec.tools.memory import changed
from bubblespec.tools.simulate.recorded import (
    load_copy_cost,
    load_cost,
    read_meta,
    read_workload,
    sections_of,
)
from bubblespec.tools.simulate.run import SimulatedStep, counted, simulate
from bubblespec.tools.simulate.runner import CopyModel, DrafterModel
from bubblespec.tools.simulate.workload import Spec, Workload, make_synthetic, parse

SECTIONS = ("rollout", "speculative", "tail_batching", "environment")  # that overrides may change
MODELS: dict[str, Any] = {"drafter": DrafterModel, "quantized": CopyModel}  # sources of drafts
# Seconds in which a rank's forward is simulated, on average over methods (AMD EPYC, one thread).
FORWARD_S = 5e-4
LABELS = {
    "seconds": "seconds of all rollouts",
    "forwards": "forwards on the slowest rank",
    "shared_forwards": "forwards of all ranks together",
    "idle_share": "idle time, share of rollouts",
    "drafted_tokens": "tokens drafted for later steps",
    "proposed_tokens": "draft tokens verified",
    "refused_tokens": "  rejected",
    "response_tokens": "tokens trained on",
    "long_rounds": "long rounds of tail batching",
    "length_ratio": "mean length, trained on / launched",
}


def main(arguments: list[str]) -> None:
    """Simulate the workload that the arguments describe, and print a table."""
    parser = make_parser("simulate")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="RUN_DIR", help="output_dir of a run with run.trace")
    for name, kind in {"synthetic": Spec, **MODELS}.items():
        names = ", ".join(field.name for field in dataclasses.fields(kind))
        group, given = (parser, "") if name in MODELS else (source, None)
        form: dict[str, Any] = {"metavar": "NAME=VALUE,...", "help": f"of {names}"}
        group.add_argument(f"--{name}", default=given, **form)
    parser.add_argument("--ranks", type=int, help="default: those of the trace, or 8")
    parser.add_argument("--cost-model", metavar="COST", help="GPU:MODEL or RUN_DIR to fit it on")
    scored = "GPU:MODEL that scores responses: compare this after rollouts and in idle time"
    parser.add_argument("--reward-model", metavar="COST", help=scored)
    parser.add_argument("--json", metavar="FILE", help="write the figures to this new file")
    parser.add_argument("overrides", nargs="*", help=f"section.key=value of {', '.join(SECTIONS)}")
    refuse_dashes(arguments)
    run(parser.parse_intermixed_args(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Simulate a run without and with its mechanisms. Raises InputError."""
    if arguments.json and os.path.exists(arguments.json):
        raise InputError(f"--json: {arguments.json} exists")
    if not (arguments.trace or arguments.cost_model):
        raise InputError("--cost-model: a synthetic workload has no measured forwards to fit")
    for override in arguments.overrides:
        if override.split(".")[0] not in SECTIONS or "=" not in override:
            raise InputError(f"{override}: give section.key=value of {', '.join(SECTIONS)}")
    if arguments.trace:
        config, workload, default_ranks = recorded_run(arguments.trace, arguments.overrides)
    else:
        spec = parse(Spec, arguments.synthetic, "--synthetic")
        (config, workload), default_ranks = synthetic_run(spec, arguments.overrides), 8
    num_ranks = default_ranks if arguments.ranks is None else arguments.ranks
    given = {name: getattr(arguments, name) for name in MODELS}
    models: dict[str, Any] = {
        name: parse(MODELS[name], text, f"--{name}") if text else None
        for name, text in given.items()
    }
    for name, text in given.items():
        may_be = name == "drafter" and config.speculative.may_have_drafter
        if text and not may_be and name not in config.speculative.sources:
            raise InputError(f"--{name}: speculative.method={config.speculative.method} has none")
    cost_model = arguments.cost_model or arguments.trace
    cost, together, copy_cost = load_cost(cost_model), None, load_copy_cost(cost_model)
    if config.rollout.tp_tail_max_rows and num_ranks > 1 and not workload.has_tools:
        try:
            together = load_cost(cost_model, num_ranks)
        except InputError as error:
            if config.rollout.tp_tail_max_rows != "auto":
                log(f"warning: no TP tail is simulated: {error}")
    reward_cost, arms = None, arms_of(config)
    if arguments.reward_model:
        reward_cost, arms = load_cost(arguments.reward_model), arms_of_scoring(config)
    minutes = len(arms) * wall_seconds(workload, num_ranks) / 60
    log(f"about {max(round(minutes), 1)} min of one core: {', '.join(arms)}")
    results = {
        method: simulate(
            arm,
            workload,
            cost.seconds,
            num_ranks,
            together=together.seconds if together else None,
            **models,
            copy_cost=copy_cost.seconds if copy_cost else None,
            reward_cost=reward_cost.seconds if reward_cost else None,
            shows_progress=True,
        )
        for method, arm in arms.items()
    }
    num_counted = len(counted([*results.values()][-1]))
    sums = {method: totals(steps[:num_counted]) for method, steps in results.items()}
    print(f"{cost.source}; {num_ranks} ranks, {num_counted} steps")
    print(table(sums))
    if arguments.json:
        report: dict[str, Any] = {"cost": dataclasses.asdict(cost), "num_ranks": num_ranks}
        report["methods"] = {}
        for method, steps in results.items():
            of_steps = [vars(step) | {"lanes": None} for step in steps]
            report["methods"][method] = {"total": sums[method], "steps": of_steps}
        report["shared_cost"] = together and dataclasses.asdict(together)
        report["workload"] = arguments.trace or arguments.synthetic
        report["config"] = {name: vars(getattr(config, name)) for name in SECTIONS}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


def recorded_run(run_dir: str, overrides: Sequence[str]) -> tuple[Config, Workload, int]:
    """Return a trace's configuration, workload and number of ranks. Raises InputError."""
    meta = read_meta(os.path.join(run_dir, FOLDER))
    config = simulated_config(sections_of(meta["config"], SECTIONS), overrides)
    limit = meta["config"]["rollout.max_completion_length"]
    if config.rollout.max_completion_length > limit:
        text = f"the recorded responses are cut at {limit}"
        raise InputError(f"rollout.max_completion_length: {text}")
    if config.tail_batching.enabled and meta["config"].get("tail_batching.enabled"):
        raise InputError("tail_batching.enabled: the recorded run used it; choose another run")
    return config, read_workload(run_dir), meta["world_size"]


def synthetic_run(spec: Spec, overrides: Sequence[str]) -> tuple[Config, Workload]:
    """Return a synthetic workload with its configuration. Raises InputError."""
    lengths = {"max_completion_length": spec.max, "max_prompt_length": 2 * spec.prompt}
    sections = {"rollout": lengths | {"max_num_batched_tokens": 8192}}
    config = simulated_config(sections, overrides)
    rollout = config.rollout
    if rollout.max_completion_length != spec.max:
        raise InputError("rollout.max_completion_length: give it as max in --synthetic")
    return config, make_synthetic(spec, rollout.num_prompts_per_step, rollout.num_generations)


def simulated_config(sections: dict[str, dict], overrides: Sequence[str] = ()) -> Config:
    """Return a configuration from `sections`; a simulation reads no sections beyond SECTIONS."""
    blank: dict[str, dict] = {name: {"path": "none"} for name in ("model", "data")}
    blank |= {"run": {"output_dir": "none"}, "optim": {"max_tokens_per_microbatch": 1 << 24}}
    return config_of_sections(blank | sections, list(overrides), "the simulated configuration")


def arms_of(config: Config) -> dict[str, Config]:
    """Return the simulated configurations by name: without speculation, and as given."""
    method, is_tail = config.speculative.method, config.tail_batching.enabled
    none = changed(config, {"speculative.method": "none", "tail_batching.enabled": False})
    name = method if not is_tail else "tail" if method == "none" else f"tail+{method}"
    return {"none": none, name: config}


def arms_of_scoring(config: Config) -> dict[str, Config]:
    """Return the simulated configurations by when a reward model scores."""
    after = changed(config, {"reward.model_in_idle_time": False})
    return {"scored after": after, "scored in idle time": config}


def wall_seconds(workload: Workload, num_ranks: int) -> float:
    """Return about how long a simulation takes, on one core.

    Its forwards decide. In the TP tail all ranks share forwards until the longest response ends."""
    longest = dict.fromkeys(range(workload.num_steps), 0)
    for (step, _, _), tokens in workload.responses.items():
        if step in longest:
            longest[step] = max(longest[step], len(tokens))
    return FORWARD_S * num_ranks * sum(longest.values())


def totals(steps: list[SimulatedStep]) -> dict[str, Any]:
    """Return the totals of the steps; idle time is a share of their seconds."""
    counts = [name for name in LABELS if name.endswith(("seconds", "forwards", "tokens"))]
    sums = {name: sum(getattr(step, name) for step in steps) for name in counts}
    idle_s = sum(step.idle_share * step.seconds for step in steps)
    return sums | {
        "idle_share": idle_s / sums["seconds"],
        "seconds_per_token": sums["seconds"] / sums["response_tokens"],
        "long_rounds": sum(step.is_long_round for step in steps),
        "length_ratio": steps[-1].length_ratio,
        "num_steps": len(steps),
    }


def table(arms: dict[str, dict[str, Any]]) -> str:
    """Return a table of the totals, a column per method; the speed-up is per trained token."""
    lines = [f"{'':38}" + "".join(f"{name:>24}" for name in arms)]
    for name, label in LABELS.items():
        values = [sums[name] for sums in arms.values()]
        cells = (f"{v:.3f}" if isinstance(v, float) else str(v) for v in values)
        lines.append(f"{label:38}" + "".join(f"{cell:>24}" for cell in cells))
    seconds = [sums["seconds_per_token"] for sums in arms.values()]
    ratio = f"{seconds[0] / seconds[-1]:.2f}x"
    lines.append(f"{'speed-up of rollouts':38}{ratio:>{24 * len(arms)}}")
    return "\n".join(lines)
