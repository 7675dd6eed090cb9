"""The simulator: virtual time against hand calculations, its engine against the real one, its texts against what they
promise, and the command line."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from difflib import SequenceMatcher
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
import torch
from conftest import make_rows

from benchmarks import replay_map
from bubblespec.config import config_of_sections, flatten
from bubblespec.engine.chains import LONGEST
from bubblespec.engine.generator import Generator
from bubblespec.engine.model import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.ranks.collectives import Ranks
from bubblespec.ranks.progress import LINGER_S, RankState
from bubblespec.records import Load
from bubblespec.rollout.placement import place_in_turn
from bubblespec.samples import Draft, Row, SampleId
from bubblespec.simulate import __main__
from bubblespec.simulate.__main__ import BLANK, nested
from bubblespec.simulate.analytic import GPUS, MODELS, analytic_cost
from bubblespec.simulate.cost import RATES, ForwardCost
from bubblespec.simulate.drafter import DrafterModel, SimulatedChains
from bubblespec.simulate.drafting import STOP, VOCABULARY, DraftModel
from bubblespec.simulate.recorded import RecordedWorkload
from bubblespec.simulate.run import simulate
from bubblespec.simulate.runner import ProposalTime, SimulatedGenerator, SimulatedRunner
from bubblespec.simulate.workload import Synthetic, Workload
from bubblespec.simulate.world import SimulatedBoard, SimulatedRanks, World
from bubblespec.speculate.learned import LearnedDrafts
from bubblespec.speculate.proposer import Proposer, make_proposer
from bubblespec.speculate.suffix import GroupIndex, History
from bubblespec.speculate.windows import CostModel
from bubblespec.telemetry.timeline import KINDS
from bubblespec.telemetry.trace import FOLDER, FORMAT, _write_table, list_steps, read_meta, read_table
from tests.warm import ROOT, python


class LinearCost:
    """Seconds of a forward, and every load that it was asked for."""

    propose_s = 0.0

    def __init__(self, forward_s=10e-3, row_s=0.0, token_s=20e-6, position_s=10e-9):
        self.prices, self.loads = (forward_s, row_s, token_s, position_s), []

    def seconds(self, load: Load) -> float:
        self.loads.append(load)
        forward_s, row_s, token_s, position_s = self.prices
        return forward_s + row_s * load.rows + token_s * load.tokens + position_s * load.positions

    def propose_seconds(self, num_rows: int) -> float:
        return self.propose_s * num_rows


def make_config(method: str = "bubble+suffix", prompts: int = 4, generations: int = 4, longest: int = 300, **others):
    rollout = {"num_prompts_per_step": prompts, "num_generations": generations, "max_completion_length": longest}
    sections = nested(BLANK) | {"rollout": rollout, "speculative": {"method": method}}
    return config_of_sections(sections, [f"{key.replace('__', '.')}={value}" for key, value in others.items()], "the test")


def make_workload(prompts: int = 4, generations: int = 4, **spec) -> Workload:
    return Workload(Synthetic(**({"mean": 60.0, "max": 300, "prompt": 16, "steps": 4} | spec)), prompts, generations)


def run(method: str, num_ranks: int = 2, cores: int | None = None, cost=None, config: dict | None = None, **spec):
    return simulate(make_config(method, **(config or {})), make_workload(**spec), cost or LinearCost(), num_ranks, cores=cores)


def figures(steps) -> list[dict]:
    return [vars(step) | {"lanes": [lane.tolist() for lane in step.lanes]} for step in steps]


# Virtual time


def test_a_meeting_ends_for_all_when_the_last_has_come():
    world, ends = World(3, meeting_s=0.5), {}

    def work(rank: int) -> None:
        ranks = SimulatedRanks(world, rank)
        ranks.clock.sleep([3.0, 1.0, 7.0][rank])
        gathered = ranks.gather(np.array([10 * rank]))
        ends[rank] = (world.now[rank], gathered.ravel().tolist(), [len(a) for a in ranks.gather_ragged(np.zeros(rank))])
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
        board = SimulatedBoard(ranks, 100.0)
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
    """A rank sees a tick as complete from the time on that it is, though the other thread has run ahead to post it."""
    world, complete = World(2, tick_s=0.0, post_s=0.0), []

    def work(rank: int) -> None:
        board = SimulatedBoard(SimulatedRanks(world, rank), 100.0)
        if rank == 0:
            world.advance(0, 5.0)
            world.post(0, 0, [0.0])
        else:
            world.post(1, 0, [0.0])
            for _ in range(7):
                world.advance(1, 1.0)
                complete.append(board._is_complete())

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
    """Three forwards on two cores, begun at 0: the third finds both cores busy. One begun when all are over does not."""
    world, ends = World(3, cores=2), {}

    def work(rank: int) -> None:
        world.compute(rank, 1.0)
        ends[rank] = world.now[rank]
        world.wait(rank, 10.0 + rank * 10)
        world.compute(rank, 1.0)

    world.run(work)
    assert ends == {0: 1.0, 1: 1.0, 2: 1.5}
    assert world.now == [11.0, 21.0, 31.0]


# The engine


def run_to_end(engine: Generator, rows: list[Row], *arguments) -> list[Load]:
    """The load of each forward."""
    loads = []
    engine.add(rows)
    while not engine.is_idle:
        loads.append(engine.step(*arguments)[1])
    return loads


def rows_to_generate() -> list[Row]:
    prompts = {uid: tuple((7 * uid + 3 * i) % 90 + 1 for i in range(5 + 6 * uid)) for uid in range(5)}
    return [Row(SampleId(uid, 3, sample), prompt, 12 + 9 * uid) for uid, prompt in prompts.items() for sample in range(3)]


@pytest.mark.parametrize(("slots", "budget", "window"), [(6, 16, None), (15, 2048, None), (4, 9, 3), (15, 64, 5)])
def test_forwards_are_those_of_the_real_engine(make_model, slots, budget, window):
    """The real engine generates; the simulated one is told the texts, and makes the same forwards: rows, tokens, positions,
    prompts and drafts of each, with shared prefills, chunks, a queue, and windows of suffix matches."""
    model = make_model()
    prepare_model(model, 128)
    params = SamplingParams(0.8, stop_token_ids=tuple(range(6)))  # stops come soon enough

    drafts = {}
    if window is not None:  # what the model says, with every fifth token replaced
        for row in Generator(ModelRunner(model, 15, 128, seed=5)).run(rows_to_generate(), params):
            tokens = row.tokens.copy()
            tokens[4::5] = (tokens[4::5] + 1) % 90 + 6
            drafts[row.id] = Draft(tokens, True, 2)

    def loads_of(engine: Generator, rows: list[Row]) -> tuple[list[Load], dict]:
        if window is None:
            return run_to_end(engine, rows, params), {}
        proposer = make_proposer("bubble+suffix", History(0), CostModel(), has_drafts=True, fixed_window=window)
        proposer.begin()
        for row in rows:
            proposer.track(row, drafts[row.id], 3)
        loads, counts = run_to_end(engine, rows, params, proposer), vars(proposer.acceptance)
        arrays = {name: counts[name].tolist() for name in ("accepted_lengths", "before_divergence")}
        return loads, counts | arrays | {"looked_up_rows": proposer.take_spent()[1]}

    real = rows_to_generate()
    wanted = loads_of(Generator(ModelRunner(model, slots, 128, seed=5, max_batch_tokens=budget)), real)
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
        engine = SimulatedGenerator(SimulatedRunner(world, 0, slots, 340, max_batch_tokens=64, cost=cost, text=text))
        rows = engine.run(make_rows(workload.launch(1).groups, 4, 300), SamplingParams(stop_token_ids=(STOP,)))
        return cost.loads, world.now, engine.num_forwards, [row.tokens.tolist() for row in rows]

    skipping, one_by_one = run_all(None), run_all(1)
    assert skipping == one_by_one


def test_looking_for_proposals_takes_virtual_time():
    """For the rows that are tracked and have room: the others are not looked at."""
    world = World(1)
    clock = SimulatedRanks(world, 0).clock
    proposer = make_proposer("suffix", History(0), CostModel(), has_drafts=False, fixed_window=4, clock=clock)
    proposer.sources.insert(0, ProposalTime(SimpleNamespace(propose_seconds=lambda n: 0.5 + 0.25 * n), clock))
    proposer.begin()
    rows = [Row(SampleId(1, 0, sample), (1, 2), 50) for sample in range(5)]
    for row in rows[:4]:
        proposer.track(row, None, 0)
    proposer.propose(rows, np.zeros(5, np.int64), np.array([40, 40, 40, 0, 40]), 100)
    assert world.now == [1.25]
    assert proposer.take_spent() == (1.25, 5)


# Whole runs


def seconds_by_hand(workload: Workload, step: int, num_ranks: int, slots: int, cost: LinearCost) -> tuple[float, int]:
    """Continuous batching of one response a prompt, where every prompt fits into a forward: each row's first forward feeds
    its prompt, every further one a token. Returns the slowest rank's seconds, and most forwards."""
    seconds, forwards = [], []
    owners = place_in_turn(workload.num_prompts, 1, num_ranks)
    for rank in range(num_ranks):
        prompts = [prompt for prompt, owner in zip(workload.batch(step), owners, strict=True) if owner == rank]
        waiting = [(len(p.token_ids), len(workload.response(step, p.uid, 0))) for p in prompts]
        active, total, count = [], 0.0, 0
        while waiting or active:
            while waiting and len(active) < slots:
                prompt, length = waiting.pop(0)
                active.append([prompt, 0, length])
            fed = [prompt if done == 0 else 1 for prompt, done, _ in active]
            positions = [prompt + done for prompt, done, _ in active]
            total += cost.seconds(Load(len(active), sum(fed), 0, sum(positions), 0, 0))
            count += 1
            active = [[prompt, done + 1, length] for prompt, done, length in active if done + 1 < length]
        seconds.append(total)
        forwards.append(count)
    return max(seconds), max(forwards)


