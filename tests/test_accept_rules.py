"""The rejection rule, with which benchmarks/accept_rules.py and exactness.ipynb compare the
engine's, and the noise of the point mass rule."""

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks.accept_rules import FRESH, further, verify_by_rejection
from bubblespec.engine.noise import random_bits, stream_keys
from bubblespec.engine.sampling import SamplingParams, sample


def keys_of(count: int, seed: int = 0) -> torch.Tensor:
    """[count, 4]"""
    uid, zero = np.arange(count), np.zeros(count, np.int64)
    return torch.from_numpy(stream_keys(seed, uid, zero, zero, zero))


def random_logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(log_q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return sample(log_q, keys, torch.zeros(len(log_q), dtype=torch.int64), SamplingParams())[0]


@pytest.mark.parametrize("distance", [0.05, 0.5, 2.0])
def test_acceptance_and_law(distance):
    """Accepted with chance 1 - TV; accepted or refused, the token has p's law, and so has the one
    after it."""
    count = 10_000
    keys = keys_of(2 * count, seed=3)
    for seed in range(3):
        log_p = (random_logits(seed + 10, 10) * 1.5).log_softmax(-1)
        log_q = (log_p + distance * random_logits(seed + 20, 10)).log_softmax(-1)
        draft = drawn(log_q.expand(count, 10), keys[::2])
        ones = np.ones(count, np.int64)
        accepted, token = verify_by_rejection(
            log_p.expand(2 * count, 10), log_q.expand(count, 10), draft, ones, keys=keys
        )
        distance_tv = float((log_p.exp() - log_q.exp()).abs().sum() / 2)
        assert stats.binomtest(int(accepted.sum()), count, 1 - distance_tv).pvalue > 1e-4
        for tokens in token.view(-1, 2).T:
            counted = np.bincount(tokens.numpy(), minlength=10)
            assert stats.chisquare(counted, log_p.exp().numpy() * count).pvalue > 1e-4


def test_parts_of_a_stream_are_independent():
    """The plain noise and the fresh: product moment of independent uniforms."""
    keys = keys_of(20_000)
    plain, fresh = (random_bits(further(keys, at), 20).double() / 2**31 - 0.5 for at in (0, FRESH))
    assert abs((plain * fresh).mean() * 12) < 5 / plain.numel() ** 0.5
