"""Virtual time for several ranks in one process: clocks, collectives and the progress board.

Each rank is a thread, and exactly one of them runs at any time. A rank's clock advances only by
forwards and sleeps. Before a rank reads what others have done, all ranks that are behind it in time
run first. So the outcome is a function of the inputs alone, however the machine schedules threads.
"""

import math
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bubblespec.distributed.ranks import Ranks
from bubblespec.rollout.board import LINGER_S, Transport

TICK_S = 1e-4  # from the last rank's post to the end of a progress tick
POST_S = 1.2e-4  # cost of a post to the posting rank


class _Abandoned(BaseException):
    """Ends the threads of the other ranks after an error in one."""


class World:
    """Clocks and meetings of `num_ranks` ranks."""

    def __init__(self, num_ranks: int, meeting_s: float = 1e-3):
        """meeting_s: seconds that a collective takes once all ranks have come to it."""
        self.num_ranks, self.meeting_s = num_ranks, meeting_s
        self.now = [0.0] * num_ranks  # seconds by rank
        # When each rank continues; infinite while another has to wake it.
        self._wake = [0.0] * num_ranks
        self._tick_awaited: list[int | None] = [None] * num_ranks
        self._batons = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._error: BaseException | None = None
        self._num_running = num_ranks
        self._meetings = [0] * num_ranks
        self._present: dict[int, dict[int, object]] = {}  # by meeting, what each rank has brought
        # By tick, when each rank posted to it, and its numbers.
        self._posted: dict[int, dict[int, tuple[float, np.ndarray]]] = {}

    def run(self, work: Callable[[int], None]) -> None:
        """Run `work(rank)` on every rank to its end, once. Raises the first error of a rank."""
        threads = [
            threading.Thread(target=self._run_rank, args=(rank, work), daemon=True)
            for rank in range(self.num_ranks)
        ]
        for thread in threads:
            thread.start()
        self._batons[0].release()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _run_rank(self, rank: int, work: Callable[[int], None]) -> None:
        try:
            self._await_baton(rank)
            work(rank)
            self._wake[rank] = math.inf
            self._num_running -= 1
            if self._num_running:
                self._pass_on()
        except BaseException as error:
            self._error = self._error or error
            for baton in self._batons:
                baton.release()

    def _await_baton(self, rank: int) -> None:
        self._batons[rank].acquire()
        if self._error is not None:
            raise _Abandoned

    def _pass_on(self) -> None:
        earliest = min(self._wake)
        if earliest == math.inf:
            raise RuntimeError("all ranks wait for each other")
        self._batons[self._wake.index(earliest)].release()

    def advance(self, rank: int, seconds: float) -> None:
        self.now[rank] += seconds

    def wait(self, rank: int, until: float) -> None:
        """Let the ranks behind `until` run first; infinite: until another rank wakes this one."""
        wake = self._wake
        wake[rank] = until
        if until == math.inf or min(wake) < until or wake.index(until) != rank:
            self._pass_on()
            self._await_baton(rank)
        self.now[rank] = max(self.now[rank], wake[rank])

    def meet(self, rank: int, brought: object, seconds: float | None = None) -> list:
        """Join the next collective and return what all ranks bring, once the last has arrived.

        seconds: duration from the last arrival on, equal on all ranks; by default meeting_s."""
        number = self._meetings[rank]
        self._meetings[rank] += 1
        present = self._present.setdefault(number, {})
        present[rank] = brought
        if len(present) < self.num_ranks:
            self.wait(rank, math.inf)
        else:
            del self._present[number]
            # All are here, so none can be later.
            self.now[rank] = max(self.now) + (self.meeting_s if seconds is None else seconds)
            self._wake[:] = [self.now[rank]] * self.num_ranks
        return [present[other] for other in range(self.num_ranks)]

    def post(self, rank: int, tick: int, numbers: np.ndarray) -> None:
        """Post to a tick, which is complete TICK_S after the last rank's post."""
        self.now[rank] += POST_S
        self._posted.setdefault(tick, {})[rank] = (self.now[rank], numbers)
        complete_at = self.complete_at(tick)
        if complete_at < math.inf:
            self._posted.pop(tick - 2, None)  # all have read the one before this, to post to this
            for other, awaited in enumerate(self._tick_awaited):
                if awaited == tick:
                    wake = min(self._wake[other], complete_at)
                    self._wake[other] = max(wake, self.now[other])

    def complete_at(self, tick: int) -> float:
        """Return the time at which a tick is complete; infinite until all ranks have posted."""
        posted = self._posted.get(tick, {})
        if len(posted) < self.num_ranks:
            return math.inf
        return max(time for time, _ in posted.values()) + TICK_S

    def await_tick(self, rank: int, tick: int, until: float) -> None:
        """Wait until a tick is complete, at most until `until`."""
        self._tick_awaited[rank] = tick
        self.wait(rank, min(until, max(self.complete_at(tick), self.now[rank])))
        self._tick_awaited[rank] = None

    def posted(self, tick: int) -> list[np.ndarray]:
        return [self._posted[tick][rank][1] for rank in range(self.num_ranks)]


class SimulatedRanks(Ranks):
    """One of the world's ranks: collectives are meetings in virtual time."""

    def __init__(self, world: World, rank: int, meeting_s: float | None = None):
        """Join the world as one of its ranks; meeting_s replaces the world's."""
        super().__init__(torch.device("cpu"))
        self.world, self.rank, self.world_size = world, rank, world.num_ranks
        self.is_main, self.meeting_s = rank == 0, meeting_s

        def now() -> float:
            return world.now[rank]

        # The functions of the `time` module that a rollout uses.
        sleep = partial(world.advance, rank)
        self.clock: Any = SimpleNamespace(perf_counter=now, monotonic=now, sleep=sleep)

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(sum(self.gather_ragged(tensor.clone())))

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        return np.stack(self.gather_ragged(array))

    def gather_ragged(self, array):
        """Return the arrays themselves, not copies; they must not be written to."""
        return self.world.meet(self.rank, array, self.meeting_s)


class SimulatedTicks(Transport):
    """Ticks in virtual time, which an idle rank sees at once instead of up to NAP_S later."""

    def __init__(self, ranks: SimulatedRanks):
        super().__init__(ranks.clock)
        self._world, self._rank, self._tick = ranks.world, ranks.rank, -1  # of the whole run

    def post(self, numbers: np.ndarray, name: str) -> None:
        self._tick += 1
        self._world.post(self._rank, self._tick, numbers)

    def is_complete(self) -> bool:
        now = self._world.now[self._rank]
        if self._world.complete_at(self._tick) == math.inf:
            self._world.wait(self._rank, now)  # those behind may yet post before now
        return self._world.complete_at(self._tick) <= now

    def receive(self) -> list[np.ndarray]:
        return self._world.posted(self._tick)

    def linger(self) -> None:
        self._world.await_tick(self._rank, self._tick, self._world.now[self._rank] + LINGER_S)

    def nap(self) -> None:
        self._world.await_tick(self._rank, self._tick, math.inf)