@pytest.mark.parametrize(("num_ranks", "slots"), [(1, 64), (3, 64), (3, 2)])
def test_none_takes_what_a_calculation_by_hand_says(num_ranks, slots):
    workload = make_workload(prompts=13, generations=1)
    alone = {"loss__advantage_estimator": "reinforce_plus_plus", "loss__scale_rewards": "none"}  # one response a prompt
    config = make_config("none", 13, 1, rollout__num_slots=slots, rollout__placement="in_turn", **alone)
    steps = simulate(config, workload, LinearCost(), num_ranks)
    for step in steps:
        seconds, forwards = seconds_by_hand(workload, step.step, num_ranks, slots, LinearCost())
        assert step.forwards == forwards
        assert step.seconds == pytest.approx(seconds + World(1).meeting_s, rel=1e-9)
        lengths = [len(workload.response(step.step, p.uid, 0)) for p in workload.batch(step.step)]
        assert step.response_tokens == sum(lengths)
    assert len({step.seconds for step in steps}) == 4


def test_rows_are_placed_where_nothing_is_drafted_too():
    """Seven prompts of four equally long responses on four ranks: in turn three ranks have eight rows, balanced all have seven.
    A forward itself takes as long as one more row in it, so nine to eight, but for prompts that are fed on more ranks. The first
    steps know neither lengths nor costs."""
    cost = ForwardCost([1], [5e-3], 10e-3, dict.fromkeys(RATES, 0.0))
    in_turn, balanced = (
        run("none", 4, cost=cost, config={"prompts": 7, "rollout__placement": name}, prompts=7, sigma=0.0)
        for name in ("in_turn", "balanced")
    )
    assert [step.digest for step in balanced] == [step.digest for step in in_turn]
    ratios = [one.seconds / other.seconds for one, other in zip(balanced, in_turn, strict=True)]
    assert ratios[0] == pytest.approx(1.0, rel=0.01)
    assert ratios[2:] == pytest.approx([8 / 9] * 2, rel=0.05)


