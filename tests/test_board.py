"""The progress board: the same ticks everywhere, a common end, and a name for whoever goes missing,
between real processes; how soon, in virtual time or by a clock that the test moves.

The ranks only sleep instead of decoding, and nothing depends on how long anything takes.
"""

import os
import re
import signal
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bubblespec.distributed import failures
from bubblespec.distributed.failures import BROKEN_S, GRACE_S, Watchdog
from bubblespec.distributed.ranks import Ranks
from bubblespec.errors import InputError, RankTimeout
from bubblespec.rollout import board as boards
from bubblespec.rollout.board import (
    INTERVAL_S,
    LINGER_S,
    ProgressSync,
    RankState,
    SharedTicks,
    Transport,
    make_transport,
)
from bubblespec.tools.simulate.world import SimulatedRanks, SimulatedTicks, World
from tests.helpers.clocks import Clock
from tests.helpers.ranks import run_ranks

HANG_S = 120.0  # a time-out that no test waits for


def facts_of(rank: int, tick: int) -> np.ndarray:
    """The tick, and different numbers from tick to tick."""
    return np.append(tick, np.random.default_rng((rank, tick)).random(3 + tick % 5))


class Player:
    """A rank in one rollout: `steps` decoding steps of `step_s` seconds, then drafts of `draft_s`
    seconds until all are done."""

    def __init__(self, board: ProgressSync, steps: int, step_s: float, draft_s: float):
        self.board, self.steps, self.step_s, self.draft_s = board, steps, step_s, draft_s
        self.clock = board.ranks.clock
        self.drafted, self.ticks, self.ends = 0, [], []
        board.begin()

    def state(self) -> RankState:
        """What it says of a tick tells how many were acted on before it was posted."""
        facts = facts_of(self.board.ranks.rank, len(self.ticks))
        return RankState(self.steps, facts=facts)

    def act(self, states: list[RankState]) -> None:
        tick, rank = len(self.ticks), self.board.ranks.rank
        for other, state in enumerate(states):
            np.testing.assert_array_equal(state.facts, facts_of(other, tick))
        done = [state.is_done for other, state in enumerate(states) if other != rank]
        assert self.board.are_others_done == all(done)
        self.ticks.append([state.unfinished_rows for state in states])

    def poll(self) -> None:
        while (states := self.board.poll(self.state, is_done=not self.steps)) is not None:
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


def healthy(ranks: Ranks, backend: str, num_rollouts: int) -> list:
    """Rollouts of random lengths, one rank slower than the others; in half of them the others
    draft, in half they wait.

    Where they draft, the slow rank takes its first step only when each of them has drafted three
    times: they could not, if they stood still until a tick that is not complete.
    """
    store = dist.distributed_c10d._get_default_store()
    board, rng = ProgressSync(ranks, HANG_S, backend), np.random.default_rng(ranks.rank)
    rollouts = []
    for number in range(num_rollouts):
        is_slow = number % ranks.world_size == ranks.rank
        steps = int(rng.integers(4, 8)) if is_slow else int(rng.integers(0, 12))
        player = Player(board, steps, 0.01 if is_slow else 0.002, 0.002 * (number % 2))
        # On odd ranks another collective comes before the first tick, on even ones after it: they
        # must not be mixed up.
        before = torch.tensor([10.0**ranks.rank])
        if ranks.rank % 2:
            ranks.all_reduce_(before)
        player.poll()
        if ranks.rank % 2 == 0:
            ranks.all_reduce_(before)
        others = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
        if number % 2 and is_slow:
            store.wait([f"drafted/{number}/{rank}" for rank in others])
        while not board.is_over:
            player.turn()
            if player.drafted == 3:
                store.set(f"drafted/{number}/{ranks.rank}", "")
        calls = []
        assert board.poll(partial(calls.append, 1)) is None
        assert board.wait(partial(calls.append, 1)) is None
        after = ranks.all_reduce_(torch.tensor([10.0**ranks.rank]))
        rollouts.append([player.ticks, player.drafted, before.item(), after.item(), len(calls)])
    return rollouts


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_ticks_and_end_are_equal_on_all_ranks(tmp_path, backend):
    results = run_ranks(tmp_path, healthy, 3, backend, 4)
    for number, same_rollout in enumerate(zip(*results, strict=True)):
        ticks = same_rollout[0][0]
        is_done = np.array(ticks) == 0  # at the last tick all ranks, and at no earlier one
        assert is_done[-1].all() and not is_done[:-1].all(axis=1).any()
        assert len(ticks) >= 2, "the slowest rank had not begun at the first"
        for rank, (own_ticks, drafted, before, after, num_calls) in enumerate(same_rollout):
            assert own_ticks == ticks and before == after == 111.0 and num_calls == 0
            if rank != number % 3:
                assert (drafted >= 3) if number % 2 else drafted == 0


