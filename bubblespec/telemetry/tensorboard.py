"""TensorBoard's files of a run: a curve per metric, and a page with the eight charts to watch."""

import os
from typing import Any

import numpy as np

from bubblespec.errors import log

OWN_GROUP = "z_bubblespec"  # TensorBoard sorts groups by name: after reward, train and all others
# Beginnings of the keys that only this trainer has.
OWN = ("rollout/", "bubble/", "drafts/", "quantized/", "drafter/", "idle/", "guard/", "tail/")
OWN += ("tp_tail/",)
# Metrics by the title of their chart. docs/metrics.md explains the first of each in this order.
CHARTS = {
    "Held-out reward": ["eval/reward"],
    "Reward": ["reward"],
    "Share of groups with equal rewards": ["frac_reward_zero_std"],
    "Response tokens": ["completions/mean_length", "completions/mean_terminated_length"],
    "Share of responses cut off": ["completions/clipped_ratio"],
    "Entropy": ["entropy"],
    "Gradient norm": ["grad_norm"],
    "Seconds per step": [f"timing_s/{of}" for of in ("step", "gen", "bubble", "reward", "train")],
}


def tag_of(key: str) -> str:
    """Return the curve of a metric.

    A key without a group is in `train`, as in TRL. The keys that only this trainer has, seconds by
    rank included, are in one group."""
    if "/" not in key:
        return f"train/{key}"
    return f"{OWN_GROUP}/{key}" if key.startswith(OWN) or "/rank_" in key else key


class TensorBoard:
    """The curves of one run on rank 0. A full disk leaves a gap in them."""

    def __init__(self, output_dir: str, purge_step: int):
        """purge_step: curves from here on, of an earlier run, are hidden."""
        self._folder = os.path.join(output_dir, "tensorboard")
        self._writer: Any = None
        self._purge_step: int | None = purge_step
        self._has_failed = False

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Draw one point of each curve. An error is a warning, once."""
        try:
            if self._writer is None:
                self._writer = self._open()
            for key, value in metrics.items():
                if isinstance(value, int | float | np.generic):
                    self._writer.add_scalar(tag_of(key), value, step)
            self._writer.flush()
        except OSError as error:
            if not self._has_failed:
                reason = f"TensorBoard's files cannot be written ({error.strerror})"
                log(f"warning: {reason}; its curves will have a gap")
            self._writer, self._has_failed = None, True

    def close(self) -> None:
        """Close the files, which are complete after each step."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(self._folder, purge_step=self._purge_step)
        self._purge_step = None
        patterns = {title: [f"^{tag_of(key)}$" for key in keys] for title, keys in CHARTS.items()}
        charts = {title: ["Multiline", tags] for title, tags in patterns.items()}
        writer.add_custom_scalars({"Watch first": charts})
        return writer
