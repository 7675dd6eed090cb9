"""Uses of idle time: the assignment of jobs to ranks, and what each task does with its jobs.
Stand-ins for the learner and the drafter's training, whose time would be measured."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

from bubblespec.config import Config, LossConfig, ModelConfig
from bubblespec.draft.proposer import make_proposer
from bubblespec.draft.store import DraftStore, History
from bubblespec.engine.engine import Engine
from bubblespec.idle.draft_ahead import MAX_IDLE_FORWARDS, DraftAhead
from bubblespec.idle.task import NUM_WANTED, IdleTask, Job, RankView, assign
from bubblespec.mechanisms.drafter.idle_task import LITTLE_S, MAX_SHARE, TrainDrafter
from bubblespec.mechanisms.stream_gradients.idle_task import StreamGradients
from bubblespec.records import ForwardRecord, IdleUse, RolloutRecord, Span
from bubblespec.tools.simulate.runner import SimulatedRunner
from bubblespec.tools.simulate.world import SimulatedRanks, World
from bubblespec.types import Draft, Launch, Row, SampleId
from tests.helpers.clocks import Clock
from tests.helpers.rollouts import ALONE, PARAMS, fixed_cost, groups_of, rows_of

# Who does what


def random_jobs(rng: np.random.Generator, num_ranks: int) -> list[list[Job]]:
    """Of three tasks: co-scheduled drafts and others, slices of some rank, slices of any."""
    tasks = []
    for task in range(3):
        ranks = rng.integers(0, num_ranks, 8).tolist() if task == 1 else [None] * 8
        tasks.append(
            [
                Job((task, n), *rng.uniform(0.1, 2.0, 2).tolist(), bool(n < 4 and task == 0), rank)
                for n, rank in enumerate(ranks)
            ]
        )
    return tasks


@pytest.mark.parametrize("seed", range(20))
def test_jobs_are_assigned_once_to_allowed_ranks(seed):
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.integers(1, 5))
    jobs, has_rows = random_jobs(rng, num_ranks), (rng.random(num_ranks) < 0.5).tolist()
    capacities = [tuple(rng.integers(0, 4, 3).tolist()) for _ in range(num_ranks)]
    before = copy.deepcopy((jobs, capacities, has_rows))
    given = assign(jobs, capacities, has_rows)
    assert (jobs, capacities, has_rows) == before and assign(*before) == given, "a pure function"
    keys = [job.key for of_rank in given for _, job in of_rank]
    assert len(keys) == len(set(keys)), "no job twice"
    for rank, of_rank in enumerate(given):
        tasks = [task for task, _ in of_rank]
        assert all(tasks.count(task) <= capacities[rank][task] for task in range(3))
        assert all(job.rank in (None, rank) for _, job in of_rank)
        assert all(job in jobs[task] for task, job in of_rank)
        if has_rows[rank]:
            assert all(job.co_scheduled for _, job in of_rank)
        else:
            assert len(set(tasks)) <= 1, "a rank that waits does one thing at a time"


def test_assignment_prefers_largest_savings():
    drafts = [Job("a", 2.0, 1.0, True), Job("b", 1.0, 1.0, True)]
    slices = [Job("c", 1.5, 0.5, False), Job("d", 1.5, 0.5, False)]
    waiting = assign([drafts, slices], [(2, 2)], [False])
    assert [job.key for _, job in waiting[0]] == ["c", "d"], "per second"
    assert [job.key for _, job in assign([drafts, slices], [(2, 2)], [True])[0]] == ["a", "b"]
    both = assign([drafts, slices], [(1, 0), (1, 1)], [True, False])
    assert [[job.key for _, job in of_rank] for of_rank in both] == [["a"], ["c"]]
    assert assign([drafts], [(0,)], [False]) == [[]] and assign([], [()], [False]) == [[]]


def test_assignment_is_round_robin_from_waiting_ranks():
    jobs = [Job(number, 1.0, 1.0, co_scheduled=True) for number in range(5)]
    given = assign([jobs], [(4,), (4,), (1,)], [True, True, False])
    assert [[job.key for _, job in of] for of in given] == [[1, 3], [2, 4], [0]]


# Drafting ahead


def text_of(row: Row) -> np.ndarray:
    return np.append(row.tokens, np.ones(row.max_new_tokens, np.int64))


def prefill(engine: Engine) -> None:
    while engine.queue or engine.prefilling():
        engine.step(PARAMS)


def view_of(own: list[Row] = (), num_slots: int = 8, is_prefilled: bool = True) -> RankView:
    """A rank with these rows of its own in slots."""
    runner = SimulatedRunner(
        SimulatedRanks(World(1), 0), num_slots, 100, 64, cost=lambda _: 0.0, text=text_of
    )
    engine, record = Engine(runner), RolloutRecord()
    engine.add(list(own))
    if is_prefilled:
        prefill(engine)
    for name in (DraftAhead.name, StreamGradients.name, TrainDrafter.name):
        record.idle[name] = IdleUse()
    return RankView(0, engine, {row: index for index, row in enumerate(own)}, record)


def rows_in(task: IdleTask) -> list[Row]:
    return [*task.view.engine.rows, *task.view.engine.queue]


def drafting(view: RankView, num_plans: int = 20, store=None, cost=None, **options) -> DraftAhead:
    names = [SampleId(5, 1, n) for n in range(num_plans)]
    plans = [Job(name, 1.0, 0.5, name.sample < 10, prompt=(1, 2)) for name in names]
    cost, options = cost or fixed_cost(), {"version": 3, "max_new_tokens": 30, **options}
    proposer = make_proposer(["bubble"], History(0), cost, has_drafts=True)
    task = DraftAhead(plans, store or DraftStore(1000), proposer, cost, **options)
    task.begin(view)
    return task


def give(task: DraftAhead, count: int, rank: int = 0) -> list[Job]:
    jobs = list(task.jobs())[:count]
    for job in jobs:
        task.accept(job, rank)
    return jobs


def test_jobs_are_unassigned_plans():
    task = drafting(view_of())
    assert [job.co_scheduled for job in task.jobs()] == [True] * 10 + [False] * 10
    mine, others = give(task, 2), give(task, 3, rank=1)
    assert [job.key.sample for job in mine + others] == [0, 1, 2, 3, 4]
    assert len(list(task.jobs())) == 15 and not rows_in(task)
    task.run_slice()
    assert [row.id for row in rows_in(task)] == [job.key for job in mine]


def test_drafts_fill_free_slots():
    task = drafting(view_of(num_slots=4))
    assert task.capacity() == 8, "twice what fits: the next tick is some forwards away"
    give(task, 6)
    task.run_slice()
    assert len(task.view.engine.queue) == 4 and task.capacity() == 0
    task.view.engine.step(PARAMS)
    assert len(task.view.engine.rows) == 4 and task.capacity() == 0


@pytest.mark.parametrize("max_slowdown, num_ahead", [(0.0, 0), (0.5, 3), (2.0, 14)])
def test_co_scheduled_drafts_keep_to_a_slowdown(max_slowdown, num_ahead):
    """Six own rows in 7 ms; each draft adds one."""
    cost = fixed_cost(1e-3, 5e-4, 5e-4)
    task = drafting(view_of(rows_of(0), 32), cost=cost, max_slowdown=max_slowdown)
    give(task, 20)
    task.run_slice()
    assert len(rows_in(task)) - 6 == num_ahead


def test_drafts_on_waiting_rank_keep_forwards_short():
    """The others wait for the end of its forward."""
    task = drafting(view_of(num_slots=32), cost=fixed_cost(1e-3, 5e-4, 5e-4))
    give(task, 20)
    task.run_slice()
    assert len(rows_in(task)) == int(MAX_IDLE_FORWARDS) - 1
    task.view.engine.step(PARAMS)
    task.view.record.forwards.append(ForwardRecord(0.0, 1.0, *[0] * 11))  # a second has passed
    task.run_slice()
    assert len(rows_in(task)) == 19, "2% of it"


def test_prompts_of_drafts_are_fed_in_small_pieces():
    own = rows_of(0)
    view = view_of(own, 32, is_prefilled=False)
    task = drafting(view, cost=fixed_cost(1e-3, 5e-4, 5e-4), max_slowdown=0.5)
    give(task, 1)
    task.run_slice()
    assert view.max_prefill_tokens is None and len(rows_in(task)) == 6, "own first"
    prefill(view.engine)
    task.run_slice()
    assert view.max_prefill_tokens == 7 and len(rows_in(task)) == 7


def test_only_grown_drafts_are_kept():
    store = DraftStore(1000)
    for number in (0, 1):
        store.put(SampleId(5, 1, number), Draft(np.arange(4, dtype=np.int32), False, 1))
    task = drafting(view_of(), store=store)
    give(task, 3)
    task.run_slice()
    first, second, third = rows_in(task)
    assert first.tokens.tolist() == second.tokens.tolist() == [0, 1, 2, 3], "it goes on"
    first.tokens = np.arange(9)
    third.tokens, third.finish = np.arange(5), "stop"
    task.on_finished(third)
    task.on_finished(rows_of(0)[0])  # of another task
    task.view.engine.drop(third)
    task.end()
    assert {key.sample: len(draft.tokens) for key, draft in task.drafts.items()} == {0: 9, 2: 5}
    assert task.view.record.drafted_tokens == 5 + 5
    task.finish(ALONE)
    assert store.get(third.id).is_finished and store.get(third.id).version == 3
    assert store.get(second.id).version == 1


# Streamed gradients


class FakeStreamCost:
    is_known = True

    def seconds(self, num_tokens: int) -> float:
        return num_tokens / 1000

    tokens_s = seconds

    def max_tokens(self, limit_s: float) -> int:
        return int(limit_s * 1000)


class FakeGradients:
    """A token takes a millisecond and saves as much of the update. All samples have a gradient."""

    def __init__(self, clock: Clock):
        self.clock, self.done, self.cost = clock, [], FakeStreamCost()
        self.config = Config(model=ModelConfig(path=""), loss=LossConfig(scale_rewards="none"))
        self.skips_zero_advantage, self.learner = False, self

    def add(self, rows: list[Row], advantages: np.ndarray) -> Span:
        begin_s = self.clock.perf_counter()
        self.clock.sleep(self.cost.seconds(sum(len(row.tokens) for row in rows)))
        self.done.append(list(zip(rows, advantages.tolist(), strict=True)))
        return Span("gradients", begin_s, self.clock.perf_counter())


def streaming(rewards=(1.0, 0.0, 2.0, 2.0), own=None, **rollout):
    """Two groups of two responses of 10, 20, 30 and 40 tokens, all of this rank and scored."""
    launch = Launch(groups_of(0)[:2], 2, 2)
    texts = [np.arange(10 * n) for n in range(1, 5)]
    rows = [
        Row(*of, full_logprob=-0.1 * of[-1])
        for of in zip(launch.ids, [(1,)] * 4, [50] * 4, texts, strict=True)
    ]
    scored = [list(zip(rows, rewards, strict=True))]
    learner = FakeGradients(Clock())
    for key, value in rollout.items():
        setattr(learner.config.rollout, key, value)
    scoring = SimpleNamespace(take_scored=lambda: scored.pop() if scored else [])
    task = StreamGradients(launch, learner, scoring, lambda scores, lengths: scores)
    task.begin(view_of(own or []))
    return task, learner


def tick(task: IdleTask, *others: np.ndarray) -> None:
    task.receive([task.publish(), *others])


def test_gradients_of_complete_groups_come_in_slices():
    task, learner = streaming()
    assert task.capacity() == 0 and not list(task.jobs())
    tick(task)
    assert task.capacity() == NUM_WANTED
    tick(task)
    jobs = list(task.jobs())
    assert [job.rank for job in jobs] == [0, 0]
    assert not task.run_slice() and not learner.done, "not before it is given"
    for job in jobs:
        task.accept(job, 1)
    assert not task.run_slice(), "given to another rank"
    for job in jobs:
        task.accept(job, 0)
    assert task.run_slice() and not task.run_slice()
    sizes = [[len(row.tokens) for row, _ in done] for done in learner.done]
    assert sizes == [[40, 10], [30, 20]], "the longest that fit into 50 ms"
    assert [[advantage for _, advantage in done] for done in learner.done] == [
        [0.0, 0.5],
        [0.0, -0.5],
    ]
    task.finish(ALONE)
    use = task.view.record.idle[task.name]
    assert use.seconds == pytest.approx(0.1, abs=1e-3) and use.saved_s == pytest.approx(0.1)


def test_group_waits_for_all_rewards():
    task, _ = streaming(rewards=(1.0, np.nan, 2.0, 0.0))
    tick(task)
    assert len(task._pieces) == 2, "the second group's"
    theirs = np.concatenate((np.zeros(3), [np.nan, 0.5, np.nan, np.nan]))
    tick(task, theirs)
    assert len(task._pieces) == 4


def test_gradients_skip_equal_rewards_and_yield_to_own_rows():
    task, learner = streaming(dynamic_sampling_max_batches=4)
    tick(task)
    assert [piece.num_tokens for piece in task._pieces] == [10, 20]
    task, learner = streaming(own=rows_of(0))
    tick(task)
    assert task.capacity() == 0 and not list(task.jobs())
    task, learner = streaming(own=rows_of(0))
    task.config.reward.num_workers = 0
    assert np.isnan(task.publish()[3:]).all(), "scoring would keep the rows waiting"
    task, learner = streaming(free_cache_engine=True)
    tick(task)
    task.accept(Job((0, 0), 1.0, 1.0, False, 0), 0)
    releases, task.view.engine.release = [], lambda: releases.append(len(learner.done))
    task.run_slice()
    assert releases == [0] and len(learner.done) == 1


# Training the drafter


def training(elapsed_s: float, tokens: int = 10, own=None):
    clock = Clock()
    fake = SimpleNamespace(token_s=1e-3, slices=[], merged=[], clock=clock)
    fake.slice_tokens = lambda: tokens
    fake.run_slice = lambda limit_s: fake.slices.append(limit_s) or 0.01
    fake.merge = fake.merged.append
    task = TrainDrafter(fake)
    task.begin(view_of(own or []))
    clock.sleep(elapsed_s)
    return task, fake


def test_drafter_trains_only_without_other_jobs():
    task, fake = training(10.0)
    task.receive([task.publish(), np.zeros(3)])
    jobs = list(task.jobs())
    assert [job.rank for job in jobs] == [0, 0] and task.capacity() == 2
    drafts = [Job("draft", 1e-3, 1.0, False)]
    assert assign([jobs, drafts], [(2, 1)], [False])[0] == [(1, drafts[0])], "it comes last"
    for job in jobs:
        task.accept(job, 0)
    assert task.capacity() == 0 and task.run_slice() and not task.run_slice()
    assert fake.slices == [0.05, 0.05] and not task.run_slice()
    task.finish(ALONE)
    assert task.view.record.idle[task.name].seconds == pytest.approx(0.02) and len(fake.merged) == 1


def test_drafter_slices_are_short_and_yield_to_own_rows():
    late, _ = training(0.21)
    assert late.capacity() == 2 and late.publish().tolist() == [2, 0.01, LITTLE_S]
    early, _ = training(0.19)
    assert pytest.approx(0.01) == MAX_SHARE * 0.2
    for task in (early, training(10.0, own=rows_of(0))[0], training(10.0, tokens=0)[0]):
        assert task.capacity() == 0 and not task.publish().any()
