"""A forward in shards on 2 to 4 ranks, which are threads, against the whole model."""

import copy

import numpy as np
import pytest
import torch
import transformers
from test_architectures import SERVED

from bubblespec.config import ModelConfig
from bubblespec.engine.engine import Engine
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import forward_hidden
from bubblespec.engine.model_checks import prepare_model, random_tokens
from bubblespec.engine.noise import stream_keys
from bubblespec.engine.output_head import output_head
from bubblespec.engine.packing import pack_rows
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams, sample
from bubblespec.learn.lora import add_adapter
from bubblespec.mechanisms.tp_tail.shards import (
    ShardedForward,
    TPUnsupported,
    plan_shards,
    sample_shards,
    shard_heads,
    shard_of,
)
from bubblespec.types import Row, SampleId
from tests.helpers.generation import Drafter, as_dict, make_runner
from tests.helpers.models import ARCHITECTURES, GQA, SMALL, VOCAB, config_of, random_model
from tests.helpers.tp import run_together

LONGEST = 64
UNEVEN = {**SMALL, "hidden_size": 72, "intermediate_size": 97, "tie_word_embeddings": True}
UNEVEN |= {"num_attention_heads": 9, "num_key_value_heads": 3}
CAPPED = {**GQA, "head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0}
# olmo2: only its MLP, mixtral: only its attention is named by styles that are cut.
CONFIGS = {name: ARCHITECTURES[name] for name in ("llama", "qwen2", "qwen3", "mistral-window")}
CONFIGS |= {name: ARCHITECTURES[name] for name in ("gpt_neox", "olmo2")} | {
    "uneven, tied": ("Llama", UNEVEN),
    "biases everywhere": ("Llama", {**GQA, "attention_bias": True, "mlp_bias": True}),
    "gemma": ("Gemma", {**GQA, "head_dim": 24}),
    "starcoder2": ("Starcoder2", {**GQA, "use_bias": True}),
    "one key/value head": ("Llama", {**GQA, "num_key_value_heads": 1}),
    "mixtral": ("Mixtral", {**GQA, "num_local_experts": 4}),
    "capped": ("Gemma3Text", CAPPED),
    "gemma4": SERVED["gemma4_keys"],
}
KNOWN = {"capped": 61}  # ids with a token, where these are not all


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
    """Return logits of the whole model and of each rank. fed: cached and new tokens by row."""
    tokens = [random_tokens(model, 40), random_tokens(model, 60)[20:]]

    def logits(model, cache: KVCache, head) -> torch.Tensor:
        parts = []
        for start, count in fed:
            rows = zip(tokens, start, count, strict=False)
            ids = torch.cat([row[begin : begin + n] for row, begin, n in rows])
            packing = pack_rows(cache, np.array(start), np.array(count), model.device)
            parts.append(head(forward_hidden(model, ids, packing)))
        return torch.cat(parts)

    def of_rank(tp):
        with torch.inference_mode():
            own = copy.deepcopy(model)
            shards = ShardedForward(own, tp)
            with shards.applied():
                return logits(own, KVCache(2, LONGEST), shards.logits)

    return logits(model, KVCache(2, LONGEST), output_head(model)), run_together(size, of_rank)


FED = [([0, 0], [9, 1]), ([9, 1], [1, 20]), ([10, 21], [4, 1]), ([14], [1])]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_shards_give_the_logits_of_the_whole_model(name, size):
    model = build(name)
    if name == "gpt_neox" and size == 3:
        size = 2  # 4 heads without groups on 3 ranks are as good as on 4; 3 is for uneven ones
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


def test_shards_are_views_of_every_layer():
    """In all seven layers of a Llama block the ranks' parts make up the whole."""
    model = build("uneven, tied")
    cuts = [plan_shards(model, rank, 2)[0] for rank in range(2)]
    assert len(cuts[0]) == 7 * model.config.num_hidden_layers
    for first, second in zip(*cuts, strict=True):
        width = first.module.in_features if first.is_rowwise else first.module.out_features
        assert (first.part.start, second.part.stop) == (0, width)
        assert first.part.stop == second.part.start
    attention = model.model.layers[0].self_attn
    parts = {id(c.module): c.part for c in cuts[0]}
    query = parts[id(attention.q_proj)]
    assert parts[id(attention.k_proj)] == slice(0, 8) and query == slice(0, 24)
    weight = attention.q_proj.weight
    assert weight[query].data_ptr() == weight.data_ptr()


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
            fold = heads // key_heads
            looked_at = {q // fold for q in range(heads)[share[0]]}
            keys = range(key_heads)[share[1]]
            assert looked_at == set(keys) and len(range(heads)[share[0]]) % len(keys) == 0


@pytest.mark.parametrize("name", ["gpt2", "phi3"])
def test_architectures_without_a_plan_are_refused(make_model, name):
    with pytest.raises(TPUnsupported, match="has no tensor-parallel plan"):
        plan_shards(make_model(name), 0, 2)


def test_wrong_plan_is_found(make_model):
    """The second of two ranks takes the inputs of the first."""
    model = make_model("llama", max_length=LONGEST)

    def check(tp):
        runner = make_runner(copy.deepcopy(model), 2, LONGEST, 0, tp=tp)
        runner.forward.check()
        runner.forward.specs = [
            c._replace(part=slice(0, 48)) if c.part == slice(48, 96) and c.is_rowwise else c
            for c in runner.forward.specs
        ]
        with pytest.raises(TPUnsupported, match=r"Llama.* in shards by .* differs from the whole"):
            runner.forward.check()

    run_together(2, check)


@pytest.mark.parametrize("failing", [{0, 1}, {1}])
def test_model_failing_in_shards_is_refused(make_model, failing):
    """On all ranks, also where one rank alone fails, for which no other waits."""
    model = make_model("llama", max_length=LONGEST)

    def fail(module, args):
        raise TypeError("a hard-coded\nnumber of heads")

    def check(tp):
        own = copy.deepcopy(model)
        if tp.rank in failing:
            own.model.layers[1].self_attn.o_proj.register_forward_pre_hook(fail)
        with pytest.raises(TPUnsupported) as error:
            make_runner(own, 2, LONGEST, 0, tp=tp).forward.check()
        return str(error.value).partition(" in shards fails: ")[2]

    assert run_together(2, check) == ["TypeError: a hard-coded number of heads"] * 2


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

    for token, *logprobs in run_together(size, of_rank):
        assert torch.equal(token, wanted[0])
        for own, whole in zip(logprobs, wanted[1:], strict=True):
            torch.testing.assert_close(own, whole, rtol=1e-13, atol=1e-13)


def rows() -> list[Row]:
    prompts = [tuple(range(1, 4 + 3 * n)) for n in range(4)]
    return [Row(SampleId(n // 2, 1, n), prompts[n // 2], 24) for n in range(8)]


OF_ROWS = SamplingParams(temperature=0.9, stop_token_ids=(5, 11))


def plain_rows(model) -> list[Row]:
    return Engine(ModelRunner(model, 8, LONGEST, 3)).run(rows(), OF_ROWS)


def assert_same_rows(found: list[Row], wanted: list[Row]) -> None:
    assert as_dict(found) == as_dict(wanted)
    for row, of in zip(found, wanted, strict=True):
        np.testing.assert_allclose(row.logprob, of.logprob, rtol=1e-6)
        np.testing.assert_allclose(row.full_logprob, of.full_logprob, rtol=1e-6)


@pytest.mark.parametrize(
    "name, size", [("uneven, tied", 2), ("qwen3", 4), ("uneven, tied", 4), ("capped", 2)]
)
def test_rows_of_tp_engine_equal_plain_rows(name, size):
    """Few slots, right and wrong drafts, and rows that already have tokens."""
    model = build(name)
    wanted = plain_rows(model)

    def of_rank(tp):
        own, drafts = rows(), Drafter(as_dict(wanted), 0.3)
        for row, of in zip(own, wanted, strict=True):
            known = min(len(of.tokens) // 2, 7)
            row.tokens, row.logprob = of.tokens[:known].copy(), of.logprob[:known].copy()
            row.full_logprob = of.full_logprob[:known].copy()
        options = {"tp": tp, "max_num_batched_tokens": 24}
        runner = make_runner(copy.deepcopy(model), 4, LONGEST, 3, **options)
        runner.forward.check()
        Engine(runner).run(own, OF_ROWS, drafts)
        assert drafts.num_accepted > 30
        return own, runner.cache.keys[0].shape[2]

    config = model.config
    for rank, (own, num_heads) in enumerate(run_together(size, of_rank)):
        assert_same_rows(own, wanted)
        heads = shard_heads(config.num_attention_heads, config.num_key_value_heads, rank, size)[1]
        assert num_heads == heads.stop - heads.start, "a rank holds keys of its own heads alone"
