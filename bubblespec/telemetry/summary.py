"""The text on the screen, from the numbers of a run. docs/metrics.md explains the metrics."""

import math
import os
import re
import statistics
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from bubblespec.config import Config
from bubblespec.data.schedule import PromptSet
from bubblespec.distributed.ranks import Ranks
from bubblespec.learn.learner import Learner
from bubblespec.metrics import ROWS, row_of
from bubblespec.telemetry.trace import describe_hardware

GENERATE = ("timing_s/gen", "timing_s/bubble")
TRAIN = ("timing_s/train", "timing_s/sync")
ACCEPTED, WASTED = "rollout/spec_accepted_tokens", "rollout/spec_wasted_tokens"
EFFECT, EFFECT_ERROR = "chooser/drafts", "chooser/drafts_error"
IS_LONG, DEFERRED = "tail/is_long_round", "tail/num_deferred"
KEPT = {*TRAIN, ACCEPTED, WASTED, EFFECT, EFFECT_ERROR}
WIDTH = 100  # characters of a prompt or response
LINE = 110  # characters of a step's line, at most
REFERENCES = ("answer", "solution", "ground_truth", "reference")  # columns, as the field names them
NUM_TIMED = 10  # latest steps, whose mean tells how long the others will take
EQUAL_STEPS = 3  # in a row without a difference in any group's rewards: a hint


@dataclass
class History:
    """What this process has done so far."""

    set_up_s: float = 0.0
    steps: list[dict[str, Any]] = field(default_factory=list)  # metrics of KEPT and at the end
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def add(self, metrics: dict[str, Any]) -> None:
        """Add a step."""
        kept = {key: of for key, of in metrics.items() if key in KEPT or is_at_end(key)}
        self.steps.append(kept)

    def total(self, *keys: str) -> Any:
        return sum(metrics.get(key, 0) for metrics in self.steps for key in keys)


def start_text(
    config: Config, ranks: Ranks, learner: Learner, prompts: PromptSet, num_held_out: int
) -> str:
    parameters, hardware = list(learner.model.parameters()), describe_hardware(ranks.device)
    num_trained = sum(p.numel() for p in parameters if p.requires_grad)
    size = f"{sum(p.numel() for p in parameters):,} parameters ({num_trained:,} trained)"
    device = hardware["gpu"] or f"CPU ({hardware['cpu']}, threads per rank: {hardware['threads']})"
    longest = f"rollout.max_prompt_length = {config.rollout.max_prompt_length}"
    never = "\nwarning: eval.num_prompts: held-out prompts are never evaluated; set run.eval_steps"
    return (
        f"model: {config.model.path}, {size}, {config.model.dtype}; ranks: {ranks.world_size} on "
        f"{device}, {learner.kernel} attention\n"
        f"data: {len(prompts):,} prompts, {num_held_out:,} held out; left out: "
        f"{prompts.num_duplicates:,} equal to these, {prompts.num_dropped:,} longer than {longest}"
        f"{never if num_held_out and not config.run.eval_steps else ''}"
    )


def output_text(config: Config, num_updates: int, checkpoint: str | None) -> str:
    run, scheduler = config.run, config.optim.lr_scheduler_type
    text = f"a new run of {run.max_steps} steps"
    if num_updates >= run.max_steps:
        longer = f"set run.max_steps={2 * num_updates}"
        if scheduler != "constant":  # the learning rate is at its end
            longer = f"start a new run with model.path={checkpoint}"
        text = f"run complete ({num_updates} steps); {longer} to continue"
    elif checkpoint:
        text = f"resuming after {num_updates} of {run.max_steps} steps from {checkpoint}"
    curves = os.path.join(run.output_dir, "tensorboard")
    return f"output: {run.output_dir}, {text}\ncurves: tensorboard --logdir {curves}"


def step_text(step: int, last: int, metrics: dict[str, Any], history: History) -> str:
    """Return the line of a step (from 1), without what would make it longer than LINE.

    history: with this step."""
    generate_s, train_s = (sum(metrics[key] for key in keys) for keys in (GENERATE, TRAIN))
    named = [f"{key} {metrics[key]:.3f}" for key in ("reward", "divergence") if key in metrics]
    scores = ", ".join([*named, length_text(metrics)])
    begin = f"{step}/{last} steps: {scores}; {metrics['timing_s/step']:.2f} s"
    parts = [f": generate {generate_s:.2f}, train {train_s:.2f}"]
    if DEFERRED in metrics:
        short = f"; short round, {metrics[DEFERRED]} prompts wait"
        parts.append("; long round" if metrics[IS_LONG] else short)
    if step < last:
        mean_s = statistics.fmean(m["timing_s/step"] for m in history.steps[-NUM_TIMED:])
        parts.append(f"; {duration((last - step) * mean_s)} left")
    while parts and len(begin + "".join(parts)) > LINE:
        del parts[0]
    return begin + "".join(parts)


def drafts_text(steps: list[dict[str, Any]]) -> str:
    """Return how many draft tokens were accepted, and what drafts do to a rollout's seconds.

    Nothing of steps without drafts, and nothing of an effect that is not clear by the last one."""
    accepted, wasted = (sum(of.get(key, 0) for of in steps) for key in (ACCEPTED, WASTED))
    if not (drafted := accepted + wasted):
        return ""
    latest = steps[-1]
    text = f"{accepted:,} of {drafted:,} draft tokens accepted ({accepted / drafted:.0%})"
    effect = math.expm1(latest.get(EFFECT, 0.0))
    if abs(latest.get(EFFECT, 0.0)) > 2 * latest.get(EFFECT_ERROR, math.inf):
        text += f", with drafts a rollout takes about {abs(effect):.0%} "
        text += "less time" if effect < 0 else "more time, so most have none"
    return text


