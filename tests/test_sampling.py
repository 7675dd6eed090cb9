"""Sampling: the law of tokens, truncation as in transformers, recorded log-probabilities."""

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import TopKLogitsWarper, TopPLogitsWarper

from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.sampling import MAX_LOGITS_AT_ONCE, restrict, sample, stream_keys

V = 40


def some_logits(seed: int = 0, rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(rows, V, generator=generator, dtype=torch.float64)


def draw(logits: torch.Tensor, count: int, params: SamplingParams, num_generated: int = 0):
    zero, number = np.zeros(count, np.int64), np.arange(count)
    keys = torch.from_numpy(stream_keys(3, zero + 17, number // 1000, zero, number % 1000))
    return sample(logits.expand(count, -1), keys, torch.full((count,), num_generated), params)


def law(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Oracle: transformers' warpers in their usual order, then softmax."""
    logits = logits / params.temperature
    if params.top_k:
        logits = TopKLogitsWarper(params.top_k)(None, logits)
    if params.top_p < 1:
        logits = TopPLogitsWarper(params.top_p)(None, logits)
    return logits.softmax(-1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.95),
        SamplingParams(temperature=1.3, top_k=7),
        SamplingParams(top_p=0.6, top_k=12),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chi_square_against_softmax(params, dtype):
    count = 60_000
    logits = some_logits()
    token, logprob = draw(logits.to(dtype), count, params)
    wanted = law(logits, params)[0].numpy()
    counts = np.bincount(token.numpy(), minlength=V)
    assert (counts[wanted == 0] == 0).all()
    kept = wanted > 0
    assert stats.chisquare(counts[kept], wanted[kept] / wanted[kept].sum() * count).pvalue > 1e-4
    np.testing.assert_allclose(logprob.numpy(), np.log(wanted[token.numpy()]), atol=1e-5)


def test_chunks_leave_samples_unchanged(monkeypatch):
    logits = some_logits(4, rows=100)
    zero = np.zeros(100, np.int64)
    keys = torch.from_numpy(stream_keys(0, zero, zero, zero, np.arange(100)))
    arguments = (logits, keys, torch.zeros(100, dtype=torch.int64), SamplingParams(top_p=0.9))
    whole = sample(*arguments)
    monkeypatch.setitem(MAX_LOGITS_AT_ONCE, "cpu", 3 * V)
    assert all(torch.equal(a, b) for a, b in zip(whole, sample(*arguments), strict=True))


def test_nucleus_ends_at_the_given_probability():
    """Of four equal tokens the first two have exactly half."""
    logits = torch.zeros(1, 4, dtype=torch.float64)
    for top_p, kept in ((0.5, 2), (0.500001, 3), (0.25, 1), (0.75, 3)):
        found = restrict(logits, torch.zeros(1, dtype=torch.int64), SamplingParams(top_p=top_p))
        assert found.isfinite()[0].tolist() == [i < kept for i in range(4)], top_p
