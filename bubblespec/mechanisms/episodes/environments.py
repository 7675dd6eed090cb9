"""The environments of one rank: begun, acted in and ended by name, in workers, without waiting."""

import base64
import itertools
import json
import pickle
import threading
from collections import Counter, deque
from collections.abc import Collection, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np

from bubblespec.config import EnvironmentConfig
from bubblespec.distributed.worker import close_workers
from bubblespec.errors import InputError
from bubblespec.mechanisms.episodes.forms import Chat, load_form, tool_message
from bubblespec.mechanisms.episodes.tokens import (
    begin_ids,
    check_tokens,
    observation_ids,
    parse_calls,
)
from bubblespec.mechanisms.episodes.workers import (
    Deliver,
    EnvironmentWorker,
    Episode,
    make_answer,
)
from bubblespec.types import Prompt

NOTHING = np.empty(0, np.int64)


class Observation(NamedTuple):
    """The environment's answer to a turn, or its beginning."""

    ids: np.ndarray
    """int64, tokens to append after the turn, or after the prompt's base ids at the beginning, with
    the header of the next turn; empty after the last turn."""
    reason: str | None
    """Reason why no turn follows: done (by the environment), no_call, max_turns, error (of the
    environment), too_long (not even its template fits); None if one follows."""
    num_calls: int = 0
    """Tool calls in the turn."""
    num_failed: int = 0
    """Tool calls whose result is an error message."""
    seconds: float = 0.0
    """Time spent in the environment."""


class Outcome(NamedTuple):
    """What remains of an episode."""

    reward: float | None
    """Result of get_reward(), or the sum of the steps' rewards; None without either, or if the
    environment failed."""
    environment: bytes | None
    """Environment, pickled, if requested."""
    problem: str | None
    """Reason why the environment failed, also while its reward was computed."""


def check_environment(
    config: EnvironmentConfig, tokenizer, prompt: Chat, columns: Collection[str]
) -> None:
    """Raise InputError if this environment and tokenizer cannot make episodes of such a prompt.

    columns: names of the data's further columns."""
    form = load_form(config.factory, config.tools)
    form.check_columns(columns)
    longest = int(config.max_observation_length)
    check_tokens(tokenizer, prompt, form.schemas(), form.is_text, longest)


