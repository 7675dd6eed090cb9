"""The lines of the console: from the numbers of a run to text.

Steps are counted as finished ones: "3/60 steps" is printed after the third, whose line in
metrics.jsonl has `step` 2.
"""

import math
import os
from dataclasses import dataclass
from typing import Any

from bubblespec.config import Config
from bubblespec.telemetry.table import Metric, rows
from bubblespec.telemetry.totals import Totals

DRAFTER_KEYS = tuple(f"drafter/accepted_{n}" for n in (1, 2, 3))
KEPT = (*(metric.key for metric in rows(of_evaluations=False)), *DRAFTER_KEYS)
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
    """Attention kernel."""
    num_parameters: int
    num_trained: int
    """Trained parameters: fewer with LoRA."""
    num_prompts: int
    """Training prompts."""
    num_held_out: int
    num_dropped: int
    """Prompts of more than rollout.max_prompt_length tokens."""
    num_updates: int
    """Updates before this start of the run."""
    checkpoint: str | None
    """Folder of the checkpoint that the run resumes."""
    num_deferred: int
    """Prompts that wait for a long round of tail batching."""


def start_lines(config: Config, facts: Facts) -> list[str]:
    """Return what is about to run, and where its files are."""
    rollout, output_dir, hardware = config.rollout, config.run.output_dir, facts.hardware
    trained = ""
    if facts.num_trained < facts.num_parameters:
        trained = f", {count(facts.num_trained)} of them trained"
    threads = several(hardware["threads"], "thread")
    device = hardware["gpu"] or f"CPU ({hardware['cpu']}, {threads} per rank)"
    num_prompts, num_generations = rollout.num_prompts_per_step, rollout.num_generations
    per_rank = f"{num_prompts * num_generations / facts.num_ranks:.4g} responses per rank"
    step = f"{num_prompts} prompts x {num_generations} responses"
    source = f"{config.data.path}" + (f" ({config.data.name})" if config.data.name else "")
    if config.data.tasks:
        source = f"reasoning-gym ({', '.join(dict.fromkeys(t.name for t in config.data.tasks))})"
    held_out = f"{facts.num_prompts:,} prompts from {source}, {facts.num_held_out:,} held out"
    dropped = f"{facts.num_dropped:,} dropped" if facts.num_dropped else "none dropped"
    sources = [f"{METHODS.get(s, 'your own')} ({s})" for s in config.speculative.sources]
    return [
        f"model: {config.model.path}, {count(facts.num_parameters)} parameters{trained}, "
        f"{config.model.dtype}",
        f"ranks: {facts.num_ranks} on {device}, {facts.kernel} attention",
        f"step: {step} of up to {rollout.max_completion_length} tokens; {per_rank}",
        f"data: {held_out}; {dropped} as longer than rollout.max_prompt_length = "
        f"{rollout.max_prompt_length}",
        f"drafts: {', '.join(sources) or 'none (speculative.method=none)'}",
        *["tail batching: short rounds defer their slowest prompts to long rounds"]
        * config.tail_batching.enabled,
        f"output: {output_dir}, {progress_text(config, facts)}",
        f"TensorBoard: {curves_command(output_dir)}",
    ]


def progress_text(config: Config, facts: Facts) -> str:
    """Return whether a run is new, resumed or complete, and how to extend a complete one."""
    max_steps, done, scheduler = config.run.max_steps, facts.num_updates, config.optim
    if done >= max_steps and scheduler.lr_scheduler_type != "constant":
        return (
            f"run complete ({done} steps), with its learning rate at the end of "
            f"optim.lr_scheduler_type={scheduler.lr_scheduler_type}; start a new run with "
            f"model.path={facts.checkpoint}"
        )
    if done >= max_steps:
        return f"run complete ({done} steps); set run.max_steps={2 * done} to continue"
    if facts.checkpoint is None:
        return f"a new run of {max_steps} steps"
    return f"resuming after {done} of {max_steps} steps from {facts.checkpoint}"


def set_up_line(seconds: float, phases: dict[str, float]) -> str:
    """Return how long set-up took. phases: seconds of its parts by name."""
    parts = [f"{name} {duration(phase_s)}" for name, phase_s in phases.items()]
    return f"set-up took {duration(seconds)}: {', '.join(parts)}"


