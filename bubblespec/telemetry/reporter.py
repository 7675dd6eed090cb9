"""Reports of a run: metrics of its steps, samples, timelines, traces, and the console."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from transformers import PreTrainedTokenizerBase

from bubblespec.config import Config
from bubblespec.data.schedule import StepSchedule
from bubblespec.distributed.ranks import Ranks
from bubblespec.learn.learner import Learner
from bubblespec.records import StepRecord
from bubblespec.samples import Samples
from bubblespec.telemetry import report
from bubblespec.telemetry.console import Console
from bubblespec.telemetry.flops import ModelFlops, peak_flops
from bubblespec.telemetry.metrics import MetricsLogger
from bubblespec.telemetry.profiler import StepProfiler
from bubblespec.telemetry.rollouts import Rollouts
from bubblespec.telemetry.summary import Facts
from bubblespec.telemetry.timeline import gather_lanes
from bubblespec.telemetry.trace import Recorder, describe_hardware

SAMPLE_STEPS = 10  # from one set of sample responses to the next


class RunReporter:
    """Reports of one run, on all ranks; rank 0 alone shows and writes."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        console: Console,
        learner: Learner,
        schedule: StepSchedule,
        tokenizer: PreTrainedTokenizerBase,
        functions: list[str],
        num_held_out: int,
        log_to: Callable[[dict], object] | None,
    ):
        """functions: names of the rewards; log_to: the user's hook of `run.log_to`, on rank 0."""
        self.config, self.ranks, self.console, self.learner = config, ranks, console, learner
        self.schedule, self.tokenizer, self.functions = schedule, tokenizer, functions
        self.num_held_out, self.log_to = num_held_out, log_to
        self.logger: MetricsLogger | None = None  # of rank 0, while the run is open
        self.rollouts: Rollouts | None = None  # of rank 0, where run.save_rollouts is set
        self.profiler = StepProfiler(config.run.output_dir, ranks)
        self.recorder: Recorder | None = None  # where run.trace is set

    def phase(self, name: str) -> AbstractContextManager:
        """Context that shows what the run does in it."""
        return self.console.phase(name)

    def start(self, num_updates: int, checkpoint: str | None) -> None:
        """Show what is about to run, and open the files. checkpoint: folder that is resumed."""
        if self.ranks.is_main:
            self.logger = MetricsLogger(self.config.run.output_dir, num_updates, self.log_to)
            if self.config.run.save_rollouts:
                self.rollouts = Rollouts(self.config.run.output_dir, num_updates)
            parameters = list(self.learner.model.parameters())
            facts = Facts(
                num_ranks=self.ranks.world_size,
                hardware=describe_hardware(self.ranks.device),
                kernel=self.learner.kernel,
                num_parameters=sum(p.numel() for p in parameters),
                num_trained=sum(p.numel() for p in parameters if p.requires_grad),
                num_prompts=len(self.schedule.prompts),
                num_held_out=self.num_held_out,
                num_dropped=self.schedule.prompts.num_dropped,
                num_duplicates=self.schedule.prompts.num_duplicates,
                num_updates=num_updates,
                checkpoint=checkpoint,
                num_deferred=len(self.schedule.deferred),
            )
            self.console.start(facts)
        if self.config.run.trace:
            self.recorder = Recorder(self.config, self.ranks, num_updates)

    def end_set_up(self, num_updates: int) -> None:
        """Show what set-up took."""
        if self.ranks.is_main:
            self.console.end_set_up(num_updates)

    def begin_step(self, step: int) -> None:
        """Begin to profile a step (from 0) of run.profile_steps."""
        if step + 1 in self.config.run.profile_steps:
            self.profiler.begin()

    def report(self, record: StepRecord, metrics: dict[str, float]) -> None:
        """Report a step. metrics: of everything that is not measured here."""
        ranks, run, step = self.ranks, self.config.run, record.step + 1  # counted from 1
        self.profiler.end(step)
        is_dynamic = self.config.rollout.dynamic_sampling_max_batches > 1
        metrics |= report.rollout_metrics(record, self.functions, is_dynamic=is_dynamic)
        if self.config.speculative.sources or self.config.tail_batching.enabled:
            has_store = "bubble/store_tokens" in metrics
            metrics |= report.speculation_metrics(ranks, record, has_store=has_store)
        else:
            metrics |= report.forward_metrics(ranks, record)
        metrics |= report.timing_metrics(ranks, record, metrics.pop("timing_s/sync"))
        metrics |= report.placement_metrics(ranks, record) | report.idle_metrics(ranks, record)
        metrics["perf/max_memory_gb"] = report.peak_memory_gb(ranks)
        if (mfu := self._mfu(record, metrics["timing_s/step"])) is not None:
            metrics["perf/mfu"] = mfu
        if self.recorder is not None:
            self.recorder.write(record)
        if step in run.timeline_steps:
            spans = [span for rollout in record.rollouts for span in rollout.spans] + record.spans
            lanes = gather_lanes(ranks, sorted(spans, key=lambda span: span.begin_s), record.stages)
        if self.logger is None:
            return
        self.logger.log(step, metrics)
        self.console.show_step(step, metrics)
        if record.step % SAMPLE_STEPS == 0 or step == run.max_steps:
            self.logger.log_samples(record, report.short_names(self.functions), self.tokenizer)
        if self.rollouts is not None:
            self.rollouts.write(record, report.short_names(self.functions), self.tokenizer)
        if step in run.timeline_steps:
            is_long, title = metrics.get("tail/is_long_round"), self.config.speculative.method
            title += "" if is_long is None else (", long round" if is_long else ", short round")
            self.logger.log_timeline(step, lanes, title)

    def report_evaluation(self, num_updates: int, metrics: dict, samples: Samples) -> None:
        """Report an evaluation after `num_updates` updates."""
        if self.logger is not None:
            self.logger.log_evaluation(num_updates, metrics)
            functions = self.functions + self.config.eval.functions
            self.console.show_evaluation(num_updates, metrics, samples, functions, self.tokenizer)

    def close(self) -> None:
        """Close files and console, however the run ends."""
        self.profiler.end(None)
        self.console.close()
        if self.logger is not None:
            self.logger.close()

    def end(self, num_updates: int, checkpoint: str | None, is_stopped: bool) -> None:
        """Show the summary of a run that is complete or stopped. checkpoint: the newest folder."""
        if self.ranks.is_main:
            self.console.end(num_updates, checkpoint, is_stopped)

    def _mfu(self, record: StepRecord, step_s: float) -> float | None:
        """Return the share of the GPUs' peak that a step has used; None if the peak is unknown."""
        if self.ranks.device.type != "cuda":
            return None
        model, teacher = self.learner.model, self.learner.teacher
        peak = peak_flops(torch.cuda.get_device_name(self.ranks.device), model.dtype)
        models = [ModelFlops.of(model)]
        models += [] if teacher is None else [ModelFlops.of(teacher.model)]
        if peak is None or None in models:
            return None
        has_gradient = self.learner.has_gradient(record.samples, record.advantages)
        num_iterations = self.config.loss.num_iterations
        passes = (2 if self.config.model.lora_r else 3) * num_iterations
        flops = models[0].step(record.generated, record.samples, has_gradient, passes)
        for other in models[1:]:
            flops += num_iterations * other.of_samples(record.samples, has_gradient)
        return flops / (step_s * peak * self.ranks.world_size)
