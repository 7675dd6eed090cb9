"""The quantised copy as a drafter: what it computes, how long its chains are, how it is renewed."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from test_architectures import LONGEST, SERVED, build
from torch.nn.functional import linear

from bubblespec.config import ModelConfig
from bubblespec.draft.proposer import Proposer
from bubblespec.engine import sampling
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.comparison import random_tokens
from bubblespec.engine.engine import Engine
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.kv_cache import KVCache, pack_rows
from bubblespec.engine.model import OutputHead, enable_gradient_checkpointing, output_head
from bubblespec.engine.model_checks import prepare_model
from bubblespec.learn.lora import add_adapter
from bubblespec.mechanisms.quantized import copy as products
from bubblespec.mechanisms.quantized.copy import (
    CopyForward,
    CopyRunner,
    Product,
    QuantizedDraftModel,
)
from bubblespec.mechanisms.quantized.mechanism import (
    MAX_CHAIN_LENGTH,
    RENEWAL_SHARE,
    QuantizedMechanism,
)
from bubblespec.mechanisms.quantized.mechanism import make_source as source_of
from bubblespec.planner.costs import KNOTS, CostModel
from bubblespec.types import Row, SampleId
from tests.helpers.generation import make_runner
from tests.helpers.graphs import needs_interpreter, stand_in
from tests.helpers.models import VOCAB, random_model, small_config
from tests.helpers.rows import numbered

# A product that loses nothing: a copy with it computes what the policy does.
EXACT = Product(
    "exact", 64, lambda w, f: (w * f,), lambda x, w: linear(x, w[0].to(x)), lambda k, m: True
)
LIKE_LLAMA = {"llama", "qwen2", "qwen3", "mistral", "mistral-window", "ministral3"}
LIKE_LLAMA |= {"granite", "seed_oss", "smollm3", "phi3", "olmo2"}
MAX_LENGTH, SEED = 80, 5


def make_policy(name: str, dtype=torch.float64) -> transformers.PreTrainedModel:
    model = random_model(small_config(name), dtype)
    prepare_model(model, MAX_LENGTH)
    return model


def make_copy(model, product: Product = EXACT) -> QuantizedDraftModel:
    return QuantizedDraftModel(
        model, product, products.observe_inputs(model, random_tokens(model, 40))
    )


def hidden(forward, tokens: torch.Tensor) -> torch.Tensor:
    count = np.array([len(tokens)])
    packing = pack_rows(KVCache(1, MAX_LENGTH), 0 * count, count, tokens.device)
    with torch.inference_mode():
        return forward.hidden(tokens, packing)


# Products


def test_int8_weights_are_off_by_half_a_step():
    weight = torch.randn(30, 50) * torch.rand(30, 1)
    whole, step = products.round_to_int8(weight)
    assert whole.abs().max() == 127 and whole.dtype == torch.int8
    error = (whole * step[:, None] - weight).abs()
    assert (error <= 0.5 * step[:, None] * (1 + 1e-5)).all()
    assert error.max() > 0.3 * step.min()


def test_int4_weights_are_off_by_half_a_step():
    weight = torch.randn(16, 2 * products.GROUP) + 0.3
    levels, step, middle = products.round_to_int4(weight)
    assert levels.min() == 0 and levels.max() == 15
    grids = (of.repeat_interleave(products.GROUP, dim=1) for of in (step, middle))
    step, middle = grids
    error = ((levels.int() - products.HALF) * step + middle - weight).abs()
    assert (error <= 0.5 * step * (1 + 1e-4)).all()


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_int8_product_is_near_the_exact_product(rows):
    weight, x = torch.randn(64, 96), torch.randn(rows, 96)
    x *= 10.0 ** torch.linspace(0, -3, rows)[:, None]
    wanted = linear(x.double(), weight.double())
    packed = products.INT8_CPU.pack(weight, torch.ones(96))
    found = products.INT8_CPU.multiply(x, packed)
    error = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert (error < 0.03).all() and error.max() > 1e-4
    assert products.INT8_CPU.multiply(x.double(), packed).dtype == torch.float64


def test_product_depends_on_device_type_bits_and_size(monkeypatch):
    model, half = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).bfloat16()
    for wanted, large, *given in (
        ("int8", 99, model, "cpu", "auto"),
        (None, 99, model, "cpu", 4),
        (None, 99, half, "cuda", "auto"),
        ("int4", 50, half, "cuda", "auto"),
        (None, 50, half, "cuda", 8),
        ("int4", 99, half, "cuda", 4),
        (None, 50, model, "cuda", "auto"),
    ):
        monkeypatch.setattr(products, "LARGE", large)
        found = products.product_for(*given)
        assert (found and found.name) == wanted


# The copy


@pytest.mark.parametrize("name", sorted(LIKE_LLAMA))
def test_copy_without_rounding_computes_the_policy(name):
    model = build(*SERVED[name])
    prepare_model(model, LONGEST)
    copy, tokens = make_copy(model), random_tokens(model, 30)
    wanted, found = (hidden(of, tokens) for of in (ModelForward(model), CopyForward(copy)))
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)
    with torch.inference_mode():
        assert torch.allclose(copy.head(found), output_head(model)(found), rtol=0, atol=1e-5)
    assert all(len(layers) in (1, 2, 3) for layers in copy.parts)
    assert len(copy.parts) == 4 * model.config.num_hidden_layers + 1


def test_gradient_checkpointing_of_the_policy_is_left_out():
    model = make_policy("llama")
    enable_gradient_checkpointing(model)
    copy = make_copy(model)
    with torch.no_grad():
        for part in copy.parts.values():
            part.packed[0].zero_()  # the copy's layers, not the policy's, are what it runs
    tokens = random_tokens(model, 9)
    with torch.inference_mode():
        embedded = model.model.norm(model.get_input_embeddings()(tokens))
    assert torch.allclose(hidden(CopyForward(copy), tokens), embedded)


def test_channels_are_smoothed_by_inputs_and_weights():
    """With alpha = 0.5 both are equally large afterwards, in each channel."""
    layers = [torch.nn.Linear(24, width, bias=False).double() for width in (8, 5)]
    with torch.no_grad():
        for layer in layers:
            layer.weight *= 10.0 ** torch.linspace(-2, 2, 24)[torch.randperm(24)]
    largest = 10.0 ** torch.linspace(-1, 3, 24)
    factor = products.Layers(tuple(layers), EXACT, largest).factor
    weights = torch.cat([layer.weight for layer in layers]).detach().abs().amax(dim=0).float()
    assert torch.allclose(largest / factor, weights * factor, rtol=1e-4)


def test_renewals_have_the_credit_of_one_rollout():
    """What rollouts leave is lost; what they take too much the next one lacks."""
    model = make_policy("llama")
    source = make_source(model, make_copy(model), SamplingParams(), 2)
    made, limits = QuantizedMechanism(source), []
    made.copy.renew = lambda clock, limit_s: limits.append(limit_s) or taken.pop(0)
    taken, plan = [0.0, 0.0, 0.3, 0.0], SimpleNamespace(step=1, without=frozenset(), params=None)
    for _ in range(4):
        made.end_rollout(SimpleNamespace(total_s=5.0))
        made.begin_rollout(plan)
    assert limits == pytest.approx([0.1, 0.1, 0.1, -0.1]) and RENEWAL_SHARE == 0.02


@pytest.mark.parametrize("adapters", [False, True])
def test_renewal_takes_the_oldest_parts_first_and_all_in_the_end(adapters):
    model = random_model(small_config("llama"))
    if adapters:
        add_adapter(model, ModelConfig(lora_r=4, lora_alpha=8), 0)
    prepare_model(model, MAX_LENGTH)
    copy, tokens = make_copy(model), random_tokens(model, 9)
    assert copy.renew(lambda: 0.0, 1.0) == 0.0  # nothing has changed
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    before = [part.packed[0].clone() for part in copy.parts.values()]
    copy.note_update()
    ticks = itertools.count()
    count = len(copy.parts)
    copy.renew(lambda: next(ticks), count // 2)
    changed = [
        not torch.equal(a, part.packed[0])
        for a, part in zip(before, copy.parts.values(), strict=True)
    ]
    first = sum(changed)
    assert 0 < first < count and changed == sorted(changed, reverse=True)
    copy.renew(lambda: 0.0, 1.0)
    wanted = hidden(ModelForward(model), tokens)
    assert torch.allclose(hidden(CopyForward(copy), tokens), wanted, rtol=0, atol=1e-5)


# Chains


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=9),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=0.7, top_k=30, top_p=0.9, stop_token_ids=(3, 8), min_length=4),
]


@pytest.mark.parametrize("params", PARAMS)
def test_draw_among_all_tokens_is_the_samplers(params):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(40, VOCAB, generator=generator, dtype=torch.float64)
    logits[:, [3, 8]] += 6.0  # stop tokens mostly win where they may
    keys = torch.randint(-(2**31), 2**31, (40, 4), generator=generator).int()
    position = torch.arange(40) % 8
    order = logits.argsort(descending=True)
    token, lead = sampling.draw_among(logits.gather(1, order), order, keys, position, params)
    assert torch.equal(token, sampling.sample(logits, keys, position, params)[0])
    assert (lead >= 0).all()


def test_logits_of_candidates_are_those_of_the_head():
    linear_head = torch.nn.Linear(16, VOCAB).double()
    hidden, ids = torch.randn(5, 16).double(), torch.randint(VOCAB, (5, 9))
    for factor, cap in ((1.0, None), (0.3, None), (1.0, 0.5), (2.0, 0.7)):
        head = OutputHead(linear_head, VOCAB, factor, cap)
        with torch.no_grad():
            found, wanted = products.exact_logits(head, hidden, ids), head(hidden).gather(1, ids)
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)


def make_source(
    model, copy: QuantizedDraftModel, params: SamplingParams, num_slots: int, **options
):
    engine = Engine(make_runner(model, num_slots, MAX_LENGTH, SEED, **options))
    flat = CostModel.from_parameters(np.append([1.0, 0, 1e-6, 0, 0], np.zeros(len(KNOTS))))
    cheap = CostModel.from_parameters(np.append([0.02, 0, 1e-6, 0, 0], np.zeros(len(KNOTS))))
    clock = SimpleNamespace(perf_counter=lambda: 0.0)
    return source_of(CopyRunner(copy, engine, params), flat, cheap, clock=clock)


def generated(source, num_rows: int, limit: int = 40) -> tuple[list[Row], int]:
    engine, proposer = source.runner.engine, Proposer([source], source.cost)
    rows = [Row(SampleId(n // 2, 0, n), tuple(range(1, 4 + n % 3)), limit) for n in range(num_rows)]
    engine.add(rows)
    proposer.begin()
    for row in numbered(rows).values():
        proposer.track(row, 0)
    while not engine.is_idle:
        engine.step(source.runner.params, proposer)
    return rows, engine.num_forwards


def plain(model, params: SamplingParams, num_rows: int, limit: int = 40) -> list[Row]:
    rows = [Row(SampleId(n // 2, 0, n), tuple(range(1, 4 + n % 3)), limit) for n in range(num_rows)]
    Engine(make_runner(model, num_rows, MAX_LENGTH, SEED)).run(rows, params)
    return rows


@pytest.mark.parametrize(
    "name, paged, params",
    [("llama", True, PARAMS[0]), ("phi3", False, PARAMS[1]), ("llama", False, PARAMS[2])],
)
def test_every_token_of_an_exact_copy_is_right(name, paged, params):
    model = make_policy(name)
    options = {"page_size": 16} if paged else {}
    source = make_source(model, make_copy(model), params, 3, **options)
    rows, num_forwards = generated(source, 7)
    for row, other in zip(rows, plain(model, params, 7), strict=True):
        assert row.tokens.tolist() == other.tokens.tolist()
    tried, right = source.rates.survival.counts[2:, 1, -1]
    assert tried == right > 100
    assert num_forwards < 7 * 40 / 3 / 4


def test_renewed_copy_in_graphs_has_the_new_weights(monkeypatch):
    """Graphs know weights by their addresses; the memory of graphs is the policy's."""
    pytest.importorskip("triton")
    model, params, wanted = make_policy("qwen2", torch.float32), SamplingParams(), []
    disturbed = make_policy("qwen2", torch.float32)
    change = [0.05 * torch.randn_like(parameter) for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, by in zip(disturbed.parameters(), change, strict=True):
            parameter.add_(by)
    for of in (model, disturbed):
        wanted.append([row.tokens.tolist() for row in plain(of, params, 2, 6)])
    captures = stand_in(monkeypatch)
    source = make_source(model, make_copy(model), params, 2, max_num_batched_tokens=8)
    copies, policy = source.runner, source.runner.runner
    policy.followers.append(copies)
    for seed in range(2):
        rows, num_forwards = generated(source, 2, 6)
        assert [row.tokens.tolist() for row in rows] == wanted[seed]
        tried, right = source.rates.survival.counts[2:, 1, -1]
        assert tried == right > 4 and num_forwards <= 4 * (seed + 1), "every draft is right"
        assert copies.graphs.num_replays > 2 * (seed + 1) and captures.pools.count(None) == 1
        source.runner.engine.reset()
        with torch.no_grad():
            for parameter, by in zip(model.parameters(), change, strict=True):
                parameter.add_(by)
        copies.copy.note_update()
        copies.copy.renew(lambda: 0.0, 1.0)
    policy.release()
    assert not copies.graphs.graphs


test_renewed_copy_in_graphs_has_the_new_weights.pytestmark = needs_interpreter


@pytest.mark.parametrize("kind", ["int8", "wrong"])
def test_a_bad_copy_changes_no_token(kind):
    model, params = make_policy("qwen3"), PARAMS[2]
    copy = make_copy(model, products.INT8_CPU)
    if kind == "wrong":
        other = random_model(small_config("qwen3"))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.normal_(std=0.3)
        prepare_model(other, MAX_LENGTH)
        copy = make_copy(other)
    source = make_source(model, copy, params, 3)
    source.always = True
    rows, _ = generated(source, 7)
    for row, wanted in zip(rows, plain(model, params, 7), strict=True):
        assert row.tokens.tolist() == wanted.tokens.tolist()
        assert np.allclose(row.logprob, wanted.logprob, rtol=0, atol=1e-9)
    tried, right = source.rates.survival.counts[2:, 1, -1]
    assert tried > right and (right > 0.5 * tried) == (kind == "int8")


@pytest.mark.parametrize("kind", ["not a number", "an error"])
def test_copy_that_fails_in_a_rollout_drafts_no_more(kind):
    """Its keys and values are in the policy's cache, where other rows' masks must find numbers."""
    model, params = make_policy("llama"), SamplingParams()
    wanted = plain(model, params, 7)

    def multiply(x, packed):
        calls.append(len(x))
        if len(calls) == 208 and kind == "an error":
            raise RuntimeError("of a kernel,\nin two lines")
        return linear(x, packed[0].to(x)) * (np.nan if len(calls) > 200 else 1.0)

    calls: list[int] = []
    source = make_source(model, make_copy(model, EXACT._replace(multiply=multiply)), params, 3)
    rows, _ = generated(source, 7)
    assert len(calls) < 230 and not source.is_enabled
    assert source.problem in (
        "ValueError: its logits are not numbers",
        "RuntimeError: of a kernel, in two lines",
    )
    assert source.chain_lengths[1:].any() and (source.shortening(20.0) == 1.0).all()
    for row, other in zip(rows, wanted, strict=True):
        assert row.tokens.tolist() == other.tokens.tolist()
    cache = source.runner.runner.cache
    assert all(
        of.keys.isfinite().all() and of.values.isfinite().all() for of in cache.layers.values()
    )


def test_chains_end_at_limits_and_at_high_cost():
    model = make_policy("llama")
    source = make_source(model, make_copy(model), SamplingParams(), 4)
    rows, _ = generated(source, 4, limit=6)
    assert [len(row.tokens) for row in rows] == [6] * 4
    assert source.chain_lengths[1:].sum() > 0 and not source.chain_lengths[6:].any()
    slow = CostModel.from_parameters(np.append([2.0, 0, 0, 0, 0], np.zeros(len(KNOTS))))
    source.own_cost = slow
    before = source.chain_lengths.copy()
    generated(source, 4)
    assert not (source.chain_lengths - before)[1:].any() and source.chance == 0.0
    assert source.shortening(20.0) == pytest.approx(1.0)


def test_cheap_copies_shorten_decoding():
    model = make_policy("llama")
    source = make_source(model, make_copy(model), SamplingParams(), 4)
    factors = source.shortening(20.0)
    mean, lengths = source.rates.mean, np.arange(MAX_CHAIN_LENGTH + 1)
    gained = np.cumsum(mean**lengths)
    assert factors[0] == pytest.approx(((1.0 + 0.02 * lengths) / gained).min(), rel=1e-3)
    cost = CostModel.from_parameters(source.cost.parameters)
    cost.chains = np.linspace(0.3, 1.0, 8)
    assert cost.seconds(1, 1) == pytest.approx(0.3 * source.cost.seconds(1, 1))
    assert cost.seconds(300, 300) == pytest.approx(source.cost.seconds(300, 300))
