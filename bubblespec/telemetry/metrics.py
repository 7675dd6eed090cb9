"""Where metrics go on rank 0: metrics.jsonl, samples.jsonl and TensorBoard; and the user's hook.

A full disk does not end a run: lines wait in memory until they can be written. TensorBoard's curves
then have a gap.
"""

import atexit
import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from bubblespec.config import Config, flatten
from bubblespec.config.imports import call, without_input
from bubblespec.errors import InputError, is_interrupt, log, one_line
from bubblespec.records import StepRecord
from bubblespec.telemetry.files import JsonLines, describe

NUM_SAMPLES = 4  # prompts of a step, one response each
PACKAGES = ("wandb", "trackio")  # of run.log_to; they have the same functions
OWN_GROUP = "z_bubblespec"  # TensorBoard sorts groups by name: after reward, train and all others
# Beginnings of the keys that only this trainer has.
OWN = ("rollout/", "bubble/", "drafts/", "quantized/", "drafter/", "idle/", "chooser/", "tail/")
OWN += ("tp_tail/",)
# Metrics by the title of their chart. docs/metrics.md explains the first of each in this order.
CHARTS = {
    "Held-out reward": ["eval/reward"],
    "Reward": ["reward"],
    "Share of groups with equal rewards": ["frac_reward_zero_std"],
    "Response tokens": ["completions/mean_length", "completions/mean_terminated_length"],
    "Share of responses cut off": ["completions/clipped_ratio"],
    "Entropy": ["entropy"],
    "Gradient norm": ["grad_norm"],
    "Seconds per step": [f"timing_s/{of}" for of in ("step", "gen", "bubble", "reward", "train")],
}


def import_logger(package: str) -> Any:
    """Import a package of run.log_to. Raises InputError."""
    try:
        module = importlib.import_module(package)
        if not hasattr(module, "init"):  # as a folder of earlier runs
            raise ImportError(f"{next(iter(module.__path__), package)} is another thing")
        return module
    except ImportError as error:
        problem = f"{package} cannot be imported ({error}); pip install {package}"
        raise InputError(f"run.log_to: {problem}") from error


def begin_logging(module: Any, config: Config) -> Callable[[dict[str, Any]], None]:
    """Begin a run of a package; return a function that logs lines of metrics. Raises InputError.

    It is named after run.output_dir. Its project is that of WANDB_PROJECT or TRACKIO_PROJECT, else
    bubblespec."""
    package = config.run.log_to or ""
    project = os.environ.get(f"{package.upper()}_PROJECT", "bubblespec")
    name = os.path.basename(os.path.abspath(config.run.output_dir))
    try:
        with without_input():
            run = module.init(project=project, name=name, config=flatten(config), resume="allow")
    except BaseException as error:  # for want of an account or a network
        if is_interrupt(error):
            raise
        offline = "; WANDB_MODE=offline needs neither key nor network" * (package == "wandb")
        problem = f"{package} cannot begin a run: {one_line(error)}{offline}"
        raise InputError(f"run.log_to: {problem}") from error
    atexit.register(module.finish)
    return lambda metrics: run.log(metrics, step=metrics["step"])


def tag_of(key: str) -> str:
    """Return the curve of a metric.

    A key without a group is in `train`, as in TRL. The keys that only this trainer has, seconds by
    rank included, are in one group."""
    if "/" not in key:
        return f"train/{key}"
    return f"{OWN_GROUP}/{key}" if key.startswith(OWN) or "/rank_" in key else key


class TensorBoard:
    """The curves of one run on rank 0. A full disk leaves a gap in them."""

    def __init__(self, output_dir: str, purge_step: int):
        """purge_step: curves from here on, of an earlier run, are hidden."""
        self._folder = os.path.join(output_dir, "tensorboard")
        self._writer: Any = None
        self._purge_step: int | None = purge_step
        self._has_failed = False

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Draw one point of each curve. An error is a warning, once."""
        try:
            if self._writer is None:
                self._writer = self._open()
            for key, value in metrics.items():
                if isinstance(value, int | float | np.generic):
                    self._writer.add_scalar(tag_of(key), value, step)
            self._writer.flush()
        except OSError as error:
            if not self._has_failed:
                reason = f"TensorBoard's files cannot be written ({error.strerror})"
                log(f"warning: {reason}; its curves will have a gap")
            self._writer, self._has_failed = None, True

    def close(self) -> None:
        """Close the files, which are complete after each step."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(self._folder, purge_step=self._purge_step)
        self._purge_step = None
        patterns = {title: [f"^{tag_of(key)}$" for key in keys] for title, keys in CHARTS.items()}
        charts = {title: ["Multiline", tags] for title, tags in patterns.items()}
        writer.add_custom_scalars({"Watch first": charts})
        return writer


class MetricsLogger:
    """Writes the files of a run.

    `num_updates` > 0 resumes it: lines of later steps are cut off. With 0, existing files are kept
    under other names. Steps count from 1, and an evaluation is that of the step before it.
    log_to: the user's hook, see `run.log_to`."""

    def __init__(
        self, output_dir: str, num_updates: int, log_to: Callable[[dict], object] | None = None
    ):
        paths = (os.path.join(output_dir, name) for name in ("metrics.jsonl", "samples.jsonl"))
        self._lines, self._samples = (JsonLines(path, num_updates) for path in paths)
        self._tensorboard = TensorBoard(output_dir, num_updates + 1 if num_updates else 0)
        self._log_to, self._has_warned = log_to, False
        evaluations = (r for r in self._lines.records if any(k.startswith("eval/") for k in r))
        self._evaluated = {record["step"] for record in evaluations}

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Write a step: a line of metrics.jsonl, a point of each curve, and a call of the hook."""
        record = {"step": step, **metrics}
        if self._lines.write(record):
            self._tensorboard.write(step, metrics)
        if self._log_to is None:
            return
        try:
            with without_input():
                call(self._log_to, record)
        except BaseException as error:  # the user's own code, which may need a network
            if is_interrupt(error):
                raise
            if not self._has_warned:
                problem = f"run.log_to failed in step {step}: {one_line(error)}"
                log(f"warning: {problem}; the run continues")
            self._has_warned = True

    def log_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        """Write an evaluation after `step` updates, as a step is written.

        A resumed run that repeats an evaluation has its line already."""
        if step not in self._evaluated:
            self.log(step, metrics)

    def log_samples(
        self, record: StepRecord, names: list[str], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Write the first responses to a few prompts. names: of the reward functions."""
        firsts = range(0, len(record.samples), record.samples.num_generations)
        for index in firsts[:NUM_SAMPLES]:
            self._samples.write(describe(record, index, names, tokenizer))

    def close(self) -> None:
        """Write the lines that still wait, and close the files."""
        for file in (self._lines, self._samples, self._tensorboard):
            file.close()
