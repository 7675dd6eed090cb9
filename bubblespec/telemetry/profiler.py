"""Traces of steps by torch.profiler (run.profile_steps), one Chrome trace per step and rank."""

import os

import torch
from torch.profiler import ProfilerActivity

from bubblespec.distributed.ranks import Ranks
from bubblespec.errors import log


class StepProfiler:
    """Profiler of this rank, from the beginning of a step to the end of its update."""

    def __init__(self, output_dir: str, ranks: Ranks):
        self.folder, self.ranks = os.path.join(output_dir, "profile"), ranks
        self._running: torch.profiler.profile | None = None

    def begin(self) -> None:
        """Begin to record operations, and kernels on a GPU."""
        activities = [ProfilerActivity.CPU]
        if self.ranks.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._running = torch.profiler.profile(activities=activities)
        self._running.start()

    def end(self, step: int | None) -> None:
        """Write what was recorded, if anything. step: from 1; None: the step was abandoned."""
        if (running := self._running) is None:
            return
        self._running = None
        running.stop()
        if step is None:
            return
        name = f"step-{step:05d}-rank-{self.ranks.rank}.json"
        path = os.path.join(self.folder, name)
        try:
            os.makedirs(self.folder, exist_ok=True)
            running.export_chrome_trace(f"{path}.tmp")
            os.replace(f"{path}.tmp", path)
        except (OSError, RuntimeError) as error:  # torch's exporter raises RuntimeError
            log(f"warning: {path} could not be written: {error}")
