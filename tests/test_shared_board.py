"""Ticks through shared memory, between real processes: the same states of the same ticks
everywhere, whatever their size; a rank that is gone is noticed; and where the ranks have no memory
in common, they all know."""

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
import torch

from bubblespec.dist import shared_board
from bubblespec.dist.progress import ProgressBoard, RankState
from bubblespec.dist.ranks import Ranks
from bubblespec.dist.shared_board import (
    HEADER,
    MAX_NUMBERS,
    SharedBoard,
    SharedMemory,
    has_ended,
    make_board,
    open_shared,
)
from bubblespec.errors import RankTimeout
from tests.helpers.ranks import run_ranks


def numbers_of(rank: int, rollout: int, tick: int, count: int) -> np.ndarray:
    return np.random.default_rng((rank, rollout, tick)).random(count)


def play(board: ProgressBoard, rng: np.random.Generator, rollout: int) -> int:
    """One rollout; returns how many ticks it had, in each of which all ranks' facts were right."""
    rank, steps = board.ranks.rank, int(rng.integers(5, 60))
    board.begin()

    def state() -> RankState:
        tick = board.num_ticks
        return RankState(steps, (tick,), facts=numbers_of(rank, rollout, tick, 3 + tick % 5))

    while not board.is_over:
        states = board.poll(state) if steps else board.wait(state)
        if steps and rng.random() < 0.3:
            time.sleep(float(rng.uniform(0, 1e-3)))
        if states is None:
            continue
        tick, steps = board.num_ticks - 1, max(steps - 1, 0)
        for other, told in enumerate(states):
            assert told.wanted_offers[0] == tick
            np.testing.assert_array_equal(
                told.facts, numbers_of(other, rollout, tick, 3 + tick % 5)
            )
    board.ranks.barrier()
    return board.num_ticks


def many_ticks(ranks: Ranks, num_rollouts: int) -> dict:
    """Rollouts of ticks with facts that each rank can work out of the others. Returns how many
    ticks there were, and what is left of the file."""
    board, rng = make_board(ranks, 60.0, "shm"), np.random.default_rng(ranks.rank)
    board.interval_s = 0
    right = sum(play(board, rng, rollout) for rollout in range(num_rollouts))
    left = [
        name
        for name in os.listdir("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
        if "bubblespec-" in name
    ]
    return {"is_shared": isinstance(board, SharedBoard), "right": right, "left": left}


def test_all_ranks_read_the_same_ticks(tmp_path):
    results = run_ranks(tmp_path, many_ticks, 3, 20)
    assert all(result == results[0] for result in results)
    assert results[0]["is_shared"] and results[0]["right"] > 20 * 5 and not results[0]["left"]


def with_dead_rank(ranks: Ranks) -> str:
    board = make_board(ranks, 600.0, "shm")
    board.begin()
    while board.num_ticks < 5:
        board.poll(lambda: RankState(1))
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankTimeout) as caught:
        board.wait(lambda: RankState(0))
        while True:
            board.wait(lambda: RankState(0))
    return str(caught.value)


def test_a_rank_that_is_gone_is_noticed_and_named(tmp_path, capfd):
    line, nothing = run_ranks(tmp_path, with_dead_rank, 2, missing=1)
    assert (
        nothing is None
        and line.startswith("rank 1 missing in tick 5")
        and "the process of rank 1 has ended" in line
    )


def without_common_memory(ranks: Ranks) -> list:
    """Rank 1 is on another machine, as far as it can see."""
    if ranks.rank == 1:
        shared_board.open = lambda path, mode: open(os.devnull, mode)  # noqa: SIM115
    return [open_shared(ranks) is None, type(make_board(ranks, 60.0, "shm")).__name__]


def test_where_one_rank_does_not_see_it_all_use_collectives(tmp_path):
    assert run_ranks(tmp_path, without_common_memory, 2) == [[True, "ProgressBoard"]] * 2


def test_one_rank_and_other_backends_have_a_plain_board():
    alone = Ranks(torch.device("cpu"))
    assert all(
        type(make_board(alone, 60.0, backend)) is ProgressBoard for backend in ("shm", "gloo")
    )


@pytest.fixture
def shared() -> SharedMemory:
    return SharedMemory(mmap.mmap(-1, 8 * (1 + 2 + 2 * 2 * (HEADER + MAX_NUMBERS))), 2)


def test_what_is_not_all_there_is_not_read(shared):
    """Numbers that are seen before their header, after it, or in part."""
    numbers = np.array([1.0, 2.0, 3.0])
    assert shared.read(0, 0) is None
    shared.write(0, 0, numbers)
    assert (
        shared.read(0, 0).tolist() == [1, 2, 3]
        and shared.read(0, 1) is None
        and shared.read(1, 0) is None
    )
    shared.numbers[0, 0, 1] = 7.0
    assert shared.read(0, 0) is None, "written again, or not yet"
    shared.write(0, 2, numbers[:2])
    assert shared.read(0, 0) is None and shared.read(0, 2).tolist() == [1, 2]
    copy = shared.read(0, 2)
    shared.write(0, 4, numbers)
    assert copy.tolist() == [1, 2]
    with pytest.raises(ValueError, match="there is room for"):
        shared.write(0, 6, np.empty(MAX_NUMBERS + 1))


def test_processes_that_have_ended_are_told_from_others():
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    assert not has_ended(child.pid) and not has_ended(os.getpid())
    child.stdin.close()
    while not has_ended(child.pid):  # nobody has waited for it
        time.sleep(0.01)
    child.wait()
    assert has_ended(child.pid)
