"""A step's samples from end to end, on a small model and against generation without drafts; what is
saved and learned between steps."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from bubblespec.data.schedule import PromptSet, StepSchedule
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.engine import Engine
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import EVALUATION
from bubblespec.planner import drafts as drafts_module
from bubblespec.planner.chooser import DRAFTS, Chooser
from bubblespec.planner.costs import CHAIN_ROWS
from bubblespec.planner.prices import suggested_prices
from bubblespec.planner.stats import RunStats
from bubblespec.records import ForwardRecord, RolloutRecord, Samples, Span, StepRecord
from bubblespec.rollout.board import ProgressSync
from bubblespec.rollout.evaluate import make_evaluator
from bubblespec.rollout.make_sampler import make_sampler
from bubblespec.rollout.sampler import Sampler
from bubblespec.tools.simulate.world import SimulatedRanks, SimulatedTicks
from bubblespec.tools.simulate.world import World as VirtualTime
from bubblespec.types import Draft, Group, Load, Row, StepBatch, ids_of
from tests.helpers.rollouts import (
    ALONE,
    FOUR_PROMPTS,
    LIMIT,
    MAX_LENGTH,
    PARAMS,
    PROMPTS,
    SEED,
    BoardWithSlowRank,
    as_dict,
    fixed_cost,
    groups_of,
    new_model,
    one_rank,
    rows_of,
    tried_ages,
    update,
)
from tests.helpers.rows import make_rows
from tests.helpers.simulated import make_config


class FakeScoring:
    def __init__(self):
        self.scored = []

    def on_finished(self, row: Row) -> None:
        self.scored.append(row)

    def collect(self, rows: list[Row]) -> np.ndarray:
        assert sorted(map(id, rows)) == sorted(map(id, self.scored)), "each once"
        return np.array([[float(len(row.tokens) % 3)] for row in rows]).reshape(-1, 1)


def start(
    method: str,
    model,
    board=None,
    ranks: Ranks | None = None,
    *,
    prompts=FOUR_PROMPTS,
    num_slots: int = 24,
    **options,
) -> Sampler:
    config = make_config(method, 2, 2, LIMIT, **{"run__max_steps": 9, **options})
    board = board or one_rank()
    if ranks is None:
        ranks = Ranks(ALONE.device)
        ranks.clock = board.ranks.clock
    runner = ModelRunner(model, num_slots, MAX_LENGTH, SEED, max_num_batched_tokens=256)
    schedule = StepSchedule(PromptSet(list(prompts), 0), 0, 2, 2)
    scorer = SimpleNamespace(begin=lambda *_: FakeScoring(), sees_groups=lambda _: False)
    parts = (config, ranks, Engine(runner), PARAMS, schedule, scorer)
    sampler = make_sampler(*parts, reward_weights=[2.0], board=board, cost=fixed_cost())
    pricing = sampler.stats.pricing  # forwards take no time on these clocks
    pricing.prices, pricing.observe = suggested_prices(fixed_cost(), 10.0, 50.0), lambda *_: None
    return sampler


def by_id(samples: Samples) -> dict:
    return {name: tokens.tolist() for name, tokens in zip(samples.ids, samples.tokens, strict=True)}


def generated(model, groups: list[Group], num_generations: int = 2, params=PARAMS) -> dict:
    rows = make_rows(groups, num_generations, LIMIT)
    done = Engine(ModelRunner(model, 64, MAX_LENGTH, SEED)).run(rows, params)
    return {name: tokens for name, (tokens, _) in as_dict(done).items()}


# Steps from end to end


METHODS = {"none": "by_cost", "suffix": "by_cost", "bubble": "by_cost", "bubble+suffix": "always"}


@pytest.mark.parametrize("method, planning", METHODS.items())
def test_steps_equal_plain_generation(method, planning):
    model = new_model()
    board = BoardWithSlowRank(60)
    sampler = start(method, model, board, speculative__planning=planning)
    accepted, drafted = 0, 0
    for step in range(3):
        groups = sampler.schedule.launch(step).groups
        record = sampler.sample(step)
        assert record.samples.groups == groups and record.samples is record.generated
        assert by_id(record.samples) == generated(model, groups)
        lengths = record.samples.lengths.reshape(2, 2)
        np.testing.assert_array_equal(record.rewards, 2.0 * (lengths % 3))
        assert [span.kind for span in record.stages] == ["gen", "wait", "reward"]
        (rollout,) = record.rollouts
        accepted += rollout.acceptance.accepted_tokens
        drafted += rollout.drafted_tokens
        assert not any(sampler.store.get(name) for name in record.samples.ids), "had their turn"
        update(model, step)
    uses_drafts = "bubble" in method
    assert (drafted > 0) == uses_drafts and (accepted > 0 or not uses_drafts)
    assert (len(sampler.history.state_dict()["tokens"]) > 0) == ("suffix" in method)


OFF = frozenset([DRAFTS])


@pytest.fixture
def always_drafts(monkeypatch):
    monkeypatch.setattr(Chooser, "_draw", lambda chooser, step: frozenset())


@pytest.mark.parametrize("method", ["bubble+suffix", "none"])
def test_restored_sampler_continues_alike(method, always_drafts):
    ends = []
    for is_resumed in (False, True):
        model = new_model()
        sampler = start(method, model, BoardWithSlowRank(40))
        for step in range(2):
            sampler.sample(step)
            update(model, step)
        if is_resumed:
            state = {name: array.copy() for name, array in sampler.state_dict().items()}
            schedule = sampler.schedule
            sampler = start(method, model, BoardWithSlowRank(40))
            sampler.schedule = schedule
            sampler.load_state_dict(state)
            for name, array in sampler.state_dict().items():
                np.testing.assert_array_equal(array, state[name], err_msg=name)
        record = sampler.sample(2)
        counts = record.rollouts[0].acceptance
        drafts = {name: draft.tokens.tolist() for name, draft in record.drafts.items()}
        ends.append((by_id(record.samples), drafts, counts.draft_tokens, counts.by_source))
    assert ends[0] == ends[1] and (len(ends[0][1]) > 0) == ("bubble" in method)


def test_drafts_are_chosen_about_only_where_costs_decide():
    for method in ("bubble", "suffix"):
        assert start(method, new_model()).stats.chooser.parts == [DRAFTS]
    for method, planning in (("bubble", "always"), ("bubble", "idle_only")):
        assert not start(method, new_model(), speculative__planning=planning).stats.chooser.parts


def test_chosen_steps_do_without_drafts(monkeypatch):
    for is_off in (False, True):
        off = OFF if is_off else frozenset()
        monkeypatch.setattr(Chooser, "off", lambda chooser, step, off=off: off)
        sampler = start("bubble", new_model())
        records = [sampler.sample(step).rollouts[0] for step in range(3)]
        assert any(record.drafted_tokens for record in records) != is_off
        assert any(record.acceptance.draft_tokens for record in records) != is_off


@pytest.mark.parametrize(
    "method, off, ends",
    [("suffix", OFF, True), ("bubble", OFF, False), ("suffix", frozenset(["copy"]), False)],
)
def test_responses_of_earlier_visits_are_tried_once(method, off, ends):
    sampler = start(method, new_model())
    for step in range(3):
        sampler.stats.chooser._off = {step: off}
        groups = groups_of(step)
        plan = sampler.plan(StepBatch(groups, len(groups), 2), step, groups)
        assert (plan.without == off) != (ends and step == 1)


def test_rollout_without_drafts_is_placed_as_if_nothing_was_drafted(always_drafts):
    sampler = start("bubble", new_model())
    for step in range(2):
        sampler.sample(step)
    launch = sampler.schedule.launch(2)
    assert any(sampler.store.get(name) for name in launch.ids)
    with_drafts = sampler.plan(launch, 2, launch.groups).table.rows.drafted
    sampler.stats.chooser._off[2] = OFF
    assert with_drafts.any() and not sampler.plan(launch, 2, launch.groups).table.rows.drafted.any()


def test_rollout_without_drafts_only_drafts_when_idle(always_drafts, monkeypatch):
    monkeypatch.setattr(drafts_module, "MAX_LOOKAHEAD", 1)  # there is something left to draft
    sampler = start("bubble", new_model(), BoardWithSlowRank(120))
    first = sampler.sample(0).rollouts[0]
    sampler.stats.chooser._off[1] = OFF
    control = sampler.sample(1).rollouts[0]
    assert first.drafted_tokens and control.drafted_tokens
    assert not control.acceptance.draft_tokens
    assert not any(forward.own_rows and forward.ahead_rows for forward in control.forwards)


@pytest.mark.parametrize("has_own", [True, False])
def test_no_drafts_are_made_for_a_rollout_without(has_own):
    """Only for the one after it, and for none if the rollout itself has none either."""
    sampler = start("bubble", new_model(), BoardWithSlowRank(120))
    sampler.stats.chooser._off = {0: frozenset() if has_own else OFF, 1: OFF}
    sampler.sample(0)
    coming = [ids_of(batch, 2) for batch in sampler.schedule.upcoming(0, 2)]
    drafted = [any(map(sampler.store.get, names)) for names in coming]
    assert drafted == [False, has_own]


def test_deferred_rows_become_drafts():
    sampler = start("bubble", new_model())
    rows = rows_of(7)
    tokens = [np.arange(1, 9), np.arange(1, 5), np.arange(1, 7), np.empty(0, np.int64)]
    for row, of_row in zip(rows, tokens, strict=False):
        row.tokens = of_row
    rows[0].finish = "stop"
    rows[1].draft = Draft(np.arange(1, 12, dtype=np.int32), True, 2)  # right so far
    rows[2].draft = Draft(np.arange(2, 12, dtype=np.int32), True, 2)  # wrong
    sampler.keep_as_drafts(rows[:4], 5)
    kept = [sampler.store.get(row.id) for row in rows[:4]]
    assert [len(draft.tokens) for draft in kept[:3]] == [8, 11, 6] and kept[3] is None
    assert [draft.is_finished for draft in kept[:3]] == [True, True, False]
    assert [draft.version for draft in kept[:3]] == [5, 2, 5]


# Evaluations

HELD_OUT = [Group(prompt, EVALUATION) for prompt in PROMPTS]


def test_evaluation_verifies_last_responses():
    model = new_model()
    sampler = start("bubble", model)
    evaluator, wanted, forwards = make_evaluator(sampler), generated(model, HELD_OUT), []
    for version in (0, 4):
        samples, record = evaluator.generate(HELD_OUT, 2, PARAMS, version)
        assert by_id(samples) == wanted
        forwards.append(record.own_forwards)
    counts = record.acceptance
    assert counts.draft_tokens == counts.accepted_tokens > 0
    assert tried_ages(evaluator.proposer) == {4}
    assert forwards[1] < forwards[0] / 3
    update(model, 0)
    assert by_id(evaluator.generate(HELD_OUT, 2, PARAMS, 5)[0]) == generated(model, HELD_OUT)


def test_evaluations_do_not_change_training(always_drafts):
    """Steps between evaluations: what training has learned is the same as without them."""
    states = []
    for evaluates in (False, True):
        model = new_model()
        sampler = start("bubble+suffix", model, BoardWithSlowRank(40))
        evaluator = make_evaluator(sampler)
        for step in range(2):
            if evaluates:
                evaluator.generate(HELD_OUT, 2, PARAMS, step)
            sampler.sample(step)
            update(model, step)
        state = sampler.state_dict()
        # Seconds of the helper's clock, which moves at every look.
        kept = {name: a for name, a in state.items() if not name.startswith("stats.chooser")}
        states.append(kept)
    assert states[0].keys() == states[1].keys()
    changed = [name for name in states[0] if not np.array_equal(states[0][name], states[1][name])]
    assert changed == [] and len(states[0]["drafts.tokens"])


# What is learned


def test_lengths_are_learned_with_any_drafts():
    """Placement and admission know the lengths of earlier epochs; and what is expected of a row is
    the same for placement and for what is drafted."""
    expected = {}
    for method in ("none", "suffix", "bubble"):
        sampler = start(method, new_model(), prompts=FOUR_PROMPTS)
        for step in range(2):
            record = sampler.sample(step)
        lengths = sampler.stats.lengths
        drafts = [sampler.store.get(name) for name in sampler.schedule.launch(2).ids]
        plan = sampler.prepare(sampler.schedule.launch(2), 2, sampler.store, frozenset())
        table, rows = plan.table, plan.rows
        predicted = lengths.predict(table.launch.groups, 2, drafts)
        np.testing.assert_array_equal(table.rows.expected, predicted.expected)
        order = table.rows.expected[list(rows)] - table.rows.drafted[list(rows)]
        if method in ("none", "suffix"):
            assert (np.diff(order) <= 0).all(), "longest first"
            expected[method] = table.rows.expected.tolist()
        assert len(record.samples) == 4
    assert expected["none"] == expected["suffix"] and len(set(expected["none"])) > 1


def play_two_ranks(num_steps: int, method="none", **options) -> list[list[StepRecord]]:
    time, results = VirtualTime(2), {}

    def work(rank: int) -> None:
        ranks = SimulatedRanks(time, rank)
        board = ProgressSync(ranks, 100, SimulatedTicks(ranks), interval_s=0)
        sampler = start(method, new_model(), board, ranks, **options)
        results[rank] = [sampler.sample(step) for step in range(num_steps)]

    time.run(work)
    return [results[0], results[1]]


def test_placement_uses_lengths_of_earlier_epochs(monkeypatch):
    balanced, in_turn = play_two_ranks(4), play_two_ranks(4, rollout__placement="in_turn")
    for both in (balanced, in_turn):
        for of_ranks in zip(*both, strict=True):
            assert by_id(of_ranks[0].samples) == by_id(of_ranks[1].samples)
            np.testing.assert_array_equal(of_ranks[0].owners, of_ranks[1].owners)
            assert set(of_ranks[0].owners.tolist()) == {0, 1}
    for step in range(4):
        assert by_id(balanced[0][step].samples) == by_id(in_turn[0][step].samples)
    assert all(record.owners.tolist() == [0, 0, 1, 1] for record in in_turn[0])
    assert any(record.owners.tolist() != [0, 0, 1, 1] for record in balanced[0][2:])
    assert not any(math.isnan(record.expected_s) for record in balanced[0][2:])
    for off, are_whole in ((frozenset(), True), (OFF, False)):
        monkeypatch.setattr(Chooser, "off", lambda chooser, step, off=off: off)
        matching, _ = play_two_ranks(4, "suffix")
        owners = [record.owners.reshape(2, 2) for record in matching]
        assert all((ranks[:, 0] == ranks[:, 1]).all() for ranks in owners) == are_whole


def test_costs_count_chains_where_the_next_rollout_has_them(monkeypatch):
    """Whether or not the rollout that they are learned from had any."""
    off = [], ["drafter"], ["copy"], ["copy", "drafter", DRAFTS]
    monkeypatch.setattr(Chooser, "_draw", lambda chooser, step: frozenset(off[step // 3 % 4]))
    stats, groups = RunStats(cost=fixed_cost()), groups_of(0)
    stats.chains = lambda context: np.full(len(CHAIN_ROWS), 0.5)
    stats.chains_part = "copy"
    stats.chooser = Chooser([DRAFTS])
    stats.chooser.add("copy")
    stats.chooser.add("drafter")
    launch, seen = StepBatch(groups, len(groups), 2), set()
    rows = dict(enumerate(make_rows(groups, 2, LIMIT)))
    for row in rows.values():
        row.tokens = np.ones(20, np.int64)
    record = RolloutRecord(began_s=1.0, ended_s=2.0)
    for step in range(40):
        without = stats.chooser.off(step)
        options = {"planning_s": 0.0, "used_share": 0.0, "num_slots": 8, "step": step}
        stats.observe_rollout(record, launch, rows, ALONE, **options)
        coming = stats.chooser.off(step + 1)
        assert (stats.cost_without(coming).chains is not None) == ("copy" not in coming)
        seen.add(("copy" in without, len(coming)))
    assert {(True, 0), (False, 1), (True, 3)} <= seen
    again = RunStats(chains=stats.chains)
    again.load_state_dict(stats.state_dict())
    assert again.cost_without(frozenset()).chains.tolist() == [0.5] * len(CHAIN_ROWS)


def test_stats_count_shared_forwards():
    """Its seconds and forwards are in what was measured, as its tokens are in what is modelled."""
    stats, groups = RunStats(cost=fixed_cost(a=1.0, b=0.0, c=0.0)), groups_of(0)
    launch = StepBatch(groups, len(groups), 2)
    rows = dict(enumerate(make_rows(groups, 2, LIMIT)))
    for row in rows.values():
        row.tokens = np.ones(20, np.int64)
    load = Load(6, 6, 0, 60, 0, 0)
    forwards = [ForwardRecord(n, n + 1.0, 1.0, 0.0, load, 6, 0, 0) for n in range(12)]
    record = RolloutRecord(0.0, 16.0, forwards, shared=[Span("shared", 12.0, 16.0)])
    record.shared_forwards = forwards[:8]
    options = {"num_slots": 8, "planning_s": 0.5, "used_share": 0.0, "step": 0}
    saved_s = stats.observe_rollout(record, launch, rows, ALONE, **options)
    assert saved_s == pytest.approx(20.0 - 16.5, rel=0.02) and stats.forwards == 20
