"""Simulated runs: against calculations by hand, of good and bad drafts, and with the learned
drafter."""

import hashlib

import numpy as np
import pytest

from bubblespec.draft.learned import LearnedDrafts
from bubblespec.draft.proposer import Proposer
from bubblespec.engine.chains import LONGEST
from bubblespec.engine.sampling import SamplingParams
from bubblespec.planner.costs import CostModel
from bubblespec.planner.place import place_in_turn
from bubblespec.records import Load
from bubblespec.simulate.cost import RATES, ForwardCost
from bubblespec.simulate.drafter import DrafterModel, SimulatedChains
from bubblespec.simulate.drafting import STOP
from bubblespec.simulate.run import simulate
from bubblespec.simulate.runner import SimulatedGenerator, SimulatedRunner
from bubblespec.simulate.workload import Workload
from bubblespec.simulate.world import SimulatedRanks, World
from bubblespec.telemetry.timeline import KINDS
from tests.helpers.rows import make_rows
from tests.helpers.simulated import LinearCost, figures, make_config, make_workload, run, run_to_end


def seconds_by_hand(
    workload: Workload, step: int, num_ranks: int, slots: int, cost: LinearCost
) -> tuple[float, int]:
    """Continuous batching of one response a prompt, where every prompt fits into a forward: each
    row's first forward feeds its prompt, every further one a token. Returns the slowest rank's
    seconds, and most forwards."""
    seconds, forwards = [], []
    owners = place_in_turn(workload.num_prompts, 1, num_ranks)
    for rank in range(num_ranks):
        prompts = [
            prompt
            for prompt, owner in zip(workload.batch(step), owners, strict=True)
            if owner == rank
        ]
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
            active = [
                [prompt, done + 1, length] for prompt, done, length in active if done + 1 < length
            ]
        seconds.append(total)
        forwards.append(count)
    return max(seconds), max(forwards)


@pytest.mark.parametrize(("num_ranks", "slots"), [(1, 64), (3, 64), (3, 2)])
def test_none_takes_what_a_calculation_by_hand_says(num_ranks, slots):
    workload = make_workload(prompts=13, generations=1)
    alone = {
        "loss__advantage_estimator": "reinforce_plus_plus",
        "loss__scale_rewards": "none",
    }  # one response a prompt
    config = make_config(
        "none", 13, 1, rollout__num_slots=slots, rollout__placement="in_turn", **alone
    )
    steps = simulate(config, workload, LinearCost(), num_ranks)
    for step in steps:
        seconds, forwards = seconds_by_hand(workload, step.step, num_ranks, slots, LinearCost())
        assert step.forwards == forwards
        assert step.seconds == pytest.approx(seconds + World(1).meeting_s, rel=1e-9)
        lengths = [len(workload.response(step.step, p.uid, 0)) for p in workload.batch(step.step)]
        assert step.response_tokens == sum(lengths)
    assert len({step.seconds for step in steps}) == 4


