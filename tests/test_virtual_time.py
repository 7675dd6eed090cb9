"""The simulator's virtual time against hand calculations, and its engine against the real one."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bubblespec.dist.ranks import Ranks
from bubblespec.draft.proposer import make_proposer
from bubblespec.draft.suffix import History
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.planner.costs import CostModel
from bubblespec.records import Load
from bubblespec.rollout.board import LINGER_S, ProgressBoard, RankState
from bubblespec.simulate.drafting import STOP
from bubblespec.simulate.runner import ProposalTime, SimulatedGenerator, SimulatedRunner
from bubblespec.simulate.world import SimulatedRanks, SimulatedTicks, World
from bubblespec.types import Draft, Row, SampleId
from tests.helpers.rows import make_rows
from tests.helpers.simulated import LinearCost, make_workload, run_to_end


def test_a_meeting_ends_for_all_when_the_last_has_come():
    world, ends = World(3, meeting_s=0.5), {}

    def work(rank: int) -> None:
        ranks = SimulatedRanks(world, rank)
        ranks.clock.sleep([3.0, 1.0, 7.0][rank])
        gathered = ranks.gather(np.array([10 * rank]))
        ends[rank] = (
            world.now[rank],
            gathered.ravel().tolist(),
            [len(a) for a in ranks.gather_ragged(np.zeros(rank))],
        )
        ranks.meet()

    world.run(work)
    assert ends == {rank: (7.5, [0, 10, 20], [0, 1, 2]) for rank in range(3)}
    assert world.now == [8.5] * 3


def test_a_tick_is_complete_after_the_last_post_and_wakes_who_waits():
    """Rank 1 is done and waits; rank 0 posts at 2 s, and is done at its second tick."""
    world, seen = World(2, tick_s=0.25, post_s=0.0), {}

    def state(is_done: bool) -> RankState:
        return RankState(int(not is_done))

    def work(rank: int) -> None:
        ranks = SimulatedRanks(world, rank)
        board = ProgressBoard(ranks, 100.0, SimulatedTicks(ranks))
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
        states = board.poll(lambda: state(True))  # done: it lingers for a moment
        seen["lingered"] = (states is None, round(world.now[0] - begin, 6))
        board.wait(lambda: state(True))

    world.run(work)
    assert seen["first"] == (2.25, [False, True])
    assert seen["lingered"] == (True, LINGER_S)
    assert seen["over"] == (4.25, True)


def test_the_earliest_rank_goes_first_whatever_threads_do():
    """A rank sees a tick as complete from the time on that it is, though the other thread has run
    ahead to post it."""
    world, complete = World(2, tick_s=0.0, post_s=0.0), []

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


def test_an_error_in_one_rank_ends_all():
    world = World(3)

    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("rank 1")
        SimulatedRanks(world, rank).meet()

    with pytest.raises(ValueError, match="rank 1"):
        world.run(work)
    other = World(2)
    with pytest.raises(RuntimeError, match="wait for each other"):
        other.run(lambda rank: SimulatedRanks(other, rank).meet() if rank == 0 else None)


def test_ranks_that_share_cores_are_slower():
    """Three forwards on two cores, begun at 0: the third finds both cores busy. One begun when all
    are over does not."""
    world, ends = World(3, cores=2), {}

    def work(rank: int) -> None:
        world.compute(rank, 1.0)
        ends[rank] = world.now[rank]
        world.wait(rank, 10.0 + rank * 10)
        world.compute(rank, 1.0)

    world.run(work)
    assert ends == {0: 1.0, 1: 1.0, 2: 1.5}
    assert world.now == [11.0, 21.0, 31.0]


def test_a_run_without_the_simulator_reads_the_real_clock():
    """The seam's default: ranks tell the time by the `time` module."""
    assert Ranks(torch.device("cpu")).clock is time
    assert make_proposer("suffix", History(0), CostModel(), has_drafts=False).clock is time


# The engine


def rows_to_generate() -> list[Row]:
    prompts = {
        uid: tuple((7 * uid + 3 * i) % 90 + 1 for i in range(5 + 6 * uid)) for uid in range(5)
    }
    return [
        Row(SampleId(uid, 3, sample), prompt, 12 + 9 * uid)
        for uid, prompt in prompts.items()
        for sample in range(3)
    ]


