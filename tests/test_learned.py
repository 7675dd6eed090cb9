"""How long the chains of the learned drafter are, and what they save, against plain
transcriptions."""

from types import SimpleNamespace

import numpy as np
import pytest

from bubblespec.draft import learned
from bubblespec.draft.learned import Acceptance, LearnedDrafts
from bubblespec.draft.sources import TrackedRow
from bubblespec.engine import chains as chains_module
from bubblespec.engine.chains import LONGEST
from bubblespec.planner.costs import CostModel
from bubblespec.records import CHAIN_ROWS
from bubblespec.types import Row, SampleId
from tests.helpers.clocks import Clock


def made_cost(*coefficients: float) -> CostModel:
    cost = CostModel()
    cost.coefficients = np.array(coefficients)
    return cost


def test_acceptance_is_counted_by_place():
    acceptance = Acceptance()
    assert acceptance.chances() == pytest.approx(learned.UNKNOWN ** np.arange(1, LONGEST + 1))
    acceptance.expect(np.array([0.5, 0.4, 0.4, 0.0, 0.0]))
    assert acceptance.chances() == pytest.approx([0.5, 0.4, 0.4, 0.0, 0.0])
    acceptance.observe(np.array([1, 2, 3]), np.array([1, 2, 9]))  # two right
    acceptance.observe(
        np.array([1, 2, 3]), np.array([1])
    )  # one right, of the others nothing is known
    acceptance.observe(np.array([1, 2]), np.array([7, 2, 3]))  # none
    tried, right, prior = [3, 1, 1, 0, 0], [2, 1, 0, 0, 0], [0.5, 0.8, 1.0, 0.0, 0.0]
    weight = learned.PRIOR_CHAINS
    wanted = np.cumprod(
        [(r + weight * p) / (t + weight) for t, r, p in zip(tried, right, prior, strict=True)]
    )
    assert acceptance.chances() == pytest.approx(wanted, rel=1e-2)
    acceptance.expect(np.array([0.2, 0.3, 0.1, 0.1, 0.1]))  # from fewer and fewer positions
    assert (np.diff(acceptance.chances()) <= 0).all() and acceptance.chances()[0] <= 1


@pytest.mark.parametrize("seed", range(20))
def test_the_length_is_that_with_most_tokens_a_second(seed):
    random = np.random.default_rng(seed)
    active = int(random.integers(1, 30))
    count, lengths = int(random.integers(1, active + 1)), random.integers(5, 400, active)
    cost, own = (
        made_cost(*(10.0 ** random.uniform(-5, -2, 5)) * (1, 0.1, 0.1, 0.1, 1e-3)) for _ in range(2)
    )
    source = LearnedDrafts(None, SimpleNamespace(rows=[None] * active, lengths=lengths), cost)
    source.own_cost = own
    source.acceptance.expect(np.cumprod(random.uniform(0.3, 0.95, LONGEST)))
    chances, rates = source.acceptance.chances().tolist(), []
    for length in range(LONGEST + 1):
        a, b, c, d, e = cost.coefficients
        seconds = (
            a
            + b * active
            + c * (active + count * length)
            + d * (count if length else 0)
            + e * lengths.sum()
        )
        if length:
            a, b, c, _, _ = own.coefficients
            seconds += a + b * length + c * count * length
        tokens = active
        for number in range(length):
            tokens += count * chances[number]
        rates.append(tokens / seconds)
    assert source.choose(active, count) == int(np.argmax(rates))


class TimedChains:
    """Chains that take as long as they are told, for all rows."""

    def __init__(self, clock: Clock, seconds: float, truth: int = 1):
        self.clock, self.seconds, self.truth = clock, seconds, truth

    def rehearse(self, num_rows):
        self.clock.sleep(self.seconds)

    def draft(self, scheduler, slots, length):
        self.clock.sleep(self.seconds * length)
        return np.full((len(slots), length), self.truth), slots, len(slots)


