"""The lines of the console: from the numbers of a run to text."""

import itertools
import math
import os
import statistics
from dataclasses import dataclass, field
from typing import Any

from bubblespec.config import Config
from bubblespec.config_combinations import EVAL_NAMES
from bubblespec.telemetry.samples import references
from bubblespec.telemetry.table import Metric, rows

COPY_KEY = "quantized/acceptance_rate"
DRAFTER_KEYS = tuple(f"drafter/accepted_{n}" for n in (1, 2, 3))
GENERATE = ("timing_s/gen", "timing_s/bubble")
TRAIN = ("timing_s/train", "timing_s/sync")
ACCEPTED, WASTED = "rollout/spec_accepted_tokens", "rollout/spec_wasted_tokens"
IS_LONG, DEFERRED = "tail/is_long_round", "tail/num_deferred"
MODELLED, HAS_DRAFTS = "rollout/modelled_s", "has_drafts"
KEPT = {metric.key for metric in rows(of_evaluations=False)}
KEPT |= {COPY_KEY, *DRAFTER_KEYS, *GENERATE, *TRAIN, ACCEPTED, WASTED, IS_LONG, DEFERRED}
KEPT |= {MODELLED, "guard/is_on"}
SMALL = 5e-4  # smaller numbers are shown as 0
MAX_EVALUATIONS = 6  # in the table: the first, and the latest
METHODS = {
    "bubble": "generated ahead in idle time",
    "suffix": "matched in earlier text",
    "quantized": "from a quantised copy of the policy",
    "drafter": "from a learned drafter",
}
CHARTS_URL = "http://localhost:6006/#custom_scalars"
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
    num_duplicates: int
    """Training prompts left out because they are held out, too."""
    num_updates: int
    """Updates before this start of the run."""
    checkpoint: str | None
    """Folder of the checkpoint that the run resumes."""
    num_deferred: int
    """Prompts that wait for a long round of tail batching."""


