"""Files of a run on rank 0: metrics.jsonl, samples.jsonl and TensorBoard; and the user's hook.

A full disk does not end a run: lines wait in memory until they can be written. TensorBoard's curves
then have a gap.
"""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from bubblespec.errors import is_interrupt, log, one_line
from bubblespec.imports import call
from bubblespec.records import ACCEPT_BINS, StepRecord
from bubblespec.telemetry.lines import JsonLines
from bubblespec.telemetry.samples import as_text, choose, describe
from bubblespec.telemetry.table import tag_of
from bubblespec.telemetry.tensorboard import TensorBoard, layout_of
from bubblespec.telemetry.timeline import save_timeline

ACCEPTED_LENGTHS = "rollout/spec_accepted_lengths"


def is_evaluation(record: dict[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is an evaluation's, not a step's."""
    return any(key.startswith("eval/") for key in record)


class MetricsLogger:
    """Writes the files of a run.

    `num_updates` > 0 resumes it: lines of later steps are cut off. With 0, existing files are kept
    under other names. Steps count from 1, and an evaluation is that of the step before it.
    log_to: the user's hook, see `run.log_to`."""

    def __init__(
        self, output_dir: str, num_updates: int, log_to: Callable[[dict], object] | None = None
    ):
        self.output_dir = output_dir

        def is_kept(record: dict) -> bool:
            return record["step"] <= num_updates

        paths = (os.path.join(output_dir, name) for name in ("metrics.jsonl", "samples.jsonl"))
        self._lines, self._samples = (JsonLines(path, num_updates, is_kept) for path in paths)
        self._tensorboard = TensorBoard(output_dir, num_updates + 1 if num_updates else 0)
        self._log_to, self._has_warned = log_to, False
        self._tags: set[str] = set()  # tags of evaluations, until the first step draws its layout
        self._has_layout = False
        self._evaluated: set[int] = set()  # steps whose evaluations are in the file
        for record in self._lines.records:
            if is_evaluation(record):
                self._evaluated.add(record["step"])
                self._tags.update(map(tag_of, record))
        self._shown = Counter(sample["uid"] for sample in self._samples.records)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Write a step: a line of metrics.jsonl and a point of each curve."""
        if not self._has_layout:  # TensorBoard takes the first of a run
            self._tags.update(map(tag_of, metrics))
            self._tensorboard.draw("add_custom_scalars", layout_of(self._tags))
            self._has_layout = True
        self._write(step, metrics)
        counts = metrics.get(ACCEPTED_LENGTHS)
        if counts and sum(counts):
            lengths = np.repeat(ACCEPT_BINS, counts)
            self._tensorboard.draw("add_histogram", tag_of(ACCEPTED_LENGTHS), lengths, step)

    def log_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        """Write an evaluation after `step` updates as a line of its own.

        A resumed run that repeats an evaluation has its line already."""
        if step not in self._evaluated:
            self._tags.update(map(tag_of, metrics))
            self._write(step, metrics)

    def log_samples(
        self, record: StepRecord, names: list[str], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Write a few responses with their rewards, and a histogram of lengths.

        names: of the reward functions."""
        samples, step = record.samples, record.step + 1
        self._tensorboard.draw("add_histogram", "completions/length", samples.num_sampled, step)
        for number, index in enumerate(choose(samples, self._shown)):
            sample = describe(record, index, names, tokenizer)
            self._samples.write(sample)
            self._tensorboard.draw("add_text", f"sample_{number}", as_text(sample), step)

    def log_timeline(self, step: int, lanes: list[np.ndarray], method: str) -> None:
        """Write a trace and a picture of one step. lanes: see `gather_lanes`."""
        try:
            picture = save_timeline(self.output_dir, step, lanes, method)
        except OSError as error:
            log(f"warning: the timeline of step {step} could not be written: {error.strerror}")
            return
        self._tensorboard.draw("add_image", "timeline", picture, step, dataformats="HWC")

    def close(self) -> None:
        """Write the lines that still wait, and close the files."""
        for file in (self._lines, self._samples, self._tensorboard):
            file.close()

    def _write(self, step: int, metrics: dict[str, Any]) -> None:
        record = {"step": step, **metrics}
        if self._lines.write(record):
            self._tensorboard.resume()
        self._tensorboard.scalars(step, metrics)
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
