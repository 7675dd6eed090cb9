"""A step's numbers against hand-worked values."""

import json
import resource
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bubblespec.distributed.ranks import Ranks
from bubblespec.metrics import over_ranks
from bubblespec.records import Acceptance, IdleUse, RolloutRecord, Samples, Span, StepRecord, digest
from bubblespec.telemetry import report
from bubblespec.telemetry.report import evaluation_metrics, rank_metrics, rollout_metrics
from bubblespec.types import Group, Prompt
from tests.helpers.rows import record_of, samples_of

LENGTHS = [1, 2, 4, 9]


def make_samples(rewards: list[list[float]]) -> Samples:
    groups = [Group(Prompt(5, "p", (1, 2, 3), {}), 0), Group(Prompt(6, "q", (1,), {}), 2)]
    tokens = [np.arange(n, dtype=np.int32) for n in LENGTHS]
    is_truncated = np.array([False, False, False, True])
    return samples_of(groups, tokens, is_truncated=is_truncated, rewards=np.array(rewards))


def record(
    samples: Samples, rewards=((1.0, 1.0), (1.0, 1.0)), num_chosen: int = 2, waits=(), **fields
) -> StepRecord:
    rewards, chosen = np.array(rewards), samples.of_groups(list(range(num_chosen)))
    fields |= {"generated": samples, "rollouts": [RolloutRecord(waits=list(waits))]}
    fields["advantages"] = np.array([-0.5, 0.25, 2.0, -1.5])[: num_chosen * 2]
    return record_of(chosen, rewards[:num_chosen], all_rewards=rewards, **fields)


class TwoRanks:
    """This rank and another one, of which a dictionary has the metrics."""

    world_size, device, is_main = 2, torch.device("cpu"), True

    def __init__(self, other: dict):
        self.other = other

    def gather_text(self, text: str) -> list[str]:
        return [text, json.dumps(self.other)]


def test_rollout_metrics_equal_hand_worked_values():
    samples = make_samples([[1.0, np.nan], [0.0, 0.5], [0.0, np.nan], [0.0, 1.0]])
    samples.logprob[0], samples.logprob[1] = np.array([-4.0]), np.array([-2.5, -1.5])
    found = rollout_metrics(record(samples, [[3.0, 1.0], [0.5, 0.5]]), ["my.match", "my.form"])
    assert found == {
        "reward": 1.25,
        "reward_std": pytest.approx(2**0.5 / 2),  # sample deviations of the groups: sqrt(2) and 0
        "frac_reward_zero_std": 0.5,
        "entropy": 8.0 / 16,  # over tokens, those of the group of equal rewards included
        "completions/mean_length": 4.0,
        "completions/median_length": 3.0,
        # Position 0.99 x 3 = 2.97 of the sorted lengths.
        "completions/p99_length": pytest.approx(4 + 0.97 * 5),
        "completions/min_length": 1,
        "completions/max_length": 9,
        "completions/clipped_ratio": 0.25,
        # Without the last sample, which was cut off.
        "completions/mean_terminated_length": pytest.approx(7 / 3),
        "completions/min_terminated_length": 1,
        "completions/max_terminated_length": 4,
        "prompt_length/mean": 2.0,
        "prompt_length/min": 1,
        "prompt_length/max": 3,
        "critic/rewards/min": 0.5,
        "critic/rewards/max": 3.0,
        "critic/advantages/min": -1.5,
        "critic/advantages/max": 2.0,
        "rollout/digest": digest(samples),
        "rewards/match/mean": 0.25,
        "rewards/match/std": 0.5,  # sqrt(0.75 / 3)
        "rewards/form/mean": 0.75,
        "rewards/form/std": pytest.approx(0.125**0.5),
        "rewards/form/missing": 2,
    }


def test_metrics_are_of_sampled_tokens():
    samples = make_samples([[1.0]] * 4)
    samples.logprob[3] = np.array([-2.0, *[np.nan] * 6, -1.0, -1.0])
    found = rollout_metrics(record(samples), ["my.match"])
    assert found["entropy"] == 4 / 10
    assert found["completions/mean_length"] == 2.5 and found["completions/max_length"] == 4
    assert found["completions/median_length"] == 2.5


