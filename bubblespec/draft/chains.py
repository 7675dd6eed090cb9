"""Chains of draft tokens of a small model, for the rows of an engine.

A chain is drafted token by token, with the noise that the row itself will use. By how much a token
has won, its lead, says how sure it is: the policy's logits are close, so a clear winner is nearly
always its choice too. Whether a row drafts another token depends on the chance that all tokens of
its chain so far are right, on the seconds of the small model's forward, and on those of a longer
verification.

Shape legend: R queried rows, M rows that draft or may continue, L longest chain, C candidates, N
packed tokens.
"""

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.sources import DraftSource, Proposals, TrackedRows
from bubblespec.engine.arrays import to_device, to_host
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.forward import ModelForward, SlotFollower
from bubblespec.engine.graphs import GraphPool
from bubblespec.engine.kv_cache import CachePacking, KVCache, pack_rows
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import draw_among
from bubblespec.errors import first_problem, log, one_line
from bubblespec.planner.costs import CHAIN_ROWS, CostModel
from bubblespec.planner.survival import TRIED, AcceptanceStats
from bubblespec.planner.windows import MIN_GAIN
from bubblespec.types import Load

LEADS = np.array((0.1, 0.25, 0.5, 1.0, 2.0, 4.0))  # leads between two of these are alike
PRIORS = (0.5, 0.6, 0.7, 0.85, 0.95, 0.98, 0.99)  # chance that a token with such a lead is right
AHEAD = np.array((1, 2, 4))  # further tokens that a decision considers
TIMED_ROWS = (1, 4, 16)


