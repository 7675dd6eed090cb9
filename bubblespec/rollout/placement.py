"""Which rank generates which group, the rows for it, and all ranks' samples in one canonical order.

Nothing after `gather_samples` depends on which rank generated what, or when.
"""

import numpy as np

from bubblespec.ranks.collectives import Ranks
from bubblespec.records import Group, Row, Samples


def place_groups(num_groups: int, world_size: int) -> list[int]:
    """The rank that generates each group of a rollout: in turn."""
    return [number % world_size for number in range(num_groups)]


def make_rows(groups: list[Group], num_generations: int, max_new_tokens: int) -> list[Row]:
    """The rows of groups, those of a group adjacent."""
    return [Row(group.sample(j), group.prompt.token_ids, max_new_tokens) for group in groups for j in range(num_generations)]


def gather_samples(
    groups: list[Group], owners: list[int], *, num_generations: int, rows: list[Row], rewards: np.ndarray, ranks: Ranks
) -> Samples:
    """All ranks' rows as samples in canonical order, on every rank.

    groups, owners: of the whole rollout; rows: this rank's, in the order of its groups; rewards: float64 [rows, functions].
    """
    lengths = ranks.gather_ragged(np.array([len(row.tokens) for row in rows], np.int64))
    truncated = ranks.gather_ragged(np.array([row.finish == "length" for row in rows], np.uint8))
    tokens = ranks.gather_ragged(_concatenate([row.tokens.astype(np.int32) for row in rows], np.int32))
    logprob = ranks.gather_ragged(_concatenate([row.logprob for row in rows], np.float32))
    full_logprob = ranks.gather_ragged(_concatenate([row.full_logprob for row in rows], np.float32))
    all_rewards = ranks.gather_ragged(rewards.ravel())
    total = len(groups) * num_generations
    samples = Samples(
        groups,
        num_generations,
        [None] * total,
        [None] * total,
        [None] * total,
        np.zeros(total, bool),
        np.zeros((total, rewards.shape[1])),
    )
    for rank in range(ranks.world_size):
        where = [n * num_generations + j for n, owner in enumerate(owners) if owner == rank for j in range(num_generations)]
        cuts = np.cumsum(lengths[rank])[:-1]
        for flat, target in ((tokens, samples.tokens), (logprob, samples.logprob), (full_logprob, samples.full_logprob)):
            for index, part in zip(where, np.split(flat[rank], cuts), strict=False):
                target[index] = part
        samples.is_truncated[where] = truncated[rank].astype(bool)
        samples.rewards[where] = all_rewards[rank].reshape(len(where), rewards.shape[1])
    return samples


def _concatenate(arrays: list[np.ndarray], dtype) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)
