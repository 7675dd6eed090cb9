"""Chains of the learned drafter as a draft source: how long they are, by what is accepted and by
what they cost.

A chain of n tokens adds n draft tokens of each row to the forward, and n forwards of the drafter
before it. How many of them are accepted is measured by position; so are the seconds of the
drafter's forwards. For the rows that are there the length is chosen that gives most tokens a
second, none among them (TLT's choice of a strategy by the number of running requests, arXiv
2511.16665).
"""

import contextlib
import time
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from bubblespec.draft.rest import Rest
from bubblespec.draft.sources import DraftSource, Proposal, TrackedRow
from bubblespec.engine.chains import LONGEST, MOST_ROWS, Chains
from bubblespec.engine.engine import Engine
from bubblespec.planner.costs import CostModel
from bubblespec.records import CHAIN_ROWS

NAME = "drafter"
MEMORY = 2000.0  # chains over which acceptance is averaged
PRIOR_CHAINS = 20.0  # that what training measured counts for
UNKNOWN = 0.3  # chance of each token before anything is known


class Acceptance:
    """Chance that a token of a chain is right if all before it were, by its place in the chain;
    exponentially weighted."""

    def __init__(self):
        self.prior = np.full(LONGEST, UNKNOWN)
        self.seen = np.zeros((LONGEST, 2))  # tried, right

    def expect(self, accepted: np.ndarray) -> None:
        """What training has measured, see `DrafterTraining.accepted`: it replaces what was seen of
        an earlier drafter."""
        whole = np.concatenate(([1.0], np.asarray(accepted, np.float64)))
        chances = np.minimum(
            whole[1:] / np.maximum(whole[:-1], 1e-9), 1.0
        )  # longer chains are from fewer positions
        self.prior = np.append(chances, np.full(LONGEST, chances[-1]))[:LONGEST]
        self.seen *= 0.5

    def observe(self, proposed: np.ndarray, gained: np.ndarray) -> None:
        """A row has gained tokens after a chain was drafted for it, of which any number was
        verified."""
        count = min(len(proposed), len(gained))
        right = np.asarray(proposed[:count]) == gained[:count]
        tried = count if right.all() else int(right.argmin()) + 1
        self.seen[:tried] *= 1 - 1 / MEMORY
        self.seen[:tried, 0] += 1
        self.seen[:tried, 1] += right[:tried]

    def chances(self) -> np.ndarray:
        """Chance that the first n tokens are all right, float64 [LONGEST]."""
        tried, right = (
            self.seen + PRIOR_CHAINS * np.stack((np.ones(LONGEST), self.prior), axis=1)
        ).T
        return np.cumprod(right / tried)