class DraftModelRunner(SlotFollower):
    """A small model's part of an engine; with graphs a follower of its runner."""

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        forward: ModelForward,
        cache: KVCache,
        max_graph_tokens: int,
        state_size: int = 0,
    ):
        """params: of the engine's rows; the others: see `GraphPool`."""
        self.engine, self.params, self.cache = engine, params, cache
        self.runner = cast(ModelRunner, engine.runner)
        self.forward: Any = forward  # one with states has a second input
        self.graphs: GraphPool | None = None
        if self.runner.graphs is not None:
            self.graphs = GraphPool(forward, cache, max_graph_tokens, state_size)

    def can_draft(self, slots: np.ndarray) -> np.ndarray:
        """Whether chains can begin in slots int64 [M], or -1: bool [M]."""
        return slots >= 0

    def candidates(
        self, slots: np.ndarray, number: int, tokens: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return logits [M, C] of what follows, their tokens, [C] or [M, C], and how many were fed.

        slots, number, tokens: see `draw`."""
        raise NotImplementedError

    @torch.inference_mode()
    def draw(
        self, slots: np.ndarray, number: int, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Draw the next token of some rows' chains, int64 [M], with the rows' own noise.

        Also return by how much each has won, float [M], in units of logits over the temperature,
        and the tokens that were fed. slots: int64 [M], ascending; number: tokens that each chain
        has; tokens: int64 [M], the last token of each. The host waits for the device once. Raises
        ValueError for what is no number."""
        generated = (self.engine.length - self.engine.prompt_length)[slots] + number
        logits, ids, fed = self.candidates(slots, number, tokens)
        keys = self.runner.noise_keys(slots, generated)
        position = to_device(generated, self.runner.device)
        token, lead = to_host(*draw_among(logits, ids, keys, position, self.params))
        if np.isnan(lead).any():
            raise ValueError("its logits are not numbers")
        return token.astype(np.int64), lead, fed

    def run_once(self, num_rows: int) -> None:
        """Draw a token for each of so many empty rows, to time it."""
        self.draw(np.arange(num_rows), 1, np.zeros(num_rows, np.int64))

    def feed(
        self, tokens: np.ndarray, slots: np.ndarray, start: np.ndarray, count: np.ndarray, *states
    ) -> torch.Tensor:
        """Return the hidden states [N, hidden] of `count` new positions of each slot from `start`.

        tokens: int64 [N]; states: of a forward that has them."""
        packing = self.pack(slots, start, count)
        if self.graphs is not None:
            return self.graphs.hidden(tokens, packing, *states)[: len(tokens)]
        return self.forward.hidden(to_device(tokens, self.runner.device), packing, *states)

    def pack(self, slots: np.ndarray, start: np.ndarray, count: np.ndarray) -> CachePacking:
        """Return the packing of `count` new positions of each slot from `start`."""
        starts, counts = np.zeros((2, int(slots[-1]) + 1), np.int64)
        starts[slots], counts[slots] = start, count
        return pack_rows(self.cache, starts, counts, self.runner.device)

    def release(self) -> None:
        """Forget the graphs, which know the cache by its addresses."""
        if self.graphs is not None:
            self.graphs.clear()


class ChainRates:
    """How often tokens of chains were right: by their lead, and by their number in the chain."""

    def __init__(self, longest: int, prior: float):
        """prior: chance that a token is right, at each of `longest` numbers, if all before are."""
        self.survival = AcceptanceStats()
        self._by_lead = self.survival.add([("lead", n) for n in range(len(PRIORS))], PRIORS)
        numbers = [("number", n) for n in range(longest)]
        self._by_number = self.survival.add(numbers, [prior] * longest)
        self._any = self.survival.add([("any",)], [prior])

    def chances(self, lead: np.ndarray) -> np.ndarray:
        """Return the chance that tokens with these leads are right, if all before them are."""
        return self.survival.estimates[self._by_lead[LEADS.searchsorted(lead)]]

    @property
    def mean(self) -> float:
        """Chance that a token is right, if all before it are, whatever its lead and number."""
        return float(self.survival.estimates[self._any[0]])

    @property
    def by_number(self) -> np.ndarray:
        """Chance that a chain's first, second, ... token is right if all before are, [L]."""
        return self.survival.estimates[self._by_number]

    @property
    def accepted(self) -> np.ndarray:
        """Chance that the first 1, 2, ... tokens of a chain are all right, float64 [L]."""
        return np.cumprod(self.by_number)

    def observe(self, lead: np.ndarray, number: np.ndarray, is_right: np.ndarray) -> None:
        """Count tokens whose predecessors were all right: [n] each, and whether they were."""
        tried, right = self.survival.counts[TRIED:, 1]
        of_lead = self._by_lead[LEADS.searchsorted(lead)]
        for kind in (of_lead, self._by_number[number], self._any[0 * number]):
            tried += np.bincount(kind, minlength=len(tried))
            right += np.bincount(kind, is_right, len(right))


class DraftModelSource(DraftSource):
    """Chains of a small model as a draft source."""

    needs_results = True

    def __init__(
        self,
        name: str,
        runner: DraftModelRunner,
        cost: CostModel,
        own_cost: CostModel,
        *,
        prior: float,
        longest: int,
        is_last: bool = False,
        always: bool = False,
        clock=time,
    ):
        """Create the source of an engine's rows.

        cost, own_cost: of the policy's forwards and the small model's; prior: see `ChainRates`;
        longest: tokens of a chain; always: draft as much as may be verified, whatever it costs."""
        self.name, self.kinds = name, ((name,),)
        self.runner, self.cost, self.own_cost, self.clock = runner, cost, own_cost, clock
        self.longest, self.is_last, self.always = longest, is_last, always
        self.rates = ChainRates(longest, prior)
        self.chain_lengths = np.zeros(longest + 1, np.int64)
        """Chains of queried rows by length, since the last `metrics`."""
        self.drafting_s = 0.0
        """Seconds spent on chains, since the last `metrics`."""
        self._is_known = False  # whether all ranks know of a problem
        # The latest proposals: numbers of the rows, tokens and leads [R, L], and lengths.
        self._latest: tuple[np.ndarray, ...] | None = None

    def begin(self, tracked: TrackedRows) -> None:
        super().begin(tracked)
        self._latest = None
        self.rates.survival.begin()

    def serves(self, engine) -> bool:
        return self.runner.engine is engine

    @contextlib.contextmanager
    def moved_to(self, runner: DraftModelRunner) -> Iterator[None]:
        """Context in which proposals are for the rows of another engine."""
        own, self.runner = self.runner, runner
        try:
            yield
        finally:
            self.runner = own

    @property
    def chance(self) -> float:  # type: ignore[override]  # it depends on the engine's rows
        """Acceptance rate of another source below which a chain gains more, its time included."""
        active = max(len(self.runner.engine.rows), 1)
        positions = int(self.runner.engine.lengths.sum())
        lengths = np.arange(1, self.longest + 1)
        gained = np.cumsum(self.rates.accepted)
        own_s = lengths * self.own_cost.seconds(1, 1, 0, positions / active)
        forward_s = self.cost.seconds(active, active + lengths, 1, positions)
        net = float((gained - (1 + gained) * own_s / (forward_s + own_s)).max(initial=0.0))
        return net / (1 + net)  # a long proposal with rate s gains s / (1 - s) tokens

    def shortening(self, context: float) -> np.ndarray:
        """Return seconds per token with chains over those without, see `CostModel.chains`.

        Whether or not the latest rollout had chains: the next one may. context: mean positions of a
        row."""
        if self.problem is not None:
            return np.ones(len(CHAIN_ROWS))
        active, lengths = CHAIN_ROWS[:, None], np.arange(self.longest + 1)
        positions = active * context
        gained = 1.0 + np.append(0.0, np.cumsum(self.rates.accepted))
        own_s = lengths * self.own_cost.seconds(active, active, 0, positions)
        forward_s = self.cost.seconds(active, active * (1 + lengths), lengths > 0, positions)
        per_token = (own_s + forward_s) / gained
        return per_token.min(axis=1) / per_token[:, 0]

    def give_up(self, problem: Exception) -> None:
        """Draft no more; `metrics` tells all ranks."""
        self.problem, self.is_enabled = one_line(problem), False

    def propose(self, numbers: np.ndarray, limits: np.ndarray) -> Proposals:
        place = {row.number: slot for slot, row in enumerate(self.runner.engine.rows)}
        slots = np.array([place.get(number, -1) for number in numbers.tolist()], np.int64)
        limits = np.minimum(limits, self.longest) * (slots >= 0)
        try:
            chains, leads, lengths = self._draft(slots, limits)
        except Exception as error:  # the model's own code runs here, with other layers
            self.give_up(error)
            return super().propose(numbers, limits)
        self._latest = numbers, chains, leads, lengths
        self.chain_lengths += np.bincount(lengths, minlength=len(self.chain_lengths))
        begin = np.arange(len(numbers)) * self.longest
        return Proposals(chains.ravel(), begin, lengths, np.zeros_like(numbers))

    def _draft(
        self, slots: np.ndarray, limits: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draft chains for rows in slots, at most `limits` tokens each; both int64 [R].

        Returns tokens int64 [R, L], leads float64 [R, L] and lengths int64 [R]."""
        engine, clock = self.runner.engine, self.clock.perf_counter
        chains = np.zeros((len(slots), self.longest), np.int64)
        leads, lengths = np.zeros(chains.shape), np.zeros(len(slots), np.int64)
        chance, going = np.ones(len(slots)), (limits > 0) & self.runner.can_draft(slots)
        begin_s, spent_s = clock(), 0.0
        active, positions, gained = len(engine.rows), int(engine.lengths.sum()), 0.0
        latest = engine.tokens[slots, engine.length[slots] - 1]
        costs = {"cost": self.cost, "own_cost": self.own_cost}
        best = partial(rows_to_continue, active=active, positions=positions, **costs)
        rates = np.append(self.rates.by_number, np.zeros(AHEAD[-1]))
        for number in range(self.longest):
            rows = going.nonzero()[0]
            if not len(rows):
                break
            if not self.always:
                coming, drafted = rates[number : number + AHEAD[-1]], int(lengths.sum())
                expected = {"gained": active + gained, "drafted": drafted, "spent_s": spent_s}
                rows = rows[best(chance[rows], coming, **expected)]
            rows = rows[slots[rows].argsort()]
            going[:] = False
            if not len(rows):
                break
            step_s = clock()
            latest[rows], lead, fed = self.runner.draw(slots[rows], number, latest[rows])
            end_s = clock()
            attended = int(engine.length[slots[rows]].sum()) + number * len(rows)
            load = Load(len(rows), fed, int(fed > len(rows)), attended)
            self.own_cost.observe(load, end_s - step_s)
            chains[rows, number], leads[rows, number] = latest[rows], lead
            chance[rows] *= self.rates.chances(lead)
            lengths[rows] += 1
            gained += float(chance[rows].sum())
            going[rows] = limits[rows] > number + 1
            spent_s = end_s - begin_s
        self.drafting_s += clock() - begin_s
        return chains, leads, lengths

    def observe(self, numbers: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        if self._latest is None or not self._latest[-1].any():
            return
        (asked, chains, leads, lengths), self._latest = self._latest, None
        order = asked.argsort()
        index = order[asked.searchsorted(numbers, sorter=order).clip(max=len(order) - 1)]
        known = asked[index] == numbers
        index, begin, counts = index[known], (counts.cumsum() - counts)[known], counts[known]
        offset = np.arange(self.longest)
        length = np.minimum(lengths[index], counts)[:, None]
        gained = tokens.take(begin[:, None] + offset, mode="clip")
        is_right = (chains[index] == gained) & (offset < length)
        # Tokens are tried up to the first wrong one.
        is_tried = offset <= np.logical_and.accumulate(is_right, axis=1).sum(1)[:, None]
        is_tried &= offset < length
        number = is_tried.nonzero()[1]
        self.rates.observe(leads[index][is_tried], number, is_right[is_tried])

    def metrics(self, ranks: Ranks) -> dict:
        """Return lengths of chains and seconds since the last call, see `Mechanism.metrics`.

        Chains of no token are included; the length is left out where no row was asked about."""
        self.problem = first_problem(self.problem, ranks.gather_text)
        if self.problem is not None and not self._is_known:
            self._is_known = True
            if ranks.is_main:
                log(f"{self.name} drafts no more: {self.problem}")
        metrics: dict = {f"{self.name}/draft_s": self.drafting_s}
        if num_chains := int(self.chain_lengths.sum()):
            tokens = np.arange(len(self.chain_lengths)) @ self.chain_lengths
            metrics[f"{self.name}/chain_length"] = int(tokens), num_chains
        self.chain_lengths[:], self.drafting_s = 0, 0.0
        return metrics


def rows_to_continue(
    chance: np.ndarray,
    rates: np.ndarray,
    *,
    gained: float,
    drafted: int,
    spent_s: float,
    active: int,
    positions: int,
    cost: CostModel,
    own_cost: CostModel,
) -> np.ndarray:
    """Return the rows that draft another token, int64 indices, best first; none if that costs more.

    The first token must gain as much as a first window.

    chance: float64 [M], that a row's chain is right so far; rates: float64 [AHEAD[-1]], that the
    next tokens are, each if all before it are; gained, drafted, spent_s: tokens that the coming
    forward of the policy is expected to gain, draft tokens and seconds spent on them, all so far;
    active, positions: rows of that forward and the positions that they attend to; cost, own_cost:
    of the policy's forwards and the small model's."""
    order = np.argsort(-chance, kind="stable")
    rows = np.arange(1, len(order) + 1)[:, None]
    more = chance[order].cumsum()[:, None] * np.cumsum(np.cumprod(rates))
    mean_positions = positions / active
    one_s = own_cost.seconds(rows, rows, 0, rows * mean_positions)
    verify_s = cost.seconds(active, active + drafted + rows * AHEAD, 1, positions)
    now_s = cost.seconds(active, active + drafted, min(drafted, 1), positions)
    rate = (gained + more[:, AHEAD - 1]) / (spent_s + AHEAD * one_s + verify_s)
    best = rate.max(axis=1)
    least = 1.0 if spent_s else MIN_GAIN
    if best.max() <= least * gained / (spent_s + now_s):
        return order[:0]
    return order[: int(best.argmax()) + 1]


def profile(runner: DraftModelRunner, clock, max_rows: int | None = None) -> CostModel:
    """Time forwards of few and many rows, while the engine has none; each is run once before."""
    cost, most = CostModel(), min(max_rows or runner.engine.num_slots, runner.engine.num_slots)
    for count in sorted({min(rows, most) for rows in (*TIMED_ROWS, most)}):
        runner.run_once(count)
        for _ in range(3):
            begin_s = clock.perf_counter()
            runner.run_once(count)
            cost.anchor(Load(count, count), clock.perf_counter() - begin_s)
    runner.engine.reset()
    return cost
