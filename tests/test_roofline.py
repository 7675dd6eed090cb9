"""The roofline against data sheets, the prototype of our kernels, and published timings."""

import statistics
from pathlib import Path

import pytest

from benchmarks.measured_costs import predict, read_cases
from bubblespec.mechanisms.quantized.products import LARGE
from bubblespec.tools.simulate import roofline as module
from bubblespec.tools.simulate.recorded import load_cost
from bubblespec.tools.simulate.roofline import (
    FITTED,
    GPUS,
    MODELS,
    OWN,
    copy_roofline,
    roofline,
)
from bubblespec.types import Load
from tests.helpers.checks import refusal

# Median milliseconds of the layers of vLLM 0.11.2 on an A100-SXM4-80GB: an excerpt of
# sd_toggle/configs/sweep_a100_tp1_*.csv of github.com/furiosa-ai/EfficientRollout, commit 0ff0bc5,
# Apache-2.0 (arXiv 2606.18967). Cases: rows, context, draft tokens per row.
CASES = [
    (1, 256, 0), (1, 4096, 0), (16, 256, 0), (64, 256, 0), (64, 4096, 0), (1, 256, 3), (1, 4096, 3),
    (4, 256, 3), (4, 4096, 3), (4, 4096, 7), (16, 256, 3), (64, 256, 3), (64, 256, 7),
    (64, 256, 15), (64, 4096, 7),
]  # fmt: skip
A100_MS = {
    "Qwen2.5-7B": [
        9.53, 9.70, 9.86, 11.81, 14.99, 9.20, 11.61, 9.77, 13.31, 13.83, 12.03, 20.28, 35.16,
        62.41, 40.44,
    ],
    "Qwen2.5-14B": [
        18.56, 19.03, 19.38, 22.08, 26.94, 18.11, 22.31, 18.89, 25.42, 26.34, 22.02, 40.80, 67.82,
        119.86, 78.02,
    ],
    "Llama-3.1-8B-Instruct": [
        10.23, 10.51, 11.32, 14.79, 17.64, 9.95, 12.75, 10.29, 14.50, 15.87, 14.29, 22.45, 36.51,
        65.93, 43.86,
    ],
}  # fmt: skip
# The int4 copy, of passes with 3 draft tokens: rows, context.
COPY_CASES = [(1, 256), (1, 4096), (16, 256), (32, 1024), (64, 256)]
COPY_MS = {
    "Qwen2.5-7B": [4.46, 4.78, 5.31, 7.48, 10.42],
    "Qwen2.5-14B": [7.82, 8.54, 9.48, 13.97, 18.06],
    "Llama-3.1-8B-Instruct": [4.84, 5.30, 5.98, 9.04, 11.50],
}
# gpt-fast's README (BSD-3): Llama-2-7B in bfloat16 on 1, 2, 4 and 8 A100-80GB, and in 8 and 4 bits
# on one, tokens per second.
GPT_FAST = {(1, 16): 104.9, (2, 16): 168.8, (4, 16): 254.0, (8, 16): 328.4}
GPT_FAST |= {(1, 8): 155.6, (1, 4): 196.8}
PROTOTYPE = Path(__file__).resolve().parents[1] / "docs" / "results" / "data" / "h200_prototype.csv"
# Attention of a layer of the 7B by the same prototype: rows, tokens of each, context, microseconds.
PROTOTYPE_US = [
    (1, 1, 4096, 8.1), (1, 8, 4096, 9.7), (16, 1, 4096, 38.2), (16, 4, 4096, 46.0),
    (16, 8, 4096, 50.0), (128, 1, 4096, 249.4), (128, 4, 4096, 288.7), (128, 8, 4096, 303.4),
    (4, 64, 4096, 65.0), (4, 256, 4096, 182.0), (8, 1024, 1024, 220.0),
]  # fmt: skip


@pytest.fixture
def measured(tmp_path):
    def cases(lines: list[str], columns: str = "model,batch,seq,gamma,mode,median_ms"):
        path = tmp_path / "measured.csv"
        path.write_text("\n".join([columns, *lines]))
        return read_cases(str(path))[0]

    return cases


@pytest.mark.parametrize("model", A100_MS)
def test_a100_forwards_are_near_measurements(measured, model):
    """Only the 7B has been fitted."""
    lines = [
        f"{model},{rows},{context},{drafts},target_{'verify' if drafts else 'decode'},{ms}"
        for (rows, context, drafts), ms in zip(CASES, A100_MS[model], strict=True)
    ]
    ratios: dict[str, list[float]] = {}
    for case in measured(lines):
        ratios.setdefault(case.mode, []).append(predict(case) / case.seconds)
    for of_mode in ratios.values():
        assert min(of_mode) > 0.8 and max(of_mode) < 1.2
        assert 0.92 < statistics.geometric_mean(of_mode) < 1.08


@pytest.mark.parametrize("model", COPY_MS)
def test_copy_forwards_are_near_measurements(measured, model):
    lines = [
        f"{model},{rows},{context},3,drafter_decode,{ms}"
        for (rows, context), ms in zip(COPY_CASES, COPY_MS[model], strict=True)
    ]
    errors = [abs(predict(case) / case.seconds - 1) for case in measured(lines)]
    assert max(errors) < 0.15


@pytest.mark.parametrize("case", GPT_FAST)
def test_gpt_fast_is_near_published_speed(case):
    num_ranks, bits = case
    cost = roofline("a100", "llama-2-7b", num_ranks, engine="gpt-fast", bits=bits)
    ratio = cost.seconds(Load(1, 1, 0, 128)) * GPT_FAST[case]
    assert 0.85 < ratio < 1.15


def test_shared_keys_are_read_once_in_cascade(measured):
    """32 rows are one sequence over the keys that they share; 4 rows read them from the cache."""
    few, many, apart = measured(
        [
            "Qwen2.5-7B,4,4096,,target_decode,1,4096",
            "Qwen2.5-7B,32,4096,,target_decode,1,4096",
            "Qwen2.5-7B,4,4096,,target_decode,1,0",
        ],
        "model,batch,seq,gamma,mode,median_ms,shared",
    )
    attention = roofline("a100", "7b", engine="vllm").attention
    shared = 4096 - 16
    read_s = attention.position_s * 4 * (16 + shared / FITTED.shared_speed)
    alone_s = predict(apart) - attention.position_s * 4 * 4096
    assert predict(few) - alone_s == pytest.approx(read_s)
    products_s = roofline("a100", "7b", engine="vllm").seconds(Load(32, 32))
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
    whole = roofline("h200", "7b", engine="vllm").attention.seconds(1, 4, 8192)
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
    without_host = roofline("h200", "7b", engine="graph").seconds(Load(16, 32, 16))
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