class Environments:
    """Runs many episodes at once. To be used by one thread."""

    def __init__(self, config: EnvironmentConfig, tokenizer):
        self.form = load_form(config.factory, config.tools)
        self.schemas = self.form.schemas()
        self._config, self._tokenizer = config, tokenizer
        self._numbers = itertools.count()
        self._running: dict[Hashable, Episode] = {}
        self._arrived: deque[tuple[Episode, Observation | dict | Exception]] = deque()
        self._has_arrived = threading.Condition()
        self._load = Counter[EnvironmentWorker | None]()  # running episodes
        self._named = {"factory": config.factory, "tools": config.tools}
        self._answer_here = None if config.num_workers else make_answer(self._named)
        self._workers = self._make_workers()
        # Made for the first draft. Calls of this step must not wait for those of drafts, even of
        # the rollout before, whose tools may be slow.
        self._draft_workers: list[EnvironmentWorker] = []

    def begin(self, name: Hashable, prompt: Prompt, seed: int, *, is_draft: bool = False) -> None:
        """Start an episode under a name that no running one has.

        prompt.token_ids are its base ids (`tokens.base_ids`)."""
        assert name not in self._running, name
        if is_draft:
            self._draft_workers = self._draft_workers or self._make_workers()
        workers = self._draft_workers if is_draft else self._workers
        worker = min(workers, key=self._load.__getitem__, default=None)
        self._load[worker] += 1
        episode = Episode(next(self._numbers), name, prompt, worker, list(prompt.token_ids))
        self._running[name] = episode
        deliver = partial(self._arrive, episode)
        self._submit(episode, deliver, "begin", prompt.text, prompt.columns, seed)

    def act(self, name: Hashable, ids: Sequence[int] | np.ndarray) -> None:
        """Submit a whole turn of the model, with its stop token. An observation comes later."""
        episode, ids = self._running[name], [int(token) for token in ids]
        episode.num_turns += 1
        if self.form.is_text:
            action = self._tokenizer.decode(ids, skip_special_tokens=True)
        else:
            action = episode.calls = parse_calls(self._tokenizer, ids, episode.ids, self.schemas)
        episode.ids += ids
        if self.form.is_text or (action and not self._is_last_turn(episode)):
            self._submit(episode, partial(self._arrive, episode), "act", action)
        else:
            self._arrive(episode, Observation(NOTHING, "max_turns" if action else "no_call"))

    def poll(self) -> list[tuple[Hashable, Observation]]:
        """Return the observations that have come since the last call; never wait.

        Raises InputError where a worker cannot be started."""
        observations = []
        while self._arrived:
            episode, reply = self._arrived.popleft()
            if self._running.get(episode.name) is not episode:  # it was ended meanwhile
                continue
            if isinstance(reply, Exception):
                raise reply
            if isinstance(reply, dict):
                reply = self._observe(episode, reply)
            episode.ids += reply.ids.tolist()
            observations.append((episode.name, reply))
        return observations

    def wait(self, timeout_s: float) -> None:
        """Wait until something has come, or for at most this time."""
        with self._has_arrived:
            self._has_arrived.wait_for(lambda: bool(self._arrived), timeout_s)

    def end(
        self, name: Hashable, *, with_reward: bool = True, with_environment: bool = False
    ) -> Future:
        """End an episode at any time; return the future of its `Outcome`."""
        episode, future = self._running.pop(name), Future[Outcome]()
        future.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        self._load[episode.worker] -= 1
        episode.is_abandoned = not (with_reward or with_environment)

        def deliver(reply: dict | Exception) -> None:
            if isinstance(reply, Exception):
                future.set_exception(reply)
                return
            problem = episode.problem or _problem_in(reply)
            packed = base64.b64decode(reply.get("environment") or "") or None
            future.set_result(Outcome(None if problem else reply.get("reward"), packed, problem))

        self._submit(episode, deliver, "end", with_reward, with_environment)
        return future

    def close(self) -> None:
        """End all workers, also busy ones. Can be called again."""
        close_workers([*self._workers, *self._draft_workers])

    def _make_workers(self) -> list[EnvironmentWorker]:
        return [EnvironmentWorker(self._named) for _ in range(self._config.num_workers)]

    def _submit(self, episode: Episode, deliver: Deliver, method: str, *arguments) -> None:
        try:
            request = pickle.dumps((method, episode.number, arguments))
        except Exception as error:  # objects with code of their own
            raise InputError(
                f"environment: a prompt's columns cannot be sent to a worker: {error!r:.200}"
            ) from error
        if self._answer_here is not None:
            deliver(json.loads(json.dumps(self._answer_here(request))))
            return
        assert episode.worker is not None
        limit_s = self._config.timeout_s
        if method == "act":
            limit_s *= max(1, len(episode.calls))
        episode.worker.submit(episode, request, limit_s, deliver, is_end=method == "end")

    def _arrive(self, episode: Episode, reply: Observation | dict | Exception) -> None:
        with self._has_arrived:
            self._arrived.append((episode, reply))
            self._has_arrived.notify_all()

    def _observe(self, episode: Episode, reply: dict) -> Observation:
        """Tokenize a worker's reply."""
        seconds, limit = reply["seconds"], int(self._config.max_observation_length)
        calls, episode.calls = episode.calls, []
        problem, prompt = _problem_in(reply), episode.prompt
        if episode.num_turns == 0:
            episode.problem = problem
            begun = reply.get("prompt", prompt.text)
            base = prompt.token_ids
            ids = begin_ids(self._tokenizer, prompt.text, begun, base, self.schemas, limit)
            reason = "error" if problem else None
            return Observation(np.array(ids, np.int64), reason, seconds=seconds)
        if problem and not calls:
            episode.problem = problem
            return Observation(NOTHING, "error", seconds=seconds)
        if problem:  # it is the result of all calls
            results = [tool_message(call["name"], RuntimeError(problem)) for call in calls]
            reply = {"messages": results, "num_failed": len(calls), "done": False}
        counts = len(calls), reply["num_failed"], seconds
        if reply["done"]:
            return Observation(NOTHING, "done", *counts)
        if self._is_last_turn(episode):  # of an environment that is given all turns
            return Observation(NOTHING, "max_turns", *counts)
        is_chat = not isinstance(prompt.text, str)
        between = observation_ids(self._tokenizer, reply["messages"], is_chat, limit)
        if between is None:
            return Observation(NOTHING, "too_long", *counts)
        return Observation(np.array(between, np.int64), None, *counts)

    def _is_last_turn(self, episode: Episode) -> bool:
        return episode.num_turns >= self._config.max_turns


def _problem_in(reply: dict) -> str | None:
    return reply.get("error") or reply.get("failure")
