"""The progress board: ranks exchange their progress during a rollout, without waiting.

A tick is one asynchronous all-gather of a small state. A rank posts its state, continues to decode,
checks between two forwards whether the tick is complete, and then posts the next one, so the
slowest rank sets the pace. All ranks read the same states of the same ticks: a decision that is a
pure function of a tick is the same on all ranks without further agreement. The last tick is the one
in which every rank is done, or any has a stop request; all ranks leave the rollout there.

Ticks are NCCL collectives on GPUs, memory shared by the ranks of one machine on CPUs, and gloo
collectives across machines. The kernel of an NCCL collective holds a part of the GPU until the last
rank has posted, so it takes as little of it as it can, and ticks are rarer while no rank could act
on them.
"""

import contextlib
import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from bubblespec.distributed.ranks import OWN_ERRORS, Ranks, all_gather, one_line
from bubblespec.distributed.shared_memory import PLACE_BYTES, SharedCollectives, open_collectives
from bubblespec.errors import InputError

# A rank that is done waits this long for its tick, which may be the last: all ranks would have to
# wait for a draft that it starts now.
LINGER_S = 2e-3
NAP_S = 2e-4
# The slowest rank pays for ticks with everyone's time: their minimum distance and maximum share.
INTERVAL_S = 1e-2
MAX_SHARE = 0.04
# While no rank could act on a tick, their distance is this share of the rollout so far, up to a
# multiple of the minimum: the first rank that becomes idle loses no more than that.
RELAXED_SHARE, MAX_RELAXED = 0.01, 10.0

NO_FACTS = np.empty(0)


class RankState(NamedTuple):
    """What a rank publishes in a tick."""

    unfinished_rows: int
    """Rows of the rank that are unfinished in this rollout."""
    must_stop: bool = False
    """Whether the rank has a stop request."""
    facts: np.ndarray = NO_FACTS
    """Further numbers for decisions, float64, of the same length on all ranks."""

    @property
    def is_done(self) -> bool:
        """Whether the rank has finished its rows of this rollout."""
        return self.unfinished_rows == 0

    def numbers(self) -> np.ndarray:
        """Return the state as a tick carries it, float64 [2 + facts]."""
        return np.concatenate(((self.unfinished_rows, self.must_stop), self.facts))

    @classmethod
    def from_numbers(cls, numbers: np.ndarray) -> "RankState":
        """Return the state that `numbers` has encoded."""
        return cls(int(numbers[0]), bool(numbers[1]), numbers[2:])

    def __str__(self) -> str:
        told = ", stop requested" if self.must_stop else ""
        return f"{self.unfinished_rows} unfinished rows{told}"


class Transport:
    """Carries the numbers of ticks, one tick at a time; this one is for a single rank."""

    name = "one rank"

    def __init__(self, clock):
        self._clock = clock

    def post(self, numbers: np.ndarray, name: str) -> None:
        """Start a tick with this rank's numbers, float64 [n], n equal on all ranks."""
        self._numbers = [numbers]

    def is_complete(self) -> bool:
        """Whether the numbers of all ranks have arrived. Raises RuntimeError if a rank has left."""
        return True

    def receive(self) -> list[np.ndarray]:
        """Return the numbers of a complete tick, by rank."""
        return self._numbers

    def linger(self) -> None:
        """Sleep until the tick in flight is complete, for at most LINGER_S."""
        end = self._clock.monotonic() + LINGER_S
        while not self.is_complete() and self._clock.monotonic() < end:
            self._clock.sleep(NAP_S)

    def nap(self) -> None:
        """Sleep between two polls for the tick in flight."""
        self._clock.sleep(NAP_S)


