"""The drafter as a draft source: how long its chains are, by what is accepted and by what they
cost.

A chain of n tokens adds n draft tokens per row to a forward, and n forwards of the drafter before
it. Acceptance is measured by position in the chain, and so are the seconds of the drafter's
forwards; `choose_chain_length` picks the length that gives the most tokens per second for the rows
that are active, 0 included (TLT selects a strategy by the number of running requests, arXiv
2511.16665).

The more probable a token is to the drafter, the more often it is right, so acceptance is measured
by that too. Unlikely tokens are not verified, and where the host sees each token at once, a chain
ends when another token would not pay, or goes on to its maximum (`plan_chains`; EAGLE-2, arXiv
2406.16858, expands its trees by the same confidence).
"""

import contextlib
import time
from collections.abc import Iterator

import numpy as np

from bubblespec.draft.drafter import MAX_CHAIN_LENGTH, MAX_ROWS, DrafterRunner
from bubblespec.draft.sources import DraftSource, Proposals, Survival, TrackedRows
from bubblespec.planner.costs import CostModel
from bubblespec.planner.windows import choose_chain_length, plan_chains
from bubblespec.records import Load

NAME = "drafter"
PRIOR = 0.6  # acceptance rate of each token before anything is known: enough to be tried
# Tokens to which the drafter gives about the same probability are judged alike. About the square
# root of it is accepted (SmolLM2, temperature 0.8).
CONFIDENCES = np.array([0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95, 1.0])
CONFIDENCE_PRIORS = np.sqrt((CONFIDENCES[1:] + CONFIDENCES[:-1]) / 2)


