"""Statistics that a run keeps from step to step, from which the next one is predicted: costs,
lengths, how far drafts hold, and the guard. The same on every rank, as it is learned from what
ranks have exchanged: one gather after each rollout."""

from dataclasses import dataclass, field

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.planner.costs import KNOTS, CostModel, rollout_seconds
from bubblespec.planner.guard import Guard
from bubblespec.planner.lengths import LengthModel
from bubblespec.planner.rows import Rows
from bubblespec.planner.survival import Survival
from bubblespec.records import RolloutRecord
from bubblespec.samples import Samples
from bubblespec.types import Row

# What one rank has measured in a rollout.
MEASURED = np.dtype(
    [
        ("cost", "f8", (CostModel.NUM_TERMS + len(KNOTS),)),  # parameters of the cost model
        ("forwards", "f8"),  # while the rank had rows of its own, alone or in the TP tail
        ("seconds", "f8", (2,)),  # measured, and modelled without drafts
    ]
)


@dataclass
class RunStats:
    """Made once per run, on every rank."""

    cost: CostModel = field(default_factory=CostModel)
    """Of this rank's forwards."""
    survival: Survival = field(default_factory=Survival)
    """How far drafts hold."""
    shared_cost: CostModel | None = None
    """Mean of all ranks'; None before the first rollout."""
    lengths: LengthModel = field(default_factory=LengthModel)
    forwards: float = 0.0
    """Of the slowest rank in a rollout; exponentially weighted, as is the next."""
    tokens_per_step: float = 0.0
    """Of responses, over all ranks."""
    modelled_s: float = 0.0
    """That the model expects of the latest rollout without drafts."""
    guard: Guard | None = None
    """Of drafts and the TP tail together; None where nothing is guarded."""

    @property
    def is_on(self) -> bool:
        """Whether the next rollout has drafts and the TP tail."""
        return self.guard is None or self.guard.setting

    @property
    def is_paused(self) -> bool:
        """Whether these were slower and are left out for some rollouts."""
        return self.guard is not None and self.guard.is_paused

    @property
    def is_next_without(self) -> bool:
        """Whether the rollout after the next one is made without them, to compare with."""
        return self.guard is not None and self.guard.is_next_without

    def metrics(self) -> dict[str, int]:
        """What the guard has decided for the next rollout."""
        return {} if self.guard is None else {"guard/is_on": int(self.guard.setting)}

    def observe_rollout(
        self,
        record: RolloutRecord,
        rows: list[Row],
        ranks: Ranks,
        num_slots: int,
        planning_s: float,
    ) -> float:
        """A rollout is over, on all ranks together.

        rows: this rank's, with their tokens; planning_s: seconds spent on drafts outside of it.
        Returns the seconds that the model expects to have been saved, the same on every rank.
        """
        own = np.zeros(1, MEASURED)
        own["cost"] = self.cost.parameters
        own["forwards"] = record.own_forwards + len(record.shared_forwards)
        modelled_s = rollout_seconds(rows_as_generated(rows), self.cost, num_slots)
        own["seconds"] = record.total_s + planning_s, modelled_s
        fields = own.view(np.float64)
        gathered = ranks.gather(np.concatenate((fields, self.survival.measured)))  # by rank
        self.survival.merge(gathered[:, len(fields) :].sum(axis=0))
        measured = np.ascontiguousarray(gathered[:, : len(fields)]).view(MEASURED)[:, 0]
        forwards = float(measured["forwards"].max())
        self.forwards = average(self.forwards or forwards, forwards)
        self.shared_cost = CostModel.from_parameters(measured["cost"].mean(axis=0))
        measured_s, modelled_s = measured["seconds"].max(axis=0).tolist()
        if self.guard is not None:
            self.guard.observe(measured_s, modelled_s)
        self.modelled_s = modelled_s
        return modelled_s - measured_s

    def observe_samples(self, samples: Samples) -> None:
        """Learn lengths from what a step has generated."""
        self.lengths.observe(samples)
        tokens = float(samples.lengths.sum())
        self.tokens_per_step = average(self.tokens_per_step or tokens, tokens)

    def state_dict(self) -> dict[str, np.ndarray]:
        """As arrays. It changes no token, only how soon it is there; costs are measured again."""
        cost = np.empty(0) if self.shared_cost is None else self.shared_cost.parameters
        return state_of(self._parts()) | {
            "averages": np.array([self.tokens_per_step, self.forwards]),
            "shared_cost": cost,
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state."""
        load_parts(self._parts(), state)
        self.tokens_per_step, self.forwards = map(float, state["averages"])
        if len(state["shared_cost"]) == CostModel.NUM_TERMS + len(KNOTS):
            self.shared_cost = CostModel.from_parameters(state["shared_cost"])

    def _parts(self) -> dict:
        guard = {} if self.guard is None else {"guard.drafts": self.guard}
        return {"lengths": self.lengths, **guard}


def rows_as_generated(rows: list[Row]) -> Rows:
    """The rows of one rank after a rollout, as rows without drafts before it."""
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
    """The states of several parts, by their names, in one."""
    return {
        f"{name}.{key}": array
        for name, part in parts.items()
        for key, array in part.state_dict().items()
    }


def load_parts(parts: dict, state: dict[str, np.ndarray]) -> None:
    """Take over what `state_of` has saved; parts that it lacks stay as they are."""
    for name, part in parts.items():
        prefix = f"{name}."
        saved = {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
        if saved:
            part.load_state_dict(saved)


def average(old: float, new: float) -> float:
    """Exponentially weighted."""
    return 0.7 * old + 0.3 * new
