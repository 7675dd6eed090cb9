"""The learned drafter in a run: its slices, the mean of the ranks' drafters, and its rests."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bubblespec.draft import rest
from bubblespec.draft.learned import LearnedDrafts
from bubblespec.engine.chains import LONGEST, Chains
from bubblespec.engine.engine import Engine
from bubblespec.engine.runner import ModelRunner
from bubblespec.learn.idle_training import IdleTraining
from bubblespec.planner.costs import CostModel
from bubblespec.types import Row, SampleId
from tests.helpers.clocks import Clock
from tests.helpers.drafter_oracle import (
    MAX_LENGTH,
    PARAMS,
    SEED,
    make_drafter,
    make_lessons,
    make_policy,
    make_training,
)


class Gathered:
    """Two ranks in one process, of which this is the first."""

    world_size = 2

    def __init__(self, count: int, flat):
        self.count, self.flat = count, flat

    def gather(self, array):
        return np.array([array, [self.count, *array[1:]]])

    def sum_(self, tensor):
        return tensor + self.flat


def idle_training(drafter, policy, clock=None) -> IdleTraining:
    runner = ModelRunner(policy, 2, MAX_LENGTH, SEED)
    chains = Chains(drafter, runner, PARAMS)
    source = LearnedDrafts(chains, SimpleNamespace(rows=[], runner=runner), CostModel())
    return IdleTraining(make_training(drafter), chains, source, np.zeros(LONGEST), clock or Clock())


def rests_of(
    saved: dict[int, list[tuple[float, float]]], num_steps: int, training: IdleTraining
) -> list[bool]:
    """In which steps the drafter rests, where chains save and rollouts take so many seconds on two
    ranks: by step, else nothing of a second. A step without ranks has plain rollouts alone; only in
    step 84 was the drafter not asked."""

    def both(gathered, own):
        gathered.append(own)
        return np.stack((own, 0 * own))

    rests = []
    for step in range(num_steps):
        gathered = []
        gather = partial(both, gathered)
        training.begin_step(SimpleNamespace(gather=gather))
        assert len(gathered) == (step == 0 or not rests[-1]), (
            "a drafter at rest has nothing to tell"
        )
        rests.append(not training.source.is_enabled)
        by_rank = saved.get(step, [(0.0, 1.0)] * 2)
        if by_rank and not rests[-1]:
            training.source.saved_s, training.source.num_asked = by_rank[0][0], 0
            others = np.array([0.0, step != 84, *by_rank[1]])
            training.merge(
                SimpleNamespace(
                    world_size=2, gather=lambda own, others=others: np.stack((own, others))
                ),
                by_rank[0][1],
            )
            assert training.source.saved_s == training.source.num_asked == 0
    return rests


def test_a_drafter_that_does_not_pay_is_tried_now_and_then():
    """After each trial in vain it rests for longer. It stays awake while chains save a share of
    what the slowest rank takes, and after steps that had no chains for other reasons."""
    policy = make_policy("llama")
    training = idle_training(make_drafter(policy), policy)
    (lesson,) = make_lessons(policy, [(4, 9)])
    training.training.lessons.add(lesson)
    share = 1.01 * rest.LEAST_SAVED
    saved = {
        10: [(0.0, 0.5), (share, 1.0)],
        11: [],  # plain rollouts
        12: [(share, 1.0), (0.0, 0.9)],
        13: [(share, 0.9), (0.0, 1.0)],  # what the faster rank saves saves nothing
        83: [(share, 1.0), (share, 1.0)],
    }
    awake = [step for step, rests in enumerate(rests_of(saved, 150, training)) if not rests]
    assert awake == [0, 10, 11, 12, 13, 23, 43, 83, 84, 85, 95, 115]
    training.take(None, None)
    assert not training.source.is_enabled and training.new_lessons == []


def test_at_rest_no_rows_are_followed_and_no_memory_is_held():
    policy = make_policy("llama")
    training = idle_training(make_drafter(policy), policy)
    source, runner = training.source, training.source.engine.runner
    engine, rows = Engine(runner), [Row(SampleId(5, 0, n), (1, 2, 3), 9) for n in range(2)]
    source.follow(True)
    engine.run(rows, PARAMS)
    assert runner.chains is training.chains and training.chains._hidden is not None
    source.follow(False)
    assert (
        runner.chains is None and training.chains._hidden is None and not training.chains.cache.keys
    )
    again = [Row(SampleId(5, 0, n), (1, 2, 3), 9) for n in range(2)]
    engine.reset()
    engine.run(again, PARAMS)
    assert training.chains._hidden is None
    assert [row.tokens.tolist() for row in again] == [row.tokens.tolist() for row in rows]
    source.follow(True)
    engine.reset()
    engine.run([Row(SampleId(6, 0, 0), (1, 2, 3), 9)], PARAMS)
    assert training.chains._hidden is not None


@pytest.mark.parametrize("own, other", [(3, 1), (0, 2), (4, 0), (0, 0)])
def test_drafters_are_merged_by_the_updates_that_ranks_have_made(own, other):
    policy = make_policy("llama")
    training = idle_training(make_drafter(policy), policy)
    params = training.training.params
    before = torch.cat([p.detach().flatten() for p in params])
    torch.manual_seed(7)
    theirs = torch.randn_like(before)
    training._num_updates = own
    assert (
        training.merge(Gathered(other, theirs * (other / max(own + other, 1))), 1.0) == own + other
    )
    after = torch.cat([p.detach().flatten() for p in params])
    wanted = before if own + other == 0 else (own * before + other * theirs) / (own + other)
    assert torch.allclose(after, wanted, rtol=1e-12, atol=0) and training._num_updates == 0


def test_slices_are_lessons_that_fit_and_eight_make_an_update():
    policy = make_policy("llama")
    training = idle_training(make_drafter(policy), policy)
    assert training.slice_tokens() == 0 and training.run_slice(1.0) == 0.0
    for lesson in make_lessons(policy, [(2, 4), (2, 30)] * 6):
        training.training.lessons.add(lesson)
    assert training.slice_tokens() == 5
    for number in range(1, 17):
        assert training.run_slice(1.0) > 0
        assert training.training.num_updates == number // 8
    training.token_s = 1.0
    learnt, backward = [], training.training.backward
    training.training.backward = lambda lessons, share: (
        learnt.extend(lessons) or backward(lessons, share)
    )
    for _ in range(6):
        training.token_s = 1.0
        training.run_slice(5.5)
    assert learnt and all(len(lesson.hidden) == 5 for lesson in learnt)
    training.token_s = 1.0
    assert training.run_slice(4.5) == 0.0
