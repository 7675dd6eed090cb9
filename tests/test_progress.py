"""The progress board: same ticks everywhere, a common end, and a name for whoever goes missing,
between real gloo processes; and how soon, in virtual time or by a clock that the test moves.
Nothing here depends on how long anything takes.

The ranks only sleep instead of decoding.
"""

import contextlib
import os
import re
import signal
import time
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bubblespec.dist import ranks as distributed
from bubblespec.dist.progress import LINGER_S, NUM_NUMBERS, ProgressBoard, RankState
from bubblespec.dist.ranks import BROKEN_S, GRACE_S, Ranks, RollCall
from bubblespec.errors import RankTimeout
from bubblespec.simulate.world import SimulatedBoard, SimulatedRanks, World
from tests.helpers.clocks import Clock, ClockThatSkips
from tests.helpers.ranks import run_ranks

HANG_S = 120.0  # a time-out that no test waits for


class Player:
    """A rank in one rollout: `steps` decoding steps of `step_s` seconds, then drafts of `draft_s`
    seconds until all are done."""

    def __init__(self, board: ProgressBoard, steps: int, step_s: float, draft_s: float):
        self.board, self.steps, self.step_s, self.draft_s = board, steps, step_s, draft_s
        self.clock = board.ranks.clock
        self.drafted, self.ticks, self.read, self.ends = 0, [], [], []
        board.begin()

    def state(self) -> RankState:
        """`wanted_offers` counts the ticks that were acted on before this one was posted."""
        return RankState(self.steps, (len(self.ticks),))

    def act(self, states: list[RankState]) -> None:
        self.ticks.append(
            [(state.unfinished_rows, state.wanted_offers[0], state.must_stop) for state in states]
        )
        self.read.append(self.board.are_others_done)

    def poll(self) -> None:
        while (states := self.board.poll(self.state)) is not None:
            self.act(states)

    def turn(self) -> None:
        """A step, a draft, or a wait if drafts take no time or the others wait for this rank alone;
        then look at the board."""
        if self.steps:
            self.clock.sleep(self.step_s)
            self.steps -= 1
        elif self.draft_s and not self.board.are_others_done:
            self.clock.sleep(self.draft_s)
            self.drafted += 1
        elif (states := self.board.wait(self.state)) is not None:
            self.act(states)
        self.ends.append(self.clock.monotonic())
        self.poll()

    def play(self) -> None:
        while not self.board.is_over:
            self.turn()


def healthy(ranks: Ranks, num_rollouts: int) -> dict:
    """Rollouts of random lengths, one rank slower than the others; in half of them the others
    draft, in half they wait.

    Where they draft, the slow rank takes its first step only when each of them has drafted three
    times: they could not, if they stood still until a tick that is not complete.
    """
    board, store = (
        ProgressBoard(ranks, timeout_s=HANG_S),
        dist.distributed_c10d._get_default_store(),
    )
    rng = np.random.default_rng(ranks.rank)
    rollouts, sums = [], []
    for number in range(num_rollouts):
        is_slow = number % ranks.world_size == ranks.rank
        steps = int(rng.integers(4, 8)) if is_slow else int(rng.integers(0, 12))
        player = Player(
            board,
            steps,
            0.01 if is_slow else float(rng.uniform(0.001, 0.004)),
            0.002 * (number % 2),
        )
        # On odd ranks another collective comes before the first tick, on even ones after it: they
        # must not be mixed up.
        before = torch.tensor([10.0**ranks.rank])
        if ranks.rank % 2:
            ranks.sum_(before)
        player.poll()
        if ranks.rank % 2 == 0:
            ranks.sum_(before)
        if number % 2 and is_slow:
            store.wait(
                [
                    f"drafted/{number}/{rank}"
                    for rank in range(ranks.world_size)
                    if rank != ranks.rank
                ]
            )
        while not board.is_over:
            player.turn()
            if player.drafted == 3:
                store.set(f"drafted/{number}/{ranks.rank}", "")
        calls = []
        assert (
            board.poll(partial(calls.append, 1)) is None
            and board.wait(partial(calls.append, 1)) is None
        )
        after, same_group = torch.tensor([10.0**ranks.rank]), torch.tensor([10.0**ranks.rank])
        ranks.sum_(after)
        dist.all_reduce(same_group, group=board._group)  # would meet a tick that was left behind
        rollouts.append(
            {
                "ticks": player.ticks,
                "read": player.read,
                "drafted": player.drafted,
                "calls": len(calls),
            }
        )
        sums.append([before.item(), after.item(), same_group.item()])
    return {"rollouts": rollouts, "sums": sums}