def length_text(metrics: dict[str, Any], prefix: str = "") -> str:
    """prefix: of the metrics' keys."""
    of = f"{prefix}completions/"
    return f"length {metrics[of + 'mean_length']:,.1f}, clipped {metrics[of + 'clipped_ratio']:.0%}"


def find_hints(config: Config, history: History) -> dict[str, str]:
    hints, latest = {}, history.steps[-EQUAL_STEPS:]
    # other estimators compare responses to different prompts
    compares_groups = config.loss.advantage_estimator in ("grpo", "rloo")
    compares_groups &= config.loss.loss_type != "distillation"
    is_equal = len(latest) == EQUAL_STEPS
    is_equal &= all(m.get("frac_reward_zero_std") == 1 for m in latest)
    if compares_groups and is_equal:
        hints["equal"] = (
            f"in the latest {EQUAL_STEPS} steps all responses to each prompt got equal rewards, "
            "which have no gradient; check reward.functions, choose prompts that the model solves "
            "sometimes, or raise rollout.num_generations or rollout.temperature"
        )
    if latest[-1]["completions/clipped_ratio"] == 1:
        hints["clipped"] = (
            "all responses of the step were cut off at rollout.max_completion_length = "
            f"{config.rollout.max_completion_length}; raise it, or check the model's stop "
            "tokens (rollout.stop_token_ids; data.as_chat=true for a chat model)"
        )
    return hints


def is_at_end(key: str) -> bool:
    return "end" in row_of(key)


def evaluation_text(step: int, metrics: dict[str, Any]) -> str:
    keys = [key for key in metrics if re.fullmatch("eval/[^/]+", key) and is_at_end(key)]
    scores = [f"{key.removeprefix('eval/')} {metrics[key]:.3f}" for key in keys]
    text = ", ".join([*scores, length_text(metrics, "eval/")])
    return f"evaluation after step {step}: {text} ({duration(metrics['timing_s/eval'])})"


def sample_text(
    prompt: str | list[dict], reply: str, rewards: dict[str, float], columns: dict[str, Any]
) -> str:
    """rewards: by the function's name, NaN where it does not apply."""
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))
    answers = [(name, str(columns[name])) for name in REFERENCES if columns.get(name) is not None]
    scores = [("reward", ", ".join(f"{name} {value:.3g}" for name, value in rewards.items()))]
    named = [("prompt", text), ("response", reply), *answers[:1], *scores * bool(rewards)]
    return "\n".join(f"  {name}: {shorten(value)}" for name, value in named)


def end_text(
    config: Config,
    history: History,
    seconds: float,
    num_updates: int,
    checkpoint: str | None,
    is_stopped: bool,
) -> str:
    """seconds: of this process; checkpoint: folder of the newest."""
    of, steps = f"{num_updates} of {config.run.max_steps}", history.steps
    lines = table(history) if steps else []
    if steps:
        if round(steps[-1].get("reward", 1.0), 3) == 0:
            lines.append("reward 0: docs/troubleshooting.md has what to check, in order")
        if not is_stopped:
            lines.append(f"finished: {of} steps")
        parts = {"set-up": history.set_up_s, "generate": history.total(*GENERATE)}
        parts["train"] = history.total(*TRAIN)
        parts["evaluations, saves and all else"] = max(seconds - sum(parts.values()), 0.0)
        text = ", ".join(f"{name} {duration(part_s)}" for name, part_s in parts.items())
        lines.append(f"time: {duration(seconds)}: {text}")
        if text := drafts_text(steps):
            lines.append(f"drafts: {text}")
    if checkpoint is not None:
        lines.append(f"checkpoint: {checkpoint} (a folder that from_pretrained loads)")
    lines.append(f"metrics: {os.path.join(config.run.output_dir, 'metrics.jsonl')}")
    if is_stopped:
        lines.append(f"stopped after {of} updates; run the same command to resume")
    return "\n".join(lines)


def table(history: History) -> list[str]:
    """Return means over the first and the last tenth of the steps that have each metric."""
    num_shown = max(1, len(history.steps) // 10)
    first = history.steps[:num_shown] + history.evaluations[:1]
    last = history.steps[-num_shown:] + history.evaluations[-1:]
    shown = dict.fromkeys(key for of in first + last for key in of if is_at_end(key))
    rows = [["mean of steps", f"first {num_shown}", f"last {num_shown}"]]
    for key in sorted(shown, key=lambda key: ROWS.index(row_of(key))):
        known = [[metrics[key] for metrics in steps if key in metrics] for steps in (first, last)]
        rows.append([key, *(f"{statistics.fmean(of):,.3f}" if of else "-" for of in known)])
    return [f"{name:30}{begin:>14}{end:>14}" for name, begin, end in rows]


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 59.95 else str(timedelta(seconds=round(seconds)))


def shorten(text: str) -> str:
    """Return beginning and end of a text on one line of WIDTH characters, control ones removed."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    half = (WIDTH - 5) // 2
    return line if len(line) <= WIDTH else f"{line[:half]} ... {line[-half:]}"
