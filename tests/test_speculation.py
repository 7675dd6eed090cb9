"""Speculation over a run: how deep it looks ahead, what it learns, saves and restores, and exact steps from end to end."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_run_ahead import (
    LIMIT,
    MAX_LENGTH,
    PARAMS,
    PROMPTS,
    SEED,
    BoardWithSlowRank,
    as_dict,
    fixed_cost,
    new_model,
    plain,
    update,
)

from bubblespec.config import Config
from bubblespec.engine.generator import Generator
from bubblespec.engine.runner import ModelRunner
from bubblespec.idle.speculation import FOLLOWED, MAX_AUTO_LOOKAHEAD, Speculation, make_speculation, profile, speculation_metrics
from bubblespec.ranks.collectives import Ranks
from bubblespec.ranks.progress import ProgressBoard
from bubblespec.records import Draft, Load, Prompt
from bubblespec.rollout.loop import RolloutStats
from bubblespec.rollout.placement import make_rows
from bubblespec.speculate.proposer import RowSpeculator
from bubblespec.speculate.store import DraftStore
from bubblespec.speculate.suffix import History
from bubblespec.speculate.windows import CostModel
from tests.clocks import Clock, forward_seconds

RANKS = Ranks(torch.device("cpu"))


def make_config(method: str = "bubble+suffix", lookahead: int | str = "auto", max_draft_tokens: int = 10**6) -> Config:
    config = Config()
    config.speculative.method = method
    config.bubble.lookahead, config.bubble.max_draft_tokens = lookahead, max_draft_tokens
    config.rollout.num_generations, config.rollout.max_completion_length = 2, LIMIT
    config.rollout.num_slots, config.run.max_steps = 24, 100
    return config


def make(config: Config, board=None) -> Speculation:
    history = History(config.speculative.max_history_tokens)
    speculator = RowSpeculator(config.speculative.method, fixed_cost(), clock=Clock())
    speculator.history = history
    return Speculation(config, RANKS, board, speculator, DraftStore(config.bubble.max_draft_tokens), history)


@pytest.mark.parametrize(
    "method, lookahead, step, tokens_per_step, ages, wanted",
    [
        ("suffix", 5, 0, 1000, {}, 0),
        ("bubble", 0, 0, 1000, {}, 0),
        ("bubble", 5, 0, 1000, {}, 5),
        ("bubble+suffix", 5, 96, 1000, {}, 3),  # step 99 is the last
        ("bubble", 5, 99, 1000, {}, 0),
        ("bubble", 5, 0, 10**9, {2: 0.0}, 5),  # a number that the user gave is not second-guessed
        ("bubble", "auto", 0, 0, {}, MAX_AUTO_LOOKAHEAD),
        ("bubble", "auto", 0, 1000, {}, MAX_AUTO_LOOKAHEAD),
        ("bubble", "auto", 96, 1000, {}, 3),
        ("bubble", "auto", 99, 1000, {}, 0),
        ("suffix", "auto", 0, 1000, {}, 0),
        ("bubble", "auto", 0, 10**5, {}, 10),
        ("bubble", "auto", 0, 10**6 - 1, {}, 1),
        ("bubble", "auto", 0, 10**6 + 1, {}, 0),
        ("bubble", "auto", 0, 1000, {1: 0.9, 2: 0.5, 3: 0.21}, MAX_AUTO_LOOKAHEAD),
        ("bubble", "auto", 0, 1000, {1: 0.9, 4: 0.19, 6: 0.1}, 3),
        ("bubble", "auto", 0, 10**6 // 2, {1: 0.9, 4: 0.19}, 2),
        ("bubble", "auto", 3, 1000, {1: 0.1, 2: 0.1}, 0),
        ("bubble", "auto", 8, 1000, {1: 0.1, 2: 0.1}, 1),  # now and then drafts are made anyway: they may have got better
    ],
)
def test_lookahead(method, lookahead, step, tokens_per_step, ages, wanted):
    speculation = make(make_config(method, lookahead))
    speculation.tokens_per_step, speculation.accepted_by_age = tokens_per_step, ages
    assert speculation.lookahead(step) == wanted


def test_learning_from_several_prompts():
    """Samples are in canonical order, prompt after prompt: lengths and histories must go to the prompt they belong to."""
    speculation = make(make_config())
    prompts = [Prompt(n, "", (1,) * (n + 2), {}) for n in (5, 3, 8)]
    lengths = [4, 6, 1, 2, 30, 20]
    tokens = [np.full(length, number, np.int32) for number, length in enumerate(lengths)]
    speculation.learn(7, prompts, tokens, np.arange(6) / 4)
    assert speculation.outlook.seen.tolist() == [[7, 4], [7, 6], [5, 1], [5, 2], [10, 30], [10, 20]]
    assert speculation.tokens_per_step == 63
    for n, prompt in enumerate(prompts):
        found = [(set(t.tolist()), len(t), reward) for t, reward in speculation.history.get(prompt.uid)]
        assert found == [({i}, lengths[i], i / 4) for i in (2 * n + 1, 2 * n)]
    speculation.learn(8, prompts[:1], [np.zeros(3), np.zeros(10)], np.zeros(2))
    assert speculation.tokens_per_step == pytest.approx(0.7 * 63 + 0.3 * 13)
    assert len(speculation.outlook.seen) == 8
    bubble = make(make_config("bubble"))
    bubble.learn(7, prompts, tokens, np.zeros(6))
    assert bubble.history.num_tokens == 0 and bubble.tokens_per_step == 63


def test_exchange_averages_what_ranks_measured():
    """Shares by age over 20 tokens at least, forwards and costs: all exponentially weighted or of all ranks."""
    speculation = make(make_config())
    stats = speculation.speculator.stats
    stats.by_age = {1: [100, 80], 2: [19, 0], MAX_AUTO_LOOKAHEAD: [30, 10], MAX_AUTO_LOOKAHEAD + 3: [30, 20]}
    speculation.exchange({(3, 1, 0): Draft(np.arange(4, dtype=np.int32), True, 0)}, RolloutStats(own_forwards=40))
    assert speculation.accepted_by_age == {1: pytest.approx(0.8), MAX_AUTO_LOOKAHEAD: pytest.approx(0.5)}
    assert speculation.forwards == 40 and len(speculation.store) == 1
    np.testing.assert_allclose(speculation.shared_cost, speculation.speculator.cost.coefficients)
    stats.by_age = {1: [100, 20]}
    assert speculation.exchange({}, RolloutStats(own_forwards=20)) == 0
    assert speculation.accepted_by_age[1] == pytest.approx(0.7 * 0.8 + 0.3 * 0.2)
    assert speculation.forwards == pytest.approx(0.7 * 40 + 0.3 * 20)


def test_exchange_plans_by_the_slowest_rank_and_the_mean_cost():
    """Two ranks, of which the second has measured twice of everything."""
    speculation = make(make_config())
    speculation.ranks = SimpleNamespace(gather=lambda a: np.stack((a, 2 * a)), gather_ragged=lambda a: [a, a[:0]])
    speculation.speculator.stats.by_age = {1: [20, 15]}
    speculation.exchange({}, RolloutStats(own_forwards=40))
    assert speculation.forwards == 80 and speculation.accepted_by_age == {1: pytest.approx(0.75)}
    np.testing.assert_allclose(speculation.shared_cost, 1.5 * speculation.speculator.cost.coefficients)


def test_exchange_counts_how_far_drafts_were_followed():
    """Of both ranks, the last step with most weight; without any news what was believed at the start comes back."""
    speculation = make(make_config())
    speculation.ranks = SimpleNamespace(gather=lambda a: np.stack((a, 2 * a)), gather_ragged=lambda a: [a, a[:0]])
    stats = speculation.speculator.stats
    stats.aligned, stats.left = [200, 150], [50, 10]
    speculation.exchange({}, RolloutStats())
    believed = 0.71 * FOLLOWED
    np.testing.assert_allclose(speculation.followed, believed + 3 * np.array([[200, 150], [50, 10]]))
    assert [stats.aligned, stats.left] == [[0, 0], [0, 0]], "the step may have a further rollout"
    shares = []
    for _ in range(2000):
        speculation.exchange({}, RolloutStats())
        shares.append(speculation.followed[:, 1] / speculation.followed[:, 0])
    np.testing.assert_allclose(shares[0], [0.79, 0.185], atol=0.03)
    np.testing.assert_allclose(shares[-1], FOLLOWED[:, 1] / FOLLOWED[:, 0])


def test_drafts_that_do_not_pay_any_more_are_left_to_idle_ranks():
    speculation = make(make_config())
    key = (2, PROMPTS[0].uid, 0)
    speculation.exchange({key: Draft(np.arange(9, dtype=np.int32), False, 0, holder=0)}, RolloutStats(own_forwards=20))
    speculation.outlook.learn(np.full(4, 3), np.array([10, 20, 30, 40]))
    batches = [(step, PROMPTS) for step in (1, 2)]
    speculation.shared_cost = np.array([1e-2, 5e-4, 1e-3, 0.0, 0.0])
    ahead = speculation._plan(batches, 0, 2, 64)
    assert [item.key for item in ahead.held] == [key] and ahead.items
    speculation.followed = np.array([[100.0, 10.0], [100.0, 0.0]])
    ahead = speculation._plan(batches, 0, 2, 64)
    assert not ahead.held and not ahead.items and key in [item.key for item in ahead.idle_items]


def grown(step: int) -> Speculation:
    """After a few steps with drafts, some of them held by this rank, and with histories of some prompts."""
    speculation, rng = make(make_config()), np.random.default_rng(0)
    for s in range(3):
        tokens = [rng.integers(1, 50, int(rng.integers(1, 30))) for _ in range(6)]
        speculation.learn(s, [replace(p, uid=p.uid + 1) if s % 2 else p for p in PROMPTS], tokens, rng.normal(size=6))
        speculation.speculator.stats.by_age = {1: [100, 90 - s], 6: [100, 10]}
        made = {}
        for ahead in range(1, 4):
            for prompt in PROMPTS[:2]:
                draft = rng.integers(1, 50, int(rng.integers(1, 25))).astype(np.int32)
                made[step + ahead, prompt.uid, s % 2] = Draft(draft, bool(rng.integers(2)), s, 0 if ahead == 3 else -1)
        speculation.exchange(made, RolloutStats(own_forwards=25))
    return speculation


def plan(speculation: Speculation, step: int) -> list:
    depth = speculation.lookahead(step)
    batches = [(s, PROMPTS) for s in range(step + 1, step + 1 + depth)]
    ahead = speculation._plan(batches, step, 6, 24)
    return [depth, *([(item.key, item.pays, item.holder) for item in items] for items in (ahead.items, ahead.idle_items))]


def test_a_restored_run_plans_as_the_saved_one():
    """What planning depends on comes back, through a file too; that an engine held a draft is forgotten."""
    saved = grown(10)
    assert len(saved._plan([(13, PROMPTS)], 10, 6, 24).held) > 0
    state = saved.state_dict()
    fresh = make(make_config())
    assert plan(fresh, 10) != plan(saved, 10)
    fresh.load_state_dict(state)
    for draft in saved.store._drafts.values():
        draft.holder = -1
    depth, pays, idle = plan(saved, 10)
    assert depth == 5 and pays and idle
    assert plan(fresh, 10) == [depth, pays, idle]
    assert fresh.tokens_per_step == saved.tokens_per_step
    assert fresh.history.get(PROMPTS[0].uid)[0][0].tolist() == saved.history.get(PROMPTS[0].uid)[0][0].tolist()
    assert all(np.array_equal(fresh.state_dict()[key], state[key]) for key in state if key != "drafts.header")
    fresh.load_state_dict(state | {"averages": np.insert(state["averages"], 1, 30.0)})  # as older versions saved it
    assert plan(fresh, 10) == [depth, pays, idle]


def test_a_run_that_has_measured_nothing_can_be_saved(tmp_path):
    state = make(make_config()).state_dict()
    np.savez(tmp_path / "state.npz", **state)
    again = make(make_config())
    with np.load(tmp_path / "state.npz") as arrays:
        again.load_state_dict(dict(arrays))
    assert plan(again, 0) == plan(make(make_config()), 0)


def test_a_profile_predicts_forwards_and_leaves_nothing_behind():
    """Forwards of other loads than the profiled ones, where time passes as in `forward_seconds`; and an engine as good as new."""
    model, clock = new_model(), Clock()
    engine = Generator(ModelRunner(model, 16, MAX_LENGTH, SEED))
    step, loads = engine.step, []

    def timed_step(*arguments) -> tuple:
        finished, load = step(*arguments)
        clock.sleep(forward_seconds(load))
        loads.append(load)
        return finished, load

    engine.step, cost = timed_step, CostModel()
    profile(engine, PARAMS, cost, clock=clock)
    del engine.step
    assert engine.is_idle
    assert as_dict(engine.run(make_rows(PROMPTS, 0, 2, LIMIT), PARAMS)) == plain(model, 0)[0]
    assert {(load.rows, load.tokens - load.rows) for load in loads} >= {(n, n * m) for n in (1, 4, 16) for m in (0, 3, 15)}
    for rows, window, length in ((2, 0, 20), (8, 0, 60), (8, 4, 30), (12, 8, 90)):
        load = Load(rows, rows * (1 + window), rows * (window > 0), rows * length, 0, rows * window)
        assert cost.seconds(*load[:4]) == pytest.approx(forward_seconds(load), rel=0.01)


def test_nothing_is_made_without_speculation():
    assert make_speculation(make_config("none"), RANKS, None, PARAMS) is None


@pytest.mark.parametrize("lookahead", [2, "auto"])
@pytest.mark.parametrize("method", ["bubble", "suffix", "bubble+suffix"])
def test_steps_of_a_run_are_exact(method, lookahead):
    """Five steps with changing weights: tokens of plain generation, drafts of no step beyond the last or behind the present."""
    model, config = new_model(), make_config(method, lookahead)
    config.run.max_steps = 5
    engine = Generator(ModelRunner(model, 24, MAX_LENGTH, SEED))
    speculation = make(config, BoardWithSlowRank(30))
    drafted = accepted = 0
    for step in range(5):
        if step % 2:
            update(model, step)
        rows = make_rows(PROMPTS, step, 2, LIMIT)
        stats, drafts = speculation.rollout(engine, list(rows), PARAMS, step, lambda s: PROMPTS)
        assert as_dict(rows) == plain(model, step)[0]
        assert all(step < key[0] <= min(step + speculation.lookahead(step), 4) for key in drafts)
        speculation.exchange(drafts, stats)
        assert all(key[0] > step for key in speculation.store._drafts)
        speculation.learn(step, PROMPTS, [row.tokens for row in rows], np.zeros(6))
        drafted += stats.drafted_tokens
        accepted += speculation.speculator.stats.num_accepted
        num_tokens = sum(len(row.tokens) for row in rows)
        metrics = speculation_metrics(RANKS, stats, speculation, num_tokens)
        assert json.dumps(metrics) and speculation.speculator.stats.num_gained == num_tokens
        assert 0 <= metrics["rollout/spec_coverage"] <= 1 and metrics["rollout/forwards"] == stats.own_forwards
    assert (drafted > 100) == ("bubble" in method)
    assert accepted > 20 or method == "suffix"
    assert len(speculation.store) == 0


def test_an_abandoned_rollout_keeps_the_drafts_of_its_step():
    """Told to stop before its first forward: nothing is generated, and what was drafted for the step is there to be saved."""
    ranks = Ranks(torch.device("cpu"))
    model = new_model()
    engine = Generator(ModelRunner(model, 16, MAX_LENGTH, SEED))
    speculation = make(make_config(), ProgressBoard(ranks, timeout_s=100, interval_s=0))
    speculation.store.put((4, PROMPTS[0].uid, 0), Draft(np.arange(5, dtype=np.int32), False, 3))
    rows = make_rows(PROMPTS, 4, 2, LIMIT)
    ranks.must_stop = True
    speculation.rollout(engine, rows, PARAMS, 4, lambda s: PROMPTS)
    assert all(row.finish is None for row in rows)
    assert (4, PROMPTS[0].uid, 0) in speculation.store._drafts
    ranks.must_stop = False
    again = make_rows(PROMPTS, 4, 2, LIMIT)
    speculation.rollout(engine, again, PARAMS, 4, lambda s: PROMPTS)
    assert as_dict(again) == plain(model, 4)[0]
    speculation.exchange({}, RolloutStats())
    assert speculation.store.get((4, PROMPTS[0].uid, 0)) is None
