"""Small random models."""

import torch
import transformers
from transformers.models.llama import modeling_llama as llama
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

VOCAB = 97


SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # wide enough that greedy continuations are not constant
}


GQA = {**SMALL, "num_key_value_heads": 2}


# Of `small_config`.
ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "mistral-window", "phi3", "olmo2"]
ARCHITECTURES += ["gpt_neox", "gpt2"]


def small_config(name: str) -> transformers.PretrainedConfig:
    configs = {
        "llama": lambda: transformers.LlamaConfig(**GQA),
        "qwen2": lambda: transformers.Qwen2Config(**GQA),
        "qwen3": lambda: transformers.Qwen3Config(**GQA, head_dim=16),
        "mistral": lambda: transformers.MistralConfig(**GQA, sliding_window=None),
        "mistral-window": lambda: transformers.MistralConfig(**GQA, sliding_window=7),
        "phi3": lambda: transformers.Phi3Config(**GQA),
        "olmo2": lambda: transformers.Olmo2Config(**GQA),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(**SMALL),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=512,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            initializer_range=0.2,
        ),
    }
    return configs[name]()


def norms_in_full_precision(monkeypatch) -> None:
    """RMSNorms in the precision of the model."""

    def forward(norm, hidden):
        return norm.weight * (
            hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        )

    mixtures = (qwen2_moe.Qwen2MoeRMSNorm, qwen3_moe.Qwen3MoeRMSNorm, mixtral.MixtralRMSNorm)
    for norm in (llama.LlamaRMSNorm, qwen2.Qwen2RMSNorm, *mixtures):
        monkeypatch.setattr(norm, "forward", forward)
