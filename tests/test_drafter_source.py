"""How long the drafter's chains are, by what is accepted and what they cost."""

from types import SimpleNamespace

import numpy as np
import pytest

from bubblespec.draft.proposer import Proposer
from bubblespec.draft.sources import DraftSource, TrackedRows
from bubblespec.mechanisms.drafter import mechanism
from bubblespec.mechanisms.drafter import source as drafter_source
from bubblespec.mechanisms.drafter.runner import MAX_CHAIN_LENGTH, MAX_ROWS
from bubblespec.mechanisms.drafter.source import DrafterSource
from bubblespec.mechanisms.quantized.source import QuantizedSource
from bubblespec.planner.costs import KNOTS, CostModel
from bubblespec.planner.windows import choose_chain_length
from bubblespec.types import Row, SampleId
from tests.helpers.clocks import Clock


def test_complete_run_has_no_drafter_to_move(monkeypatch):
    """An evaluation of a run that is complete may still enter the TP tail."""
    monkeypatch.setattr(mechanism, "read_drafter", lambda *args, **options: None)
    sampler = SimpleNamespace(config=None, ranks=SimpleNamespace(is_main=True), params=None)
    drafter = mechanism.DrafterMechanism(sampler, None, None, id)
    with drafter.moved_to(engine=None):
        assert drafter.training is None


@pytest.mark.parametrize("has_failed", [False, True])
def test_failed_drafter_is_neither_used_nor_saved(monkeypatch, tmp_path, has_failed):
    monkeypatch.setattr(mechanism, "read_drafter", lambda *args, **options: None)
    enabled, saved = [], []
    monkeypatch.setattr(mechanism, "save_drafter", lambda *arguments: saved.append(arguments))
    sampler = SimpleNamespace(config=None, ranks=SimpleNamespace(is_main=True), params=None)
    drafter = mechanism.DrafterMechanism(sampler, None, None, id)
    source = SimpleNamespace(enable=enabled.append)
    state = {"has_failed": has_failed, "drafter": None, "num_updates": 3}
    drafter.training = SimpleNamespace(source=source, clock=None, **state)
    plan = SimpleNamespace(is_on=True, step=1, tasks=[])
    drafter.begin_rollout(plan)
    drafter.save(str(tmp_path))
    assert enabled == [not has_failed]
    assert len(plan.tasks) == len(saved) == (not has_failed)


def test_drafter_is_asked_before_the_copy_though_added_later():
    own, copy, drafter = (DraftSource() for _ in range(3))
    copy.is_last, drafter.is_last = QuantizedSource.is_last, DrafterSource.is_last
    proposer = Proposer([own, copy], CostModel())
    proposer.add(drafter)
    assert proposer.sources == [own, drafter, copy]


def made_cost(*coefficients: float) -> CostModel:
    return CostModel.from_parameters(np.append(coefficients, np.zeros(len(KNOTS))))


@pytest.mark.parametrize("seed", range(10))
def test_no_other_length_gives_more_tokens_per_second(seed):
    random = np.random.default_rng(seed)
    active = int(random.integers(1, 30))
    count, kv_tokens = int(random.integers(1, active + 1)), 50 * active
    (a, b, c, d, e), (f, g, h, _, _) = (
        (10.0 ** random.uniform(-5, -2, 5)) * (1, 0.1, 0.1, 0.1, 1e-3) for _ in range(2)
    )
    rates = np.cumprod(random.uniform(0.3, 0.95, MAX_CHAIN_LENGTH))

    def tokens_per_second(length: int) -> float:
        seconds = a + b * active + c * (active + count * length) + e * kv_tokens
        if length:
            seconds += d * count + f + g * length + h * count * length
        return (active + count * rates[:length].sum()) / seconds

    cost, drafter_cost = made_cost(a, b, c, d, e), made_cost(f, g, h, 0, 0)
    length = choose_chain_length(rates, cost, drafter_cost, active, count, kv_tokens)
    best = max(tokens_per_second(n) for n in range(MAX_CHAIN_LENGTH + 1))
    assert tokens_per_second(length) == pytest.approx(best, rel=1e-12)


