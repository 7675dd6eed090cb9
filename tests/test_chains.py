"""Chains of draft tokens: which rows continue, what chains cost, and how often they are right."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from bubblespec.draft.chains import AHEAD, LEADS, ChainRates, DraftModelSource, rows_to_continue
from bubblespec.draft.proposer import Proposer
from bubblespec.draft.sources import DraftSource, TrackedRows
from bubblespec.mechanisms.drafter import mechanism
from bubblespec.mechanisms.quantized import mechanism as quantized
from bubblespec.planner.costs import KNOTS, CostModel
from bubblespec.planner.windows import MIN_GAIN
from bubblespec.types import Row, SampleId
from tests.helpers.clocks import Clock

LONGEST, PRIOR = mechanism.MAX_CHAIN_LENGTH, mechanism.PRIOR


def made_cost(*coefficients: float) -> CostModel:
    return CostModel.from_parameters(np.append(coefficients, np.zeros(len(KNOTS))))


def random_cost(random, scale: float) -> CostModel:
    coefficients = scale * 10.0 ** random.uniform(-1, 0, 5) * (1, 0.05, 0.05, 0.05, 1e-4)
    return made_cost(*coefficients)


@pytest.mark.parametrize("seed", range(20))
def test_rows_continue_where_tokens_per_second_rise_most(seed):
    random = np.random.default_rng(seed)
    active, count = 8, int(random.integers(1, 7))
    cost, own_cost = random_cost(random, 1.0), random_cost(random, 0.4)
    chance, rates = random.uniform(0.2, 1.0, count), random.uniform(0.5, 0.97, AHEAD[-1])
    state = {"gained": 8 + random.uniform(0, 3), "drafted": int(random.integers(0, 9))}
    state |= {"spent_s": random.choice([0.0, random.uniform(0, 1)]), "active": active}
    state |= {"positions": 900}

    def rate(rows: tuple[int, ...], ahead: int) -> float:
        tokens = active + state["drafted"] + len(rows) * ahead
        seconds = state["spent_s"] + float(cost.seconds(active, tokens, int(tokens > active), 900))
        if rows:
            positions = len(rows) * 900 / active
            seconds += ahead * float(own_cost.seconds(len(rows), len(rows), 0, positions))
        gained = sum(chance[row] * rates[:n].prod() for row in rows for n in range(1, ahead + 1))
        return (state["gained"] + gained) / seconds

    promised = {
        (rows, int(ahead)): rate(rows, int(ahead))
        for size in range(1, count + 1)
        for rows in itertools.combinations(range(count), size)
        for ahead in AHEAD
    }
    best = max(promised, key=promised.__getitem__)
    kept = rows_to_continue(chance, rates, cost=cost, own_cost=own_cost, **state)
    least = MIN_GAIN if state["spent_s"] == 0 else 1.0
    wanted = set(best[0]) if promised[best] > least * rate((), 0) else set()
    assert set(kept.tolist()) == wanted


def test_rates_count_how_often_tokens_were_right():
    rates, random = ChainRates(LONGEST, PRIOR), np.random.default_rng(0)
    place = np.arange(4000) % 2
    of_tokens = random.uniform(0, 6, 4000)
    is_right = random.random(4000) < np.where(of_tokens < 1.0, 0.6, 0.97)
    for part in np.split(np.arange(4000), 8):
        rates.observe(of_tokens[part], place[part], is_right[part])
    assert rates.mean == pytest.approx(is_right.mean(), abs=0.01)
    for lead, kind in ((0.7, 3), (3.0, 5)):
        alike = LEADS.searchsorted(of_tokens) == kind
        assert rates.chances(np.array([lead]))[0] == pytest.approx(is_right[alike].mean(), abs=0.02)
    for number in range(2):
        right = is_right[place == number].mean()
        assert rates.by_number[number] == pytest.approx(right, abs=0.02)
    assert rates.accepted[2] == pytest.approx(rates.by_number[:2].prod() * PRIOR)


def test_drafter_is_asked_before_the_copy_though_added_later():
    own, copy = DraftSource(), quantized.make_source(TimedRunner(1, 0.0), CostModel(), CostModel())
    drafter = make_source(1, 0.0, CostModel())
    proposer = Proposer([own, copy], CostModel())
    proposer.add(drafter)
    assert proposer.sources == [own, drafter, copy]


class TimedRunner:
    """Chains of the token 1 for all rows; a token takes the given seconds."""

    def __init__(self, num_rows: int, seconds: float):
        self.clock, self.seconds, self.lead = Clock(), seconds, 3.0
        rows = [Row(SampleId(0, 0, n), (1,), 50, number=n) for n in range(num_rows)]
        length = np.full(max(num_rows, 8), 20)
        fields = {"rows": rows, "lengths": np.full(num_rows, 20), "length": length}
        fields |= {"tokens": np.ones((len(length), 60), np.int64), "num_slots": 8}
        self.engine = SimpleNamespace(**fields, reset=lambda: None)

    def can_draft(self, slots):
        return slots >= 0

    def run_once(self, num_rows):
        self.clock.sleep(self.seconds)

    def draw(self, slots, place, tokens):
        self.clock.sleep(self.seconds)
        return np.ones(len(slots), np.int64), np.full(len(slots), self.lead), len(slots)


def make_source(num_rows: int, seconds: float, cost: CostModel) -> DraftModelSource:
    runner = TimedRunner(num_rows, seconds)
    return mechanism.make_source(runner, cost, runner.clock)


def tracked(source: DraftModelSource) -> np.ndarray:
    source.begin(TrackedRows())
    return np.array([row.number for row in source.runner.engine.rows])


@pytest.mark.parametrize("seconds, drafts_on", [(1e-4, True), (0.1, False)])
def test_chain_cost_is_learned(seconds, drafts_on):
    source = make_source(3, seconds, made_cost(0.01, 0, 1e-5, 0, 0))
    rows, counts = tracked(source), []
    for _ in range(60):
        proposals = source.propose(rows, np.array([4, 9, 2]))
        counts.append(proposals.count.tolist())
        assert proposals.begin.tolist() == [0, LONGEST, 2 * LONGEST]
        source.observe(rows, *np.ones((2, 3), np.int64))
    assert counts[0] == counts[-1] == ([4, 5, 2] if drafts_on else [0, 0, 0])
    assert source.chain_lengths.tolist() == np.bincount(np.ravel(counts), minlength=6).tolist()
    assert (source.chance > 0.3) == drafts_on


def test_acceptance_is_counted_by_number_and_fades():
    source = make_source(1, 1e-6, made_cost(0.01, 0, 1e-9, 0, 0))
    source.always = True
    prior = PRIOR ** np.arange(1, LONGEST + 1)
    row = tracked(source)
    assert source.rates.accepted == pytest.approx(prior)
    for _ in range(400):
        assert source.propose(row, np.array([9])).count.all()
        source.observe(row, np.array([1, 1, 7, 1]), np.array([4]))  # two right
    rates = source.rates.accepted
    assert rates[1] > 0.95 and rates[2] < 0.1 and (np.diff(rates) <= 0).all()
    for _ in range(200):
        source.begin(source.tracked)
    assert source.rates.accepted == pytest.approx(prior, rel=0.1)


def test_replaced_rows_get_no_chains():
    source = make_source(3, 1e-6, made_cost(0.01, 0, 1e-9, 0, 0))
    rows = tracked(source)
    source.runner.engine.rows = source.runner.engine.rows[:2]
    assert source.propose(rows, np.array([9, 9, 9])).count.tolist() == [5, 5, 0]
    before, one = source.rates.accepted, np.array([1])
    source.observe(np.array([5]), one, one)  # another row in its place
    assert source.rates.accepted == pytest.approx(before)
    source.propose(rows, np.array([9, 9, 9]))
    source.observe(rows[1:2], one, one)
    assert source.rates.accepted[0] > before[0]


def test_failed_source_stays_used():
    """Whether a rank has a proposer must not depend on what it alone knows."""
    source, proposer = DraftSource(), Proposer([], CostModel())
    proposer.add(source)
    source.is_enabled = False
    assert not proposer.is_used
    source.problem = "ValueError: its logits are not numbers"
    assert proposer.is_used and not proposer.enabled_sources
