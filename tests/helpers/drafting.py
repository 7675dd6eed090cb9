"""Training and chains of the drafter that depend on no clock: slices at every third tick."""

from bubblespec.draft import proposer
from bubblespec.mechanisms.drafter import warm_start
from bubblespec.mechanisms.drafter.idle_task import TrainDrafter
from bubblespec.mechanisms.drafter.source import DrafterSource
from bubblespec.planner import guard
from bubblespec.rollout.board import ProgressBoard


def train_always(patch=setattr) -> None:
    """patch: as of pytest's monkeypatch, to take it back afterwards."""
    jobs = TrainDrafter.jobs

    def co_scheduled(task):
        task.num_ticks = getattr(task, "num_ticks", -1) + 1  # the same on all ranks
        is_due = task.num_ticks % 3 == 0
        return [job._replace(co_scheduled=True) for job in jobs(task)] if is_due else []

    patch(TrainDrafter, "jobs", co_scheduled)
    patch(TrainDrafter, "can_begin", lambda work: work.training.slice_tokens() > 0)
    patch(TrainDrafter, "_limit_s", lambda work: 1e9)
    patch(ProgressBoard, "_is_too_soon", lambda board: False)


def chain_always(patch=setattr) -> None:
    """Chains of three tokens in every forward, whatever they cost, after a short warm start."""
    patch(warm_start, "EPOCHS", 1)
    patch(guard, "FIRST_CONTROL", 1e9)  # no rollouts without drafts
    patch(proposer, "choose_windows", lambda survival, available, *_, **__: (available, True))
    patch(DrafterSource, "chance", 1.0)
    patch(DrafterSource, "choose_length", lambda source, active, count: 3)
