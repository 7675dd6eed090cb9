"""Reports of a run: its lines on the screen, its metrics, samples, timelines, traces, profiles."""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from bubblespec.config import Config
from bubblespec.data.schedule import StepSchedule
from bubblespec.distributed.ranks import Ranks
from bubblespec.errors import log
from bubblespec.learn.learner import Learner
from bubblespec.metrics import over_ranks
from bubblespec.progress import note
from bubblespec.records import Samples, StepRecord
from bubblespec.telemetry import report, summary
from bubblespec.telemetry.files import (
    PACKAGES,
    MetricsLogger,
    StepFiles,
    begin_logging,
    completion_of,
    save_rollouts,
)
from bubblespec.telemetry.timeline import gather_lanes, save_timeline
from bubblespec.telemetry.trace import Recorder

SAMPLE_STEPS = 10  # from one set of sample responses, or line about drafts, to the next


@contextlib.contextmanager
def show_phase(ranks: Ranks, name: str) -> Iterator[None]:
    """Show what a run does in this context, as it begins."""
    note(name)
    if ranks.is_main:
        log(f"{name} ...")
    yield


def save_profile(running: torch.profiler.profile, output_dir: str, step: int, rank: int) -> None:
    """Write the trace of a step (from 1). An error is a warning."""
    running.stop()
    path = os.path.join(output_dir, "profile", f"step-{step:05d}-rank-{rank}.json")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        running.export_chrome_trace(f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
    except (OSError, RuntimeError) as error:  # torch's exporter raises RuntimeError
        log(f"warning: {path} could not be written: {error}")


@dataclass
class RunReporter:
    """Reports of one run, on all ranks; rank 0 alone shows and writes."""

    config: Config
    ranks: Ranks
    learner: Learner
    schedule: StepSchedule
    tokenizer: PreTrainedTokenizerBase
    functions: list[str]  # names of the rewards
    num_held_out: int
    log_to: Any  # the user's hook, or the module, of `run.log_to`, on rank 0
    began_s: float  # time.monotonic as set-up began
    history: summary.History = field(default_factory=summary.History)
    hinted: set[str] = field(default_factory=set)
    logger: MetricsLogger | None = None  # of rank 0, while the run is open
    rollouts: StepFiles | None = None  # of rank 0, where run.save_rollouts is set
    recorder: Recorder | None = None  # where run.trace is set
    profile: torch.profiler.profile | None = None  # of a step that is profiled

    def phase(self, name: str) -> AbstractContextManager:
        return show_phase(self.ranks, name)

    def start(self, num_updates: int, checkpoint: str | None) -> None:
        """Show what is about to run, and open the files. checkpoint: folder that is resumed.

        Raises InputError if the package of run.log_to does not begin a run."""
        config, ranks, prompts = self.config, self.ranks, self.schedule.prompts
        if config.run.log_to in PACKAGES:
            ranks.run_on_rank0(self._begin_logging)
        if ranks.is_main:
            self.logger = MetricsLogger(config.run.output_dir, num_updates, self.log_to)
            if config.run.save_rollouts:
                folder = os.path.join(config.run.output_dir, "rollouts")
                self.rollouts = StepFiles(folder, num_updates, "run.save_rollouts", True)
            log(summary.start_text(config, ranks, self.learner, prompts, self.num_held_out))
            log(summary.output_text(config, num_updates, checkpoint))
        if config.run.trace:
            self.recorder = Recorder(config, ranks, num_updates)

    def _begin_logging(self) -> None:
        self.log_to = begin_logging(self.log_to, self.config)

    def end_set_up(self) -> None:
        self.history.set_up_s = time.monotonic() - self.began_s
        if self.ranks.is_main:
            log(f"set-up took {summary.duration(self.history.set_up_s)}")

    def begin_step(self, step: int) -> None:
        """step: from 0."""
        if step + 1 in self.config.run.profile_steps:
            self.profile = torch.profiler.profile()  # on a GPU of its kernels, too
            self.profile.start()

    def report(self, record: StepRecord, metrics: dict[str, float]) -> None:
        """Report a step. metrics: of this rank, of everything that is not measured here."""
        ranks, run, step = self.ranks, self.config.run, record.step + 1  # counted from 1
        if self.profile is not None:
            save_profile(self.profile, run.output_dir, step, ranks.rank)
            self.profile = None
        is_dynamic = self.config.rollout.dynamic_sampling_max_batches > 1
        metrics |= report.rollout_metrics(record, self.functions, is_dynamic=is_dynamic)
        metrics |= report.rank_metrics(ranks, record, metrics["timing_s/sync"])
        if self.config.has_drafts:
            has_store = self.config.keeps_drafts
            metrics |= report.speculation_metrics(ranks, record, has_store=has_store)
        metrics = over_ranks(metrics, ranks.gather_text)
        step_s = metrics["timing_s/step"]
        metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / step_s / ranks.world_size
        metrics |= report.mfu(self.learner, ranks, record, step_s)
        if self.recorder is not None:
            self.recorder.write(record)
        if step in run.timeline_steps:
            spans = [span for rollout in record.rollouts for span in rollout.spans] + record.spans
            lanes = gather_lanes(ranks, sorted(spans, key=lambda span: span.begin_s), record.stages)
        if self.logger is None:
            return
        self.logger.log(step, metrics)
        self.show_step(step, metrics)
        names = report.short_names(self.functions)
        if record.step % SAMPLE_STEPS == 0 or step == run.max_steps:
            self.logger.log_samples(record, names, self.tokenizer)
        if self.rollouts is not None:
            save_rollouts(self.rollouts, record, names, self.tokenizer)
        if step in run.timeline_steps:
            save_timeline(run.output_dir, step, lanes, self.config.speculative.method)

    def show_step(self, step: int, metrics: dict) -> None:
        """step: from 1."""
        last = self.config.run.max_steps
        self.history.add(metrics)
        log(summary.step_text(step, last, metrics, self.history))
        if step % SAMPLE_STEPS == 0 and step < last:
            latest = self.history.steps[-SAMPLE_STEPS:]
            if text := summary.drafts_text(latest):
                log(f"drafts of the last {len(latest)} steps: {text}")
        for name, hint in summary.find_hints(self.config, self.history).items():
            if name not in self.hinted:
                log(f"hint: after step {step}: {hint}")
                self.hinted.add(name)

    def report_evaluation(self, num_updates: int, metrics: dict, samples: Samples) -> None:
        """Report an evaluation after `num_updates` updates, with the reply to its first prompt."""
        if self.logger is None:
            return
        self.logger.log_evaluation(num_updates, metrics)
        self.history.evaluations.append(metrics)
        names = report.short_names(self.functions + self.config.eval.functions)
        rewards = dict(zip(names, samples.rewards[0].tolist(), strict=True))
        prompt, reply = samples.prompt_of(0), completion_of(samples, 0, self.tokenizer)
        log(summary.evaluation_text(num_updates, metrics))
        log(summary.sample_text(prompt.text, reply, rewards, prompt.columns))

    def close(self) -> None:
        if self.profile is not None:  # of a step that was abandoned
            self.profile.stop()
        if self.logger is not None:
            self.logger.close()

    def end(self, num_updates: int, checkpoint: str | None, is_stopped: bool) -> None:
        """checkpoint: the newest folder."""
        if self.ranks.is_main:
            parts = (time.monotonic() - self.began_s, num_updates, checkpoint, is_stopped)
            log(summary.end_text(self.config, self.history, *parts))