def step_text(metrics: dict[str, Any], totals: Totals, left_s: float) -> str:
    """Return a step's numbers, the most important first, as terminals may be narrow.

    totals: this step included."""
    text = f"reward {compact(metrics['reward'])}, {length_text(metrics)}"
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


def length_text(metrics: dict[str, Any], prefix: str = "") -> str:
    """Return length and clipping of responses. prefix: of the metrics' keys."""
    length = compact(metrics[f"{prefix}completions/mean_length"])
    return f"length {length}, clipped {metrics[f'{prefix}completions/clipped_ratio']:.0%}"


def evaluation_line(step: int, metrics: dict[str, Any]) -> str:
    """Return the result of an evaluation after `step` updates."""
    text = f"evaluation after {several(step, 'step')}"
    text += f": held-out reward {compact(metrics['eval/reward'])}"
    if keys := pass_keys(metrics):
        text += f", {keys[-1].removeprefix('eval/')} {compact(metrics[keys[-1]])}"
    return f"{text}, {length_text(metrics, 'eval/')} ({duration(metrics['timing_s/eval'])})"


def sample_lines(
    prompt: str | list[dict], reply: str, rewards: dict[str, float], columns: dict[str, Any]
) -> list[str]:
    """Return one sample.

    prompt, columns: see `Prompt`; rewards: by the function's path, NaN where it does not apply."""
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))
    scores = [f"{path.rsplit('.', 1)[-1]} {value:.3g}" for path, value in rewards.items()]
    lines = [f"  prompt: {shorten(text)}", f"  response: {shorten(reply)}"]
    name = next((name for name in REFERENCES if columns.get(name) is not None), None)
    if name is not None:
        lines.append(f"  {name}: {shorten(str(columns[name]))}")
    return [*lines, f"  reward: {', '.join(scores)}"]


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
    """Return the result of a run, and where its files are.

    history: metrics of this process's steps; evaluations: updates before each, and its metrics;
    checkpoint: folder of the newest."""
    output_dir, of = config.run.output_dir, f"{num_updates} of {config.run.max_steps}"
    lines = [*step_table(history, num_updates), *evaluation_table(evaluations)]
    if is_stopped:
        lines.append(f"stopped after {of} updates; run the same command to resume")
    elif history:
        lines.append(f"finished: {of} steps")
    if history:
        rest_s = totals.seconds - totals.set_up_s - totals.generate_s - totals.train_s
        parts = {"set-up": totals.set_up_s, "generate": totals.generate_s}
        parts |= {"train": totals.train_s, "evaluations, saves and all else": max(rest_s, 0.0)}
        text = ", ".join(f"{name} {duration(part_s)}" for name, part_s in parts.items())
        steps = several(len(history), "step")
        lines.append(f"time: {duration(totals.seconds)} for {steps}: {text}")
        if config.speculative.method != "none":
            lines.append(f"drafts: {drafted_text(totals)}")
        right = [history[-1].get(key) for key in DRAFTER_KEYS]
        if None not in right:
            first, two, three = (f"{share:.0%}" for share in right)
            text = f"{first} have the first token right, {two} the first two"
            lines.append(f"learned drafter: of its drafts {text}, {three} the first three")
        if config.tail_batching.enabled:
            lines.append(f"tail batching: {deferred_text(totals)}")
    if checkpoint is not None:
        lines.append(f"checkpoint: {checkpoint} (a folder that from_pretrained loads)")
    lines.append(f"metrics: {os.path.join(output_dir, 'metrics.jsonl')}")
    return [*lines, f"TensorBoard: {curves_command(output_dir)}"]


def drafted_text(totals: Totals) -> str:
    """Return what drafts have saved."""
    if not totals.draft_tokens:
        return "none were verified"
    accepted, drafted = totals.accepted_tokens, totals.draft_tokens
    text = f"{accepted:,} of {drafted:,} draft tokens accepted ({accepted / drafted:.0%})"
    if totals.saved_s is None:
        return text
    change, compared = "saved" if totals.saved_s > 0 else "lost", len(totals.without_drafts)
    text += f"; about {duration(abs(totals.saved_s))} of generation {change}"
    return f"{text}, compared with {several(compared, 'step')} without drafts"