def with_missing(ranks: Ranks, fate: str, missing: int) -> str:
    """Rank `missing` hangs or dies after its fifth step, before or after it has posted the next
    tick: what the others raise."""
    clock = distributed.time = ranks.clock = ClockThatSkips()
    board = ProgressBoard(ranks, HANG_S, interval_s=0)
    player, store = Player(board, 1000, 0.01, 0.0), dist.distributed_c10d._get_default_store()
    player.poll()
    try:
        for number in range(1000):
            if number == 5 and ranks.rank == missing:
                if fate == "hangs":
                    store.set("hangs", f"{ranks.roll_call.count} {os.getpid()}")
                    time.sleep(600)
                elif fate == "dies before posting":
                    player.state = lambda: os.kill(os.getpid(), signal.SIGKILL)
                else:
                    os.kill(
                        os.getpid(), signal.SIGKILL
                    )  # after a poll there is always a tick in flight
            elif (
                number == 5
                and fate != "hangs"
                and ranks.world_size > 2
                and ranks.rank == (missing + 1) % 3
            ):
                with contextlib.suppress(
                    dist.DistStoreError
                ):  # in a forward while the third rank sees the connection break
                    store.wait([f"roll_call/ended/{(missing + 2) % 3}"], timedelta(seconds=1))
            if (
                fate == "hangs"
                and store.check(["hangs"])
                and ranks.roll_call.count > int(store.get("hangs").split()[0])
            ):
                # This rank has posted the tick that all wait for. Rank 0 runs into the time-out
                # first, while rank 2 is in a forward that takes longer.
                if ranks.rank == 2:
                    store.set("posted", "")
                    store.wait(["said"])
                else:
                    store.wait(["posted"])
                clock.skipped += HANG_S + 1
            player.turn()
    except RankTimeout as error:
        if fate == "hangs":
            store.set("said", "")
            if ranks.rank == 2:  # frees the threads of both in the collective
                os.kill(int(store.get("hangs").split()[1]), signal.SIGKILL)
        return str(error)
    raise AssertionError("no time-out")


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_read_the_same_ticks_and_end_by_the_same(tmp_path, world_size):
    results = run_ranks(tmp_path, healthy, world_size, 6)
    for number, same_rollout in enumerate(
        zip(*(result["rollouts"] for result in results), strict=True)
    ):
        ticks = same_rollout[0]["ticks"]
        assert all(rollout["ticks"] == ticks and rollout["calls"] == 0 for rollout in same_rollout)
        is_done = np.array(ticks)[:, :, 0] == 0
        assert is_done[-1].all() and not is_done[:-1].all(axis=1).any(), (
            "the first tick with all ranks done is the last"
        )
        assert len(ticks) >= 2, "the slowest rank had not begun at the first"
        for tick, states in enumerate(ticks):
            assert len(states) == world_size
            assert all(wanted_offers == tick for _, wanted_offers, _ in states), (
                "a tick is posted after the last was acted on"
            )
            for rank, rollout in enumerate(same_rollout):
                assert rollout["read"][tick] == all(
                    steps == 0 for other, (steps, *_) in enumerate(states) if other != rank
                )
        drafted = [
            rollout["drafted"]
            for rank, rollout in enumerate(same_rollout)
            if rank != number % world_size
        ]
        assert (min(drafted) >= 3) if number % 2 else not any(drafted)
    everyone = sum(10.0**rank for rank in range(world_size))
    assert all(sums == [everyone] * 3 for result in results for sums in result["sums"])


