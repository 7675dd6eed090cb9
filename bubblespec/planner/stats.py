"""Statistics of a run that predict its next step: costs, lengths, survival of drafts, choices.

All but this rank's own cost are the same on every rank, learned from one gather after each rollout.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.planner.chooser import DRAFTS, Chooser
from bubblespec.planner.costs import CHAIN_ROWS, KNOTS, CostModel, rollout_seconds
from bubblespec.planner.lengths import LengthForecast, LengthModel
from bubblespec.planner.prices import Counts, RolloutCostFit, counts_of
from bubblespec.planner.survival import AcceptanceStats
from bubblespec.records import RolloutRecord, Samples
from bubblespec.types import Row, StepBatch

# Measurements of one rank in a rollout, besides survival and lengths.
MEASURED = np.dtype(
    [
        ("cost", "f8", (CostModel.NUM_TERMS + len(KNOTS),)),  # parameters of the cost model
        ("forwards", "f8"),  # while the rank had rows of its own, alone or in the TP tail
        ("seconds", "f8"),
        ("chains_s", "f8"),  # of drafting chains, which `CostModel.chains` has already
        ("own_s", "f8"),  # until the rank's rows were done
        ("counts", "f8", (len(Counts._fields),)),
        ("chains", "f8", (len(CHAIN_ROWS),)),  # see `CostModel.chains`; ones without a drafter
    ]
)


@dataclass
class RunStats:
    """Statistics of one run, on every rank."""

    cost: CostModel = field(default_factory=CostModel)
    """Cost of this rank's forwards."""
    survival: AcceptanceStats = field(default_factory=AcceptanceStats)
    """How far drafts hold."""
    shared_cost: CostModel | None = None
    """Mean cost of all ranks; None before the first rollout."""
    copy_cost: CostModel | None = None
    """The same with the chains of the quantised copy; None without one."""
    chains: Callable[[float], np.ndarray] | None = None
    """Returns by which factors the copy shortens decoding, see `DraftModelSource.shortening`."""
    chains_part: str = ""
    """The copy's name among the chooser's parts."""
    context: float = 0.0
    """Mean positions of a row in the latest rollout."""
    lengths: LengthModel = field(default_factory=LengthModel)
    pricing: RolloutCostFit = field(default_factory=RolloutCostFit)
    """Prices of the parts of a rollout."""
    chooser: Chooser = field(default_factory=Chooser)
    """Choice of what coming rollouts do without."""
    invested_s: float = 0.0
    """Seconds of the rollouts so far that went into drafts in the store."""
    forwards: float = 0.0
    """Forwards of the slowest rank in a rollout, exponentially weighted."""
    tokens_per_step: float = 0.0
    """Response tokens of all ranks in a step, exponentially weighted."""
    draw_index: int = 0
    """How often all prompts of some rollout so far had been drawn before."""
    modelled_s: float = 0.0
    """Seconds that the model predicts for the latest rollout, in turn and without drafts."""

    def cost_without(self, off: frozenset[str]) -> CostModel | None:
        """Return the mean cost of all ranks in rollouts without some parts, see `Chooser`."""
        has_chains = self.copy_cost is not None and self.chains_part not in off
        return self.copy_cost if has_chains else self.shared_cost

    def metrics(self) -> dict[str, float]:
        """Return the effects of what is chosen about, and the error of the prices."""
        metrics = self.chooser.metrics()
        if math.isfinite(self.pricing.error):
            metrics["rollout/price_error"] = self.pricing.error
        return metrics

    def observe_rollout(
        self,
        record: RolloutRecord,
        launch: StepBatch,
        rows: dict[int, Row],
        ranks: Ranks,
        *,
        num_slots: int,
        planning_s: float,
        used_share: float,
        step: int,
    ) -> float:
        """Learn a rollout, on all ranks together.

        Return the seconds that it has saved by the cost model, the same on every rank.

        rows: this rank's by their index in the launch, with their tokens; planning_s: seconds spent
        on drafts outside of the rollout; used_share: of the stored tokens, those of this rollout's
        drafts.
        """
        without = self.chooser.off(step)
        own = np.zeros(1, MEASURED)
        own["cost"] = self.cost.parameters
        own["forwards"] = record.own_forwards + len(record.shared_forwards)
        # One rollout without drafts among others plans and ticks for them; several do not.
        extra_s = -record.host_s if DRAFTS in without else planning_s
        own["seconds"] = record.total_s + extra_s
        if self.chains is not None:
            own["chains_s"] = sum(f.propose_s for f in record.forwards if f.own_rows)
        own["own_s"] = record.own_s
        own["counts"] = counts_of(record, self.cost)
        own["chains"] = 1.0 if self.chains is None else self.chains(self.context)
        lengths = np.zeros(len(launch.ids))
        lengths[list(rows)] = [len(row.tokens) for row in rows.values()]
        fields, counted = own.view(np.float64), self.survival.measured
        parts = np.cumsum([len(fields), len(counted)])
        gathered = ranks.all_gather(np.concatenate((fields, counted, lengths)))  # by rank
        of_ranks, counted, lengths = np.split(gathered, parts, axis=1)
        self.survival.merge(counted.sum(axis=0), has_drafts=DRAFTS not in without)
        measured = np.ascontiguousarray(of_ranks).view(MEASURED)[:, 0]
        forwards = float(measured["forwards"].max())
        self.forwards = average(self.forwards or forwards, forwards)
        self.shared_cost = CostModel.from_parameters(measured["cost"].mean(axis=0))
        lengths = lengths.sum(axis=0)
        self.modelled_s = seconds_in_turn(
            launch, lengths, self.shared_cost, ranks.world_size, num_slots
        )
        slowest = measured[measured["own_s"].argmax()]  # what others draft meanwhile is free
        measured_s = float(slowest["seconds"])
        counts = Counts(*slowest["counts"].tolist())
        prompt = float(np.mean([len(group.prompt.token_ids) for group in launch.groups]))
        self.context = prompt + float(lengths.mean()) / 2
        priced_s = measured_s - float(slowest["chains_s"])
        self.pricing.observe(counts, priced_s, self.shared_cost, prompt, self.context)
        self._choose(step, measured_s, counts, used_share)
        if self.chains is not None:
            self.copy_cost = CostModel.from_parameters(self.shared_cost.parameters)
            self.copy_cost.chains = measured["chains"].mean(axis=0)
        return self.modelled_s - measured_s

    def _choose(self, step: int, measured_s: float, counts: Counts, used_share: float) -> None:
        """Choose by one more rollout. A draft is charged in the rollout that it was made for."""
        prices = self.pricing.prices
        if prices is None:
            return
        made_s = counts.drafted * prices.drafted_s + counts.begun * prices.begun_s
        made_s = min(made_s, 0.9 * measured_s)
        used_s = used_share * self.invested_s
        self.invested_s += made_s - used_s
        charged_s = measured_s - made_s + used_s * (DRAFTS not in self.chooser.off(step))
        self.chooser.observe(step, charged_s, self.modelled_s)

    def observe_samples(self, samples: Samples) -> None:
        """Learn lengths from the samples of a step."""
        self.lengths.observe(samples)
        tokens = float(samples.lengths.sum())
        self.tokens_per_step = average(self.tokens_per_step or tokens, tokens)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state as arrays. It changes no token; costs are measured again."""
        cost = np.empty(0) if self.shared_cost is None else self.shared_cost.parameters
        chains = None if self.copy_cost is None else self.copy_cost.chains
        return state_of(self._parts()) | {
            "averages": np.array([self.tokens_per_step, self.forwards]),
            "chooser.invested_s": np.array(self.invested_s),
            "shared_cost": cost,
            "chains": np.empty(0) if chains is None else chains,
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a saved state."""
        load_parts(self._parts(), state)
        self.tokens_per_step, self.forwards = map(float, state["averages"])
        self.invested_s = float(state.get("chooser.invested_s", 0.0))
        if len(state["shared_cost"]) == CostModel.NUM_TERMS + len(KNOTS):
            self.shared_cost = CostModel.from_parameters(state["shared_cost"])
            if self.chains is not None and len(state.get("chains", ())) == len(CHAIN_ROWS):
                self.copy_cost = CostModel.from_parameters(state["shared_cost"])
                self.copy_cost.chains = state["chains"]

    def _parts(self) -> dict:
        return {"lengths": self.lengths, "prices": self.pricing, "chooser": self.chooser}


def seconds_in_turn(
    launch: StepBatch, lengths: np.ndarray, cost: CostModel, num_ranks: int, num_slots: int
) -> float:
    """Return the seconds of a rollout without drafts whose groups are placed round-robin.

    lengths: float64 [S], tokens of each response, which a rank begins longest first."""
    prompts = np.array([len(group.prompt.token_ids) for group in launch.groups])
    group = np.arange(len(lengths)) // launch.num_generations
    nothing = np.zeros(len(lengths))
    rows = LengthForecast(prompts[group], group, lengths, nothing, nothing, nothing)
    return rollout_seconds(rows, cost, num_slots, rank_of=group % num_ranks)


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
