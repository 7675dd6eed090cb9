"""Groups that lack a reward are left out, by all ranks alike (what is trained on without them:
test_reference_step.py); and a step of which nothing is left ends the run with its state saved."""

import json
import os

import numpy as np
import pytest
import torch

from bubblespec.checkpoint import find_damage
from bubblespec.distributed.ranks import Ranks
from bubblespec.errors import RewardsFailed
from bubblespec.learn.microbatch import make_minibatches
from bubblespec.records import StepRecord
from bubblespec.rollout.sampler import num_lacking, select_trained
from bubblespec.trainer import Trainer
from bubblespec.types import Group, Prompt
from tests.helpers import rewards as functions
from tests.helpers.rows import record_of, samples_of
from tests.helpers.runs import digests, read, same_weights, train_here, weights
from tests.helpers.threads import train_on_threads
from tests.test_dynamic_sampling import uids_of
from tests.test_update import make_config, make_samples

GAPS = "reward.functions=[tests.helpers.rewards.with_gaps]"

BULK = ["model.dtype=float64", "data.size=40", "rollout.num_prompts_per_step=6"]
BULK += ["rollout.num_generations=3", "rollout.max_completion_length=24", "reward.num_workers=0"]
BULK += ["run.max_steps=4", "run.save_steps=0", "run.eval_steps=2", "eval.num_prompts=6"]
BULK += ["eval.num_generations=2", GAPS]
RULES = {
    "plain": [],
    "dynamic sampling": ["rollout.dynamic_sampling_max_batches=3"],
    "tail batching": ["tail_batching.enabled=true", "tail_batching.over_sampling_ratio=1.5"],
}


@pytest.mark.parametrize("rule", RULES)
def test_ranks_leave_out_the_same_prompts(tmp_path, capfd, rule):
    options, folders = [*BULK, *RULES[rule]], [tmp_path / "one", tmp_path / "two"]
    for ranks, folder in enumerate(folders, start=1):
        train_on_threads(ranks, *options, f"run.output_dir={folder}")
        said = capfd.readouterr().err
        assert said.count("prompts have responses without a reward") == 1
    one, two = map(read, folders)
    assert digests(folders[0]) == digests(folders[1])
    names = ("reward", "eval/reward", "reward/left_out", "rewards/with_gaps/missing")
    for ours, theirs in zip(one, two, strict=True):
        for name in ours.keys() & theirs.keys() & set(names):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-12), name
        assert [name in ours for name in names] == [name in theirs for name in names]
    assert any("reward/left_out" in line for line in one)
    assert any("eval/rewards/with_gaps/missing" in line for line in one)
    a, b = (weights(folder) for folder in folders)
    assert all(torch.allclose(a[name], b[name], rtol=0, atol=1e-9) for name in a)


def made(rewards: list[list[float]], num_wanted: int) -> StepRecord:
    """A step whose groups, of uids 0, 1, ..., got these rewards."""
    groups = [
        Group(Prompt(prompt_id, str(prompt_id), (1, 2), {}), 0) for prompt_id in range(len(rewards))
    ]
    size = len(rewards[0])
    tokens = [np.array([1], np.int32)] * (size * len(groups))
    samples = samples_of(groups, tokens, rewards=np.reshape(rewards, (-1, 1)))
    return record_of(samples, np.array(rewards), batch_sizes=[num_wanted])


NAN = np.nan


def test_groups_without_rewards_are_replaced_or_left_out():
    rewards = [[0.0, 1.0], [NAN, NAN], [1.0, 1.0], [NAN, 1.0], [1.0, 0.0]]
    assert num_lacking(made(rewards, 2), 3) == 0
    # Two of five are useful: as many as fill the gap at that rate.
    assert num_lacking(made(rewards, 3), 3) == 3
    assert uids_of(select_trained(made(rewards, 2)).samples) == [0, 4]
    assert uids_of(select_trained(made(rewards, 5)).samples) == [0, 2, 4], "none can be filled up"
    assert num_lacking(made([[NAN, NAN]] * 4, 4), 3) == 4
    with pytest.raises(RewardsFailed, match="no function returned a number for any of"):
        select_trained(made([[NAN, 0.0]] * 4, 4))


def test_fewer_groups_than_minibatches_make_fewer_updates():
    samples = make_samples()
    few = samples.of_groups([1, 2])
    parts = {"config": make_config(num_minibatches=4), "ranks": Ranks(torch.device("cpu"))}
    minibatches, *_, factors = make_minibatches(few, np.ones(len(few), bool), **parts)
    orders = [sorted(i for batch in batches for i in batch.order) for batches in minibatches]
    size = few.num_generations
    assert orders == [list(range(size)), list(range(size, 2 * size))] and len(factors) == 2


# Steps of which nothing is left

ENDING = [*BULK, "reward.functions=[tests.test_left_out.ending]", "run.max_steps=3"]
ENDING += ["run.eval_steps=0", "eval.num_prompts=0"]


def fail_from(monkeypatch, step: int) -> None:
    sample = Trainer.sample

    def counted(trainer, number):
        os.environ["FAILS"] = str(int(number >= step))
        return sample(trainer, number)

    monkeypatch.setenv("FAILS", "0")
    monkeypatch.setattr(Trainer, "sample", counted)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAILS", "0")
        train_here(folder, *ENDING)
    return folder


@pytest.mark.parametrize(
    "how, on_error, says",
    [
        ("none", "0", "in step 3 no function returned a number"),
        ("raise", "0", "failed for all"),
        ("raise", "null", "raised ValueError"),
    ],
)
def test_failing_rewards_end_run_after_save(whole, tmp_path, monkeypatch, how, on_error, says):
    options = [*ENDING, f"reward.reward_on_error={on_error}"]
    monkeypatch.setenv("HOW", how)
    fail_from(monkeypatch, 2)
    with pytest.raises(RewardsFailed, match=says):
        train_here(tmp_path, *options)
    assert [line["step"] for line in read(tmp_path) if "reward" in line] == [1, 2]
    assert find_damage(str(tmp_path / "checkpoint-2")) is None
    monkeypatch.undo()
    monkeypatch.setenv("FAILS", "0")
    train_here(tmp_path, *options)
    assert digests(tmp_path) == digests(whole)
    assert same_weights(weights(tmp_path, 3), weights(whole, 3))


def ending(completion_ids, **columns):
    if os.environ["FAILS"] == "0":
        return functions.remainder(completion_ids)
    if os.environ["HOW"] == "raise":
        raise ValueError("no more")
    return [None] * len(completion_ids)


def test_metrics_are_json_without_nan(tmp_path):
    train_here(tmp_path, *BULK, "run.max_steps=2", "run.trace=true")
    for name in ("metrics.jsonl", "samples.jsonl"):
        for line in (tmp_path / name).read_text().splitlines():
            json.loads(line, parse_constant=lambda text: pytest.fail(text))
    lines = [line for line in read(tmp_path) if "reward" in line]
    assert all(line["reward"] is not None and line["reward_std"] is not None for line in lines)
