"""TensorBoard's files of a run: curves in a few groups, and the eight to watch first in a layout.

A full disk leaves a gap in the curves.
"""

import os
import re
from collections.abc import Collection
from typing import Any

import numpy as np

from bubblespec.errors import log

OWN_GROUP = "bubblespec"
# Beginnings of the keys that only this trainer has.
OWN = ("rollout/", "bubble/", "drafts/", "drafter/", "idle/", "guard/", "tail/", "tp_tail/")
CONSTANT = ("data/num_dropped",)  # the same in all steps: not drawn

# Charts by question, as patterns of tags; those that match no curve of the run are left out.
LAYOUT = {
    "Watch first": {
        "Held-out reward": ["eval/reward"],
        "Reward": ["train/reward"],
        "Share of groups with equal rewards": ["train/frac_reward_zero_std"],
        "Response tokens": ["completions/mean_length", "completions/mean_terminated_length"],
        "Share of responses cut off": ["completions/clipped_ratio"],
        "Entropy": ["train/entropy"],
        "Gradient norm": ["train/grad_norm"],
        "Seconds per step": ["timing_s/step", "timing_s/gen", "timing_s/bubble", "timing_s/train"],
    },
    "Is it learning?": {
        "Rewards by function": ["rewards/.*/mean"],
        "Held-out rewards by function": ["eval/rewards/.*/mean"],
        "Held-out pass@k": ["eval/pass@.*"],
        "Spread of rewards": ["train/reward_std", "rewards/.*/std"],
        "Range of rewards": ["critic/rewards/.*"],
    },
    "What is generated?": {
        "Range of response tokens": ["completions/(min|mean|max)_length"],
        "Range of tokens of finished responses": ["completions/(min|mean|max)_terminated_length"],
        "Prompt tokens": ["prompt_length/.*"],
        "Held-out response tokens": ["eval/completions/mean_length"],
        "Held-out share cut off": ["eval/completions/clipped_ratio"],
        "Rewards that failed": ["reward/errors", "eval/reward/errors"],
        "Tool calls": ["tools/.*"],
        "Turns per episode": ["episodes/turns"],
    },
    "Is the update sound?": {
        "Loss": ["train/loss"],
        "KL to the initial policy": ["train/kl"],
        "Share of tokens clipped": ["clip_ratio/.*"],
        "Range of advantages": ["critic/advantages/.*"],
        "Generation against training, log-probabilities": ["sampling/logp_difference/.*"],
        "Learning rate": ["train/learning_rate"],
        "Skipped updates": ["train/skipped_updates"],
    },
    "Where does the time go?": {
        "Seconds by phase": ["timing_s/(gen|bubble|reward|train|sync|exchange)"],
        "Seconds of generation by rank": [f"{OWN_GROUP}/timing_s/gen/rank_.*"],
        "Tokens per second and rank": ["perf/throughput"],
        "Model FLOPs utilisation": ["perf/mfu"],
        "Memory in GB": ["perf/max_memory_gb"],
    },
    "What do drafts bring?": {
        "Share of draft tokens accepted": [f"{OWN_GROUP}/rollout/spec_accept_rate"],
        "The same by source": [f"{OWN_GROUP}/drafts/[a-z_]*/accept_rate"],
        "Tokens per row and forward": [f"{OWN_GROUP}/rollout/spec_accept_length"],
        "Forwards": [f"{OWN_GROUP}/rollout/forwards"],
        "Seconds saved by uses of idle time": [f"{OWN_GROUP}/idle/.*/saved_s"],
    },
}


def tag_of(key: str) -> str:
    """The curve of a metric: the key itself, but a key without a group is in `train`, as TRL's are,
    and what only this trainer has, seconds by rank included, is in one group of its own."""
    if "/" not in key:
        return f"train/{key}"
    is_own = key.startswith(OWN) or "/rank_" in key
    return f"{OWN_GROUP}/{key}" if is_own else key


def layout_of(tags: Collection[str]) -> dict:
    """LAYOUT as `add_custom_scalars` takes it, with the charts that have one of these tags."""
    layout = {}
    for question, charts in LAYOUT.items():
        kept = {
            title: ["Multiline", [f"^{pattern}$" for pattern in patterns]]
            for title, patterns in charts.items()
            if any(re.fullmatch(pattern, tag) for pattern in patterns for tag in tags)
        }
        if kept:
            layout[question] = kept
    return layout


class TensorBoard:
    """The curves of one run on rank 0."""

    def __init__(self, output_dir: str, purge_step: int):
        """purge_step: curves from here on, of an earlier run, are hidden."""
        self._folder = os.path.join(output_dir, "tensorboard")
        self._writer = None
        self._purge_step: int | None = purge_step
        self._is_drawing = True  # False after a failure

    def resume(self) -> None:
        """There is room on the disk: draw again after a failure."""
        self._is_drawing = True

    def scalars(self, step: int, metrics: dict[str, Any]) -> None:
        """One point of each curve."""
        for key, value in metrics.items():
            if isinstance(value, int | float | np.generic) and key not in CONSTANT:
                self.draw("add_scalar", tag_of(key), value, step)

    def draw(self, method: str, *arguments, **options) -> None:
        """Call the writer. Errors, which its thread raises at a later call, disable it until
        `resume`."""
        from torch.utils.tensorboard import SummaryWriter

        if not self._is_drawing:
            return
        try:
            if self._writer is None:
                self._writer = SummaryWriter(self._folder, purge_step=self._purge_step)
                self._purge_step = None
            getattr(self._writer, method)(*arguments, **options)
        except OSError as error:
            reason = f"TensorBoard's files cannot be written ({error.strerror})"
            log(f"warning: {reason}; its curves will have a gap")
            self._writer, self._is_drawing = None, False

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self.draw("close")
