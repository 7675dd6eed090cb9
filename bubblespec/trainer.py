"""A run: its parts, made by setup.py, its progress, and the verbs of its loop (train.py)."""

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from bubblespec.checkpoint import (
    BEST,
    PLANNER_FILE,
    SPECULATION_FILE,
    STATE_FILE,
    read_state,
    remove_checkpoint,
    save_checkpoint,
)
from bubblespec.config import Config
from bubblespec.distributed.ranks import Ranks, StopRequested
from bubblespec.errors import (
    EndsRun,
    InputError,
    RewardsFailed,
    RunFailed,
    gpu_problem,
    log,
    one_line,
)
from bubblespec.learn.learner import Learner
from bubblespec.planner.stats import state_of
from bubblespec.progress import note
from bubblespec.records import Span, StepRecord, has_rewards
from bubblespec.rollout.evaluate import Evaluation, Evaluator, numbers_of_samples
from bubblespec.rollout.sampler import Sampler
from bubblespec.telemetry.report import short_names
from bubblespec.types import Group, Prompt


@dataclass(kw_only=True)
class Trainer:
    """The parts of a run, and its progress."""

    config: Config
    ranks: Ranks
    sampler: Sampler
    evaluator: Evaluator
    learner: Learner
    reporter: Any
    """A `RunReporter` (telemetry/reporter.py), which this file does not need to know."""
    tokenizer: PreTrainedTokenizerBase
    data: dict[str, np.ndarray]
    """Fingerprints of data and frozen weights, see `data_state` and `weights_state`."""
    eval_prompts: list[Prompt]
    checkpoint: str | None
    """Folder that the run resumes."""
    chosen: dict[str, Any]
    """Choices of mechanisms at the start, which a resumed run keeps."""
    lock: IO | None
    """Lock of output_dir, on rank 0."""
    num_updates: int
    """Updates so far, those before a resume included."""
    saved: int
    """Updates in the newest checkpoint."""
    evaluated: int
    """Updates before the last evaluation, or -1."""
    best: dict | None = None
    """Metric, value and step of the best evaluation so far, by run.save_best."""
    num_tokens: int = 0
    """Prompt and response tokens of all steps so far."""
    elapsed_s: float = 0.0
    """Seconds of earlier starts of this run, up to the checkpoint."""
    opened_s: float = 0.0
    """Time at which this start's loop began."""
    is_updating: bool = False
    """Whether an update has begun and not ended: weights may be half updated."""
    has_warned_of_missing: bool = False
    """Whether there was a warning of groups without rewards."""

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Context of the training loop.

        On a stop request all ranks save and leave after the current update; a rollout or evaluation
        in progress is discarded and repeated on resume. Raises RewardsFailed, after a save, and
        RunFailed."""
        self.opened_s = self.ranks.clock.perf_counter()
        self.reporter.start(self.num_updates, self.checkpoint)
        # Otherwise a collection takes 0.3 s, on each rank at another time, and makes stragglers.
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
        except Exception as error:
            if not isinstance(error, EndsRun) and gpu_problem(error) is not None:
                self.rescue()
            raise
        finally:
            gc.unfreeze()
            self.reporter.close()
        newest = os.path.join(self.config.run.output_dir, f"checkpoint-{self.saved}")
        folder = newest if os.path.isdir(newest) else self.checkpoint
        self.reporter.end(self.num_updates, folder, is_stopped)

    def rescue(self) -> None:
        """Save before the run ends, if what has failed on the GPU leaves the last update whole.

        Not with several ranks: the others wait in a step that this one will not reach."""
        if self.is_updating or self.saved == self.num_updates or self.ranks.world_size > 1:
            return
        activity = self.ranks.activity
        try:
            self.sampler.engine.release()
            if self.ranks.device.type == "cuda":
                torch.cuda.empty_cache()
            self.save(is_last=False)
        except Exception as second:  # nothing on the GPU can be read any more
            log(f"warning: checkpoint-{self.num_updates} could not be saved: {one_line(second)}")
        self.ranks.activity = activity  # for the line about the error

    def warm_start(self) -> None:
        """Finish the set-up of mechanisms. Raises StopRequested, InputError."""
        for mechanism in self.sampler.mechanisms:
            mechanism.start(self)
        self.reporter.end_set_up()

    def sample(self, step: int) -> StepRecord:
        """Return the step's samples and rewards, the same on all ranks. Raises StopRequested."""
        timeline_steps = self.config.run.timeline_steps
        if step + 1 in timeline_steps or step in timeline_steps:
            self.ranks.barrier()  # lanes begin together; drawing does not count as idle time
        self.reporter.begin_step(step)
        self.sampler.scorer.progress = (step, self.config.run.max_steps)
        record = self.sampler.sample(step)
        self.warn_of_missing(record.generated.groups, record.all_rewards, f"step {step + 1}")
        return record

    def warn_of_missing(self, groups: list[Group], rewards: np.ndarray, when: str) -> None:
        """Warn, once per run, of groups without rewards. rewards: float64 [groups, generations]."""
        missing = np.flatnonzero(~has_rewards(rewards)).tolist()
        if not missing or self.has_warned_of_missing:
            return
        self.has_warned_of_missing = True
        if self.ranks.is_main:
            prompt = groups[missing[0]].prompt
            log(
                f"warning: {when}: {len(missing)} of {len(groups)} prompts have responses without "
                "a reward and are left out; the first is "
                f"{prompt.prompt_id}, {str(prompt.text)!r:.100} (rewards/NAME/missing, "
                "reward/left_out)"
            )

    def update(self, record: StepRecord, advantages: np.ndarray) -> dict[str, float]:
        """Apply all updates of a step, also after a stop request; see `Learner.update`.

        Raises RunFailed after too many steps without an update."""
        self.ranks.activity = f"training of step {record.step + 1}"
        note(f"step {record.step + 1}: training")
        if "." in self.config.loss.advantage_estimator:  # a user's own may differ between ranks
            advantages = self.ranks.all_gather(advantages)[0]
        record.advantages = advantages
        if self.config.rollout.free_cache_engine:
            self.sampler.engine.release()
        self.is_updating = True
        metrics, spans = self.learner.update(record.samples, advantages, record.step)
        if self.config.reward.overlong_buffer_length:
            penalties = self.sampler.overlong(record.samples.lengths)
            metrics["rewards/overlong_penalty/mean"] = float(penalties.mean())
        self.num_updates, self.is_updating = record.step + 1, False
        record.spans.extend(spans)
        now_s = self.ranks.clock.perf_counter()
        record.stages.append(Span("train", record.stages[-1].end_s, now_s))
        return metrics

    def report(self, record: StepRecord, metrics: dict[str, float]) -> None:
        """metrics: of the update."""
        sampler, schedule = self.sampler, self.sampler.schedule
        metrics |= sampler.scorer.take_metrics() | schedule.metrics()
        record.logged = sampler.scorer.take_logged()
        if sampler.needs_timings:
            metrics |= sampler.stats.metrics()
        for mechanism in sampler.mechanisms:
            metrics |= mechanism.metrics(self.ranks, record)
        self.num_tokens += record.generated.num_tokens
        metrics |= {"epoch": schedule.epoch, "num_tokens": self.num_tokens}
        metrics["timing_s/elapsed"] = self.progress()["elapsed_s"]
        if schedule.prompts.num_dropped:
            metrics["data/num_dropped"] = schedule.prompts.num_dropped
        if sampler.proposer is not None:
            for age, share in sorted(sampler.stats.survival.by_age.items()):
                metrics[f"drafts/accept_rate/age_{age}"] = share
            if self.config.keeps_drafts:
                metrics["bubble/store_tokens"] = sampler.store.num_tokens
        self.reporter.report(record, metrics)

    def progress(self) -> dict[str, float]:
        elapsed_s = self.elapsed_s + self.ranks.clock.perf_counter() - self.opened_s
        return {"num_tokens": self.num_tokens, "elapsed_s": elapsed_s}

    def evaluate_if_due(self) -> None:
        run, done = self.config.run, self.num_updates
        is_due = run.eval_steps and (done % run.eval_steps == 0 or done == run.max_steps)
        if is_due and self.evaluated != done:
            with self.reporter.phase("evaluating"):
                evaluation = self.evaluate()
            self.reporter.report_evaluation(done, evaluation.metrics, evaluation.samples)
            self.save_if_best(evaluation.metrics)

    def evaluate(self) -> Evaluation:
        """Evaluate on the held-out prompts. Raises StopRequested, before it counts as made."""
        self.ranks.activity = f"evaluation after {self.num_updates} updates"
        self.sampler.scorer.progress = (self.num_updates, self.config.run.max_steps)
        evaluation = self.evaluator.evaluate(self.eval_prompts, self.num_updates)
        self.warn_of_missing(evaluation.samples.groups, evaluation.rewards, self.ranks.activity)
        self.evaluated = self.num_updates
        return evaluation

    def save_if_best(self, metrics: dict[str, float | str]) -> None:
        """Save if an evaluation is better than those after all earlier steps, by run.save_best.

        The initial policy does not count: it has no checkpoint."""
        name, done, before = self.config.run.save_best, self.num_updates, self.best
        if name is None or not done:
            return
        value = metrics.get(name)
        if not isinstance(value, float):  # its function has no value for any response
            if self.ranks.is_main:
                log(f"warning: run.save_best: no {name} after {done} steps, so nothing is compared")
            return
        if before and value <= before["value"]:
            return
        self.best = {"metric": name, "value": value, "step": done}
        if self.saved == done:  # by a stop during this evaluation
            self.ranks.run_on_rank0(self.link_best)
        else:
            self.save(is_last=False)
        if self.saved != done:
            self.best = before
        elif self.ranks.is_main:
            log(f"best {name} so far: {value:.4g} after {done} steps, in checkpoint-{done}")

    def link_best(self) -> None:
        if self.best is not None:
            link_best(self.config.run.output_dir, self.best)

    def save_if_due(self) -> None:
        run, done = self.config.run, self.num_updates
        is_last = done == run.max_steps
        is_due = is_last or (run.save_steps and done % run.save_steps == 0)
        if is_due and self.saved != done:
            self.save(is_last)

    def save(self, is_last: bool) -> None:
        """Save a checkpoint; all ranks continue together once it is on disk.

        After a failure the run continues with a warning, or if `is_last` RunFailed is raised, as it
        is if weights are not finite: such a checkpoint must not replace earlier ones."""
        done, sampler = self.num_updates, self.sampler
        newest = f"checkpoint-{self.saved}" if self.saved else "none"
        if not self.learner.optimizer.has_finite_weights():
            raise RunFailed(
                f"weights are not finite after {done} updates, so they are not saved; the newest "
                f"checkpoint is {newest}. Check optim.learning_rate, optim.adam_epsilon and "
                "model.dtype"
            )
        self.ranks.activity = f"save after {done} updates"
        state = {"step": done, "evaluated": self.evaluated, "best": self.best} | self.chosen
        with self.reporter.phase(f"saving checkpoint-{done}"):
            problem = save_checkpoint(
                self.config,
                self.ranks,
                state | {"progress": self.progress()},
                model=self.learner.model,
                tokenizer=self.tokenizer,
                optimizer=self.learner.optimizer,
                arrays={
                    PLANNER_FILE: sampler.schedule.state_dict() | self.data,
                    SPECULATION_FILE: sampler.state_dict() | state_of(self.evaluator.parts()),
                },
                writers=[mechanism.save for mechanism in sampler.mechanisms],
                then=self.link_best,
            )
        if problem is None:
            self.saved = done
            return
        line = f"checkpoint-{done} could not be saved: {problem}; the newest checkpoint is {newest}"
        if is_last:
            raise RunFailed(line, exit_code=4)
        if self.ranks.is_main:
            log(f"warning: {line}; the run continues")


