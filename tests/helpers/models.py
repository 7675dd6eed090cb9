"""Small random models."""

import sys

import torch
import transformers
from transformers.models.llama import modeling_llama as llama
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from bubblespec.engine.norms import replace_norms

VOCAB = 97
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
WIDE = {"initializer_range": 0.2}  # wide enough that greedy continuations are not constant
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 512}
SMALL = {"vocab_size": VOCAB, **SIZES, **NO_ENDS, **WIDE}
GQA = {**SMALL, "num_key_value_heads": 2}
GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
GPT2 |= NO_ENDS | WIDE

ARCHITECTURES = {
    "llama": ("Llama", GQA),
    "qwen2": ("Qwen2", GQA),
    "qwen3": ("Qwen3", {**GQA, "head_dim": 16}),
    "mistral": ("Mistral", {**GQA, "sliding_window": None}),
    "mistral-window": ("Mistral", {**GQA, "sliding_window": 7}),
    "phi3": ("Phi3", GQA),
    "olmo2": ("Olmo2", GQA),
    "gpt_neox": ("GPTNeoX", SMALL),
    "gpt2": ("GPT2", GPT2),
}


def config_of(kind: str, base: dict = GQA, **options) -> transformers.PretrainedConfig:
    return getattr(transformers, f"{kind}Config")(**base | options)


def small_config(name: str) -> transformers.PretrainedConfig:
    return config_of(*ARCHITECTURES[name])


def random_model(
    config: transformers.PretrainedConfig, dtype: torch.dtype = torch.float64
) -> transformers.PreTrainedModel:
    """Create a causal LM, the same at every call."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    if dtype == torch.float64:
        replace_norms(model)  # so that an oracle is in full precision too
    return model


class _Double:
    """torch, whose float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str):
        return getattr(torch, name)


def everything_in_full_precision(monkeypatch, model: transformers.PreTrainedModel) -> None:
    """Let the functions of a model's file compute in float64 what they compute in float32."""
    for home in {sys.modules[type(module).__module__] for module in model.modules()}:
        if home.__name__.startswith("transformers.models"):
            monkeypatch.setattr(home, "torch", _Double())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def norms_in_full_precision(monkeypatch) -> None:
    def forward(norm, hidden):
        return norm.weight * (
            hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        )

    mixtures = (qwen2_moe.Qwen2MoeRMSNorm, qwen3_moe.Qwen3MoeRMSNorm, mixtral.MixtralRMSNorm)
    for norm in (llama.LlamaRMSNorm, qwen2.Qwen2RMSNorm, *mixtures):
        monkeypatch.setattr(norm, "forward", forward)
