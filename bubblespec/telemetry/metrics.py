"""Files of a run on rank 0: metrics.jsonl, samples.jsonl and TensorBoard; and the user's hook.

A full disk does not end a run: lines wait in memory until they can be written. TensorBoard's curves
then have a gap.
"""

import os
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from bubblespec.config.imports import call
from bubblespec.errors import is_interrupt, log, one_line
from bubblespec.records import StepRecord
from bubblespec.telemetry.files import JsonLines
from bubblespec.telemetry.samples import describe
from bubblespec.telemetry.tensorboard import TensorBoard

NUM_SAMPLES = 4  # prompts of a step, one response each


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
