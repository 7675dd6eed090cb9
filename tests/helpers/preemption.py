"""Preempts rows of a run at random; none of it may change a token."""

import numpy as np

from bubblespec.rollout.drafting import DraftAhead
from bubblespec.rollout.plan import Mechanism, RolloutPlan
from bubblespec.trainer import Trainer
from bubblespec.types import Load, Row

MAX_ROWS = 4  # preempted after one forward


class Preemption(Mechanism):
    """After a forward, with probability `share`, some rows are dropped from the engine, active or
    queued, and added again at the end of the queue. `counts`: of the step's own rows, and of those
    drafted ahead."""

    name = "preemption"

    def __init__(self, trainer: Trainer, share: float):
        self.share, self.rng = share, np.random.default_rng(0)
        self.counts = {"own": 0, "ahead": 0}
        self.drafting: DraftAhead | None = None
        sampler = trainer.sampler
        self.engine, self._step = sampler.engine, sampler.engine.step
        self.engine.step = self.step
        sampler.mechanisms.append(self)
        if sampler.board is not None:
            sampler.board.interval_s = 0.0  # a tick at every forward: the clock chooses none

    def begin_rollout(self, plan: RolloutPlan) -> None:
        self.drafting = plan.ahead

    def step(self, *arguments) -> tuple[list[Row], Load]:
        result = self._step(*arguments)
        if self.rng.random() < self.share:
            rows = [*self.engine.rows, *self.engine.queue]
            chosen = self.rng.permutation(len(rows))[: self.rng.integers(1, MAX_ROWS + 1)]
            taken = [rows[index] for index in chosen]
            for row in taken:
                self.engine.drop(row)
                is_own = self.drafting is None or row in self.drafting.view.unfinished
                self.counts["own" if is_own else "ahead"] += 1
            self.engine.add(taken)
        return result
