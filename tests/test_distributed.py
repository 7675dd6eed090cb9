"""Ranks as gloo processes that only meet: signals make all stop at the same place, and a rank that is missing is named."""

import os
import signal
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_progress import run_ranks

from bubblespec.distributed import Ranks, RankTimeout, StopRequested, signals_stop
from bubblespec.schedule.progress import ProgressBoard, RankState


@pytest.fixture
def usual_signals():
    """As a shell starts a command in the foreground: in the background it has it ignore Ctrl-C, and nohup a hang-up."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_only_note_a_wish_to_stop(usual_signals):
    ranks = Ranks(torch.device("cpu"))
    before = signal.getsignal(signal.SIGTERM)
    with signals_stop(ranks):
        assert not ranks.must_stop
        ranks.meet()
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert ranks.must_stop
        with pytest.raises(StopRequested):
            ranks.meet()
        ranks.barrier()  # a save's collectives go on
        with pytest.raises(KeyboardInterrupt):
            time.sleep(1.2)  # not the same Ctrl-C any more
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ranks = Ranks(torch.device("cpu"))
        with signals_stop(ranks):
            os.kill(os.getpid(), signal.SIGHUP)
            assert not ranks.must_stop
    finally:
        signal.signal(signal.SIGHUP, before)


TENSOR = torch.ones(1000)
COLLECTIVES = {
    "meet": lambda ranks: ranks.meet(),
    "sum": lambda ranks: ranks.sum_(TENSOR),
    "gather_ragged": lambda ranks: ranks.gather_ragged(np.arange(ranks.rank)),
}


def meets_without(ranks: Ranks, collective: str, fate: str, missing: int, timeout_s: float) -> list:
    """After some rounds `missing` hangs or dies in the middle of a step; what the others raise, and after how long."""
    ranks.timeout_s = timeout_s
    for round_ in range(5):
        ranks.place = f"round {round_}"
        COLLECTIVES[collective](ranks)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))  # as in a run; not for the start, which may take long
    ranks.place = "training of step 7"
    if ranks.rank == missing:
        os.kill(os.getpid(), signal.SIGSTOP if fate == "hangs" else signal.SIGKILL)
    if fate == "dies" and ranks.rank == (missing + 1) % ranks.world_size:
        time.sleep(1.0)  # in a forward while the third rank sees the connection break
    started = time.monotonic()
    try:
        COLLECTIVES[collective](ranks)
    except RankTimeout as error:
        return [str(error), time.monotonic() - started]
    raise AssertionError("no time-out")


@pytest.mark.parametrize(
    "collective, fate, missing",
    [("gather_ragged", "hangs", 1), ("sum", "dies", 0), ("meet", "dies", 2)],
)
def test_a_rank_missing_from_a_collective_is_named(tmp_path, capfd, collective, fate, missing):
    timeout_s = 3.0 if fate == "hangs" else 40.0
    results = run_ranks(tmp_path, meets_without, 3, collective, fate, missing, timeout_s, missing=missing)
    survivors = [result for result in results if result]
    assert len(survivors) == 2 and survivors[0][0] == survivors[1][0]
    line, waited_s = survivors[0][0], max(result[1] for result in survivors)
    assert line.startswith(f"rank {missing} missing in training of step 7 (") and line.endswith("last heard: in round 4")
    assert capfd.readouterr().err.count(f"error: {line}\n") == 1 and "\n" not in line
    assert (3.0 <= waited_s < 15) if fate == "hangs" else waited_s < 30


def stops_at(ranks: Ranks, stopped: int) -> list:
    """One rank is told to stop in a rollout with ticks, one in a wait; where each rank has got to, round after round."""
    seen = []
    board = ProgressBoard(ranks, 60, interval_s=0)
    board.begin()
    forwards = 0
    while not board.is_over:
        while board.poll(lambda: RankState(1, 9.0, 0, 0.01, 0, False, ranks.must_stop)) is not None:
            pass
        time.sleep(0.002 * (1 + ranks.rank))
        forwards += 1
        if ranks.rank == stopped and forwards == 20:
            ranks.must_stop = True
    seen.append([board.num_ticks, board.must_stop])
    try:
        ranks.meet()
    except StopRequested:
        seen.append("stopped")
    ranks.must_stop = False
    ranks.meet()
    with signals_stop(ranks):
        if ranks.rank == stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        ranks.barrier()  # not a place to stop at
        try:
            ranks.meet()
        except StopRequested:
            seen.append("stopped again")
        ranks.barrier()
    return seen


def test_all_ranks_stop_at_the_same_place(tmp_path):
    results = run_ranks(tmp_path, stops_at, 3, 1)
    assert results[0] == results[1] == results[2]
    (num_ticks, must_stop), *rest = results[0]
    assert must_stop and num_ticks > 1 and rest == ["stopped", "stopped again"]
