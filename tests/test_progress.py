"""The progress board between real gloo processes: same ticks everywhere, a common end, and a name for whoever goes missing.

The processes only sleep instead of decoding. The test process holds the key-value store, as torchrun does in a real run.
"""

import json
import multiprocessing
import os
import signal
import time
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bubblespec.distributed import Ranks, RankTimeout
from bubblespec.schedule.progress import ProgressBoard, RankState

PARENT_STORE = -1


def start_rank(scenario, rank: int, world_size: int, port: int, store_rank: int, folder, arguments) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == store_rank, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    result = scenario(Ranks(torch.device("cpu")), *arguments)
    with open(folder / f"{rank}.json", "w", encoding="utf-8") as file:
        json.dump(result, file)
    start = time.monotonic()
    dist.destroy_process_group()
    # The end must not wait for the ranks that are missing.
    assert time.monotonic() - start < 5


def run_ranks(
    folder,
    scenario,
    world_size: int,
    *arguments,
    missing: int | None = None,
    store_rank: int = PARENT_STORE,
    timeout_s: float = 240,
) -> list:
    """What `scenario(ranks, *arguments)` returned on each rank; None for the rank that is expected to go missing."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    if store_rank != PARENT_STORE:
        del server  # the rank takes over the port
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=start_rank, args=(scenario, rank, world_size, port, store_rank, folder, arguments), daemon=True)
        for rank in range(world_size)
    ]
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    for process in processes:
        process.start()
    try:
        for rank, process in enumerate(processes):
            if rank != missing:
                process.join(timeout_s)
                assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    texts = [None if rank == missing else (folder / f"{rank}.json").read_text() for rank in range(world_size)]
    return [text and json.loads(text) for text in texts]


class Player:
    """A rank in one rollout: `steps` decoding steps of `step_s` seconds, then drafts of `draft_s` seconds until all are done."""

    def __init__(self, board: ProgressBoard, steps: int, step_s: float, draft_s: float):
        self.board, self.steps, self.step_s, self.draft_s = board, steps, step_s, draft_s
        self.drafted, self.ticks, self.read, self.ends = 0, [], [], []
        board.begin()

    def state(self) -> RankState:
        """`wanted_items` counts the ticks that were acted on before this one was posted."""
        return RankState(3, self.steps + 1.0, self.drafted, self.step_s, len(self.ticks), self.steps == 0)

    def act(self, states: list[RankState]) -> None:
        self.ticks.append([tuple(state) for state in states])
        self.acted = time.monotonic()
        self.read.append([self.board.slowest_rank, self.board.expected_remaining_s, self.board.are_others_done])

    def poll(self) -> None:
        while (states := self.board.poll(self.state)) is not None:
            self.act(states)

    def turn(self) -> None:
        """A step, a draft, or a wait if drafts take no time or the others wait for this rank alone; then look at the board."""
        if self.steps:
            time.sleep(self.step_s)
            self.steps -= 1
        elif self.draft_s and not self.board.are_others_done:
            time.sleep(self.draft_s)
            self.drafted += 1
        elif (states := self.board.wait(self.state)) is not None:
            self.act(states)
        self.ends.append(time.monotonic())
        self.poll()

    def play(self) -> None:
        while not self.board.is_over:
            self.turn()


def healthy(ranks: Ranks, num_rollouts: int) -> dict:
    """Rollouts of random lengths, one rank far slower than the others; in half of them the others draft, in half they wait."""
    board = ProgressBoard(ranks, timeout_s=30)
    rng = np.random.default_rng(ranks.rank)
    rollouts, sums = [], []
    for number in range(num_rollouts):
        is_slow = number % ranks.world_size == ranks.rank
        steps = int(rng.integers(4, 8)) if is_slow else int(rng.integers(0, 12))
        player = Player(board, steps, 0.03 if is_slow else float(rng.uniform(0.001, 0.004)), 0.002 * (number % 2))
        # On odd ranks another collective comes before the first tick, on even ones after it: they must not be mixed up.
        before = torch.tensor([10.0**ranks.rank])
        if ranks.rank % 2:
            ranks.sum_(before)
        player.poll()
        if ranks.rank % 2 == 0:
            ranks.sum_(before)
        player.play()
        calls = []
        assert board.poll(partial(calls.append, 1)) is None and board.wait(partial(calls.append, 1)) is None
        after, same_group = torch.tensor([10.0**ranks.rank]), torch.tensor([10.0**ranks.rank])
        ranks.sum_(after)
        dist.all_reduce(same_group, group=board._group)  # would meet a tick that was left behind
        rollouts.append({"ticks": player.ticks, "read": player.read, "drafted": player.drafted, "calls": len(calls)})
        sums.append([before.item(), after.item(), same_group.item()])
    return {"rollouts": rollouts, "sums": sums}


def with_quanta(ranks: Ranks, draft_s: float, num_rollouts: int) -> list:
    """Rank 1 decodes, rank 0 drafts. For each rollout, on the machine's clock: when rank 0 left it, when rank 1's steps ended."""
    board = ProgressBoard(ranks, timeout_s=30)
    rng = np.random.default_rng(ranks.rank)
    ends = []
    for _ in range(num_rollouts):
        player = Player(board, 6 if ranks.rank else 0, 0.015, draft_s)
        time.sleep(rng.uniform(0, 0.02))
        player.poll()
        num_steps = player.steps
        player.play()
        ends.append(player.ends[num_steps - 1] if ranks.rank else time.monotonic())
    return ends


def with_missing(ranks: Ranks, fate: str, missing: int, timeout_s: float) -> dict:
    """Rank `missing` hangs or dies after its fifth step, before or after it has posted the next tick: what the others raise."""
    board = ProgressBoard(ranks, timeout_s, interval_s=0)
    player = Player(board, 1000, 0.01, 0.0)
    player.poll()
    try:
        for number in range(1000):
            if ranks.rank == missing and number == 5:
                if fate == "hangs":
                    time.sleep(600)
                elif fate == "dies before posting":
                    player.state = lambda: os.kill(os.getpid(), signal.SIGKILL)
                else:
                    os.kill(os.getpid(), signal.SIGKILL)  # after a poll there is always a tick in flight
            elif fate != "hangs" and number == 5 and ranks.rank == (missing + 1) % ranks.world_size:
                time.sleep(0.5)  # in a forward while the third rank sees the connection break
            if fate == "hangs" and ranks.rank == 2 and number == 30:
                time.sleep(1.5 * timeout_s)  # slow, but it has posted the tick that the others wait for
            player.turn()
    except RankTimeout as error:
        return {"line": str(error), "waited_s": time.monotonic() - player.acted, "num_ticks": board.num_ticks}
    raise AssertionError("no time-out")


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_read_the_same_ticks_and_end_by_the_same(tmp_path, world_size):
    results = run_ranks(tmp_path, healthy, world_size, 6)
    for number, same_rollout in enumerate(zip(*(result["rollouts"] for result in results), strict=True)):
        ticks = same_rollout[0]["ticks"]
        assert all(rollout["ticks"] == ticks and rollout["calls"] == 0 for rollout in same_rollout)
        is_done = np.array(ticks)[:, :, 5] == 1
        assert is_done[-1].all() and not is_done[:-1].all(axis=1).any(), "the first tick with all ranks done is the last"
        assert len(ticks) >= 3, "the slowest rank has at least 4 steps, and posts at the latest at every second one"
        for tick, states in enumerate(ticks):
            assert len(states) == world_size and all(state[0] == 3 for state in states)
            assert all(state[4] == tick for state in states), "a tick is posted after the one before was acted on"
            left = [0.0 if state[5] else state[1] * state[3] for state in states]
            for rank, rollout in enumerate(same_rollout):
                are_others_done = all(state[5] for other, state in enumerate(states) if other != rank)
                assert rollout["read"][tick] == [int(np.argmax(left)), max(left), are_others_done]
        drafted = [rollout["drafted"] for rank, rollout in enumerate(same_rollout) if rank != number % world_size]
        assert not number % 2 or max(drafted) > len(ticks), "a rank does not stand still until a tick is complete"
    everyone = sum(10.0**rank for rank in range(world_size))
    assert all(sums == [everyone] * 3 for result in results for sums in result["sums"])


@pytest.mark.parametrize("draft_s", [0.003, 0.06], ids=["short drafts", "drafts longer than a step"])
def test_a_drafting_rank_overruns_the_last_step_by_one_draft_at_most(tmp_path, draft_s):
    fast, slow = run_ranks(tmp_path, with_quanta, 2, draft_s, 12)
    late_s = sorted(left - last_step for left, last_step in zip(fast, slow, strict=True))
    # 15 ms for the ticks themselves, and half of the rollouts, as other load on the machine may delay some of them further.
    assert late_s[6] < draft_s + 0.015 and late_s[0] > 0, late_s


@pytest.mark.parametrize("fate, missing", [("hangs", 1), ("dies before posting", 2), ("dies after posting", 0)])
def test_a_missing_rank_is_named(tmp_path, capfd, fate, missing):
    timeout_s = 2.0 if fate == "hangs" else 8.0
    results = run_ranks(tmp_path, with_missing, 3, fate, missing, timeout_s, missing=missing)
    survivors = [result for result in results if result]
    assert len(survivors) == 2 and survivors[0]["line"] == survivors[1]["line"]
    line = survivors[0]["line"]
    assert line.startswith(f"rank {missing} missing in tick "), line
    assert "last heard: RankState(active_rows=3, tokens_left=99" in line and "\n" not in line
    assert capfd.readouterr().err.count(f"error: {line}\n") == 1
    if fate == "hangs":
        assert timeout_s <= results[0]["waited_s"] < timeout_s + 1
        assert results[2]["waited_s"] < 2 * timeout_s + 1, "as soon as it polls"
    else:
        assert all(result["waited_s"] < timeout_s for result in survivors)


def test_the_end_of_the_store_is_an_error_too(tmp_path, capfd):
    """Without torchrun it is rank 0 that holds the store."""
    _, survivor = run_ranks(tmp_path, with_missing, 2, "dies after posting", 0, 8.0, missing=0, store_rank=0)
    assert survivor["line"].startswith("the job's key-value store has ended") and survivor["waited_s"] < 8
    assert f"error: {survivor['line']}" in capfd.readouterr().err


def test_one_process_needs_no_group():
    assert not dist.is_initialized()
    board = ProgressBoard(Ranks(torch.device("cpu")), timeout_s=100, interval_s=0)
    assert board.slowest_rank is None and board.expected_remaining_s == np.inf
    for num_steps in (3, 0):
        player = Player(board, num_steps, 0.001, 0.0)
        player.poll()
        if num_steps:
            with pytest.raises(RuntimeError, match="last tick"):
                board.begin()
        player.play()
        assert [states[0][1] for states in player.ticks] == list(range(num_steps + 1, 0, -1))
        assert board.is_over and board.slowest_rank == 0 and board.expected_remaining_s == 0
        assert board.poll(player.state) is None


def test_a_busy_rank_ticks_at_intervals_and_tells_its_end_at_once():
    board = ProgressBoard(Ranks(torch.device("cpu")), timeout_s=100, interval_s=60)
    player = Player(board, 5, 0.0, 0.0)
    player.poll()
    player.play()
    assert [(states[0][1], states[0][5]) for states in player.ticks] == [(6.0, False), (1.0, True)]
