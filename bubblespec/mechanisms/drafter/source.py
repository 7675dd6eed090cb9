"""The drafter as a draft source, and the length of its chains by acceptance and cost.

A chain of n tokens adds n draft tokens per row to a forward, and n forwards of the drafter before
it. Acceptance is measured by position in the chain, and so are the seconds of the drafter's
forwards; `choose_chain_length` picks the length that gives the most tokens per second for the rows
that are active, 0 included (TLT selects a strategy by the number of running requests, arXiv
2511.16665).
"""

import contextlib
import time
from collections.abc import Iterator

import numpy as np

from bubblespec.draft.sources import DraftSource, Proposals, TrackedRows
from bubblespec.engine.batch import Load
from bubblespec.mechanisms.drafter.runner import MAX_CHAIN_LENGTH, MAX_ROWS, DrafterRunner
from bubblespec.planner.costs import CostModel
from bubblespec.planner.survival import TRIED, Survival
from bubblespec.planner.windows import choose_chain_length, rate_below_which_chains_gain

NAME = "drafter"
PRIOR = 0.6  # acceptance rate of each position before measurements: enough to be tried


class DrafterSource(DraftSource):
    """The drafter's chains for the rows of an engine."""

    kinds = ((NAME,),)
    needs_results = True
    weighs_its_time = True

    def __init__(self, runner: DrafterRunner, cost: CostModel, clock=time):
        """Create the source of an engine's rows. cost: of the policy's forwards."""
        self.runner, self.cost, self.clock = runner, cost, clock
        self.is_enabled = True
        self._survival = Survival()
        positions = [(n,) for n in range(MAX_CHAIN_LENGTH)]  # in the chain
        self._positions = self._survival.add(positions, [PRIOR] * MAX_CHAIN_LENGTH)
        # Cost of chains: rows stand for the drafter's forwards, tokens for the tokens fed to it.
        self.drafter_cost = CostModel()
        self.chain_lengths = np.zeros(MAX_CHAIN_LENGTH + 1, np.int64)
        """Forwards by chosen length, since the last reset."""
        self._proposed: dict[int, np.ndarray] = {}  # by row

    def acceptance_rates(self) -> np.ndarray:
        """Return the probability that the first 1, 2, ... tokens of a chain are all right."""
        return np.cumprod(self._survival.estimates[self._positions])

    def enable(self, is_on: bool) -> None:
        """Follow the engine's rows, or draft nothing and release memory. Between rollouts only."""
        self.is_enabled = is_on
        self.runner.enable(is_on)

    @contextlib.contextmanager
    def moved_to(self, runner: DrafterRunner) -> Iterator[None]:
        """Context in which proposals are for the rows of another engine."""
        own, self.runner = self.runner, runner
        runner.enable(self.is_enabled)
        try:
            yield
        finally:
            self.runner = own

    def profile(self) -> None:
        """Time the drafter's forwards of few and many rows, while the engine has none."""
        num_slots = self.runner.engine.num_slots
        for count in sorted({1, min(8, num_slots), min(MAX_ROWS, num_slots)}):
            self.runner.run_once(count)
            for _ in range(3):
                begin_s = self.clock.perf_counter()
                self.runner.run_once(count)
                self.drafter_cost.anchor(Load(1, count), self.clock.perf_counter() - begin_s)
        self.runner.engine.reset()

    @property
    def chance(self) -> float:  # type: ignore[override]  # it depends on the engine's rows
        """Acceptance rate of another source below which a chain gains more, its time included."""
        active = max(len(self.runner.engine.rows), 1)
        length = self.choose_length(active, 1)
        if not length:
            return 0.0
        gained = self.acceptance_rates()[:length].sum()
        drafter_s = self.drafter_cost.seconds(length, length)
        forward_s = self.cost.seconds(active, active + length, 1)
        return rate_below_which_chains_gain(*np.array([[gained], [drafter_s], [forward_s]]))

    def begin(self, tracked: TrackedRows) -> None:
        super().begin(tracked)
        self._proposed.clear()
        self._survival.begin()

    def propose(self, numbers: np.ndarray, limits: np.ndarray) -> Proposals:
        nothing, rows = super().propose(numbers, limits), self.runner.engine.rows
        slots = self.tracked.slots(numbers, rows).tolist()
        index_of = {slot: index for index, slot in enumerate(slots) if slot >= 0}
        if not index_of or len(rows) > MAX_ROWS:
            return nothing
        length = self.choose_length(len(rows), len(index_of))
        self.chain_lengths[length] += 1
        if not length:
            return nothing
        begin_s = self.clock.perf_counter()
        chains, slots, caught_up = self.runner.draft(np.array(sorted(index_of)), length)
        if len(slots):
            seconds = self.clock.perf_counter() - begin_s
            fed = caught_up + (length - 1) * len(slots)
            self.drafter_cost.observe(Load(length, fed), seconds)
        drafted = np.array([index_of[slot] for slot in slots.tolist()], np.int64)
        self._proposed.update(zip(numbers[drafted].tolist(), chains, strict=True))
        _, begin, count, kind = nothing
        begin[drafted] = length * np.arange(len(drafted))
        count[drafted] = np.minimum(limits[drafted], length)
        return Proposals(chains.ravel(), begin, count, kind)

    def observe(self, numbers: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        tried, right = np.zeros((2, MAX_CHAIN_LENGTH))
        ends = counts.cumsum().tolist()
        for number, end, count in zip(numbers.tolist(), ends, counts.tolist(), strict=True):
            if (chain := self._proposed.pop(number, None)) is None:
                continue
            both = min(len(chain), count)
            is_right = chain[:both] == tokens[end - count :][:both]
            num_right = both if is_right.all() else int(is_right.argmin())
            tried[: min(num_right + 1, both)] += 1
            right[:num_right] += 1
        self._survival.counts[TRIED:, 1] += tried, right

    def choose_length(self, active: int, count: int) -> int:
        """Return the length of chains for `count` of `active` rows, 0 for none."""
        rates, positions = self.acceptance_rates(), int(self.runner.engine.lengths.sum())
        return choose_chain_length(rates, self.cost, self.drafter_cost, active, count, positions)
