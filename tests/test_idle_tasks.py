"""Uses of idle time: the assignment of jobs to ranks, and what each task does with its jobs.
Stand-ins for the learner and the drafter's training, whose time would be measured."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

from bubblespec.config import Config, LossConfig, ModelConfig
from bubblespec.draft.proposer import make_proposer
from bubblespec.draft.store import TextStore
from bubblespec.engine.engine import Engine
from bubblespec.mechanisms.drafter.training import LITTLE_S, MAX_SHARE, TrainDrafter
from bubblespec.mechanisms.stream_gradients import StreamGradients
from bubblespec.planner.drafts import DraftRequest
from bubblespec.records import ForwardRecord, IdleUse, RolloutRecord, Span
from bubblespec.rollout.drafting import MAX_IDLE_FORWARDS, DraftAhead, assign
from bubblespec.rollout.plan import IdleTask, RankView
from bubblespec.tools.simulate.runner import SimulatedRunner
from bubblespec.tools.simulate.world import SimulatedRanks, World
from bubblespec.types import Draft, Load, Row, SampleId, StepBatch
from tests.helpers.clocks import Clock
from tests.helpers.rollouts import ALONE, PARAMS, fixed_cost, groups_of, rows_of
from tests.helpers.rows import loop_of, numbered

# Who does what


@pytest.mark.parametrize("seed", range(20))
def test_jobs_are_assigned_once_to_allowed_ranks(seed):
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.integers(1, 5))
    jobs = [DraftRequest(n, *rng.uniform(0.1, 2.0, 2).tolist(), n < 4) for n in range(8)]
    has_rows = (rng.random(num_ranks) < 0.5).tolist()
    capacities = rng.integers(0, 4, num_ranks).tolist()
    before = copy.deepcopy((jobs, capacities, has_rows))
    given = assign(jobs, capacities, has_rows)
    assert (jobs, capacities, has_rows) == before and assign(*before) == given, "a pure function"
    keys = [job.key for of_rank in given for job in of_rank]
    assert sorted(keys) == list(range(len(keys))), "most urgent first, and no job twice"
    for rank, of_rank in enumerate(given):
        assert len(of_rank) <= capacities[rank]
        assert not has_rows[rank] or all(job.co_scheduled for job in of_rank)


def test_assignment_is_round_robin_from_waiting_ranks():
    jobs = [DraftRequest(number, 1.0, 1.0, co_scheduled=True) for number in range(5)]
    given = assign(jobs, [4, 4, 1], [True, True, False])
    assert [[job.key for job in of] for of in given] == [[1, 3], [2, 4], [0]]


class FakeWork(IdleTask):
    def __init__(self, seconds: float, saved_s: float, is_due: bool = True):
        self.slice, self.is_due = (seconds, saved_s), is_due

    def can_begin(self):
        return self.is_due

    def next_slice(self):
        return self.slice


@pytest.mark.parametrize("drafts_save, has_rows", [(2.5, False), (3.5, False), (9.0, True)])
def test_best_work_saves_most_per_second(drafts_save, has_rows):
    """A rank whose own rows wait works beside its drafts; another does what saves most."""
    works = [FakeWork(1.0, 2.0), FakeWork(0.5, 1.5), FakeWork(1.0, 9.0, is_due=False)]
    ahead = SimpleNamespace(rate=drafts_save, capacity=lambda: 7)
    loop = loop_of(
        view_of().engine, ALONE, PARAMS, rows_of(0)[:has_rows], works=works, idle_drafts=ahead
    )
    wanted = None if drafts_save > 3.0 and not has_rows else works[1]
    assert loop._best_work() is wanted
    takes_drafts = has_rows or wanted is None
    loop._note_active = lambda: 0
    assert loop._state().facts[0] == (7 if takes_drafts else 0)


# Drafting ahead


def text_of(row: Row) -> np.ndarray:
    return np.append(row.tokens, np.ones(row.max_new_tokens, np.int64))


def prefill(engine: Engine) -> None:
    while engine.queue or engine.prefilling():
        engine.step(PARAMS)


def view_of(own: list[Row] = (), num_slots: int = 8, is_prefilled: bool = True) -> RankView:
    runner = SimulatedRunner(
        SimulatedRanks(World(1), 0), num_slots, 100, 64, cost=lambda _: 0.0, text=text_of
    )
    engine, record = Engine(runner), RolloutRecord()
    engine.add(list(own))
    if is_prefilled:
        prefill(engine)
    for name in (DraftAhead.name, StreamGradients.name, TrainDrafter.name):
        record.idle[name] = IdleUse()
    return RankView(0, engine, numbered(list(own)), record, len(own))


def rows_in(task: DraftAhead) -> list[Row]:
    return [*task.view.engine.rows, *task.view.engine.queue]


def drafting(view: RankView, num_plans: int = 20, store=None, cost=None, **options) -> DraftAhead:
    names = [SampleId(5, 1, n) for n in range(num_plans)]
    plans = [DraftRequest(name, 1.0, 0.5, name.sample < 10, prompt=(1, 2)) for name in names]
    cost, options = cost or fixed_cost(), {"version": 3, "max_new_tokens": 30, **options}
    proposer = make_proposer(["bubble"], TextStore(0), cost, has_drafts=True)
    proposer.begin()
    task = DraftAhead(plans, store or TextStore(1000), proposer, cost, **options)
    task.begin(view)
    return task


def give(task: DraftAhead, count: int, rank: int = 0) -> list[DraftRequest]:
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
    task.fill()
    assert [row.id for row in rows_in(task)] == [job.key for job in mine]


def test_drafts_fill_free_slots():
    task = drafting(view_of(num_slots=4))
    assert task.capacity() == 8, "twice what fits: the next tick is some forwards away"
    give(task, 6)
    task.fill()
    assert len(task.view.engine.queue) == 4 and task.capacity() == 0
    task.view.engine.step(PARAMS)
    assert len(task.view.engine.rows) == 4 and task.capacity() == 0


@pytest.mark.parametrize("max_slowdown, num_ahead", [(0.0, 0), (0.5, 3), (2.0, 14)])
def test_co_scheduled_drafts_keep_to_a_slowdown(max_slowdown, num_ahead):
    cost = fixed_cost(1e-3, 5e-4, 5e-4)
    task = drafting(view_of(rows_of(0), 32), cost=cost, max_slowdown=max_slowdown)
    give(task, 20)
    task.fill()
    assert len(rows_in(task)) - 6 == num_ahead


def test_drafts_on_waiting_rank_keep_forwards_short():
    """The others wait for the end of its forward."""
    task = drafting(view_of(num_slots=32), cost=fixed_cost(1e-3, 5e-4, 5e-4))
    give(task, 20)
    task.fill()
    assert len(rows_in(task)) == int(MAX_IDLE_FORWARDS) - 1
    task.view.engine.step(PARAMS)
    a_second = ForwardRecord(0.0, 1.0, 1.0, 0.0, Load(0, 0), 0, 0, 0)
    task.view.record.forwards.append(a_second)
    task.fill()
    assert len(rows_in(task)) == 19, "2% of it"


def test_prompts_of_drafts_are_fed_in_small_pieces():
    own = rows_of(0)
    view = view_of(own, 32, is_prefilled=False)
    task = drafting(view, cost=fixed_cost(1e-3, 5e-4, 5e-4), max_slowdown=0.5)
    give(task, 1)
    task.fill()
    assert view.max_prefill_tokens is None and len(rows_in(task)) == 6, "own first"
    prefill(view.engine)
    task.fill()
    assert view.max_prefill_tokens == 7 and len(rows_in(task)) == 7


def test_only_grown_drafts_are_kept():
    store = TextStore(1000)
    for number in (0, 1, 3):
        store.put(SampleId(5, 1, number), Draft(np.arange(4, dtype=np.int32), False, 1))
    task = drafting(view_of(), store=store)
    give(task, 4)
    task.fill()
    first, second, third, _unchanged = rows_in(task)
    assert first.tokens.tolist() == second.tokens.tolist() == [0, 1, 2, 3], "it goes on"
    first.tokens = np.arange(9)
    third.tokens, third.finish = np.arange(5), "stop"
    task.on_finished(third)
    task.on_finished(rows_of(0)[0])  # of another task
    task.view.engine.drop(third)
    second.tokens, second.finish = np.arange(3), "stop"  # an episode that has ended sooner
    task.on_finished(second)
    task.view.engine.drop(second)
    task.end()
    kept = {key.sample: len(draft.tokens) for key, draft in task.drafts.items()}
    assert kept == {0: 9, 1: 3, 2: 5} and task.view.record.drafted_tokens == 5 + 5
    task.finish(ALONE)
    assert store.get(third.id).is_finished and store.get(third.id).version == 3
    assert store.get(second.id).is_finished and store.get(second.id).version == 3


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
        self.ranks = SimpleNamespace(world_size=2)

    def add(self, rows: list[Row], advantages: np.ndarray) -> Span:
        begin_s = self.clock.perf_counter()
        self.clock.sleep(self.cost.seconds(sum(len(row.tokens) for row in rows)))
        self.done.append(list(zip(rows, advantages.tolist(), strict=True)))
        return Span("gradients", begin_s, self.clock.perf_counter())


def streaming(rewards=(1.0, 0.0, 2.0, 2.0), own=None, **rollout):
    """Two groups of two responses of 10, 20, 30 and 40 tokens, all of this rank and scored."""
    launch = StepBatch(groups_of(0)[:2], 2, 2)
    texts = [np.arange(10 * n) for n in range(1, 5)]
    rows = [
        Row(*of, logprob=-0.1 * of[-1])
        for of in zip(launch.ids, [(1,)] * 4, [50] * 4, texts, strict=True)
    ]
    scored = [list(zip(rows, rewards, strict=False))]
    learner = FakeGradients(Clock())
    for key, value in rollout.items():
        setattr(learner.config.rollout, key, value)
    scoring = SimpleNamespace(take_scored=lambda: scored.pop() if scored else [])
    task = StreamGradients(launch, learner, scoring, lambda scores, lengths: scores)
    task.begin(view_of(own or []))
    return task, learner


def test_gradients_of_complete_groups_come_in_slices():
    task, learner = streaming()
    assert task.rate == pytest.approx(0.5), "two ranks share what is saved"
    while task.rate:
        task.run_slice()
    sizes = [[len(row.tokens) for row, _ in done] for done in learner.done]
    assert sizes == [[40, 10], [30, 20]], "the longest that fit into 50 ms"
    assert [[advantage for _, advantage in done] for done in learner.done] == [
        [0.0, 0.5],
        [0.0, -0.5],
    ]
    task.finish(ALONE)
    use = task.view.record.idle[task.name]
    assert use.seconds == pytest.approx(0.1, abs=1e-3) and use.saved_s == pytest.approx(0.1)
    assert use.expected_s == pytest.approx(0.05) and len(task.view.record.slices) == 2


def test_groups_wait_for_all_rewards_on_this_rank():
    task, _ = streaming(rewards=(1.0, np.nan, 2.0, 0.0))
    assert task.can_begin() and [piece.num_tokens for piece in task._pieces] == [30, 40]
    task, _ = streaming(rewards=(1.0, 0.0, 2.0))  # the last sample is another rank's
    assert task.can_begin() and [piece.num_tokens for piece in task._pieces] == [10, 20]


def test_gradients_skip_equal_rewards_and_yield_to_own_rows():
    task, learner = streaming(dynamic_sampling_max_batches=4)
    assert task.can_begin() and [piece.num_tokens for piece in task._pieces] == [10, 20]
    task, learner = streaming(own=rows_of(0))
    assert task.rate == 0.0
    for num_workers in (0, 1):
        task, learner = streaming(own=rows_of(0))
        task.view.engine = SimpleNamespace(is_waiting=True, is_idle=False)
        task.config.reward.num_workers = num_workers
        assert task.can_begin() == (num_workers > 0), "scoring here would keep the rows waiting"
    task, learner = streaming(free_cache_engine=True)
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


def test_drafter_trains_after_what_saves_time():
    task, fake = training(10.0)
    assert task.rate == pytest.approx(LITTLE_S)
    for _ in range(2):
        task.run_slice()
    assert fake.slices == [0.05, 0.05]
    task.finish(ALONE)
    assert task.view.record.idle[task.name].seconds == pytest.approx(0.02) and len(fake.merged) == 1


def test_drafter_slices_are_short_and_yield_to_own_rows():
    late, _ = training(0.21)
    assert late.rate > 0 and late.next_slice()[0] == pytest.approx(0.01)
    early, _ = training(0.19)
    assert pytest.approx(0.01) == MAX_SHARE * 0.2
    for task in (early, training(10.0, own=rows_of(0))[0], training(10.0, tokens=0)[0]):
        assert task.rate == 0.0
