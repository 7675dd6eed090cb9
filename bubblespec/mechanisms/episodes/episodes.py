"""Episodes in a rollout of one rank: rows whose turns an environment answers while others go on.

A row begins with what the environment adds to the prompt. Where it ends a turn the engine pauses
it, until the observation comes that follows, or the episode is over.

Observation speculation: a row that has ended its turn as its draft did goes on with the draft's
observation at once. If the real one is equal when it comes, what was generated meanwhile stays;
otherwise the row is rewound. So whatever stays follows real observations, however random the
environment is. Nothing is asked of the environment in between: a row that ends another turn, or
reaches its limit, waits until the first one has been answered. Whether the draft's observation is
right is counted in any case, so that rollouts whose drafts are mostly wrong can do without.
"""

import random
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from bubblespec.draft.proposer import Proposer
from bubblespec.draft.store import DraftStore
from bubblespec.engine.engine import Engine
from bubblespec.mechanisms.episodes.environments import Environments, Observation
from bubblespec.records import EpisodeCounts
from bubblespec.types import Prompt, Row

WAIT_S = 1e-3  # until a rank without anything to feed looks after other things


def episode_seed(run_seed: int, uid: int, visit: int) -> int:
    """What environments of a group are given as their seed."""
    return random.Random(f"{run_seed}/{uid}/{visit}").getrandbits(32)


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
    prediction: tuple[int, int] | None = None
    """[begin, end) in the draft of the observation that has not come yet."""
    is_guessed: bool = False
    """The row has gone on with it."""


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
        speculates: bool = True,
    ):
        """prompts: of all rows that may be begun; with_environment: outcomes have it, too;
        runs_drafts: otherwise rows of coming steps end with their first turn; speculates: rows go
        on with observations of their drafts."""
        self.environments, self.engine, self.clock = environments, engine, clock
        self.seed, self.with_environment = seed, with_environment
        self.runs_drafts, self.speculates = runs_drafts, speculates
        self.prompts = {prompt.uid: prompt for prompt in prompts}
        self.proposer: Proposer | None = None
        self.drafts: DraftStore | None = None
        """In which observations are looked up; None where rows have no drafts."""
        self.counts = EpisodeCounts()
        self.outcomes: dict[Row, Future] = {}
        self._running: dict[Row, _Episode] = {}
        self._num_differing = environments.num_differing  # so far

    @property
    def is_running(self) -> bool:
        """Whether any episode is not over."""
        return bool(self._running)

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
        over, asked = [], []
        for row in finished:
            episode = self._running.get(row)
            if episode is None:
                over.append(row)
            elif not episode.is_guessed:
                asked.append(episode)
                over += self._ask(episode)
        for row, observation in self.environments.poll():
            episode, was_guessed = self._running[row], self._running[row].is_guessed
            over += self._take(episode, observation)
            if was_guessed and row in self._running and episode.waits:
                asked.append(episode)
        for episode in asked:
            self._guess(episode)
        return over

    def wait(self) -> None:
        """For an answer, a moment."""
        begin_s = self.clock.perf_counter()
        num_waiting = sum(of.waits and of.is_own for of in self._running.values())
        self.environments.wait(WAIT_S)
        self.counts.idle_s += num_waiting * (self.clock.perf_counter() - begin_s)

    def min_length(self, row: Row, length: int) -> int:
        """Tokens than which a row, which has `length`, will surely have one more."""
        episode = self._running[row]
        if episode.is_guessed:
            return episode.prediction[0] - 1
        return length - (row.finish is not None)

    def abandon(self, row: Row) -> None:
        """End a row's episode; the row leaves the engine with the tokens that are certain."""
        episode = self._running.pop(row)
        self.environments.end(row, with_reward=False)
        if episode.is_guessed:
            self.engine.rewind(row, episode.prediction[0])
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
        row, prediction, is_guessed = episode.row, episode.prediction, episode.is_guessed
        ids, length = observation.ids, len(row.tokens)
        episode.waits, episode.prediction, episode.is_guessed = False, None, False
        if episode.is_own:
            self.counts.waiting_s += self.clock.perf_counter() - episode.since_s
            self.counts.environment_s += observation.seconds
            self.counts.calls += observation.num_calls
            self.counts.failed_calls += observation.num_failed
        is_right = False
        if prediction is not None:
            begin, end = prediction
            draft = self.drafts.get(row.id).tokens
            is_right = not observation.is_done and np.array_equal(draft[begin:end], ids)
            self.counts.right_predictions += episode.is_own and is_right
        if is_guessed:
            self.counts.guesses_kept += episode.is_own and is_right
            if is_right:
                return [] if row.finish is None else self._ask(episode)
            self.engine.rewind(row, begin)
            length = begin
            if self.proposer is not None:
                self.proposer.rewind(row)
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
        self._extend(episode, row.tokens[length:])
        return self._end(episode, "length") if row.finish == "length" else []

    def _guess(self, episode: _Episode) -> None:
        """Look up the draft's observation, if there is one where the row is, and go on with it."""
        row, length = episode.row, len(episode.row.tokens)
        draft = None if self.drafts is None else self.drafts.get(row.id)
        if draft is None or not episode.waits or row not in self._running:
            return
        end = dict(draft.observations).get(length)
        fits = end is not None and end < row.max_new_tokens
        if not fits or not np.array_equal(draft.tokens[:length], row.tokens):
            return
        episode.prediction = length, end
        self.counts.predictions += episode.is_own
        if not self.speculates:
            return
        episode.is_guessed = True
        self.counts.guesses += episode.is_own
        ids = draft.tokens[length:end].astype(np.int64)
        self.engine.resume(row, ids)
        self._extend(episode, ids)

    def _extend(self, episode: _Episode, ids: np.ndarray) -> None:
        """The row has gone on with an observation."""
        episode.turn_begin = len(episode.row.tokens)
        if self.proposer is not None:
            self.proposer.extend(episode.row, ids)

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