@pytest.mark.parametrize(
    ("slots", "budget", "window"), [(6, 16, None), (15, 2048, None), (4, 9, 3), (15, 64, 5)]
)
def test_forwards_are_those_of_the_real_engine(make_model, slots, budget, window):
    """The real engine generates; the simulated one is told the texts, and makes the same forwards:
    rows, tokens, positions, prompts and drafts of each, with shared prefills, chunks, a queue, and
    windows of suffix matches."""
    model = make_model()
    prepare_model(model, 128)
    params = SamplingParams(0.8, stop_token_ids=tuple(range(6)))  # stops come soon enough

    drafts = {}
    if window is not None:  # what the model says, with every fifth token replaced
        for row in Engine(ModelRunner(model, 15, 128, seed=5)).run(rows_to_generate(), params):
            tokens = row.tokens.copy()
            tokens[4::5] = (tokens[4::5] + 1) % 90 + 6
            drafts[row.id] = Draft(tokens, True, 2)

    def loads_of(engine: Engine, rows: list[Row]) -> tuple[list[Load], dict]:
        if window is None:
            return run_to_end(engine, rows, params), {}
        proposer = make_proposer(
            "bubble+suffix", History(0), CostModel(), has_drafts=True, fixed_window=window
        )
        proposer.begin()
        for row in rows:
            proposer.track(row, drafts[row.id], 3)
        loads, counts = run_to_end(engine, rows, params, proposer), vars(proposer.acceptance)
        arrays = {name: counts[name].tolist() for name in ("accepted_lengths", "before_divergence")}
        return loads, counts | arrays | {"looked_up_rows": proposer.take_spent()[1]}

    real = rows_to_generate()
    wanted = loads_of(Engine(ModelRunner(model, slots, 128, seed=5, max_batch_tokens=budget)), real)
    texts = {row.id: row.tokens for row in real}
    known, cost = rows_to_generate(), LinearCost()
    world, text = World(1, cores=1), lambda row, so_far: texts[row.id]
    runner = SimulatedRunner(world, 0, slots, 128, max_batch_tokens=budget, cost=cost, text=text)
    assert loads_of(SimulatedGenerator(runner), known) == wanted
    assert cost.loads == wanted[0]
    if window is not None:
        assert wanted[1]["accepted_tokens"] > 50  # or nothing was compared
    for row, other in zip(real, known, strict=True):
        np.testing.assert_array_equal(row.tokens, other.tokens)
        assert row.finish == other.finish


@pytest.mark.parametrize("slots", [3, 16])
def test_skipped_forwards_are_the_same_forwards(slots):
    def run_all(cores: int | None):
        cost, workload = LinearCost(), make_workload()
        world = World(1, cores)
        text = lambda row, _: workload.response(workload.step_of(row.id), row.id.uid, row.id.sample)  # noqa: E731
        engine = SimulatedGenerator(
            SimulatedRunner(world, 0, slots, 340, max_batch_tokens=64, cost=cost, text=text)
        )
        rows = engine.run(
            make_rows(workload.launch(1).groups, 4, 300), SamplingParams(stop_token_ids=(STOP,))
        )
        return cost.loads, world.now, engine.num_forwards, [row.tokens.tolist() for row in rows]

    skipping, one_by_one = run_all(None), run_all(1)
    assert skipping == one_by_one


def test_looking_for_proposals_takes_virtual_time():
    """For the rows that are tracked and have room: the others are not looked at."""
    world = World(1)
    clock = SimulatedRanks(world, 0).clock
    proposer = make_proposer(
        "suffix", History(0), CostModel(), has_drafts=False, fixed_window=4, clock=clock
    )
    proposer.sources.insert(
        0, ProposalTime(SimpleNamespace(propose_seconds=lambda n: 0.5 + 0.25 * n), clock)
    )
    proposer.begin()
    rows = [Row(SampleId(1, 0, sample), (1, 2), 50) for sample in range(5)]
    for row in rows[:4]:
        proposer.track(row, None, 0)
    proposer.propose(rows, np.zeros(5, np.int64), np.array([40, 40, 40, 0, 40]), 100)
    assert world.now == [1.25]
    assert proposer.take_spent() == (1.25, 5)
