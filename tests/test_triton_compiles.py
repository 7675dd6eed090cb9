"""The operations in Triton compile for GPUs that are not there, and what the compiler reports."""

import pytest

from tests.helpers.triton_compile import report

triton = pytest.importorskip("triton")

CAPABILITIES = (80, 90, 100)
# Tokens, query heads of a key/value head, head dimension, window, keys.
TILES = [(1, 7, 128), (4, 7, 128), (8, 8, 128)]  # of 16, 32 and 64 rows
ATTENTION = [*((capability, *tile) for capability in CAPABILITIES for tile in TILES)]
ATTENTION += [(80, 8, 8, 64), (90, 4, 6, 64), (100, 1, 4, 64), (80, 16, 4, 256)]
ATTENTION += [(90, 2, 3, 80, 1024, 512)]
OTHERS = [("add_norm", 3584), ("rope_store", 28, 128, 128), ("rope_store", 32, 96, 72, True)]
OTHERS += [("gated", "gelu"), ("sample", 151936), ("add_to", 4864 * 896)]
OTHERS += [("round_into", 4864 * 896), ("add_norm_backward", 3584), ("rotate", 128, 128)]
OTHERS += [("rotate", 96, 64), ("gated_backward", "gelu_tanh"), ("head", 151936)]
OTHERS += [("head", 151936, 0.3), ("rows", 2)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    cases = [(capability, "attend", *shape) for capability, *shape in ATTENTION]
    cases += [(capability, *case) for capability in CAPABILITIES[::2] for case in OTHERS]
    reports = report(cases, tmp_path_factory.mktemp("triton"))
    return dict(zip(cases, reports, strict=True))


def test_no_kernel_spills_registers(kernels):
    names = {kernel.name for compiled in kernels.values() for kernel in compiled}
    assert names == {
        "_add_norm", "_rope_store", "_attend", "_merge", "_gated", "_sample_blocks", "_sample_rows",
        "_moved", "_add_norm_backward", "_rotate", "_gated_backward", "_head_values",
        "_head_gradient", "_stand", "_fill", "_sampled", "_accept",
    }  # fmt: skip
    for case, compiled in kernels.items():
        for kernel in compiled:
            assert kernel.spilled == 0, (case, kernel)


def test_attention_loads_keys_ahead_of_their_products(kernels):
    for case, (attention, *_) in kernels.items():
        if case[1] == "attend":
            capability, _, tokens, group, size, *_ = case
            # Products of 64 rows read shared memory in place from Hopper on; others free a buffer
            # before they begin. Of keys and of values, in half precision.
            buffers = attention.stages - (capability < 90 or tokens * group < 64)
            block = 2 * min(64 * triton.next_power_of_2(size), 64 * 128)
            assert attention.stages == 3 and attention.copies > 0 and attention.products > 0, case
            assert attention.shared >= buffers * 2 * block, (case, attention)


def test_kernels_load_vectors(kernels):
    for case, compiled in kernels.items():
        assert compiled[0].widest == 128 or case[1] == "rows", case
