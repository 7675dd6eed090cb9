"""Architectures of many families: served ones give the tokens of `model.generate`, also beyond a
sliding window; others are refused with the reason in one line."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig

from bubblespec.engine import attention
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.decoder import is_written_out
from bubblespec.engine.engine import Engine
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.ops import torch_ops
from bubblespec.engine.runner import ModelRunner
from bubblespec.types import Row, SampleId
from tests.helpers.gradients import check_packed_gradients
from tests.helpers.models import (
    ARCHITECTURES,
    GPT2,
    GQA,
    SMALL,
    VOCAB,
    config_of,
    everything_in_full_precision,
)

LONGEST = 64
WINDOW = 16
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
SHARED = {"num_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "v_head_dim": 16}
LATENT |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
DEEPSEEK = {**SMALL, **LATENT, **EXPERTS, **ROUTED}
HEAD = {"head_dim": 16}
FULL = {**GQA, **HEAD, "layer_types": ["full_attention"] * 2}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], **HEAD}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.5}
YARN |= {"original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
DYNAMIC |= {"original_max_position_embeddings": 32}
QWEN = {**GQA, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32}
QWEN |= {"sliding_window": WINDOW, "max_window_layers": 2}
INKLING = {**GQA, **HEAD, **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1}
INKLING |= {"layer_types": ["hybrid_sliding", "hybrid"], "swa_head_dim": 16}
INKLING |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
# The window is in the cache of `generate` alone, not in a mask.
MOSHI = dict(SMALL, ffn_dim=96, sliding_window=WINDOW)
for name in ("intermediate_size", "eos_token_id", "bos_token_id"):
    del MOSHI[name]
LINEAR = {**GQA, **HEAD, "layer_types": ["linear_attention", "full_attention"]}
LINEAR |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 16}
NEXT = {**LINEAR, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32}
CONV = {"layer_types": ["conv", "full_attention"]}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
MAMBA2 |= {"mamba_chunk_size": 16}
GRANITE = {**GQA, **MAMBA2, "layer_types": LINEAR["layer_types"]}
NEMOTRON = {"layers_block_type": ["linear_attention", "mlp", "full_attention"]}
NEMOTRON |= {"num_hidden_layers": 3, "mamba_num_heads": 8, "mamba_head_dim": 16}
NEMOTRON |= {"ssm_state_size": 8, "n_groups": 2, "chunk_size": 16}
FALCON = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MAMBA = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 1, "n_head": 2}

GEMMA4 = {"tie_word_embeddings": False, "global_head_dim": 32, "final_logit_softcapping": 3.0}
GEMMA4 |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
GEMMA4_KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_KEYS |= {"hidden_size_per_layer_input": 0}
GEMMA4_SHARED = {"num_hidden_layers": 4, "layer_types": 2 * HYBRID["layer_types"]}
GEMMA4_SHARED |= {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}

# Name: kind, options.
SERVED = ARCHITECTURES | {
    # Attention returned as a view: a model that takes a view of it fails at the first forward of
    # one row.
    "afmoe": ("Afmoe", GQA | EXPERTS | HYBRID | {"num_dense_layers": 1, "num_experts": 4}),
    # Parts in float32 whatever the model's type: routers, norms, rotary angles applied to queries.
    "deepseek_v2": ("DeepseekV2", DEEPSEEK),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "dots1": ("Dots1", GQA | EXPERTS | HYBRID | ROUTED),
    "exaone_moe": ("ExaoneMoe", GQA | EXPERTS | HYBRID | SHARED | {"num_experts": 4}),
    "glm4_moe": ("Glm4Moe", GQA | EXPERTS | HEAD | ROUTED),
    "minimax_m2": ("MiniMaxM2", GQA | HEAD | LOCAL),
    "mixtral": ("Mixtral", {**GQA, "num_local_experts": 4}),
    # Windows of some layers, and a rule of length without a window.
    "gemma3": (
        "Gemma3Text",
        {**GQA, **HYBRID, "query_pre_attn_scalar": 16, "tie_word_embeddings": False},
    ),
    "olmo3": ("Olmo3", GQA | {k: HYBRID[k] for k in ("sliding_window", "layer_types")}),
    "ministral3": ("Ministral3", GQA | HEAD | {"rope_parameters": YARN}),
    # A window that never slides within LONGEST.
    "phimoe": ("Phimoe", {**GQA, "num_local_experts": 4, "sliding_window": LONGEST}),
    "qwen2_moe": ("Qwen2Moe", {**QWEN, "use_sliding_window": False}),
    "qwen3_moe": ("Qwen3Moe", GQA | EXPERTS | HEAD | {"num_experts": 4}),
    "gemma": ("Gemma", GQA | HEAD),
    # Layers with heads of another size or number, inputs of their own, or keys of another layer.
    "gemma4": ("Gemma4Text", GQA | HYBRID | GEMMA4),
    "gemma4_keys": ("Gemma4Text", GQA | HYBRID | GEMMA4 | GEMMA4_KEYS),
    "gemma4_shared": ("Gemma4Text", GQA | HYBRID | GEMMA4 | GEMMA4_SHARED),
    "phi": ("Phi", GQA),
    "olmoe": ("Olmoe", GQA | EXPERTS | {"num_experts": 4}),
    "glm4": ("Glm4", GQA | HEAD),
    "smollm3": ("SmolLM3", GQA),
    "granite": ("Granite", GQA),
    "cohere2": ("Cohere2", GQA | HYBRID),
    "starcoder2": ("Starcoder2", {**GQA, "sliding_window": WINDOW}),
    "seed_oss": ("SeedOss", GQA | HEAD),
    "ernie4_5": ("Ernie4_5", GQA),
    "exaone4": ("Exaone4", GQA | HYBRID),
    "hunyuan": ("HunYuanDenseV1", GQA | HEAD),
}
# A cap on scores, sinks, and chunks with layers that rotate nothing.
CAPPED = {"query_pre_attn_scalar": 16, "tie_word_embeddings": False, "attn_logit_softcapping": 0.5}
LLAMA4 = {**GQA, **HEAD, **LOCAL, "attention_chunk_size": WINDOW, "no_rope_layers": [1, 0]}
LLAMA4 |= {"intermediate_size_mlp": 96, "moe_layers": [1]}
SCORES = {
    "gemma2": ("Gemma2", GQA | HYBRID | CAPPED),
    "vaultgemma": ("VaultGemma", GQA | HYBRID | CAPPED),
    "gpt_oss": ("GptOss", GQA | LOCAL | HYBRID),
    "granite_swa": ("GraniteSWA", GQA | HYBRID),
    "flint": ("Flint", GQA | HYBRID),
    "mimo_v2_flash": ("MiMoV2Flash", GQA | HYBRID | EXPERTS | ROUTED),
    "llama4": ("Llama4Text", LLAMA4),
    "llama4_without_chunks": ("Llama4Text", LLAMA4 | {"layer_types": FULL["layer_types"]}),
}
SERVED |= SCORES
# Layers with a state.
HYBRIDS = {
    "qwen3_5": ("Qwen3_5Text", LINEAR),
    "qwen3_5_moe": ("Qwen3_5MoeText", NEXT),
    "qwen3_next": ("Qwen3Next", NEXT),
    "qwen3_next_dense": ("Qwen3Next", NEXT | {"mlp_only_layers": [0, 1]}),
    "olmo_hybrid": ("OlmoHybrid", LINEAR),
    "lfm2": ("Lfm2", GQA | CONV),
    "lfm2_moe": ("Lfm2Moe", GQA | EXPERTS | CONV | {"num_experts": 4, "num_dense_layers": 1}),
    "granite_hybrid": ("GraniteMoeHybrid", GRANITE | {"num_local_experts": 0}),
    "nemotron_h": ("NemotronH", GQA | HEAD | NEMOTRON),
    "falcon_h1": ("FalconH1", GQA | HEAD | MAMBA2 | {"mamba_d_ssm": 128}),
    "bamba": ("Bamba", GQA | MAMBA2 | {"attn_layer_indices": [1]}),
}
SERVED |= HYBRIDS


def build(kind: str, base: dict, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, base)).eval()
    for parameter in model.parameters():
        # Routers start as zeros, or as whatever the memory held.
        if parameter.dim() > 1 and not parameter.std() > 0:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype)


@pytest.mark.parametrize("name", SERVED)
def test_greedy_equals_generate(name, monkeypatch):
    """In float64, where nothing but an equal computation gives equal tokens throughout."""
    reference, model = build(*SERVED[name]), build(*SERVED[name])
    if name in HYBRIDS | SCORES:
        everything_in_full_precision(monkeypatch, model)
    if hasattr(reference.config, "num_experts_per_tok"):
        reference.set_experts_implementation("eager")  # torch's grouped product has no float64
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(1, VOCAB, n).tolist()) for n in (1, 9, 21, 38)]
    stops = None if name not in ARCHITECTURES else (5, 11)
    config = GenerationConfig(
        max_new_tokens=LONGEST - 38, do_sample=False, eos_token_id=stops, pad_token_id=0
    )
    wanted = [
        reference.generate(torch.tensor([p]), generation_config=config)[0, len(p) :].tolist()
        for p in prompts
    ]
    assert len({token for tokens in wanted for token in tokens}) > 3, "the oracle is constant"
    prepare_model(model, LONGEST)
    engine = Engine(ModelRunner(model, 2, LONGEST, seed=0, max_num_batched_tokens=16))
    rows = [Row(SampleId(i, 1, 0), prompt, LONGEST - 38) for i, prompt in enumerate(prompts)]
    engine.run(rows, SamplingParams(temperature=0.0, stop_token_ids=stops or ()))
    assert [row.tokens.tolist() for row in rows] == wanted


@pytest.mark.parametrize("name", SCORES)
def test_gradients_of_packed_sequences_equal_the_models(name, monkeypatch):
    """Lengths on both sides of a window and of a chunk."""
    lengths = [WINDOW + 9, 3, 1, WINDOW, 2 * WINDOW + 1]
    found = check_packed_gradients(build(*SERVED[name]), lengths, LONGEST, monkeypatch)
    sinks = [grad.abs().min() for parameter, grad in found.items() if "sinks" in parameter]
    has_sinks = any("sinks" in parameter for parameter in found)
    assert has_sinks == (name not in ("gemma2", "vaultgemma", "llama4", "llama4_without_chunks"))
    assert all(least > 0 for least in sinks)


@pytest.mark.parametrize("cap", [None, 1e5])
def test_cap_hidden_by_rounding_is_not_left_out(cap):
    """Layers that are written out have no cap, and a comparison of bfloat16 would not show it."""
    model = build("Gemma2", SERVED["gemma2"][1] | {"attn_logit_softcapping": cap}, torch.bfloat16)
    prepare_model(model, LONGEST)
    assert is_written_out(model) == (cap is None)


NO_WINDOW = rf"layer 0 has a sliding window of {WINDOW} tokens, but passes no sliding window to"
# Name: kind, options, reason.
REFUSED = {
    "phimoe": ("Phimoe", {**GQA, "num_local_experts": 4, "sliding_window": WINDOW}, NO_WINDOW),
    "qwen2_moe": ("Qwen2Moe", {**QWEN, "use_sliding_window": True}, NO_WINDOW),
    "moshi": ("Moshi", MOSHI, NO_WINDOW),
    "llama4": ("Llama4Text", LLAMA4 | {"floor_scale": LONGEST}, "scales attention by a token's pl"),
    "inkling": ("InklingText", INKLING, "a recurrent state"),
    "deepseek_v32": ("DeepseekV32", DEEPSEEK, r"attention of another kind \(indexed_attention\)"),
    "doge": ("Doge", GQA, "an attention mask of its own"),
    "nemotron": ("Nemotron", GQA | HEAD, "does not pass its forward's arguments"),
    "electra": ("Electra", {**SMALL, "embedding_size": 48}, "its output head takes vectors of 48"),
    # Head sizes that contradict each other: the model fails without the engine too.
    "inconsistent": ("DeepseekV3", {**DEEPSEEK, "head_dim": 24}, "own forward fails even without"),
    "mamba": ("Mamba", {**MAMBA, "pad_token_id": 0}, "a recurrent state"),
    "bloom": ("Bloom", BLOOM, "attention interface"),
    "dynamic": ("Llama", {**SMALL, "rope_parameters": DYNAMIC}, "dynamic rotary scaling"),
    "jamba": ("Jamba", GQA, "a recurrent state"),
    "falcon": ("Falcon", FALCON, "attention interface"),
}
# The table of what users know by other names: names, class, result.
PAGE = Path(__file__).parents[1] / "docs" / "lab" / "architectures.md"
LINE = re.compile(r"^\| .* \| `(?P<kind>\w+)` \| (?P<result>(?:served|refused).*) \|$", re.M)
LINES = list(LINE.finditer(PAGE.read_text(encoding="utf-8")))


def is_of(entry: tuple, kind: str) -> bool:
    """Whether an entry of SERVED or REFUSED gives a model of this class."""
    found = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config_of(*entry[:2])), None)
    return found is not None and found.__name__ == kind


def result_of(kind: str) -> str:
    """Return what the table says of a class that test_greedy_equals_generate serves, or not."""
    if any(is_of(entry, kind) for entry in SERVED.values()):
        return "served"
    entry = next(entry for entry in REFUSED.values() if is_of(entry, kind))
    with pytest.raises(ValueError) as error:
        prepare_model(build(*entry[:2]), LONGEST)
    return f"refused: {str(error.value).partition(': ')[2]}".replace("|", "\\|")


def check_refused(model, why: str, length: int = LONGEST) -> None:
    with pytest.raises(ValueError, match=why) as error:
        prepare_model(model, length)
    assert "\n" not in str(error.value)
    assert ("recurrent" in str(error.value)) == ("recurrent" in why)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_architecture_is_refused(name, dtype):
    kind, base, why = REFUSED[name]
    check_refused(build(kind, base, dtype), why)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["kind"])
def test_table_has_the_result_of_each_family(line):
    assert len(LINES) == 45
    assert line["result"] == result_of(line["kind"]), "run python -m tests.test_architectures"


def test_model_of_another_kind_or_too_long_is_refused():
    t5 = transformers.AutoModelForSeq2SeqLM.from_config(config_of("T5", T5, pad_token_id=0))
    check_refused(t5.eval(), "an encoder-decoder model")
    headless = transformers.AutoModel.from_config(config_of("Llama"))
    check_refused(headless.eval(), "no output head")
    check_refused(build("GPT2", GPT2), "600 exceeds the model's 512 positions", 600)


@pytest.mark.parametrize("name, sizes", [("deepseek_v2", {(24, 16)}), ("olmo3", {(16, 16)})])
def test_cuda_kernels_take_heads_of_one_size(name, sizes):
    """Latent attention has larger heads for queries and keys than for values."""
    found = prepare_model(build(*SERVED[name]), LONGEST)
    assert found == sizes
    problem = attention.problem_of("varlen", torch.device("cuda"), torch.bfloat16, found)
    if name == "olmo3":
        assert problem is None
    else:
        assert problem.endswith("query and key heads have 24 and its value heads 16; set sdpa")


def test_failure_in_forward_of_one_row_is_found():
    """Generation ends with one row, so such a failure must be found before the run."""
    model = build("Phi", GQA)  # its modules generate

    def fail(module, args):
        if args[0].shape[1] == 1:
            raise RuntimeError("view size is not compatible")

    model.model.layers[0].mlp.register_forward_pre_hook(fail)
    check_refused(model, "its forward over packed tokens fails: view size is not compatible")


LARGE = [(1.01, True), (1.0, False)]  # factor of the scale, and whether there is a window


@pytest.mark.parametrize(
    "name, factor, has_window",
    [
        *((name, *mistake) for name in ("dots1", "exaone_moe", "afmoe") for mistake in LARGE),
        ("llama", 1 + 1e-6, True),
    ],
)
def test_mistake_in_cached_attention_is_refused(name, factor, has_window, monkeypatch):
    """A large mistake where parts are in float32; a small one in float64."""
    correct = torch_ops.attend

    def mistaken(query, packing, cache, options):
        window = options.window if has_window else None
        wrong = options._replace(scaling=options.scaling * factor, window=window)
        return correct(query, packing, cache, wrong)

    monkeypatch.setattr(torch_ops, "attend", mistaken)
    check_refused(build(*SERVED[name]), "logits through the K/V cache differ")


@pytest.mark.parametrize("at, is_refused", [(WINDOW, True), (LONGEST, False)])
def test_model_is_checked_beyond_the_window(at, is_refused):
    """A rule of the model's own that starts at a length is found if a run reaches that length."""
    model = build("Mistral", {**GQA, "sliding_window": WINDOW})

    def rule(module, args, kwargs, output):
        if "packing" not in kwargs and output.last_hidden_state.shape[1] > at:
            output.last_hidden_state = output.last_hidden_state * 1.5

    model.model.register_forward_hook(rule, with_kwargs=True)
    if is_refused:
        check_refused(model, "logits through packed sequences differ")
    else:
        prepare_model(model, LONGEST)


def test_window_missing_in_the_mask_is_refused():
    """transformers' own SDPA looks at masks alone, so such a model attends to everything."""
    model = build("Llama", GQA)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda m, a, kw: (a, {**kw, "sliding_window": 40}), with_kwargs=True
        )
    check_refused(model, r"passes a sliding window of 40 tokens .* own mask differs")
    prepare_model(model, 40)


if __name__ == "__main__":  # write the page's results
    page = PAGE.read_text(encoding="utf-8")
    for line in LINES:
        page = page.replace(line[0], line[0].replace(line["result"], result_of(line["kind"])))
    PAGE.write_text(page, encoding="utf-8")
