"""Architectures of many families: what is served gives the tokens of `model.generate`, also beyond
a sliding window, and what is refused is told why."""

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig

from bubblespec.engine import attention
from bubblespec.engine.engine import Engine
from bubblespec.engine.kernels import problem_of
from bubblespec.engine.model import UnsupportedModel
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.types import Row, SampleId
from tests.helpers.models import GQA, SMALL, VOCAB

LONGEST = 64
WINDOW = 16
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "v_head_dim": 16}
LATENT |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
DEEPSEEK = {
    **SMALL, **LATENT, **EXPERTS,
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.5,
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"], "head_dim": 16, "swa_head_dim": 16,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "moe_intermediate_size": 32,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
}  # fmt: skip
# Moshi's own defaults are those of a 7B model; its window is in the cache of `generate` alone, not
# in a mask.
MOSHI = {
    k: v for k, v in SMALL.items() if k not in ("intermediate_size", "eos_token_id", "bos_token_id")
}

SERVED = {
    # Attention returned as a view: a model that takes a view of it fails at the first forward of
    # one row.
    "afmoe": lambda: transformers.AfmoeConfig(
        **GQA, **EXPERTS, **HYBRID, head_dim=16, num_dense_layers=1, num_experts=4
    ),
    # Parts in float32 whatever the model's type: routers, norms, rotary angles applied to queries.
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**DEEPSEEK),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**DEEPSEEK),
    "dots1": lambda: transformers.Dots1Config(
        **GQA,
        **EXPERTS,
        **HYBRID,
        head_dim=16,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "exaone_moe": lambda: transformers.ExaoneMoeConfig(
        **GQA,
        **EXPERTS,
        **HYBRID,
        head_dim=16,
        num_experts=4,
        num_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **GQA,
        **EXPERTS,
        head_dim=16,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "minimax_m2": lambda: transformers.MiniMaxM2Config(
        **GQA, num_experts_per_tok=2, num_local_experts=4, head_dim=16
    ),
    "mixtral": lambda: transformers.MixtralConfig(**GQA, num_local_experts=4),
    # Windows of some layers, and a rule of length without a window.
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **GQA, **HYBRID, head_dim=16, query_pre_attn_scalar=16, tie_word_embeddings=False
    ),
    "olmo3": lambda: transformers.Olmo3Config(**GQA, **HYBRID),
    "ministral3": lambda: transformers.Ministral3Config(**GQA, head_dim=16, rope_parameters=YARN),
    # A window that never slides within LONGEST.
    "phimoe": lambda: transformers.PhimoeConfig(**GQA, num_local_experts=4, sliding_window=LONGEST),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **GQA,
        **EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=32,
        **{**QWEN_WINDOW, "use_sliding_window": False},
    ),
}


def build(
    config: transformers.PretrainedConfig, dtype: torch.dtype = torch.float64
) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        # Routers start as zeros, or as whatever the memory held.
        if parameter.dim() > 1 and not parameter.std() > 0:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype)


