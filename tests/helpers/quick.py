"""Runs start at once: what a start measures is given, and what it tidies up is left.

The real profile is tested in test_profile.py.
"""

import gc
import itertools

from bubblespec import trainer
from bubblespec.mechanisms import cpu_linear
from bubblespec.planner.costs import CostModel
from bubblespec.rollout import make_sampler
from bubblespec.types import Load
from tests.helpers.clocks import forward_seconds


def given_costs(engine, params, cost: CostModel, **options) -> None:
    """In place of `profile`: the seconds of forwards in virtual time, without the forwards."""
    lengths = (8, engine.max_length // 2)
    for rows, length, window in itertools.product((1, 16, 64), lengths, (0, 3, 15)):
        wide_rows = rows if window else 0
        load = Load(rows, rows * (window + 1), wide_rows, rows * (length + window + 1), 0, 0)
        cost.anchor(load, forward_seconds(load))


class Collector:
    """Stands in for `gc`: a collection takes 0.3 s where all imports of the tests are loaded."""

    def __getattr__(self, name: str):
        return getattr(gc, name)

    def collect(self) -> int:
        return 0


def start_quickly() -> None:
    """All runs of this process and its forks."""
    make_sampler.profile = given_costs
    cpu_linear.BUDGET_S = 0.0  # two rounds, not as many as fit into two seconds
    trainer.gc = Collector()
