"""Statistics of a run that predict its next step: costs, lengths, survival of drafts, the guard.

All but this rank's own cost are the same on every rank, learned from one gather after each rollout.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.planner.costs import CHAIN_ROWS, KNOTS, CostModel, rollout_seconds
from bubblespec.planner.guard import Guard
from bubblespec.planner.lengths import LengthModel
from bubblespec.planner.rows import Rows
from bubblespec.planner.survival import Survival
from bubblespec.records import RolloutRecord
from bubblespec.samples import Samples
from bubblespec.types import Row

# Measurements of one rank in a rollout, besides survival.
MEASURED = np.dtype(
    [
        ("cost", "f8", (CostModel.NUM_TERMS + len(KNOTS),)),  # parameters of the cost model
        ("forwards", "f8"),  # while the rank had rows of its own, alone or in the TP tail
        ("seconds", "f8", (2,)),  # measured, and modelled without drafts
        ("chains", "f8", (len(CHAIN_ROWS),)),  # see `CostModel.chains`; ones without a drafter
    ]
)


@dataclass
class RunStats:
    """Statistics of one run, on every rank."""

    cost: CostModel = field(default_factory=CostModel)
    """Cost of this rank's forwards."""
    survival: Survival = field(default_factory=Survival)
    """How far drafts hold."""
    shared_cost: CostModel | None = None
    """Mean cost of all ranks, with the chains of a drafter; None before the first rollout."""
    chains: Callable[[], np.ndarray] | None = None
    """Returns by which factors a drafter shortens decoding, see `CostModel.chains`."""
    lengths: LengthModel = field(default_factory=LengthModel)
    forwards: float = 0.0
    """Forwards of the slowest rank in a rollout, exponentially weighted."""
    tokens_per_step: float = 0.0
    """Response tokens of all ranks in a step, exponentially weighted."""
    modelled_s: float = 0.0
    """Seconds that the model predicts for the latest rollout without drafts."""
    guard: Guard | None = None
    """Guard of drafts and the TP tail together; None where nothing is guarded."""

    @property
    def is_on(self) -> bool:
        """Whether the next rollout has drafts and the TP tail."""
        return self.guard is None or self.guard.setting

    @property
    def is_paused(self) -> bool:
        """Whether drafts and the TP tail were slower and pause for some rollouts."""
        return self.guard is not None and self.guard.is_paused

    @property
    def is_next_without(self) -> bool:
        """Whether the rollout after the next one is made without drafts, for comparison."""
        return self.guard is not None and self.guard.is_next_without

    def metrics(self) -> dict[str, int]:
        """Return the guard's decision for the next rollout."""
        return {} if self.guard is None else {"guard/is_on": int(self.guard.setting)}

    def observe_rollout(
        self,
        record: RolloutRecord,
        rows: list[Row],
        ranks: Ranks,
        num_slots: int,
        planning_s: float,
    ) -> float:
        """Learn a rollout, on all ranks together.

        Return the seconds that it has saved by the cost model, the same on every rank.

        rows: this rank's, with their tokens; planning_s: seconds spent on drafts outside of the
        rollout.
        """
        own = np.zeros(1, MEASURED)
        own["cost"] = self.cost.parameters
        own["forwards"] = record.own_forwards + len(record.shared_forwards)
        modelled_s = rollout_seconds(rows_as_generated(rows), self.cost, num_slots)
        own["seconds"] = record.total_s + planning_s, modelled_s
        own["chains"] = 1.0 if self.chains is None else self.chains()
        fields = own.view(np.float64)
        gathered = ranks.gather(np.concatenate((fields, self.survival.measured)))  # by rank
        self.survival.merge(gathered[:, len(fields) :].sum(axis=0))
        measured = np.ascontiguousarray(gathered[:, : len(fields)]).view(MEASURED)[:, 0]
        forwards = float(measured["forwards"].max())
        self.forwards = average(self.forwards or forwards, forwards)
        self.shared_cost = CostModel.from_parameters(measured["cost"].mean(axis=0))
        if self.chains is not None:
            self.shared_cost.chains = measured["chains"].mean(axis=0)
        measured_s, modelled_s = measured["seconds"].max(axis=0).tolist()
        if self.guard is not None:
            self.guard.observe(measured_s, modelled_s)
        self.modelled_s = modelled_s
        return modelled_s - measured_s

    def observe_samples(self, samples: Samples) -> None:
        """Learn lengths from the samples of a step."""
        self.lengths.observe(samples)
        tokens = float(samples.lengths.sum())
        self.tokens_per_step = average(self.tokens_per_step or tokens, tokens)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state as arrays. It changes no token; costs are measured again."""
        cost = np.empty(0) if self.shared_cost is None else self.shared_cost.parameters
        return state_of(self._parts()) | {
            "averages": np.array([self.tokens_per_step, self.forwards]),
            "shared_cost": cost,
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a saved state."""
        load_parts(self._parts(), state)
        self.tokens_per_step, self.forwards = map(float, state["averages"])
        if len(state["shared_cost"]) == CostModel.NUM_TERMS + len(KNOTS):
            self.shared_cost = CostModel.from_parameters(state["shared_cost"])

    def _parts(self) -> dict:
        guard = {} if self.guard is None else {"guard.drafts": self.guard}
        return {"lengths": self.lengths, **guard}


def rows_as_generated(rows: list[Row]) -> Rows:
    """Return the rows of one rank after a rollout, as rows without drafts before it."""
    groups = {name: number for number, name in enumerate(dict.fromkeys(r.id[:2] for r in rows))}
    nothing = np.zeros(len(rows))
    return Rows(
        prompt_tokens=np.array([len(row.prompt) for row in rows], np.int64),
        group=np.array([groups[row.id[:2]] for row in rows], np.int64),
        expected=np.array([len(row.tokens) for row in rows], np.float64),
        spread=nothing,
        drafted=nothing,
        generated=nothing.astype(np.int64),
    )


def state_of(parts: dict) -> dict[str, np.ndarray]:
    """Return the states of several parts in one, keys prefixed by the part's name."""
    return {
        f"{name}.{key}": array
        for name, part in parts.items()
        for key, array in part.state_dict().items()
    }


def load_parts(parts: dict, state: dict[str, np.ndarray]) -> None:
    """Restore what `state_of` has saved; parts that it lacks stay as they are."""
    for name, part in parts.items():
        prefix = f"{name}."
        saved = {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
        if saved:
            part.load_state_dict(saved)


def average(old: float, new: float) -> float:
    """Return the exponentially weighted average."""
    return 0.7 * old + 0.3 * new