def test_evaluation_metrics_cover_both_ranks():
    samples = make_samples([[1.0]] * 4)
    rollout = RolloutRecord(acceptance=Acceptance(draft_tokens=10, accepted_tokens=9))
    wanted = {"eval/digest": digest(samples), "eval/forwards": 7, "timing_s/eval": 2.5}
    ranks = TwoRanks({"eval/forwards": 7, "eval/spec_accept_rate": (15, 30)})
    parts = samples, rollout, 2.5
    assert len(evaluation_metrics(*parts, has_drafts=False)) == len(wanted)
    wanted["eval/spec_accept_rate"] = 24 / 40
    found = evaluation_metrics(*parts, has_drafts=True)
    assert over_ranks(found, ranks.gather_text) == wanted


def test_speculation_of_two_ranks():
    """A rank may lack a source; what a whole is nothing of is 0."""
    first = Acceptance(2, 8, 10, 6, 5, {"own": [10, 6]}, np.arange(15))
    second = Acceptance(1, 1, 5, 0, 3, {"own": [1, 0], "mine": [4, 0]}, np.arange(15))
    step = record(make_samples([[0.0]] * 4), stages=stages(1.0, 1.0, 1.0, 1.0))
    step.rollouts = [RolloutRecord(acceptance=of) for of in (first, second)]
    other = {"rollout/spec_accept_length": (11, 3), "drafts/late/accept_rate": (0, 0)}
    other["rollout/spec_accepted_lengths"] = [1] * 15
    ranks = TwoRanks(other)
    found = report.speculation_metrics(ranks, step, has_store=False)
    found = over_ranks(found, ranks.gather_text)
    assert found["rollout/spec_accept_length"] == 20 / 6
    assert found["rollout/spec_accept_rate"] == 6 / 15 and found["rollout/spec_coverage"] == 8 / 16
    assert found["rollout/spec_wasted_tokens"] == 9 and "bubble/drafted_tokens" not in found
    assert found["rollout/spec_accepted_lengths"] == [2 * n + 1 for n in range(15)]
    rates = {key: value for key, value in found.items() if key.startswith("drafts/")}
    wanted = {"drafts/mine/accept_rate": 0.0, "drafts/mine/tokens": 4}
    wanted |= {"drafts/own/accept_rate": 6 / 11, "drafts/own/tokens": 11}
    assert rates == wanted | {"drafts/late/accept_rate": 0.0}


def test_replaced_groups_and_equal_function_names():
    samples = make_samples([[1.0, 0.25, 0.5]] * 4)
    step = record(samples, [[3.0, 1.0], [0.5, 0.5]], num_chosen=1, batch_sizes=[1, 1])
    found = rollout_metrics(step, ["a.f", "b.f", "b.g"], is_dynamic=True)
    counts = [found[f"dynamic_sampling/{name}"] for name in ("num_batches", "num_replaced")]
    assert counts == [2, 1]
    assert found["reward"] == 1.25 and found["rollout/digest"] == digest(samples)
    means = {k: v for k, v in found.items() if k.startswith("rewards/") and k.endswith("/mean")}
    assert means == {"rewards/a.f/mean": 1.0, "rewards/b.f/mean": 0.25, "rewards/g/mean": 0.5}


def stages(*seconds: float) -> list:
    """Generation, waiting, reward in two batches, a quarter and three quarters, and training."""
    parts = [share * s for share in (0.25, 0.75) for s in seconds[:3]] + [seconds[3]]
    ends = (100.0 + np.cumsum(parts)).tolist()
    kinds = ("gen", "wait", "reward") * 2 + ("train",)
    return list(map(Span, kinds, [100.0, *ends], ends))


def test_times_of_one_rank():
    step = record(make_samples([[0.0]] * 4), stages=stages(4.0, 1.0, 0.5, 2.5))
    ranks = Ranks(torch.device("cpu"))
    found = over_ranks(rank_metrics(ranks, step, 0.25), ranks.gather_text)
    seconds = {"gen": 4.0, "bubble": 1.0, "reward": 0.5, "train": 2.25, "sync": 0.25, "step": 8.0}
    wanted = {f"timing_s/{name}": value for name, value in seconds.items()}
    # 1 + 2 + 4 + 9 response tokens, and prompts of 3 and 1 tokens twice each.
    wanted["perf/total_num_tokens"] = 16 + 8
    assert 0 < found.pop("perf/max_memory_gb") < 1000
    assert found == wanted | {"bubble/ratio": 0.2, "rollout/forwards": 0}