@pytest.mark.parametrize("method", ["none", "bubble+suffix"])
def test_the_same_run_takes_the_same_time(method):
    assert figures(run(method, 3)) == figures(run(method, 3))


def test_tokens_are_those_of_the_workload_whatever_the_method_and_the_ranks():
    """The digest of each step, against SHA-256 over the workload's own responses."""
    workload = make_workload()
    wanted = []
    for step in range(4):
        sha = hashlib.sha256()
        for prompt in sorted(workload.batch(step), key=lambda p: p.uid):
            for sample in range(4):
                tokens = workload.response(step, prompt.uid, sample)
                sha.update(np.array([prompt.uid, 0, sample, len(tokens)], "<i8").tobytes() + tokens.astype("<i4").tobytes())
        wanted.append(sha.hexdigest())
    for method, num_ranks, tokens_a_pass in (
        ("none", 1, 2),
        ("suffix", 2, 2),
        ("bubble", 2, 1),
        ("bubble+suffix", 1, 2),
        ("bubble+suffix", 2, 1),
        ("bubble+suffix", 4, 3),
        ("drafter", 2, 2),
        ("bubble+suffix+drafter", 3, 2),
    ):
        steps = run(method, num_ranks, run=20, tokens_a_pass=tokens_a_pass)
        assert [step.digest for step in steps] == wanted, (method, num_ranks)


def test_eight_ranks_with_every_option():
    for options in ({"bubble__lookahead": 1}, {"bubble__max_slowdown": 0.0}):
        steps = run("bubble+suffix", 8, config={"prompts": 8} | options, prompts=8)
        assert sum(step.drafted_tokens for step in steps) > 0
        assert steps[-1].drafted_tokens == 0  # there is no step after it


def test_good_drafts_save_forwards_and_bad_ones_do_not():
    """Forwards of the slowest rank after the first step. Drafts that are wrong from their first token on, and no match after it,
    are given up; perfect ones leave next to nothing to decode."""

    def forwards(method: str, **spec) -> int:
        return sum(step.forwards for step in run(method, 2, steps=6, **spec)[1:])

    none = forwards("none")
    perfect = forwards("bubble+suffix", run=float("inf"))
    good = forwards("bubble+suffix", run=30, tokens_a_pass=3)
    prefix_only = forwards("bubble", run=30, tokens_a_pass=3)
    useless = forwards("bubble+suffix", run=1, tokens_a_pass=1)
    assert perfect < 0.5 * none
    assert perfect < good < prefix_only < 1.05 * none
    assert 0.9 * none < useless < 1.05 * none


def test_perfect_drafts_are_never_refused():
    steps = run("bubble", 2, run=float("inf"), steps=5)
    assert sum(step.proposed_tokens for step in steps) > 500
    assert sum(step.refused_tokens for step in steps) == 0


# The learned drafter


def make_drafter(world: World, workload: Workload, model: DrafterModel, slots: int = 16, cost=None):
    """An engine with a drafter, and the drafts' source."""
    runner = SimulatedRunner(
        world, 0, slots, 2000, max_batch_tokens=512, cost=cost or LinearCost(),
        text=lambda row, _: workload.response(workload.step_of(row.id), row.id.uid, row.id.sample),
    )  # fmt: skip
    engine, profiled, clock = SimulatedGenerator(runner), CostModel(), SimulatedRanks(world, 0).clock
    profiled.coefficients = np.array([10e-3, 0.0, 20e-6, 0.0, 10e-9])
    source = LearnedDrafts(SimulatedChains(runner, model), engine, profiled, clock)
    source.acceptance.expect(model.accepted())
    return engine, source, Proposer([source], profiled, uses_drafts=False, fixed_window=LONGEST, clock=clock)


@pytest.mark.parametrize("tokens_a_pass", [1.0, 2.0, 3.0, 6.0])
def test_tokens_a_pass_are_those_of_a_chain_with_one_chance(tokens_a_pass):
    accepted = DrafterModel(tokens_a_pass).accepted()
    assert 1 + accepted.sum() == pytest.approx(tokens_a_pass)
    np.testing.assert_allclose(accepted, accepted[0] ** np.arange(1, LONGEST + 1))


