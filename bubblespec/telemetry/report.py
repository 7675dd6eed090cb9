"""The numbers of one step, under the field's names (TRL's and verl's)."""

import resource
import sys

import numpy as np
import torch

from bubblespec.learn.advantages import has_zero_std
from bubblespec.ranks.collectives import Ranks
from bubblespec.rollout.collect import Collected
from bubblespec.rollout.placement import Samples, digest
from bubblespec.telemetry.timeline import Event, total_s


def rollout_metrics(collected: Collected, functions: list[str]) -> dict:
    """What was generated and how it scored, groups that dynamic sampling has replaced included."""
    samples, rewards = collected.generated, collected.all_rewards
    lengths = samples.lengths
    metrics = {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(axis=1, ddof=1).mean()) if rewards.shape[1] > 1 else 0.0,
        "frac_reward_zero_std": float(has_zero_std(rewards).mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/median_length": float(np.median(lengths)),
        "completions/p99_length": float(np.percentile(lengths, 99)),
        "completions/max_length": int(lengths.max()),
        "completions/clipped_ratio": float(samples.is_truncated.mean()),
        "rollout/digest": digest(samples),
    }
    if collected.samples is not samples:  # dynamic sampling has chosen
        metrics["dynamic_sampling/num_batches"] = collected.num_batches
        metrics["dynamic_sampling/num_replaced"] = len(samples.prompts) - len(collected.samples.prompts)
    short = [path.rsplit(".", 1)[-1] for path in functions]
    for number, path in enumerate(functions):
        values = samples.rewards[:, number]
        name = short[number] if short.count(short[number]) == 1 else path  # two modules may use one name
        if not np.isnan(values).all():
            metrics[f"rewards/{name}/mean"] = float(np.nanmean(values))
    return metrics


def peak_memory_gb(ranks: Ranks) -> float:
    """Most memory that any rank has needed so far: of the device on CUDA, else of the process."""
    if ranks.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(ranks.device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return float(ranks.gather(np.array([peak])).max() / 1e9)


def timing_metrics(ranks: Ranks, stages: list[Event], wait_s: float, sync_s: float, samples: Samples) -> dict:
    """Where the step's time went, on the mean rank and by rank.

    stages: this rank's (gen, wait, reward, train), repeated as often as it generates; wait_s: waiting within gen; sync_s:
    reductions within train. `bubble/ratio` is the share of all ranks' rollout time that was spent waiting.
    """
    gen, wait, reward, train = (total_s(stages, kind) for kind in ("gen", "wait", "reward", "train"))
    own = np.array([gen - wait_s, wait + wait_s, reward, train - sync_s, sync_s])
    by_rank = ranks.gather(own)  # [ranks, 5]
    step_s = stages[-1][2] - stages[0][1]
    metrics = {}
    for i, name in enumerate(("gen", "bubble", "reward", "train", "sync")):
        metrics[f"timing_s/{name}"] = float(by_rank[:, i].mean())
        if ranks.world_size > 1:
            metrics |= {f"timing_s/{name}/rank_{rank}": float(value) for rank, value in enumerate(by_rank[:, i])}
    prompt_tokens = sum(len(p.token_ids) for p in samples.prompts) * samples.num_generations
    return metrics | {
        "timing_s/step": step_s,
        "bubble/ratio": float(by_rank[:, 1].sum() / by_rank[:, :2].sum()),
        "bubble/slowest_rank": int(by_rank[:, 0].argmax()),
        "perf/throughput": float((samples.lengths.sum() + prompt_tokens) / step_s / ranks.world_size),
        "perf/total_num_tokens": int(samples.lengths.sum() + prompt_tokens),
    }
