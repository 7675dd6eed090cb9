"""Families that the written-out decoder computes, and others: tokens, logits and kernels."""

import numpy as np
import pytest
import torch
from test_architectures import SERVED
from transformers import GenerationConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.decoder import ACTIVATIONS, Decoder, is_like_llama, stacked
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.kv_cache import KVCache, pack_rows
from bubblespec.engine.model import forward_hidden, output_head, pack_sequences
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.ops import torch_ops
from tests.helpers.generation import as_dict, make_engine, make_rows
from tests.helpers.graphs import Launches, needs_interpreter, stand_in
from tests.helpers.models import ARCHITECTURES, GQA, VOCAB, config_of, random_model

LENGTH, NUM_TOKENS = 48, 12
GREEDY = SamplingParams(temperature=0.0)
LIKE_LLAMA = {"llama", "mistral-window", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "gemma"}
OTHERS = {"mixtral", "gpt2", "cohere"}
KINDS = SERVED | ARCHITECTURES | {"cohere": ("Cohere", GQA)}
NO_ROTATION = {"layer_types": ["full_attention"] * 2}  # of Cohere 2, which rotates in float32
KINDS["smollm3"] = "SmolLM3", {**GQA, "no_rope_layer_interval": 2}  # its last layer rotates nothing


def build(name: str, dtype: torch.dtype = torch.float64, **options):
    """Create a model whose biases and norms are not the ones that they begin with."""
    kind, base = KINDS[name]
    model = random_model(config_of(kind, base, **options), dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.1)
    return model


@torch.no_grad()
def own_logits(model, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens[None], use_cache=False).logits[0]


def own_tokens(model, prompt: tuple[int, ...]) -> list[int]:
    config = GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    ids = torch.tensor([prompt])
    out = model.generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def packed_logits(model, tokens: torch.Tensor) -> torch.Tensor:
    forward, cache, found = ModelForward(model), KVCache(2, LENGTH), []
    for begin, end in ((0, 20), (20, 21), (21, 30)):
        start, count = np.array([begin, 0]), np.array([end - begin, 3])
        packing = pack_rows(cache, start, count, tokens.device)
        fed = torch.cat((tokens[begin:end], tokens[:3]))
        found.append(output_head(model)(forward.hidden(fed, packing)[: end - begin]))
    return torch.cat(found)


@pytest.mark.parametrize("name", sorted(LIKE_LLAMA | OTHERS))
def test_family_gives_the_models_own_tokens_and_logits(name):
    """Others than LIKE_LLAMA are served by their own modules. Norms are in float64 in both."""
    model, prompts = build(name), [(3, 1, 4), tuple(range(10, 31))]
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, 30))
    model.set_experts_implementation("eager")
    wanted = [own_tokens(model, prompt) for prompt in prompts]
    prepare_model(model, LENGTH)
    engine = make_engine(model, 2, max_length=LENGTH)
    has_decoder = engine.runner.forward.decoder is not None
    assert is_like_llama(model) == has_decoder == (name in LIKE_LLAMA)
    rows = engine.run(make_rows(prompts, 1, NUM_TOKENS), GREEDY)
    assert [row.tokens.tolist() for row in rows] == wanted
    found = packed_logits(model, tokens)
    model.set_attn_implementation("sdpa")
    logits = own_logits(model, tokens)[:, : found.shape[1]]
    tolerance = 1e-9 if name in LIKE_LLAMA else 1e-6
    assert (found - logits).abs().max() / logits.abs().max() < tolerance


@pytest.mark.parametrize("name", ["olmo2", "phi3", "smollm3"])
def test_decoder_on_a_gpu_gives_the_same_tokens(monkeypatch, name):
    pytest.importorskip("triton")
    model, rows = build(name, torch.float32), [(3, 1, 4, 1, 5), (9, 2)]
    prepare_model(model, LENGTH)
    engine = make_engine(model, 2, max_length=LENGTH)
    wanted = as_dict(engine.run(make_rows(rows, 1, 6), GREEDY))
    stand_in(monkeypatch)
    engine = make_engine(model, 2, max_length=LENGTH, enforce_eager=True)
    assert engine.runner.forward.decoder.ops.__name__.endswith("triton_ops")
    assert as_dict(engine.run(make_rows(rows, 1, 6), GREEDY)) == wanted


test_decoder_on_a_gpu_gives_the_same_tokens.pytestmark += needs_interpreter


def in_float64(norm) -> None:
    """Let a norm of Gemma or Cohere compute its formula in the type of what it is given."""
    is_offset = not hasattr(norm, "variance_epsilon")
    eps = norm.eps if is_offset else norm.variance_epsilon

    def forward(x):
        x = x if is_offset else x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (norm.weight + is_offset)

    norm.forward = forward


@pytest.mark.parametrize("name, options", [("gemma3", {}), ("cohere2", NO_ROTATION)])
def test_norms_of_float64_models_are_in_float64(name, options):
    """In generation and in training alike; transformers computes them in float32."""
    model, oracle = build(name, **options), build(name, **options)
    for module in oracle.modules():
        if hasattr(module, "eps") or hasattr(module, "variance_epsilon"):
            in_float64(module)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, 30))
    wanted = own_logits(oracle, tokens)
    prepare_model(model, LENGTH)
    packing = pack_sequences([30], tokens.device)
    trained = output_head(model)(forward_hidden(model, tokens, packing))
    for found in (packed_logits(model, tokens), trained.detach()):
        assert (found - wanted).abs().max() < 1e-12 * wanted.abs().max()