@pytest.mark.parametrize("tokens_a_pass", [2.0, 3.0])
def test_a_drafter_is_accepted_as_often_as_it_should(tokens_a_pass):
    """By what the source has measured, and by what the engine's forwards gained."""
    workload, model = make_workload(1, 8, mean=1200.0, max=1500, sigma=0.1), DrafterModel(tokens_a_pass, 0.001)
    engine, source, proposer = make_drafter(World(1), workload, model)
    rows = make_rows(workload.launch(0).groups, 8, 1500)
    for row in rows:
        proposer.track(row, None, 0)
    run_to_end(engine, rows, SamplingParams(stop_token_ids=(STOP,)), proposer)
    for row in rows:
        np.testing.assert_array_equal(row.tokens, workload.response(0, row.id.uid, row.id.sample))
    chosen = source.take_chosen()
    assert chosen.sum() > 400
    assert chosen[:, LONGEST].sum() > 0.95 * chosen.sum(), "a drafter that costs nothing drafts all it can"
    tried, right = source.acceptance.seen.T
    np.testing.assert_allclose(np.cumprod(right / tried), model.accepted(), atol=0.035)  # about 3 standard errors
    counts = proposer.acceptance
    assert counts.gained_tokens / counts.row_forwards == pytest.approx(tokens_a_pass, rel=0.04)


def test_chains_take_the_time_of_the_drafter_s_forwards():
    """The first forward catches up, with 64 positions at the most; the others feed a token a row."""
    world, workload, cost = World(1), make_workload(1, 2, mean=400.0, sigma=0.0, prompt=200), LinearCost()
    engine, source, _ = make_drafter(world, workload, DrafterModel(2.0, 0.25), cost=cost)
    rows = make_rows(workload.launch(0).groups, 2, 300)
    engine.add(rows)
    params = SamplingParams(stop_token_ids=(STOP,))
    while len(engine.decoding()) < 2:
        engine.step(params)
    for caught_up in (64, 3):
        begin_s, positions = world.now[0], int(engine.lengths.sum())
        tokens, slots, count = source.chains.draft(engine.scheduler, np.arange(2), 4)
        assert (tokens.shape, slots.tolist(), count) == ((2, 4), [0, 1], 2 * caught_up)
        fed = [2 * caught_up, 2, 2, 2]
        wanted = 0.25 * sum(cost.seconds(Load(2, n, 0, positions, 0, 0)) for n in fed)
        assert world.now[0] - begin_s == pytest.approx(wanted)
        engine.may_skip = False
        for _ in range(3):
            engine.step(params)


def test_a_drafter_shortens_a_tail_of_few_long_rows():
    """Two rows decode alone for most of a step. One that is seldom right is found out and costs next to nothing."""

    def seconds(method: str, tokens_a_pass: float = 1.0) -> float:
        workload = make_workload(2, 1, mean=250.0, sigma=0.3)
        workload.drafter = DrafterModel(tokens_a_pass)
        alone = {"loss__advantage_estimator": "reinforce_plus_plus", "loss__scale_rewards": "none"}
        steps = simulate(make_config(method, 2, 1, **alone), workload, LinearCost(), 1)
        return sum(step.seconds for step in steps)

    none = seconds("none")
    # 2.5 tokens in 1.25 of a forward; at the best lengths no less.
    assert seconds("drafter", 4.0) < seconds("drafter", 2.5) < none / 1.7
    assert seconds("drafter", 1.0) < 1.03 * none


def test_shares_of_waiting_add_up():
    """Lanes cover each rank's time but for what the host does between forwards, and the white and the pale are what the bubble
    ratio counts in a run without speculation."""
    for step in run("none", 3):
        waits = [lane[lane[:, 0] == KINDS.index("wait")] for lane in step.lanes]
        waited = [of_rank[:, 2] - of_rank[:, 1] for of_rank in waits]
        assert step.bubble_ratio == pytest.approx(sum(w.sum() for w in waited) / 3 / step.seconds)
        for lane in step.lanes:
            assert (lane[:, 2] - lane[:, 1]).sum() == pytest.approx(step.seconds)
            assert (lane[1:, 1] >= lane[:-1, 2] - 1e-9).all()


# Texts of drafts


def true_text(length: int, seed: int = 0) -> np.ndarray:
    return np.append(np.random.default_rng(seed).integers(0, VOCABULARY, length - 1), STOP)


def first_mismatch(draft: np.ndarray, true: np.ndarray) -> int:
    both = min(len(draft), len(true))
    return int(np.append(np.flatnonzero(draft[:both] != true[:both]), both)[0])


def test_a_draft_goes_on_from_what_it_has():
    """Continued at any place, under any younger weights, a text that has left its response stays what it was; one that has
    not leaves it no sooner than under older weights."""
    model, true = DraftModel(40.0, 2.0, drifts=True), true_text(200)
    for uid in range(20):
        key, nothing = (4, uid, 1), true[:0]
        old, young = (model.text(key, true, 400, STOP, age, nothing) for age in (8, 2))
        left = first_mismatch(old, true)
        assert left <= first_mismatch(young, true)
        assert model.text(key, true, 400, STOP, 0, nothing) is true
        for cut in (1, left, left + 1, len(old) - 1):
            again = model.text(key, true, 400, STOP, 2, old[:cut])
            np.testing.assert_array_equal(again[: min(cut, len(again))], old[:cut])
            if cut > left:
                np.testing.assert_array_equal(again, old)


@pytest.mark.parametrize(("drifts", "age", "wanted"), [(False, 1, 100.0), (False, 7, 100.0), (True, 1, 100.0), (True, 4, 25.0)])
def test_the_first_mismatch_comes_as_late_as_it_should(drifts, age, wanted):
    model, true = DraftModel(100.0, 2.0, drifts), true_text(4000)
    found = [first_mismatch(model.text((0, uid, 0), true, 9000, STOP, age, true[:0]), true) for uid in range(400)]
    assert np.mean(found) == pytest.approx(wanted, rel=0.15)  # 3 standard errors


