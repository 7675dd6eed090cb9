"""Placement, canonical order and digest of a step's samples, with one rank and with several played
by one process."""

import concurrent.futures
import hashlib
import threading

import numpy as np
import pytest
import torch
from bubblespec.rollout.placement import gather_samples, place_in_turn
from bubblespec.rollout.standing import Standing

from bubblespec.dist.ranks import Ranks
from bubblespec.types import Group, Prompt, Row, Samples, digest
from tests.helpers.rows import launch_of, make_rows

UIDS = (900, 17, 2**62 + 5, 3, 44)
GROUPS = [
    Group(Prompt(uid, f"prompt {uid}", (uid % 7, 1), {"answer": str(uid)}), 7 + uid % 2)
    for uid in UIDS
]


def finished_rows(groups: list[Group], num_generations: int) -> list[Row]:
    """Rows whose tokens, log-probabilities and length tell prompt and generation; the longest are
    cut off."""
    rows = make_rows(groups, num_generations, 10)
    for row in rows:
        length = 1 + (row.id.uid + 3 * row.id.sample) % 5
        row.tokens = row.id.uid % 1000 * 10 + row.id.sample + np.arange(length, dtype=np.int64)
        row.logprob = -np.arange(1, length + 1, dtype=np.float32) - row.id.sample
        row.full_logprob = row.logprob / 2
        row.finish = "length" if length == 5 else "stop"
    return rows


def rewards_of(rows: list[Row]) -> np.ndarray:
    """float64 [rows, 2]; the second function does not apply to odd samples."""
    return np.array(
        [
            [row.id.uid % 1000 + row.id.sample / 8, np.nan if row.id.sample % 2 else 1.0]
            for row in rows
        ]
    ).reshape(len(rows), 2)


def gather(
    groups: list[Group], num_generations: int, owners: list[int] | None = None, ranks=None
) -> Samples:
    ranks = ranks or Ranks(torch.device("cpu"))
    owners = (
        place_in_turn(len(groups), num_generations, ranks.world_size)
        if owners is None
        else np.array(owners)
    )
    rows, numbers = (
        finished_rows(groups, num_generations),
        np.tile(np.arange(num_generations), len(groups)),
    )
    own = [row for row, owner in zip(rows, owners.tolist(), strict=True) if owner == ranks.rank]
    return gather_samples(
        groups, owners, numbers=numbers, rows=own, rewards=rewards_of(own), ranks=ranks
    )


def same(a: Samples, b: Samples) -> bool:
    arrays = [
        (x, y)
        for name in ("tokens", "logprob", "full_logprob")
        for x, y in zip(getattr(a, name), getattr(b, name), strict=True)
    ]
    arrays += [
        (getattr(a, name), getattr(b, name)) for name in ("numbers", "is_truncated", "rewards")
    ]
    return all(
        x.dtype == y.dtype and np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        for x, y in arrays
    )


@pytest.mark.parametrize(
    "num_groups, world_size", [(8, 1), (8, 2), (7, 3), (3, 3), (2, 5), (1, 1), (0, 2)]
)
def test_every_group_has_one_rank_and_shares_are_even(num_groups, world_size):
    owners = place_in_turn(num_groups, 3, world_size).reshape(num_groups, 3)
    assert (owners == owners[:, :1]).all() and set(owners.ravel().tolist()) <= set(
        range(world_size)
    )
    sizes = [int((owners[:, 0] == rank).sum()) for rank in range(world_size)]
    assert max(sizes) - min(sizes) <= 1


