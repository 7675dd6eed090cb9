"""What a run shows on the screen, by rank 0: the phases of its set-up, a bar or one line per step,
evaluations with one sample each, hints, and a summary at the end. The words are in summary.py."""

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from bubblespec.config import Config
from bubblespec.errors import log
from bubblespec.telemetry import summary
from bubblespec.telemetry.samples import completion_of
from bubblespec.telemetry.totals import Totals
from bubblespec.types import Samples

BAR = "{n_fmt}/{total_fmt} steps |{bar:10}| {desc}"
MIN_SHOWN_S = 0.05  # phases that took less are not listed
NUM_TIMED = 10  # latest steps, whose mean tells how long the others will take
EQUAL_STEPS = 3  # in a row without a difference in any group's rewards, after which there is a hint
MIN_DRAFTED = 2000  # draft tokens, of which there is a hint if fewer are accepted than
MIN_ACCEPTED = 0.05


class Console:
    """The screen of a run. Other ranks have one as well, with `is_on` False, whose phases show
    nothing; all else is for rank 0."""

    def __init__(self, config: Config, is_on: bool):
        self.config, self.is_on = config, is_on
        self.is_terminal = is_on and is_terminal()
        self.totals = Totals()
        self.history: list[dict[str, Any]] = []  # metrics of steps, and of evaluations
        self.evaluations: list[tuple[int, dict[str, Any]]] = []
        self.hints = Hints(config)
        self._began_s = time.monotonic()
        self._phases: dict[str, float] = {}  # seconds by name
        self._step_ends: deque[float] = deque(maxlen=NUM_TIMED + 1)  # and the end of set-up
        self._bar: tqdm | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show what is being done: on a terminal while it lasts, elsewhere as a line."""
        began_s, shown = time.monotonic(), None
        with contextlib.suppress(OSError):  # the screen may be a log on a full disk
            if self.is_terminal:
                options = {"bar_format": "{desc} ...", "leave": False, "file": sys.stderr}
                shown = tqdm(desc=name, dynamic_ncols=True, **options)
            elif self.is_on:
                log(f"{name} ...")
        try:
            yield
        finally:
            if shown is not None:
                with contextlib.suppress(OSError):
                    shown.close()
        self._phases[name] = time.monotonic() - began_s

    def start(self, facts: summary.Facts) -> None:
        """The run is loaded."""
        self.totals.num_waiting = facts.num_deferred
        for line in summary.start_lines(self.config, facts):
            log(line)

    def end_set_up(self, num_updates: int) -> None:
        """Steps are about to begin, after `num_updates` of the run that this one continues."""
        self._step_ends.append(time.monotonic())
        self.totals.set_up_s = self._step_ends[0] - self._began_s
        slow = {name: phase_s for name, phase_s in self._phases.items() if phase_s >= MIN_SHOWN_S}
        log(summary.set_up_line(self.totals.set_up_s, slow))
        if self.is_terminal and num_updates < self.config.run.max_steps:
            options = {"bar_format": BAR, "dynamic_ncols": True, "file": sys.stderr}
            with contextlib.suppress(OSError):
                self._bar = tqdm(total=self.config.run.max_steps, initial=num_updates, **options)

    def show_step(self, step: int, metrics: dict[str, Any]) -> None:
        """A step is over: move the bar, or print a line; and hints. `step` counts from 0."""
        max_steps, ends = self.config.run.max_steps, self._step_ends
        ends.append(time.monotonic())
        left_s = (max_steps - step - 1) * (ends[-1] - ends[0]) / (len(ends) - 1)
        self.history.append({key: metrics.get(key) for key in summary.KEPT})
        self.totals.add(metrics)
        text = summary.step_text(metrics, self.totals, left_s)
        if self._bar is None:
            log(f"{step + 1}/{max_steps} steps: {text}")
        else:
            with contextlib.suppress(OSError):
                self._bar.set_description_str(text, refresh=False)
                self._bar.update()
                self._bar.refresh()
        for line in self.hints.of_step(step, metrics):
            log(line)

    def show_evaluation(
        self,
        step: int,
        metrics: dict[str, Any],
        samples: Samples,
        functions: list[str],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """An evaluation after `step` updates, and one of its samples, each time of another prompt.
        functions: see `Scorer.names`."""
        log(summary.evaluation_line(step, metrics))
        number = len(self.evaluations) % len(samples.groups)
        self.evaluations.append((step, metrics))
        index = number * samples.num_generations
        prompt, reply = samples.prompt_of(index), completion_of(samples, index, tokenizer)
        rewards = dict(zip(functions, samples.rewards[index].tolist(), strict=True))
        for line in summary.sample_lines(prompt.text, reply, rewards, prompt.columns):
            log(line)

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()

    def end(self, num_updates: int, checkpoint: str | None, is_stopped: bool) -> None:
        """The run is over, or told to stop. checkpoint: folder of the newest one."""
        self.totals.seconds = time.monotonic() - self._began_s
        run = {"num_updates": num_updates, "checkpoint": checkpoint, "is_stopped": is_stopped}
        parts = (self.totals, self.history, self.evaluations)
        for line in summary.end_lines(self.config, *parts, **run):
            log(line)


def is_terminal() -> bool:
    """Whether lines on stderr can be drawn over; terminals of no height, as of some containers,
    are taken for logs."""
    with contextlib.suppress(OSError, ValueError):
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).lines > 1
    return False


class Hints:
    """What is wrong with a run, by the metrics of its steps, and what to change: once each."""

    def __init__(self, config: Config):
        self.config = config
        self._given: set[str] = set()
        self._num_equal = 0  # latest steps in a row in which all groups had equal rewards
        self._drafted = self._accepted = 0  # tokens since there were MIN_DRAFTED

    def of_step(self, step: int, metrics: dict[str, Any]) -> list[str]:
        """Lines about a step with these metrics, which counts from 0, and those before it."""
        found, after = {}, f"after {summary.several(step + 1, 'step')}"
        estimator = self.config.loss.advantage_estimator
        # Others compare responses to different prompts.
        compares_groups = estimator in ("grpo", "rloo")
        is_equal = compares_groups and metrics["frac_reward_zero_std"] == 1
        self._num_equal = self._num_equal + 1 if is_equal else 0
        if self._num_equal >= EQUAL_STEPS:
            found["equal"] = (
                f"in the latest {EQUAL_STEPS} steps all responses to each prompt got the same "
                "reward, so there was nothing to learn from; check reward.functions, take prompts "
                "that the model solves now and then, or raise rollout.num_generations or "
                "rollout.temperature"
            )
        if metrics["completions/clipped_ratio"] == 1:
            limit = self.config.rollout.max_completion_length
            found["clipped"] = (
                f"all responses of the latest step were cut off at rollout.max_completion_length = "
                f"{limit}, none has ended by itself; raise it, or check that the model knows how "
                "to end (rollout.stop_token_ids; data.as_chat=true for a chat model)"
            )
        accepted = metrics.get("rollout/spec_accepted_tokens", 0)
        self._accepted += accepted
        self._drafted += accepted + metrics.get("rollout/spec_wasted_tokens", 0)
        if self._drafted >= MIN_DRAFTED:
            if self._accepted < MIN_ACCEPTED * self._drafted:
                share = f"{self._accepted / self._drafted:.1%} of the latest {self._drafted:,}"
                found["drafts"] = (
                    f"{share} draft tokens were accepted, so drafts cannot save time; the policy "
                    "may change too much in a step (optim.learning_rate), or its responses do not "
                    "resemble earlier ones; speculative.method=none turns drafts off"
                )
            self._drafted = self._accepted = 0
        new = [name for name in found if name not in self._given]
        self._given.update(new)
        return [f"hint: {after}: {found[name]}" for name in new]
