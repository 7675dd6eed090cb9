"""The plan of a rollout: what a rank generates, how it feeds it, and the use of its idle time.

Before each rollout the sampler makes a `RolloutPlan`, each `Mechanism` amends it, and the loop
carries it out. A rank is idle once it has finished its rows and waits for the slowest rank. While
it still decodes few rows, drafts may be co-scheduled: their rows join its forwards at little cost.

A mechanism can be switched off without changing what is trained on. `Drafting` is part of the core;
the others live in bubblespec/mechanisms/.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.planner.costs import CostModel
from bubblespec.records import RolloutRecord, Span, StepRecord
from bubblespec.rollout.table import RolloutProgress
from bubblespec.types import Draft, Group, Row, SampleId, StepBatch

SLICE_S = 0.05  # seconds of uninterrupted work; the smallest piece may take longer
LEAST_S = 1e-9


@dataclass
class RankView:
    """The view of idle work on its own rank in a rollout."""

    rank: int
    engine: Engine
    unfinished: dict[int, Row]
    """Unfinished rows of this step, by number."""
    record: RolloutRecord
    """Record of this rollout, so far."""
    num_rows: int = 0
    """Numbers that rows have: those of the launch, and of rows begun for coming steps."""
    max_prefill_tokens: int | None = None
    """Maximum number of prompt tokens in one forward, None for no limit. Set where prompts of
    drafts are fed a little at a time."""
    begin: Callable[[Row], None] | None = None
    """The feed's own way to begin a row of a coming step; None: the row goes into the engine."""


class IdleTask:
    """Work that each rank does for itself in a rollout, in slices, when it has nothing else to do.

    Between its methods the loop runs forwards and ticks."""

    name = "work"
    """Name in metrics (`idle/NAME/...`)."""
    view: RankView

    def begin(self, view: RankView) -> None:
        """Start with a rollout."""
        self.view = view

    def can_begin(self) -> bool:
        """Whether a slice is due that would keep no other rank waiting."""
        raise NotImplementedError

    def next_slice(self) -> tuple[float, float]:
        """Return predicted seconds of the next slice, and of wall time saved, where `can_begin`."""
        raise NotImplementedError

    def do_slice(self) -> Span:
        """Do one slice; return its span of time. No collectives here."""
        raise NotImplementedError

    def finish(self, ranks: Ranks) -> None:
        """Exchange the results after the rollout, on all ranks together. May use collectives."""

    @property
    def rate(self) -> float:
        """Predicted seconds saved per second of the next slice; 0 where none can begin."""
        if not self.can_begin():
            return 0.0
        slice_s, saved_s = self.next_slice()
        return saved_s / max(slice_s, LEAST_S)

    def run_slice(self) -> None:
        """Do one slice, and record it."""
        use = self.view.record.idle[self.name]
        use.expected_s += self.next_slice()[1]
        span = self.do_slice()
        self.view.record.slices.append(span)
        use.seconds += span.end_s - span.begin_s


class RowFeed:
    """Feeds the rows of one rollout on one rank.

    By default all rows go into the engine at once, and are complete when they leave it.
    """

    engine: Engine
    is_running = False
    """Whether rows may have to wait for something outside the engine."""

    def start(self, view: RankView, proposer: Any) -> None:
        """Begin with the rows of `view.unfinished`, in their order. proposer: see `RolloutPlan`."""
        self.engine = view.engine
        self.engine.add(list(view.unfinished.values()))

    def advance(self, finished: Iterable[Row] = ()) -> list[Row]:
        """Return complete rows. finished: rows that the engine has just returned."""
        return list(finished)

    def drop(self, row: Row) -> None:
        """Take an unfinished row out of the rollout; the row keeps its tokens."""
        self.engine.drop(row)

    def wait(self) -> None:
        """Wait a moment for whatever blocks rows. Called while `is_running`."""

    def close(self) -> None:
        """End the rollout."""


@dataclass
class RolloutPlan:
    """One rollout on one rank."""

    table: RolloutProgress
    rows: dict[int, Row]
    """Rows of this rank by number, in admission order."""
    params: SamplingParams
    step: int | None = None
    """Number of the step; None in an evaluation."""
    used: list[Group] = field(default_factory=list)
    """Groups that the step has drawn so far, those of this rollout included."""
    drafts: dict[SampleId, Draft] = field(default_factory=dict)
    """Drafts that samples of all ranks have."""
    version: int = 0
    """Updates of the weights."""
    began_s: float = 0.0
    """Time at which the planning began."""
    expected_s: float = float("nan")
    """Predicted seconds until this rank finishes its rows; NaN if unknown."""
    without: frozenset[str] = frozenset()
    """What it does without, see `Chooser`; without drafts no TP tail is entered by cost."""
    proposer: Any = None
    """Source of draft tokens, a `Proposer` (draft/proposer.py), which the loop need not load; None
    without drafts."""
    scoring: Any = None
    """Scores of the responses, `RolloutRewards` (rewards/scorer.py); None without any."""
    cost: CostModel | None = None
    """Learns from every forward."""
    feed: RowFeed = field(default_factory=RowFeed)
    take_over: Any = None
    """What finishes the unfinished rows of all ranks in place of the loop, on all ranks or on none.
    `is_near(table)`: whether that may be due soon, so that ticks have to stay frequent;
    `is_due(table, states)`: whether it is at this tick, by shared data alone; `run(loop)` generates
    the rows to their end: own ones leave the loop's engine, and `loop.finish` gets each."""
    idle_drafts: Any = None
    """Drafting for coming steps, a `DraftAhead` (rollout/drafting.py); on all ranks or on none."""
    works: list[IdleTask] = field(default_factory=list)
    """Other uses of idle time, the same on all ranks."""

    @property
    def launch(self) -> StepBatch:
        """What all ranks generate."""
        return self.table.launch

    @property
    def name(self) -> str:
        """Name of the rollout in lines on the screen."""
        return "evaluation" if self.step is None else f"step {self.step + 1}"

    @property
    def idle_uses(self) -> list:
        """All uses of idle time."""
        return [self.idle_drafts, *self.works] if self.idle_drafts is not None else self.works


class Mechanism:
    """One mechanism of a run. Every method has a default.

    All ranks call each method at the same point, so methods may use collectives; `save` is called
    on rank 0 alone.
    """

    name = "mechanism"
    """Key of its state in checkpoints."""
    needs_timings = False
    """Whether later rollouts use the costs that earlier ones have measured."""
    state: Any = None
    """What a checkpoint keeps, with `state_dict` and `load_state_dict`: it changes no token."""
    sources: Sequence[Any] = ()
    """`DraftSource`s (draft/sources.py) that serve evaluations as well."""

    def start(self, trainer) -> None:
        """Finish the set-up, before the first step: a warm start, for instance."""

    def begin_rollout(self, plan: RolloutPlan) -> None:
        """Amend the plan of a rollout that is about to begin."""

    def end_rollout(self, record: RolloutRecord) -> None:
        """Take in how a rollout of a step went on this rank."""

    def metrics(self, ranks: Ranks, record: StepRecord) -> dict[str, Any]:
        """Return this rank's metrics of a step.

        Those without a reduction in metrics.toml are the same on all ranks, see `over_ranks`."""
        return {}

    def save(self, folder: str) -> None:
        """Write files of the mechanism's own into a checkpoint; called on rank 0."""
