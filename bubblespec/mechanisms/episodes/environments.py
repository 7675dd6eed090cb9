"""The environments of one rank: begun, acted in and ended by name, in workers, without waiting.

Each worker holds many episodes, and answers one request at a time. A worker that takes too long or
dies is replaced, and each of its other episodes is replayed in the new one when its next request
comes. An environment that is random beyond its seed may go on from another state then.
"""

import base64
import itertools
import json
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from subprocess import Popen
from typing import NamedTuple

import numpy as np

from bubblespec.config import EnvironmentConfig
from bubblespec.distributed.worker import Worker, WorkerFailure, WorkerTimeout, close_workers
from bubblespec.errors import InputError
from bubblespec.mechanisms.episodes.forms import Chat, load_form, make_answer, tool_message
from bubblespec.mechanisms.episodes.tokens import (
    begin_ids,
    check_tokens,
    observation_ids,
    parse_calls,
)
from bubblespec.types import Prompt

NOTHING = np.empty(0, np.int64)
Deliver = Callable[[dict | Exception], None]
"""Takes a reply of `Host`, {failure} if the worker had to be replaced, or an error that ends the
run."""


@dataclass(eq=False)
class Episode:
    """A running episode, as the trainer's process sees it."""

    number: int
    name: Hashable
    prompt: Prompt
    worker: "EnvironmentWorker | None"
    """None where environments run in the trainer's process, unprotected."""
    ids: list[int]
    """All tokens so far."""
    num_turns: int = 0
    calls: list[dict] = field(default_factory=list)
    """Tool calls of the turn that is being answered."""
    problem: str | None = None
    """Reason why the environment failed."""
    history: list[tuple[bytes, float]] = field(default_factory=list)
    """Requests that were replied to, and their time limits."""
    home: Popen | None = None
    """Supervisor of the process that holds the environment."""
    is_abandoned: bool = False
    """Whether its replies are no longer needed."""


class EnvironmentWorker(Worker):
    """A worker process with its replacements, which holds many episodes."""

    def __init__(self, form: dict):
        """form: arguments of `load_form`."""
        super().__init__(make_answer.__module__, form, "environment")

    def submit(
        self, episode: Episode, request: bytes, limit_s: float, deliver: Deliver, *, is_end: bool
    ) -> None:
        """Queue a request to `Host`, with a time limit from when its turn comes.

        deliver: called with the reply, in another thread; is_end: whether it ends the episode."""

        def answer(_: Worker) -> None:
            is_held = episode.home is not None and episode.home is self.supervisor
            if episode.is_abandoned and not (is_end and is_held):
                deliver({"failure": "it was not needed", "seconds": 0.0})
                return
            try:
                deliver(self._ask_twice(episode, request, limit_s))
            except Exception as error:  # OSError: no process can be started
                deliver(error)

        self.jobs.put(answer)

    def _ask_twice(self, episode: Episode, request: bytes, limit_s: float) -> dict:
        """Return the reply, to the second request if the worker dies at the first.

        It may have died because of another episode."""
        begin_s = time.monotonic()
        for is_last in (False, True):
            try:
                self.start()
                for earlier in episode.history if episode.home is not self.supervisor else ():
                    self.ask(*earlier)
                episode.home = self.supervisor
                reply = self.ask(request, limit_s)
                episode.history.append((request, limit_s))
                return reply
            except WorkerFailure as failure:
                if isinstance(failure, WorkerTimeout) or is_last or self.is_closed:
                    return {"failure": str(failure), "seconds": time.monotonic() - begin_s}
        raise AssertionError


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


def check_environment(
    config: EnvironmentConfig, tokenizer, prompt: Chat, columns: Collection[str]
) -> None:
    """Raise InputError if this environment and tokenizer cannot make episodes of such a prompt.

    columns: names of the data's further columns."""
    form = load_form(config.factory, config.tools)
    form.check_columns(columns)
    longest = int(config.max_observation_length)
    check_tokens(tokenizer, prompt, form.schemas(), form.is_text, longest)


def _problem_in(reply: dict) -> str | None:
    return reply.get("error") or reply.get("failure")
