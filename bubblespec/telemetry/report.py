"""A rank's metrics of one step, under the field's names (TRL's and verl's)."""

import re
import resource
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.config.keys import last_part
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.model import layer_heads, of_layers
from bubblespec.engine.recurrent import state_numbers
from bubblespec.learn.learner import Learner
from bubblespec.records import (
    RolloutRecord,
    Samples,
    StepRecord,
    digest,
    has_rewards,
    has_zero_std,
    total_s,
)

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
    """Return the last part of each dotted path, or all of it where two paths end alike.

    Those of models have dots in place of slashes, which group metrics."""
    short = list(map(last_part, functions))
    whole = [path.strip("./").replace("/", ".") for path in functions]
    named = zip(whole, short, strict=True)
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
    samples: Samples, rollout: RolloutRecord, seconds: float, *, has_drafts: bool
) -> dict:
    """seconds: of the evaluation; has_drafts: whether its samples may have drafts."""
    counts = rollout.acceptance
    metrics: dict = {
        "eval/digest": digest(samples),
        "eval/forwards": rollout.own_forwards + len(rollout.shared_forwards),
        "timing_s/eval": seconds,
    }
    if has_drafts:
        metrics["eval/spec_accept_rate"] = counts.accepted_tokens, counts.draft_tokens
    return metrics


def speculation_metrics(ranks: Ranks, record: StepRecord, *, has_store: bool) -> dict:
    """has_store: whether drafts are kept for coming steps."""
    rollouts, counts = record.rollouts, [rollout.acceptance for rollout in record.rollouts]
    fed, gained, drafted, accepted, covered = (
        sum(getattr(of, name) for of in counts) for name in COUNTS
    )
    num_tokens = int(record.generated.num_sampled.sum()) * ranks.is_main  # of all ranks
    metrics = {
        "rollout/spec_accept_length": (gained, fed),
        "rollout/spec_accept_rate": (accepted, drafted),
        "rollout/spec_coverage": (covered, num_tokens),
        "rollout/spec_accepted_tokens": accepted,
        "rollout/spec_wasted_tokens": drafted - accepted,
        "rollout/spec_accepted_lengths": sum(of.accepted_lengths for of in counts),
        "rollout/modelled_s": sum(rollout.modelled_s for rollout in rollouts),
        "rollout/ticks": sum(rollout.num_ticks for rollout in rollouts),
        "timing_s/propose": sum(f.propose_s for rollout in rollouts for f in rollout.forwards),
        "timing_s/exchange": total_s(record.spans, "exchange"),
    }
    if has_store:
        metrics["bubble/drafted_tokens"] = sum(rollout.drafted_tokens for rollout in rollouts)
    for name in sorted({name for of in counts for name in of.by_source}):
        found = [of.by_source[name] for of in counts if name in of.by_source]
        num_proposed, num_accepted = map(sum, zip(*found, strict=True))
        metrics[f"drafts/{name}/accept_rate"] = num_accepted, num_proposed
        metrics[f"drafts/{name}/tokens"] = num_proposed
    return metrics


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def rank_metrics(ranks: Ranks, record: StepRecord, sync_s: float) -> dict:
    """Return where this rank's time went. sync_s: reductions of gradients, within train."""
    rollouts = record.rollouts
    gen, wait, reward, train = (
        total_s(record.stages, kind) for kind in ("gen", "wait", "reward", "train")
    )
    wait_s = sum(rollout.wait_s for rollout in rollouts)  # within gen
    gen, wait, own_s = gen - wait_s, wait + wait_s, sum(rollout.own_s for rollout in rollouts)
    metrics: dict = {
        "timing_s/gen": gen,
        "timing_s/bubble": wait,
        "timing_s/reward": reward,
        "timing_s/train": train - sync_s,
        "timing_s/sync": sync_s,
        "timing_s/step": record.seconds,
        "bubble/ratio": (wait, gen + wait),
        "perf/total_num_tokens": record.generated.num_tokens,
        "perf/max_memory_gb": peak_memory(ranks.device) / 1e9,
        "rollout/forwards": sum(rollout.own_forwards for rollout in rollouts),
    }
    if ranks.world_size > 1:
        metrics["bubble/slowest_rank"] = gen
    if not any(rollout.shared for rollout in rollouts):
        metrics["rollout/placement_error"] = abs(record.expected_s - own_s), own_s
    for name, use in (item for rollout in rollouts for item in rollout.idle.items()):
        for field, value in vars(use).items():
            key = f"idle/{name}/{field}"
            metrics[key] = metrics.get(key, 0.0) + value
    return metrics


