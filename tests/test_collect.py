"""Dynamic sampling: which groups are replaced by which, on hand-made rewards and in real runs."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from bubblespec.rollout.collect import collect

from bubblespec.config import Config, ModelConfig, RolloutConfig
from bubblespec.data.prompts import PromptSet
from bubblespec.records import Prompt, Samples
from bubblespec.rollout.loop import RolloutStats
from bubblespec.rollout.placement import collect as module
from tests.runs import ALWAYS_DRAFT, digests, read, run, same_weights, weights

WANTED = 6


def reward_of(uid: int, sample: int, useful_every: int) -> float:
    """Groups of prompts whose uid is a multiple of `useful_every` differ, the others do not."""
    return float(sample == 1) if uid % useful_every == 0 else 1.0


def collect_with(monkeypatch, useful_every: int, num_prompts: int = 40, step: int = 3, max_batches: int = 4):
    """A step over prompts with uids 0, 1, ...: what was collected, and the uids of each batch generated."""
    prompts = PromptSet([Prompt(uid, str(uid), (1, 2), {}) for uid in range(num_prompts)], 0)
    rollout = RolloutConfig(
        num_prompts_per_step=WANTED, num_generations=2, dynamic_sampling=True, dynamic_sampling_max_batches=max_batches
    )
    trainer = SimpleNamespace(
        config=Config(model=ModelConfig(path=""), rollout=rollout),
        train_prompts=prompts,
        batch=lambda step: prompts.batch(0, step, WANTED),
    )
    batches = []

    def generate(trainer, batch, step, stages):
        batches.append([prompt.uid for prompt in batch])
        rewards = np.array([[reward_of(p.uid, j, useful_every) for j in range(2)] for p in batch])
        tokens = [np.array([p.uid, j], np.int32) for p in batch for j in range(2)]
        truncated = np.array([p.uid % 5 == 0 for p in batch for _ in range(2)])
        stages.append(("gen", 0.0, 1.0))
        return Samples(batch, 2, tokens, tokens, tokens, truncated, rewards.reshape(-1, 1)), rewards, RolloutStats(own_forwards=7)

    monkeypatch.setattr(module, "_collect_batch", generate)
    return collect(trainer, step), batches


def test_useless_groups_are_replaced_by_the_first_useful_ones(monkeypatch):
    found, batches = collect_with(monkeypatch, useful_every=2)
    generated = [uid for batch in batches for uid in batch]
    useful = [uid for uid in generated if uid % 2 == 0]
    assert len(batches) > 1 and len(set(generated)) == len(generated), "a prompt's noise keys would be used twice"
    assert [p.uid for p in found.samples.prompts] == useful[:WANTED]
    assert [p.uid for p in found.generated.prompts] == generated
    assert found.num_batches == len(batches) and found.stats.own_forwards == 7 * len(batches) == 7 * len(found.stages)
    # Everything of a group goes with it.
    for samples, rewards in ((found.samples, found.rewards), (found.generated, found.all_rewards)):
        for n, prompt in enumerate(samples.prompts):
            for j in range(2):
                assert samples.tokens[2 * n + j].tolist() == [prompt.uid, j]
                assert rewards[n, j] == samples.rewards[2 * n + j, 0] == reward_of(prompt.uid, j, 2)
                assert samples.is_truncated[2 * n + j] == (prompt.uid % 5 == 0)


@pytest.mark.parametrize("useful_every", [2, 3])
@pytest.mark.parametrize("step", range(4))
def test_as_many_prompts_are_drawn_as_will_fill_the_gap(monkeypatch, useful_every, step):
    _, batches = collect_with(monkeypatch, useful_every, step=step)
    seen, useful = [], 0
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        seen += batch
        useful = sum(uid % useful_every == 0 for uid in seen)
        if following is None:
            assert useful >= WANTED or len(batches) == 4
        else:
            assert len(following) == min(WANTED, math.ceil((WANTED - useful) * len(seen) / useful) if useful else WANTED)


def test_nothing_more_is_generated_where_all_groups_are_useful(monkeypatch):
    found, batches = collect_with(monkeypatch, useful_every=1)
    assert len(batches) == 1 == found.num_batches and len(found.generated) == len(found.samples) == 2 * WANTED


@pytest.mark.parametrize("max_batches", [1, 2, 3])
def test_what_cannot_be_replaced_stays(monkeypatch, max_batches):
    found, batches = collect_with(monkeypatch, useful_every=1000, max_batches=max_batches)
    assert len(batches) == max_batches and len(found.generated.prompts) == max_batches * WANTED
    assert [p.uid for p in found.samples.prompts] == batches[0], "none is useful: the first batch is as good as any"


def test_data_may_run_out(monkeypatch):
    found, batches = collect_with(monkeypatch, useful_every=7, num_prompts=10, step=0, max_batches=9)
    assert sorted(uid for batch in batches for uid in batch) == list(range(10))
    uids = [p.uid for p in found.samples.prompts]
    assert len(uids) == WANTED and {0, 7} <= set(uids), "both useful ones, and four others"


def test_groups_that_are_kept_stay_in_their_order(monkeypatch):
    """The useful ones are not put before the others, where there are too few of them."""
    for step in range(5):
        found, batches = collect_with(monkeypatch, useful_every=7, num_prompts=10, step=step, max_batches=9)
        uids = [p.uid for p in found.samples.prompts]
        assert uids == [uid for batch in batches for uid in batch if uid in uids]


def test_samples_of_prompts_and_joined_are_the_same_samples():
    rng = np.random.default_rng(0)
    prompts = [Prompt(uid, "p", (uid,), {}) for uid in range(4)]
    arrays = [[rng.normal(size=n).astype(np.float32) for n in range(1, 13)] for _ in range(3)]
    whole = Samples(prompts, 3, *arrays, rng.random(12) < 0.5, rng.normal(size=(12, 2)))
    again = whole.of_prompts([0]) + whole.of_prompts([1, 2, 3])
    assert again.prompts == prompts and len(again) == 12
    for name in ("tokens", "logprob", "full_logprob", "is_truncated", "rewards"):
        assert all(np.array_equal(a, b) for a, b in zip(getattr(whole, name), getattr(again, name), strict=True)), name
    swapped = whole.of_prompts([2, 0])
    assert [p.uid for p in swapped.prompts] == [2, 0] and np.array_equal(swapped.rewards, whole.rewards[[6, 7, 8, 0, 1, 2]])


DYNAMIC = ("rollout.dynamic_sampling=true", "rollout.dynamic_sampling_max_batches=3", "run.max_steps=3", "run.save_steps=0")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dynamic")
    run(folder, 2, *DYNAMIC, "speculative.method=none")
    return folder


def test_dynamic_sampling_replaces_groups_in_a_run(plain):
    lines = read(plain)
    assert any(line["dynamic_sampling/num_batches"] > 1 for line in lines)
    for line in lines:
        assert 1 <= line["dynamic_sampling/num_batches"] <= 3
        assert (line["dynamic_sampling/num_replaced"] > 0) == (line["dynamic_sampling/num_batches"] > 1)
        if line["dynamic_sampling/num_batches"] > 1:
            assert line["frac_reward_zero_std"] > 0, "over all groups, the replaced ones included"


@pytest.mark.parametrize("ranks, method", [(2, "bubble+suffix"), (1, "suffix"), (4, "bubble")])
def test_ranks_and_speculation_leave_dynamic_sampling_unchanged(plain, tmp_path, ranks, method):
    run(tmp_path, ranks, *DYNAMIC, f"speculative.method={method}", ALWAYS_DRAFT)
    assert digests(tmp_path) == digests(plain)
    for a, b in zip(read(tmp_path), read(plain), strict=True):
        assert a["dynamic_sampling/num_batches"] == b["dynamic_sampling/num_batches"]
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-8)
    if ranks == 2:
        assert same_weights(weights(tmp_path, 3), weights(plain, 3))
        assert all(line["bubble/store_tokens"] >= 0 and line["progress/ticks"] > 0 for line in read(tmp_path)[:-1])
