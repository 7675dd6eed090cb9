"""The progress board: during a rollout the ranks tell each other how far they are, and no rank ever
stands still for it.

A tick is one asynchronous all-gather of a small state. A rank posts its state, goes on decoding,
looks between two forwards whether the tick is complete, and then posts the next one; so the slowest
rank sets the pace. All ranks read the same states of the same ticks: a decision that is a pure
function of a tick is taken alike everywhere without further agreement. The tick in which every rank
is done, or any has been told to stop, is the last, and all ranks leave the rollout by it.

A tick is a meeting of the roll call like any other collective: that is how a rank that hangs or has
died is named.
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

from bubblespec.dist.ranks import Ranks, all_gather, one_line

# A tick takes about 0.5 ms once all have posted. A rank that is done can spare that time and a
# little more, once a tick: without it, it would start another draft although the last tick is about
# to complete, and keep everyone waiting.
LINGER_S = 2e-3
NAP_S = 2e-4
# The slowest rank pays for ticks with everyone's time, from 0.3 to more than 1 ms for each: with
# short forwards, not after each, and not so often that they take more than a small share of it.
INTERVAL_S = 1e-2
LARGEST_SHARE = 0.04


NO_FACTS = np.empty(0)


class RankState(NamedTuple):
    """What a rank tells the others in a tick."""

    unfinished_rows: int
    """Of this rollout and this rank."""
    wanted_offers: tuple[int, ...] = ()
    """Offers that it could take on of each use of idle time, of at most MAX_WORKS."""
    must_stop: bool = False
    """It has been told to end the run."""
    facts: np.ndarray = NO_FACTS
    """float64, whatever else of it a decision needs; of one length on all ranks in a tick."""

    @property
    def is_done(self) -> bool:
        """None of its rows of this rollout is left."""
        return self.unfinished_rows == 0

    def numbers(self) -> np.ndarray:
        """As a tick carries it, float64 [NUM_NUMBERS + facts]."""
        wanted = (*self.wanted_offers, *[0] * MAX_WORKS)[:MAX_WORKS]
        return np.concatenate(((self.unfinished_rows, self.must_stop, *wanted), self.facts))

    @classmethod
    def from_numbers(cls, numbers: np.ndarray) -> "RankState":
        """What `numbers` gives, with MAX_WORKS wishes."""
        unfinished_rows, must_stop, *wanted = numbers[:NUM_NUMBERS].tolist()
        return cls(
            int(unfinished_rows), tuple(map(int, wanted)), bool(must_stop), numbers[NUM_NUMBERS:]
        )

    def __str__(self) -> str:
        return f"{self.unfinished_rows} unfinished rows, {self.wanted_offers} wanted, {'' if self.must_stop else 'not '}told to stop"


MAX_WORKS = 4  # uses of idle time in a rollout
NUM_NUMBERS = 2 + MAX_WORKS


class ProgressBoard:
    """Ticks of one job, rollout after rollout. Made by all ranks at the same time, as it makes a
    process group of its own.

    num_ticks: ticks of this rollout that this rank has read; last_states: the states of the last of
    them, by rank, or None; is_over: the last tick has been read; must_stop: a rank was told to stop
    in it, so the rollout is to be abandoned. With one process a tick is complete as soon as it is
    posted.

    timeout_s: seconds without a completed tick after which the job is ended. backend: gloo or nccl
    for the ticks; None is that of `ranks.device`. With nccl the ticks run on a CUDA stream of their
    own. interval_s: a rank that is not done lets so many seconds pass between two ticks, and more
    where ticks cost much; the end of its own work it tells at once.
    """

    def __init__(
        self,
        ranks: Ranks,
        timeout_s: float,
        backend: str | None = None,
        interval_s: float = INTERVAL_S,
    ):
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.interval_s = interval_s
        self._tick_s = (
            0.0  # what posting a tick takes of a rank that has work to do, exponentially weighted
        )
        self._clock = ranks.clock
        self._in_flight = False
        self._connect(backend)
        self.begin()

    def _connect(self, backend: str | None) -> None:
        ranks, timeout_s = self.ranks, self.timeout_s
        self._work = None
        self._stream = None
        backend = backend or ("nccl" if ranks.device.type == "cuda" else "gloo")
        self._device = device = (
            ranks.device if backend == "nccl" and ranks.world_size > 1 else torch.device("cpu")
        )
        self._allocate(NUM_NUMBERS)
        if ranks.world_size > 1:
            # Gloo's time-out frees the thread that waits in the collective, for a clean exit.
            # NCCL's would end the process before this board has said why.
            limit_s = timeout_s if backend == "gloo" else 2 * timeout_s
            self._group = dist.new_group(backend=backend, timeout=timedelta(seconds=limit_s))
            self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            # Connects the ranks (NCCL does so at its first collective).
            ranks.complete(
                lambda: all_gather(self._everyone, self._own, group=self._group, async_op=True)
            )

    def _allocate(self, num_numbers: int) -> None:
        """Buffers for ticks that carry so many numbers from each rank."""
        self._numbers = np.zeros(num_numbers)
        zeros = partial(torch.zeros, dtype=torch.float64, device=self._device)
        with (
            self._on_stream()
        ):  # the stream of the ticks: on another one the zeros might come after what is received
            self._own = (
                torch.from_numpy(self._numbers)
                if self._device.type == "cpu"
                else zeros(num_numbers)
            )
            self._everyone = zeros(self.ranks.world_size * num_numbers)

    def begin(self) -> None:
        """A new rollout: ticks count from 0. Raises RuntimeError while a tick of the last one is in
        flight."""
        if self._in_flight:
            raise RuntimeError(
                "progress: a rollout must run to its last tick before the next one begins"
            )
        self.num_ticks = 0
        self.last_states: list[RankState] | None = None
        self.is_over = self.must_stop = False
        self._last_tick_s = -math.inf
        self._deadline = self._clock.monotonic() + self.timeout_s

    def go_on(self) -> None:
        """The ranks have done something else together since the last tick: the time-out counts from
        now."""
        self._deadline = self._clock.monotonic() + self.timeout_s

    @property
    def are_others_done(self) -> bool:
        """As of the last tick they all wait for this rank: once done, it should wait for the end
        and not start on a draft."""
        if self.last_states is None:
            return False
        return all(
            state.is_done for rank, state in enumerate(self.last_states) if rank != self.ranks.rank
        )

    def poll(
        self, state: Callable[[], RankState], is_urgent: bool = True
    ) -> list[RankState] | None:
        """The states of all ranks in the tick that has just completed, once a tick; otherwise None.
        Does not block.

        Call it between forwards until it returns None: `while (states := board.poll(state)) is not
        None: act(states)`. If no tick is in flight it posts one with `state()`, which so knows what
        was done about the tick before; if that is not urgent, not too soon after it. A rank that is
        done is always in a hurry. After the last tick it posts nothing. Raises RankTimeout.
        """
        if self.is_over or (not self._in_flight and not is_urgent and self._is_too_soon()):
            return None
        own = None if self._in_flight else state()
        if own is not None and not own.is_done and self._is_too_soon():
            return None
        begin_s = self._clock.monotonic()
        try:
            if own is not None:
                self._in_flight = True
                numbers = own.numbers()
                if len(numbers) != len(self._numbers):
                    self._allocate(len(numbers))
                self._numbers[:] = numbers
                self._post()
                if not own.is_done:
                    self._tick_s += 0.1 * (self._clock.monotonic() - begin_s - self._tick_s)
                    return None  # it has work to do, and no tick completes as fast as that
                self._linger()
            if self._is_complete():
                return self._take()
        except RuntimeError as error:  # from the collective or the store: a rank has left
            self._fail(one_line(error))
        if self._clock.monotonic() > self._deadline:
            self._fail(f"no answer for {self.timeout_s:g} s")
        return None

    def _is_too_soon(self) -> bool:
        interval_s = max(self.interval_s, self._tick_s / LARGEST_SHARE) if self.interval_s else 0.0
        return self._clock.monotonic() < self._last_tick_s + interval_s

    def wait(self, state: Callable[[], RankState]) -> list[RankState] | None:
        """Poll, asleep in between, until a tick completes: for a rank that has nothing to do. None
        after the last tick."""
        while not self.is_over:
            if (states := self.poll(state)) is not None:
                return states
            self._clock.sleep(NAP_S)
        return None

    def _post(self) -> None:
        """Start the tick with this rank's numbers."""
        with self._on_stream():
            if self._stream is not None:
                self._own.copy_(torch.from_numpy(self._numbers), non_blocking=True)
            if self.ranks.world_size == 1:
                self._everyone.copy_(self._own)
                return
            self.ranks.roll_call.enter(f"tick {self.num_ticks} of the {self.ranks.place}")
            self._work = all_gather(self._everyone, self._own, group=self._group, async_op=True)

    def _on_stream(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _is_complete(self) -> bool:
        return self._work is None or self._work.is_completed()

    def _linger(self) -> None:
        end = self._clock.monotonic() + LINGER_S
        while not self._is_complete() and self._clock.monotonic() < end:
            self._clock.sleep(NAP_S)

    def _receive(self) -> list[RankState]:
        """The states of all ranks, by rank, in the tick that is complete."""
        with self._on_stream():
            if self._work is not None:
                # complete: raises if it failed, and orders the stream behind the collective
                self._work.wait()
                self._work = None
            everyone = self._everyone.cpu().numpy().reshape(self.ranks.world_size, -1)
            return [RankState.from_numbers(row.copy()) for row in everyone]

    def _take(self) -> list[RankState]:
        self.last_states = self._receive()
        self._in_flight = False
        self.must_stop = any(state.must_stop for state in self.last_states)
        self.num_ticks += 1
        self.is_over = self.must_stop or all(state.is_done for state in self.last_states)
        now = self._clock.monotonic()
        self._last_tick_s, self._deadline = now, now + self.timeout_s
        return self.last_states

    def _fail(self, reason: str) -> NoReturn:
        describe = (lambda rank: str(self.last_states[rank])) if self.last_states else None
        self.ranks.roll_call.fail(
            f"tick {self.num_ticks} of the {self.ranks.place}", reason, self._deadline, describe
        )
