"""The words of the console: from the numbers of a run to lines of text.

Steps are counted as finished ones: "3/60 steps" is printed after the third, whose line in
metrics.jsonl has `step` 2.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bubblespec.config import Config
from bubblespec.telemetry.totals import Totals

# Rows of the table at the end: what they are called, and their metric.
STEP_ROWS = {
    "reward": "reward",
    "groups of equal rewards": "frac_reward_zero_std",
    "tokens per response": "completions/mean_length",
    "longest response": "completions/max_length",
    "cut off at the limit": "completions/clipped_ratio",
    "entropy": "entropy",
    "seconds per step": "timing_s/step",
    "  generating": "timing_s/gen",
    "  waiting for other ranks": "timing_s/bubble",
    "  training": "timing_s/train",
    "tokens per second and rank": "perf/throughput",
    "draft tokens accepted": "rollout/spec_accept_rate",
}
EVALUATION_ROWS = {
    "tokens per response": "eval/completions/mean_length",
    "cut off at the limit": "eval/completions/clipped_ratio",
    "rewards that failed": "eval/reward/errors",
    "seconds": "timing_s/eval",
}
DRAFTER_KEYS = tuple(f"drafter/accepted_{n}" for n in (1, 2, 3))
KEPT = (*STEP_ROWS.values(), *DRAFTER_KEYS)  # metrics of each step, for the end
SHARES = {row for row in STEP_ROWS if row.startswith(("groups", "cut off", "draft"))}  # as percent
SMALL = 5e-4  # numbers below it are shown as 0
MAX_EVALUATIONS = 6  # in the table: the first, and the latest
METHODS = {
    "bubble": "generated ahead in idle time",
    "suffix": "matched in earlier text",
    "drafter": "from a learned drafter",
}
REFERENCES = ("answer", "solution", "ground_truth", "reference")  # columns, as the field names them
WIDTH = 100  # characters of a prompt or response


@dataclass(frozen=True)
class Facts:
    """What a run is, once it is loaded."""

    num_ranks: int
    hardware: dict[str, Any]
    """See `describe_hardware`."""
    kernel: str
    """Of attention."""
    num_parameters: int
    num_trained: int
    """Of the parameters: fewer with LoRA."""
    num_prompts: int
    """To train on."""
    num_held_out: int
    num_dropped: int
    """Prompts of more than rollout.max_prompt_length tokens."""
    num_updates: int
    """Done by the run that this one continues."""
    checkpoint: str | None
    """Folder of the checkpoint that the run continues."""
    num_deferred: int
    """Prompts that wait for a long round of tail batching."""


# The start


def start_lines(config: Config, facts: Facts) -> list[str]:
    """What is about to run, and where its files are."""
    rollout, output_dir = config.rollout, config.run.output_dir
    num_responses = rollout.num_prompts_per_step * rollout.num_generations
    per_rank = f"{num_responses / facts.num_ranks:.4g}"
    step = f"{rollout.num_prompts_per_step} prompts x {rollout.num_generations} responses"
    step += f" of up to {rollout.max_completion_length} tokens; {per_rank} responses per rank"
    trained = ""
    if facts.num_trained < facts.num_parameters:
        trained = f", {count(facts.num_trained)} of them trained"
    model = f"{config.model.path}, {count(facts.num_parameters)} parameters{trained}"
    lines = [
        f"model: {model}, {config.model.dtype}",
        f"ranks: {facts.num_ranks} on {device_text(facts.hardware)}, {facts.kernel} attention",
        f"step: {step}",
        f"data: {data_text(config, facts)}",
        f"drafts: {drafts_text(config.speculative.method)}",
    ]
    if config.tail_batching.enabled:
        lines.append("tail batching: short rounds defer their slowest prompts to long rounds")
    lines.append(f"output: {output_dir}, {progress_text(config, facts)}")
    return [*lines, f"TensorBoard: {curves_command(output_dir)}"]


def device_text(hardware: dict[str, Any]) -> str:
    """The GPU, or the processor and the threads of each rank. hardware: see
    `describe_hardware`."""
    if hardware["gpu"] is not None:
        return hardware["gpu"]
    return f"CPU ({hardware['cpu']}, {several(hardware['threads'], 'thread')} per rank)"


def data_text(config: Config, facts: Facts) -> str:
    """Where prompts come from, and what has become of them."""
    data = config.data
    source = f"{data.path}" + (f" ({data.name})" if data.name else "")
    if data.tasks:
        source = "reasoning-gym (" + ", ".join(dict.fromkeys(t.name for t in data.tasks)) + ")"
    text = f"{facts.num_prompts:,} prompts from {source}, {facts.num_held_out:,} held out"
    dropped = f"{facts.num_dropped:,}" if facts.num_dropped else "none"
    limit = f"longer than rollout.max_prompt_length = {config.rollout.max_prompt_length}"
    return f"{text}; {dropped} dropped as {limit}"


def drafts_text(method: str) -> str:
    """speculative.method in words."""
    if method == "none":
        return "none (speculative.method=none)"
    return ", ".join(f"{METHODS.get(name, 'your own')} ({name})" for name in method.split("+"))


def progress_text(config: Config, facts: Facts) -> str:
    """Whether a run is new, goes on or is done, and how a run that is done is extended."""
    run, done = config.run, facts.num_updates
    if done >= run.max_steps:
        if config.optim.lr_scheduler_type != "constant":
            return (
                f"run complete ({done} steps), with its learning rate at the end of "
                f"optim.lr_scheduler_type={config.optim.lr_scheduler_type}; start a new run with "
                f"model.path={facts.checkpoint}"
            )
        return f"run complete ({done} steps); set run.max_steps={2 * done} to continue"
    if facts.checkpoint is None:
        return f"a new run of {run.max_steps} steps"
    return f"resuming after {done} of {run.max_steps} steps from {facts.checkpoint}"


def set_up_line(seconds: float, phases: dict[str, float]) -> str:
    """How long it took, and its parts. phases: seconds by name."""
    parts = [f"{name} {duration(phase_s)}" for name, phase_s in phases.items()]
    return f"set-up took {duration(seconds)}: {', '.join(parts)}"


# Steps and evaluations


def step_text(metrics: dict[str, Any], totals: Totals, left_s: float) -> str:
    """A step, the most important first, as terminals may be narrow. totals: this step
    included."""
    text = f"reward {compact(metrics['reward'])}"
    text += f", length {compact(metrics['completions/mean_length'])}"
    text += f", clipped {metrics['completions/clipped_ratio']:.0%}"
    text += f"; {duration(left_s)} left" if left_s > 0 else ""
    step_s = metrics["timing_s/step"]
    generate_s = metrics["timing_s/gen"] + metrics["timing_s/bubble"]
    train_s = metrics["timing_s/train"] + metrics["timing_s/sync"]
    rest_s = max(step_s - generate_s - train_s, 0.0)  # rewards, and gathering of samples
    text += f"; {step_s:.2f} s (generate {generate_s:.2f}, train {train_s:.2f}, rest {rest_s:.2f})"
    accepted = metrics.get("rollout/spec_accepted_tokens", 0)
    if drafted := accepted + metrics.get("rollout/spec_wasted_tokens", 0):
        text += f"; {accepted:,} draft tokens accepted ({accepted / drafted:.0%})"
        if totals.saved_s is not None:
            text += f", {duration(totals.saved_s)} saved so far"
    if metrics.get("tail/is_long_round"):
        text += "; long round"
    elif "tail/num_deferred" in metrics:
        text += f"; short round, {metrics['tail/num_deferred']} prompts wait for a long one"
    return text


def evaluation_line(step: int, metrics: dict[str, Any]) -> str:
    """The result of an evaluation after `step` updates."""
    text = f"evaluation after {several(step, 'step')}"
    text += f": held-out reward {compact(metrics['eval/reward'])}"
    if ks := [key for key in pass_keys(metrics) if key != "eval/pass@1"]:
        text += f", {ks[-1].removeprefix('eval/')} {compact(metrics[ks[-1]])}"
    text += f", length {compact(metrics['eval/completions/mean_length'])}"
    text += f", clipped {metrics['eval/completions/clipped_ratio']:.0%}"
    return f"{text} ({duration(metrics['timing_s/eval'])})"


def sample_lines(
    prompt: str | list[dict], reply: str, rewards: dict[str, float], columns: dict[str, Any]
) -> list[str]:
    """One sample. prompt, columns: see `Prompt`; rewards: by the function's path, NaN where it does
    not apply."""
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))
    scores = [f"{path.rsplit('.', 1)[-1]} {value:.3g}" for path, value in rewards.items()]
    lines = [f"  prompt: {shorten(text)}", f"  response: {shorten(reply)}"]
    name = next((name for name in REFERENCES if columns.get(name) is not None), None)
    if name is not None:
        lines.append(f"  {name}: {shorten(str(columns[name]))}")
    return [*lines, f"  reward: {', '.join(scores)}"]


# The end


def end_lines(
    config: Config,
    totals: Totals,
    history: list[dict[str, Any]],
    evaluations: list[tuple[int, dict[str, Any]]],
    *,
    num_updates: int,
    checkpoint: str | None,
    is_stopped: bool,
) -> list[str]:
    """What the run has come to, and where its files are. history: metrics of this process's steps;
    evaluations: updates before each, and its metrics; checkpoint: folder of the newest one."""
    output_dir, of = config.run.output_dir, f"{num_updates} of {config.run.max_steps}"
    lines = [*table(history, num_updates), *evaluation_table(evaluations)]
    if is_stopped:
        lines.append(f"stopped after {of} updates; run the same command to resume")
    elif history:
        lines.append(f"finished: {of} steps")
    if history:
        rest_s = totals.seconds - totals.set_up_s - totals.generate_s - totals.train_s
        parts = f"set-up {duration(totals.set_up_s)}, generate {duration(totals.generate_s)}"
        parts += f", train {duration(totals.train_s)}"
        parts += f", evaluations, saves and all else {duration(max(rest_s, 0.0))}"
        steps = several(len(history), "step")
        lines.append(f"time: {duration(totals.seconds)} for {steps}: {parts}")
        if config.speculative.method != "none":
            lines.append(f"drafts: {drafted_text(totals)}")
        if accepted := drafter_text(history[-1]):
            lines.append(f"learned drafter: {accepted}")
        if config.tail_batching.enabled:
            lines.append(f"tail batching: {deferred_text(totals)}")
    if checkpoint is not None:
        lines.append(f"checkpoint: {checkpoint} (a folder that from_pretrained loads)")
    lines.append(f"metrics: {os.path.join(output_dir, 'metrics.jsonl')}")
    return [*lines, f"TensorBoard: {curves_command(output_dir)}"]


def drafted_text(totals: Totals) -> str:
    """What drafts have saved."""
    if not totals.draft_tokens:
        return "none were verified"
    share = totals.accepted_tokens / totals.draft_tokens
    text = f"{totals.accepted_tokens:,} of {totals.draft_tokens:,} draft tokens accepted"
    text += f" ({share:.0%})"
    if totals.saved_s is None:
        return text
    change, compared = "saved" if totals.saved_s > 0 else "lost", len(totals.without_drafts)
    text += f"; about {duration(abs(totals.saved_s))} of generation {change}"
    return f"{text}, compared with {several(compared, 'step')} without drafts"


def drafter_text(metrics: dict[str, Any]) -> str:
    """How good the learned drafter is; empty where there is none."""
    shares = [metrics.get(key) for key in DRAFTER_KEYS]
    if None in shares:
        return ""
    right = ["{:.0%} have the first token right", "{:.0%} the first two", "{:.0%} the first three"]
    return "of its drafts " + ", ".join(
        s.format(share) for s, share in zip(right, shares, strict=True)
    )


def deferred_text(totals: Totals) -> str:
    """What tail batching has done."""
    short, long = totals.num_rounds
    if not totals.num_deferred:
        when = "auto defers once lengths are known and that is expected to save time"
        return f"no prompt was deferred in {several(short, 'short round')}: {when}"
    text = f"{several(totals.num_deferred, 'prompt')} deferred in {several(short, 'short round')}"
    return f"{text}, {several(long, 'long round')}; prompts that still wait: {totals.num_waiting}"


def table(history: list[dict[str, Any]], num_updates: int) -> list[str]:
    """First tenth of the steps against the last tenth, without rows that are 0 in both."""
    if not history:
        return []
    share, first = max(1, len(history) // 10), num_updates - len(history)
    parts = {step_range(first, share): history[:share]}
    if len(history) > 1:
        parts[step_range(num_updates - share, share)] = history[-share:]
    rows = {}
    for row, key in STEP_ROWS.items():
        known = [[m[key] for m in part if m.get(key) is not None] for part in parts.values()]
        rows[row] = [sum(values) / len(values) if values else math.nan for values in known]
    return grid(list(parts), rows)


def step_range(begin: int, length: int) -> str:
    """Steps begin + 1 to begin + length, counted from 1."""
    return f"step {begin + 1}" if length == 1 else f"steps {begin + 1}-{begin + length}"


def evaluation_table(evaluations: list[tuple[int, dict[str, Any]]]) -> list[str]:
    """The first and the latest evaluations, without rows that are 0 in all of them."""
    if not evaluations:
        return []
    shown = evaluations[:1] + evaluations[1:][1 - MAX_EVALUATIONS :]
    more = [key for key in pass_keys(shown[0][1]) if key != "eval/pass@1"]
    keys = {"held-out reward": "eval/reward"}
    keys |= {key.removeprefix("eval/"): key for key in more} | EVALUATION_ROWS
    rows = {row: [m.get(key, math.nan) for _, m in shown] for row, key in keys.items()}
    return ["", *grid([f"after {step}" for step, _ in shown], rows)]


def grid(titles: Sequence[str], rows: dict[str, list[float]]) -> list[str]:
    """A table with a column for each title; rows that would be all 0 are left out."""
    width = max(12, *(len(title) + 2 for title in titles))
    lines = [f"{'':28}" + "".join(f"{title:>{width}}" for title in titles)]
    for row, values in rows.items():
        if any(abs(value) >= SMALL for value in values):  # false for NaN
            shown = (f"{value:.0%}" if row in SHARES else compact(value) for value in values)
            lines.append(f"{row:28}" + "".join(f"{text:>{width}}" for text in shown))
    return lines


# Numbers and text


def pass_keys(metrics: dict[str, Any]) -> list[str]:
    """The pass@k that an evaluation has, by k."""
    keys = (key for key in metrics if key.startswith("eval/pass@"))
    return sorted(keys, key=lambda key: int(key.removeprefix("eval/pass@")))


def curves_command(output_dir: str) -> str:
    """What shows the run's curves."""
    return f"tensorboard --logdir {os.path.join(output_dir, 'tensorboard')}"


def compact(value: float) -> str:
    """A number with about three digits; a dash for what is not known."""
    size = abs(value)
    if not math.isfinite(size):
        return "-"
    return f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"


def several(number: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def count(number: int) -> str:
    """Parameters, in millions or billions."""
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"


def duration(seconds: float) -> str:
    """In the two units that matter."""
    if abs(seconds) < 59.5:
        return f"{seconds:.1f} s" if abs(seconds) < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def shorten(text: str) -> str:
    """On one line of at most WIDTH characters, without control characters; its begin and end
    stay."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if len(line) <= WIDTH:
        return line
    half = (WIDTH - 5) // 2
    return f"{line[:half]} ... {line[-half:]}"