@pytest.mark.parametrize("draft_s", [0.004, 0.1])
def test_drafting_rank_reads_end_within_one_draft(draft_s):
    """In virtual time. Rank 1 decodes 6 steps, rank 0 drafts, and they begin up to 20 ms apart."""
    world, left, last_step, drafted, ticks = World(2), [], [], [], []

    def work(rank: int) -> None:
        ranks = SimulatedRanks(world, rank)
        board = ProgressSync(ranks, 30, SimulatedTicks(ranks))
        rng = np.random.default_rng(rank)
        for _ in range(30):
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


def test_busy_rank_ticks_at_intervals_and_posts_end_at_once():
    ranks = Ranks(torch.device("cpu"))
    ranks.clock = Clock()
    player = Player(ProgressSync(ranks, timeout_s=100, interval_s=0.25), 10, 0.1, 0.0)
    player.poll()
    with pytest.raises(RuntimeError, match="last tick"):
        player.board.begin()
    player.play()
    assert player.ticks == [[10], [6], [2], [0]]
    assert player.board.is_over and player.board.poll(player.state) is None
    player.board.begin()


def with_missing(ranks: Ranks, backend: str, missing: int) -> str:
    """Rank `missing` dies after its third tick: what the others raise. Ranks that hang are in
    test_distributed.py, and below in virtual time."""
    board = ProgressSync(ranks, HANG_S, backend, interval_s=0)
    player = Player(board, 10**6, 1e-3, 0.0)
    try:
        while True:
            player.turn()
            if ranks.rank == missing and len(player.ticks) >= 3:
                os.kill(os.getpid(), signal.SIGKILL)
    except RankTimeout as error:
        return str(error)


def test_missing_rank_is_named(tmp_path, capfd):
    line, _, same = run_ranks(tmp_path, with_missing, 3, "auto", 1, missing=1)
    assert line == same and "\n" not in line
    assert re.match(r"rank 1 missing in tick \d+ .* last heard: \d+ unfinished rows", line), line
    assert capfd.readouterr().err.count(f"error: {line}\n") == 1
    assert "no answer" not in line, "a broken connection is not waited for"


def test_loss_of_store_is_reported(tmp_path, capfd):
    """Without torchrun it is rank 0 that holds the store."""
    _, line = run_ranks(tmp_path, with_missing, 2, "gloo", 0, missing=0, store_rank=0)
    assert line.startswith("the job's key-value store is gone") and "no answer" not in line
    assert f"error: {line}" in capfd.readouterr().err


@pytest.fixture
def watchdog(monkeypatch):
    """watchdog(at, timeline) -> rank 0's of as many ranks as `at` has counts, and its clock. The
    others are there in the store alone; timeline: what is set in it, by the second."""

    def make(at: list[int], timeline: dict[float, str]) -> tuple[Watchdog, Clock]:
        store, clock = dist.HashStore(), Clock()
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(failures, "time", clock)
        made, sleep = Watchdog(0, len(at)), clock.sleep
        made.count = at[0]
        for rank, count in enumerate(at[1:], 1):
            made._store.set(f"at/{rank}", f"{count} a place")

        def sleep_and_hear(seconds: float) -> None:
            sleep(seconds)
            for second in [second for second in timeline if second <= clock.now]:
                made._store.set(timeline.pop(second), "1")

        clock.sleep = sleep_and_hear
        return made, clock

    return make


class NoAnswer(Transport):
    def is_complete(self) -> bool:
        return False


@pytest.mark.parametrize("is_done", [False, True])
def test_missing_tick_raises_after_timeout(watchdog, capsys, is_done):
    call, clock = watchdog([0, 0], {})
    ranks = Ranks(torch.device("cpu"))
    ranks.world_size, ranks.watchdog, ranks.clock = 2, call, clock
    board = ProgressSync(ranks, 7.0, NoAnswer(clock))
    message = r"^rank 1 missing in tick 0 of the set-up \(no answer for 7 s\); last heard: in a"
    with pytest.raises(RankTimeout, match=message):
        if is_done:
            board.wait(lambda: RankState(0))
        while True:
            board.poll(lambda: RankState(1))
            clock.sleep(0.01)
    assert 7.0 < clock.now < 7.02
    assert capsys.readouterr().err.count("error: ") == 1


def test_cuda_error_at_tick_is_raised_unchanged(watchdog):
    """Of an earlier kernel of this rank: no other rank is missing."""
    error = torch.AcceleratorError("CUDA error")

    class Broken(Transport):
        def is_complete(self) -> bool:
            raise error

    call, clock = watchdog([0, 0], {})
    ranks = Ranks(torch.device("cpu"))
    ranks.world_size, ranks.watchdog, ranks.clock = 2, call, clock
    board = ProgressSync(ranks, 7.0, Broken(clock))
    with pytest.raises(torch.AcceleratorError) as raised:
        board.wait(lambda: RankState(0))
    assert raised.value is error


