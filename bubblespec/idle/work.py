"""The interface for uses of idle time: what they offer, what they see of their rank, and how the
rollout loop drives them.

Idle time is hard where a rank has finished its rows and waits for the slowest one, and soft where
it still decodes, but so few rows that others could join its forwards at little cost. Imports types
alone, of engine, ranks and records.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from bubblespec.dist.ranks import Ranks
from bubblespec.engine.engine import Engine
from bubblespec.records import RolloutRecord
from bubblespec.rollout.board import RankState
from bubblespec.types import Row


class Offer(NamedTuple):
    """A piece of work that a rank could do in idle time."""

    key: Hashable
    """Which piece; the work that makes the offer knows it by this."""
    saves_s: float
    """Seconds of the run's wall time that it is expected to save."""
    costs_s: float
    """Seconds that the rank which does it is expected to spend on it. In a hard bubble they cost
    the run nothing."""
    beside_rows: bool
    """Whether it is worth slowing down a rank's own rows for; else it goes to ranks that have
    nothing else to do."""
    rank: int | None = None
    """The only rank that can do it, or None for any."""


@dataclass
class RankView:
    """What a use of idle time sees of its own rank during a rollout."""

    rank: int
    engine: Engine
    unfinished: dict[int, Row]
    """Rows of this step that are not done, by id()."""
    record: RolloutRecord
    """Of this rollout, so far."""
    take: Callable[[int, Row], None] | None = None
    """A row has come from another rank: goes on with it, by its place in the launch."""
    give: Callable[[int], Row | None] | None = None
    """Takes the row of a place out of the engine, for another rank; None if it has ended."""
    let_go: Callable[[int], None] | None = None
    """The row of a place is another rank's from now on."""
    max_prefill_tokens: int | None = None
    """Most prompt tokens in one forward, None for no limit: a use may set it, to feed prompts of
    its own a little at a time."""


class IdleWork(Protocol):
    """One use of idle time in one rollout. Between its methods the loop runs forwards and ticks."""

    name: str
    """In metrics (`idle/NAME/...`)."""

    def facts(self) -> np.ndarray:
        """What this rank tells the others in the next tick, float64, of one length on all ranks;
        whatever its offers need beside the ranks' states."""

    def hear(self, facts: list[np.ndarray]) -> None:
        """What all ranks have told of this work in a tick that has completed, by rank."""

    def offers(self, states: list[RankState]) -> list[Offer] | None:
        """Every piece that there is and nobody has been given, most urgent first; None where
        nothing has changed.

        Asked before the first tick, with no states, and after every tick, with those of all ranks.
        The same on every rank: from these, from what `hear` was given, and from what the ranks have
        in common.
        """

    def begin(self, view: RankView) -> list[Row]:
        """The rollout begins. Returns the rows in the engine, from the rollout before, that this
        work goes on with."""

    def wanted(self) -> int:
        """How many more offers this rank could begin now, if it were given them."""

    def start(self, offer: Offer, rank: int) -> None:
        """A rank has been given the offer, and no other rank has. Called on all ranks."""

    def advance(self) -> bool:
        """Between two forwards: put rows into the engine, or do a slice of the work so short that
        nobody waits for it; returns whether there is another slice to do. No collectives: the other
        ranks may be anywhere."""

    def finish(self, row: Row) -> bool:
        """A row that is not of this step is done. Returns whether it was this work's."""

    def make_room(self, count: int) -> int:
        """Rows of this step have come to this rank: give up to `count` slots back; returns how
        many."""

    def end(self) -> None:
        """The last tick: all ranks leave the rollout, whatever is unfinished. No forward comes
        after it."""

    def merge(self, ranks: Ranks) -> None:
        """After the rollout, on all ranks together: bring what each has done to where it is needed.
        Collectives may be used."""
