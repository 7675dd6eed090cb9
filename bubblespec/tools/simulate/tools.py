"""Episodes in virtual time, with the turns of a workload's texts and its seconds of tool calls."""

import heapq
import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace

from bubblespec.mechanisms.episodes.environments import Observation, Outcome
from bubblespec.tools.simulate.workload import NOTHING, OBSERVED, Texts
from bubblespec.tools.simulate.world import SimulatedRanks
from bubblespec.types import Prompt, Row


class SimulatedEnvironments:
    """`Environments` of one rank, whose episodes are named by their rows."""

    form = SimpleNamespace(adds_text=False, has_reward=False)

    def __init__(self, ranks: SimulatedRanks, texts: Texts, num_workers: int):
        """num_workers: workers with one call at a time each, and as many for drafts."""
        self.ranks, self.texts = ranks, texts
        self._free_s = {is_draft: [0.0] * num_workers for is_draft in (False, True)}
        self._is_draft: dict[Row, bool] = {}  # of the running episodes
        self._coming: list[tuple[float, int, Row, Observation]] = []  # a heap, by time
        self._numbers = itertools.count()

    def begin(self, row: Row, prompt: Prompt, seed: int, *, is_draft: bool = False) -> None:
        """Start an episode, which adds nothing to the prompt."""
        self._is_draft[row] = is_draft
        self._put(row, self._now, Observation(NOTHING, None))

    def act(self, row: Row, ids: Sequence[int]) -> None:
        """Queue the observation that follows the row's tokens in its text, if there is one."""
        rest = self.texts.of_row(row)[len(row.tokens) :]
        is_own = rest < OBSERVED
        count = int(is_own.argmax()) if is_own.any() else len(rest)
        if not count:
            self._put(row, self._now, Observation(NOTHING, "no_call"))
            return
        workload, workers = self.texts.workload, self._free_s[self._is_draft[row]]
        seconds = workload.spec.tool_seconds(workload.key(row.id), len(row.tokens))
        end_s = max(self._now, workers[0]) + seconds
        heapq.heapreplace(workers, end_s)
        self._put(row, end_s, Observation(rest[:count], None, int(seconds > 0), 0, seconds))

    def poll(self) -> list[tuple[Row, Observation]]:
        """Return the observations of running episodes that are due."""
        come = []
        while self._coming and self._coming[0][0] <= self._now:
            _, _, row, observation = heapq.heappop(self._coming)
            if row in self._is_draft:
                come.append((row, observation))
        return come

    def wait(self, timeout_s: float) -> None:
        """Advance the clock to the next observation, or by `timeout_s`."""
        until = self._now + timeout_s
        if self._coming:
            until = min(until, self._coming[0][0])
        self.ranks.world.wait(self.ranks.rank, max(until, self._now))

    def end(self, row: Row, *, with_reward: bool = True, with_environment: bool = False) -> Future:
        """End an episode without a reward."""
        del self._is_draft[row]
        future: Future = Future()
        future.set_result(Outcome(None, None, None))
        return future

    @property
    def _now(self) -> float:
        return self.ranks.clock.perf_counter()

    def _put(self, row: Row, at_s: float, observation: Observation) -> None:
        heapq.heappush(self._coming, (at_s, next(self._numbers), row, observation))
