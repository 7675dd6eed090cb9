"""Collectives through memory that ranks share: every number of every rank, sums in the order of the
ranks, and a name for a rank that has died or does not come."""

import errno
import functools
import os
import random
import signal
import time

import numpy as np
import pytest
import torch

from bubblespec.distributed import shared_memory
from bubblespec.distributed.ranks import Ranks
from bubblespec.distributed.shared_memory import PLACE_BYTES, map_shared, open_collectives
from bubblespec.errors import RankTimeout
from tests.helpers.ranks import run_ranks

ROUNDS = 200


def exchanges(ranks: Ranks) -> int:
    """Sums and gathers of all sizes and types. Every rank knows what the others bring."""
    collectives = open_collectives(ranks)
    choose, delay = random.Random(7), random.Random(ranks.rank)
    for number in range(ROUNDS):
        most = 3 * PLACE_BYTES // 8 if number % 20 == 0 else 300
        size, dtype = choose.randrange(most), choose.choice((np.float32, np.float64, np.int64))
        brought = [
            np.random.default_rng((number, rank)).normal(size=size).astype(dtype) * 1000
            for rank in range(ranks.world_size)
        ]
        own = brought[ranks.rank].copy()
        if delay.random() < 0.1:
            time.sleep(delay.random() * 0.01)
        if number % 3 == 0:
            np.testing.assert_array_equal(collectives.all_gather(own), brought)
            continue
        collectives.all_reduce_(own)
        np.testing.assert_array_equal(own, functools.reduce(np.add, brought))
    flags = collectives.all_gather(np.array([[ranks.rank]], np.uint8))
    return flags.ravel().tolist()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_sums_and_gathers_equal_plain_computation(tmp_path, num_ranks):
    assert run_ranks(tmp_path, exchanges, num_ranks) == [list(range(num_ranks))] * num_ranks


def with_missing(ranks: Ranks, fate: str) -> str:
    collectives, own = open_collectives(ranks), np.ones(5)
    ranks.activity, ranks.timeout_s = "the TP tail", 2.0 if fate == "hangs" else 100.0
    try:
        for number in range(10):
            if ranks.rank == 1 and number == 7:
                if fate == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            collectives.all_reduce_(own)
    except RankTimeout as error:
        return str(error)


@pytest.mark.parametrize("fate", ["dies", "hangs"])
def test_missing_rank_is_named_by_collective(tmp_path, capfd, fate):
    line, _, same = run_ranks(tmp_path, with_missing, 3, fate, missing=1)
    reason = "the process of rank 1 has ended" if fate == "dies" else "no answer for 2 s"
    assert line == same and line.startswith(f"rank 1 missing in the TP tail ({reason})"), line
    assert capfd.readouterr().err.count(f"error: {line}\n") == 1


def test_full_memory_falls_back_to_gloo_with_warning(monkeypatch, capsys):
    """Found out before anybody writes: a write into a hole that cannot be filled is a SIGBUS. The
    file never has a name, so that a rank which is killed here leaves nothing."""
    made = []

    def fail(handle, *_):
        made.append(os.readlink(f"/proc/self/fd/{handle}"))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Two(Ranks):
        def all_gather(self, array):
            return np.stack((array, array))

        def gather_text(self, text):
            return [text, text]

    ranks = Two(torch.device("cpu"))
    ranks.world_size = 2
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        assert map_shared(ranks, 4096) is None
    (link,) = made
    assert link.startswith("/memfd:bubblespec-") and not os.path.exists(link)
    assert "warning: no shared memory: No space left on device" in capsys.readouterr().err
    assert map_shared(ranks, 4096).tolist() == [0] * 4096


def test_processor_reordering_writes_uses_gloo(monkeypatch):
    monkeypatch.setattr(shared_memory.platform, "machine", lambda: "aarch64")
    assert open_collectives(Ranks(torch.device("cpu"))) is None