@pytest.mark.parametrize(
    "draft_s", [0.003, 0.06], ids=["short drafts", "drafts longer than a step"]
)
def test_a_drafting_rank_overruns_the_last_step_by_one_draft_at_most(draft_s):
    """In virtual time. Rank 1 decodes 6 steps, rank 0 drafts, and they begin up to 20 ms apart."""
    world, left, last_step, drafted, ticks = World(2), [], [], [], []

    def work(rank: int) -> None:
        ranks = SimulatedRanks(world, rank)
        board, rng = SimulatedBoard(ranks, timeout_s=30), np.random.default_rng(rank)
        for _ in range(100):
            player = Player(board, 6 if rank else 0, 0.015, draft_s)
            ranks.clock.sleep(rng.uniform(0, 0.02))
            began = ranks.clock.monotonic()
            player.poll()
            player.play()
            if rank:
                last_step.append(player.ends[5])
                ticks.append(len(player.ticks))
            else:
                left.append(ranks.clock.monotonic())
                drafted.append(player.drafted * draft_s / (left[-1] - began))
            ranks.barrier()

    world.run(work)
    late_s = np.array(left) - last_step
    assert late_s.min() > 0 and late_s.max() < draft_s + LINGER_S
    assert min(drafted) > 0.8, "a rank does not stand still until a tick is complete"
    assert draft_s > 0.05 or min(ticks) >= 3, (
        "the slowest rank posts at the latest at every second step"
    )


@pytest.mark.parametrize(
    "fate, missing", [("hangs", 1), ("dies before posting", 2), ("dies after posting", 0)]
)
def test_a_missing_rank_is_named(tmp_path, capfd, fate, missing):
    results = run_ranks(tmp_path, with_missing, 3, fate, missing, missing=missing)
    survivors = [result for result in results if result]
    assert len(survivors) == 2 and survivors[0] == survivors[1]
    line = survivors[0]
    assert line.startswith(f"rank {missing} missing in tick "), line
    assert re.search(r"last heard: 99\d unfinished rows, ", line) and "\n" not in line
    assert capfd.readouterr().err.count(f"error: {line}\n") == 1
    assert (f"no answer for {HANG_S:g} s" in line) == (fate == "hangs"), (
        "a broken connection is not waited for"
    )


def test_the_end_of_the_store_is_an_error_too(tmp_path, capfd):
    """Without torchrun it is rank 0 that holds the store."""
    _, line = run_ranks(tmp_path, with_missing, 2, "dies after posting", 0, missing=0, store_rank=0)
    assert line.startswith("the job's key-value store has ended") and "no answer" not in line
    assert f"error: {line}" in capfd.readouterr().err


class SilentBoard(ProgressBoard):
    """No tick is ever answered."""

    def _connect(self, backend: str | None) -> None:
        self._numbers = np.zeros(NUM_NUMBERS)

    def _post(self) -> None:
        self.ranks.roll_call.enter("tick")

    def _is_complete(self) -> bool:
        return False


@pytest.fixture
def roll_call(monkeypatch):
    """roll_call(at, timeline) -> rank 0's of as many ranks as `at` has counts, and its clock. The
    others are there in the store alone; timeline: what is set in it, by the second."""

    def make(at: list[int], timeline: dict[float, str]) -> tuple[RollCall, Clock]:
        store, clock = dist.HashStore(), Clock()
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(distributed, "time", clock)
        made, sleep = RollCall(0, len(at)), clock.sleep
        for rank, count in enumerate(at[1:], 1):
            made._store.set(f"at/{rank}", f"{count} a place")

        def sleep_and_hear(seconds: float) -> None:
            sleep(seconds)
            for second in [second for second in timeline if second <= clock.now]:
                made._store.set(timeline.pop(second), "1")

        clock.sleep = sleep_and_hear
        return made, clock

    return make


