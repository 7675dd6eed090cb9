"""Metrics of one step, under the field's names (TRL's and verl's)."""

import json
import resource
import sys
from collections import Counter
from typing import Any

import numpy as np
import torch

from bubblespec.distributed.ranks import Ranks
from bubblespec.records import ACCEPT_BINS, RolloutRecord, StepRecord, total_s
from bubblespec.samples import Samples, digest, has_rewards, has_zero_std

COUNTS = ("row_forwards", "gained_tokens", "draft_tokens", "accepted_tokens", "covered_tokens")


def rollout_metrics(record: StepRecord, functions: list[str], *, is_dynamic: bool = False) -> dict:
    """Return metrics of what the step generated, replaced groups included, and of its rewards.

    Rewards are without the groups that lack one. functions: dotted paths, and `environment`;
    is_dynamic: whether dynamic sampling is on."""
    samples, is_scored = record.generated, has_rewards(record.all_rewards)
    rewards = record.all_rewards[is_scored]
    lengths = samples.num_sampled
    terminated = lengths[~samples.is_truncated]
    prompts = prompt_lengths(samples)
    metrics: dict = {
        # the mean of -log p over tokens sampled from p estimates the entropy
        "entropy": -float(np.nanmean(np.concatenate(samples.logprob), dtype=np.float64)),
        "completions/median_length": float(np.median(lengths)),
        "completions/p99_length": float(np.percentile(lengths, 99)),
        "completions/clipped_ratio": float(samples.is_truncated.mean()),
        "rollout/digest": digest(samples),
    }
    counts = {"completions/{}_length": lengths, "prompt_length/{}": prompts}
    if len(terminated):
        counts["completions/{}_terminated_length"] = terminated
    for key, values in counts.items():
        numbers = {"mean": values.mean(), "min": values.min(), "max": values.max()}
        metrics |= {key.format(name): number.item() for name, number in numbers.items()}
    if functions:  # distillation may have none
        spread = rewards.std(axis=1, ddof=1).mean() if rewards.shape[1] > 1 else 0.0
        metrics |= {"reward": float(rewards.mean()), "reward_std": float(spread)}
        metrics["frac_reward_zero_std"] = float(has_zero_std(rewards).mean())
        for name, values in {"rewards": rewards, "advantages": record.advantages}.items():
            metrics[f"critic/{name}/min"] = float(values.min())
            metrics[f"critic/{name}/max"] = float(values.max())
    if not is_scored.all():
        metrics["reward/left_out"] = int((~is_scored).sum())
    if is_dynamic:
        metrics["dynamic_sampling/num_batches"] = len(record.batch_sizes)
        metrics["dynamic_sampling/num_replaced"] = len(samples.groups) - len(record.samples.groups)
    return metrics | function_metrics(samples.rewards, functions)


def short_names(functions: list[str]) -> list[str]:
    """Return the last part of each dotted path, or all of it where two paths end alike."""
    short = [path.rsplit(".", 1)[-1] for path in functions]
    named = zip(functions, short, strict=True)
    return [name if short.count(name) == 1 else path for path, name in named]


def function_metrics(rewards: np.ndarray, functions: list[str]) -> dict:
    """Return mean and standard deviation of each function over the samples that it applies to.

    The number of other samples is there unless it is 0. rewards: float64 [S, functions]."""
    metrics: dict[str, float] = {}
    for name, values in zip(short_names(functions), rewards.T, strict=True):
        if num_missing := int(np.isnan(values).sum()):
            metrics[f"rewards/{name}/missing"] = num_missing
        values = values[~np.isnan(values)]
        if len(values):
            metrics[f"rewards/{name}/mean"] = float(values.mean())
            metrics[f"rewards/{name}/std"] = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return metrics


def evaluation_metrics(
    ranks: Ranks, samples: Samples, rollout: RolloutRecord, seconds: float, *, has_drafts: bool
) -> dict:
    """Return how an evaluation was generated.

    Forwards are those of the rank that took most, shared ones included. seconds: of the evaluation;
    has_drafts: whether its samples may have drafts."""
    counts, own_forwards = rollout.acceptance, rollout.own_forwards + len(rollout.shared_forwards)
    own = [own_forwards, counts.draft_tokens, counts.accepted_tokens]
    forwards, drafted, accepted = ranks.gather(np.array(own)).T
    metrics = {"eval/digest": digest(samples), "eval/forwards": int(forwards.max())}
    metrics["timing_s/eval"] = seconds
    if has_drafts:
        metrics["eval/spec_accept_rate"] = float(accepted.sum() / max(drafted.sum(), 1))
    return metrics


