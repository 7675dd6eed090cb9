"""Traces of steps by torch.profiler (run.profile_steps), one Chrome trace per step and rank."""

import os

from torch.profiler import ProfilerActivity, profile

from bubblespec.distributed.ranks import Ranks
from bubblespec.errors import log


def begin_profile(ranks: Ranks) -> profile:
    """Begin to record operations of this rank, and kernels on a GPU."""
    activities = [ProfilerActivity.CPU]
    if ranks.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    running = profile(activities=activities)
    running.start()
    return running


def save_profile(running: profile, output_dir: str, step: int, rank: int) -> None:
    """End the recording, and write it as the trace of a step (from 1). An error is a warning."""
    running.stop()
    path = os.path.join(output_dir, "profile", f"step-{step:05d}-rank-{rank}.json")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        running.export_chrome_trace(f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
    except (OSError, RuntimeError) as error:  # torch's exporter raises RuntimeError
        log(f"warning: {path} could not be written: {error}")
