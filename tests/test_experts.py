"""Mixture-of-experts models: estimates of memory, gradients in every precision, a run."""

import os
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_architectures import SERVED
from test_update import gradient, make_config, make_samples, oracle

from bubblespec.engine.model_checks import prepare_model
from tests.helpers.models import GQA, config_of, random_model
from tests.helpers.runs import read, train_here, weights

TINY = "configs/tiny_policy"
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {"num_key_value_heads": 4, "head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
DEEPSEEK |= {"v_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": None, "n_routed_experts": 8}
DEEPSEEK |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
DEEPSEEK |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
CONFIGS = {
    "qwen2_moe": ("Qwen2Moe", {**GQA, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3Moe", {**GQA, **EXPERTS, "head_dim": 16}),
    "mixtral": ("Mixtral", {**GQA, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2", GQA | DEEPSEEK),
}
UNUSED = 7


def make(name: str, dtype: torch.dtype):
    """Create a model whose last expert gets no token: its logit is between those of two pairs."""
    model = random_model(config_of(*CONFIGS[name]), torch.float32)
    with torch.no_grad():
        for parameter_name, router in model.named_parameters():
            if parameter_name.endswith("mlp.gate.weight"):
                router[2:4] = 1.01 * router[0:2]
                router[UNUSED] = (router[0] + router[1]) / 2
    return model.to(dtype)


@pytest.mark.parametrize(
    "name, dtype, tolerance",
    [
        ("qwen2_moe", torch.float64, 1e-10),
        ("qwen3_moe", torch.float32, 1e-4),
        ("mixtral", torch.float64, 1e-10),
        ("deepseek_v2", torch.float32, 1e-4),
    ],
)
def test_gradient_equals_the_plain_computation(exact_norms, name, dtype, tolerance):
    """Oracle: the model's own forward in float64, sequence by sequence and expert by expert."""
    plain, model = make(name, torch.float64), make(name, dtype)
    plain.set_attn_implementation("sdpa")
    plain.set_experts_implementation("eager")
    samples, config = make_samples(), make_config()
    wanted, wanted_loss = oracle(plain, samples, config)
    unused = [p for key, p in plain.named_parameters() if key.endswith("experts.gate_up_proj")]
    assert unused and all(p.grad[:UNUSED].any() for p in unused)
    assert not any(p.grad[UNUSED].any() for p in unused)
    prepare_model(model, 64)
    got, metrics = gradient(model, samples, config)
    scale = wanted.abs().max()
    assert ((got.double() - wanted).abs().max() / scale).item() < tolerance
    assert metrics["loss"] == pytest.approx(wanted_loss, rel=tolerance, abs=tolerance)


def nested_gemma4() -> transformers.PretrainedConfig:
    """Gemma 4 as its checkpoints have it, with layers that differ."""
    options = {**SERVED["gemma4_keys"][1], "vocab_size": 312, "max_position_embeddings": 1024}
    return transformers.Gemma4Config(text_config=options, vision_config=None, audio_config=None)


@pytest.mark.parametrize(
    "make_config",
    [
        lambda: config_of(*CONFIGS["qwen3_moe"], vocab_size=312, max_position_embeddings=1024),
        nested_gemma4,
    ],
)
def test_unusual_policy_is_trained(tmp_path, make_config):
    policy, config = tmp_path / "policy", make_config()
    random_model(config, torch.float32).save_pretrained(policy)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(os.path.join(TINY, name), policy)
    options = [f"model.path={policy}", "model.dtype=float32", "model.gradient_checkpointing=true"]
    options += ["run.max_steps=2", "rollout.max_completion_length=24"]
    options += ["reward.functions=[tests.helpers.rewards.remainder]", "eval.num_prompts=0"]
    options += ["loss.kl_coef=0.1"]
    train_here(tmp_path / "run", *options, config="configs/tiny_cpu.yaml")
    lines = read(tmp_path / "run")
    assert [line["skipped_updates"] for line in lines] == [0, 0]
    assert all(line["grad_norm"] > 0 for line in lines)
    assert lines[0]["kl"] == 0 and lines[1]["kl"] > 0
    assert all(line["sampling/logp_difference/max"] < 1e-3 for line in lines)
    before, after = load_file(policy / "model.safetensors"), weights(tmp_path / "run", 2)
    names = [name for name in before if not name.endswith("layer_scalar")]  # Gemma's constants
    assert not any(torch.equal(before[name], after[name]) for name in names)