@dataclass
class History:
    """What this process has done so far."""

    set_up_s: float = 0.0
    seconds: float = 0.0
    """Seconds of this process, known at its end."""
    num_waiting: int = 0
    """Prompts that waited for a long round of tail batching at the start."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Metrics of each step, those of KEPT."""
    evaluations: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Updates before each evaluation, and its metrics."""

    def add(self, metrics: dict[str, Any]) -> None:
        """Add a step. The guard has decided in the step before whether it had drafts."""
        has_drafts = not self.steps or self.steps[-1].get("guard/is_on") != 0
        kept = {key: metrics[key] for key in KEPT & metrics.keys()}
        self.steps.append(kept | {HAS_DRAFTS: has_drafts})

    def total(self, *keys: str) -> Any:
        """Return the sum of these metrics over the steps."""
        return sum(metrics.get(key, 0) for metrics in self.steps for key in keys)

    def savings(self) -> tuple[float, int] | None:
        """Return the seconds that drafts saved (negative if they lost), and compared steps.

        The seconds that the cost model expects without drafts, corrected by its median error in
        steps without drafts, are compared with the measured ones. None before such a step."""
        timed = [metrics for metrics in self.steps if metrics.get(MODELLED)]
        pairs = [(m[HAS_DRAFTS], m[MODELLED], seconds_of(m, GENERATE)) for m in timed]
        errors = [measured_s / modelled_s for drafts, modelled_s, measured_s in pairs if not drafts]
        if not errors or not self.total(ACCEPTED, WASTED):
            return None
        error = statistics.median(errors)
        return sum(error * modelled - s for drafts, modelled, s in pairs if drafts), len(errors)


def seconds_of(metrics: dict[str, Any], keys: tuple[str, ...]) -> float:
    """Return the sum of some metrics of one step."""
    return sum(metrics[key] for key in keys)


def start_lines(config: Config, facts: Facts) -> list[str]:
    """Return what is about to run, and where its files are."""
    rollout, data, hardware = config.rollout, config.data, facts.hardware
    num_prompts, num_generations = rollout.num_prompts_per_step, rollout.num_generations
    is_partial = facts.num_trained < facts.num_parameters
    trained = f", {count(facts.num_trained)} of them trained" if is_partial else ""
    threads = several(hardware["threads"], "thread")
    device = hardware["gpu"] or f"CPU ({hardware['cpu']}, {threads} per rank)"
    source = f"{data.path}" + (f" ({data.name})" if data.name else "")
    if data.tasks:
        source = f"reasoning-gym ({', '.join(dict.fromkeys(task.name for task in data.tasks))})"
    dropped = f"{facts.num_dropped:,}" if facts.num_dropped else "none"
    held_out = f"{facts.num_held_out:,} held out"
    if facts.num_duplicates:
        held_out += f", {facts.num_duplicates:,} left out as equal to these"
    sources = [f"{METHODS.get(s, 'your own')} ({s})" for s in config.speculative.sources]
    return [
        f"model: {config.model.path}, {count(facts.num_parameters)} parameters{trained}, "
        f"{config.model.dtype}",
        *[f"teacher: {config.model.teacher_path}, frozen"] * bool(config.model.teacher_path),
        f"ranks: {facts.num_ranks} on {device}, {facts.kernel} attention",
        f"step: {num_prompts} prompts x {num_generations} responses of up to "
        f"{rollout.max_completion_length} tokens; "
        f"{num_prompts * num_generations / facts.num_ranks:.4g} responses per rank",
        f"data: {facts.num_prompts:,} prompts from {source}, {held_out}; "
        f"{dropped} dropped as longer than rollout.max_prompt_length = {rollout.max_prompt_length}",
        f"drafts: {', '.join(sources) or 'none (speculative.method=none)'}",
        *["tail batching: short rounds defer their slowest prompts to long rounds"]
        * config.tail_batching.enabled,
        f"output: {config.run.output_dir}, {progress_text(config, facts)}",
        *curves_lines(config),
    ]


def progress_text(config: Config, facts: Facts) -> str:
    """Return whether a run is new, resumed or complete, and how to extend a complete one."""
    max_steps, done, schedule = config.run.max_steps, facts.num_updates, config.optim
    if done < max_steps:
        resumed = f"resuming after {done} of {max_steps} steps from {facts.checkpoint}"
        return resumed if facts.checkpoint else f"a new run of {max_steps} steps"
    if schedule.lr_scheduler_type == "constant":
        return f"run complete ({done} steps); set run.max_steps={2 * done} to continue"
    return (
        f"run complete ({done} steps), with its learning rate at the end of "
        f"optim.lr_scheduler_type={schedule.lr_scheduler_type}; start a new run with "
        f"model.path={facts.checkpoint}"
    )


def step_parts(metrics: dict[str, Any], history: History, left_s: float) -> list[str]:
    """Return a step's numbers, the most important first, as a bar has no room for all.

    history: with this step."""
    step_s = metrics["timing_s/step"]
    generate_s, train_s = seconds_of(metrics, GENERATE), seconds_of(metrics, TRAIN)
    rest_s = max(step_s - generate_s - train_s, 0.0)  # rewards, and gathering of samples
    named = [f"{key} {compact(metrics[key])}" for key in ("reward", "divergence") if key in metrics]
    parts = [", ".join([*named, length_text(metrics)])]
    if left_s > 0:
        parts.append(f"{duration(left_s)} left")
    times = f"generate {generate_s:.2f}, train {train_s:.2f}, rest {rest_s:.2f}"
    parts += [f"{step_s:.2f} s", times]
    accepted = metrics.get(ACCEPTED, 0)
    if drafted := accepted + metrics.get(WASTED, 0):
        saved = f", {saved_text(savings[0])} so far" if (savings := history.savings()) else ""
        parts.append(f"{accepted:,} draft tokens accepted ({accepted / drafted:.0%}){saved}")
    if DEFERRED in metrics:
        short = f"short round, {metrics[DEFERRED]} prompts wait for a long one"
        parts.append("long round" if metrics[IS_LONG] else short)
    return parts


def shortened(parts: list[str], room: int) -> str:
    """Return the leading parts that fit into `room` characters, of the first at least a piece."""
    texts = ["; ".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((text for text in texts if len(text) <= room), texts[-1][:room])


def saved_text(saved_s: float, of: str = "") -> str:
    """Return the seconds that drafts saved, or lost where they are negative."""
    return f"{duration(abs(saved_s))}{of} {'saved' if saved_s >= 0 else 'lost'}"


def length_text(metrics: dict[str, Any], prefix: str = "") -> str:
    """Return length and clipping of responses. prefix: of the metrics' keys."""
    length = compact(metrics[f"{prefix}completions/mean_length"])
    return f"length {length}, clipped {metrics[f'{prefix}completions/clipped_ratio']:.0%}"


