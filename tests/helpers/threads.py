"""Whole runs on several ranks in this process: a thread per rank, in virtual time."""

import copy
from contextlib import nullcontext

import pytest

from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.engine import Engine
from bubblespec.mechanisms.drafter.training import TrainDrafter
from bubblespec.rollout import make_sampler
from bubblespec.rollout.board import ProgressSync
from bubblespec.setup import build
from bubblespec.tools.simulate.world import SimulatedRanks, SimulatedTicks, World
from bubblespec.trainer import Trainer
from tests.helpers.clocks import forward_seconds
from train import train

SLICE_S = 0.05  # of idle work, in virtual time


class Killed(BaseException):
    """All ranks are gone."""


class ThreadRanks(SimulatedRanks):
    def broadcast_(self, tensor, source):
        return tensor.copy_(self.world.meet(self.rank, tensor.clone())[source])


def make_board(ranks: Ranks, *_) -> ProgressSync:
    return ProgressSync(ranks, 100, SimulatedTicks(ranks), interval_s=0)


def train_on_threads(
    num_ranks: int, *overrides: str, ends_in: int | None = None, is_killed: bool = False
) -> None:
    """Run train.py on threads. ends_in: the step in whose update the run gets a stop request, or is
    killed."""
    world, config = World(num_ranks), load_config("configs/tiny_cpu_bulk.yaml", list(overrides))
    update = Trainer.update

    def interrupted_update(trainer, record, advantages):
        if record.step == ends_in and is_killed:
            raise Killed
        trainer.ranks.must_stop |= record.step == ends_in
        return update(trainer, record, advantages)

    def work(rank: int) -> None:
        ranks = ThreadRanks(world, rank)
        trainer = build(copy.deepcopy(config), ranks)
        engine = trainer.sampler.engine

        def timed_step(*arguments):
            finished, load = Engine.step(engine, *arguments)
            if load is not None:
                ranks.clock.sleep(forward_seconds(load))
            return finished, load

        engine.step = timed_step
        try:
            train(trainer)
        finally:
            engine.release()  # or the keys and values of all runs of a file would stay for long
            if trainer.lock is not None:
                trainer.lock.close()

    run_slice = TrainDrafter.run_slice

    def timed_slice(of: TrainDrafter) -> None:
        run_slice(of)
        of.clock.sleep(SLICE_S)  # or a rank that waits would work for ever in virtual time

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainDrafter, "run_slice", timed_slice)
        patch.setattr(make_sampler, "ProgressSync", make_board)
        patch.setattr(Trainer, "update", interrupted_update)
        with pytest.raises(Killed) if is_killed else nullcontext():
            world.run(work)
