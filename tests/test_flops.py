"""Model FLOPs against torch's own counter, and peaks by the names that CUDA gives."""

import numpy as np
import pytest
import torch
import transformers
from test_architectures import SERVED
from torch.utils.flop_counter import FlopCounterMode

from bubblespec.telemetry.flops import ModelFlops, peak_flops
from bubblespec.types import Group, Prompt
from tests.helpers.models import GQA, config_of, small_config
from tests.helpers.rows import samples_of

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
CONFIGS = {
    "llama": lambda: small_config("llama"),
    "tied": lambda: transformers.LlamaConfig(**GQA, tie_word_embeddings=True),
    "qwen3": lambda: small_config("qwen3"),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **GQA, **EXPERTS, num_experts=8, head_dim=16, decoder_sparse_step=1
    ),
    "gemma4": lambda: config_of(*SERVED["gemma4_shared"]),
    "gemma4_keys": lambda: config_of(*SERVED["gemma4_keys"]),
    "mixtral": lambda: transformers.MixtralConfig(
        **GQA, num_local_experts=4, num_experts_per_tok=2
    ),
}


def counted(model, length: int) -> int:
    """Every product of a forward, by the operations that torch sees; the attention is not causal
    there."""
    ids = torch.arange(length)[None] % 90
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_flops_equal_torch_counter(name):
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[name](), attn_implementation="eager", experts_implementation="eager"
    )
    flops = ModelFlops.of(model)
    for length in (32, 256):
        attention = 2 * flops.attention_width * length**2  # the half that is not causal
        ours = flops.forward(np.array([length])) + attention
        # Norms, and the small products of rotary embeddings and routing.
        assert ours == pytest.approx(counted(model, length), rel=0.03)


def test_step_flops_count_shared_prompts_once():
    flops = ModelFlops(num_parameters=100.0, attention_width=3)
    groups = [Group(Prompt(u, "p", (1,) * (u + 1), {}), 0) for u in range(2)]
    samples = samples_of(groups, [np.zeros(n, np.int32) for n in (2, 3, 4, 5)])

    def forward(tokens: int) -> int:
        return 200 * tokens + 6 * tokens**2

    generated = sum(map(forward, (1 + 2, 1 + 3, 2 + 4, 2 + 5))) - forward(1) - forward(2)
    trained = 3 * (forward(1 + 3) + forward(2 + 5))
    has_gradient = np.array([False, True, False, True])
    assert flops.step(samples, samples, has_gradient, 3) == generated + trained
    teacher = ModelFlops(num_parameters=500.0, attention_width=0)
    assert teacher.of_samples(samples, has_gradient) == 1000 * (1 + 3 + 2 + 5)


PEAKS = {"H100 80GB HBM3": 989, "H100 PCIe": 756, "H100 NVL": 835, "H200": 989, "L40S": 362}
PEAKS |= {"A100-SXM4-80GB": 312, "L4": 121, "GeForce RTX 4090": None, "L400": None}


@pytest.mark.parametrize("name, tflops", PEAKS.items())
def test_peaks_are_known_by_device_name(name, tflops):
    wanted = None if tflops is None else tflops * 1e12
    assert peak_flops(f"NVIDIA {name}", torch.bfloat16) == wanted
    assert peak_flops(f"NVIDIA {name}", torch.float32) is None
