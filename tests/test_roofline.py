"""The roofline against data sheets, the engine's attention kernels, and published timings."""

import math

import pytest

from bubblespec.engine.batch import Load
from bubblespec.tools.simulate import roofline as module
from bubblespec.tools.simulate.cost import Attention
from bubblespec.tools.simulate.recorded import load_cost
from bubblespec.tools.simulate.roofline import GPUS, MODELS, Model, roofline
from tests.helpers.checks import refusal

# Median milliseconds of forwards of vLLM 0.11.2 on an A100-SXM4-80GB: an excerpt of
# sd_toggle/configs/sweep_a100_tp1_*.csv of github.com/furiosa-ai/EfficientRollout, commit 0ff0bc5,
# Apache-2.0 (arXiv 2606.18967). Cases: rows, context, draft tokens per row. With 8 rows and more
# and a long context the rows share their prompt's keys, so such cases are left out.
CASES = [
    (1, 256, 0), (1, 4096, 0), (16, 256, 0), (64, 256, 0), (1, 256, 3), (1, 4096, 3), (4, 256, 3),
    (4, 4096, 3), (4, 4096, 7), (16, 256, 3), (64, 256, 3), (64, 256, 7), (64, 256, 15),
]  # fmt: skip
A100_MS = {
    "7b": [9.53, 9.70, 9.86, 11.81, 9.20, 11.61, 9.77, 13.31, 13.83, 12.03, 20.28, 35.16, 62.41],
    "14b": [
        18.56, 19.03, 19.38, 22.08, 18.11, 22.31, 18.89, 25.42, 26.34, 22.02, 40.80, 67.82, 119.86,
    ],
    "8b": [
        10.23, 10.51, 11.32, 14.79, 9.95, 12.75, 10.29, 14.50, 15.87, 14.29, 22.45, 36.51, 65.93,
    ],
}  # fmt: skip
# gpt-fast's README (BSD-3): Llama-2-7B in bfloat16 on 1, 2, 4 and 8 A100-80GB, tokens per second.
GPT_FAST = {1: 104.9, 2: 168.8, 4: 254.0, 8: 328.4}
OTHERS = {
    "14b": Model(14.77e9, 48, 40, 8, 128),
    "8b": Model(8.03e9, 32, 32, 8, 128),
    "llama2": Model(6.74e9, 32, 32, 32, 128),
}


@pytest.fixture
def others(monkeypatch):
    """Models in other engines: six small kernels per layer, no host time, rows as sequences."""
    monkeypatch.setattr(Attention, "are_single", lambda self, tokens, pieces: tokens <= pieces)
    for name, shape in OTHERS.items():
        monkeypatch.setitem(MODELS, name, shape)
    monkeypatch.setattr(module, "SMALL_KERNELS", 6)
    for name in ("HOST_S", "VERIFY_S", "SAMPLE_S"):
        monkeypatch.setattr(module, name, 0.0)


def load_of(rows: int, context: int, drafts: int = 0) -> Load:
    wide_rows = rows if drafts else 0
    return Load(rows, rows * (drafts + 1), wide_rows, rows * context, 0, rows * drafts)


@pytest.mark.parametrize("model", A100_MS)
def test_a100_forwards_are_near_measured_ones(others, model):
    """Shares of peak and knee are round numbers near a fit to the 7B; the others are not fitted."""
    cost, ratios = roofline("a100", model), {"decode": [], "verify": []}
    for case, measured_ms in zip(CASES, A100_MS[model], strict=True):
        ratio = 1e3 * cost.seconds(load_of(*case)) / measured_ms
        assert 0.8 < ratio < 1.25, (case, ratio)
        ratios["verify" if case[2] else "decode"].append(ratio)
    for kind, of_kind in ratios.items():
        mean = math.exp(sum(map(math.log, of_kind)) / len(of_kind))
        assert 0.92 < mean < 1.08, (kind, mean)


def test_ranks_together_are_within_a_fifth_of_gpt_fast(others):
    for num_ranks, tokens_per_s in GPT_FAST.items():
        ratio = roofline("a100", "llama2", num_ranks).seconds(load_of(1, 128)) * tokens_per_s
        assert 0.8 < ratio < 1.2, (num_ranks, ratio)


def test_verifying_costs_by_tile_and_query_head():
    """Up to 7 tokens, the query heads per key/value head, each token reads the keys; from 8 to 64
    tokens per row attention costs the same."""
    attention, rows, keys = roofline("h200", "7b").attention, 128, 4096
    decode, four, *verify = (
        attention.seconds(rows, rows * tokens, rows * (keys + tokens // 2))
        for tokens in (1, 4, 8, 64, 65)
    )
    assert verify[0] == pytest.approx(verify[1], rel=0.01) and four < 0.6 * verify[0]
    assert verify[2] == pytest.approx(2 * verify[1], rel=0.02)
    assert decode == pytest.approx(rows * keys * attention.position_s)
    # 4 operations per query of the tile, key and dimension, for every query head and layer.
    operations = 4 * 64 * 128 * keys * 28 * 28 * rows
    assert 200e12 < operations / verify[0] < 350e12
    assert 4 < verify[0] / decode < 7


def test_one_verifying_row_is_split(monkeypatch):
    """As one sequence the row would wait for a single block that goes through all keys."""
    attention = roofline("h200", "7b").attention
    split_s = attention.seconds(1, 4, 8192)
    monkeypatch.setattr(Attention, "are_single", lambda self, tokens, pieces: tokens <= pieces)
    assert attention.seconds(1, 4, 8192) == pytest.approx(28 * 128 * 1.2e-6, rel=0.01)
    assert split_s < attention.seconds(1, 4, 8192) / 8


def test_roofline_follows_the_data_sheet():
    cost, h200 = roofline("h200", "7b"), GPUS["h200"]
    weights_s, token_s = 2 * 7.62e9 / (0.8 * h200.memory), 2 * 7.62e9 / (0.8 * h200.peak)
    overhead_s = 28 * module.SMALL_KERNELS * module.KERNEL_S + module.HOST_S + module.SAMPLE_S
    assert cost.seconds(Load(1, 1)) == pytest.approx(overhead_s + weights_s)
    prompt = Load(1, 50_000, 0, 0, 50_000, 0)
    assert cost.seconds(prompt) == pytest.approx(overhead_s + 50_000 * token_s, rel=0.03)
    kv_bytes = 2 * 2 * 28 * 4 * 128
    read_s = cost.seconds(Load(512, 512, 0, 10**6)) - cost.seconds(Load(512, 512))
    assert read_s == pytest.approx(kv_bytes * 10**6 / (0.8 * h200.memory))


def test_ranks_together_share_work_and_pay_for_all_reduces():
    alone, together, eight = (roofline("h200", "7b", ranks) for ranks in (1, 2, 8))
    weights_s = 2 * 7.62e9 / (0.8 * GPUS["h200"].memory)
    all_reduces_s = (2 * 28 + 1) * 10e-6  # what NCCL's ring took on two GPUs
    expected_s = alone.seconds(Load(1, 1)) - weights_s / 2 + all_reduces_s
    assert together.seconds(Load(1, 1)) == pytest.approx(expected_s)
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
