"""Rows of unequal lengths, one after the other in one array. numpy alone."""

from collections.abc import Sequence

import numpy as np


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each element's row and offset in the row, int64 [sum of counts] each."""
    row = np.arange(len(counts)).repeat(counts)
    return row, np.arange(len(row)) - (counts.cumsum() - counts)[row]


def spans(begin: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the places of rows' elements, int64 [sum of counts], from `begin` on in each row."""
    stop = counts.cumsum()
    return np.arange(stop[-1] if len(stop) else 0) + (begin - stop + counts).repeat(counts)


def packed(rows: Sequence[np.ndarray | None]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate rows, int64 [sum of counts]; return their lengths, too. None is an empty row."""
    counts = np.array([0 if row is None else len(row) for row in rows], np.int64)
    parts = [np.empty(0, np.int64), *(row for row in rows if row is not None)]
    return np.concatenate(parts, dtype=np.int64), counts


def unpacked(elements: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Split an array into the rows of `packed`."""
    return np.split(elements, counts.cumsum()[:-1]) if len(counts) else []


def doubled(column: np.ndarray) -> np.ndarray:
    """Append as many zeros as there are elements."""
    return np.concatenate((column, np.zeros_like(column)))