def speculation_metrics(ranks: Ranks, record: StepRecord, *, has_store: bool) -> dict:
    """Return the step's speculation, summed over ranks.

    has_store: whether drafts are kept for coming steps."""
    rollouts = record.rollouts
    own: Any = Counter()  # int, and seconds
    for rollout in rollouts:
        counts = rollout.acceptance
        own["propose_s"] += sum(forward.propose_s for forward in rollout.forwards)
        own["ahead_tokens"] += rollout.drafted_tokens
        own.update({name: getattr(counts, name) for name in COUNTS})
        own.update({f"length/{i}": n for i, n in enumerate(counts.accepted_lengths.tolist())})
        for name, (proposed, accepted) in counts.by_source.items():
            own.update({f"proposed/{name}": proposed, f"accepted/{name}": accepted})
    by_rank = [json.loads(text) for text in ranks.gather_text(json.dumps(own))]
    sums: Any = Counter()
    for of_rank in by_rank:
        sums.update(of_rank)
    drafted, accepted = sums["draft_tokens"], sums["accepted_tokens"]
    num_tokens = int(record.generated.num_sampled.sum())
    metrics = {
        "rollout/spec_accept_length": sums["gained_tokens"] / max(sums["row_forwards"], 1),
        "rollout/spec_accept_rate": accepted / max(drafted, 1),
        "rollout/spec_coverage": sums["covered_tokens"] / max(num_tokens, 1),
        "rollout/spec_accepted_tokens": accepted,
        "rollout/spec_wasted_tokens": drafted - accepted,
        "rollout/spec_accepted_lengths": [sums[f"length/{i}"] for i in range(len(ACCEPT_BINS))],
        "rollout/modelled_s": sum(rollout.modelled_s for rollout in rollouts),
        "rollout/ticks": sum(rollout.num_ticks for rollout in rollouts),
        "timing_s/propose": sums["propose_s"] / ranks.world_size,
        "timing_s/exchange": total_s(record.spans, "exchange"),
    }
    if has_store:
        metrics["bubble/drafted_tokens"] = sums["ahead_tokens"]
    for key in sorted(key for key in sums if key.startswith("proposed/")):
        name = key.removeprefix("proposed/")
        metrics[f"drafts/{name}/accept_rate"] = sums[f"accepted/{name}"] / max(sums[key], 1)
        metrics[f"drafts/{name}/tokens"] = sums[key]
    return metrics


def peak_memory(device: torch.device) -> int:
    """Return this rank's peak of bytes so far: of the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def rank_metrics(ranks: Ranks, record: StepRecord, sync_s: float) -> dict:
    """Return where the step's time went, on the mean rank and by rank, and uses of idle time.

    sync_s: reductions of gradients, within train."""
    rollouts = record.rollouts
    gen, wait, reward, train = (
        total_s(record.stages, kind) for kind in ("gen", "wait", "reward", "train")
    )
    wait_s = sum(rollout.wait_s for rollout in rollouts)  # within gen
    own = {"gen": gen - wait_s, "bubble": wait + wait_s, "reward": reward, "train": train - sync_s}
    own |= {"sync": sync_s, "step": record.seconds, "memory": peak_memory(ranks.device)}
    own |= {"expected": record.expected_s, "own": sum(rollout.own_s for rollout in rollouts)}
    own["forwards"] = sum(rollout.own_forwards for rollout in rollouts)
    uses = sorted({name for rollout in rollouts for name in rollout.idle})
    for name in uses:
        for field in ("seconds", "expected_s", "saved_s"):
            of_rollouts = (r.idle[name] for r in rollouts if name in r.idle)
            own[f"{name}/{field}"] = sum(getattr(use, field) for use in of_rollouts)
    by_rank = dict(zip(own, ranks.gather(np.array([*own.values()], np.float64)).T, strict=True))

    step_s, num_tokens = float(by_rank["step"].max()), record.generated.num_tokens
    wait_share = by_rank["bubble"].sum() / (by_rank["gen"] + by_rank["bubble"]).sum()
    metrics = {
        "timing_s/step": step_s,
        "bubble/ratio": float(wait_share),
        "perf/throughput": num_tokens / step_s / ranks.world_size,
        "perf/total_num_tokens": num_tokens,
        "perf/max_memory_gb": float(by_rank["memory"].max() / 1e9),
        "rollout/forwards": int(by_rank["forwards"].max()),
    }
    for name in ("gen", "bubble", "reward", "train", "sync"):
        metrics[f"timing_s/{name}"] = float(by_rank[name].mean())
        for rank in range(ranks.world_size) if ranks.world_size > 1 else ():
            metrics[f"timing_s/{name}/rank_{rank}"] = float(by_rank[name][rank])
    if ranks.world_size > 1:
        metrics["bubble/slowest_rank"] = int(by_rank["gen"].argmax())
    error = np.abs(by_rank["expected"] - by_rank["own"]).mean() / max(by_rank["own"].max(), 1e-9)
    if not np.isnan(error) and not any(rollout.shared for rollout in rollouts):
        metrics["rollout/placement_error"] = float(error)
    for name in uses:
        metrics[f"idle/{name}/seconds"] = float(by_rank[f"{name}/seconds"].mean())
        metrics[f"idle/{name}/expected_s"] = float(by_rank[f"{name}/expected_s"].sum())
        if not np.isnan(saved_s := float(by_rank[f"{name}/saved_s"].mean())):
            metrics[f"idle/{name}/saved_s"] = saved_s
    return metrics


def prompt_lengths(samples: Samples) -> np.ndarray:
    """Return the tokens of each group's prompt, int64 [groups]."""
    return np.array([len(group.prompt.token_ids) for group in samples.groups])
