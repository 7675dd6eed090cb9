"""Episodes in a rollout of one rank: rows whose turns an environment answers while others go on.

A row begins with what the environment adds to the prompt. Where it ends a turn the engine pauses
it, until the observation comes that follows, or the episode is over.
"""

import random
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from bubblespec.draft.proposer import Proposer
from bubblespec.engine.engine import Engine
from bubblespec.idle.task import RankView
from bubblespec.mechanisms.episodes.environments import Environments, Observation
from bubblespec.types import Prompt, Row

WAIT_S = 1e-3  # until a rank without anything to feed looks after other things


def episode_seed(run_seed: int, uid: int, visit: int) -> int:
    """What environments of a group are given as their seed."""
    return random.Random(f"{run_seed}/{uid}/{visit}").getrandbits(32)


STOPS = ("done", "no_call", "max_turns", "length", "error")


@dataclass
class EpisodeCounts:
    """What happened in the episodes of one rollout on one rank, without those of drafts."""

    turns: int = 0
    """Of the model, in episodes that are over."""
    calls: int = 0
    failed_calls: int = 0
    environment_s: float = 0.0
    """Seconds inside environments, summed over rows."""
    waiting_s: float = 0.0
    """In which a row waited for its environment, summed over rows."""
    idle_s: float = 0.0
    """Of these, those in which the rank did nothing else."""
    differing_replays: int = 0
    """Of environments whose worker had died, those of drafts included."""
    stops: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STOPS, 0))
    """Episodes by why they are over."""


@dataclass(eq=False)
class _Episode:
    """A row's, that is not over."""

    row: Row
    is_own: bool
    """Of this step; others are drafts of coming ones."""
    since_s: float
    """When its environment was last asked."""
    waits: bool = True
    """For an answer."""
    turn_begin: int = 0
    """In the response, of the current turn or the last one."""
    num_turns: int = 0
    is_broken: bool = False
    """The environment has failed at the beginning: it is over after the first turn."""


class Episodes:
    """Of one rollout. `outcomes` has what is left of the environments of own rows that are over."""

    def __init__(
        self,
        environments: Environments,
        engine: Engine,
        prompts: Iterable[Prompt],
        *,
        seed: int,
        clock,
        with_environment: bool = False,
        runs_drafts: bool = True,
    ):
        """prompts: of all rows that may be begun; with_environment: outcomes have it, too;
        runs_drafts: otherwise rows of coming steps end with their first turn."""
        self.environments, self.engine, self.clock = environments, engine, clock
        self.seed, self.with_environment = seed, with_environment
        self.runs_drafts = runs_drafts
        self.prompts = {prompt.uid: prompt for prompt in prompts}
        self.proposer: Proposer | None = None
        self.counts = EpisodeCounts()
        self.outcomes: dict[Row, Future] = {}
        self._running: dict[Row, _Episode] = {}
        self._num_differing = environments.num_differing  # so far

    @property
    def is_running(self) -> bool:
        """Whether any episode is not over."""
        return bool(self._running)

    def start(self, view: RankView, proposer: Proposer | None) -> None:
        """Begin an episode for each row of this step."""
        self.proposer = proposer
        view.record.extras["episodes"] = self.counts
        if self.runs_drafts:
            view.begin = partial(self.begin, is_own=False)
        for row in view.unfinished:
            self.begin(row)

    def begin(self, row: Row, *, is_own: bool = True) -> None:
        """Start an episode. The row comes into the engine later, with its first tokens."""
        row.has_turns = True
        self._running[row] = _Episode(row, is_own, self.clock.perf_counter())
        prompt, (uid, visit, _) = self.prompts[row.id.uid], row.id
        seed = episode_seed(self.seed, uid, visit)
        self.environments.begin(row, prompt, seed, is_draft=not is_own)

    def advance(self, finished: Iterable[Row] = ()) -> list[Row]:
        """Ask environments about rows that the engine has returned, take in what others have
        answered, and return the rows that are over."""
        over = []
        for row in finished:
            episode = self._running.get(row)
            over += [row] if episode is None else self._ask(episode)
        for row, observation in self.environments.poll():
            over += self._take(self._running[row], observation)
        return over

    def wait(self) -> None:
        """For an answer, a moment."""
        begin_s = self.clock.perf_counter()
        num_waiting = sum(of.waits and of.is_own for of in self._running.values())
        self.environments.wait(WAIT_S)
        self.counts.idle_s += num_waiting * (self.clock.perf_counter() - begin_s)

    def drop(self, row: Row) -> None:
        """End a row's episode; the row leaves the engine with the tokens that are certain."""
        del self._running[row]
        self.environments.end(row, with_reward=False)
        if row in self.engine.queue or row in self.engine.rows:
            self.engine.drop(row)
        row.finish = None

    def close(self) -> None:
        """The rollout is over: end what is still running. Rows stay as they are."""
        for row in self._running:
            self.environments.end(row, with_reward=False)
        self._running.clear()
        self.counts.differing_replays = self.environments.num_differing - self._num_differing

    def _ask(self, episode: _Episode) -> list[Row]:
        """About a row that has ended a turn, or all."""
        row = episode.row
        episode.num_turns += row.finish == "stop"
        if row.finish == "length":
            return self._end(episode, "length")
        if episode.is_broken:
            self.engine.drop(row)
            return self._end(episode, "error")
        episode.waits, episode.since_s = True, self.clock.perf_counter()
        self.environments.act(row, row.tokens[episode.turn_begin :])
        return []

    def _take(self, episode: _Episode, observation: Observation) -> list[Row]:
        """What an environment has answered."""
        row, ids, length = episode.row, observation.ids, len(episode.row.tokens)
        episode.waits = False
        if episode.is_own:
            self.counts.waiting_s += self.clock.perf_counter() - episode.since_s
            self.counts.environment_s += observation.seconds
            self.counts.calls += observation.num_calls
            self.counts.failed_calls += observation.num_failed
        if episode.num_turns == 0:
            episode.is_broken = observation.is_done
            unknown = np.full(len(ids), np.nan, np.float32)
            row.tokens, row.logprob, row.full_logprob = ids, unknown, unknown.copy()
            self.engine.add([row])
        elif observation.is_done:
            self.engine.drop(row)
            if observation.reason == "too_long":
                row.finish = "length"
            return self._end(episode, observation.reason)
        else:
            self.engine.resume(row, ids)
        episode.turn_begin = len(row.tokens)
        if self.proposer is not None:
            self.proposer.extend(row, row.tokens[length:])
        return self._end(episode, "length") if row.finish == "length" else []

    def _end(self, episode: _Episode, reason: str) -> list[Row]:
        """The episode is over; the row is out of the engine."""
        row = episode.row
        del self._running[row]
        if not episode.is_own:
            self.environments.end(row, with_reward=False)
            return [row]
        reason = "length" if reason == "too_long" else reason
        self.counts.turns += episode.num_turns
        self.counts.stops[reason] += 1
        self.outcomes[row] = self.environments.end(
            row,
            with_reward=self.environments.form.has_reward,
            with_environment=self.with_environment,
        )
        return [row]
