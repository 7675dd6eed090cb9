"""Speculation over a run: how deep it looks ahead, what it learns, saves and restores, and exact
steps from end to end."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bubblespec.idle.draft_planning import Item
from bubblespec.idle.set_up_speculation import assemble, make_speculation, profile
from bubblespec.idle.speculation import MAX_AUTO_LOOKAHEAD, Speculation
from test_rollout_loop import (
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
    plain,
    rows_of,
    update,
)

from bubblespec.config import Config
from bubblespec.dist.ranks import Ranks, StopRequested
from bubblespec.engine.engine import Engine
from bubblespec.engine.runner import ModelRunner
from bubblespec.idle.draft_ahead import DraftAhead
from bubblespec.planner.costs import CostModel
from bubblespec.records import (
    POSITIONS,
    Acceptance,
    ForwardRecord,
    IdleUse,
    Load,
    RolloutRecord,
    Span,
)
from bubblespec.rollout.board import ProgressBoard
from bubblespec.rollout.sampler import Sampler
from bubblespec.telemetry.report import speculation_metrics
from bubblespec.types import Draft, Group, Launch, Prompt, Row, SampleId, Samples
from tests.helpers.clocks import Clock, forward_seconds
from tests.helpers.rows import launch_of, samples_of

RANKS = Ranks(torch.device("cpu"))
RANKS.clock = Clock()


def make_config(
    method: str = "bubble+suffix", lookahead: int | str = "auto", max_draft_tokens: int = 10**6
) -> Config:
    config = Config()
    config.speculative.method = method
    config.bubble.lookahead, config.bubble.max_draft_tokens = lookahead, max_draft_tokens
    config.rollout.num_generations, config.rollout.max_completion_length = 2, LIMIT
    config.rollout.num_slots, config.run.max_steps = 24, 100
    return config


def without_account(config: Config) -> Config:
    """What drafts may cost is another matter (test_account.py)."""
    config.speculative.check_every = 0
    return config


def make(config: Config, board=None, ranks: Ranks = RANKS) -> Speculation:
    return assemble(config, ranks, board, fixed_cost())


class SamePrompts:
    """A `StepSchedule` by which every step starts the same prompts, each time on a further visit."""

    deferred = ()

    def launch(self, step: int) -> Launch:
        return launch_of(groups_of(step), 2)

    def upcoming(self, step: int, depth: int, used: list[Group] | None = None) -> list[list[Group]]:
        return [groups_of(coming) for coming in range(step + 1, step + 1 + depth)]

    def replacements(self, step: int, count: int, used: list[Group]) -> list[Group]:
        return []

    def finish(self, samples: Samples, deferred: dict[SampleId, int]) -> None:
        pass


class Unscored:
    """In place of the scorer and of its scoring: all rewards are 0."""

    def begin(self, groups: list[Group], step: int | None) -> "Unscored":
        return self

    def on_finished(self, row) -> None:
        pass

    def collect(self, rows: list[Row]) -> np.ndarray:
        return np.zeros((len(rows), 1))


class WatchedSampler(Sampler):
    """Remembers the rows of the latest rollout."""

    def begin(self, launch: Launch, *arguments, **options) -> tuple:
        standing, rows, scoring = super().begin(launch, *arguments, **options)
        self.rows = list(rows.values())
        return standing, rows, scoring


def make_sampler(speculation: Speculation, engine: Engine, planner=None) -> WatchedSampler:
    """The rollouts of a run with a speculation of its own."""
    parts = (
        speculation.config,
        speculation.ranks,
        engine,
        PARAMS,
        planner or SamePrompts(),
        Unscored(),
        [1.0],
    )
    return WatchedSampler(*parts, speculation)


def recorded(
    own_forwards: int = 0,
    hard_forwards: int = 0,
    *,
    own_s: float = 0.0,
    wait_s: float = 0.0,
    total_s: float = 0.0,
    propose_s: float = 0.0,
    **fields,
) -> RolloutRecord:
    """A rollout of so many forwards, the first of which has all `propose_s`. fields: others of
    `RolloutRecord`."""
    began_s, forwards = 100.0, []
    for number in range(own_forwards + hard_forwards):
        is_own = number < own_forwards
        end_s = began_s + (own_s * (number + 1) / own_forwards if is_own else total_s)
        load = Load(1, 1, 0, 9, 0, 0)
        times = (end_s, end_s, 0.0, 0.0 if number else propose_s)
        forwards.append(ForwardRecord(*times, *load, int(is_own), int(not is_own), 1))
    waits = [Span("wait", began_s, began_s + wait_s / 2)] * 2
    return RolloutRecord(began_s, began_s + total_s, forwards, waits, **fields)


def learn(
    speculation: Speculation, record: RolloutRecord, ids: list[SampleId] | None = None, **options
) -> None:
    """After a rollout that took as long as it would have without drafts."""
    speculation.learn_rollout(
        record,
        ids or [],
        **(
            dict.fromkeys(("work_s", "spent_s"), record.own_s)
            | {"plain_s": record.total_s, "was_plain": False}
            | options
        ),
    )


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
        (
            "bubble",
            "auto",
            8,
            1000,
            {1: 0.1, 2: 0.1},
            1,
        ),  # now and then drafts are made anyway: they may have got better
    ],
)
def test_lookahead(method, lookahead, step, tokens_per_step, ages, wanted):
    speculation = make(make_config(method, lookahead))
    speculation.tokens_per_step, speculation.accepted_by_age = tokens_per_step, ages
    assert speculation.lookahead(step) == wanted


def test_learning_from_several_prompts():
    """Samples are in canonical order, prompt after prompt: lengths and histories must go to the
    prompt they belong to."""
    speculation = make(make_config())
    groups = [Group(Prompt(n, "", (1,) * (n + 2), {}), 4) for n in (5, 3, 8)]
    lengths = [4, 6, 1, 2, 30, 20]
    tokens = [np.full(length, number, np.int32) for number, length in enumerate(lengths)]
    speculation.learn_samples(7, samples_of(groups, tokens), np.arange(6) / 4)
    assert speculation.outlook.seen.tolist() == [[7, 4], [7, 6], [5, 1], [5, 2], [10, 30], [10, 20]]
    assert speculation.tokens_per_step == 63
    for n, group in enumerate(groups):
        found = [
            (set(t.tolist()), len(t), reward)
            for t, reward in speculation.history.get(group.prompt.uid)
        ]
        assert found == [({i}, lengths[i], i / 4) for i in (2 * n + 1, 2 * n)]
    speculation.learn_samples(8, samples_of(groups[:1], [np.zeros(3), np.zeros(10)]), np.zeros(2))
    assert speculation.tokens_per_step == pytest.approx(0.7 * 63 + 0.3 * 13)
    assert len(speculation.outlook.seen) == 8
    bubble = make(make_config("bubble"))
    bubble.learn_samples(7, samples_of(groups, tokens), np.zeros(6))
    assert bubble.history.num_tokens == 0 and bubble.tokens_per_step == 63


def test_learning_a_rollout_averages_what_ranks_measured():
    """Shares by age over 20 tokens at least, forwards and costs: all exponentially weighted or of
    all ranks. The drafts of its samples have had their turn, others stay."""
    speculation = make(make_config())
    used, coming = SampleId(1, 3, 0), SampleId(1, 4, 0)
    for sample in (used, coming):
        speculation.store.put(sample, Draft(np.arange(4, dtype=np.int32), True, 0))
    by_age = {
        1: [100, 80],
        2: [19, 0],
        MAX_AUTO_LOOKAHEAD: [30, 10],
        MAX_AUTO_LOOKAHEAD + 3: [30, 20],
    }
    learn(
        speculation, recorded(40, acceptance=Acceptance(by_age=by_age)), [used, SampleId(1, 3, 1)]
    )
    assert speculation.accepted_by_age == {
        1: pytest.approx(0.8),
        MAX_AUTO_LOOKAHEAD: pytest.approx(0.5),
    }
    assert (
        speculation.forwards == 40
        and len(speculation.store) == 1
        and speculation.store.get(coming) is not None
    )
    np.testing.assert_allclose(speculation.shared_cost, speculation.proposer.cost.coefficients)
    learn(speculation, recorded(20, acceptance=Acceptance(by_age={1: [100, 20]})))
    assert speculation.accepted_by_age[1] == pytest.approx(0.7 * 0.8 + 0.3 * 0.2)
    assert speculation.forwards == pytest.approx(0.7 * 40 + 0.3 * 20)


def test_plans_go_by_the_slowest_rank_and_the_mean_cost():
    """Two ranks, of which the second has measured twice of everything."""
    speculation = make(make_config())
    speculation.ranks = SimpleNamespace(gather=lambda a: np.stack((a, 2 * a)))
    learn(speculation, recorded(40, acceptance=Acceptance(by_age={1: [20, 15]})))
    assert speculation.forwards == 80 and speculation.accepted_by_age == {1: pytest.approx(0.75)}
    np.testing.assert_allclose(
        speculation.shared_cost, 1.5 * speculation.proposer.cost.coefficients
    )


def acceptance_of(before, after, place: int = 0) -> Acceptance:
    acceptance = Acceptance(after_divergence=list(after))
    acceptance.before_divergence[place] = before
    return acceptance


def test_what_was_seen_of_drafts_is_summed():
    """Of both ranks, by position, the last rollout with most weight; without any news it is
    forgotten."""
    speculation = make(make_config())
    speculation.ranks = SimpleNamespace(gather=lambda a: np.stack((a, 2 * a)))
    learn(speculation, recorded(acceptance=acceptance_of((200, 150), (50, 10), place=3)))
    wanted = np.zeros((len(POSITIONS) + 1, 2))
    wanted[3], wanted[-1] = (600, 450), (150, 30)
    np.testing.assert_array_equal(speculation.seen, wanted)
    learn(speculation, recorded(acceptance=acceptance_of((20, 10), (0, 0), place=0)))
    wanted *= 0.7
    wanted[0] = (60, 30)
    np.testing.assert_allclose(speculation.seen, wanted)
    for _ in range(100):
        learn(speculation, recorded())
    np.testing.assert_allclose(speculation.seen, 0.0, atol=1e-6)


def test_a_rollout_is_settled_by_its_slowest_rank():
    """Two ranks, of which the second takes twice as long in all. Plans, exchanges and the time
    behind the last own row count."""
    speculation = make(make_config())
    speculation.ranks = SimpleNamespace(gather=lambda a: np.stack((a, 2 * a)))
    record = recorded(own_forwards=4, own_s=8.0, total_s=10.0)
    record.idle["draft_ahead"] = IdleUse()
    speculation.overhead_s = 0.5
    learn(speculation, record, plain_s=12.0)
    assert (
        record.idle["draft_ahead"].brought_s == pytest.approx(2 * (12.0 - 10.5))
        and speculation.overhead_s == 0
    )
    assert speculation.account.num_settled == 1 and speculation.account.rollout_s == pytest.approx(
        24.0
    )
    # A rollout without drafts has no part in what they cost besides, and counts as it was measured.
    speculation.overhead_s = 0.5
    learn(
        speculation, recorded(own_forwards=4, own_s=8.0, total_s=11.0), plain_s=12.0, was_plain=True
    )
    assert speculation.overhead_s == 0.5 and speculation.account.rollout_s == pytest.approx(
        0.9 * 24 + 0.1 * 22
    )
    assert speculation.account.factor == pytest.approx(0.9 + 0.1 * 22 / 24)


def test_a_slow_moment_of_the_machine_is_not_the_fault_of_drafts():
    """A rollout that takes ten times what its forwards do by the cost model counts as one at the
    usual pace, which it changes by little."""
    speculation = make(make_config())
    learn(speculation, recorded(own_forwards=4, own_s=12.0, total_s=12.0), plain_s=10.0, work_s=8.0)
    assert speculation.pace == pytest.approx(1.5)
    slow = recorded(own_forwards=4, own_s=80.0, total_s=81.0)
    slow.idle["draft_ahead"] = IdleUse()
    learn(speculation, slow, plain_s=10.0, work_s=8.0)
    pace = 0.9 * 1.5 + 0.1 * 3.0
    assert speculation.pace == pytest.approx(pace) and slow.idle[
        "draft_ahead"
    ].brought_s == pytest.approx(2 * pace - 1.0)


def test_what_a_rollout_takes_besides_its_forwards_is_not_their_pace():
    """Four forwards of a second in place of the 16 that plain decoding makes, and 14 s of plans and
    set-up: that is a loss."""
    speculation = make(make_config())
    record = recorded(own_forwards=4, own_s=18.0, total_s=18.0)
    record.idle["draft_ahead"] = IdleUse()
    learn(speculation, record, plain_s=16.0, work_s=4.0, spent_s=4.0)
    assert speculation.pace == pytest.approx(1.0) and record.idle[
        "draft_ahead"
    ].brought_s == pytest.approx(16.0 - 18.0)


def test_whole_rollouts_without_drafts():
    """Where they are due, and drafts are on; rounds of tail batching are of different lengths and
    cannot be compared."""
    speculation = make(make_config())
    assert not speculation.is_plain
    speculation.account.num_since_check = speculation.config.speculative.check_every
    assert speculation.is_plain
    speculation.config.tail_batching.enabled = True
    assert not speculation.is_plain
    none = make(make_config("none"))
    none.account.num_since_check = 10**6
    assert not none.is_plain


def resumed(ahead: DraftAhead) -> list[SampleId]:
    """What rank 0 goes on with from the rollout before."""
    return [item.id for item in ahead._items.values() if item.pays and item.holder == 0]


def test_drafts_that_do_not_pay_any_more_are_left_to_idle_ranks():
    speculation = make(without_account(make_config()))
    sample = SampleId(PROMPTS[0].uid, 2, 0)
    learn(speculation, recorded(20))
    speculation.store.put(sample, Draft(np.arange(9, dtype=np.int32), False, 0, holder=0))
    speculation.outlook.learn(np.full(4, 3), np.array([10, 20, 30, 40]))
    batches = [groups_of(step) for step in (1, 2)]
    speculation.shared_cost = np.array([1e-2, 5e-4, 1e-3, 0.0, 0.0])
    ahead = speculation._plan(batches, 0, 64, set())
    offers = {offer.key: offer for offer in ahead.offers([])}
    assert (
        resumed(ahead) == [sample]
        and sample not in offers
        and any(offer.beside_rows for offer in offers.values())
    )
    assert all(offer.saves_s > 0 for offer in offers.values() if offer.beside_rows)
    speculation.seen = np.tile([[1e6, 0.0]], (len(POSITIONS) + 1, 1))
    ahead = speculation._plan(batches, 0, 64, set())
    offers = {offer.key: offer for offer in ahead.offers([])}
    assert (
        not resumed(ahead)
        and sample in offers
        and not any(offer.beside_rows for offer in offers.values())
    )


def test_a_step_of_which_no_group_is_known_yet_is_passed_over():
    """Drafts for the step after it save as much as if that were the next one; and where no step is
    known, nothing is drafted."""
    speculation = make(make_config())
    learn(speculation, recorded(20))
    speculation.outlook.learn(np.full(4, 3), np.array([10, 20, 30, 40]))
    speculation.shared_cost = np.array([1e-2, 5e-4, 1e-3, 0.0, 0.0])
    first, second = (
        speculation._plan(batches, 0, 64, set()).offers([])
        for batches in ([groups_of(2)], [[], groups_of(2)])
    )
    saved = [{offer.key: offer.saves_s for offer in offers} for offers in (first, second)]
    assert saved[0] == saved[1] and min(saved[0].values()) > 0 and max(saved[0].values()) < 1
    nothing = SimpleNamespace(
        upcoming=lambda step, depth, used: [[] for _ in range(depth)], deferred=[]
    )
    assert speculation.draft_ahead(0, nothing, [], 64) is None


def grown(step: int) -> Speculation:
    """After a few steps with drafts, some of them in this rank's engine, and with histories of some
    prompts."""
    speculation, rng = make(without_account(make_config())), np.random.default_rng(0)
    for s in range(3):
        tokens = [rng.integers(1, 50, int(rng.integers(1, 30))) for _ in range(6)]
        groups = groups_of(s, [replace(p, uid=p.uid + 1) if s % 2 else p for p in PROMPTS])
        speculation.learn_samples(s, samples_of(groups, tokens), rng.normal(size=6))
        by_age = {1: [100, 90 - s], 6: [100, 10]}
        for ahead in range(1, 4):
            for prompt in PROMPTS[:2]:
                tokens = rng.integers(1, 50, int(rng.integers(1, 25))).astype(np.int32)
                draft = Draft(tokens, bool(rng.integers(2)), s, 0 if ahead == 3 else -1)
                speculation.store.put(SampleId(prompt.uid, step + ahead, s % 2), draft)
        learn(speculation, recorded(25, acceptance=Acceptance(by_age=by_age)))
    return speculation


def plan(speculation: Speculation, step: int) -> tuple[int, list[Item]]:
    depth = speculation.lookahead(step)
    ahead = speculation._plan(SamePrompts().upcoming(step, depth), step, 24, set())
    return depth, list(ahead._items.values())


def test_a_restored_run_plans_as_the_saved_one():
    """What planning depends on comes back, through a file too; that an engine had a draft is
    forgotten."""
    saved = grown(10)
    assert len(resumed(saved._plan([groups_of(13)], 10, 24, set()))) > 0
    state = saved.state_dict()
    fresh = make(without_account(make_config()))
    assert plan(fresh, 10) != plan(saved, 10)
    fresh.load_state_dict(state)
    for draft in saved.store._drafts.values():
        draft.holder = -1
    depth, items = plan(saved, 10)
    assert depth == 5 and {item.pays for item in items} == {True, False}
    assert plan(fresh, 10) == (depth, items)
    assert fresh.tokens_per_step == saved.tokens_per_step
    assert (
        fresh.history.get(PROMPTS[0].uid)[0][0].tolist()
        == saved.history.get(PROMPTS[0].uid)[0][0].tolist()
    )
    assert all(
        np.array_equal(fresh.state_dict()[key], state[key])
        for key in state
        if key != "drafts.header"
    )


def test_a_run_that_has_measured_nothing_can_be_saved(tmp_path):
    state = make(make_config()).state_dict()
    np.savez(tmp_path / "state.npz", **state)
    again = make(make_config())
    with np.load(tmp_path / "state.npz") as arrays:
        again.load_state_dict(dict(arrays))
    assert plan(again, 0) == plan(make(make_config()), 0)


def test_a_profile_predicts_forwards_and_leaves_nothing_behind():
    """Forwards of other loads than the profiled ones, where time passes as in `forward_seconds`;
    and an engine as good as new."""
    model, clock = new_model(), Clock()
    engine = Engine(ModelRunner(model, 16, MAX_LENGTH, SEED))
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
    assert as_dict(engine.run(rows_of(0), PARAMS)) == plain(model, 0)[0]
    assert {(load.rows, load.tokens - load.rows) for load in loads} >= {
        (n, n * m) for n in (1, 4, 16) for m in (0, 3, 15)
    }
    for rows, window, length in ((2, 0, 20), (8, 0, 60), (8, 4, 30), (12, 8, 90)):
        load = Load(rows, rows * (1 + window), rows * (window > 0), rows * length, 0, rows * window)
        assert cost.seconds(*load[:4]) == pytest.approx(forward_seconds(load), rel=0.01)


def test_nothing_is_made_where_nothing_is_drafted_deferred_or_placed():
    config = make_config("none")
    config.rollout.placement = "in_turn"
    assert make_speculation(config, RANKS, None, PARAMS) is None
    config.rollout.placement = "balanced"
    assert not make_speculation(config, RANKS, None, PARAMS).has_drafts


@pytest.mark.parametrize("lookahead", [2, "auto"])
@pytest.mark.parametrize("method", ["bubble", "suffix", "bubble+suffix"])
def test_steps_of_a_run_are_exact(method, lookahead):
    """Five steps with changing weights: tokens of plain generation, drafts of no step beyond the
    last or behind the present."""
    model, config = new_model(), make_config(method, lookahead)
    config.run.max_steps, config.speculative.check_every = 5, 0
    engine = Engine(ModelRunner(model, 24, MAX_LENGTH, SEED))
    speculation = make(config, BoardWithSlowRank(30))
    store, sampler = speculation.store, make_sampler(speculation, engine)
    drafted = accepted = 0
    for step in range(5):
        if step % 2:
            update(model, step)
        depth, before = (
            speculation.lookahead(step),
            {row.id: store.get(row.id) for row in rows_of(step)},
        )
        record = sampler.sample(step)
        wanted, _ = plain(model, step)
        assert as_dict(sampler.rows) == wanted
        assert dict(
            zip(record.samples.ids, (t.tolist() for t in record.samples.tokens), strict=True)
        ) == {sample: tokens for sample, (tokens, _) in wanted.items()}
        assert record.drafts == {
            sample: draft for sample, draft in before.items() if draft is not None
        }
        made = [sample for sample, draft in store._drafts.items() if draft.version == step]
        assert all(step < sample.visit <= min(step + depth, 4) for sample in made)
        assert all(sample.visit > step for sample in store._drafts)
        rollout = record.rollouts[0]
        drafted += rollout.drafted_tokens
        accepted += rollout.acceptance.accepted_tokens
        num_tokens = int(record.samples.lengths.sum())
        shares = speculation.accepted_by_age
        metrics = speculation_metrics(
            RANKS, record, store_tokens=store.num_tokens, accepted_by_age=shares
        )
        assert json.dumps(metrics) and rollout.acceptance.gained_tokens == num_tokens
        assert (
            0 <= metrics["rollout/spec_coverage"] <= 1
            and metrics["rollout/forwards"] == rollout.own_forwards
        )
    assert (drafted > 100) == ("bubble" in method)
    assert accepted > 20 or method == "suffix"
    assert len(store) == 0


def test_an_abandoned_rollout_keeps_the_drafts_of_its_step():
    """Told to stop before it begins: no row is finished, and what was drafted for the step is there
    to be saved."""
    ranks = Ranks(torch.device("cpu"))
    model = new_model()
    engine = Engine(ModelRunner(model, 16, MAX_LENGTH, SEED))
    speculation = make(make_config(), ProgressBoard(ranks, timeout_s=100, interval_s=0), ranks)
    sampler, sample = make_sampler(speculation, engine), SampleId(PROMPTS[0].uid, 4, 0)
    speculation.store.put(sample, Draft(np.arange(5, dtype=np.int32), False, 3))
    ranks.must_stop = True
    with pytest.raises(StopRequested):
        sampler.sample(4)
    assert all(row.finish is None for row in sampler.rows)
    assert speculation.store.get(sample) is not None
    ranks.must_stop = False
    sampler.sample(4)
    assert as_dict(sampler.rows) == plain(model, 4)[0]
    assert speculation.store.get(sample) is None