def test_times_of_two_ranks():
    waits = [Span("wait", 100.25, 100.5), Span("wait", 102.0, 102.75)]
    step = record(make_samples([[0.0]] * 4), stages=stages(3.0, 3.0, 0.5, 1.5), waits=waits)
    seconds = {"gen": (2.0, 6.0), "bubble": (4.0, 0.0), "reward": (0.5, 0.75)}
    seconds |= {"train": (1.0, 1.25), "sync": (0.5, 0.25)}
    other = {f"timing_s/{name}": second for name, (_, second) in seconds.items()}
    other |= {"timing_s/step": 8.25, "bubble/ratio": (0.0, 6.0), "bubble/slowest_rank": 6.0}
    other |= {"perf/max_memory_gb": 5e3, "rollout/forwards": 9}
    other["rollout/placement_error"] = 1.0, 6.0
    ranks = TwoRanks(other)
    found = over_ranks(rank_metrics(ranks, step, 0.5), ranks.gather_text)
    for name, by_rank in seconds.items():
        assert found[f"timing_s/{name}"] == sum(by_rank) / 2
        assert [found[f"timing_s/{name}/rank_{rank}"] for rank in range(2)] == list(by_rank)
    assert found["timing_s/step"] == 8.25 and found["bubble/slowest_rank"] == 1
    assert found["bubble/ratio"] == pytest.approx(4 / 12)
    assert found["perf/max_memory_gb"] == 5000.0 and found["rollout/forwards"] == 9
    assert "rollout/placement_error" not in found, "this rank expected nothing"


def test_idle_time_and_placement_of_two_ranks():
    """Savings of the drafter's training are unknown. Ranks that shared rows have no error."""
    step = record(make_samples([[0.0]] * 4), stages=stages(3.0, 3.0, 0.5, 1.5), expected_s=2.0)
    first, second = RolloutRecord(0.0, 4.0), RolloutRecord(4.0, 4.0)
    first.idle = {"gradients": IdleUse(1.0, 2.0, 4.0), "train_drafter": IdleUse(0.5, 0.25, np.nan)}
    second.idle = {"gradients": IdleUse(0.5, 0.5, 1.0)}
    step.rollouts = [first, second]
    gradients = {"seconds": 2.5, "expected_s": 1.5, "saved_s": 3.0}
    other = {f"idle/gradients/{field}": value for field, value in gradients.items()}
    other |= {f"idle/train_drafter/{field}": 0.0 for field in gradients}
    ranks = TwoRanks(other | {"rollout/placement_error": (1.0, 6.0)})
    found = over_ranks(rank_metrics(ranks, step, 0.5), ranks.gather_text)
    idle = {key: value for key, value in found.items() if key.startswith("idle/")}
    assert idle == {
        "idle/gradients/seconds": 2.0,
        "idle/gradients/expected_s": 4.0,
        "idle/gradients/saved_s": 4.0,
        "idle/train_drafter/seconds": 0.25,
        "idle/train_drafter/expected_s": 0.25,
    }
    own_s = first.own_s + second.own_s
    assert found["rollout/placement_error"] == (abs(2.0 - own_s) + 1.0) / 2 / max(own_s, 6.0)
    first.shared = [Span("shared", 0.0, 1.0)]
    assert "rollout/placement_error" not in rank_metrics(ranks, step, 0.5)


@pytest.mark.parametrize(
    "platform, device, peak, wanted",
    [
        ("linux", "cpu", 2_000_000, 2_048_000_000),  # getrusage gives KiB, on macOS bytes
        ("darwin", "cpu", 2_000_000_000, 2_000_000_000),
        ("linux", "cuda", 5_000_000_000, 5_000_000_000),
    ],
)
def test_peak_memory_is_in_bytes(monkeypatch, platform, device, peak, wanted):
    monkeypatch.setattr(report.sys, "platform", platform)
    usage = {resource.RUSAGE_SELF: SimpleNamespace(ru_maxrss=peak if device == "cpu" else 0)}
    monkeypatch.setattr(report.resource, "getrusage", usage.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    assert report.peak_memory(torch.device(device)) == wanted