class DrafterSource(DraftSource):
    """The drafter's chains for the rows of an engine."""

    kinds = ((NAME,),)

    def __init__(self, runner: DrafterRunner, cost: CostModel, clock=time):
        """cost: of the policy's forwards."""
        self.runner, self.cost, self.clock = runner, cost, clock
        self.is_enabled = True
        self._survival = Survival()
        positions = [(n,) for n in range(MAX_CHAIN_LENGTH)]  # in the chain
        self._positions = self._survival.add(positions, [PRIOR] * MAX_CHAIN_LENGTH)
        bins = [("confidence", number) for number in range(len(CONFIDENCE_PRIORS))]
        self._confidences = self._survival.add(bins, CONFIDENCE_PRIORS.tolist())
        # Of chains: rows stand for the drafter's forwards, tokens for those that it is fed.
        self.drafter_cost = CostModel()
        self.chain_lengths = np.zeros(MAX_CHAIN_LENGTH + 1, np.int64)
        """Forwards by the length chosen, since they were last set to 0."""
        # By row: the chain, and what its tokens' confidence is in `_survival`.
        self._proposed: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def acceptance_rates(self) -> np.ndarray:
        """Probability that the first 1, 2, ... tokens of a chain are all right, float64
        [MAX_CHAIN_LENGTH]."""
        return np.cumprod(self._survival.estimates[self._positions])

    def enable(self, is_on: bool) -> None:
        """Keep from now on what chains need of the engine's rows; or draft nothing, and release the
        drafter's hidden states, keys and values. Between rollouts only."""
        self.is_enabled = is_on
        self.runner.enable(is_on)

    @contextlib.contextmanager
    def moved_to(self, runner: DrafterRunner) -> Iterator[None]:
        """Within it, proposals are for the rows of another engine."""
        own, self.runner = self.runner, runner
        runner.enable(self.is_enabled)
        try:
            yield
        finally:
            self.runner = own

    def profile(self) -> None:
        """Time the drafter's forwards of few and many rows, while there are no rows. The first one
        of each size does not count."""
        num_slots = self.runner.engine.num_slots
        for count in sorted({1, min(8, num_slots), min(MAX_ROWS, num_slots)}):
            self.runner.run_once(count)
            for _ in range(3):
                begin_s = self.clock.perf_counter()
                self.runner.run_once(count)
                self.drafter_cost.anchor(Load(1, count), self.clock.perf_counter() - begin_s)
        self.runner.engine.reset()

    @property
    def chance(self) -> float:
        """Acceptance rate of another source's proposal below which a chain gains more, net of the
        drafter's own time."""
        active = max(len(self.runner.engine.rows), 1)
        length = self.choose_length(active, 1)
        if not length:
            return 0.0
        gained = float(self.acceptance_rates()[:length].sum())
        drafter_s = self.drafter_cost.seconds(length, length)
        forward_s = self.cost.seconds(active, active + length, 1)
        net = gained - (1 + gained) * drafter_s / (forward_s + drafter_s)
        return max(net / (1 + net), 0.0)  # a long proposal with rate s gains s / (1 - s) tokens

    def begin(self, tracked: TrackedRows) -> None:
        """See `DraftSource`."""
        super().begin(tracked)
        self._proposed.clear()
        self._survival.begin()

    def propose(self, numbers: np.ndarray, limits: np.ndarray) -> Proposals:
        """See `DraftSource`."""
        nothing, rows = super().propose(numbers, limits), self.tracked.rows
        self.is_promising = False
        slot_of = {id(row): slot for slot, row in enumerate(self.runner.engine.rows)}
        asked = enumerate(numbers.tolist())
        index_of = {slot_of.get(id(rows[number])): index for index, number in asked}
        index_of.pop(None, None)
        if not index_of or len(slot_of) > MAX_ROWS:
            return nothing
        length, active = self.choose_length(len(slot_of), len(index_of)), len(slot_of)
        if not length:
            self.chain_lengths[0] += 1
            return nothing
        begin_s, runner = self.clock.perf_counter(), self.runner

        def plan(confidence: np.ndarray) -> tuple[np.ndarray, bool]:
            return self.plan(confidence, active, self.clock.perf_counter() - begin_s)

        if runner.ends_early:
            options = {"goes_on": lambda confidence: plan(confidence)[1]}
            chains = runner.draft(np.array(sorted(index_of)), MAX_CHAIN_LENGTH, **options)
        else:
            chains = runner.draft(np.array(sorted(index_of)), length)
        drafted = np.array([index_of[slot] for slot in chains.slots.tolist()], np.int64)
        if not len(drafted):
            return nothing
        length = chains.tokens.shape[1]
        self.chain_lengths[length] += 1
        seconds = self.clock.perf_counter() - begin_s
        fed = chains.num_caught_up + (length - 1) * len(drafted)
        self.drafter_cost.observe(Load(length, fed), seconds)
        kinds = self._kinds_of(chains.confidence)
        pairs = zip(chains.tokens, kinds, strict=True)
        self._proposed.update(zip(numbers[drafted].tolist(), pairs, strict=True))
        _, begin, count, kind = nothing
        begin[drafted] = length * np.arange(len(drafted))
        count[drafted] = np.minimum(limits[drafted], plan(chains.confidence)[0])
        self.is_promising = not count.any()
        return Proposals(chains.tokens.ravel(), begin, count, kind)

    def _kinds_of(self, confidence: np.ndarray) -> np.ndarray:
        """The confidence of tokens as numbers in `_survival`, int64."""
        return self._confidences[CONFIDENCES[1:-1].searchsorted(confidence)]

    def plan(self, confidence: np.ndarray, active: int, spent_s: float) -> tuple[np.ndarray, bool]:
        """See `plan_chains`. confidence: float [M, n]."""
        rates = self._survival.estimates
        return plan_chains(
            rates[self._kinds_of(confidence)].cumprod(axis=1),
            float(rates[self._positions[0]]),
            self.cost,
            self.drafter_cost,
            active,
            int(self.runner.engine.lengths.sum()),
            spent_s,
        )

    def observe(self, numbers: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """See `DraftSource`."""
        tried, right = np.zeros((2, len(self._survival.kinds)))
        ends = counts.cumsum().tolist()
        for number, end, count in zip(numbers.tolist(), ends, counts.tolist(), strict=True):
            if (proposed := self._proposed.pop(number, None)) is None:
                continue
            chain, kinds = proposed
            both = min(len(chain), count)
            is_right = chain[:both] == tokens[end - count :][:both]
            num_right = both if is_right.all() else int(is_right.argmin())
            num_tried = min(num_right + 1, both)
            for of_token in (self._positions, kinds):
                np.add.at(tried, of_token[:num_tried], 1)
                np.add.at(right, of_token[:num_right], 1)
        self._survival.observe(tried, right)

    def choose_length(self, active: int, count: int) -> int:
        """Tokens of a chain for `count` of `active` rows, 0 for none."""
        return choose_chain_length(
            self.acceptance_rates(),
            self.cost,
            self.drafter_cost,
            active,
            count,
            int(self.runner.engine.lengths.sum()),
        )