class Collectives(Transport):
    """Ticks as all-gathers in a process group of their own; with NCCL on a stream of their own.

    Made by all ranks together.
    """

    def __init__(self, ranks: Ranks, timeout_s: float, backend: str):
        super().__init__(ranks.clock)
        self._ranks, self.name = ranks, backend
        self._device = ranks.device if backend == "nccl" else torch.device("cpu")
        self._stream = torch.cuda.Stream(self._device) if backend == "nccl" else None
        # Gloo's time-out frees the thread that waits in the collective, for a clean exit. NCCL's
        # would end the process before the board has reported the reason.
        limit = timedelta(seconds=timeout_s if backend == "gloo" else 2 * timeout_s)
        options = one_cta(limit) if backend == "nccl" else None
        self._group = dist.new_group(backend=backend, timeout=limit, pg_options=options)
        # NCCL connects the ranks at the first collective of each algorithm, which it chooses by
        # size; the host would wait for that in a rollout.
        most = PLACE_BYTES // 8 if backend == "nccl" else 1
        for count in (1 << power for power in range(most.bit_length())):
            ranks.complete(partial(self._gather, np.zeros(count)))

    def _gather(self, numbers: np.ndarray) -> dist.Work:
        with self._on_stream():
            self._own = torch.from_numpy(numbers).to(self._device, non_blocking=True)
            self._everyone = self._own.new_empty(self._ranks.world_size * len(numbers))
            return all_gather(self._everyone, self._own, group=self._group, async_op=True)

    def _on_stream(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def post(self, numbers: np.ndarray, name: str) -> None:
        assert self._ranks.watchdog is not None
        self._ranks.watchdog.enter(name)
        self._work = self._gather(numbers)

    def is_complete(self) -> bool:
        return self._work.is_completed()

    def receive(self) -> list[np.ndarray]:
        with self._on_stream():
            self._work.wait()  # raises if it failed, and orders the stream behind the collective
            return list(self._everyone.cpu().numpy().reshape(self._ranks.world_size, -1))


class SharedTicks(Transport):
    """Ticks through memory that all ranks of a machine have mapped.

    A tick is a write and a few reads, without threads. (An all-gather over gloo takes 0.5 ms to
    post, and its threads as much again.) The watchdog does not watch these ticks, since a look into
    the job's store takes longer than a tick.
    """

    name = "shared memory"

    def __init__(self, clock, shared: SharedCollectives):
        super().__init__(clock)
        self._shared = shared

    def post(self, numbers: np.ndarray, name: str) -> None:
        self._shared.post(numbers)

    def is_complete(self) -> bool:
        return self._shared.is_complete()

    def receive(self) -> list[np.ndarray]:
        return list(self._shared.posted.copy())


def one_cta(timeout: timedelta) -> object | None:
    """Return options of an NCCL communicator with kernels of one thread block; None in old torch.

    The other multiprocessors are left to forwards."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    options = None if nccl is None else nccl.Options()
    if options is None or not hasattr(getattr(options, "config", None), "max_ctas"):
        return None
    options.config.max_ctas = 1
    options._timeout = timeout  # torch warns where it differs from the group's
    return options


def make_transport(ranks: Ranks, timeout_s: float, backend: str = "auto") -> Transport:
    """Create the transport of a run, on all ranks together.

    backend: nccl, gloo, shm (shared memory), or auto: nccl on GPUs, on CPUs shared memory if there
    is any, else gloo. Raises InputError for shm where there is none.
    """
    if ranks.world_size == 1:
        return Transport(ranks.clock)
    on_gpu = ranks.device.type == "cuda"
    if backend == "shm" or (backend == "auto" and not on_gpu):
        if (shared := open_collectives(ranks)) is not None:
            return SharedTicks(ranks.clock, shared)
        if backend == "shm":
            raise InputError(
                "rollout.progress_backend: shm needs all ranks on one x86 machine with free "
                "shared memory; set auto"
            )
    if backend == "auto":
        backend = "nccl" if on_gpu else "gloo"
    return Collectives(ranks, timeout_s, backend)


class ProgressSync:
    """Ticks of one job, rollout after rollout. Made by all ranks together.

    num_ticks: ticks of this rollout that this rank has read; last_states: the states in the latest
    tick, by rank; is_over: whether the last tick has been read; is_relaxed: whether ticks may be
    rarer, as no rank could act on the next one (set between ticks, the same on all ranks).
    """

    def __init__(
        self,
        ranks: Ranks,
        timeout_s: float,
        transport: Transport | str = "auto",
        interval_s: float = INTERVAL_S,
    ):
        """timeout_s: seconds without a complete tick before the job ends; transport: or a backend.

        interval_s: least seconds between two ticks of a rank that has work."""
        self.ranks, self.timeout_s, self.interval_s = ranks, timeout_s, interval_s
        self._tick_s = 0.0  # moving average of the seconds that a busy rank needs to post a tick
        self._clock = ranks.clock
        self._in_flight = False
        if isinstance(transport, str):
            transport = make_transport(ranks, timeout_s, transport)
        self.transport = transport
        self.begin()

    def begin(self) -> None:
        """Begin a rollout, with ticks counted from 0.

        Raises RuntimeError while a tick of the last rollout is in flight."""
        if self._in_flight:
            raise RuntimeError("a rollout must run to its last tick before the next one begins")
        self.num_ticks = 0
        self.last_states: list[RankState] = []
        self.is_over = self.is_relaxed = False
        self._began_s, self._last_tick_s = self._clock.monotonic(), -math.inf
        self.go_on()

    def go_on(self) -> None:
        """Restart the time-out, after other common work of the ranks."""
        self._deadline = self._clock.monotonic() + self.timeout_s

    @property
    def are_others_done(self) -> bool:
        """Whether all other ranks were done at the last tick, and wait for this one."""
        others = [s for rank, s in enumerate(self.last_states) if rank != self.ranks.rank]
        return bool(self.last_states) and all(state.is_done for state in others)

    def poll(self, state: Callable[[], RankState], is_done: bool = False) -> list[RankState] | None:
        """Return the states of a tick that has just completed, once per tick, else None.

        This never blocks. Call it between forwards until it returns None: `while (states :=
        board.poll(state)) is not None: act(states)`. If no tick is in flight, post one with
        `state()`, which includes the effects of the tick before: after the interval, or at once if
        this rank is done. After the last tick nothing is posted. Raises RankTimeout.
        """
        if self.is_over:
            return None
        own = None
        if not self._in_flight:
            if not is_done and self._is_too_soon():
                return None
            own = state().numbers()
        begin_s = self._clock.monotonic()
        try:
            if own is not None:
                self._in_flight = True
                self.transport.post(own, self._tick_name())
                if not is_done:
                    self._tick_s += 0.1 * (self._clock.monotonic() - begin_s - self._tick_s)
                    return None  # there is work to do, and no tick completes at once
                self.transport.linger()
            if self.transport.is_complete():
                return self._take()
        except OWN_ERRORS:
            raise
        except RuntimeError as error:  # from the collective or the store: a rank has left
            self._fail(one_line(error))
        if self._clock.monotonic() > self._deadline:
            self._fail(f"no answer for {self.timeout_s:g} s")
        return None

    def _is_too_soon(self) -> bool:
        now_s = self._clock.monotonic()
        interval_s = max(self.interval_s, self._tick_s / MAX_SHARE) if self.interval_s else 0.0
        if self.is_relaxed:
            relaxed_s = RELAXED_SHARE * (now_s - self._began_s)
            interval_s = max(interval_s, min(relaxed_s, MAX_RELAXED * self.interval_s))
        return now_s < self._last_tick_s + interval_s

    def wait(self, state: Callable[[], RankState]) -> list[RankState] | None:
        """Sleep until a tick completes, and return its states; None after the last tick."""
        while not self.is_over:
            if (states := self.poll(state, is_done=True)) is not None:
                return states
            self.transport.nap()
        return None

    def _take(self) -> list[RankState]:
        self.last_states = list(map(RankState.from_numbers, self.transport.receive()))
        self._in_flight = False
        self.num_ticks += 1
        states = self.last_states
        self.is_over = any(s.must_stop for s in states) or all(s.is_done for s in states)
        self._last_tick_s = self._clock.monotonic()
        self.go_on()
        return self.last_states

    def _tick_name(self) -> str:
        return f"tick {self.num_ticks} of the {self.ranks.activity}"

    def _fail(self, reason: str) -> NoReturn:
        describe = (lambda rank: str(self.last_states[rank])) if self.last_states else None
        assert self.ranks.watchdog is not None
        self.ranks.watchdog.fail(self._tick_name(), reason, self._deadline, describe)
