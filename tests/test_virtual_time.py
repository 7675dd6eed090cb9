"""The simulator's virtual time against hand calculations, and its engine against the real one."""

import numpy as np
import pytest

from bubblespec.draft.proposer import make_proposer
from bubblespec.draft.store import TextStore
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.runner import ModelRunner
from bubblespec.planner.costs import CostModel
from bubblespec.rollout.board import LINGER_S, ProgressSync, RankState
from bubblespec.tools.simulate import world as world_module
from bubblespec.tools.simulate.runner import SimulatedRunner
from bubblespec.tools.simulate.world import SimulatedRanks, SimulatedTicks, World
from bubblespec.types import Draft, Load, Row, SampleId
from tests.helpers.clocks import Clock
from tests.helpers.rows import numbered
from tests.helpers.simulated import LinearCost, run_to_end


def test_meeting_ends_for_all_when_last_arrives():
    world, ends = World(3, meeting_s=0.5), {}

    def work(rank: int) -> None:
        ranks = SimulatedRanks(world, rank)
        ranks.clock.sleep([3.0, 1.0, 7.0][rank])
        gathered = ranks.all_gather(np.array([10 * rank])).ravel().tolist()
        ends[rank] = world.now[rank], gathered, list(map(len, ranks.gather_ragged(np.zeros(rank))))
        ranks.barrier_or_stop()

    world.run(work)
    assert ends == {rank: (7.5, [0, 10, 20], [0, 1, 2]) for rank in range(3)}
    assert world.now == [8.5] * 3


def test_shared_forward_begins_when_last_rank_arrives():
    """A forward takes as many seconds as it has positions, and the exchange before it none."""
    world, ends = World(3, meeting_s=9.0), {}

    def work(rank: int) -> None:
        ranks = SimulatedRanks(world, rank, meeting_s=0.0)
        costs = {"cost": LinearCost(), "together": LinearCost(0.0, 0.0, 0.0, 1.0)}
        options = {"max_num_batched_tokens": 64, "text": lambda row: np.arange(4)}
        runner = SimulatedRunner(ranks, 2, 32, **options, **costs)
        engine = Engine(runner)
        engine.add([Row(SampleId(0, 0, 0), (1, 2), 4)])
        ranks.clock.sleep([3.0, 1.0, 7.0][rank])
        ranks.all_gather(np.zeros(1))
        ends[rank] = [world.now[rank]]
        while not engine.is_idle:
            engine.step(SamplingParams())
            ends[rank].append(world.now[rank])
            ranks.clock.sleep([0.5, 0.0, 0.25][rank])

    world.run(work)
    # The prompt takes 2 s, then a position more each time; rank 0 is late by half a second.
    assert ends == {rank: [7.0, 9.0, 12.5, 17.0, 22.5] for rank in range(3)}


@pytest.fixture
def set_tick_s(monkeypatch):
    monkeypatch.setattr(world_module, "POST_S", 0.0)
    return lambda seconds: monkeypatch.setattr(world_module, "TICK_S", seconds)


def test_tick_completes_after_last_post_and_wakes_waiters(set_tick_s):
    """Rank 1 is done and waits; rank 0 posts at 2 s, and is done at its second tick."""
    set_tick_s(0.25)
    world, seen = World(2), {}

    def state(is_done: bool) -> RankState:
        return RankState(int(not is_done))

    def work(rank: int) -> None:
        ranks = SimulatedRanks(world, rank)
        board = ProgressSync(ranks, 100.0, SimulatedTicks(ranks))
        if rank == 1:
            first = board.wait(lambda: state(True))
            seen["first"] = (world.now[1], [s.is_done for s in first])
            board.wait(lambda: state(True))
            seen["over"] = (world.now[1], board.is_over)
            return
        ranks.clock.sleep(2.0)
        assert board.poll(lambda: state(False)) is None
        ranks.clock.sleep(1.0)
        assert board.poll(lambda: state(False)) is not None  # complete since 2.25
        ranks.clock.sleep(1.0)
        begin = world.now[0]
        states = board.poll(lambda: state(True), is_done=True)  # lingers for a moment
        seen["lingered"] = (states is None, round(world.now[0] - begin, 6))
        board.wait(lambda: state(True))

    world.run(work)
    over = (4.25, True)
    assert seen == {"first": (2.25, [False, True]), "lingered": (True, LINGER_S), "over": over}


