"""Dynamic sampling on hand-made rewards: which groups are replaced, by which, and what goes with
them."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from bubblespec.config import Config, ModelConfig, RolloutConfig
from bubblespec.data.schedule import PromptSet, StepSchedule
from bubblespec.draft.store import TextStore
from bubblespec.planner.chooser import DRAFTS, Chooser
from bubblespec.planner.stats import RunStats
from bubblespec.records import Samples, Span, StepRecord
from bubblespec.rollout.sampler import Sampler
from bubblespec.types import Group, Prompt, StepBatch
from tests.helpers.rows import record_of, samples_of

WANTED = 6


def reward_of(prompt_id: int, sample: int, useful_every: int) -> float:
    """Groups of prompts with a multiple of `useful_every` as id differ, the others do not."""
    return float(sample == 1) if prompt_id % useful_every == 0 else 1.0


def sample_with(
    monkeypatch, useful_every: int, *, num_prompts: int = 40, step: int = 3, max_batches: int = 4
) -> tuple[StepRecord, list[list[int]]]:
    shape = {"num_prompts_per_step": WANTED, "num_generations": 2}
    rollout = RolloutConfig(**shape, dynamic_sampling_max_batches=max_batches)
    prompts = [Prompt(prompt_id, str(prompt_id), (1, 2), {}) for prompt_id in range(num_prompts)]
    schedule, batches = StepSchedule(PromptSet(prompts, 0), 0, WANTED, 2), []

    def generate(sampler, launch: StepBatch, step, used):
        number, prompt_ids = len(batches), [group.prompt.prompt_id for group in launch.groups]
        batches.append(prompt_ids)
        assert [group.prompt.prompt_id for group in used] == list(itertools.chain(*batches))
        rewards = np.array(
            [[reward_of(prompt_id, j, useful_every) for j in range(2)] for prompt_id in prompt_ids]
        )
        tokens = [np.array([prompt_id, j], np.int32) for prompt_id in prompt_ids for j in range(2)]
        samples = samples_of(launch.groups, tokens, rewards=rewards.reshape(-1, 1))
        fields = {"step": step, "owners": np.repeat(prompt_ids, 2)}
        fields |= {"stages": [Span("gen", float(number), number + 1.0)]}
        return record_of(samples, rewards, drafts=dict.fromkeys(samples.ids[::3]), **fields)

    monkeypatch.setattr(Sampler, "_sample_groups", generate)
    parts = {"stats": RunStats(), "store": TextStore(0), "history": TextStore(0)}
    parts |= {"schedule": schedule, "config": Config(model=ModelConfig(path=""), rollout=rollout)}
    record = Sampler(**dict.fromkeys(Sampler.__dataclass_fields__) | parts).sample(step)
    had_their_turn = schedule.state_dict()["uids"].tolist()
    assert had_their_turn == list(itertools.chain(*batches))
    return record, batches


def uids_of(samples: Samples) -> list[int]:
    return [group.prompt.prompt_id for group in samples.groups]


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("useful_every", [1, 2, 3])
def test_useless_groups_are_replaced_by_first_useful_groups(monkeypatch, useful_every, step):
    record, batches = sample_with(monkeypatch, useful_every, step=step)
    generated = list(itertools.chain(*batches))
    assert len(set(generated)) == len(generated), "a prompt's noise keys would be used twice"
    useful = [prompt_id for prompt_id in generated if prompt_id % useful_every == 0]
    assert uids_of(record.samples)[: len(useful)] == useful[:WANTED] or len(useful) < WANTED
    assert uids_of(record.generated) == generated
    assert record.owners.tolist() == np.repeat(generated, 2).tolist()
    assert record.batch_sizes == [len(batch) for batch in batches]
    assert len(record.rollouts) == len(record.stages) == len(batches)
    assert len(record.drafts) == sum(-(-2 * len(batch) // 3) for batch in batches)
    # As many are drawn as will fill the gap at the rate so far.
    seen = []
    for batch, following in itertools.pairwise(batches):
        seen += batch
        num_useful = sum(prompt_id % useful_every == 0 for prompt_id in seen)
        needed = math.ceil((WANTED - num_useful) * len(seen) / max(num_useful, 1e-9))
        assert len(following) == min(WANTED, needed)
    assert len(useful) >= WANTED or len(batches) == 4
    # Everything of a group goes with it.
    generated = (record.generated, record.all_rewards)
    for samples, rewards in ((record.samples, record.rewards), generated):
        for index, prompt_id in enumerate(np.repeat(uids_of(samples), 2).tolist()):
            group, number = divmod(index, 2)
            assert samples.tokens[index].tolist() == [prompt_id, number]
            assert rewards[group, number] == samples.rewards[index, 0]
            assert rewards[group, number] == reward_of(prompt_id, number, useful_every)


def test_rollouts_of_replacements_do_without_the_same_parts(monkeypatch):
    taken = []

    def prepare(sampler, launch, step, store, without):
        taken.append(without)
        return SimpleNamespace(table=SimpleNamespace(rows=None))

    monkeypatch.setattr(Sampler, "prepare", prepare)
    stats = RunStats()
    stats.chooser = Chooser([DRAFTS])
    stats.chooser._off = {3: frozenset([DRAFTS])}
    parts = {"stats": stats, "proposer": object(), "mechanisms": []}
    sampler = Sampler(**dict.fromkeys(Sampler.__dataclass_fields__) | parts)
    launch = StepBatch([Group(Prompt(0, "", (1,), {}), 0)], 1, 2)
    for used in (launch.groups, 2 * launch.groups):
        sampler.plan(launch, 3, used)
    assert taken == [{DRAFTS}, {DRAFTS}]


@pytest.mark.parametrize("max_batches", [1, 2, 3])
def test_equal_groups_stay_without_replacements(monkeypatch, max_batches):
    record, batches = sample_with(monkeypatch, useful_every=1000, max_batches=max_batches)
    assert [len(batch) for batch in batches] == [WANTED] * max_batches
    assert uids_of(record.samples) == batches[0], "none is useful: the first are as good as any"


@pytest.mark.parametrize("step", range(3))
def test_groups_keep_order_when_data_runs_out(monkeypatch, step):
    options = {"num_prompts": 10, "step": step, "max_batches": 9}
    record, batches = sample_with(monkeypatch, useful_every=7, **options)
    generated, prompt_ids = list(itertools.chain(*batches)), uids_of(record.samples)
    assert sorted(generated) == list(range(10))
    assert len(prompt_ids) == WANTED and {0, 7} <= set(prompt_ids), (
        "both useful ones, and four others"
    )
    assert prompt_ids == [prompt_id for prompt_id in generated if prompt_id in prompt_ids]


def test_samples_of_groups_and_joined_are_the_same_samples():
    rng = np.random.default_rng(0)
    groups = [
        Group(Prompt(prompt_id, "p", (prompt_id,), {}), 3 * prompt_id) for prompt_id in range(4)
    ]
    arrays = [[rng.normal(size=n).astype(np.float32) for n in range(1, 13)] for _ in range(2)]
    names = ("tokens", "logprob", "is_truncated", "rewards")
    columns = (*arrays, rng.random(12) < 0.5, rng.normal(size=(12, 2)))
    whole = Samples(groups, 3, *columns)
    again = whole.of_groups([0]) + whole.of_groups([1, 2, 3])
    assert again.groups == groups and len(again) == 12 and again.ids == whole.ids
    for name, column in zip(names, columns, strict=True):
        pairs = zip(column, getattr(again, name), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs), name
    swapped = whole.of_groups([2, 0])
    assert swapped.ids == whole.ids[6:9] + whole.ids[:3]
    assert uids_of(swapped) == [2, 0]
    np.testing.assert_array_equal(swapped.rewards, whole.rewards[[6, 7, 8, 0, 1, 2]])
