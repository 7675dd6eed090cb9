"""Assignment, canonical order and digest of a step's samples, with one rank and with several played by one process."""

import concurrent.futures
import hashlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bubblespec.config import Config
from bubblespec.ranks.collectives import Ranks
from bubblespec.records import Prompt, Row, Samples, digest
from bubblespec.rollout.loop import RolloutStats
from bubblespec.rollout.placement import assign_prompts, collect, gather_samples, make_rows

PROMPTS = [Prompt(uid, f"prompt {uid}", (uid % 7, 1), {"answer": str(uid)}) for uid in (900, 17, 2**62 + 5, 3, 44)]


def finished_rows(prompts: list[Prompt], num_generations: int) -> list[Row]:
    """Rows whose tokens, log-probabilities and length tell prompt and generation; the longest are cut off."""
    rows = make_rows(prompts, 7, num_generations, 10)
    for row in rows:
        length = 1 + (row.id.uid + 3 * row.id.sample) % 5
        row.tokens = row.id.uid % 1000 * 10 + row.id.sample + np.arange(length, dtype=np.int64)
        row.logprob = -np.arange(1, length + 1, dtype=np.float32) - row.id.sample
        row.full_logprob = row.logprob / 2
        row.finish = "length" if length == 5 else "stop"
    return rows


def rewards_of(rows: list[Row]) -> np.ndarray:
    """float64 [rows, 2]; the second function does not apply to odd samples."""
    return np.array([[row.id.uid % 1000 + row.id.sample / 8, np.nan if row.id.sample % 2 else 1.0] for row in rows]).reshape(
        len(rows), 2
    )


def gather(prompts: list[Prompt], num_generations: int) -> Samples:
    rows = finished_rows(prompts, num_generations)
    return gather_samples(prompts, num_generations, rows, rewards_of(rows), Ranks(torch.device("cpu")))


def same(a: Samples, b: Samples) -> bool:
    arrays = [
        (x, y) for name in ("tokens", "logprob", "full_logprob") for x, y in zip(getattr(a, name), getattr(b, name), strict=True)
    ]
    arrays += [(a.is_truncated, b.is_truncated), (a.rewards, b.rewards)]
    return all(x.dtype == y.dtype and np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in arrays)


