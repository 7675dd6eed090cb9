"""Model FLOPs utilisation (MFU): the FLOPs of a step as a share of the GPUs' peak."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.model import layer_heads, of_layers
from bubblespec.learn.learner import Learner
from bubblespec.records import StepRecord
from bubblespec.samples import Samples
from bubblespec.telemetry.report import prompt_lengths

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
    2204.02311). Input embeddings do not count, and experts by the share that is routed to. None if
    the model's configuration lacks the experts per token."""
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

    def flops(lengths: np.ndarray) -> float:
        tokens = lengths.astype(np.float64)
        return float(2 * num_parameters * tokens.sum() + 2 * width * tokens @ tokens)

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
