"""The roofline against data sheets, the prototype of our kernels, and published timings."""

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.measured_costs import cost_of, predict, read_cases
from bubblespec.mechanisms.quantized.copy import LARGE
from bubblespec.mechanisms.tp_tail.shards import TPUnsupported
from bubblespec.tools.simulate import roofline as module
from bubblespec.tools.simulate.recorded import load_cost
from bubblespec.tools.simulate.roofline import FITTED, GPUS, MODELS, OWN, copy_roofline, roofline
from bubblespec.types import Load
from tests.helpers.checks import refusal

# Median milliseconds of the layers of vLLM 0.11.2 on an A100-SXM4-80GB, the copy's in int4: an
# excerpt of sd_toggle/configs/sweep_a100_tp1_*.csv, github.com/furiosa-ai/EfficientRollout, commit
# 0ff0bc5, Apache-2.0 (arXiv 2606.18967).
A100 = read_cases(str(Path(__file__).with_name("assets") / "a100_vllm.csv"))[0]
# gpt-fast's README (BSD-3): Llama-2-7B in bfloat16 on 1, 2, 4 and 8 A100-80GB, and in 8 and 4 bits
# on one, tokens per second.
GPT_FAST = {(1, 16): 104.9, (2, 16): 168.8, (4, 16): 254.0, (8, 16): 328.4}
GPT_FAST |= {(1, 8): 155.6, (1, 4): 196.8}
PROTOTYPE = Path(__file__).resolve().parents[1] / "docs" / "lab" / "data" / "h200_prototype.csv"
# Attention of a layer of the 7B by the same prototype: rows, tokens of each, context, microseconds.
PROTOTYPE_US = [
    (1, 1, 4096, 8.1), (1, 8, 4096, 9.7), (16, 1, 4096, 38.2), (16, 4, 4096, 46.0),
    (16, 8, 4096, 50.0), (128, 1, 4096, 249.4), (128, 4, 4096, 288.7), (128, 8, 4096, 303.4),
    (4, 64, 4096, 65.0), (4, 256, 4096, 182.0), (8, 1024, 1024, 220.0),
]  # fmt: skip


@pytest.mark.parametrize("model", sorted({case.model for case in A100}))
def test_a100_forwards_are_near_measurements(model):
    """Only the 7B has been fitted."""
    ratios: dict[str, list[float]] = {}
    for case in A100:
        if case.model == model:
            ratios.setdefault(case.mode, []).append(predict(case) / case.seconds)
    assert list(map(len, ratios.values())) == [5, 10, 5]
    of_copy = ratios.pop("drafter_decode")
    assert min(of_copy) > 0.85 and max(of_copy) < 1.15
    for of_mode in ratios.values():
        assert min(of_mode) > 0.8 and max(of_mode) < 1.2
        assert 0.92 < statistics.geometric_mean(of_mode) < 1.08


@pytest.mark.parametrize("case", GPT_FAST)
def test_gpt_fast_is_near_published_speed(case):
    num_ranks, bits = case
    cost = cost_of("a100", "llama-2-7b", num_ranks, engine="gpt-fast", bits=bits)
    ratio = cost.seconds(Load(1, 1, 0, 128)) * GPT_FAST[case]
    assert 0.85 < ratio < 1.15


def test_shared_keys_are_read_once_in_cascade(tmp_path):
    """32 rows are one sequence over the keys that they share; 4 rows read them from the cache."""
    lines = [f"7b,{rows},4096,,target_decode,1,{n}" for rows, n in ((4, 4096), (32, 4096), (4, 0))]
    columns = "model,batch,seq,gamma,mode,median_ms,shared"
    (tmp_path / "measured.csv").write_text("\n".join([columns, *lines]))
    few, many, apart = read_cases(str(tmp_path / "measured.csv"))[0]
    attention = cost_of("a100", "7b", engine="vllm").attention
    shared = 4096 - 16
    read_s = attention.position_s * 4 * (16 + shared / FITTED.shared_speed)
    alone_s = predict(apart) - attention.position_s * 4 * 4096
    assert predict(few) - alone_s == pytest.approx(read_s)
    products_s = cost_of("a100", "7b", engine="vllm").seconds(Load(32, 32))
    # 28 heads of one block each, which goes through all keys; then 32 rows of 16 keys.
    common_s = 28 * shared / 64 * FITTED.block_s
    rest_s = attention.seconds(32, 32, 32 * 16)
    expected_s = products_s + common_s + rest_s + 28 * FITTED.cascade_s
    assert predict(many) == pytest.approx(expected_s)