class LearnedDrafts(DraftSource):
    """The drafter's chains for rows of an engine.

    saved_s: seconds that chains are expected to have saved; num_asked: forwards in which there was
    a choice; whoever asks for them sets them back.
    """

    def __init__(self, chains: Chains, engine: Engine, cost: CostModel, clock=time):
        """cost: of the policy's forwards."""
        self.chains, self.engine, self.cost, self.clock = chains, engine, cost, clock
        self.acceptance = Acceptance()
        self.own_cost = (
            CostModel()
        )  # of the drafter's chains: rows stand for its forwards, tokens for those that it feeds
        self.chosen = np.zeros(
            (len(CHAIN_ROWS), LONGEST + 1), np.int64
        )  # forwards by rows and length of the chain
        self.saved_s, self.num_asked = 0.0, 0
        self.rest = Rest()
        self._proposed: dict[int, np.ndarray] = {}  # by id() of the row

    @contextlib.contextmanager
    def elsewhere(self, chains: Chains, engine: Engine) -> Iterator[None]:
        """Within it proposals are for rows of another engine, which has chains of its own, of the
        same drafter."""
        own = self.chains, self.engine
        engine.runner.chains = (
            chains if self.engine.runner.chains is not None else None
        )  # where they are followed at all
        self.chains, self.engine = chains, engine
        try:
            yield
        finally:
            self.chains, self.engine = own

    def profile(self) -> None:
        """Time the drafter's forwards of few and many rows, before any row is there. Each is run
        once before it counts."""
        for count in sorted(
            {1, min(8, self.engine.num_slots), min(MOST_ROWS, self.engine.num_slots)}
        ):
            self.chains.rehearse(count)
            for _ in range(3):
                begin_s = self.clock.perf_counter()
                self.chains.rehearse(count)
                self.own_cost.anchor(1, count, 0, 0, self.clock.perf_counter() - begin_s)
        self.engine.reset()

    @property
    def is_enabled(self) -> bool:
        """Otherwise nothing is kept, learned or drafted in this step."""
        return not self.rest.is_on

    def follow(self, is_on: bool) -> None:
        """Keep what chains need of an engine's rows, from before they are there on; or nothing, and
        give the memory back."""
        runner = self.engine.runner
        if runner.chains is not None and not is_on:
            self.chains.release()
        runner.chains = self.chains if is_on else None

    @property
    def chance(self) -> float:
        """Of the next token of another proposal: below it a chain gains more than that, its own
        time taken off."""
        active = max(len(self.engine.rows), 1)
        length = self.choose(active, 1)
        if not length:
            return 0.0
        gained = float(self.acceptance.chances()[:length].sum())
        forward_s, own_s = (
            self.cost.seconds(active, active + length, 1),
            self.own_cost.seconds(length, length),
        )
        net = gained - (1 + gained) * own_s / (forward_s + own_s)
        return max(net / (1 + net), 0.0)  # a long proposal of survival s gains s / (1 - s) tokens

    def begin(self) -> None:
        """See `DraftSource`."""
        self._proposed.clear()

    def track(self, tracked: TrackedRow) -> None:
        """See `DraftSource`."""
        self._proposed.pop(id(tracked.row), None)  # of a row that is no more

    def propose(
        self, rows: list[TrackedRow], lengths: list[int], limits: list[int]
    ) -> list[Proposal | None]:
        """See `DraftSource`."""
        proposals: list[Proposal | None] = [None] * len(rows)
        active = len(self.engine.rows)
        slot_of = {id(row): slot for slot, row in enumerate(self.engine.rows)}
        place_of = {
            slot_of[id(tracked.row)]: place
            for place, tracked in enumerate(rows)
            if id(tracked.row) in slot_of
        }
        if not place_of or active > MOST_ROWS:
            return proposals
        length = self.choose(active, len(place_of))
        self.num_asked += 1
        self.chosen[bisect_right(CHAIN_ROWS, active) - 1, length] += 1
        if not length:
            return proposals
        begin_s = self.clock.perf_counter()
        tokens, slots, caught_up = self.chains.draft(
            self.engine, np.array(sorted(place_of)), length
        )
        if len(slots):
            gained, expected_s = self._forecast(active, len(slots))
            self.saved_s += float(gained[length] / gained[0] * expected_s[0] - expected_s[length])
            seconds = self.clock.perf_counter() - begin_s
            self.own_cost.observe(length, caught_up + (length - 1) * len(slots), 0, 0, seconds)
        for slot, chain in zip(slots.tolist(), tokens, strict=True):
            place = place_of[slot]
            proposals[place] = Proposal(chain[: limits[place]], (NAME,))
            self._proposed[id(rows[place].row)] = chain
        return proposals

    def observe(self, tracked: TrackedRow, tokens: np.ndarray) -> None:
        """See `DraftSource`."""
        if (proposed := self._proposed.pop(id(tracked.row), None)) is not None:
            self.acceptance.observe(proposed, tokens)

    def choose(self, active: int, count: int) -> int:
        """Tokens of a chain for `count` of `active` rows that gives most tokens a second; 0 for
        none."""
        gained, seconds = self._forecast(active, count)
        return int((gained / seconds).argmax())

    def _forecast(self, active: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that all rows gain in a forward, and its seconds with those of the drafter, by the
        length of the chains, float64 [LONGEST + 1]."""
        lengths = np.arange(LONGEST + 1)
        gained = active + count * np.concatenate(([0.0], np.cumsum(self.acceptance.chances())))
        fed, positions = active + count * lengths, int(self.engine.lengths.sum())
        seconds = self.cost.seconds(active, fed, count * (lengths > 0), positions)
        own = self.own_cost.seconds(lengths, count * np.maximum(lengths, 1))
        return gained, seconds + np.where(lengths > 0, own, 0.0)

    def take_chosen(self) -> np.ndarray:
        """Forwards since the last call by active rows (CHAIN_ROWS) and length of their chains,
        int64 [., LONGEST + 1]."""
        chosen, self.chosen = self.chosen, np.zeros_like(self.chosen)
        return chosen