def scale_layer(model) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, out: 1.01 * out)


def scale_attention(model) -> None:
    attention = model.model.layers[0].self_attn
    attention.register_forward_hook(lambda module, args, out: (1.01 * out[0], *out[1:]))


def change_activation(model) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()


def add_output_bias(model) -> None:
    """Products are linear layers of any kind, so this is no difference."""
    layer = model.model.layers[0].self_attn.o_proj
    layer.bias = torch.nn.Parameter(torch.randn_like(layer.weight[:, 0]))


@pytest.mark.parametrize(
    "change, is_same",
    [
        (scale_layer, False),
        (scale_attention, False),
        (change_activation, False),
        (add_output_bias, True),
    ],
)
def test_model_computing_something_else_is_served_by_modules(change, is_same):
    model, prompt = build("llama"), (3, 1, 4)
    plain = own_tokens(model, prompt)
    change(model)
    wanted = own_tokens(model, prompt)
    prepare_model(model, LENGTH)
    assert is_like_llama(model) == is_same
    engine = make_engine(model, 1, max_length=LENGTH)
    (row,) = engine.run(make_rows([prompt], 1, NUM_TOKENS), GREEDY)
    assert row.tokens.tolist() == wanted and (wanted != plain or change is not add_output_bias)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activations_of_llama_are_computed(activation):
    model = build("llama", hidden_act=activation)
    prepare_model(model, LENGTH)
    assert is_like_llama(model)


@pytest.mark.parametrize("name, lacks", [("gpt2", "embed_tokens"), ("mixtral", "gate_proj")])
def test_missing_part_of_a_decoder_is_named(name, lacks):
    model = build(name)
    with pytest.raises(ValueError, match=f"is not built like Llama: .*{lacks}"):
        Decoder(model, stacked(model))


def test_rotary_tables_grow_with_the_cache():
    model, position = build("llama"), torch.arange(20)[None]
    decoder = Decoder(model, stacked(model))
    for length in (4, 20, 9):
        cos, sin = decoder.tables(length)
        wanted = model.model.rotary_emb(model.lm_head.weight[None, None], position[:, :length])
        for table, of in zip((cos, sin), wanted, strict=True):
            assert torch.equal(table[:length], of[0, :, : table.shape[1]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotation_rounds_as_that_of_transformers(dtype):
    """To the bit in bfloat16, where each product is rounded before the sum."""
    size, heads, kv_heads, position = 16, 4, 2, torch.arange(20)
    decoder = Decoder(model := build("llama", dtype), stacked(model))
    packing = pack_rows(cache := KVCache(1, 20), np.array([0]), np.array([20]), position.device)
    qkv = torch.randn(20, heads + 2 * kv_heads, size, dtype=dtype)
    parts = [part.clone() for part in qkv.split((heads, kv_heads, kv_heads), 1)]
    rotary = model.model.rotary_emb(model.lm_head.weight[None, None], position[None])
    wanted = apply_rotary_pos_emb(*(part[None] for part in parts[:2]), *rotary, unsqueeze_dim=2)
    own = cache.layer(0, *parts[1:])
    rotation = torch_ops.rotation(decoder.tables(20), packing)
    query = torch_ops.rope_store(qkv, packing, own, rotation)
    tolerance = 0 if dtype is torch.bfloat16 else 1e-6
    for found, of in zip((query, own.keys[0]), wanted, strict=True):
        torch.testing.assert_close(found, of[0], rtol=tolerance, atol=tolerance)


def kernels_of_step(monkeypatch, name: str, num_layers: int) -> list[str]:
    model = build(name, torch.float32, num_hidden_layers=num_layers)
    prepare_model(model, LENGTH)
    with monkeypatch.context() as patch:
        stand_in(patch)
        engine = make_engine(model, 3, max_length=LENGTH, max_num_batched_tokens=4)
        engine.add(make_rows([(3,), (5,), (8,)], 1, 9))
        engine.step(SamplingParams(temperature=0.7), None)
        launches = Launches(patch)
        with launches:
            engine.step(SamplingParams(temperature=0.7), None)
        assert engine.runner.graphs.pool.num_replays == 3, "the first step launches two"
    return launches.names


@pytest.mark.parametrize("name, most", [("qwen2", 10), ("qwen3", 12)])
def test_layer_and_the_rest_are_few_kernels(monkeypatch, name, most):
    one, two = (kernels_of_step(monkeypatch, name, count) for count in (1, 2))
    of_layer = len(two) - len(one)
    assert 0 < of_layer <= most, two
    assert len(one) - of_layer <= 16, one  # four of them are of the rows (triton_rows.py)
    assert two.count("_attend") == two.count("_rope_store") == two.count("_gated") == 2


test_layer_and_the_rest_are_few_kernels.pytestmark += needs_interpreter
