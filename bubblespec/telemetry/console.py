"""The screen of a run, on rank 0; summary.py has the lines.

It shows the phases of set-up, a bar or one line per step, evaluations with one sample each, hints,
and a summary at the end.
"""

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
from bubblespec.samples import Samples
from bubblespec.telemetry import summary
from bubblespec.telemetry.samples import completion_of

BAR = "{n_fmt}/{total_fmt} steps |{bar:10}| {desc}"
BAR_WIDTH = 100  # columns, whatever the terminal has
MIN_SHOWN_S = 0.05  # phases that took less are not listed
NUM_TIMED = 10  # latest steps, whose mean tells how long the others will take
MAY_FAIL = contextlib.suppress(OSError)  # the screen may be a log on a full disk
EQUAL_STEPS = 3  # in a row without a difference in any group's rewards: a hint
MIN_DRAFTED = 2000  # latest draft tokens; fewer than MIN_ACCEPTED of them accepted: a hint
MIN_ACCEPTED = 0.05


class Console:
    """The screen of a run.

    Other ranks have one with `is_on` False: its phases show nothing, and its other methods are not
    called."""

    def __init__(self, config: Config, is_on: bool):
        self.config, self.is_on = config, is_on
        self.is_terminal = is_on and is_terminal()
        self.history = summary.History()
        self._hinted: set[str] = set()
        self._began_s = time.monotonic()
        self._phases: dict[str, float] = {}  # seconds by name
        self._step_ends: deque[float] = deque(maxlen=NUM_TIMED + 1)  # and the end of set-up
        self._bar: tqdm | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show a phase: on a terminal while it lasts, elsewhere as a line."""
        began_s, shown = time.monotonic(), None
        if self.is_terminal:
            shown = _bar(desc=name, bar_format="{desc} ...", leave=False)
        elif self.is_on:
            log(f"{name} ...")
        try:
            yield
        finally:
            _close(shown)
        self._phases[name] = time.monotonic() - began_s

    def start(self, facts: summary.Facts) -> None:
        """Show what is about to run."""
        self.history.num_waiting = facts.num_deferred
        _log_all(summary.start_lines(self.config, facts))

    def end_set_up(self, num_updates: int) -> None:
        """Show what set-up took, and begin the bar after `num_updates` of a resumed run."""
        self._step_ends.append(time.monotonic())
        self.history.set_up_s = self._step_ends[0] - self._began_s
        slow = [(name, of_s) for name, of_s in self._phases.items() if of_s >= MIN_SHOWN_S]
        parts = ", ".join(f"{name} {summary.duration(of_s)}" for name, of_s in slow)
        log(f"set-up took {summary.duration(self.history.set_up_s)}: {parts}")
        max_steps = self.config.run.max_steps
        if self.is_terminal and num_updates < max_steps:
            self._bar = _bar(total=max_steps, initial=num_updates, bar_format=BAR)

    def show_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Move the bar or print a line for a finished step, and hints."""
        max_steps, ends = self.config.run.max_steps, self._step_ends
        ends.append(time.monotonic())
        left_s = (max_steps - step) * (ends[-1] - ends[0]) / (len(ends) - 1)
        self.history.add(metrics)
        parts = summary.step_parts(metrics, self.history, left_s)
        if self._bar is None:
            log(f"{step}/{max_steps} steps: {'; '.join(parts)}")
        else:
            room = BAR_WIDTH - len(
                BAR.format(n_fmt=step, total_fmt=max_steps, bar="=" * 10, desc="")
            )
            text = summary.shortened(parts, room)
            with MAY_FAIL:
                self._bar.set_description_str(text, refresh=False)
                self._bar.update()
                self._bar.refresh()
        hints = find_hints(self.config, self.history)
        after = summary.several(step, "step")
        new = {name: text for name, text in hints.items() if name not in self._hinted}
        _log_all([f"hint: after {after}: {text}" for text in new.values()])
        self._hinted |= new.keys()

    def show_evaluation(
        self,
        step: int,
        metrics: dict[str, Any],
        samples: Samples,
        functions: list[str],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Show an evaluation after `step` updates, with a sample of another prompt each time.

        functions: see `Scorer.names`.
        """
        evaluations = self.history.evaluations
        index = len(evaluations) % len(samples.groups) * samples.num_generations
        evaluations.append((step, metrics))
        prompt, reply = samples.prompt_of(index), completion_of(samples, index, tokenizer)
        rewards = dict(zip(functions, samples.rewards[index].tolist(), strict=True))
        lines = summary.sample_lines(prompt.text, reply, rewards, prompt.columns)
        _log_all([summary.evaluation_line(step, metrics), *lines])

    def close(self) -> None:
        """End the bar."""
        _close(self._bar)

    def end(self, num_updates: int, checkpoint: str | None, is_stopped: bool) -> None:
        """Show the summary of a run that is complete or stopped.

        checkpoint: folder of the newest."""
        self.history.seconds = time.monotonic() - self._began_s
        end = summary.end_lines(self.config, self.history, num_updates, checkpoint, is_stopped)
        _log_all(end)


def _log_all(lines: list[str]) -> None:
    for line in lines:
        log(line)


def _bar(**options) -> tqdm | None:
    with MAY_FAIL:
        return tqdm(**options, dynamic_ncols=True, file=sys.stderr)
    return None


def _close(bar: tqdm | None) -> None:
    if bar is not None:
        with MAY_FAIL:
            bar.close()


def is_terminal() -> bool:
    """Whether lines on stderr can be drawn over.

    Terminals without a height, as in some containers, count as logs."""
    with contextlib.suppress(OSError, ValueError):
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).lines > 1
    return False


def find_hints(config: Config, history: summary.History) -> dict[str, str]:
    """Return advice on what is wrong with a run by its latest steps, by name."""
    hints, latest = {}, history.steps[-EQUAL_STEPS:]
    # other estimators compare responses to different prompts
    compares_groups = config.loss.advantage_estimator in ("grpo", "rloo")
    compares_groups &= config.loss.loss_type != "distillation"
    is_equal = len(latest) == EQUAL_STEPS
    is_equal &= all(m.get("frac_reward_zero_std") == 1 for m in latest)
    if compares_groups and is_equal:
        hints["equal"] = (
            f"in the latest {EQUAL_STEPS} steps all responses to each prompt got equal rewards, "
            "which have no gradient; check reward.functions, choose prompts that the model solves "
            "sometimes, or raise rollout.num_generations or rollout.temperature"
        )
    if latest[-1]["completions/clipped_ratio"] == 1:
        hints["clipped"] = (
            "all responses of the step were cut off at rollout.max_completion_length = "
            f"{config.rollout.max_completion_length}; raise it, or check the model's stop "
            "tokens (rollout.stop_token_ids; data.as_chat=true for a chat model)"
        )
    accepted = drafted = 0
    for metrics in reversed(history.steps):
        accepted += metrics.get(summary.ACCEPTED, 0)
        drafted += metrics.get(summary.ACCEPTED, 0) + metrics.get(summary.WASTED, 0)
        if drafted >= MIN_DRAFTED:
            break
    if drafted >= MIN_DRAFTED and accepted < MIN_ACCEPTED * drafted:
        hints["rejected"] = (
            f"{accepted / drafted:.1%} of the latest {drafted:,} draft tokens were accepted, too "
            "few to save time; the policy may change too fast (optim.learning_rate), or responses "
            "do not resemble earlier ones; speculative.method=none turns drafts off"
        )
    return hints
