"""Would speculation help on this workload, on so many ranks, and why? An answer in virtual time,
without the machine.

python -m bubblespec.simulate --synthetic mean=2000,max=16000,run=500 --ranks 8 --cost-model FILE
[section.key=value ...] python -m bubblespec.simulate --trace RUN_DIR --ranks 8 --cost-model FILE
[section.key=value ...]
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from typing import Any

from bubblespec.config import Config, config_of_sections
from bubblespec.errors import InputError
from bubblespec.simulate.cost import ForwardCost, cost_from_trace
from bubblespec.simulate.deferral import steps_that_fit
from bubblespec.simulate.drafter import DrafterModel
from bubblespec.simulate.drafting import DraftModel
from bubblespec.simulate.recorded import RecordedWorkload
from bubblespec.simulate.run import SimulatedStep, counted, simulate
from bubblespec.simulate.shared import SharedModel
from bubblespec.simulate.workload import Synthetic, Workload, parse
from bubblespec.telemetry.timeline import save_timeline
from bubblespec.telemetry.trace import FOLDER

SECTIONS = ("rollout", "speculative", "bubble", "tail_batching")  # what overrides may change
# What a made-up run has in place of the files of a real one.
BLANK = {
    "model.path": "none",
    "data.path": "none",
    "run.output_dir": "none",
    "optim.max_tokens_per_microbatch": 1 << 24,
}
TABLE = (
    ("rollout", "seconds", "{:.1f} s"),
    ("forwards on the slowest rank", "forwards", "{:d}"),
    ("share of the rollout spent waiting", "bubble_ratio", "{:.3f}"),
    ("tokens drafted ahead", "drafted_tokens", "{:d}"),
    ("draft tokens proposed", "proposed_tokens", "{:d}"),
    ("of these refused", "refused_tokens", "{:d}"),
    ("tokens trained on", "response_tokens", "{:d}"),
)


@dataclasses.dataclass(frozen=True)
class Drafts:
    """What of `DraftModel` can be given for a trace."""

    run: float = 500.0
    tokens_a_pass: float = 2.0
    drift: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m bubblespec.simulate",
        description="Rollouts of a run, simulated on any number of ranks",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="RUN_DIR", help="output_dir of a run with trace.enabled")
    names = ", ".join(f.name for f in dataclasses.fields(Synthetic))
    source.add_argument("--synthetic", metavar="NAME=VALUE,...", help=f"of {names}")
    parser.add_argument(
        "--drafts",
        metavar="NAME=VALUE,...",
        help="of a trace, where none was recorded: run, tokens_a_pass, drift",
    )
    parser.add_argument(
        "--drafter",
        default="",
        metavar="NAME=VALUE,...",
        help="of a learned drafter: tokens_a_pass, share",
    )
    parser.add_argument(
        "--shared-tail",
        metavar="NAME=VALUE,...",
        help="simulate the shared tail, by rollout.tp_tail_max_rows: all_reduce_us, layers, launch_ms, exchange_us",
    )
    parser.add_argument("--ranks", type=int, help="default: those of the trace, or 8")
    parser.add_argument(
        "--cores",
        type=int,
        help="processor cores that all ranks share; default: each rank has its own device",
    )
    parser.add_argument(
        "--cost-model", metavar="FILE", help="seconds of a forward; default: fitted on the trace"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there; it must not exist")
    parser.add_argument(
        "--timeline-step", type=int, metavar="STEP", help="draw this step, into --output"
    )
    parser.add_argument("--output", metavar="DIR")
    parser.add_argument("overrides", nargs="*", help=f"section.key=value of {', '.join(SECTIONS)}")
    arguments = parser.parse_intermixed_args()
    try:
        run(arguments)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(arguments: argparse.Namespace) -> None:
    if arguments.json and os.path.exists(arguments.json):
        raise InputError(f"--json: {arguments.json} exists")
    if (arguments.timeline_step is None) != (arguments.output is None):
        raise InputError("--timeline-step and --output go together")
    for name in ("ranks", "cores"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise InputError(f"--{name}: {getattr(arguments, name)} must be at least 1")
    if arguments.trace:
        workload, config = recorded(arguments)
    else:
        workload, config = made_up(arguments)
    workload.drafter = parse(DrafterModel, arguments.drafter, "--drafter")
    if arguments.drafter and "drafter" not in config.speculative.method:
        raise InputError(f"--drafter: speculative.method={config.speculative.method} has none")
    if arguments.shared_tail is not None:
        workload.shared = parse(SharedModel, arguments.shared_tail, "--shared-tail")
    if arguments.cost_model:
        cost = ForwardCost.load(arguments.cost_model)
    elif arguments.trace:
        cost = cost_from_trace(os.path.join(arguments.trace, FOLDER))
    else:
        raise InputError(
            "--cost-model: give one; made-up responses say nothing of what a forward takes"
        )
    num_ranks = arguments.ranks or (workload.world_size if arguments.trace else 8)
    num_steps = steps_that_fit(config, workload)
    last = workload.first_step + num_steps - 1
    if (
        arguments.timeline_step is not None
        and not workload.first_step <= arguments.timeline_step <= last
    ):
        raise InputError(
            f"--timeline-step: {arguments.timeline_step} is none of the steps {workload.first_step} to {last}"
        )
    results, real_s = {}, {}
    for method, arm in arms_of(config, workload.shared is not None).items():
        started = time.perf_counter()
        options = {"cores": arguments.cores, "num_steps": num_steps, "shows_progress": True}
        results[method] = simulate(arm, workload, cost, num_ranks, **options)
        real_s[method] = time.perf_counter() - started
    print(f"{describe_cost(cost)}; {num_ranks} ranks, {num_steps} steps")
    num_counted = len(counted([*results.values()][-1]))
    print(table(results, num_counted))
    for method, steps in results.items():
        seconds = sum(step.seconds for step in steps)
        print(
            f"{method}: {seconds / real_s[method]:.0f} simulated seconds a second", file=sys.stderr
        )
    if arguments.timeline_step is not None:
        for method, steps in results.items():
            lanes = steps[arguments.timeline_step - workload.first_step].lanes
            save_timeline(
                os.path.join(arguments.output, method),
                arguments.timeline_step,
                lanes,
                f"{method} (simulated)",
            )
    if arguments.json:
        report = {
            "cost": describe_cost(cost),
            "cost_kind": cost.kind,
            "num_ranks": num_ranks,
            "cores": arguments.cores,
        }
        report["workload"] = arguments.trace or dataclasses.asdict(workload.spec)
        report["drafter"] = dataclasses.asdict(workload.drafter)
        report["shared_tail"] = (
            None if workload.shared is None else dataclasses.asdict(workload.shared)
        )
        report["config"] = {name: dataclasses.asdict(getattr(config, name)) for name in SECTIONS}
        report["methods"] = {
            method: {
                "total": totals(steps[:num_counted]),
                "real_s": real_s[method],
                "steps": [plain(step) for step in steps],
            }
            for method, steps in results.items()
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


def recorded(arguments: argparse.Namespace) -> tuple[RecordedWorkload, Config]:
    workload = RecordedWorkload(arguments.trace)
    if arguments.drafts:
        drafts = parse(Drafts, arguments.drafts, "--drafts")
        workload.drafts = DraftModel(drafts.run, drafts.tokens_a_pass, bool(drafts.drift))
    config = config_of_sections(
        nested(workload.config),
        checked_overrides(arguments),
        f"{arguments.trace}/{FOLDER}/meta.json",
    )
    if config.rollout.max_completion_length > workload.limit:
        raise InputError(
            f"rollout.max_completion_length: the recorded responses are cut at {workload.limit}; give at most that"
        )
    return workload, config


def made_up(arguments: argparse.Namespace) -> tuple[Workload, Config]:
    if arguments.drafts:
        raise InputError("--drafts: give its values in --synthetic")
    spec = parse(Synthetic, arguments.synthetic, "--synthetic")
    given = {
        "rollout.max_completion_length": spec.max,
        "rollout.max_prompt_length": 2 * spec.prompt,
    }
    given["rollout.max_batch_tokens"] = 8192
    config = config_of_sections(nested(BLANK | given), checked_overrides(arguments), "--synthetic")
    if config.rollout.max_completion_length != spec.max:
        raise InputError("rollout.max_completion_length: give it as max in --synthetic")
    return Workload(
        spec, config.rollout.num_prompts_per_step, config.rollout.num_generations
    ), config


def checked_overrides(arguments: argparse.Namespace) -> list[str]:
    for override in arguments.overrides:
        if override.split(".")[0] not in SECTIONS or "=" not in override:
            raise InputError(
                f"override '{override}': only section.key=value of {', '.join(SECTIONS)} is of use here"
            )
    return arguments.overrides


def nested(flat: dict[str, Any]) -> dict[str, dict]:
    sections: dict[str, dict] = {}
    for name, value in flat.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return sections


def describe_cost(cost: ForwardCost) -> str:
    if cost.kind == "analytic":
        return str(cost.hardware.get("source", "analytic, not measured"))
    return f"forwards as measured on {cost.hardware.get('gpu') or cost.hardware.get('cpu') or 'an unnamed machine'}"


def arms_of(config: Config, shares_tail: bool = False) -> dict[str, Config]:
    """What is simulated, by name: the plain trainer, and the configuration as it is."""
    plain = {
        "speculative": {"method": "none"},
        "tail_batching": {"enabled": False},
        "rollout": {"tp_tail_max_rows": 0},
    }
    sections = {
        name: dataclasses.replace(getattr(config, name), **values) for name, values in plain.items()
    }
    method = config.speculative.method
    name = (
        method
        if not config.tail_batching.enabled
        else "tail"
        if method == "none"
        else f"tail+{method}"
    )
    if shares_tail:
        name = "shared" if name == "none" else f"{name}+shared"
    return {"none": dataclasses.replace(config, **sections), name: config}


def totals(steps: list[SimulatedStep]) -> dict[str, Any]:
    """Over all of these steps; the share of waiting is that of the whole time."""
    sums = {name: sum(getattr(step, name) for step in steps) for _, name, _ in TABLE}
    sums["bubble_ratio"] = sum(step.bubble_ratio * step.seconds for step in steps) / sums["seconds"]
    sums["seconds_per_token"] = sums["seconds"] / sums["response_tokens"]
    sums["long_rounds"] = sum(step.is_long_round for step in steps)
    return sums | {"num_steps": len(steps), "length_ratio": steps[-1].length_ratio}


def plain(step: SimulatedStep) -> dict[str, Any]:
    return {name: value for name, value in vars(step).items() if name != "lanes"}


def table(results: dict[str, list[SimulatedStep]], num_counted: int) -> str:
    """The totals, a column for each method, and the seconds of each step. Ratios are per token that
    is trained on.

    num_counted: steps that the totals are of. By a long round tail batching has trained on what
    plain order has in as many steps, but for the few prompts that still wait.
    """
    sums = {method: totals(steps[:num_counted]) for method, steps in results.items()}
    tokens = [values["response_tokens"] for values in sums.values()]
    lines = [["", *sums, "ratio"]]
    for label, name, form in TABLE:
        each = [values[name] for values in sums.values()]
        rates = (
            each
            if name == "bubble_ratio"
            else [number / count for number, count in zip(each, tokens, strict=True)]
        )
        lines.append([label, *map(form.format, each), ratio(rates)])
    if any(values["long_rounds"] for values in sums.values()):
        lines.append(
            [
                "steps, of which long rounds",
                *(f"{v['num_steps']}, {v['long_rounds']}" for v in sums.values()),
                "",
            ]
        )
        lines.append(
            [
                "mean length trained on over launched",
                *(f"{v['length_ratio']:.3f}" for v in sums.values()),
                "",
            ]
        )
    for of_step in zip(*results.values(), strict=True):
        seconds, rates = (
            [step.seconds for step in of_step],
            [step.seconds / step.response_tokens for step in of_step],
        )
        name = f"step {of_step[0].step}{', a long round' if of_step[-1].is_long_round else ''}"
        lines.append([name, *(f"{s:.1f} s" for s in seconds), ratio(rates)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )


def ratio(values: list[float]) -> str:
    """The first over the last: how much less the method has than `none`."""
    return f"{values[0] / values[-1]:.2f}x" if len(values) > 1 and values[0] and values[-1] else ""


if __name__ == "__main__":
    sys.exit(main())
