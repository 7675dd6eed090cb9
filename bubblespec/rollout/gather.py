"""Gathering rows of all ranks on every rank: unfinished rows, or samples in canonical order."""

import numpy as np
from numpy.typing import ArrayLike

from bubblespec.distributed.ranks import Ranks
from bubblespec.rollout.table import RowTable
from bubblespec.samples import Samples
from bubblespec.types import Row

FINISHES = (None, "stop", "length")


def gather_rows(own: dict[int, Row], table: RowTable, ranks: Ranks) -> dict[int, Row]:
    """Return the rows of all ranks by index: this rank's own objects, and copies of the others.

    The ranks exchange a header, the tokens and both log-probabilities of each row. All of these are
    exact as float64, NaN as well.
    """
    rows = dict(own)
    numbers: list[ArrayLike] = [np.empty(0)]
    for index, row in own.items():
        header = (index, row.max_new_tokens, FINISHES.index(row.finish), len(row.tokens))
        numbers += [header, row.tokens, row.logprob, row.full_logprob]
    for rank, left in enumerate(ranks.gather_ragged(np.concatenate(numbers, dtype=np.float64))):
        while len(left) and rank != ranks.rank:
            index, max_new_tokens, finish, length = left[:4].astype(np.int64).tolist()
            columns, left = np.split(left[4:], [3 * length])
            row = rows[index] = table.make_row(index, max_new_tokens)
            row.finish, row.tokens = FINISHES[finish], columns[:length].astype(np.int64)
            row.logprob, row.full_logprob = columns[length:].reshape(2, length).astype(np.float32)
    return rows


def gather_samples(
    own: dict[int, Row], rewards: np.ndarray, table: RowTable, ranks: Ranks
) -> Samples:
    """Return all samples that are trained on, on every rank, after the rollout.

    own: this rank's, by ascending index; rewards: float64 [rows, functions], of the same."""
    trained, launch = table.trained(), table.launch
    by_index = gather_rows(own, table, ranks)
    rows = [by_index[index] for index in trained.tolist()]
    all_rewards = np.empty((len(rows), rewards.shape[1]))
    for rank, flat in enumerate(ranks.gather_ragged(rewards.ravel())):
        are_from_rank = table.rank_of[trained] == rank
        all_rewards[are_from_rank] = flat.reshape(are_from_rank.sum(), rewards.shape[1])
    groups = trained[:: launch.num_generations] // launch.num_generations
    return Samples(
        groups=[launch.groups[group] for group in groups.tolist()],
        num_generations=launch.num_generations,
        tokens=[row.tokens.astype(np.int32) for row in rows],
        logprob=[row.logprob for row in rows],
        full_logprob=[row.full_logprob for row in rows],
        is_truncated=np.array([row.finish == "length" for row in rows]),
        rewards=all_rewards,
    )
