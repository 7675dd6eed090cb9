"""The noise generator: published test vectors, independence of streams, law of the output."""

import itertools
import math

import numpy as np
import pytest
import torch

from bubblespec.engine import sampling
from bubblespec.engine.sampling import (
    EVALUATION,
    MAX_POSITIONS,
    MAX_SAMPLES,
    gumbel,
    philox4x32,
    random_bits,
    stream_keys,
)
from tests.helpers import reference_step


def keys_for(seed=0, prompt_id=0, step=0, sample=0, position=0) -> torch.Tensor:
    arrays = np.broadcast_arrays(
        *(np.asarray(v, np.int64) for v in (prompt_id, step, sample, position))
    )
    return torch.from_numpy(stream_keys(seed, *(np.atleast_1d(a).ravel() for a in arrays)))


@pytest.mark.parametrize(
    "counter, key, wanted",
    [  # Random123's known answers for philox4x32, 10 rounds
        ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter, key, wanted):
    got = philox4x32(np.array([counter], np.uint32), key)[0]
    assert " ".join(f"{word:08x}" for word in got) == wanted


@pytest.mark.parametrize(
    "seed", [0, 1, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 0x0123456789ABCDEF, (1 << 63) - 1]
)
def test_keys_equal_philox_of_seed_and_counter(seed):
    fields = (seed, (1 << 62) + 12345, EVALUATION + 7, MAX_SAMPLES - 2, MAX_POSITIONS - 3)
    (key,) = keys_for(*fields).tolist()
    assert [word % (1 << 32) for word in key] == reference_step.noise_key(*fields)


def test_no_two_positions_share_a_stream():
    prompt_ids = [0, 1, 2, 1 << 31, 1 << 32, (1 << 32) + 1, (1 << 63) - 1]
    steps = [0, 1, 2, 1000, EVALUATION, EVALUATION + 1, (1 << 32) - 1]
    samples = [0, 1, 2, 3, MAX_SAMPLES - 1]
    positions = [*range(400), MAX_POSITIONS - 1]
    grid = np.array(list(itertools.product(prompt_ids, steps, samples, positions)), np.int64).T
    keys = stream_keys(7, *grid)
    assert len(np.unique(keys, axis=0)) == grid.shape[1] > 90_000


def test_bits_equal_integer_arithmetic():
    keys = keys_for((1 << 63) + 5, (1 << 63) - 1, EVALUATION + 3, sample=9, position=[0, 77])
    bits = random_bits(keys, 500)
    words = [[word % (1 << 32) for word in key] for key in keys.tolist()]
    wanted = [[reference_step.random_bits(key, v) for v in range(500)] for key in words]
    assert wanted == bits.tolist()
    assert [of[:300] for of in wanted[1:]] == random_bits(keys[1:], 300).tolist()


def test_bits_are_uniform_and_independent():
    from scipy import stats

    positions = np.arange(200)
    bits = random_bits(keys_for(prompt_id=1, position=positions), 5000)
    counts = np.bincount((bits >> 23).ravel().numpy(), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4
    each_bit = torch.stack([(bits >> i) & 1 for i in range(31)]).double().mean(dim=(1, 2))
    assert (each_bit - 0.5).abs().max() < 5 * 0.5 / bits.numel() ** 0.5
    # Product moments of neighbouring positions, tokens, samples and steps.
    u, sample, step = (
        random_bits(keys_for(prompt_id=1, position=positions, **of), 5000).double() / 2**31 - 0.5
        for of in ({}, {"sample": 1}, {"step": 1})
    )
    neighbours = (u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[:, 2:], u[:, :-2])
    for a, b in (*neighbours, (u, sample), (u, step)):
        correlation = (a * b).mean() * 12
        assert abs(correlation) < 5 / a.numel() ** 0.5


def test_noise_has_the_gumbel_law():
    """Kolmogorov-Smirnov, and the far tail, which noise of low resolution would lack."""
    from scipy import stats

    drawn = (
        gumbel(keys_for(prompt_id=2, position=np.arange(100)), 5000, torch.float64)
        .flatten()
        .numpy()
    )
    assert stats.kstest(drawn, "gumbel_r").pvalue > 1e-4
    beyond_ten, expected = (drawn > 10).sum(), drawn.size * stats.gumbel_r.sf(10)
    assert abs(beyond_ten - expected) < 5 * expected**0.5
    assert gumbel(keys_for(), 10).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_largest_and_smallest_bits_is_finite(monkeypatch, dtype):
    """u = 1 - 2**-24 replaces the 64 largest numbers, whose u rounds to 1 in float32."""
    numbers = [2**31 - 1, 2**31 - 2, 2**31 - 64, 2**31 - 1024, 2**30, 1, 0]
    bits = torch.tensor([numbers], dtype=torch.int32)
    monkeypatch.setattr(sampling, "random_bits", lambda keys, vocab_size: bits)
    found = gumbel(keys_for(), bits.shape[1], dtype)[0].double()
    tails = [2.0**-24] * 3 + [1023.5 * 2.0**-31, 0.5 - 2.0**-32]  # 1 - u
    wanted = [-math.log(-math.log(tail)) for tail in tails]
    wanted += [-math.log(-math.log1p(-u)) for u in (1.5 * 2.0**-31, 2.0**-32)]
    assert found.isfinite().all()
    np.testing.assert_allclose(found, wanted, rtol=1e-4 if dtype == torch.float32 else 1e-12)


def test_float32_and_float64_noise_agree():
    """To rounding where a token can win; the very negative end may be coarse."""
    keys = keys_for(prompt_id=2, position=np.arange(20))
    exact = gumbel(keys, 5000, torch.float64)
    difference = (gumbel(keys, 5000).double() - exact).abs()
    assert difference[exact > -1].max() < 2e-6
    assert difference.max() < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bits_are_identical_on_the_gpu():
    keys = keys_for(prompt_id=(1 << 63) - 1, step=EVALUATION, position=np.arange(64))
    assert torch.equal(random_bits(keys.cuda(), 152_000).cpu(), random_bits(keys, 152_000))