@pytest.mark.parametrize("tokens_a_pass", [1.0, 1.5, 2.0, 4.0, 10.0])
def test_matching_gains_about_the_tokens_a_pass(tokens_a_pass):
    """The real suffix index on drafts that have left their responses at the first token."""
    tokens = passes = 0
    for uid in range(6):
        true = true_text(1500, uid)
        index, done = GroupIndex(), 0
        index.add_draft(0, DraftModel(1.0, tokens_a_pass).diverged((0, uid, 0), true, 9000, STOP, at=0))
        while done < len(true):
            proposed, *_ = index.propose(0, 128)
            gained = first_mismatch(proposed, true[done:]) + 1
            index.extend(0, true[done : done + gained])
            done += gained
            passes += 1
        tokens += len(true)
    assert tokens / passes == pytest.approx(tokens_a_pass, rel=0.12)


@pytest.mark.parametrize("at", [0, 5, 18, 19])
@pytest.mark.parametrize("limit", [20, 21, 60])
def test_a_diverged_text_ends_as_a_response_does(at, limit):
    for seed in range(30):
        model = DraftModel(1.0, 3.0, seed=seed)
        for true in (true_text(20), true_text(limit + 1)[:limit]):  # one with its stop token, one cut off
            text = model.diverged((0, 1, 2), true, limit, STOP, at=at)
            assert (text[:at] == true[:at]).all() and text[at] != true[at]
            assert len(text) <= limit
            assert text[-1] == STOP or len(text) == limit
            assert (text[:-1] != STOP).all()


def test_lengths_have_the_mean_and_the_limit_asked_for():
    workload = make_workload(prompts=200, generations=8, mean=100.0, max=2000)
    lengths = np.array([[len(workload.response(0, p.uid, j)) for j in range(8)] for p in workload.batch(0)])
    assert lengths.mean() == pytest.approx(100.0, rel=0.15)
    assert lengths.max() <= 2000
    between = np.corrcoef(np.log(lengths[:, 0]), np.log(lengths[:, 1]))[0, 1]
    assert between == pytest.approx(0.5, abs=0.15)
    assert make_workload(max=60).response(0, 1, 0).tolist() == make_workload(max=60).response(0, 1, 0).tolist()


# Costs


def test_analytic_cost_is_the_roofline():
    cost = analytic_cost("h200", "7b", 2e-3, 0.8, compute_share=0.5)
    bandwidth, compute = 0.8 * GPUS["h200"][0], 0.5 * GPUS["h200"][1]
    parameters, layers, heads, kv_heads, dimension = MODELS["7b"]
    for tokens, positions in ((1, 0), (32, 10**5), (64, 10**6)):
        seconds = cost.seconds(Load(tokens, tokens, 0, positions, 0, 0))
        by_hand = 2e-3 + max(2 * parameters / bandwidth, 2 * parameters * tokens / compute)
        by_hand += 4 * layers * kv_heads * dimension * positions / bandwidth
        assert seconds == pytest.approx(by_hand, rel=1e-6)
    saturated = cost.seconds(Load(1, 4096, 1, 4096, 4096, 0)) - cost.seconds(Load(1, 1, 0, 4096, 0, 0))
    linear = 2 * parameters * 4096 / compute - 2 * parameters / bandwidth
    assert saturated == pytest.approx(linear + 4095 * 4096 * 4 * layers * heads * dimension / compute, rel=0.01)
    assert cost.kind == "analytic" and "not measured" in cost.hardware["source"]


# Recorded runs and the command line


def write_trace(run_dir, workload: Workload, config, drafts: dict | None = None, first_step: int = 0) -> list[str]:
    """A trace as a run would leave it that recorded from `first_step` on; drafts: (tokens, finished) by (step, uid, sample).
    Returns the digests."""
    folder = os.path.join(run_dir, FOLDER)
    os.makedirs(folder)
    meta = {"format": FORMAT, "world_size": 2, "hardware": {"cpu": "a test"}, "versions": {}, "config": flatten(config)}
    with open(os.path.join(folder, "meta.json"), "w") as file:
        json.dump(meta, file)
    digests = [step.digest for step in simulate(config, workload, LinearCost(), 2)]
    for step in range(first_step, workload.num_steps):
        keys = [(step, p.uid, sample) for p in workload.batch(step) for sample in range(workload.num_generations)]
        tokens = [workload.response(*key) for key in keys]
        prompts = {p.uid: p.token_ids for p in workload.batch(step)}
        found = [(drafts or {}).get(key) for key in keys]
        responses = {
            "step": [step] * len(keys),
            "batch": [0] * len(keys),
            "uid": [uid for _, uid, _ in keys],
            "visit": [workload.visit(step, uid) for _, uid, _ in keys],
            "sample": [sample for *_, sample in keys],
            "owner": [0] * len(keys),
            "prompt_tokens": [prompts[uid] for _, uid, _ in keys],
            "tokens": tokens,
            "stopped": [t[-1] == STOP for t in tokens],
            "reward": [0.5] * len(keys),
            "draft_tokens": [None if draft is None else draft[0] for draft in found],
            "draft_finished": [draft is not None and draft[1] for draft in found],
            "draft_version": [-1] * len(keys),
        }
        _write_table(folder, "responses", step, responses)
        names = "own_s wait_s total_s gen_s meet_s reward_s train_s exchange_s step_s"
        zeros = {name: [0.0] for name in names.split()}
        steps = {"step": [step], "rank": [0], "digest": [digests[step]], "own_forwards": [1], "drafted_tokens": [0], **zeros}
        _write_table(folder, "steps", step, steps)
    return digests[first_step:]


