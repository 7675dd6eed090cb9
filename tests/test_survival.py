"""How far drafts hold: what ranks measure together, and what each rank's windows believe."""

import numpy as np
import pytest

from bubblespec.planner.lengths import acceptance_rates
from bubblespec.planner.survival import ALIGNED, FORGETTING, MEMORY, PRIOR_WEIGHT, AcceptanceStats

KINDS, PRIORS = [(ALIGNED, 1), (ALIGNED, 2), ("own", 3)], [0.9, 0.9, 0.5]


def new_survival() -> AcceptanceStats:
    survival = AcceptanceStats()
    survival.add(KINDS, PRIORS)
    survival.begin()
    return survival


def observe(survival: AcceptanceStats, seed: int, count: int = 400) -> np.ndarray:
    """Verify windows at random; return proposed, tried and accepted tokens by kind, [3, kinds]."""
    rng = np.random.default_rng(seed)
    kind, num_draft = rng.integers(0, 3, count), rng.integers(0, 9, count)
    accepted = np.minimum(rng.integers(0, 9, count), num_draft)
    survival.observe(kind, num_draft, accepted, rng.random(count) < 0.7)
    survival.behind += 10, 4
    rows = zip(kind.tolist(), num_draft.tolist(), accepted.tolist(), strict=True)
    counts = np.zeros((3, 3))
    for number, proposed, right in rows:
        counts[:, number] += proposed, min(right + 1, proposed), right
    return counts


def test_merged_ranks_agree_on_decayed_counts_of_all_rows():
    ranks, wanted, behind = [new_survival() for _ in range(3)], 0.0, 0.0
    for rollout in range(3):
        counts = [observe(rank, 10 * rollout + number) for number, rank in enumerate(ranks)]
        measured = np.sum([rank.measured for rank in ranks], axis=0)
        for rank in ranks:
            rank.merge(measured)
            rank.begin()
        wanted = FORGETTING * wanted + np.sum(counts, axis=0)
        behind = FORGETTING * behind + 3 * np.array([10, 4])
    proposed, tried, accepted = wanted
    rates = acceptance_rates(np.array([[tried[:2].sum(), accepted[:2].sum()], behind]))
    for rank in ranks:
        assert rank.rates == pytest.approx(rates)
        assert rank.by_age == pytest.approx(
            {1: accepted[0] / proposed[0], 2: accepted[1] / proposed[1]}
        )
        weight = MEMORY / tried  # many more were tried
        believed = (MEMORY * accepted / tried + PRIOR_WEIGHT * np.array(PRIORS)) / (
            MEMORY + PRIOR_WEIGHT
        )
        assert (weight < 1).all() and rank.estimates == pytest.approx(believed)
    again = AcceptanceStats()
    again.load_state_dict(ranks[0].state_dict())
    assert again.rates == ranks[0].rates and again.by_age == ranks[0].by_age
    again.begin()
    assert again.rates == ranks[0].rates, "a saved rollout has been counted"


def test_current_local_rollout_counts_in_windows_alone():
    survival = new_survival()
    rates = survival.rates
    for _ in range(50):
        survival.observe(np.array([2]), np.array([8]), np.array([0]), np.array([False]))
    assert survival.estimates == pytest.approx([0.9, 0.9, 4 / (8 + 50)])
    assert survival.rates == rates and not survival.by_source(), "a row of a coming step"
