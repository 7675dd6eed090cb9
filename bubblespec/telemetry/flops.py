"""Model FLOPs of a step, and the peak of the GPU, for the model FLOPs utilisation (MFU)."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.engine.layers import layer_heads, of_layers
from bubblespec.samples import Samples

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


@dataclass
class ModelFlops:
    """FLOPs of a model's forward: 2 per parameter and token, and causal attention.

    As in PaLM's appendix B (arXiv 2204.02311).
    """

    num_parameters: float
    """Parameters per token: without input embeddings, and with the routed share of experts."""
    attention_width: float
    """Query heads of all layers, times the size of each; the mean of keys' and values' size."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelFlops | None":
        """Count a causal language model; None if its configuration lacks the experts per token."""
        num_experts, num_routed = (
            {n for name in names for n in of_layers(model.config, name) if isinstance(n, int) and n}
            for names in (NUM_EXPERTS, NUM_ROUTED)
        )
        if num_experts and (len(num_experts) > 1 or len(num_routed) != 1):
            return None
        share = num_routed.pop() / num_experts.pop() if num_experts else 1.0
        count = sum(
            parameter.numel() * (share if ".experts." in name else 1.0)
            for name, parameter in model.named_parameters()
        )
        head: Any = model.get_output_embeddings()
        tables = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        count -= sum(weight.numel() for weight in tables - {head.weight})
        layers = layer_heads(model.config)
        return cls(count, sum(n * (key + value) / 2 for n, _, key, value in layers))

    def forward(self, lengths: np.ndarray) -> float:
        """Return the FLOPs of a forward of sequences of these lengths, int [S]."""
        lengths = lengths.astype(np.float64)
        return float(
            2 * self.num_parameters * lengths.sum() + 2 * self.attention_width * lengths @ lengths
        )

    def step(
        self, generated: Samples, trained: Samples, has_gradient: np.ndarray, passes: int
    ) -> float:
        """Return the FLOPs of a step on all ranks.

        Counted are one forward of what was generated, with each group's prompt once, and `passes`
        of each sample that was trained on; not drafts, recomputation and other models.
        has_gradient: bool [S of trained]; passes: 3 for a forward and a backward, 2 with LoRA,
        times the passes over the batch.
        """
        prompts = prompt_lengths(generated)
        num_repeated = generated.num_generations - 1
        lengths = np.repeat(prompts, generated.num_generations) + generated.lengths
        total = self.forward(lengths) - num_repeated * self.forward(prompts)
        return total + passes * self.of_samples(trained, has_gradient)

    def of_samples(self, samples: Samples, which: np.ndarray) -> float:
        """Return the FLOPs of a forward of some samples, each with its prompt; which: bool [S]."""
        lengths = np.repeat(prompt_lengths(samples), samples.num_generations) + samples.lengths
        return self.forward(lengths[which])


def prompt_lengths(samples: Samples) -> np.ndarray:
    """Return the tokens of each group's prompt, int64 [groups]."""
    return np.array([len(group.prompt.token_ids) for group in samples.groups])