def test_rows_carry_the_noise_key_of_prompt_visit_and_generation():
    """Each on the rank that has it, a group's on several."""
    names, owners, rows = (
        [(uid, visit, j) for uid, visit in ((900, 7), (17, 8)) for j in range(3)],
        np.array([0, 0, 1, 1, 0, 1]),
        {},
    )
    for rank in range(2):
        of_rank = Standing(launch_of(GROUPS[:2], 3), owners, rank).make_rows(10)
        assert list(of_rank) == np.flatnonzero(owners == rank).tolist()
        rows |= of_rank
    for place, row in rows.items():
        assert tuple(row.id) == names[place] and row.prompt == GROUPS[place // 3].prompt.token_ids
        assert row.max_new_tokens == 10 and row.finish is None and len(row.tokens) == 0


def test_samples_of_one_rank_are_in_canonical_order():
    samples = gather(GROUPS, 3)
    rows = finished_rows(GROUPS, 3)
    assert len(samples) == 15 and samples.num_generations == 3 and samples.groups == GROUPS
    for i, row in enumerate(rows):
        assert (
            samples.prompt_of(i).uid == row.id.uid
            and i % 3 == row.id.sample
            and samples.ids[i] == row.id
        )
        assert samples.tokens[i].tolist() == row.tokens.tolist()
        assert (
            samples.logprob[i].tolist() == row.logprob.tolist()
            and samples.full_logprob[i].tolist() == row.full_logprob.tolist()
        )
        assert samples.is_truncated[i] == (row.finish == "length")
    assert samples.lengths.tolist() == [len(row.tokens) for row in rows]
    assert 0 < samples.is_truncated.sum() < 15
    np.testing.assert_array_equal(samples.rewards, rewards_of(rows))


class PlayedRanks:
    """Ranks as threads of one process: every exchange waits for all of them."""

    def __init__(self, world_size: int):
        self.world_size, self.barrier, self.slots = (
            world_size,
            threading.Barrier(world_size, timeout=120),
            [None] * world_size,
        )
        self.of_thread = threading.local()

    @property
    def rank(self) -> int:
        return self.of_thread.rank

    def gather_ragged(self, array: np.ndarray) -> list[np.ndarray]:
        self.slots[self.of_thread.rank] = array
        self.barrier.wait()
        gathered = [part.copy() for part in self.slots]
        self.barrier.wait()
        return gathered

    def run(
        self, rank: int, groups: list[Group], num_generations: int, owners: list[int] | None
    ) -> Samples:
        self.of_thread.rank = rank
        return gather(groups, num_generations, owners, self)


UNEVEN = [2] * 3 + [0] * 3 + [2] * 6 + [0] * 3
DIVIDED = [0, 1, 2, 2, 2, 0, 1, 1, 0, 2, 0, 0, 2, 1, 2]  # a group on several ranks


@pytest.mark.parametrize(
    "world_size, owners", [(2, None), (3, None), (5, None), (7, None), (3, UNEVEN), (3, DIVIDED)]
)
def test_any_ranks_gather_the_same_samples(world_size, owners):
    ranks = PlayedRanks(world_size)
    with concurrent.futures.ThreadPoolExecutor(world_size) as pool:
        by_rank = list(pool.map(lambda rank: ranks.run(rank, GROUPS, 3, owners), range(world_size)))
    wanted = gather(GROUPS, 3)
    assert all(same(samples, wanted) and digest(samples) == digest(wanted) for samples in by_rank)


# Digest


def test_digest_is_sha256_of_uid_visit_sample_length_and_tokens():
    samples = gather(GROUPS, 2)
    sha = hashlib.sha256()
    for row in sorted(
        finished_rows(GROUPS, 2), key=lambda row: (row.id.uid, row.id.visit, row.id.sample)
    ):
        for number in (row.id.uid, row.id.visit, row.id.sample, len(row.tokens)):
            sha.update(number.to_bytes(8, "little", signed=True))
        for token in row.tokens.tolist():
            sha.update(token.to_bytes(4, "little", signed=True))
    assert digest(samples) == sha.hexdigest()


def test_digest_does_not_depend_on_the_order_of_groups():
    assert digest(gather(GROUPS[::-1], 3)) == digest(gather(GROUPS, 3))


def test_digest_depends_on_every_token_and_on_where_it_is():
    samples = gather(GROUPS, 3)
    found = {digest(samples)}
    changes = 0
    for i, tokens in enumerate(samples.tokens):
        for position in range(len(tokens)):
            tokens[position] += 1
            found.add(digest(samples))
            tokens[position] -= 1
            changes += 1
        samples.tokens[i] = tokens[:-1]
        found.add(digest(samples))
        samples.tokens[i] = tokens
        changes += 1
    a, b = samples.tokens[0], samples.tokens[1]
    samples.tokens[0], samples.tokens[1] = b, a
    found.add(digest(samples))
    samples.tokens[0], samples.tokens[1] = np.concatenate([a, b[:1]]), b[1:]
    found.add(digest(samples))
    samples = gather(GROUPS, 3)
    samples.groups = [Group(group.prompt, group.visit + (n == 4)) for n, group in enumerate(GROUPS)]
    found.add(digest(samples))
    assert len(found) == changes + 4


def test_digest_leaves_log_probabilities_and_rewards_out():
    samples = gather(GROUPS, 3)
    before = digest(samples)
    samples.logprob[0] -= 1
    samples.rewards[:] = 0
    assert digest(samples) == before