def deferred_text(totals: Totals) -> str:
    """Return what tail batching has deferred."""
    short, long = totals.num_rounds
    if not totals.num_deferred:
        when = "auto defers once lengths are known and deferring is expected to save time"
        return f"no prompt was deferred in {several(short, 'short round')}: {when}"
    text = f"{several(totals.num_deferred, 'prompt')} deferred in {several(short, 'short round')}"
    return f"{text}, {several(long, 'long round')}; prompts still waiting: {totals.num_waiting}"


def step_table(history: list[dict[str, Any]], num_updates: int) -> list[str]:
    """Return means of the first and of the last tenth of the steps, without rows of zeros."""
    if not history:
        return []
    share, first = max(1, len(history) // 10), num_updates - len(history)
    columns = {step_range(first, share): mean_of(history[:share])}
    if len(history) > 1:
        columns[step_range(num_updates - share, share)] = mean_of(history[-share:])
    return grid(columns, rows(of_evaluations=False))


def mean_of(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of each metric over the steps that have it."""
    known = {key: [m[key] for m in steps if m.get(key) is not None] for key in KEPT}
    return {key: sum(values) / len(values) for key, values in known.items() if values}


def step_range(begin: int, length: int) -> str:
    """Return the title of steps begin + 1 to begin + length, counted from 1."""
    return f"step {begin + 1}" if length == 1 else f"steps {begin + 1}-{begin + length}"


def evaluation_table(evaluations: list[tuple[int, dict[str, Any]]]) -> list[str]:
    """Return the first and the latest evaluations, without rows of zeros."""
    if not evaluations:
        return []
    shown = evaluations[:1] + evaluations[1:][1 - MAX_EVALUATIONS :]
    first, *others = rows(of_evaluations=True)
    passes = [Metric(key, "", key.removeprefix("eval/")) for key in pass_keys(shown[0][1])]
    columns = {f"after {step}": metrics for step, metrics in shown}
    return ["", *grid(columns, [first, *passes, *others])]


def grid(columns: dict[str, dict[str, float]], metrics: list[Metric]) -> list[str]:
    """Return a table, without rows of zeros. columns: metrics by title."""
    width = max(12, *(len(title) + 2 for title in columns))
    lines = [f"{'':28}" + "".join(f"{title:>{width}}" for title in columns)]
    for metric in metrics:
        values = [column.get(metric.key, math.nan) for column in columns.values()]
        if any(abs(value) >= SMALL for value in values):  # false for NaN
            shown = (f"{value:.0%}" if metric.is_share else compact(value) for value in values)
            lines.append(f"{metric.row:28}" + "".join(f"{text:>{width}}" for text in shown))
    return lines


def pass_keys(metrics: dict[str, Any]) -> list[str]:
    """Return the pass@k of an evaluation by k, without pass@1, which is the reward."""
    keys = (key for key in metrics if key.startswith("eval/pass@") and key != "eval/pass@1")
    return sorted(keys, key=lambda key: int(key.removeprefix("eval/pass@")))


def curves_command(output_dir: str) -> str:
    """Return the command that shows the run's curves."""
    return f"tensorboard --logdir {os.path.join(output_dir, 'tensorboard')}"


def compact(value: float) -> str:
    """Return a number with about three digits; a dash if it is not finite."""
    size = abs(value)
    if not math.isfinite(size):
        return "-"
    return f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"


def several(number: int, noun: str) -> str:
    """Return 1 step, 2 steps."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def count(number: int) -> str:
    """Return a number of parameters in millions or billions."""
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"


def duration(seconds: float) -> str:
    """Return a time in its two leading units."""
    if abs(seconds) < 59.5:
        return f"{seconds:.1f} s" if abs(seconds) < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def shorten(text: str) -> str:
    """Return beginning and end of a text on one line of WIDTH characters, control ones removed."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    half = (WIDTH - 5) // 2
    return line if len(line) <= WIDTH else f"{line[:half]} ... {line[-half:]}"
