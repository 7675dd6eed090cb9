"""The rollout loop with drafting ahead: own rows against generation without drafts, drafts against
what their own step generates.

`Engine.run` in a fresh engine without a proposer is the oracle throughout. The other rank is played
by `BoardWithSlowRank`, so that idle time is as long as a test wants it; at the end two ranks run
against each other in virtual time. No test depends on how long anything takes.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from bubblespec.engine.engine import Engine
from bubblespec.engine.runner import ModelRunner
from bubblespec.rollout.board import ProgressSync, RankState
from bubblespec.rollout.drafting import DraftAhead
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.rollout.table import RolloutProgress
from bubblespec.tools.simulate.world import SimulatedRanks, SimulatedTicks
from bubblespec.tools.simulate.world import World as VirtualTime
from bubblespec.types import Row, StepBatch
from tests.helpers.rollouts import (
    FOUR_PROMPTS,
    LIMIT,
    MAX_LENGTH,
    PARAMS,
    PROMPTS,
    SEED,
    BoardWithSlowRank,
    World,
    as_dict,
    groups_of,
    made_up,
    new_model,
    one_rank,
    pass_time,
    plain,
    rows_of,
    tried_ages,
    update,
)
from tests.helpers.rows import loop_of, loop_over


@pytest.mark.parametrize("num_slots", [2, 24])
@pytest.mark.parametrize("drafting", ["none", "co-scheduled", "idle", "both"])
def test_own_rows_equal_plain_generation(drafting, num_slots):
    """Whatever is drafted alongside, from drafts right, wrong, cut, long and empty, under weights
    that change in each step."""
    model = new_model()
    is_idle = drafting in ("idle", "both")
    board = BoardWithSlowRank(120 if num_slots == 2 else 45) if is_idle else one_rank()
    world = World(model, num_slots, board)
    accepted = drafted = 0
    for step in range(2):
        update(model, step)
        wanted, _ = plain(model, step)
        drafts = made_up(wanted, step)
        if step:  # every other row goes by what was drafted under the weights before
            drafts = {key: draft for key, draft in drafts.items() if key.sample}
        rows = rows_of(step)
        plans = None if drafting == "none" else world.plans((step + 1, step + 2))
        max_slowdown = 0.0 if drafting == "idle" else 1.0
        record, _ = world.rollout(step, rows, plans, drafts, max_slowdown=max_slowdown)
        assert as_dict(rows) == wanted
        accepted += record.acceptance.accepted_tokens
        drafted += record.drafted_tokens
    assert accepted > 12
    assert (drafted > 10) == (drafting != "none")


def test_drafts_equal_later_step():
    """Under the same weights: all tokens are accepted, in far fewer forwards."""
    model = new_model()
    world = World(model, 24, BoardWithSlowRank(90), method="bubble")
    world.rollout(0, rows_of(0), world.plans((1,)))
    wanted, num_forwards = plain(model, 1)
    assert len({len(tokens) for tokens, _ in wanted.values()}) > 2
    for key, (tokens, _) in wanted.items():
        assert world.store.get(key).tokens.tolist() == tokens and world.store.get(key).is_finished
    rows = rows_of(1)
    record, _ = world.rollout(1, rows, None)
    assert as_dict(rows) == wanted
    counts = record.acceptance
    assert counts.draft_tokens == counts.accepted_tokens > 0.8 * counts.gained_tokens
    assert set(counts.by_source) == {"aligned"} and tried_ages(world.proposer) == {1}
    assert record.own_forwards < 0.3 * num_forwards


def test_drafts_continue_in_later_rollouts():
    """Each token is made once, and is that of generation without interruption."""
    model = new_model()
    world = World(model, 8, one_rank())
    wanted, _ = plain(model, 9, limit=60)
    total, finished_in = 0, []
    for step in range(8):
        rows, plans = rows_of(step, PROMPTS[:1], limit=12), world.plans((9,))
        record, made = world.rollout(step, rows, plans, limit=60, max_slowdown=100.0)
        assert as_dict(rows) == plain(model, step, PROMPTS[:1], limit=12)[0]
        total += record.drafted_tokens
        for key, draft in made.items():
            tokens, _ = wanted[key]
            assert draft.tokens.tolist() == tokens[: len(draft.tokens)] and draft.version == step
            assert draft.is_finished == (len(draft.tokens) == len(tokens))
            if draft.is_finished:
                finished_in.append(step)
    assert {key: world.store.get(key).tokens.tolist() for key in wanted} == {
        key: tokens for key, (tokens, _) in wanted.items()
    }
    assert total == sum(len(tokens) for tokens, _ in wanted.values())
    assert len(set(finished_in)) > 1 and max(finished_in) > 3, "several rollouts had their part"


def test_rank_without_rows_only_drafts():
    model = new_model()
    world = World(model, 4, BoardWithSlowRank(200))
    record, made = world.rollout(0, [], world.plans((1,)))
    wanted, _ = plain(model, 1)
    assert {key: draft.tokens.tolist() for key, draft in made.items()} == {
        key: tokens for key, (tokens, _) in wanted.items()
    }
    assert record.own_forwards == record.own_s == 0
    assert record.drafted_tokens == sum(len(tokens) for tokens, _ in wanted.values())


@pytest.mark.parametrize("max_slowdown", [0.0, 1.0])
def test_no_forward_begins_after_all_ranks_are_done(max_slowdown):
    """A rank whose rows end after those of all others leaves at once, and drafts nothing that all
    would wait for."""
    model = new_model()
    for lag in range(5):
        world = World(model, 24, BoardWithSlowRank(1, lag))
        plans = world.plans((1, 2))
        record, _ = world.rollout(0, rows_of(0, limit=6), plans, max_slowdown=max_slowdown)
        assert len(record.forwards) == record.own_forwards
        assert (record.drafted_tokens > 0) == (max_slowdown > 0)


# Rows to choose from, and being told to stop


def test_drafts_are_assigned_by_who_has_rows_left():
    loop, given = RolloutLoop.__new__(RolloutLoop), []
    loop.table, loop.works, loop._ends = (
        SimpleNamespace(sync=lambda states: None),
        [],
        np.array([1]),
    )
    loop.plan, loop.board, loop.selects = SimpleNamespace(take_over=None), SimpleNamespace(), False
    loop.idle_drafts = SimpleNamespace(assign=lambda *arguments: given.append(arguments))
    facts = [np.array([room, 0.0]) for room in (2.0, 5.0)]
    loop._act_on([RankState(3, False, facts[0]), RankState(0, False, facts[1])])
    assert given == [([2, 5], [True, False])]


class Selecting:
    def __init__(self, launch: StepBatch, num_slots: int = 24, stop_after: int | None = None):
        model, board = new_model(), one_rank()
        self.engine = Engine(ModelRunner(model, num_slots, MAX_LENGTH, SEED))
        self.table = RolloutProgress(launch, np.zeros(len(launch.ids), np.int64), 0)
        self.rows = self.table.make_rows(LIMIT)
        self.handed_on: list[Row] = []
        parts = (self.engine, board.ranks, PARAMS, self.rows, self.table)
        self.loop = loop_over(*parts, board=board, on_finished=self._hand_on)
        self.wanted = plain(model, 0, FOUR_PROMPTS, launch.num_generations)[0]
        move = self.engine.runner.move

        def move_wanted(source: int, target: int, length: int) -> None:
            index, cutoff = launch.ids.index(self.engine.rows[target].id), self.loop._cutoff
            assert cutoff is None or not cutoff.is_out[index], "dropped next"
            move(source, target, length)

        self.engine.runner.move = move_wanted
        if stop_after is not None:
            step_engine = self.engine.step

            def step(*arguments):
                board.ranks.must_stop = self.engine.num_forwards >= stop_after
                return step_engine(*arguments)

            self.engine.step = step
        self.record = self.loop.run()

    def _hand_on(self, row: Row) -> None:
        index = self.table.launch.ids.index(row.id)
        assert self.table.cutoff().is_in[index] or not self.table.launch.selects, "certain"
        assert row.finish is not None
        self.handed_on.append(row)


@pytest.mark.parametrize("num_slots", [3, 24])
@pytest.mark.parametrize("trained", [4, 2])
def test_rows_are_submitted_once_and_only_when_certain(num_slots, trained):
    played = Selecting(StepBatch(groups_of(0, FOUR_PROMPTS), trained, 3), num_slots)
    chosen = played.table.trained().tolist()
    assert len(chosen) == trained * 3
    ids = [played.table.launch.ids[index] for index in chosen]
    assert sorted(row.id for row in played.handed_on) == sorted(ids)
    for row in played.rows.values():
        tokens, finish = played.wanted[row.id]
        assert row.tokens.tolist() == tokens[: len(row.tokens)]
        assert (row.tokens.tolist(), row.finish) == (tokens, finish) or row.id not in ids
    generated = sum(len(row.tokens) for row in played.rows.values())
    whole = sum(len(tokens) for tokens, _ in played.wanted.values())
    assert (generated < whole) == played.table.launch.selects, "rows that are out are dropped"
    assert played.engine.is_idle and (played.record.num_ticks > 0) == played.table.launch.selects


@pytest.mark.parametrize("trained", [4, 2], ids=["without ticks", "with ticks"])
def test_stop_request_leaves_rows_unfinished(trained):
    played = Selecting(StepBatch(groups_of(0, FOUR_PROMPTS), trained, 2), stop_after=5)
    assert any(row.finish is None for row in played.rows.values())
    assert played.engine.num_forwards <= 7
    for row in played.rows.values():
        assert row.tokens.tolist() == played.wanted[row.id][0][: len(row.tokens)]


# Two ranks


def play_two_ranks(num_rollouts: int) -> list[list[dict]]:
    """Rank 0 has one of four prompts and rank 1 three; both draft two steps ahead by one plan. Only
    forwards and ticks take time."""
    time, results = VirtualTime(2), [[], []]

    def work(rank: int) -> None:
        ranks = SimulatedRanks(time, rank)
        board = ProgressSync(ranks, 120, SimulatedTicks(ranks), interval_s=0)
        world = World(new_model(), 10, board)
        pass_time(world.engine, ranks)
        for step in range(num_rollouts):
            results[rank].append(play_step(world, step, ranks))

    time.run(work)
    return results


def play_step(world: World, step: int, ranks: SimulatedRanks) -> dict:
    rows = rows_of(step, FOUR_PROMPTS[:1] if ranks.rank == 0 else FOUR_PROMPTS[1:])
    world.proposer.begin()
    for row in rows:
        row.draft = world.store.get(row.id)
        world.proposer.track(row, step)
    # The less urgent half waits for the end of a rank's rows.
    plans = world.plans((step + 1, step + 2), FOUR_PROMPTS)
    half = len(plans) // 2
    plans = [plan._replace(co_scheduled=number < half) for number, plan in enumerate(plans)]
    parts = (plans, world.store, world.proposer, world.proposer.cost)
    ahead = DraftAhead(*parts, version=step, max_new_tokens=LIMIT)
    options = {"proposer": world.proposer, "board": world.board, "idle_drafts": ahead}
    record = loop_of(world.engine, ranks, PARAMS, rows, **options).run()
    for group in groups_of(step, FOUR_PROMPTS):
        world.store.drop(map(group.sample, range(2)))
    ahead.finish(ranks)
    drafts = {plan.key: world.store.get(plan.key) for plan in plans}
    return {
        "rows": as_dict(rows),
        "made": {name: draft.tokens.tolist() for name, draft in ahead.drafts.items()},
        "store": {name: draft.tokens.tolist() for name, draft in drafts.items() if draft},
        "ticks": record.num_ticks,
    }


def test_two_ranks_share_the_work():
    everyone, model, wanted = play_two_ranks(2), new_model(), {}
    for step in range(4):
        wanted |= plain(model, step, FOUR_PROMPTS)[0]
    for first, second in zip(*everyone, strict=True):
        assert first["store"] == second["store"] and first["ticks"] == second["ticks"]
        assert not first["made"].keys() & second["made"].keys(), "no draft is made twice"
        for result in (first, second):
            assert result["rows"] == {name: wanted[name] for name in result["rows"]}
            for name, tokens in result["made"].items():
                assert tokens == wanted[name][0][: len(tokens)]
    assert min(sum(len(result["made"]) for result in results) for results in everyone) > 2
    assert play_two_ranks(2) == everyone, "a function of the inputs alone"