@pytest.mark.parametrize("num_prompts, world_size", [(8, 1), (8, 2), (7, 3), (3, 3), (2, 5), (1, 1), (0, 2)])
def test_every_prompt_has_one_rank_and_shares_are_even(num_prompts, world_size):
    shares = assign_prompts(num_prompts, world_size)
    assert len(shares) == world_size and sorted(n for share in shares for n in share) == list(range(num_prompts))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_rows_carry_the_noise_key_of_prompt_step_and_generation():
    rows = make_rows(PROMPTS[:2], 7, 3, 10)
    assert [(r.id.uid, r.id.visit, r.id.sample) for r in rows] == [(uid, 7, j) for uid in (900, 17) for j in range(3)]
    assert all(r.prompt == PROMPTS[i // 3].token_ids and r.max_new_tokens == 10 and r.finish is None for i, r in enumerate(rows))


def test_samples_of_one_rank_are_in_canonical_order():
    samples = gather(PROMPTS, 3)
    rows = finished_rows(PROMPTS, 3)
    assert len(samples) == 15 and samples.num_generations == 3 and samples.prompts == PROMPTS
    for i, row in enumerate(rows):
        assert samples.prompt_of(i).uid == row.id.uid and i % 3 == row.id.sample
        assert samples.tokens[i].tolist() == row.tokens.tolist()
        assert (
            samples.logprob[i].tolist() == row.logprob.tolist() and samples.full_logprob[i].tolist() == row.full_logprob.tolist()
        )
        assert samples.is_truncated[i] == (row.finish == "length")
    assert samples.lengths.tolist() == [len(row.tokens) for row in rows]
    assert 0 < samples.is_truncated.sum() < 15
    np.testing.assert_array_equal(samples.rewards, rewards_of(rows))


class PlayedRanks:
    """Ranks as threads of one process: every exchange waits for all of them."""

    def __init__(self, world_size: int):
        self.world_size, self.barrier, self.slots = world_size, threading.Barrier(world_size, timeout=120), [None] * world_size
        self.of_thread = threading.local()

    def gather_ragged(self, array: np.ndarray) -> list[np.ndarray]:
        self.slots[self.of_thread.rank] = array
        self.barrier.wait()
        gathered = [part.copy() for part in self.slots]
        self.barrier.wait()
        return gathered

    def run(self, rank: int, prompts: list[Prompt], num_generations: int) -> Samples:
        self.of_thread.rank = rank
        own = [prompts[n] for n in assign_prompts(len(prompts), self.world_size)[rank]]
        rows = finished_rows(own, num_generations)
        return gather_samples(prompts, num_generations, rows, rewards_of(rows), self)


@pytest.mark.parametrize("world_size", [2, 3, 5, 7])
def test_any_number_of_ranks_gathers_the_same_samples(world_size):
    ranks = PlayedRanks(world_size)
    with concurrent.futures.ThreadPoolExecutor(world_size) as pool:
        by_rank = list(pool.map(lambda rank: ranks.run(rank, PROMPTS, 3), range(world_size)))
    wanted = gather(PROMPTS, 3)
    assert all(same(samples, wanted) and digest(samples) == digest(wanted) for samples in by_rank)


def test_statistics_of_rollouts_of_a_step_add_up():
    first = RolloutStats(1, 20, 300.0, 4e3, 5e4, 6, 70, [("gen", 0.0, 1.0)])
    second = RolloutStats(2, 10, 100.0, 1e3, 1e4, 4, 30, [("wait", 1.0, 2.0)])
    assert first + second == RolloutStats(3, 30, 400.0, 5e3, 6e4, 10, 100, [("gen", 0.0, 1.0), ("wait", 1.0, 2.0)])
    assert first.own_forwards == 1 and len(first.events) == 1


class Clock:
    """Told by hand."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize("is_second", [False, True])
def test_stages_of_a_batch_follow_one_another(monkeypatch, is_second):
    """Generating takes 8 s, the slowest rank 4 s more, scoring 2 s and then the exchange of drafts 1 s. A
    further batch of the step begins where the last one ended, 0.5 s before it looks at the clock."""
    clock, ranks, stats = Clock(), Ranks(torch.device("cpu")), RolloutStats()
    monkeypatch.setattr(collect, "time", clock)

    def generate_step(trainer, rows, step, on_finished):
        clock.now += 8
        for row in rows:
            row.tokens, row.logprob, row.full_logprob = np.zeros(2, np.int64), *np.zeros((2, 2), np.float32)
        return stats, {}

    def scored() -> np.ndarray:
        clock.now += 2
        return np.arange(4.0)[:, None]

    def passes(seconds: float):
        return lambda *_: setattr(clock, "now", clock.now + seconds)

    monkeypatch.setattr(collect, "generate_step", generate_step)
    monkeypatch.setattr(ranks, "meet", passes(4))
    scoring = SimpleNamespace(on_finished=None, collect=scored)
    trainer = SimpleNamespace(
        config=Config(),
        ranks=ranks,
        own_share=lambda prompts: prompts,
        scorer=SimpleNamespace(begin=lambda own, rows: scoring),
        speculation=SimpleNamespace(exchange=passes(1)),
        combined=lambda samples: samples.rewards[:, 0] * 3,
    )
    trainer.config.rollout.num_generations = 2
    stages = [("reward", 98.0, 99.5)] if is_second else []
    clock.now = 100.0
    _, rewards, found = collect._collect_batch(trainer, PROMPTS[:2], 7, stages)
    assert stages[is_second:] == [("gen", 99.5 if is_second else 100.0, 108.0), ("wait", 108.0, 112.0), ("reward", 112.0, 115.0)]
    assert found.events == [("exchange", 114.0, 115.0)]
    assert rewards.tolist() == [[0.0, 3.0], [6.0, 9.0]]


# Digest


def test_digest_is_sha256_of_uid_sample_length_and_tokens():
    samples = gather(PROMPTS, 2)
    sha = hashlib.sha256()
    for row in sorted(finished_rows(PROMPTS, 2), key=lambda row: (row.id.uid, row.id.sample)):
        for number in (row.id.uid, row.id.sample, len(row.tokens)):
            sha.update(number.to_bytes(8, "little", signed=True))
        for token in row.tokens.tolist():
            sha.update(token.to_bytes(4, "little", signed=True))
    assert digest(samples) == sha.hexdigest()


def test_digest_does_not_depend_on_the_order_of_prompts():
    assert digest(gather(PROMPTS[::-1], 3)) == digest(gather(PROMPTS, 3))


def test_digest_depends_on_every_token_and_on_where_it_is():
    samples = gather(PROMPTS, 3)
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
    assert len(found) == changes + 3


def test_digest_leaves_log_probabilities_and_rewards_out():
    samples = gather(PROMPTS, 3)
    before = digest(samples)
    samples.logprob[0] -= 1
    samples.rewards[:] = 0
    assert digest(samples) == before
