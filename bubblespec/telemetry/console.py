"""What a run shows on the screen, by rank 0: a progress bar, evaluations, and a table at the end."""

import contextlib
import math
import sys
from typing import Any

import numpy as np
from tqdm import tqdm

from bubblespec.errors import log

TABLE_KEYS = (
    "reward",
    "frac_reward_zero_std",
    "completions/mean_length",
    "completions/max_length",
    "entropy",
    "timing_s/gen",
    "timing_s/bubble",
    "timing_s/train",
    "timing_s/step",
    "perf/throughput",
    "bubble/ratio",
)


class Console:
    """The screen of a run that goes from `first_step` to `max_steps`."""

    def __init__(self, first_step: int, max_steps: int):
        options = {"unit": "step", "dynamic_ncols": True, "file": sys.stderr}
        self._bar = tqdm(total=max_steps, initial=first_step, **options)
        self.evaluations: list[tuple[int, dict[str, Any]]] = []
        self.history: list[dict[str, Any]] = []

    def show_step(self, metrics: dict[str, Any]) -> None:
        """Advance the bar by a step with these metrics."""
        self.history.append({key: metrics.get(key, math.nan) for key in TABLE_KEYS})
        shown = f"reward {metrics['reward']:.3f}, {metrics['perf/throughput']:.0f} tokens/s, "
        shown += f"{metrics['timing_s/step']:.2f} s/step"
        with contextlib.suppress(OSError):  # the screen may be a log on a full disk
            self._bar.set_postfix_str(shown)
            self._bar.update()

    def show_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        """`step` is the number of updates so far."""
        self.evaluations.append((step, metrics))
        log(f"step {step}: held-out reward {metrics['eval/reward']:.3f}")

    def close(self) -> None:
        """End the bar and print the run's table."""
        with contextlib.suppress(OSError):
            self._bar.close()
        if self.history:
            log(_table(self.history, self.evaluations))


def _table(history: list[dict], evaluations: list[tuple[int, dict]]) -> str:
    """First tenth of the steps against the last tenth, and the evaluations."""
    share = max(1, len(history) // 10)
    lines = [f"{'':28}{'first ' + str(share):>12}{'last ' + str(share):>12}"]
    for key in TABLE_KEYS:
        values = [step[key] for step in history]
        lines.append(f"{key:28}{np.mean(values[:share]):12.3f}{np.mean(values[-share:]):12.3f}")
    if evaluations:
        lines += ["", f"{'':28}" + "".join(f"{f'step {step}':>12}" for step, _ in evaluations)]
        for key in (key for key, value in evaluations[0][1].items() if not isinstance(value, str)):
            values = "".join(f"{metrics[key]:12.3f}" for _, metrics in evaluations)
            lines.append(f"{key:28}{values}")
    return "\n".join(lines)