def evaluation_line(step: int, metrics: dict[str, Any]) -> str:
    """Return the result of an evaluation after `step` updates."""
    shown = ["eval/reward"] * ("eval/reward" in metrics)
    shown += own_keys(metrics) + pass_keys(metrics)[-1:]
    named = [f"{key.removeprefix('eval/')} {compact(metrics[key])}" for key in shown]
    named[:1] = [f"held-out {text}" for text in named[:1]]
    return (
        f"evaluation after {several(step, 'step')}: "
        f"{', '.join([*named, length_text(metrics, 'eval/')])} "
        f"({duration(metrics['timing_s/eval'])})"
    )


def sample_lines(
    prompt: str | list[dict], reply: str, rewards: dict[str, float], columns: dict[str, Any]
) -> list[str]:
    """Return one sample.

    prompt, columns: see `Prompt`; rewards: by the function's path, NaN where it does not apply."""
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))
    scores = [f"{path.rsplit('.', 1)[-1]} {value:.3g}" for path, value in rewards.items()]
    return [
        f"  prompt: {shorten(text)}",
        f"  response: {shorten(reply)}",
        *(f"  {name}: {shorten(value)}" for name, value in references(columns)[:1]),
        *[f"  reward: {', '.join(scores)}"] * bool(scores),
    ]


def end_lines(
    config: Config, history: History, num_updates: int, checkpoint: str | None, is_stopped: bool
) -> list[str]:
    """Return the result of a run, and where its files are.

    checkpoint: folder of the newest."""
    of = f"{num_updates} of {config.run.max_steps}"
    lines = [*step_table(history.steps, num_updates), *evaluation_table(history.evaluations)]
    if history.steps and abs(history.steps[-1].get("reward", 1.0)) < SMALL:
        lines.append("reward 0: docs/it-does-not-learn.md has what to check, in order")
    if history.steps and not is_stopped:
        lines.append(f"finished: {of} steps")
    if history.steps:
        parts = {"set-up": history.set_up_s, "generate": history.total(*GENERATE)}
        parts["train"] = history.total(*TRAIN)
        parts["evaluations, saves and all else"] = max(history.seconds - sum(parts.values()), 0.0)
        text = ", ".join(f"{name} {duration(part_s)}" for name, part_s in parts.items())
        steps = several(len(history.steps), "step")
        lines.append(f"time: {duration(history.seconds)} for {steps}: {text}")
        if config.speculative.method != "none":
            lines.append(f"drafts: {drafted_text(history)}")
        if all(key in history.steps[-1] for key in DRAFTER_KEYS):
            first, two, three = (f"{history.steps[-1][key]:.0%}" for key in DRAFTER_KEYS)
            text = f"{first} have the first token right, {two} the first two"
            lines.append(f"learned drafter: of its drafts {text}, {three} the first three")
        if COPY_KEY in history.steps[-1]:
            share = f"{history.steps[-1][COPY_KEY]:.1%}"
            lines.append(f"quantised copy: {share} of its tokens are right if all before them are")
        if config.tail_batching.enabled:
            lines.append(f"tail batching: {deferred_text(history)}")
    if checkpoint is not None:
        lines.append(f"checkpoint: {checkpoint} (a folder that from_pretrained loads)")
    path = os.path.join(config.run.output_dir, "metrics.jsonl")
    lines += [f"metrics: {path}", *curves_lines(config)]
    if is_stopped:
        lines.append(f"stopped after {of} updates; run the same command to resume")
    return lines


