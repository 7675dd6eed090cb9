"""Rows of unequal lengths, one after the other in one array. numpy alone."""

from collections.abc import Sequence

import numpy as np


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each element's row and its offset in that row, int64 [sum of counts] each.

    counts: int64 [rows], length of each row.
    """
    row = np.arange(len(counts)).repeat(counts)
    return row, np.arange(len(row)) - (counts.cumsum() - counts)[row]


def spans(begin: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the places of each row's elements, one after the other, int64 [sum of counts].

    begin, counts: int64 [rows], place of the first element and number of elements.
    """
    stop = counts.cumsum()
    return np.arange(stop[-1] if len(stop) else 0) + (begin - stop + counts).repeat(counts)


def packed(rows: Sequence[np.ndarray | None]) -> tuple[np.ndarray, np.ndarray]:
    """Return rows one after the other, and their lengths, int64 both; None is an empty row."""
    counts = np.array([0 if row is None else len(row) for row in rows], np.int64)
    parts = [np.empty(0, np.int64), *(row for row in rows if row is not None)]
    return np.concatenate(parts, dtype=np.int64), counts


def unpacked(elements: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Return the rows that `packed` has put one after the other."""
    return np.split(elements, counts.cumsum()[:-1]) if len(counts) else []


def doubled(column: np.ndarray) -> np.ndarray:
    """Return the column followed by as many zeros."""
    return np.concatenate((column, np.zeros_like(column)))
