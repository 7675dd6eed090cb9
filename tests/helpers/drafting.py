"""Training of the drafter that depends on no clock: slices at every tick, beside rows of the rank's
own.

Run as a script it is train.py under these conditions, or with --at and --kind that of
system/signalled_train.py; with --in PART every rank gets SIGTERM in that part of the warm start:
responses, training.
"""

import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import train
from bubblespec.draft import drafter_training, proposer
from bubblespec.draft.drafter_source import DrafterSource
from bubblespec.idle.train_drafter import TrainDrafter
from bubblespec.planner import guard
from bubblespec.rollout.board import ProgressBoard
from tests.system import signalled_train


def train_always(patch=setattr) -> None:
    """patch: as of pytest's monkeypatch, to take it back afterwards."""
    jobs = TrainDrafter.jobs

    def co_scheduled(task):
        return [job._replace(co_scheduled=True) for job in jobs(task)]

    patch(TrainDrafter, "jobs", co_scheduled)
    patch(TrainDrafter, "_can_begin", lambda work: work.training.slice_tokens() > 0)
    patch(TrainDrafter, "_limit_s", lambda work: 1e9)
    patch(ProgressBoard, "_is_too_soon", lambda board: False)


def chain_always(patch=setattr) -> None:
    """Chains of three tokens in every forward, whatever they cost or save and whatever other
    sources know."""
    patch(guard, "FIRST_CONTROL", 1e9)  # no rollouts without drafts
    patch(proposer, "choose_windows", lambda survival, available, *_, **__: (available, True))
    patch(DrafterSource, "chance", 1.0)
    patch(DrafterSource, "choose_length", lambda source, active, count: 3)


def stop_in(part: str) -> None:
    """SIGTERM to every rank once, in a part of the warm start."""
    name = {"responses": "frequent_ids", "training": "train"}[part]
    original = getattr(drafter_training, name)

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    setattr(drafter_training, name, signalled)


if __name__ == "__main__":
    train_always()
    chain_always()
    if "--in" in sys.argv:
        at = sys.argv.index("--in")
        stop_in(sys.argv[at + 1])
        del sys.argv[at : at + 2]
    sys.exit(signalled_train.main() if "--at" in sys.argv else train.main())