def make_format_1(run_dir) -> None:
    """A trace as it was before samples were named by their visits: without them, and with digests that do not cover them."""
    folder = os.path.join(run_dir, FOLDER)
    for step in list_steps(folder):
        path = os.path.join(folder, f"responses-{step:05d}.parquet")
        responses = pyarrow.parquet.read_table(path, partitioning=None).drop_columns("visit")
        pyarrow.parquet.write_table(responses, path)
        path = os.path.join(folder, f"steps-{step:05d}.parquet")
        table = pyarrow.parquet.read_table(path, partitioning=None)
        place = table.column_names.index("digest")
        table = table.set_column(place, "digest", pyarrow.array([digest_of_format_1(responses)]))
        pyarrow.parquet.write_table(table, path)
    path = os.path.join(folder, "meta.json")
    with open(path) as file:
        meta = json.load(file)
    with open(path, "w") as file:
        json.dump(meta | {"format": 1}, file)


def digest_of_format_1(responses: pyarrow.Table) -> str:
    sha = hashlib.sha256()
    for row in sorted(responses.to_pylist(), key=lambda row: (row["uid"], row["sample"])):
        sha.update(np.array([row["uid"], row["sample"], len(row["tokens"])], "<i8").tobytes())
        sha.update(np.array(row["tokens"], "<i4").tobytes())
    return sha.hexdigest()


@pytest.mark.parametrize(("first_step", "wanted"), [(0, [0, 0, 1, 1, 2, 2]), (3, [1, 2, 2])])
def test_a_recorded_run_has_the_visits_that_were_recorded(tmp_path, first_step, wanted):
    """Recorded from the first step on, and from later on, where prompts have been drawn before that the trace does not have."""
    spec = {"steps": 6, "epochs": 3}
    digests = write_trace(tmp_path, make_workload(**spec), make_config(), first_step=first_step)
    recorded, made = RecordedWorkload(str(tmp_path)), make_workload(**spec)
    steps = range(first_step, 6)
    assert [{group.visit for group in recorded.launch(step).groups} for step in steps] == [{visit} for visit in wanted]
    assert [recorded.launch(step) for step in steps] == [made.launch(step) for step in steps]
    assert {recorded.step_of(group.sample(1)) for group in recorded.launch(4).groups} == {4}
    for method in ("none", "bubble+suffix"):
        found = simulate(make_config(method), recorded, LinearCost(), 2)
        assert [step.digest for step in found] == digests == [recorded.digests[step] for step in steps]


def test_a_trace_of_format_1_is_simulated_as_one_of_format_2(tmp_path):
    spec = {"steps": 6, "epochs": 3}
    write_trace(tmp_path, make_workload(**spec), make_config())
    newer = RecordedWorkload(str(tmp_path))
    make_format_1(tmp_path)
    with pytest.raises(KeyError):
        read_table(str(tmp_path / FOLDER), "responses")["visit"]
    older = RecordedWorkload(str(tmp_path))
    assert older.digests == newer.digests
    assert [older.launch(step) for step in range(6)] == [newer.launch(step) for step in range(6)]
    for method in ("none", "bubble+suffix"):
        one, other = (simulate(make_config(method), recorded, LinearCost(), 2) for recorded in (older, newer))
        assert figures(one) == figures(other)


def test_digests_of_a_run_that_was_recorded_in_format_1():
    """Those that the run itself has reported, over the responses that the trace has."""
    folder = os.path.join(ROOT, "tests", "data", "replay", "2_ranks_bubble+suffix", FOLDER)
    assert read_meta(folder)["format"] == 1
    for step in list_steps(folder):
        reported = set(read_table(folder, "steps", [step])["digest"].to_pylist())
        assert reported == {digest_of_format_1(read_table(folder, "responses", [step]))}


def test_a_recorded_run_says_what_it_said(tmp_path):
    workload, config = make_workload(), make_config()
    true = {(1, p.uid, j): workload.response(1, p.uid, j) for p in workload.batch(1) for j in range(4)}
    keys = list(true)
    wrong = (true[keys[0]] + 1) % VOCABULARY
    wrong[:3], wrong[-1] = true[keys[0]][:3], STOP
    drafts = {keys[0]: (wrong, True), keys[1]: (true[keys[1]][:2], False)}
    digests = write_trace(tmp_path, workload, config, drafts)
    recorded = RecordedWorkload(str(tmp_path))
    nothing = np.empty(0, np.int64)
    np.testing.assert_array_equal(recorded.draft(*keys[0], 1, 300, nothing), wrong)
    np.testing.assert_array_equal(recorded.draft(*keys[1], 1, 300, nothing), true[keys[1]])
    np.testing.assert_array_equal(recorded.draft(*keys[0], 0, 300, nothing), true[keys[0]])
    assert recorded.mean_run == 5.0  # 3 tokens and a mismatch, 2 tokens and none
    for method in ("none", "bubble+suffix"):
        steps = simulate(make_config(method), recorded, LinearCost(), 2)
        assert [step.digest for step in steps] == digests == [recorded.digests[step] for step in range(4)]


