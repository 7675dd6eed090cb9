"""Time for tests that must not depend on the clock: it passes only where a test says so."""

import contextlib
import time
from collections.abc import Iterator

import pytest
import torch

import train
from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.engine import Engine
from bubblespec.setup import build
from bubblespec.telemetry import timeline
from bubblespec.types import Load


class Clock:
    """Stands in for the `time` module: sleeping takes no time of ours, and a look at the clock a
    microsecond of its own."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class ClockThatSkips:
    """The `time` module, ahead by `skipped` seconds: a time-out ends at once where a test wants it
    to, and nowhere else."""

    def __init__(self):
        self.skipped = 0.0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return time.monotonic() + self.skipped


def forward_seconds(load: Load) -> float:
    """Of a forward in a run in virtual time: those of a small model on a CPU, roughly."""
    return (
        5e-3 + 1e-4 * load.rows + 5e-5 * load.tokens + 1e-4 * load.wide_rows + 1e-7 * load.positions
    )


@contextlib.contextmanager
def virtual_time() -> Iterator[Ranks]:
    """The one rank of a run in this process; time passes in the engine's forwards alone,
    `forward_seconds` in each."""
    clock, step = Clock(), Engine.step

    def timed_step(engine: Engine, *arguments) -> tuple:
        finished, load = step(engine, *arguments)
        if load is not None:
            clock.sleep(forward_seconds(load))
        return finished, load

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "time", clock)
        patch.setattr(Engine, "step", timed_step)
        ranks = Ranks(torch.device("cpu"))
        ranks.clock = clock
        yield ranks


def train_in_virtual_time(*overrides: str, config: str = "configs/tiny_cpu_bulk.yaml") -> None:
    """What `python train.py` does, in this process and in virtual time."""
    with virtual_time() as ranks:
        made = build(load_config(config, list(overrides)), ranks)
        train.train(made)
        made.lock.close()
