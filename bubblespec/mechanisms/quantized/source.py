"""The copy as a draft source."""

import time

import numpy as np

from bubblespec.draft.sources import DraftSource, Proposals, TrackedRows
from bubblespec.engine.batch import Load
from bubblespec.errors import one_line
from bubblespec.mechanisms.quantized.chains import Leads, rows_to_continue
from bubblespec.mechanisms.quantized.runner import CopyRunner
from bubblespec.planner.costs import CHAIN_ROWS, CostModel
from bubblespec.planner.windows import rate_below_which_chains_gain

NAME = "quantized"
MAX_CHAIN_LENGTH = 16  # tokens


class QuantizedSource(DraftSource):
    """Chains of the copy for the rows of an engine.

    Shape legend: R queried rows, L longest chain."""

    kinds = ((NAME,),)
    needs_results = True
    weighs_its_time = True
    is_last = True  # chains of a learned drafter cost less

    def __init__(
        self,
        runner: CopyRunner,
        cost: CostModel,
        copy_cost: CostModel,
        *,
        always: bool = False,
        clock=time,
    ):
        """Create the source of an engine's rows.

        cost, copy_cost: of the policy's forwards and the copy's; always: draft as much as may be
        verified, whatever it costs."""
        self.always = always
        self.runner, self.cost, self.copy_cost, self.clock = runner, cost, copy_cost, clock
        self.leads = Leads()
        self.chain_lengths = np.zeros(MAX_CHAIN_LENGTH + 1, np.int64)
        """Chains of queried rows by length, since the last reset."""
        self.drafting_s = 0.0
        self.problem: str | None = None
        """Why the copy drafts no more."""
        # The latest proposals: tokens [R, L] of the rows' numbers, their leads and lengths.
        self._numbers = np.empty(0, np.int64)
        self._chains, self._leads = np.zeros((0, 0), np.int64), np.zeros((0, 0))
        self._lengths = np.empty(0, np.int64)
        self._mean_kv = 0.0  # positions of a row, at the latest proposal

    def begin(self, tracked: TrackedRows) -> None:
        """See `DraftSource`."""
        super().begin(tracked)
        self._numbers = np.empty(0, np.int64)
        self.leads.survival.begin()

    @property
    def chance(self) -> float:  # type: ignore[override]  # it depends on the engine's rows
        """Acceptance rate of another source below which a chain gains more, its time included."""
        active = max(len(self.runner.engine.rows), 1)
        kv_tokens = int(self.runner.engine.lengths.sum())
        lengths = np.arange(1, MAX_CHAIN_LENGTH + 1)
        gained = np.cumsum(self.leads.mean**lengths)
        copy_s = lengths * self.copy_cost.seconds(1, 1, 0, kv_tokens / active)
        forward_s = self.cost.seconds(active, active + lengths, 1, kv_tokens)
        return rate_below_which_chains_gain(gained, copy_s, forward_s)

    def shortening(self) -> np.ndarray:
        """Return seconds per token with chains over those without, see `CostModel.chains`."""
        if not self.is_enabled:
            return np.ones(len(CHAIN_ROWS))
        active, lengths = CHAIN_ROWS[:, None], np.arange(MAX_CHAIN_LENGTH + 1)
        kv_tokens = active * self._mean_kv
        gained = 1.0 + np.append(0.0, np.cumsum(self.leads.mean ** lengths[1:]))
        copy_s = lengths * self.copy_cost.seconds(active, active, 0, kv_tokens)
        forward_s = self.cost.seconds(active, active * (1 + lengths), lengths > 0, kv_tokens)
        per_token = (copy_s + forward_s) / gained
        return per_token.min(axis=1) / per_token[:, 0]

    def give_up(self, problem: Exception) -> None:
        """Draft no more; the mechanism tells all ranks."""
        self.problem, self.is_enabled = one_line(problem), False

    def propose(self, numbers: np.ndarray, limits: np.ndarray) -> Proposals:
        """See `DraftSource`."""
        slots = self.tracked.slots(numbers, self.runner.engine.rows)
        limits = np.minimum(limits, MAX_CHAIN_LENGTH) * (slots >= 0)
        try:
            chains, leads, lengths = self._draft(slots, limits)
        except Exception as error:  # the model's own code runs here, with other layers
            self.give_up(error)
            return super().propose(numbers, limits)
        self._numbers, self._chains, self._leads, self._lengths = numbers, chains, leads, lengths
        self.chain_lengths += np.bincount(lengths, minlength=len(self.chain_lengths))
        begin = np.arange(len(numbers)) * MAX_CHAIN_LENGTH
        return Proposals(chains.ravel(), begin, lengths, np.zeros_like(numbers))

    def _draft(
        self, slots: np.ndarray, limits: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draft chains for rows in slots, at most `limits` tokens each; both int64 [R].

        Returns tokens int64 [R, L], leads float64 [R, L] and lengths int64 [R]."""
        engine, clock = self.runner.engine, self.clock.perf_counter
        chains = np.zeros((len(slots), MAX_CHAIN_LENGTH), np.int64)
        leads, lengths = np.zeros(chains.shape), np.zeros(len(slots), np.int64)
        chance, going = np.ones(len(slots)), limits > 0
        begin_s, spent_s = clock(), 0.0
        active, kv_tokens, gained = len(engine.rows), int(engine.lengths.sum()), 0.0
        self._mean_kv = kv_tokens / max(active, 1)
        latest = engine.tokens[slots, engine.length[slots] - 1]
        for place in range(MAX_CHAIN_LENGTH):
            rows = going.nonzero()[0]
            if not len(rows):
                break
            if not self.always:
                kept = rows_to_continue(
                    chance[rows],
                    self.leads.mean,
                    gained=active + gained,
                    drafted=int(lengths.sum()),
                    spent_s=spent_s,
                    active=active,
                    kv_tokens=kv_tokens,
                    cost=self.cost,
                    copy_cost=self.copy_cost,
                )
                rows = rows[kept]
            rows = rows[slots[rows].argsort()]
            going[:] = False
            if not len(rows):
                break
            of, length = slots[rows], engine.length[slots[rows]]
            generated = length - engine.prompt_length[of] + place
            step_s = clock()
            latest[rows], lead = self.runner.draw(of, length - 1 + place, latest[rows], generated)
            end_s = clock()
            load = Load(len(rows), len(rows), 0, int(length.sum()) + place * len(rows))
            self.copy_cost.observe(load, end_s - step_s)
            chains[rows, place], leads[rows, place] = latest[rows], lead
            chance[rows] *= self.leads.chances(lead)
            lengths[rows] += 1
            gained += float(chance[rows].sum())
            going[rows] = limits[rows] > place + 1
            spent_s = end_s - begin_s
        self.drafting_s += clock() - begin_s
        return chains, leads, lengths

    def observe(self, numbers: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """See `DraftSource`."""
        if not len(self._numbers) or not self._lengths.any():
            return
        order = self._numbers.argsort()
        index = order[self._numbers.searchsorted(numbers, sorter=order).clip(max=len(order) - 1)]
        known = self._numbers[index] == numbers
        index, begin, counts = index[known], (counts.cumsum() - counts)[known], counts[known]
        self._numbers = self._numbers[:0]
        offset = np.arange(MAX_CHAIN_LENGTH)
        length = np.minimum(self._lengths[index], counts)[:, None]
        gained = tokens.take(begin[:, None] + offset, mode="clip")
        is_right = (self._chains[index] == gained) & (offset < length)
        # Tokens are tried up to the first wrong one.
        is_tried = offset <= np.logical_and.accumulate(is_right, axis=1).sum(1)[:, None]
        is_tried &= offset < length
        self.leads.observe(self._leads[index][is_tried], is_right[is_tried])