@pytest.mark.parametrize(
    "at, timeline, left_s, waited_s, said",
    [
        # at the time-out: rank 2 has come, and is in a forward: it is not waited for
        ([3, 2, 3], {}, -1e-3, 0.0, "^rank 1 missing in here"),
        ([3, 2, 2], {}, -1e-3, 0.0, "^rank 1 and rank 2 missing in here"),
        # none is behind: whoever does not run into the time-out is missing
        ([3, 3, 3], {0.5: "ended/2"}, -1e-3, 0.5, "^rank 1 missing in here"),
        ([3, 3, 3], {}, -1e-3, GRACE_S, "^rank 1 and rank 2 missing in here"),
        # long before it, by a broken connection: rank 2 was behind in a forward, and sees it too
        ([3, 2, 2], {4.0: "ended/2"}, 1800, 4.0, "^rank 1 missing in here"),
        ([3, 2, 2], {4.0: "report"}, 1800, 4.0, "^1$"),
        ([3, 2, 2], {}, 1800, BROKEN_S, "^rank 1 and rank 2 missing in here"),
    ],
)
def test_watchdog_names_missing_ranks_after_patience(
    watchdog, at, timeline, left_s, waited_s, said
):
    call, clock = watchdog(at, timeline)
    with pytest.raises(RankTimeout, match=said):
        call.fail("here", "no answer", clock.monotonic() + left_s)
    assert waited_s <= clock.now < waited_s + 0.05


def test_transport_follows_device_and_backend(monkeypatch):
    made, shared = [], []
    monkeypatch.setattr(boards, "Collectives", lambda *arguments: made.append(arguments[2]))
    monkeypatch.setattr(boards, "open_collectives", lambda _: shared[0] if shared else None)
    for device in ("cuda", "cpu"):
        ranks = SimpleNamespace(device=torch.device(device), world_size=2, clock=time)
        make_transport(ranks, 60.0)
        with pytest.raises(InputError, match=r"rollout\.progress_backend: shm needs"):
            make_transport(ranks, 60.0, "shm")
    assert made == ["nccl", "gloo"]
    shared.append("a mapping")
    ranks.device = torch.device("cuda")
    assert make_transport(ranks, 60.0, "shm").name == SharedTicks.name
    make_transport(ranks, 60.0)
    assert made[2:] == ["nccl"]
    ranks.world_size = 1
    assert type(make_transport(ranks, 60.0)) is Transport


class Counting(Transport):
    """Of one rank, whose ticks complete at the next look; `times`: when each was posted."""

    def __init__(self, clock):
        super().__init__(clock)
        self.times, self.in_flight = [], 0

    def post(self, numbers: np.ndarray, name: str) -> None:
        assert not self.in_flight, "one tick at a time"
        super().post(numbers, name)
        self.in_flight += 1
        self.times.append(self._clock.now)

    def receive(self) -> list[np.ndarray]:
        self.in_flight -= 1
        return super().receive()


def test_relaxed_board_ticks_rarely():
    """Forwards of 5 ms; the distance is at most a hundredth of the rollout, or ten intervals."""
    ranks = Ranks(torch.device("cpu"))
    ranks.clock = clock = Clock()
    board = ProgressSync(ranks, 1000.0, ticks := Counting(clock))
    assert not board.is_relaxed
    board.is_relaxed = True

    def decode(seconds: float) -> np.ndarray:
        """Distances between the ticks of so many more seconds."""
        begin, end = len(ticks.times), clock.now + seconds
        while clock.now < end:
            clock.sleep(5e-3)
            while board.poll(lambda: RankState(1)) is not None:
                pass
        return np.diff(ticks.times[begin:])

    # One forward to the look that finds the tick complete, and one to the end of the interval.
    assert decode(1.0).max() < INTERVAL_S + 2 * 5.1e-3, "short rollouts are as they were"
    assert 0.04 < decode(4.0)[-1] < 0.05 + 2 * 5.1e-3
    decode(5.0)
    late = decode(20.0)
    assert late.min() > 0.1 and late.max() < 0.1 + 2 * 5.1e-3
    board.is_relaxed = False
    assert decode(1.0)[1:].max() < INTERVAL_S + 2 * 5.1e-3
    board.is_relaxed = True
    while board.poll(lambda: RankState(1)) is None:
        clock.sleep(5e-3)
    posted = len(ticks.times)
    board.poll(lambda: RankState(0), is_done=True)
    assert board.is_over and len(ticks.times) == posted + 1, "its end is said at once"
