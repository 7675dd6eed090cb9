"""A step's numbers against hand-worked values."""

import numpy as np
import pytest
import torch

from bubblespec.collect import Collected
from bubblespec.data import Prompt
from bubblespec.distributed import Ranks
from bubblespec.report import peak_memory_gb, rollout_metrics, timing_metrics
from bubblespec.rollout import Samples, digest
from bubblespec.schedule.run_ahead import RolloutStats

LENGTHS = [1, 2, 4, 9]


def make_samples(rewards: list[list[float]]) -> Samples:
    prompts = [Prompt(5, "p", (1, 2, 3), {}), Prompt(6, "q", (1,), {})]
    tokens = [np.arange(n, dtype=np.int32) for n in LENGTHS]
    return Samples(prompts, 2, tokens, tokens, tokens, np.array([False, False, False, True]), np.array(rewards))


def collected(samples: Samples, rewards=((1.0, 1.0), (1.0, 1.0)), num_kept: int = 2, num_batches: int = 1) -> Collected:
    kept = samples if num_batches == 1 else samples.of_prompts(list(range(num_kept)))
    return Collected(kept, np.array(rewards)[:num_kept], samples, np.array(rewards), [1] * num_batches, RolloutStats(), [])


class TwoRanks:
    """Two ranks, of which the other one reports `other`."""

    world_size = 2

    def __init__(self, other: list[float]):
        self.other = other

    def gather(self, array: np.ndarray) -> np.ndarray:
        return np.stack([array, self.other])


def test_rollout_metrics_of_a_hand_worked_step():
    samples = make_samples([[1.0, np.nan], [0.0, 0.5], [0.0, np.nan], [0.0, 1.0]])
    found = rollout_metrics(collected(samples, [[3.0, 1.0], [0.5, 0.5]]), ["my.match", "my.form"])
    assert found == {
        "reward": 1.25,
        "reward_std": pytest.approx(2**0.5 / 2),  # sample deviations of the groups: sqrt(2) and 0
        "frac_reward_zero_std": 0.5,
        "completions/mean_length": 4.0,
        "completions/median_length": 3.0,
        "completions/p99_length": pytest.approx(4 + 0.97 * 5),  # position 0.99 x 3 = 2.97 of the sorted lengths
        "completions/max_length": 9,
        "completions/clipped_ratio": 0.25,
        "rollout/digest": digest(samples),
        "rewards/match/mean": 0.25,
        "rewards/form/mean": 0.75,
    }


def test_replaced_groups_are_counted_and_reported_with_the_others():
    samples = make_samples([[1.0]] * 4)
    found = rollout_metrics(collected(samples, [[3.0, 1.0], [0.5, 0.5]], num_kept=1, num_batches=2), ["my.match"])
    assert found["dynamic_sampling/num_batches"] == 2 and found["dynamic_sampling/num_replaced"] == 1
    assert found["reward"] == 1.25 and found["rollout/digest"] == digest(samples)


def test_function_that_never_applies_has_no_mean():
    found = rollout_metrics(collected(make_samples([[1.0, np.nan]] * 4)), ["my.match", "my.form"])
    assert found["rewards/match/mean"] == 1.0 and "rewards/form/mean" not in found


def test_functions_of_one_name_are_told_apart():
    found = rollout_metrics(collected(make_samples([[1.0, 0.25, 0.5]] * 4)), ["a.f", "b.f", "b.g"])
    assert {k: v for k, v in found.items() if k.startswith("rewards/")} == {
        "rewards/a.f/mean": 1.0,
        "rewards/b.f/mean": 0.25,
        "rewards/g/mean": 0.5,
    }


def stages(*seconds: float) -> list:
    """Generation, waiting, reward and training, the first three in two batches of a quarter and three quarters."""
    parts = [0.25 * s for s in seconds[:3]] + [0.75 * s for s in seconds[:3]] + [seconds[3]]
    ends = 100.0 + np.cumsum(parts)
    kinds = ("gen", "wait", "reward") * 2 + ("train",)
    return [(kind, float(end - part), float(end)) for kind, part, end in zip(kinds, parts, ends, strict=True)]


def test_timing_of_one_rank():
    samples = make_samples([[0.0]] * 4)
    found = timing_metrics(Ranks(torch.device("cpu")), stages(4.0, 1.0, 0.5, 2.5), 0.0, 0.25, samples)
    assert found == {
        "timing_s/gen": 4.0,
        "timing_s/bubble": 1.0,
        "timing_s/reward": 0.5,
        "timing_s/train": 2.25,
        "timing_s/sync": 0.25,
        "timing_s/step": 8.0,
        "bubble/ratio": 0.2,
        "bubble/slowest_rank": 0,
        "perf/throughput": (16 + 8) / 8,  # 1 + 2 + 4 + 9 response tokens, and prompts of 3 and 1 tokens twice each
        "perf/total_num_tokens": 24,
    }


def test_timing_of_two_ranks():
    samples = make_samples([[0.0]] * 4)
    found = timing_metrics(TwoRanks([6.0, 0.0, 0.5, 1.0, 0.5]), stages(3.0, 3.0, 0.5, 1.5), 1.0, 0.5, samples)
    assert (found["timing_s/gen"], found["timing_s/gen/rank_0"], found["timing_s/gen/rank_1"]) == (4.0, 2.0, 6.0)
    assert (found["timing_s/bubble/rank_0"], found["timing_s/bubble/rank_1"]) == (4.0, 0.0)
    assert found["bubble/ratio"] == pytest.approx(4 / 12) and found["bubble/slowest_rank"] == 1
    assert found["timing_s/train"] == 1.0 and found["perf/throughput"] == 24 / 8 / 2


def test_peak_memory_sees_an_allocation():
    ranks = Ranks(torch.device("cpu"))
    before = peak_memory_gb(ranks)
    large = np.ones(int((before + 0.2) * 1e9) // 8)
    assert 0.01 < before < peak_memory_gb(ranks) and len(large)
