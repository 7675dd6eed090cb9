"""Rows of unequal lengths, one after the other in one array. numpy alone."""

import numpy as np


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each element's row and its offset in that row, int64 [sum of counts] each. counts: int64
    [rows], length of each row."""
    row = np.arange(len(counts)).repeat(counts)
    return row, np.arange(len(row)) - (counts.cumsum() - counts)[row]
