"""TensorBoard's files of a run: curves in a few groups, and the eight to watch first in a layout.

A full disk leaves a gap in the curves.
"""

import os
import re
from collections.abc import Collection
from typing import Any

import numpy as np

from bubblespec.errors import log
from bubblespec.telemetry.table import CONSTANT, SHOWN, tag_of


def layout_of(tags: Collection[str]) -> dict[str, dict[str, list]]:
    """Return the charts that have one of these tags, by question, for `add_custom_scalars`."""
    layout: dict[str, dict[str, list]] = {}
    for question, metrics in SHOWN.items():
        charts: dict[str, list[str]] = {}
        for metric in metrics:
            charts.setdefault(metric.chart, []).append(f"^{tag_of(metric.key)}$")
        for title, patterns in charts.items():
            if any(re.search(pattern, tag) for pattern in patterns for tag in tags):
                layout.setdefault(question, {})[title] = ["Multiline", patterns]
    return layout


class TensorBoard:
    """The curves of one run on rank 0."""

    def __init__(self, output_dir: str, purge_step: int):
        """purge_step: curves from here on, of an earlier run, are hidden."""
        self._folder = os.path.join(output_dir, "tensorboard")
        self._writer: Any = None
        self._purge_step: int | None = purge_step
        self._is_drawing = True  # False after a failure

    def resume(self) -> None:
        """Draw again after a failure, as there is room on the disk."""
        self._is_drawing = True

    def scalars(self, step: int, metrics: dict[str, Any]) -> None:
        """Draw one point of each curve."""
        for key, value in metrics.items():
            if isinstance(value, int | float | np.generic) and key not in CONSTANT:
                self.draw("add_scalar", tag_of(key), value, step)

    def draw(self, method: str, *arguments, **options) -> None:
        """Call a method of the writer.

        An error, which the writer's thread raises at a later call, disables drawing until `resume`.
        """
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