def test_own_steps_are_near_the_prototype():
    ratios: dict[str, list[float]] = {}
    for case in read_cases(str(PROTOTYPE))[0]:
        ratios.setdefault(case.mode, []).append(predict(case) / case.seconds)
    for of_mode in ratios.values():
        assert statistics.median(abs(ratio - 1) for ratio in of_mode) < 0.1
        assert min(of_mode) > 0.85 and max(of_mode) < 1.15


def test_own_attention_is_near_the_prototype():
    """A kernel and the one that merges its splits, whose launches the steps count by layer."""
    attention, launches_us = roofline("h200", "7b").attention, 1e6 * OWN.layer_s / 10 * 2
    errors = [
        (1e6 * attention.seconds(rows, rows * fed, rows * keys) / 28 + launches_us) / us - 1
        for rows, fed, keys, us in PROTOTYPE_US
    ]
    assert statistics.median(map(abs, errors)) < 0.1 and max(map(abs, errors)) < 0.2


@pytest.mark.parametrize(("tokens", "us"), [(1, 137.6), (128, 145.5)])
def test_own_products_are_near_measurements(tokens, us):
    products_us = 1e6 * roofline("h200", "7b").layers.seconds(tokens) / 28
    assert products_us + 4 * 1e6 * OWN.layer_s / 10 == pytest.approx(us, rel=0.1)


def test_one_verifying_row_is_split():
    """In vLLM the row waits for single blocks that go through all of its keys."""
    whole = cost_of("h200", "7b", engine="vllm").attention.seconds(1, 4, 8192)
    assert whole == pytest.approx(28 * 128 * 0.8 * FITTED.block_s, rel=0.01)
    assert roofline("h200", "7b").attention.seconds(1, 4, 8192) < whole / 8


def test_roofline_follows_the_data_sheet():
    cost, h200 = roofline("h200", "7b"), GPUS["h200"]
    layers, head = 28 * 3584 * (2 * 28 * 128 + 2 * 4 * 128 + 3 * 18944), 3584 * 152064
    assert MODELS["7b"].parameters == layers + head == pytest.approx(7.07e9, rel=1e-3)
    read_s = 2 * (layers + head) / (0.8 * h200.memory)
    overhead_s = (28 + 12 / 10) * OWN.layer_s + module.SAMPLE_S
    assert cost.seconds(Load(1, 1)) == pytest.approx(overhead_s + read_s, rel=0.005)
    prompt = Load(1, 50_000, 0, 0, 50_000, 0)
    computed_s = 50_000 * 2 * layers / (OWN.peak_share * h200.peak)
    assert cost.seconds(prompt) == pytest.approx(computed_s, rel=0.03)
    kv_bytes = 2 * 2 * 28 * 4 * 128
    attention_s = cost.seconds(Load(512, 512, 0, 10**6)) - cost.seconds(Load(512, 512))
    assert attention_s == pytest.approx(kv_bytes * 10**6 / (0.95 * h200.memory), rel=0.03)
    without_host = cost_of("h200", "7b", engine="graph").seconds(Load(16, 32, 16))
    host_s = module.HOST_S + module.VERIFY_S + 16 * module.VERIFY_ROW_S
    assert cost.seconds(Load(16, 32, 16)) - without_host == pytest.approx(host_s)


@pytest.mark.parametrize("model", MODELS)
def test_copy_share_grows_with_rows(model):
    """A copy reads a quarter or half of the bytes and computes as much."""
    own, copied = roofline("h100", model), copy_roofline("h100", model)
    shares = [
        copied.seconds(load) / own.seconds(load)
        for load in (Load(1, 1), Load(16, 16), Load(64, 64), Load(256, 256))
    ]
    assert shares == sorted(shares) and shares[0] < 1
    num_bytes = copied.layers.read_s / own.layers.read_s
    if MODELS[model].parameters >= LARGE:
        assert num_bytes == pytest.approx((0.5 + 4 / 128) / 2 * 0.8 / FITTED.copy_memory_share)
    else:
        assert num_bytes == pytest.approx(0.5 * 0.8 / module.INT8_MEMORY_SHARE)


