"""The plan of a rollout: what a rank generates, how it feeds it, and the use of its idle time.

The sampler makes a plan, each mechanism amends it, and the loop carries it out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.idle.task import LocalWork, RankView
from bubblespec.planner.costs import CostModel
from bubblespec.rollout.table import RowTable
from bubblespec.types import Draft, Group, Launch, Row, SampleId


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
        self.engine.add(list(view.unfinished))

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

    table: RowTable
    rows: dict[int, Row]
    """Rows of this rank by their index in the table, in admission order."""
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
    """What the guards leave out, see `Guards`."""
    is_on: bool = True
    """Whether the guard allows drafts, and a TP tail that is entered by cost."""
    proposer: Any = None
    """Source of draft tokens, a `Proposer` (draft/proposer.py), which the loop need not load; None
    without drafts."""
    scoring: Any = None
    """Scores of the responses, a `Scoring` (rewards/scorer.py); None where they are not scored."""
    cost: CostModel | None = None
    """Learns from every forward."""
    feed: RowFeed = field(default_factory=RowFeed)
    take_over: Any = None
    """What finishes the unfinished rows of all ranks in place of the loop, on all ranks or on none.
    `is_near(table)`: whether that may be due soon, so that ticks have to stay frequent;
    `is_due(table, states)`: whether it is at this tick, by shared data alone; `run(loop)` generates
    the rows to their end: own ones leave the loop's engine, and `loop.finish` gets each."""
    ahead: Any = None
    """Drafting for coming steps, a `DraftAhead` (idle/draft_ahead.py); on all ranks or on none."""
    works: list[LocalWork] = field(default_factory=list)
    """Other uses of idle time, the same on all ranks."""

    @property
    def launch(self) -> Launch:
        """What all ranks generate."""
        return self.table.launch

    @property
    def idle_uses(self) -> list:
        """All uses of idle time."""
        return [self.ahead, *self.works] if self.ahead is not None else self.works
