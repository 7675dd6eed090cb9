"""The rejection rule, with which benchmarks/accept_rules.py and exactness.ipynb compare the
engine's, and the noise of the point mass rule."""

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks import accept_rules
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ragged_batch_is_its_rows_one_by_one(dtype):
    counts = np.random.default_rng(9).integers(0, 7, 60)
    total, last = counts.sum() + len(counts), np.cumsum(counts + 1) - 1
    keys, drafted = keys_of(int(total), seed=4), np.delete(np.arange(total), last)
    log_p = random_logits(1, total, 20).log_softmax(-1).to(dtype)
    log_q = (log_p[drafted] + 0.3 * random_logits(2, len(drafted), 20).to(dtype)).log_softmax(-1)
    draft = drawn(log_q, keys[drafted])
    accepted, token = verify_by_rejection(log_p, log_q, draft, counts, keys=keys)
    assert set(accepted.tolist()) >= {0, 1, 2} and (accepted.numpy() <= counts).all()
    for row, n in enumerate(counts):
        whole = slice(last[row] - n, last[row] + 1)
        own = slice(last[row] - n - row, last[row] - row)
        alone, tokens = verify_by_rejection(
            log_p[whole], log_q[own], draft[own], counts[row : row + 1], keys=keys[whole]
        )
        assert alone.tolist() == [accepted[row]] and torch.equal(tokens, token[whole])
        assert tokens[: accepted[row]].tolist() == draft[own][: accepted[row]].tolist()
    # After a whole draft plain sampling goes on.
    assert torch.equal(token[last], drawn(log_p[last], keys[last]))


@pytest.mark.parametrize("bits", [0, 2**31 - 1])
def test_what_both_policies_are_certain_of_is_accepted(monkeypatch, bits):
    """With p = q = 1 whatever the acceptance test's number is: the largest is below 1 too."""
    log_p = torch.tensor([float("-inf"), 0.0, float("-inf")]).expand(2, 3)
    fixed = lambda keys, size: torch.full((len(keys), size), bits, dtype=torch.int32)  # noqa: E731
    monkeypatch.setattr(accept_rules, "random_bits", fixed)
    accepted, token = verify_by_rejection(
        log_p, log_p[:1], torch.ones(1, dtype=torch.int64), np.ones(1, np.int64), keys=keys_of(2)
    )
    assert accepted.tolist() == [1] and token.tolist() == [1, 1]


def test_parts_of_a_stream_are_independent():
    """The plain noise and the fresh: product moment of independent uniforms."""
    keys = keys_of(20_000)
    plain, fresh = (random_bits(further(keys, at), 20).double() / 2**31 - 0.5 for at in (0, FRESH))
    assert abs((plain * fresh).mean() * 12) < 5 / plain.numel() ** 0.5
