"""Tail batching over a workload: its schedule, and what samples say whose turn comes later than
planned.

Weights drift. A sample that is launched at step h and deferred is finished by the weights of a
later step v, and says something else by then: its response at h up to a first mismatch, and a text
that has left it after that (`DraftModel.later`). Its tokens from step h, and what was drafted of it
before h or between h and v, are drafts of what it says at v.
"""

import math
from collections.abc import Iterable

import numpy as np

from bubblespec.config import Config
from bubblespec.data.schedule import StepSchedule, save_visits
from bubblespec.data.tail_batching import MAX_OVER_SAMPLING, TailBatching, scaled
from bubblespec.errors import InputError
from bubblespec.types import Group, Prompt, SampleId


class DataOrder:
    """A workload's prompts in its order, as far as a schedule needs a `PromptSet`."""

    def __init__(self, workload):
        self.workload = workload
        self.prompts: list[Prompt] = []  # by which a saved queue finds its prompts: none is loaded

    def batch(self, seed: int, step: int, num_prompts: int) -> list[Prompt]:
        """Those of the workload's step number `step`, from 0."""
        return self.workload.batch(self.workload.first_step + step)


def make_schedule(config: Config, workload) -> StepSchedule:
    """The rule for what makes up a step: the workload itself, whose steps are in order, or tail
    batching over it."""
    if not config.tail_batching.enabled:
        return workload
    ratio = config.tail_batching.over_sampling_ratio
    schedule = TailBatching(
        DataOrder(workload),
        0,
        workload.num_prompts,
        workload.num_generations,
        over_sampling_ratio=ratio,
    )
    schedule.load_state_dict(schedule.state_dict() | save_visits(workload.first_visits()))
    return schedule


def steps_that_fit(config: Config, workload) -> int:
    """How many steps the prompts of a workload are enough for. Raises InputError where that is
    none, or tail batching cannot be simulated."""
    tail = config.tail_batching
    if not tail.enabled:
        return workload.num_steps
    if tail.response_over_sampling_ratio != 1:
        raise InputError("tail_batching.response_over_sampling_ratio: not simulated; leave it at 1")
    if workload.is_endless:
        return workload.num_steps
    for key in ("rollout.dynamic_sampling", "tail_batching.enabled"):
        if workload.config.get(key, False):
            raise InputError(
                f"tail_batching.enabled: not simulated for a run with {key}; its steps are not the data's order"
            )
    ratio = (
        MAX_OVER_SAMPLING if tail.over_sampling_ratio == "auto" else float(tail.over_sampling_ratio)
    )
    # Before its last short round all but one group of a step may be waiting.
    beyond = math.ceil((scaled(workload.num_prompts, ratio) - 1) / workload.num_prompts)
    if workload.num_steps <= beyond:
        raise InputError(
            f"tail_batching.enabled: {workload.num_steps} recorded steps; at least {beyond + 1} are needed"
        )
    return workload.num_steps - beyond


class Texts:
    """What each sample says under the weights of each step, on one rank."""

    def __init__(self, workload):
        self.workload, self.version = workload, workload.first_step
        self._launched: dict[
            tuple[int, int], int
        ] = {}  # the step that has launched a group, by its name, until it is trained

    def begin(self, step: int, groups: Iterable[Group]) -> None:
        """A step launches these groups, or goes on with them."""
        self.version = step
        for group in groups:
            self._launched.setdefault(group.name, step)

    def end(self, groups: Iterable[Group]) -> None:
        """Groups have been trained on."""
        for group in groups:
            del self._launched[group.name]

    def response(self, sample: SampleId, limit: int) -> np.ndarray:
        """All that a sample of this step says, int64 [L], cut at `limit` tokens."""
        return self.text(sample, limit, np.empty(0, np.int64))

    def text(self, sample: SampleId, limit: int, so_far: np.ndarray) -> np.ndarray:
        """How it goes on after `so_far`, int64 [L], those tokens included."""
        workload, home, launched = (
            self.workload,
            self.workload.step_of(sample),
            self._launched.get(sample[:2]),
        )
        if launched is None:
            return workload.draft(
                home, sample.uid, sample.sample, max(home - self.version, 1), limit, so_far
            )
        true = workload.response(home, sample.uid, sample.sample)[:limit]
        if self.version == launched:
            return true
        key, stop = (home, sample.uid, sample.sample), workload.stop_of(true)
        later = workload.drafts.later(key, true, limit, stop, self.version - launched)
        return workload.drafts.continued(key, later, limit, stop, so_far)