class TimedRunner:
    """Chains of the token 1 for all rows, which take as long as they are told."""

    def __init__(self, num_rows: int, seconds: float):
        self.clock, self.seconds = Clock(), seconds
        rows = [Row(SampleId(0, 0, n), (1,), 50) for n in range(num_rows)]
        self.engine = SimpleNamespace(
            rows=rows, lengths=np.full(num_rows, 20), num_slots=8, reset=lambda: None
        )

    def run_once(self, num_rows):
        self.clock.sleep(self.seconds)

    def draft(self, slots, length):
        self.clock.sleep(self.seconds * length)
        return np.ones((len(slots), length), np.int64), slots, len(slots)


def make_source(num_rows: int, seconds: float, cost: CostModel) -> DrafterSource:
    runner = TimedRunner(num_rows, seconds)
    return DrafterSource(runner, cost, runner.clock)


def tracked(source: DrafterSource) -> np.ndarray:
    """The numbers of the engine's rows."""
    rows = TrackedRows()
    source.begin(rows)
    return np.array([rows.add(row, None, 0, True) for row in source.runner.engine.rows])


@pytest.mark.parametrize("seconds, drafts_on", [(1e-4, True), (0.1, False)])
def test_chain_cost_is_learned(seconds, drafts_on):
    """Before the first chain, and as chains are made."""
    source = make_source(3, seconds, made_cost(0.01, 0, 1e-5, 0, 0))
    source.profile()
    rows, lengths = tracked(source), []
    for _ in range(60):
        proposals = source.propose(rows, np.array([4, 9, 2]))
        lengths.append(int(proposals.count[1]))
        if lengths[-1]:
            wanted = [min(lengths[-1], limit) for limit in (4, 9, 2)]
            assert proposals.count.tolist() == wanted
            assert proposals.begin.tolist() == [0, lengths[-1], 2 * lengths[-1]]
            source.observe(rows, *np.ones((2, 3), np.int64))
    assert (lengths[0] > 0) == (lengths[-1] > 0) == drafts_on
    assert source.chain_lengths.tolist() == np.bincount(lengths, minlength=6).tolist()
    assert (source.chance > 0.3) == drafts_on


def test_acceptance_is_counted_by_position_and_fades():
    source = make_source(1, 1e-6, made_cost(0.01, 0, 1e-9, 0, 0))
    prior = drafter_source.PRIOR ** np.arange(1, MAX_CHAIN_LENGTH + 1)
    row = tracked(source)
    assert source.acceptance_rates() == pytest.approx(prior)
    for _ in range(400):
        assert source.propose(row, np.array([9])).count.all()
        source.observe(row, np.array([1, 1, 7, 1]), np.array([4]))  # two right
    rates = source.acceptance_rates()
    assert rates[1] > 0.95 and rates[2] < 0.1 and (np.diff(rates) <= 0).all()
    for _ in range(200):
        source.begin(source.tracked)
    assert source.acceptance_rates() == pytest.approx(prior, rel=0.1)


def test_many_rows_and_replaced_rows_get_no_chains():
    source = make_source(MAX_ROWS + 1, 1e-6, made_cost(0.01, 0, 1e-9, 0, 0))
    rows = tracked(source)
    assert not source.propose(rows, np.full(len(rows), 9)).count.any()
    source.runner.engine.rows = source.runner.engine.rows[:2]
    assert source.propose(rows[:2], np.array([9, 9])).count.all()
    before, one = source.acceptance_rates(), np.array([1])
    again = source.tracked.add(source.tracked.rows[0], None, 0, True)  # another row in its place
    source.observe(np.array([again]), one, one)
    assert source.acceptance_rates() == pytest.approx(before)
    source.observe(rows[1:2], one, one)
    assert source.acceptance_rates()[0] > before[0]