@pytest.mark.parametrize("is_done", [False, True])
def test_a_tick_is_awaited_for_as_long_as_the_time_out_says(roll_call, capsys, is_done):
    call, clock = roll_call([0, 0], {})
    ranks = Ranks(torch.device("cpu"))
    ranks.world_size, ranks.roll_call, ranks.clock = 2, call, clock
    board = SilentBoard(ranks, timeout_s=7.0)
    with pytest.raises(
        RankTimeout,
        match=r"^rank 1 missing in tick 0 of the set-up \(no answer for 7 s\); last heard: in a place",
    ):
        if is_done:
            board.wait(lambda: RankState(0))
        while True:
            board.poll(lambda: RankState(1))
            clock.sleep(0.01)
    assert 7.0 < clock.now < 7.02 and capsys.readouterr().err.count("error: ") == 1


@pytest.mark.parametrize(
    "at, timeline, waited_s, named",
    [
        (
            [3, 2, 3],
            {},
            0.0,
            "rank 1",
        ),  # rank 2 has come, and is in a forward: it is not waited for
        ([3, 2, 2], {}, 0.0, "rank 1 and rank 2"),
        (
            [3, 3, 3],
            {0.5: "ended/2"},
            0.5,
            "rank 1",
        ),  # none is behind: whoever does not run into the time-out is missing
        ([3, 3, 3], {}, GRACE_S, "rank 1 and rank 2"),
    ],
)
def test_who_is_named_at_a_time_out(roll_call, at, timeline, waited_s, named):
    call, clock = roll_call(at, timeline)
    call.count = at[0]
    with pytest.raises(RankTimeout, match=f"^{named} missing in here"):
        call.fail("here", "no answer", clock.monotonic() - 1e-3)
    assert waited_s <= clock.now < waited_s + 0.05


@pytest.mark.parametrize(
    "timeline, waited_s, named",
    [
        (
            {4.0: "ended/2"},
            4.0,
            "rank 1",
        ),  # rank 2 was behind in a forward, and sees the broken connection too
        ({4.0: "verdict"}, 4.0, ""),
        ({}, BROKEN_S, "rank 1 and rank 2"),
    ],
)
def test_a_broken_connection_is_told_by_all_who_are_left(roll_call, timeline, waited_s, named):
    """Long before the time-out, and with some patience for those that are in a forward."""
    call, clock = roll_call([3, 2, 2], timeline)
    call.count = 3
    with pytest.raises(RankTimeout, match=f"^{named} missing in here" if named else "^1$"):
        call.fail("here", "connection reset", clock.monotonic() + 1800)
    assert waited_s <= clock.now < waited_s + 0.05


def test_one_process_needs_no_group():
    assert not dist.is_initialized()
    board = ProgressBoard(Ranks(torch.device("cpu")), timeout_s=100, interval_s=0)
    for num_steps in (3, 0):
        player = Player(board, num_steps, 0.001, 0.0)
        player.poll()
        if num_steps:
            with pytest.raises(RuntimeError, match="last tick"):
                board.begin()
        player.play()
        assert [states[0][0] for states in player.ticks] == list(range(num_steps, -1, -1))
        assert board.is_over and board.last_states[0].is_done
        assert board.poll(player.state) is None


def test_a_busy_rank_ticks_at_intervals_and_tells_its_end_at_once():
    """Steps of 0.1 s, each tick complete at the poll after it was posted, and 0.25 s from there to
    the next one."""
    ranks = Ranks(torch.device("cpu"))
    ranks.clock = Clock()
    player = Player(ProgressBoard(ranks, timeout_s=100, interval_s=0.25), 10, 0.1, 0.0)
    player.poll()
    player.play()
    assert [states[0][0] for states in player.ticks] == [10, 6, 2, 0]