@pytest.mark.parametrize("name", SERVED)
def test_greedy_equals_generate(name):
    """In float64, where nothing but an equal computation gives equal tokens throughout."""
    reference, model = build(SERVED[name]()), build(SERVED[name]())
    if hasattr(reference.config, "num_experts_per_tok"):
        reference.set_experts_implementation("eager")  # torch's grouped product has no float64
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(1, VOCAB, n).tolist()) for n in (1, 9, 38)]
    config = GenerationConfig(
        max_new_tokens=LONGEST - 38, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    wanted = [
        reference.generate(torch.tensor([p]), generation_config=config)[0, len(p) :].tolist()
        for p in prompts
    ]
    assert len({token for tokens in wanted for token in tokens}) > 3, "the oracle is constant"
    prepare_model(model, LONGEST)
    engine = Engine(
        ModelRunner(model, num_slots=2, max_length=LONGEST, seed=0, max_num_batched_tokens=16)
    )
    rows = [Row(SampleId(i, 1, 0), prompt, LONGEST - 38) for i, prompt in enumerate(prompts)]
    engine.run(rows, SamplingParams(temperature=0.0))
    assert [row.tokens.tolist() for row in rows] == wanted


NO_WINDOW = rf"layer 0 has a sliding window of {WINDOW} tokens, but passes no sliding window to"
REFUSED = {
    "phimoe": (
        lambda: transformers.PhimoeConfig(**GQA, num_local_experts=4, sliding_window=WINDOW),
        NO_WINDOW,
    ),
    "qwen2_moe": (
        lambda: transformers.Qwen2MoeConfig(
            **GQA, **EXPERTS, **QWEN_WINDOW, num_experts=4, shared_expert_intermediate_size=32
        ),
        NO_WINDOW,
    ),
    "moshi": (
        lambda: transformers.MoshiConfig(**MOSHI, ffn_dim=96, sliding_window=WINDOW),
        NO_WINDOW,
    ),
    "llama4": (
        lambda: transformers.Llama4TextConfig(**GQA, head_dim=16),
        r"attention of another kind \(chunked_attention\)",
    ),
    "llama4_without_chunks": (
        lambda: transformers.Llama4TextConfig(
            **GQA, head_dim=16, layer_types=["full_attention"] * 2
        ),
        "scales attention by a token's place in the input",
    ),
    "inkling": (
        lambda: transformers.InklingTextConfig(**GQA, **INKLING),
        r"a state besides its keys and values \(hybrid, hybrid_sliding\)",
    ),
    "deepseek_v32": (
        lambda: transformers.DeepseekV32Config(**DEEPSEEK),
        r"attention of another kind \(indexed_attention\)",
    ),
    "gpt_oss": (
        lambda: transformers.GptOssConfig(
            **GQA, num_local_experts=4, num_experts_per_tok=2, head_dim=16
        ),
        r"attention arguments \['s_aux'\]",
    ),
    "doge": (lambda: transformers.DogeConfig(**GQA), "an attention mask of its own"),
    "nemotron": (
        lambda: transformers.NemotronConfig(**GQA, head_dim=16),
        "does not pass its forward's arguments",
    ),
    "electra": (
        lambda: transformers.ElectraConfig(**SMALL, embedding_size=48),
        "its output head takes vectors of 48",
    ),
    # Head sizes that contradict each other: the model fails without the engine too.
    "inconsistent": (
        lambda: transformers.DeepseekV3Config(**{**DEEPSEEK, "head_dim": 24}),
        "its own forward fails even without the",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_what_it_is(name, dtype):
    config, why = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=why) as error:
        prepare_model(build(config(), dtype), LONGEST)
    assert "\n" not in str(error.value) and "recurrent" not in str(error.value)


@pytest.mark.parametrize("name, sizes", [("deepseek_v2", {(24, 16)}), ("olmo3", {(16, 16)})])
def test_kernels_for_heads_of_one_size_alone(name, sizes):
    """Latent attention has larger heads for queries and keys than for values, which the CUDA
    kernels do not take."""
    found = prepare_model(build(SERVED[name]()), LONGEST)
    assert found == sizes
    problem = problem_of("varlen", torch.device("cuda"), torch.bfloat16, found)
    if name == "deepseek_v2":
        assert problem.endswith("query and key heads have 24 and its value heads 16; set sdpa")
    else:
        assert problem is None


def test_a_forward_of_one_row_is_checked():
    """As generation ends with one: what fails there must be known before the run."""
    model = build(transformers.LlamaConfig(**GQA))

    def fail(module, args):
        if args[0].shape[1] == 1:
            raise RuntimeError("view size is not compatible")

    model.model.layers[0].mlp.register_forward_pre_hook(fail)
    why = "its forward over packed tokens fails: view size is not compatible"
    with pytest.raises(UnsupportedModel, match=why):
        prepare_model(model, LONGEST)


def scaled_by(factor: float):
    correct = attention.cached_sdpa
    return lambda *tensors, scaling, window: correct(
        *tensors, scaling=scaling * factor, window=window
    )


def without_window(*tensors, scaling, window):
    return correct_cached(*tensors, scaling=scaling, window=None)


correct_cached = attention.cached_sdpa


@pytest.mark.parametrize("mistake", [scaled_by(1.01), without_window], ids=["scale", "window"])
@pytest.mark.parametrize("name", ["dots1", "exaone_moe", "afmoe"])
def test_mistakes_are_refused_where_parts_are_in_float32(name, mistake, monkeypatch):
    monkeypatch.setattr(attention, "cached_sdpa", mistake)
    with pytest.raises(UnsupportedModel, match=r"logits through the K/V cache differ"):
        prepare_model(build(SERVED[name]()), LONGEST)


def test_small_mistakes_are_refused_in_float64(monkeypatch):
    monkeypatch.setattr(attention, "cached_sdpa", scaled_by(1 + 1e-6))
    with pytest.raises(UnsupportedModel, match="logits through the K/V cache differ"):
        prepare_model(build(transformers.LlamaConfig(**GQA)), LONGEST)


@pytest.mark.parametrize("at, refused", [(WINDOW, True), (LONGEST, False)])
def test_checked_beyond_the_window(at, refused):
    """A model with a rule of its own that starts at a length: found if a window is told of there,
    and reached at all."""
    model = build(transformers.MistralConfig(**GQA, sliding_window=WINDOW))

    def rule(module, args, kwargs, output):
        if "packing" not in kwargs and output.last_hidden_state.shape[1] > at:
            output.last_hidden_state = output.last_hidden_state * 1.5

    model.model.register_forward_hook(rule, with_kwargs=True)
    if refused:
        with pytest.raises(UnsupportedModel, match="logits through packed sequences differ"):
            prepare_model(model, LONGEST)
    else:
        prepare_model(model, LONGEST)


def test_a_window_handed_over_but_not_in_the_mask_is_refused(monkeypatch):
    """transformers' own SDPA looks at masks alone, so such a model attends to everything."""
    model = build(transformers.LlamaConfig(**GQA))
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda m, a, kw: (a, {**kw, "sliding_window": 40}), with_kwargs=True
        )
    why = r"passes a sliding window of 40 tokens .* own mask differs"
    with pytest.raises(UnsupportedModel, match=why):
        prepare_model(model, LONGEST)
    prepare_model(model, 40)
