"""Model FLOPs against torch's own counter, and peaks by the names that CUDA gives."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from test_architectures import SERVED
from torch.utils.flop_counter import FlopCounterMode

from bubblespec.config import Config
from bubblespec.telemetry import report as flops_module
from bubblespec.telemetry.report import forward_flops, mfu, peak_flops
from bubblespec.types import Group, Prompt
from tests.helpers.models import GQA, config_of, small_config
from tests.helpers.rows import record_of, samples_of

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
    """Every product of a forward that torch sees; the attention is not causal there."""
    ids = torch.arange(length)[None] % 90
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_flops_equal_torch_counter(name):
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[name](), attn_implementation="eager", experts_implementation="eager"
    )
    flops = forward_flops(model)
    # A second forward of twice the length shows the square of lengths, which is the attention's.
    squared = (flops(np.array([2])) - 2 * flops(np.array([1]))) / 2
    for length in (32, 256):
        attention = squared * length**2  # the half that is not causal
        ours = flops(np.array([length])) + attention
        # Norms, and the small products of rotary embeddings and routing.
        assert ours == pytest.approx(counted(model, length), rel=0.03)


def test_mfu_counts_shared_prompts_once(monkeypatch):
    """A policy of 100 FLOPs per token and a teacher of 1,000, on two GPUs of 1 TFLOP/s."""
    per_token = {"policy": 100.0, "teacher": 1000.0}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    monkeypatch.setattr(flops_module, "peak_flops", lambda name, dtype: 1e12)
    monkeypatch.setattr(
        flops_module,
        "forward_flops",
        lambda model: lambda lengths: per_token[model.name] * float((lengths + lengths**2).sum()),
    )
    groups = [Group(Prompt(u, "p", (1,) * (u + 1), {}), 0) for u in range(2)]
    samples = samples_of(groups, [np.zeros(n, np.int32) for n in (2, 3, 4, 5)])
    has_gradient = np.array([False, True, False, True])
    policy, teacher = (SimpleNamespace(name=name, dtype=None) for name in per_token)
    learner = SimpleNamespace(model=policy, teacher=None, config=Config())
    learner.has_gradient = lambda samples, advantages: has_gradient
    learner.config.loss.num_iterations = 2
    record = record_of(samples, np.zeros((2, 2)), advantages=np.zeros(4))
    ranks = SimpleNamespace(device=torch.device("cuda"), world_size=2)

    def forward(tokens: int) -> int:
        return 100 * (tokens + tokens**2)

    generated = sum(map(forward, (1 + 2, 1 + 3, 2 + 4, 2 + 5))) - forward(1) - forward(2)
    trained = forward(1 + 3) + forward(2 + 5)
    found = mfu(learner, ranks, record, 4.0)["perf/mfu"]
    assert found == pytest.approx((generated + 2 * 3 * trained) / (4.0 * 1e12 * 2))
    learner.teacher, learner.config.model.lora_r = SimpleNamespace(model=teacher), 4
    found = mfu(learner, ranks, record, 4.0)["perf/mfu"]
    assert found == pytest.approx((generated + 2 * (2 + 10) * trained) / (4.0 * 1e12 * 2))
    assert mfu(learner, SimpleNamespace(device=torch.device("cpu")), record, 4.0) == {}


PEAKS = {"H100 80GB HBM3": 989, "H100 PCIe": 756, "H100 NVL": 835, "H200": 989, "L40S": 362}
PEAKS |= {"A100-SXM4-80GB": 312, "L4": 121, "GeForce RTX 4090": None, "L400": None}


@pytest.mark.parametrize("name, tflops", PEAKS.items())
def test_peaks_are_known_by_device_name(name, tflops):
    wanted = None if tflops is None else tflops * 1e12
    assert peak_flops(f"NVIDIA {name}", torch.bfloat16) == wanted
    assert peak_flops(f"NVIDIA {name}", torch.float32) is None
