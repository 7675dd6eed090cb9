"""The operations in Triton compile for GPUs that are not there, and what the compiler reports.

COMPILE_ALL=1 compiles attention for all cards, sizes and numbers of heads: 25 minutes of a core."""

import os

import pytest

from bubblespec.engine.graphs import TILES
from tests.helpers.triton_compile import LIMITS, report

triton = pytest.importorskip("triton")

SIZES = [*((size, size) for size in (64, 80, 96, 128, 192, 256)), (192, 128)]
GROUPS = range(1, 17)  # query heads of a key/value head


def attention(
    capability: int, sizes: tuple[int, int], group: int, tile: int, *more: float | None
) -> tuple:
    """Return a case; windows and numbers of splits alternate. more: cap, sinks and chunk."""
    shape = max(tile // group, 1), group, sizes, 1024 if group % 2 else None
    return capability, "attend", *shape, 512 if group % 4 < 2 else 4096, *more


# Decoding, windows of drafts, prompts.
ATTENTION = [(80, (64, 64), 1, 16), (80, (128, 128), 7, 64), (80, (256, 256), 4, 64)]
ATTENTION += [(86, (192, 192), 8, 64), (86, (256, 256), 3, 16), (89, (96, 96), 5, 16)]
ATTENTION += [(89, (128, 128), 2, 64), (90, (128, 128), 7, 16), (90, (128, 128), 8, 64)]
ATTENTION += [(90, (80, 80), 71, 64), (100, (128, 128), 7, 16), (100, (256, 256), 4, 64)]
ATTENTION += [(120, (192, 128), 1, 16), (120, (192, 128), 2, 64), (120, (256, 256), 16, 64)]
# Gemma 2, gpt-oss, Llama 4.
ATTENTION += [(90, (256, 256), 2, 64, 50.0), (90, (64, 64), 8, 16, None, True)]
ATTENTION += [(90, (128, 128), 5, 64, None, False, 8192)]
if os.environ.get("COMPILE_ALL"):
    ATTENTION = [
        (capability, sizes, group, tile)
        for capability in LIMITS
        for sizes in SIZES
        for group in GROUPS
        for tile in TILES
    ]
OTHERS = [
    ("add_norm", 3584),
    ("add_norm", 1024, True),
    ("rope_store", 28, 128, 128),
    ("rope_store", 32, 96, 72, True),
]
OTHERS += [("gated", "gelu"), ("sample", 151936), ("add_to", 4864 * 896)]
OTHERS += [("round_into", 4864 * 896), ("add_norm_backward", 3584), ("rotate", 128, 128)]
OTHERS += [("rotate", 96, 64), ("gated_backward", "gelu_tanh"), ("head", 151936)]
OTHERS += [("head", 151936, 0.3), ("rows", 2)]
STATES = [("states", 16, 128, 1), ("states", 16, 128, 4), ("states", 8, 64, 16, False)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    cases = [attention(*case) for case in ATTENTION]
    cases += [(capability, *case) for capability in (80, 100) for case in OTHERS]
    cases += [(capability, *case) for capability in (80, 90) for case in STATES]
    reports = report(cases, tmp_path_factory.mktemp("triton"))
    return dict(zip(cases, reports, strict=True))


def test_kernels_spill_next_to_nothing(kernels):
    names = {kernel.name for compiled in kernels.values() for kernel in compiled}
    assert names == {
        "_add_norm", "_rope_store", "_attend", "_merge", "_gated", "_sample_blocks", "_sample_rows",
        "_moved", "_add_norm_backward", "_rotate", "_gated_backward", "_head_values",
        "_head_gradient", "_stand", "_fill", "_sampled", "_accept", "_plan", "_convolve",
        "_advance", "_gated_norm", "_rates",
    }  # fmt: skip
    for case, compiled in kernels.items():
        for kernel in compiled:
            # ptxas spills a few numbers rather than take more registers than fit a block more; of
            # large tiles with windows a few more.
            is_large = case[1] == "attend" and case[2] * case[3] > 32
            most = {"_attend": 128 if is_large else 16}.get(kernel.name, 0)
            assert kernel.spilled <= most, (case, kernel)


def test_kernels_fit_shared_memory(kernels):
    for case, compiled in kernels.items():
        for kernel in compiled:
            assert kernel.shared <= LIMITS[case[0]], (case, kernel)


def test_attention_loads_keys_ahead_of_their_products(kernels):
    for case, (attention, *_) in kernels.items():
        if case[1] == "attend":
            capability, _, tokens, group, sizes, *_ = case
            widths = [triton.next_power_of_2(size) for size in sizes]
            # Products of 64 rows read shared memory in place on Hopper and Blackwell for servers;
            # others free a buffer before they begin.
            in_place = capability in (90, 100) and tokens * group > 32
            block = 2 * sum(widths) * 8192 // max(*widths, 128)  # in half precision
            is_short = (
                LIMITS[capability] == 101_376 and widths == [256, 256] and tokens * group > 32
            )
            assert attention.stages == (2 if is_short else 3), case
            assert attention.copies > 0 and attention.products > 0, case
            assert attention.shared >= (attention.stages - 1 + in_place) * block, (case, attention)


def test_kernels_load_vectors(kernels):
    for case, compiled in kernels.items():
        kernel = next((of for of in compiled if of.name == "_advance"), compiled[0])
        assert kernel.widest == 128 or case[1] == "rows", case
