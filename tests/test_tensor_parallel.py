"""A forward in shards on 2 to 4 ranks, which are threads, against the whole model."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import transformers

from bubblespec.config import ModelConfig
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.comparison import random_tokens
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.kv_cache import KVCache, pack_rows
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.sampling import sample, stream_keys
from bubblespec.learn.lora import add_adapter
from bubblespec.mechanisms.tp_tail.shards import (
    ShardedForward,
    TPUnsupported,
    partial_linear,
    sample_shards,
    shard_heads,
    shard_of,
)
from tests.helpers.generation import make_runner
from tests.helpers.models import ARCHITECTURES, GQA, SMALL, VOCAB, config_of, random_model
from tests.helpers.tp import run_together

LONGEST = 64
UNEVEN = {**SMALL, "hidden_size": 72, "intermediate_size": 97, "tie_word_embeddings": True}
UNEVEN |= {"num_attention_heads": 9, "num_key_value_heads": 3}
CONFIGS = {name: ARCHITECTURES[name] for name in ("llama", "qwen2", "qwen3", "mistral-window")}
CONFIGS |= {
    "uneven, tied": ("Llama", UNEVEN),
    "biases everywhere": ("Llama", {**GQA, "attention_bias": True, "mlp_bias": True}),
    "fused": ("Phi3", GQA),
    "one key/value head": ("Llama", {**GQA, "num_key_value_heads": 1}),
}
KNOWN = {"fused": 61}  # ids with a token, where these are not all


def build(name: str, dtype: torch.dtype = torch.float64) -> transformers.PreTrainedModel:
    model = random_model(config_of(*CONFIGS[name]), dtype)
    for parameter in model.parameters():  # biases start as zeros
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
    prepare_model(model, LONGEST, KNOWN.get(name))
    return model


@torch.inference_mode()
def whole_and_sharded(
    model, size: int, fed: list[tuple[list[int], list[int]]]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tokens = [random_tokens(model, 40), random_tokens(model, 60)[20:]]

    def logits(forward: ModelForward) -> torch.Tensor:
        cache = KVCache(2, LONGEST)
        parts = []
        for start, count in fed:
            rows = zip(tokens, start, count, strict=False)
            ids = torch.cat([row[begin : begin + n] for row, begin, n in rows])
            packing = pack_rows(cache, np.array(start), np.array(count), model.device)
            parts.append(forward.logits(forward.hidden(ids, packing)))
        return torch.cat(parts)

    def of_rank(tp):
        with torch.inference_mode():
            return logits(ShardedForward(copy.deepcopy(model), tp))

    return logits(ModelForward(model)), run_together(size, of_rank)


FED = [([0, 0], [9, 1]), ([9, 1], [1, 20]), ([10, 21], [4, 1]), ([14], [1])]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_shards_give_the_logits_of_the_whole_model(name, size):
    model = build(name)
    wanted, shards = whole_and_sharded(model, size, FED)
    count = KNOWN.get(name, VOCAB)
    widths = [len(range(count)[shard_of(count, rank, size)]) for rank in range(size)]
    assert [part.shape[1] for part in shards] == widths
    scale = max(wanted.abs().max().item(), 1.0)
    assert (torch.cat(shards, dim=1) - wanted).abs().max() < 1e-12 * (scale + 1)


def test_shards_of_adapted_model_equal_the_whole():
    pytest.importorskip("peft", reason="pip install -r requirements-lora.txt")
    model = build("biases everywhere")
    add_adapter(model, ModelConfig(path="", lora_r=3, lora_alpha=12), seed=3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # they start as zeros
            torch.nn.init.normal_(parameter.data, std=0.1)
    base, _ = whole_and_sharded(build("biases everywhere"), 2, FED)
    wanted, shards = whole_and_sharded(model, 3, FED)
    assert (wanted - base).abs().max() > 0.1
    assert (torch.cat(shards, dim=1) - wanted).abs().max() < 1e-12


@pytest.mark.parametrize(
    "heads, key_heads", [(4, 2), (9, 3), (28, 4), (40, 8), (6, 1), (8, 8), (5, 5)]
)
def test_heads_are_shared_by_all_ranks(heads, key_heads):
    for size in range(1, 2 * heads):
        if heads // key_heads < -(-size // key_heads):
            for rank in range(size):  # or some would wait for the others
                with pytest.raises(TPUnsupported, match=f"{heads} query heads and {key_heads} "):
                    shard_heads(heads, key_heads, rank, size)
            continue
        shares = [shard_heads(heads, key_heads, rank, size) for rank in range(size)]
        assert [q for share in shares for q in range(heads)[share[0]]] == list(range(heads))
        for share in shares:
            queries_per_kv = heads // key_heads
            looked_at = {q // queries_per_kv for q in range(heads)[share[0]]}
            keys = range(key_heads)[share[1]]
            assert looked_at == set(keys) and len(range(heads)[share[0]]) % len(keys) == 0


@pytest.mark.parametrize("name, why", [("gpt2", "not built like Llama"), ("olmo2", "norms over")])
def test_architectures_that_cannot_be_cut_are_refused(make_model, name, why):
    model = make_model(name, max_length=LONGEST)
    with pytest.raises(TPUnsupported, match=why):
        run_together(2, partial(ShardedForward, model))


def test_wrong_shard_is_found(make_model):
    """The second of two ranks takes the inputs of the first."""
    model = make_model("llama", max_length=LONGEST)

    def check(tp):
        forward = make_runner(copy.deepcopy(model), 2, LONGEST, 0, tp=tp).forward
        forward.check()
        down, width = forward.model.model.layers[0].mlp.down_proj, model.config.intermediate_size
        layers = forward.decoder.layers
        wrong = partial(partial_linear, down, (slice(0, width // 2),), True)
        layers[0] = layers[0]._replace(down=lambda x: tp.all_reduce_(wrong(x)))
        with pytest.raises(TPUnsupported, match=r"Llama.* in shards differs from the whole"):
            forward.check()

    run_together(2, check)


@pytest.mark.parametrize("failing", [{0, 1}, {1}])
def test_model_failing_in_shards_is_refused(make_model, failing):
    """On all ranks, also where one rank alone fails, for which no other waits."""
    model = make_model("llama", max_length=LONGEST)

    def check(tp):
        own = copy.deepcopy(model)
        if tp.rank in failing:
            own.model.layers[1].self_attn.scaling = "one"
        with pytest.raises(TPUnsupported) as error:
            make_runner(own, 2, LONGEST, 0, tp=tp).forward.check()
        return str(error.value).partition(" in shards fails: ")[2]

    first, second = run_together(2, check)
    assert first == second and first.startswith("TypeError: scaled_dot_product_attention")


# Sampling

PARAMS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.6, stop_token_ids=(3, 60, 96), min_length=4),
    "greedy": SamplingParams(temperature=0.0, stop_token_ids=(3, 60, 96), min_length=4),
    "top_p": SamplingParams(temperature=0.8, top_p=0.7),
    "top_k": SamplingParams(top_k=9, stop_token_ids=(3, 60), min_length=4),
}


@pytest.mark.parametrize("offset", [0, 1 << 29])
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_samples_of_shards_equal_the_whole(name, size, offset, monkeypatch):
    monkeypatch.setattr("bubblespec.engine.sampling.MAX_LOGITS_AT_ONCE", {"cpu": 1000})
    count = 300
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(count, VOCAB, generator=generator, dtype=torch.float64)
    logits[:, [3, 60, 96]] += 3  # barred at the beginning
    numbers = np.arange(count)
    keys = torch.from_numpy(stream_keys(4, numbers, numbers * 0, numbers * 0, numbers % 9)).clone()
    keys[:, 0] += offset
    generated = torch.from_numpy(numbers % 9)
    wanted = sample(logits, keys, generated, PARAMS[name])

    def of_rank(tp):
        own = logits[:, shard_of(VOCAB, tp.rank, size)]
        return sample_shards(own, keys, generated, PARAMS[name], vocab_size=VOCAB, tp=tp)

    for token, logprob in run_together(size, of_rank):
        assert torch.equal(token, wanted[0])
        torch.testing.assert_close(logprob, wanted[1], rtol=1e-13, atol=1e-13)