def test_tick_completes_at_the_last_post_in_virtual_time(set_tick_s):
    """A thread that runs ahead and posts does not complete the tick for ranks behind it in time."""
    set_tick_s(0.0)
    world, complete = World(2), []

    def work(rank: int) -> None:
        ticks = SimulatedTicks(SimulatedRanks(world, rank))
        if rank == 0:
            world.advance(0, 5.0)
            ticks.post(np.zeros(1), "")
        else:
            ticks.post(np.zeros(1), "")
            for _ in range(7):
                world.advance(1, 1.0)
                complete.append(ticks.is_complete())

    world.run(work)
    assert complete == [False] * 4 + [True] * 3


def test_error_or_deadlock_ends_all_ranks():
    world = World(3)

    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("rank 1")
        SimulatedRanks(world, rank).barrier_or_stop()

    with pytest.raises(ValueError, match="rank 1"):
        world.run(work)
    other = World(2)
    with pytest.raises(RuntimeError, match="wait for each other"):
        other.run(lambda rank: SimulatedRanks(other, rank).barrier_or_stop() if rank == 0 else None)


def rows_to_generate() -> list[Row]:
    prompts = [
        tuple((7 * prompt_id + 3 * i) % 90 + 1 for i in range(5 + 6 * prompt_id))
        for prompt_id in range(5)
    ]
    return [
        Row(SampleId(prompt_id, 3, sample), prompt, 12 + 9 * prompt_id)
        for prompt_id, prompt in enumerate(prompts)
        for sample in range(3)
    ]


@pytest.mark.parametrize(
    ("slots", "budget", "has_drafts"),
    [(6, 16, False), (15, 2048, False), (4, 9, True), (15, 64, True)],
)
def test_simulated_forwards_equal_real_forwards(make_model, slots, budget, has_drafts):
    model = make_model(max_length=128)
    params = SamplingParams(0.8, stop_token_ids=tuple(range(6)))  # stops come soon enough

    drafts = {}
    if has_drafts:  # what the model says, with every fifth token replaced
        for row in Engine(ModelRunner(model, 15, 128, seed=5)).run(rows_to_generate(), params):
            tokens = row.tokens.copy()
            tokens[4::5] = (tokens[4::5] + 1) % 90 + 6
            drafts[row.id] = Draft(tokens, True, 2)

    def loads_of(runner, rows: list[Row]) -> tuple[list[Load], dict]:
        if not has_drafts:
            return run_to_end(Engine(runner), rows, params), {}
        history, sources = TextStore(0), ["bubble", "suffix"]
        proposer = make_proposer(sources, history, CostModel(), has_drafts=True, clock=Clock())
        proposer.begin()
        for row in numbered(rows).values():
            row.draft = drafts[row.id]
            proposer.track(row, 3)
        loads = run_to_end(Engine(runner), rows, params, proposer)
        counts = vars(proposer.acceptance) | {"looked_up_rows": proposer.take_spent()[1]}
        return loads, counts | {"accepted_lengths": counts["accepted_lengths"].tolist()}

    real, known, cost = rows_to_generate(), rows_to_generate(), LinearCost()
    wanted = loads_of(ModelRunner(model, slots, 128, seed=5, max_num_batched_tokens=budget), real)
    texts = {row.id: row.tokens for row in real}
    sizes = (SimulatedRanks(World(1), 0), slots, 128)
    options = {"max_num_batched_tokens": budget, "cost": cost}
    runner = SimulatedRunner(*sizes, text=lambda row: texts[row.id], **options)
    assert loads_of(runner, known) == wanted
    assert cost.loads == wanted[0]
    if has_drafts:
        assert wanted[1]["accepted_tokens"] > 50  # or nothing was compared
    for row, other in zip(real, known, strict=True):
        np.testing.assert_array_equal(row.tokens, other.tokens)
        assert row.finish == other.finish
