"""Metrics of a run on rank 0: metrics.jsonl and TensorBoard with the same keys.

A full disk does not end a run: lines wait in memory until they can be written. TensorBoard's curves
then have a gap.
"""

import itertools
import json
import math
import os
from typing import Any

import numpy as np

from bubblespec.errors import InputError, log
from bubblespec.records import ACCEPT_BINS
from bubblespec.telemetry.timeline import save_timeline
from bubblespec.types import Samples, is_sampled


class MetricsLogger:
    """`first_step` > 0 continues a run: later lines of the file are cut off first. With 0 a file
    that is there is kept under another name."""

    def __init__(self, output_dir: str, first_step: int):
        self.output_dir = output_dir
        path = os.path.join(output_dir, "metrics.jsonl")
        try:
            if first_step == 0:
                _keep_aside(path)
            records = _drop_steps_from(path, first_step)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (kept open for the run)
        except OSError as error:
            raise InputError(f"run.output_dir: cannot write to {path}: {error.strerror}") from error
        self._size = self._file.tell()  # bytes of whole lines
        self._waiting: list[str] = []  # lines that could not be written yet
        self._tensorboard = None
        self._is_drawing = True  # False after a failure, until a line can be written again
        self._purge_step = first_step  # curves from here on, of an earlier run, are hidden
        for record in records:
            if record["step"] == first_step:  # the purge has just hidden this evaluation's points
                self._write_scalars(record.pop("step"), record)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """One line of metrics.jsonl and one point of each curve; `step` counts finished steps from
        0."""
        self._write(step, metrics)
        counts = metrics.get("rollout/spec_accepted_lengths")
        if counts and sum(counts):
            lengths = np.repeat(ACCEPT_BINS, counts)
            self._draw("add_histogram", "rollout/spec_accepted_lengths", lengths, step)

    def log_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        """Evaluations are lines of their own: {"step": ..., "eval/...": ...}; `step` is the number
        of updates so far."""
        self._write(step, metrics)

    def log_samples(
        self, step: int, samples: Samples, rewards: np.ndarray, tokenizer, *, count: int = 4
    ) -> None:
        """Length histogram and a few completions with their rewards; of an episode all of it.
        rewards: float64 [S], combined."""
        self._draw("add_histogram", "completions/length", samples.num_sampled, step)
        chosen = np.linspace(0, len(samples) - 1, min(count, len(samples))).astype(int)
        for number, i in enumerate(chosen):
            prompt, reply = samples.prompt_of(i).text, reply_of(samples, i, tokenizer)
            text = f"reward {rewards[i]:.3f}\n\nprompt: {prompt}\n\ncompletion:\n{reply}"
            text = "    " + text.replace("\n", "\n    ")  # shown with its lines and spaces
            self._draw("add_text", f"sample_{number}", text, step)

    def log_timeline(self, step: int, lanes: list[np.ndarray], method: str) -> None:
        """A trace and a picture of one step; see `gather_lanes` for the lanes."""
        try:
            picture = save_timeline(self.output_dir, step, lanes, method)
        except OSError as error:
            log(f"warning: the timeline of step {step} could not be written: {error.strerror}")
            return
        self._draw("add_image", "timeline", picture, step, dataformats="HWC")

    def close(self) -> None:
        """Write what still waits, and close the files."""
        self._flush()
        self._file.close()
        if self._waiting:
            log(f"warning: the last {len(self._waiting)} lines of metrics.jsonl are lost")
        if self._tensorboard is not None:
            self._draw("close")

    def _write(self, step: int, metrics: dict[str, Any]) -> None:
        """JSON has no NaN and no infinity: such a value is null in the file."""
        line = {"step": step}
        for key, value in metrics.items():
            is_number = not isinstance(value, float | np.floating) or math.isfinite(value)
            line[key] = value if is_number else None
        self._waiting.append(json.dumps(line, allow_nan=False, default=np.generic.item) + "\n")
        self._flush()
        self._write_scalars(step, metrics)

    def _flush(self) -> None:
        """Append the lines that wait to the file. If the disk is full they wait for the next
        call."""
        data = "".join(self._waiting).encode()
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._file.truncate(self._size)  # no partial line stays
            if len(self._waiting) == 1:
                reason = f"metrics.jsonl cannot be written ({error.strerror})"
                log(f"warning: {reason}; its lines wait in memory")
            return
        self._size = self._file.tell()
        self._waiting = []
        self._is_drawing = True

    def _draw(self, method: str, *arguments, **options) -> None:
        """Call TensorBoard's writer. Errors, which its thread raises at a later call, disable it
        until a line can be written."""
        from torch.utils.tensorboard import SummaryWriter

        if not self._is_drawing:
            return
        try:
            if self._tensorboard is None:
                folder = os.path.join(self.output_dir, "tensorboard")
                self._tensorboard = SummaryWriter(folder, purge_step=self._purge_step)
                self._purge_step = None
            getattr(self._tensorboard, method)(*arguments, **options)
        except OSError as error:
            reason = f"TensorBoard's files cannot be written ({error.strerror})"
            log(f"warning: {reason}; its curves will have a gap")
            self._tensorboard, self._is_drawing = None, False

    def _write_scalars(self, step: int, metrics: dict[str, Any]) -> None:
        for key, value in metrics.items():
            if isinstance(value, int | float | np.generic):
                self._draw("add_scalar", key, value, step)


def reply_of(samples: Samples, index: int, tokenizer) -> str:
    """A sample's text; what an environment has said in it is between ⟦ and ⟧."""
    tokens, sampled = samples.tokens[index], is_sampled(samples.full_logprob[index])
    turns = np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(sampled)) + 1)
    texts = [tokenizer.decode(tokens[turn].tolist()) for turn in turns]
    marked = zip(texts, turns, strict=True)
    return "".join(text if sampled[turn[0]] else f"⟦{text}⟧" for text, turn in marked)


def _keep_aside(path: str) -> None:
    """Rename the metrics of an earlier run: one that starts from scratch would overwrite them."""
    if not os.path.exists(path) or not os.path.getsize(path):
        return
    kept = next(name for n in itertools.count(1) if not os.path.exists(name := f"{path}.{n}"))
    os.rename(path, kept)
    log(f"no checkpoint beside these metrics: starting from scratch; they are kept in {kept}")


def _drop_steps_from(path: str, first_step: int) -> list[dict]:
    """Drop the lines that an interrupted run wrote after its last checkpoint, as those steps are
    run again. Returns the remaining lines."""
    if not os.path.exists(path):
        return []
    records = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # torn by a kill
                continue
            # An evaluation at `first_step` was made before the step of that number, by the run that
            # saved the checkpoint.
            is_evaluation = "eval/reward" in record
            if record["step"] < first_step or (is_evaluation and record["step"] == first_step > 0):
                records.append(record)
    temporary = path + ".tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        # The last line may have lost its end.
        file.writelines(json.dumps(record) + "\n" for record in records)
    os.replace(temporary, path)
    return records