def prompt_lengths(samples: Samples) -> np.ndarray:
    """Return the tokens of each group's prompt, int64 [groups]."""
    return np.array([len(group.prompt.token_ids) for group in samples.groups])


# Dense bfloat16 TFLOP/s from NVIDIA's data sheets, by a part of the device's name; the first match
# counts.
PEAK_TFLOPS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100|H200|H800|GH200": 989,
    "H20": 148,
    "B200": 2250,
    "A100|A800": 312,
    "A40": 150,
    "L40S": 362,
    "L4": 121,
}

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names in configurations
NUM_ROUTED = ("num_experts_per_tok", "top_k_experts", "moe_topk")  # experts per token


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return FLOP/s of a GPU in half precision; None if the name is unknown or dtype is wider."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    words = device_name.replace("-", " ")
    peaks = (peak for names, peak in PEAK_TFLOPS.items() if re.search(rf"\b({names})\b", words))
    return next((peak * 1e12 for peak in peaks), None)


def forward_flops(model: PreTrainedModel) -> Callable[[np.ndarray], float] | None:
    """Return the FLOPs of a forward of sequences as a function of their lengths, int [S].

    They are 2 per parameter and token, and causal attention, as in PaLM's appendix B (arXiv
    2204.02311), and 6 per token and number of a state, which is read twice and changed. Input
    embeddings do not count, and experts by the share that is routed to. None if the model's
    configuration lacks the experts per token."""
    num_experts, num_routed = (
        {n for name in names for n in of_layers(model.config, name) if isinstance(n, int) and n}
        for names in (NUM_EXPERTS, NUM_ROUTED)
    )
    if num_experts and (len(num_experts) > 1 or len(num_routed) != 1):
        return None
    share = num_routed.pop() / num_experts.pop() if num_experts else 1.0
    num_parameters = sum(
        parameter.numel() * (share if ".experts." in name else 1.0)
        for name, parameter in model.named_parameters()
    )
    head: Any = model.get_output_embeddings()
    tables = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    num_parameters -= sum(weight.numel() for weight in tables - {head.weight})
    # Query heads of all layers, times the mean of the widths of keys and values.
    width = sum(n * (key + value) / 2 for n, _, key, value in layer_heads(model.config))
    per_token = 2 * num_parameters + 6 * state_numbers(model)

    def flops(lengths: np.ndarray) -> float:
        tokens = lengths.astype(np.float64)
        return float(per_token * tokens.sum() + 2 * width * tokens @ tokens)

    return flops


def whole_lengths(samples: Samples) -> np.ndarray:
    """Return the tokens of each sample with its prompt, int64 [S]."""
    return np.repeat(prompt_lengths(samples), samples.num_generations) + samples.lengths


def mfu(learner: Learner, ranks: Ranks, record: StepRecord, step_s: float) -> dict[str, float]:
    """Return the share of the GPUs' peak that a step has used; nothing if the peak is unknown.

    Counted are generation, with each group's prompt once, training and a teacher's forwards; not
    drafts, recomputation and a reference model."""
    if ranks.device.type != "cuda":
        return {}
    peak = peak_flops(torch.cuda.get_device_name(ranks.device), learner.model.dtype)
    policy = forward_flops(learner.model)
    teacher = forward_flops(learner.teacher.model) if learner.teacher else (lambda lengths: 0.0)
    if peak is None or policy is None or teacher is None:
        return {}
    generated, trained = record.generated, whole_lengths(record.samples)
    trained = trained[learner.has_gradient(record.samples, record.advantages)]
    passes = 2 if learner.config.model.lora_r else 3  # a forward and a backward
    total = learner.config.loss.num_iterations * (passes * policy(trained) + teacher(trained))
    total += policy(whole_lengths(generated))
    total -= (generated.num_generations - 1) * policy(prompt_lengths(generated))
    return {"perf/mfu": total / (step_s * peak * ranks.world_size)}