def drafted_text(history: History) -> str:
    """Return what drafts have saved."""
    accepted, drafted = history.total(ACCEPTED), history.total(ACCEPTED, WASTED)
    if not drafted:
        return "none were verified"
    text = f"{accepted:,} of {drafted:,} draft tokens accepted ({accepted / drafted:.0%})"
    if savings := history.savings():
        saved_s, steps = savings[0], several(savings[1], "step")
        saved = saved_text(saved_s, " of generation")
        text += f"; about {saved}, compared with {steps} without drafts"
    return text


def deferred_text(history: History) -> str:
    """Return what tail batching has deferred."""
    waiting = [history.num_waiting, *(metrics[DEFERRED] for metrics in history.steps)]
    num_deferred = sum(max(after - before, 0) for before, after in itertools.pairwise(waiting))
    num_long = history.total(IS_LONG)
    short = several(len(history.steps) - num_long, "short round")
    if not num_deferred:
        when = "auto defers once lengths are known and deferring is expected to save time"
        return f"no prompt was deferred in {short}: {when}"
    text = f"{several(num_deferred, 'prompt')} deferred in {short}"
    return f"{text}, {several(num_long, 'long round')}; prompts still waiting: {waiting[-1]}"


def step_table(steps: list[dict[str, Any]], num_updates: int) -> list[str]:
    """Return a metric's means over the first and the last tenth of the steps that have it."""
    if not steps:
        return []
    share, columns = max(1, len(steps) // 10), {}
    for begin in sorted({0, len(steps) - share}):
        number = num_updates - len(steps) + begin + 1  # counted from 1
        title = f"step {number}" if share == 1 else f"steps {number}-{number + share - 1}"
        shown = steps[begin : begin + share]
        known = {key: [metrics[key] for metrics in shown if key in metrics] for key in KEPT}
        columns[title] = {key: statistics.fmean(found) for key, found in known.items() if found}
    return grid(columns, rows(of_evaluations=False))


def evaluation_table(evaluations: list[tuple[int, dict[str, Any]]]) -> list[str]:
    """Return the first and the latest evaluations."""
    if not evaluations:
        return []
    shown = evaluations[:1] + evaluations[1:][1 - MAX_EVALUATIONS :]
    first, *others = rows(of_evaluations=True)
    keys = own_keys(shown[0][1]) + pass_keys(shown[0][1])
    named = [Metric(key, "", key.removeprefix("eval/")) for key in keys]
    columns = {f"after {step}": metrics for step, metrics in shown}
    return ["", *grid(columns, [first, *named, *others])]


def grid(columns: dict[str, dict[str, float]], metrics: list[Metric]) -> list[str]:
    """Return a table of the metrics that are known. columns: metrics by title."""
    width = max(12, *(len(title) + 2 for title in columns))
    table = [("", list(columns))]
    for metric in metrics:
        values = [column.get(metric.key, math.nan) for column in columns.values()]
        if any(map(math.isfinite, values)):
            is_share = "share" in metric.chart.lower()
            texts = [f"{value:.0%}" if is_share else compact(value) for value in values]
            table.append((metric.row, texts))
    return [f"{name:28}" + "".join(f"{t:>{width}}" for t in texts) for name, texts in table]


def pass_keys(metrics: dict[str, Any]) -> list[str]:
    """Return the pass@k of an evaluation by k, without pass@1, which is the reward."""
    keys = (key for key in metrics if key.startswith("eval/pass@") and key != "eval/pass@1")
    return sorted(keys, key=lambda key: int(key.removeprefix("eval/pass@")))


def own_keys(metrics: dict[str, Any]) -> list[str]:
    """Return the metrics of eval.functions."""
    named = {key: key.removeprefix("eval/") for key in metrics if key.startswith("eval/")}
    return [
        key
        for key, name in named.items()
        if "/" not in name and not name.startswith("pass@") and name not in EVAL_NAMES
    ]


def curves_lines(config: Config) -> list[str]:
    """Return the command that shows the run's curves, and where the main ones are then."""
    folder = os.path.join(config.run.output_dir, "tensorboard")
    return [f"TensorBoard: tensorboard --logdir {folder}", f"eight main charts: {CHARTS_URL}"]


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