def check_save_best(config: Config, rewards: list[str]) -> None:
    """Raise InputError if run.save_best is no metric of evaluations. rewards: their names."""
    name, functions = config.run.save_best, config.eval.functions
    known = [f"eval/{own}" for own in short_names(functions)]
    known += ["eval/reward"] if rewards else []
    known += [f"eval/rewards/{reward}/mean" for reward in short_names(rewards)]
    if rewards or functions:
        known += [f"eval/pass@{k}" for k in numbers_of_samples(config.eval.num_generations)]
    if name is not None and name not in known:
        has = f"evaluations of this run have {', '.join(known)}" if known else "set eval.functions"
        raise InputError(f"run.save_best: {name} is not measured; {has}")


def link_best(output_dir: str, best: dict | None) -> None:
    """Let checkpoint-best lead to the checkpoint of `best` (see `read_state`), or to none.

    The link is replaced in one operation once the new checkpoint is complete, and its target is
    never deleted: a run that is killed at any time leaves the new best or the previous one. A
    failure is a warning."""
    link, temporary = os.path.join(output_dir, BEST), os.path.join(output_dir, f"tmp-{BEST}")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary if best else link)
        if best:
            os.symlink(f"checkpoint-{best['step']}", temporary)
            os.replace(temporary, link)
    except OSError as error:
        log(f"warning: {link} cannot be written: {error.strerror}")


def find_best(config: Config, state: dict) -> dict | None:
    """Return the best of a resumed run so far, and link it again; None if it is not there.

    state: see `read_state`. After damage, a run resumes from a checkpoint before its best one."""
    best, output_dir = state.get("best"), config.run.output_dir
    if config.run.save_best is None:
        return None
    _undo_copy(output_dir)
    if best is not None:
        folder = os.path.join(output_dir, f"checkpoint-{best['step']}")
        if best["metric"] != config.run.save_best or not os.path.isdir(folder):
            best = None
    link_best(output_dir, best)
    return best


def _undo_copy(output_dir: str) -> None:
    """Rename a checkpoint-best that is a folder, as `cp -rL` makes it, to what it is a copy of."""
    link = os.path.join(output_dir, BEST)
    if os.path.islink(link) or not os.path.isdir(link):
        return
    if os.path.isfile(os.path.join(link, STATE_FILE)):
        folder = os.path.join(output_dir, f"checkpoint-{read_state(link)['step']}")
        if not os.path.exists(folder):
            os.rename(link, folder)
    remove_checkpoint(link)