@pytest.mark.parametrize(
    ("gpu", "memory", "peak", "processors"),
    [("rtx4090", 1008e9, 165e12, 128), ("l4", 300e9, 121e12, 58)],
)
def test_24_gb_cards_follow_their_data_sheets(gpu, memory, peak, processors):
    """Where one limit is far above the other: weights, keys, products, blocks of attention."""
    cost, shape = roofline(gpu, "1.5b"), MODELS["1.5b"]
    others_s = (28 + 12 / 10) * OWN.layer_s + module.SAMPLE_S
    read_s = cost.seconds(Load(1, 1)) - others_s
    assert read_s == pytest.approx(2 * shape.parameters / (0.8 * memory), rel=0.005)
    keys_s = cost.seconds(Load(64, 64, 0, 200_000)) - cost.seconds(Load(64, 64))
    assert keys_s == pytest.approx(2 * 2 * 28 * 2 * 128 * 200_000 / (0.95 * memory), rel=0.15)
    prompt_s = cost.layers.seconds(50_000)
    operations = 2 * shape.layer_weights * 50_000
    assert prompt_s == pytest.approx(operations / (OWN.peak_share * peak), rel=0.01)
    assert module.update_tokens_per_s(gpu, "1.5b") == pytest.approx(
        OWN.peak_share * peak / (6 * shape.parameters)
    )
    a100 = GPUS["a100"].peak / GPUS["a100"].num_processors
    assert GPUS[gpu].block_time == pytest.approx(a100 / (peak / processors), abs=0.005)


def test_24_gb_cards_are_slower_than_those_of_servers():
    loads = [Load(1, 1), Load(128, 128, 0, 128 * 3072), Load(128, 512, 128, 128 * 3072, 0, 384)]
    for load in loads:
        of_cards = [
            roofline(gpu, "1.5b").seconds(load) for gpu in ("h200", "h100", "a100", "rtx4090", "l4")
        ]
        assert of_cards == sorted(of_cards), load


def test_ranks_together_share_work_and_pay_for_all_reduces():
    alone, together, eight = (roofline("h200", "7b", ranks) for ranks in (1, 2, 8))
    weights_s = 2 * MODELS["7b"].parameters / (0.8 * GPUS["h200"].memory)
    all_reduces_s = (2 * 28 + 1) * 6.81e-6
    expected_s = alone.seconds(Load(1, 1)) - weights_s / 2 + all_reduces_s
    assert together.seconds(Load(1, 1)) == pytest.approx(expected_s, rel=0.002)
    assert together.attention.position_s == pytest.approx(alone.attention.position_s / 2)
    # More ranks than key/value heads: each reads a whole one. 28 query heads: some ranks have 4.
    assert eight.attention.position_s == pytest.approx(alone.attention.position_s / 4)
    assert (eight.attention.heads, eight.attention.kv_heads) == (4, 1)
    prompt = [cost.seconds(Load(1, 5000, 0, 0, 5000, 0)) for cost in (alone, together, eight)]
    assert prompt[0] > prompt[1] > prompt[2] > prompt[0] / 8
    load_cost("h200:1.5b", 12)
    assert refusal(load_cost, "h200:1.5b", 16).startswith("h200:1.5b: ")


def test_more_work_never_takes_less_time():
    cost, rows = roofline("h100", "1.5b"), 16
    by_tokens = [
        cost.seconds(Load(rows, rows * n, rows, rows * 9000)) for n in (2, 8, 64, 100, 600)
    ]
    by_positions = [cost.seconds(Load(rows, rows, 0, rows * n)) for n in (1, 60, 900, 9000)]
    assert by_tokens == sorted(by_tokens) and by_positions == sorted(by_positions)


def test_states_are_read_and_written_once_whatever_the_window():
    """Qwen3.5-2B: 18 layers with 16 heads of 128 x 128, and the parameters of its products."""
    cost, shape = roofline("h200", "qwen3.5-2b"), MODELS["qwen3.5-2b"]
    layer = 2048 * (3 * 2048 + 2048 + 2 * 16) + 2048 * 2048  # q, k, v, z, b, a and out
    attention = 2048 * (2 * 2048 + 2 * 2 * 256) + 2048 * 2048  # gated queries, k, v and out
    products = 18 * layer + 6 * attention + 24 * 3 * 2048 * 6144 + 2048 * 248320
    assert shape.parameters == products
    state_s = 2 * 4 * 18 * 16 * 128 * 128 / (OWN.keys_share * 4.8e12)
    for fed in (1, 4):
        without = replace(cost, row_s=0.0)
        load = Load(64, 64 * fed, 0, 0, 0, 64 * (fed - 1))
        assert cost.seconds(load) - without.seconds(load) == pytest.approx(64 * state_s)
    with pytest.raises(TPUnsupported):
        roofline("h200", "qwen3.5-2b", 2)