@pytest.mark.parametrize("seconds, drafts_on", [(1e-4, True), (0.1, False)])
def test_what_chains_take_is_learnt_however_long(seconds, drafts_on):
    """Before the first chain, and as chains are made."""
    clock = Clock()
    rows = [Row(SampleId(0, 0, n), (1,), 50) for n in range(3)]
    engine = SimpleNamespace(
        rows=rows, lengths=np.full(3, 20), scheduler=None, num_slots=8, reset=lambda: None
    )
    source = LearnedDrafts(
        TimedChains(clock, seconds), engine, made_cost(0.01, 0, 1e-5, 0, 0), clock
    )
    source.acceptance.expect(np.full(LONGEST, 0.9))
    source.profile()
    tracked, lengths = [TrackedRow(row, None, True) for row in rows], []
    for _ in range(60):
        proposals = source.propose(tracked, [0] * 3, [4, 9, 2])
        lengths.append(0 if proposals[0] is None else len(proposals[1].tokens))
        if lengths[-1]:
            assert [len(p.tokens) for p in proposals] == [
                min(lengths[-1], limit) for limit in (4, 9, 2)
            ]
            for row in tracked:
                source.observe(row, np.array([1]))
    assert (lengths[0] > 0) == (lengths[-1] > 0) == drafts_on
    chosen = source.take_chosen()
    assert (
        chosen.sum() == 60 == chosen[CHAIN_ROWS.index(3)].sum() and not source.take_chosen().any()
    )


def test_nothing_is_drafted_for_many_rows_and_a_row_that_is_no_more_tells_nothing():
    clock = Clock()
    rows = [Row(SampleId(0, 0, n), (1,), 50) for n in range(chains_module.MOST_ROWS + 1)]
    engine = SimpleNamespace(rows=rows, lengths=np.full(len(rows), 20), scheduler=None)
    source = LearnedDrafts(TimedChains(clock, 1e-6), engine, made_cost(0.01, 0, 1e-9, 0, 0), clock)
    tracked = [TrackedRow(row, None, True) for row in rows]
    assert source.propose(tracked, [0] * len(rows), [9] * len(rows)) == [None] * len(rows)
    engine.rows = rows[:2]
    assert all(source.propose(tracked[:2], [0, 0], [9, 9])) and source.propose([], [], []) == []
    source.track(tracked[0])  # another row in its place
    source.observe(tracked[0], np.array([1]))
    assert not source.acceptance.seen.any()
    source.observe(tracked[1], np.array([1]))
    assert source.acceptance.seen[0].tolist() == [1, 1]


def test_what_chains_save_is_what_their_tokens_take_without_them():
    """A forward takes 10 ms and 1 ms for a token, one of the drafter 0.5 ms; tokens are right with
    chance 0.8."""
    clock = Clock()
    rows = [Row(SampleId(0, 0, n), (1,), 50) for n in range(2)]
    engine = SimpleNamespace(rows=rows, lengths=np.full(2, 20), scheduler=None)
    source = LearnedDrafts(TimedChains(clock, 5e-4), engine, made_cost(10e-3, 0, 1e-3, 0, 0), clock)
    source.own_cost = made_cost(0, 5e-4, 0, 0, 0)
    source.acceptance.expect(0.8 ** np.arange(1, LONGEST + 1))
    length = source.choose(2, 1)
    (proposal,) = source.propose([TrackedRow(rows[1], None, True)], [0], [9])
    assert length == len(proposal.tokens) > 1
    tokens = 2 + sum(0.8**n for n in range(1, length + 1))
    wanted = tokens * (10e-3 + 2e-3) / 2 - (10e-3 + (2 + length) * 1e-3 + length * 5e-4)
    assert source.saved_s == pytest.approx(wanted, rel=1e-6) and wanted > 0
    source.own_cost = made_cost(1.0, 0, 0, 0, 0)
    assert source.propose([TrackedRow(rows[1], None, True)], [0], [9]) == [
        None
    ] and source.saved_s == pytest.approx(wanted)