def test_a_trace_is_simulated_with_a_drafter(tmp_path):
    digests = write_trace(tmp_path, make_workload(), make_config())
    steps = simulate(make_config("suffix+drafter"), RecordedWorkload(str(tmp_path)), LinearCost(), 2)
    assert [step.digest for step in steps] == digests
    assert sum(step.proposed_tokens - step.refused_tokens for step in steps) > 200


def command(*arguments: str, cwd=ROOT) -> subprocess.CompletedProcess:
    return python("-m", "bubblespec.simulate", *arguments, folder=cwd)


def test_the_command_line(tmp_path):
    """Both methods side by side, the JSON and the picture; the same figures again from the functions."""
    analytic_cost("h200", "7b", 2e-3, 0.8, compute_share=0.5).save(str(tmp_path / "cost.json"))
    done = command(
        "--synthetic", "mean=40,max=200,steps=3,prompt=8", "--ranks", "2", "--cost-model", str(tmp_path / "cost.json"),
        "--json", str(tmp_path / "out.json"), "--timeline-step", "1", "--output", str(tmp_path / "pictures"),
        "rollout.num_prompts_per_step=4", "rollout.num_generations=2", "speculative.method=bubble",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "analytic, not measured" in done.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    assert list(report["methods"]) == ["none", "bubble"] and report["cost_kind"] == "analytic"
    for method, found in report["methods"].items():
        assert (tmp_path / "pictures" / method / "timeline" / "step_00001.png").stat().st_size > 5000
        config = make_config(method, 4, 2, 200, rollout__max_batch_tokens=8192)
        workload = make_workload(4, 2, mean=40.0, max=200, steps=3, prompt=8)
        steps = simulate(config, workload, ForwardCost.load(str(tmp_path / "cost.json")), 2)
        assert [step["seconds"] for step in found["steps"]] == [step.seconds for step in steps]
        assert found["total"]["seconds"] == pytest.approx(sum(step.seconds for step in steps))
    again = command("--synthetic", "steps=1", "--cost-model", str(tmp_path / "cost.json"), "--json", str(tmp_path / "out.json"))
    assert again.returncode == 2 and again.stderr.strip() == f"error: --json: {tmp_path / 'out.json'} exists"


def check_error(capsys, words: str, *arguments: str) -> None:
    old, sys.argv = sys.argv, ["simulate", *arguments]
    try:
        code = __main__.main()
    finally:
        sys.argv = old
    said = capsys.readouterr()
    assert code == 2 and said.out == ""
    assert said.err.startswith("error: ") and said.err.count("\n") == 1
    assert words in said.err


def test_wrong_arguments_end_in_one_line(tmp_path, capsys):
    cost = str(tmp_path / "cost.json")
    analytic_cost("h200", "7b", 2e-3, 0.8, compute_share=0.5).save(cost)
    synthetic = ("--synthetic", "mean=40,max=200,steps=2", "--cost-model", cost)
    check_error(capsys, "is not a trace", "--trace", str(tmp_path / "nowhere"))
    check_error(capsys, "--cost-model: give one", "--synthetic", "steps=2")
    check_error(capsys, "nowhere.json", "--synthetic", "steps=2", "--cost-model", str(tmp_path / "nowhere.json"))
    check_error(capsys, "unknown name 'sizes'", "--synthetic", "sizes=2", "--cost-model", cost)
    check_error(capsys, "steps=two is no int", "--synthetic", "steps=two", "--cost-model", cost)
    check_error(capsys, "run: 0.0 must be from 1", "--synthetic", "run=0", "--cost-model", cost)
    check_error(capsys, "mean: nan must be", "--synthetic", "mean=nan", "--cost-model", cost)
    check_error(capsys, "--ranks: 0", *synthetic, "--ranks", "0")
    check_error(capsys, "--ranks: 17 ranks for 16 prompts", *synthetic, "--ranks", "17")
    check_error(capsys, "'optim.learning_rate=1'", *synthetic, "optim.learning_rate=1")
    check_error(capsys, "rollout.num_slot: unknown key", *synthetic, "rollout.num_slot=1")
    check_error(capsys, "give it as max", *synthetic, "rollout.max_completion_length=100")
    check_error(capsys, "--timeline-step and --output go together", *synthetic, "--timeline-step", "1")
    check_error(capsys, "--timeline-step: 2 is none", *synthetic, "--timeline-step", "2", "--output", str(tmp_path / "o"))
    check_error(capsys, "--drafter: tokens_a_pass: 7.0 must be from 1 to 6", *synthetic, "--drafter", "tokens_a_pass=7")
    check_error(capsys, "--drafter: share: 2.0 must be from 0 to 1", *synthetic, "--drafter", "share=2")
    check_error(
        capsys, "--drafter: speculative.method=bubble has none", *synthetic, "--drafter", "share=0.1", "speculative.method=bubble"
    )
    check_error(capsys, "--drafts: give its values in --synthetic", *synthetic, "--drafts", "run=5")


def test_a_damaged_trace_ends_in_one_line(tmp_path, capsys):
    write_trace(tmp_path, make_workload(), make_config())
    trace = ("--trace", str(tmp_path))
    check_error(capsys, "cut at 300", *trace, "rollout.max_completion_length=301")
    check_error(capsys, "the workload has 4", *trace, "rollout.num_generations=2", "--cost-model", saved_cost(tmp_path))
    check_error(capsys, "forwards", *trace)  # none were recorded, and no cost given
    folder = tmp_path / FOLDER
    os.remove(folder / "steps-00001.parquet")
    check_error(capsys, "not consecutive", *trace)
    (folder / "meta.json").write_text(json.dumps({"format": FORMAT + 1}))
    check_error(capsys, "not a trace of this version", *trace)


def saved_cost(folder) -> str:
    path = str(folder / "cost.json")
    analytic_cost("h200", "7b", 2e-3, 0.8, compute_share=0.5).save(path)
    return path


def test_a_run_without_the_simulator_reads_the_real_clock():
    """The seam's default: ranks tell the time by the `time` module."""
    assert Ranks(torch.device("cpu")).clock is time
    assert make_proposer("suffix", History(0), CostModel(), has_drafts=False).clock is time


@pytest.mark.parametrize("edited", [0.05, 0.2])
def test_epochs_repeat_prompts_with_similar_responses(edited):
    """Prompts come again with responses that share all but the edited tokens, and suffix matches find them."""
    workload = make_workload(2, 2, steps=4, epochs=2, edited=edited, mean=2000.0, max=4000)
    gained = forwards = 0
    for step in (0, 1):
        assert [p.token_ids for p in workload.batch(step)] == [p.token_ids for p in workload.batch(step + 2)]
        for prompt in workload.batch(step):
            for sample in range(2):
                before, after = (workload.response(s, prompt.uid, sample) for s in (step, step + 2))
                same = sum(block.size for block in SequenceMatcher(None, before, after, False).get_matching_blocks())
                # Two thirds of the edits take or replace one of the old tokens.
                assert same / len(before) == pytest.approx(1 - 2 / 3 * edited, abs=0.03)
                index, done = GroupIndex([(before, 0.0)], prompt=prompt.token_ids), 0
                while done < len(after):
                    proposed, *_ = index.propose(sample, 128)
                    accepted = min(first_mismatch(proposed, after[done:]), len(after) - done - 1)
                    index.extend(sample, after[done : done + accepted + 1])
                    gained, forwards, done = gained + accepted + 1, forwards + 1, done + accepted + 1
    # An edit every 1 / edited tokens ends a match, and costs the two tokens at most after which there is one again.
    assert 1 / (3 * edited) < gained / forwards < 1 / edited


def test_an_epoch_before_saves_forwards():
    none, ours = ([step.forwards for step in run(m, epochs=2, edited=0.1)] for m in ("none", "suffix"))
    assert ours[:2] == none[:2], "of made-up tokens nothing matches by chance"
    assert sum(ours[2:]) < 0.6 * sum(none[2:])


# The map


def cell(mismatch, verification, speedup, drift=0) -> dict:
    place = {"lengths": "a", "ranks": 8, "rows": 8, "steps": 4}
    return place | {"mismatch": mismatch, "drift": drift, "verification": verification, "speedup": speedup}


def test_a_cell_is_bounded_by_what_would_help_it_most():
    cells = [cell(None, 0.0, 2.0), cell(None, 4.0, 1.5), cell(500.0, 0.0, 1.2), cell(500.0, 4.0, 1.1), cell(500.0, 0.0, 1.9, 1)]
    bounds = [replay_map.bound_of(one, cells) for one in cells]
    assert bounds == ["bubble volume", "verification", "acceptance", "acceptance", "bubble volume"]
    assert replay_map.bound_of(cells[3], cells[1:]) is None


def test_a_map_is_made_in_several_commands_and_drawn(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(replay_map, "LENGTHS", {"tiny": (20.0, 80)})
    # What a pool does, in this process, where the lengths are replaced.
    alone = SimpleNamespace(Pool=lambda jobs: contextlib.nullcontext(SimpleNamespace(imap_unordered=map)))
    monkeypatch.setattr(replay_map.multiprocessing, "get_context", lambda kind: alone)
    simulated, simulate_run = [], replay_map.simulate_run
    monkeypatch.setattr(replay_map, "simulate_run", lambda run: (simulated.append(run), simulate_run(run))[1])
    path = str(tmp_path / "map.json")

    def command(*options: str) -> int:
        simulated.clear()
        arguments = ["replay_map.py", path, "--ranks", "2", "--lengths", "tiny", "--steps", "3", "--jobs", "1", *options]
        monkeypatch.setattr(sys, "argv", arguments)
        return replay_map.main()

    assert command("--mismatches", "inf", "20", "--verification", "0") == 0 and len(simulated) == 3
    assert command("--figure", str(tmp_path / "map.png")) == 0 and len(simulated) == 8, "all but what was there"
    assert command("--drift", "--mismatches", "20", "--verification", "0") == 0 and len(simulated) == 1
    cells = replay_map.cells_of(replay_map.read(path))
    speedups = {(c["mismatch"], c["drift"], c["verification"]): c["speedup"] for c in cells}
    assert len(cells) == len(speedups) == 11 and all(c["bound"] for c in cells if c["mismatch"] != 20.0 or not c["verification"])
    assert speedups[None, 0, 0.0] > speedups[None, 0, 4.0] and speedups[None, 0, 0.0] > 1.1
    assert speedups[None, 0, 0.0] > speedups[20.0, 0, 0.0] >= speedups[20.0, 1, 0.0]
    assert (tmp_path / "map.png").stat().st_size > 10_000 and "| tiny | 2 | 3 | 20 / age | 0 |" in capsys.readouterr().out
    assert command("--figure", str(tmp_path / "map.png")) == 2 and "exists" in capsys.readouterr().err
    (tmp_path / "map.json").write_text('{"title": "of another cost", "runs": []}')
    assert command() == 2 and "of another cost" in capsys.readouterr().err
