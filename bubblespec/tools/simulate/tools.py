"""Episodes in virtual time: the texts of a workload have turns in them, and tools take as long as a
distribution says.

A text says itself where its turns are: tokens from OBSERVED on are an environment's, and a stop
token before them ends a turn.
"""

import heapq
import itertools
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np

from bubblespec.mechanisms.episodes.environments import Observation, Outcome
from bubblespec.tools.simulate.world import SimulatedRanks
from bubblespec.types import Prompt, Row

OBSERVED = 1 << 24
NOTHING = np.empty(0, np.int64)


class SimulatedEnvironments:
    """As `Environments`, of one rank. Rows are the names of their episodes."""

    form = SimpleNamespace(adds_text=False, has_reward=False)
    num_differing = 0

    def __init__(
        self,
        ranks: SimulatedRanks,
        text: Callable[[Row], np.ndarray],
        tool_s: Callable[[Row], float],
        num_workers: int,
    ):
        """text: all that a row will have said; tool_s: seconds of the call after a row's last
        token; num_workers: one call at a time each, and as many for drafts."""
        self.ranks, self.text, self.tool_s = ranks, text, tool_s
        self._free_s = {is_draft: [0.0] * num_workers for is_draft in (False, True)}
        self._is_draft: dict[Row, bool] = {}  # of the running episodes
        self._coming: list[tuple[float, int, Row, Observation]] = []  # a heap, by time
        self._numbers = itertools.count()

    def begin(self, row: Row, prompt: Prompt, seed: int, *, is_draft: bool = False) -> None:
        """See `Environments`; so are the others. Nothing is added to prompts."""
        self._is_draft[row] = is_draft
        self._put(row, self._now, NOTHING)

    def act(self, row: Row, ids: Sequence[int]) -> None:
        rest = self.text(row)[len(row.tokens) :]
        is_own = rest < OBSERVED
        count = int(is_own.argmax()) if is_own.any() else len(rest)
        if not count:
            self._put(row, self._now, NOTHING, reason="no_call")
            return
        seconds, workers = self.tool_s(row), self._free_s[self._is_draft[row]]
        end_s = max(self._now, workers[0]) + seconds
        heapq.heapreplace(workers, end_s)
        self._put(row, end_s, rest[:count], seconds=seconds)

    def poll(self) -> list[tuple[Hashable, Observation]]:
        come = []
        while self._coming and self._coming[0][0] <= self._now:
            _, _, row, observation = heapq.heappop(self._coming)
            if row in self._is_draft:
                come.append((row, observation))
        return come

    def wait(self, timeout_s: float) -> None:
        until = self._now + timeout_s
        if self._coming:
            until = min(until, self._coming[0][0])
        self.ranks.world.wait(self.ranks.rank, max(until, self._now))

    def end(self, row: Row, *, with_reward: bool = True, with_environment: bool = False) -> Future:
        del self._is_draft[row]
        future = Future()
        future.set_result(Outcome(None, None, None))
        return future

    @property
    def _now(self) -> float:
        return self.ranks.clock.perf_counter()

    def _put(
        self,
        row: Row,
        at_s: float,
        ids: np.ndarray,
        reason: str | None = None,
        seconds: float = 0.0,
    ) -> None:
        observation = Observation(ids, reason, int(seconds > 0), 0, seconds)
        heapq.heappush(self._coming, (at_s, next(self._numbers), row, observation))


def with_turns(
    tokens: np.ndarray, num_turns: int, stop: int, num_observed: int, random: np.random.Generator
) -> np.ndarray:
    """A response of one turn, cut at random places into so many, with a stop token and num_observed
    tokens of an environment at each cut. Responses that are too short for it have fewer turns."""
    num_turns = min(num_turns, len(tokens))
    if num_turns < 2:
        return tokens
    cuts = np.sort(random.choice(np.arange(1, len(tokens)), num_turns - 1, replace=False))
    said = OBSERVED + random.integers(0, OBSERVED, (num_turns - 1, num_observed))
    turns = np.split(tokens, cuts)
    between = [np.concatenate(([stop], observed)) for observed in said]
    return np.concatenate([*itertools.chain(*zip(turns, between, strict=False)), turns[-1]]).astype(
        np.int64
    )