def test_rows_are_placed_where_nothing_is_drafted_too():
    """Seven prompts of four equally long responses on four ranks: in turn three ranks have eight
    rows, balanced all have seven. A forward itself takes as long as one more row in it, so nine to
    eight, but for prompts that are fed on more ranks. The first steps know neither lengths nor
    costs."""
    cost = ForwardCost([1], [5e-3], 10e-3, dict.fromkeys(RATES, 0.0))
    in_turn, balanced = (
        run(
            "none",
            4,
            cost=cost,
            config={"prompts": 7, "rollout__placement": name},
            prompts=7,
            sigma=0.0,
        )
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
                sha.update(
                    np.array([prompt.uid, 0, sample, len(tokens)], "<i8").tobytes()
                    + tokens.astype("<i4").tobytes()
                )
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
    """Forwards of the slowest rank after the first step. Drafts that are wrong from their first
    token on, and no match after it, are given up; perfect ones leave next to nothing to decode."""

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


def test_an_epoch_before_saves_forwards():
    none, ours = (
        [step.forwards for step in run(m, epochs=2, edited=0.1)] for m in ("none", "suffix")
    )
    assert ours[:2] == none[:2], "of made-up tokens nothing matches by chance"
    assert sum(ours[2:]) < 0.6 * sum(none[2:])


# The learned drafter


def make_drafter(world: World, workload: Workload, model: DrafterModel, slots: int = 16, cost=None):
    """An engine with a drafter, and the drafts' source."""
    runner = SimulatedRunner(
        world, 0, slots, 2000, max_batch_tokens=512, cost=cost or LinearCost(),
        text=lambda row, _: workload.response(workload.step_of(row.id), row.id.uid, row.id.sample),
    )  # fmt: skip
    engine, profiled, clock = (
        SimulatedGenerator(runner),
        CostModel(),
        SimulatedRanks(world, 0).clock,
    )
    profiled.coefficients = np.array([10e-3, 0.0, 20e-6, 0.0, 10e-9])
    source = LearnedDrafts(SimulatedChains(runner, model), engine, profiled, clock)
    source.acceptance.expect(model.accepted())
    return (
        engine,
        source,
        Proposer([source], profiled, uses_drafts=False, fixed_window=LONGEST, clock=clock),
    )


@pytest.mark.parametrize("tokens_a_pass", [1.0, 2.0, 3.0, 6.0])
def test_tokens_a_pass_are_those_of_a_chain_with_one_chance(tokens_a_pass):
    accepted = DrafterModel(tokens_a_pass).accepted()
    assert 1 + accepted.sum() == pytest.approx(tokens_a_pass)
    np.testing.assert_allclose(accepted, accepted[0] ** np.arange(1, LONGEST + 1))


@pytest.mark.parametrize("tokens_a_pass", [2.0, 3.0])
def test_a_drafter_is_accepted_as_often_as_it_should(tokens_a_pass):
    """By what the source has measured, and by what the engine's forwards gained."""
    workload, model = (
        make_workload(1, 8, mean=1200.0, max=1500, sigma=0.1),
        DrafterModel(tokens_a_pass, 0.001),
    )
    engine, source, proposer = make_drafter(World(1), workload, model)
    rows = make_rows(workload.launch(0).groups, 8, 1500)
    for row in rows:
        proposer.track(row, None, 0)
    run_to_end(engine, rows, SamplingParams(stop_token_ids=(STOP,)), proposer)
    for row in rows:
        np.testing.assert_array_equal(row.tokens, workload.response(0, row.id.uid, row.id.sample))
    chosen = source.take_chosen()
    assert chosen.sum() > 400
    assert chosen[:, LONGEST].sum() > 0.95 * chosen.sum(), (
        "a drafter that costs nothing drafts all it can"
    )
    tried, right = source.acceptance.seen.T
    np.testing.assert_allclose(
        np.cumprod(right / tried), model.accepted(), atol=0.035
    )  # about 3 standard errors
    counts = proposer.acceptance
    assert counts.gained_tokens / counts.row_forwards == pytest.approx(tokens_a_pass, rel=0.04)


def test_chains_take_the_time_of_the_drafter_s_forwards():
    """The first forward catches up, with 64 positions at the most; the others feed a token a
    row."""
    world, workload, cost = (
        World(1),
        make_workload(1, 2, mean=400.0, sigma=0.0, prompt=200),
        LinearCost(),
    )
    engine, source, _ = make_drafter(world, workload, DrafterModel(2.0, 0.25), cost=cost)
    rows = make_rows(workload.launch(0).groups, 2, 300)
    engine.add(rows)
    params = SamplingParams(stop_token_ids=(STOP,))
    while len(engine.decoding()) < 2:
        engine.step(params)
    for caught_up in (64, 3):
        begin_s, positions = world.now[0], int(engine.lengths.sum())
        tokens, slots, count = source.chains.draft(engine, np.arange(2), 4)
        assert (tokens.shape, slots.tolist(), count) == ((2, 4), [0, 1], 2 * caught_up)
        fed = [2 * caught_up, 2, 2, 2]
        wanted = 0.25 * sum(cost.seconds(Load(2, n, 0, positions, 0, 0)) for n in fed)
        assert world.now[0] - begin_s == pytest.approx(wanted)
        engine.may_skip = False
        for _ in range(3):
            engine.step(params)


def test_a_drafter_shortens_a_tail_of_few_long_rows():
    """Two rows decode alone for most of a step. One that is seldom right is found out and costs
    next to nothing."""

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
    """Lanes cover each rank's time but for what the host does between forwards, and the white and
    the pale are what the bubble ratio counts in a run without speculation."""
    for step in run("none", 3):
        waits = [lane[lane[:, 0] == KINDS.index("wait")] for lane in step.lanes]
        waited = [of_rank[:, 2] - of_rank[:, 1] for of_rank in waits]
        assert step.bubble_ratio == pytest.approx(sum(w.sum() for w in waited) / 3 / step.seconds)
        for lane in step.lanes:
            assert (lane[:, 2] - lane[:, 1]).sum() == pytest.approx(step.seconds)
            assert (lane[1:, 1] >= lane[:-1, 2] - 1e-9).all()
