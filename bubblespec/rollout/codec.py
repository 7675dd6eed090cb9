"""Rows as numbers: what ranks exchange of tokens and their log-probabilities."""

from typing import NamedTuple

import numpy as np

from bubblespec.types import Row

COLUMNS = 3  # token ids and both log-probabilities, all exact as float64


class RowTokens(NamedTuple):
    """What a row has generated so far; fields as of `Row`."""

    index: int
    """The row's, of the rollout."""
    tokens: np.ndarray
    logprob: np.ndarray
    full_logprob: np.ndarray


def encode_rows(rows: dict[int, Row]) -> np.ndarray:
    """Of each row, by its index, the index, its length, and its columns one after the other;
    float64 [n]."""
    parts = [np.empty(0)]
    for index, row in rows.items():
        columns = (row.tokens, row.logprob, row.full_logprob)
        parts.append(np.concatenate(((index, len(row.tokens)), *columns), dtype=np.float64))
    return np.concatenate(parts)


def decode_rows(numbers: np.ndarray) -> list[RowTokens]:
    """What `encode_rows` has encoded."""
    rows, begin = [], 0
    while begin < len(numbers):
        index, length = numbers[begin : begin + 2].astype(np.int64).tolist()
        end = begin + 2 + COLUMNS * length
        tokens, *logprobs = numbers[begin + 2 : end].reshape(COLUMNS, length)
        logprob, full_logprob = (column.astype(np.float32) for column in logprobs)
        rows.append(RowTokens(index, tokens.astype(np.int64), logprob, full_logprob))
        begin = end
    return rows
