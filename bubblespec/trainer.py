"""A run: its parts, how far it is, and what happens between two steps of its loop (train.py).
setup.py makes the parts."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from bubblespec.checkpoint import PLANNER_FILE, SPECULATION_FILE, save_checkpoint
from bubblespec.config import Config
from bubblespec.distributed.ranks import Ranks, StopRequested
from bubblespec.errors import RewardsFailed, SaveFailed, log
from bubblespec.learn.learner import Learner
from bubblespec.records import Span, StepRecord
from bubblespec.rewards.functions import RewardFunction
from bubblespec.rollout.evaluate import Evaluator
from bubblespec.rollout.sampler import Sampler
from bubblespec.telemetry import report as reports
from bubblespec.telemetry.console import Console
from bubblespec.telemetry.flops import ModelFlops, peak_flops
from bubblespec.telemetry.metrics import MetricsLogger
from bubblespec.telemetry.summary import Facts
from bubblespec.telemetry.timeline import gather_lanes
from bubblespec.telemetry.trace import Recorder, describe_hardware
from bubblespec.types import Group, Prompt, Samples, has_rewards

SAMPLE_STEPS = 10  # from one set of sample responses to the next


@dataclass(kw_only=True)
class Trainer:
    """The parts of a run, and how far it is."""

    config: Config
    ranks: Ranks
    sampler: Sampler
    evaluator: Evaluator
    learner: Learner
    tokenizer: PreTrainedTokenizerBase
    data: dict[str, np.ndarray]  # fingerprints, see `data_state`
    eval_prompts: list[Prompt]
    rewards: dict[str, RewardFunction]  # by dotted path
    num_updates: int  # done by now, by the run that this one continues as well
    saved: int  # updates in the newest checkpoint
    checkpoint: str | None  # folder of the checkpoint that the run continues
    evaluated: int  # updates before the last evaluation, or -1
    linear: dict | None  # kernels of linear layers, see `setup.choose_linear`
    lock: IO | None  # keeps output_dir ours; on rank 0
    console: Console  # of rank 0; on other ranks it shows nothing
    logger: MetricsLogger | None = None  # of rank 0, while the run is open
    recorder: Recorder | None = None  # where the run is recorded
    evaluation_samples: Samples | None = None  # of the last evaluation
    log_to: Callable[[dict], object] | None = None  # see `run.log_to`; of rank 0
    num_tokens: int = 0  # trained and replaced so far, prompts included
    elapsed_s: float = 0.0  # of earlier starts of this run, up to its checkpoint
    opened_s: float = 0.0  # when this start's loop began
    has_warned_of_missing: bool = False  # of groups that were left out

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Around the loop. It ends here when the run is told to stop, on all ranks alike: after an
        update, whose state is saved. A rollout or evaluation is abandoned, and made again, the
        same, by the continuation. RewardsFailed is raised once that is saved. Raises SaveFailed."""
        run = self.config.run
        self.opened_s = self.ranks.clock.perf_counter()
        if self.ranks.is_main:
            self.logger = MetricsLogger(run.output_dir, self.num_updates, self.log_to)
            self.console.start(self.facts())
        if run.trace:
            self.recorder = Recorder(self.config, self.ranks, self.num_updates)
        # Without this a collection takes 0.3 s, on each rank at another time, and makes stragglers.
        gc.collect()
        gc.freeze()
        is_stopped = False
        try:
            yield
        except (StopRequested, RewardsFailed) as end:
            is_stopped = True
            if self.saved != self.num_updates:
                self.save(is_last=isinstance(end, StopRequested))
            if isinstance(end, RewardsFailed):
                raise
        finally:
            gc.unfreeze()
            self.console.close()
            if self.logger is not None:
                self.logger.close()
        if self.ranks.is_main:
            newest = os.path.join(run.output_dir, f"checkpoint-{self.saved}")
            newest = newest if os.path.isdir(newest) else self.checkpoint
            self.console.end(self.num_updates, newest, is_stopped)

    def facts(self) -> Facts:
        """What this run is, for the console."""
        schedule, parameters = self.sampler.schedule, list(self.learner.model.parameters())
        return Facts(
            num_ranks=self.ranks.world_size,
            hardware=describe_hardware(self.ranks.device),
            kernel=self.learner.kernel,
            num_parameters=sum(p.numel() for p in parameters),
            num_trained=sum(p.numel() for p in parameters if p.requires_grad),
            num_prompts=len(schedule.prompts),
            num_held_out=len(self.eval_prompts),
            num_dropped=schedule.prompts.num_dropped,
            num_updates=self.num_updates,
            checkpoint=self.checkpoint,
            num_deferred=len(schedule.deferred),
        )

    def warm_start(self) -> None:
        """Finish the set-up of mechanisms. Raises StopRequested, InputError."""
        for mechanism in self.sampler.mechanisms:
            mechanism.start(self)
        if self.ranks.is_main:
            self.console.end_set_up(self.num_updates)

    def sample(self, step: int) -> StepRecord:
        """The step's samples and rewards, the same on all ranks. Raises StopRequested."""
        timeline_steps = self.config.run.timeline_steps
        if step in timeline_steps or step - 1 in timeline_steps:
            self.ranks.barrier()  # lanes begin together; drawing does not count as idle time
        record = self.sampler.sample(step)
        self.warn_of_missing(record.generated.groups, record.all_rewards, f"step {step}")
        return record

    def warn_of_missing(self, groups: list[Group], rewards: np.ndarray, when: str) -> None:
        """Warn, once per run, of groups that are left out for want of a reward. rewards: float64
        [groups, generations]."""
        missing = np.flatnonzero(~has_rewards(rewards)).tolist()
        if not missing or self.has_warned_of_missing:
            return
        self.has_warned_of_missing = True
        if self.ranks.is_main:
            prompt = groups[missing[0]].prompt
            log(
                f"warning: {when}: {len(missing)} of {len(groups)} prompts have responses without "
                "a reward and are left out; the first is "
                f"{prompt.uid}, {str(prompt.text)!r:.100} (rewards/NAME/missing, "
                "reward/left_out)"
            )

    def update(self, record: StepRecord, advantages: np.ndarray) -> dict[str, float]:
        """All updates of a step; see `Learner.update`. advantages: float64 [S]. Not left half done
        when the run is told to stop. Raises RunFailed after too many steps without an update."""
        self.ranks.place = f"training of step {record.step}"
        if "." in self.config.loss.advantage_estimator:  # a user's own may differ between ranks
            advantages = self.ranks.gather(advantages)[0]
        record.advantages = advantages
        if self.config.rollout.free_cache_engine:
            self.sampler.engine.release()
        metrics, spans = self.learner.update(record.samples, advantages, record.step)
        if self.config.reward.overlong_buffer_length:
            penalties = self.sampler.overlong(record.samples.lengths)
            metrics["rewards/overlong_penalty/mean"] = float(penalties.mean())
        self.num_updates = record.step + 1
        record.spans.extend(spans)
        now_s = self.ranks.clock.perf_counter()
        record.stages.append(Span("train", record.stages[-1].end_s, now_s))
        return metrics

    def report(self, record: StepRecord, metrics: dict[str, float]) -> None:
        """Write the step's numbers, and whatever else is wanted of it: samples, timeline, trace.
        metrics: of the update."""
        ranks, run, step, sampler = self.ranks, self.config.run, record.step, self.sampler
        is_dynamic = self.config.rollout.dynamic_sampling_max_batches > 1
        metrics |= reports.rollout_metrics(record, sampler.scorer.names, is_dynamic=is_dynamic)
        metrics |= sampler.scorer.take_metrics() | sampler.schedule.metrics()
        if sampler.proposer is None:
            metrics |= reports.forward_metrics(ranks, record)
        else:
            drafts = {"accepted_by_age": sampler.stats.survival.by_age, "store_tokens": None}
            if "bubble" in self.config.speculative.sources or self.config.tail_batching.enabled:
                drafts["store_tokens"] = sampler.store.num_tokens
            metrics |= reports.speculation_metrics(ranks, record, **drafts)
        metrics |= reports.timing_metrics(ranks, record, metrics.pop("timing_s/sync"))
        metrics |= reports.placement_metrics(ranks, record)
        if sampler.needs_timings:
            metrics |= sampler.stats.metrics()
        metrics |= reports.idle_metrics(ranks, record)
        for mechanism in sampler.mechanisms:
            metrics |= mechanism.metrics(ranks, record)
        metrics["perf/max_memory_gb"] = reports.peak_memory_gb(ranks)
        metrics |= self.progress_metrics(record, metrics)
        if self.recorder is not None:
            self.recorder.write(record)
        if step in run.timeline_steps:
            spans = [span for rollout in record.rollouts for span in rollout.spans] + record.spans
            lanes = gather_lanes(ranks, sorted(spans, key=lambda span: span.begin_s), record.stages)
        if self.logger is None:
            return
        self.logger.log(step, metrics)
        self.console.show_step(step, metrics)
        if step % SAMPLE_STEPS == 0 or step == run.max_steps - 1:
            names = reports.short_names(sampler.scorer.names)
            self.logger.log_samples(record, names, self.tokenizer)
        if step in run.timeline_steps:
            is_long, title = metrics.get("tail/is_long_round"), self.config.speculative.method
            title += "" if is_long is None else (", long round" if is_long else ", short round")
            self.logger.log_timeline(step, lanes, title)

    def progress_metrics(self, record: StepRecord, metrics: dict[str, float]) -> dict[str, float]:
        """How far the run is, and how well it uses GPUs whose peak is known. metrics: of the
        step."""
        schedule, ranks, device = self.sampler.schedule, self.ranks, self.ranks.device
        self.num_tokens += metrics["perf/total_num_tokens"]
        found = {"epoch": schedule.epoch, **self.progress()}
        found["timing_s/elapsed"] = found.pop("elapsed_s")
        if schedule.prompts.num_dropped:
            found["data/num_dropped"] = schedule.prompts.num_dropped
        if device.type != "cuda":
            return found
        model = self.learner.model
        peak, of_model = (
            peak_flops(torch.cuda.get_device_name(device), model.dtype),
            ModelFlops.of(model),
        )
        if peak is not None and of_model is not None:
            has_gradient = self.learner.has_gradient(record.samples, record.advantages)
            passes = (2 if self.config.model.lora_r else 3) * self.config.loss.num_iterations
            flops = of_model.step(record.generated, record.samples, has_gradient, passes)
            found["perf/mfu"] = flops / (metrics["timing_s/step"] * peak * ranks.world_size)
        return found

    def progress(self) -> dict[str, float]:
        """Sums over the run so far, those before an interruption included."""
        elapsed_s = self.elapsed_s + self.ranks.clock.perf_counter() - self.opened_s
        return {"num_tokens": self.num_tokens, "elapsed_s": elapsed_s}

    def evaluate_if_due(self) -> None:
        """Evaluate where run.eval_steps wants it; what was evaluated before the run was interrupted
        is not evaluated again."""
        run, done = self.config.run, self.num_updates
        is_due = run.eval_steps and (done % run.eval_steps == 0 or done == run.max_steps)
        if is_due and self.evaluated != done:
            with self.console.phase("evaluating"):
                metrics = self.evaluate()
            if self.logger is not None:
                self.logger.log_evaluation(done, metrics)
                parts = (self.evaluation_samples, self.sampler.scorer.names, self.tokenizer)
                self.console.show_evaluation(done, metrics, *parts)

    def evaluate(self) -> dict[str, float | str]:
        """Evaluate on the held-out prompts, under noise that is the same at every evaluation.
        Raises StopRequested: the evaluation is still to be made."""
        self.ranks.place = f"evaluation after {self.num_updates} updates"
        evaluation = self.evaluator.evaluate(self.eval_prompts, self.num_updates)
        self.warn_of_missing(evaluation.samples.groups, evaluation.rewards, self.ranks.place)
        self.evaluated, self.evaluation_samples = self.num_updates, evaluation.samples
        return evaluation.metrics

    def save_if_due(self) -> None:
        """Save where run.save_steps wants it, and at the end."""
        run, done = self.config.run, self.num_updates
        is_last = done == run.max_steps
        if is_last or (run.save_steps and done % run.save_steps == 0):
            self.save(is_last)

    def save(self, is_last: bool) -> None:
        """Save a checkpoint. Called by all ranks: they go on together once it is on disk. If that
        fails the run goes on, with a warning; but if this is its last save, raises SaveFailed."""
        done = self.num_updates
        self.ranks.place = f"save after {done} updates"
        with self.console.phase(f"saving checkpoint-{done}"):
            sampler = self.sampler
            problem = save_checkpoint(
                self.config,
                self.ranks,
                {
                    "step": done,
                    "evaluated": self.evaluated,
                    "linear": self.linear,
                    "progress": self.progress(),
                },
                model=self.learner.model,
                tokenizer=self.tokenizer,
                optimizer=self.learner.optimizer,
                arrays={
                    PLANNER_FILE: sampler.schedule.state_dict() | self.data,
                    SPECULATION_FILE: sampler.state_dict() | self.evaluator.state_dict(),
                },
                writers=[mechanism.save for mechanism in sampler.mechanisms],
            )
        if problem is None:
            self.saved = done
            return
        newest = f"checkpoint-{self.saved}" if self.saved else "none"
        line = f"checkpoint-{done} could not be saved: {problem}; the newest checkpoint is {newest}"
        if is_last:
            raise SaveFailed(line)
        if self.ranks.is_main:
            log(f"warning: {line}; the run continues")
