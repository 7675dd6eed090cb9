"""The parts of exactness.ipynb against independent oracles."""

import numpy as np
import pytest
from scipy import stats

from notebooks.experiments import LONGEST_DRAFT, chi_square_p, trap_law, trap_lengths


def test_chi_square_pools_rare_cells():
    law = np.array([0.5, 0.46, 0.01, 0.02, 0.01, 0.0])
    counts = np.array([55, 42, 0, 2, 1, 0])
    wanted = stats.chisquare([55, 42, 3], [50, 46, 4]).pvalue
    assert chi_square_p(counts, law) == pytest.approx(wanted, rel=1e-9)
    counts[-1] = 1
    assert chi_square_p(counts, law) == 0.0


def test_trapped_lengths_follow_biased_law():
    """With equal weights all drafts are accepted: a finished draft, or else a new response."""
    law, num_rows = trap_law(), 6000
    finishes = law[:LONGEST_DRAFT].sum()
    biased = (1 - finishes) * law
    biased[:LONGEST_DRAFT] += law[:LONGEST_DRAFT]
    assert biased.sum() == pytest.approx(1.0)

    def count(*arguments):
        lengths = trap_lengths(*arguments, num_rows, distance=0.0)
        return np.bincount(lengths, minlength=len(law) + 1)[1:]

    trapped = count("rejection", "finished")
    assert chi_square_p(trapped, biased) > 1e-3 and chi_square_p(trapped, law) < 1e-20
    assert chi_square_p(count("rejection", "by clock"), law) > 1e-3
    assert chi_square_p(count("coupled", "finished"), law) > 1e-3
