"""All ranks' samples in one canonical order: nothing after it depends on which rank generated what,
or when."""

import numpy as np

from bubblespec.dist.ranks import Ranks
from bubblespec.types import Group, Row, Samples


def gather_samples(
    groups: list[Group],
    owners: np.ndarray,
    *,
    numbers: np.ndarray,
    rows: list[Row],
    rewards: np.ndarray,
    ranks: Ranks,
) -> Samples:
    """All ranks' rows as samples in canonical order, on every rank.

    groups: of the samples; owners: int64 [S], the rank that has each sample; numbers: int64 [S],
    within its group; rows: this rank's, in the same order; rewards: float64 [rows, functions].
    """
    lengths = ranks.gather_ragged(np.array([len(row.tokens) for row in rows], np.int64))
    truncated = ranks.gather_ragged(np.array([row.finish == "length" for row in rows], np.uint8))
    tokens = ranks.gather_ragged(
        _concatenate([row.tokens.astype(np.int32) for row in rows], np.int32)
    )
    logprob = ranks.gather_ragged(_concatenate([row.logprob for row in rows], np.float32))
    full_logprob = ranks.gather_ragged(_concatenate([row.full_logprob for row in rows], np.float32))
    all_rewards = ranks.gather_ragged(rewards.ravel())
    total = len(owners)
    samples = Samples(
        groups,
        total // max(len(groups), 1),
        numbers,
        [None] * total,
        [None] * total,
        [None] * total,
        np.zeros(total, bool),
        np.zeros((total, rewards.shape[1])),
    )
    for rank in range(ranks.world_size):
        where = np.flatnonzero(owners == rank)
        cuts = np.cumsum(lengths[rank])[:-1]
        for flat, target in (
            (tokens, samples.tokens),
            (logprob, samples.logprob),
            (full_logprob, samples.full_logprob),
        ):
            for place, part in zip(where.tolist(), np.split(flat[rank], cuts), strict=False):
                target[place] = part
        samples.is_truncated[where] = truncated[rank].astype(bool)
        samples.rewards[where] = all_rewards[rank].reshape(len(where), rewards.shape[1])
    return samples


def _concatenate(arrays: list[np.ndarray], dtype) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)
