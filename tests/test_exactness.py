"""What a first difference between float32 rows may be (near_ties.py)."""

import pytest
import torch

from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.sampling import gumbel
from tests.system.near_ties import NOISE, NUCLEUS, VIOLATION, judge


def test_first_difference_is_near_tie_or_violation():
    """Logits in which tokens 3 and 8 lead after temperature and noise, by a known gap."""
    key, params = torch.tensor([[5, 6, 7, 8]], dtype=torch.int32), SamplingParams(temperature=0.7)
    noise = gumbel(key, 20, torch.float64)[0]
    for gap, tokens, wanted in (
        (4e-4, {3, 8}, NOISE),
        (4e-4, {3, 9}, VIOLATION),
        (4e-4, {3}, VIOLATION),
        (1e-2, {3, 8}, VIOLATION),
    ):
        perturbed = torch.zeros(20, dtype=torch.float64)
        perturbed[3], perturbed[8] = 5.0, 5.0 - gap
        kind, found = judge((perturbed - noise) * 0.7, key, 0, params, tokens)
        assert kind == wanted and (kind == VIOLATION or found == pytest.approx(gap))


def test_token_at_edge_of_nucleus_may_be_in_or_out():
    """Of two tokens the less probable one has the better noise, and wins by far in the nucleus."""
    key = torch.tensor([[5, 6, 7, 8]], dtype=torch.int32)
    second, winner = gumbel(key, 20, torch.float64)[0].argsort()[[0, -1]].tolist()
    probability = torch.full((20,), 1e-9, dtype=torch.float64)
    probability[second], probability[winner] = 0.55, 0.45
    logits, before = probability.log(), float((probability / probability.sum())[second])
    for distance, wanted in ((5e-5, NUCLEUS), (-5e-5, NUCLEUS), (2e-3, VIOLATION)):
        params = SamplingParams(top_p=before + distance)
        kind, gap = judge(logits, key, 0, params, {winner, second})
        assert kind == wanted
        assert kind == VIOLATION or gap == pytest.approx(5e-5, rel=1e-3)
    assert judge(logits, key, 0, SamplingParams(), {winner, second})[0] == VIOLATION
