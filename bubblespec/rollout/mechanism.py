"""The interface of mechanisms, which can be switched off without changing what is trained on.

A mechanism that takes part in rollouts subclasses `Mechanism`. Before each rollout the sampler
makes a `RolloutPlan`, each mechanism amends the plan, and the loop carries it out. `Drafting` is
part of the core; the others live in bubblespec/mechanisms/, which only setup.py and tools/ import.
"""

from collections.abc import Sequence

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.sources import DraftSource
from bubblespec.records import RolloutRecord, StepRecord
from bubblespec.rollout.plan import RolloutPlan


class Mechanism:
    """One mechanism of a run. Every method has a default.

    All ranks call each method at the same point, so methods may use collectives; `save` is called
    on rank 0 alone.
    """

    name = "mechanism"
    """Key of its state in checkpoints."""
    needs_timings = False
    """Whether later rollouts use the costs that earlier ones have measured."""
    sources: Sequence[DraftSource] = ()
    """Draft sources that serve evaluations as well."""

    def start(self, trainer) -> None:
        """Finish the set-up, before the first step: a warm start, for instance."""

    def begin_rollout(self, plan: RolloutPlan) -> None:
        """Amend the plan of a rollout that is about to begin."""

    def end_rollout(self, record: RolloutRecord) -> None:
        """Take in how a rollout of a step went on this rank."""

    def metrics(self, ranks: Ranks, record: StepRecord) -> dict[str, float]:
        """Return the mechanism's metrics of a step, the same on all ranks."""
        return {}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint keeps: it changes no token, only the time of a step."""
        return {}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a saved state."""

    def save(self, folder: str) -> None:
        """Write files of the mechanism's own into a checkpoint; called on rank 0."""
