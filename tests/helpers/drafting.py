"""Training and chains of the drafter that depend on no clock: slices whenever there is data."""

import numpy as np

from bubblespec.draft import chains, proposer
from bubblespec.draft.chains import DraftModelSource
from bubblespec.mechanisms.drafter import mechanism, training
from bubblespec.mechanisms.drafter.training import TrainDrafter
from bubblespec.planner.chooser import Chooser
from bubblespec.rollout.board import ProgressSync


def train_always(patch=setattr) -> None:
    """patch: as of pytest's monkeypatch, to take it back afterwards."""
    patch(TrainDrafter, "can_begin", lambda work: work.training.slice_tokens() > 0)
    patch(TrainDrafter, "_limit_s", lambda work: 1e9)
    patch(ProgressSync, "_is_too_soon", lambda board: False)


def chain_always(patch=setattr) -> None:
    """Chains of five tokens in every forward, whatever they cost, after a short warm start."""
    patch(training, "EPOCHS", 1)
    patch(mechanism, "MIN_SPEEDUP", 0.0)
    patch(Chooser, "_draw", lambda chooser, step: frozenset())  # no rollouts without drafts
    patch(proposer, "choose_windows", lambda survival, available, *_, **__: available)
    patch(DraftModelSource, "chance", 1.0)
    patch(chains, "rows_to_continue", lambda chance, *_, **__: np.arange(len(chance)))
