"""The environments of one rank: begun, acted in and ended by name, in workers, without waiting."""

import base64
import itertools
import threading
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bubblespec.config import EnvironmentConfig
from bubblespec.distributed.worker import close_workers
from bubblespec.mechanisms.episodes.forms import Chat, load_form, tool_message
from bubblespec.mechanisms.episodes.tokens import (
    begin_ids,
    check_tokens,
    observation_ids,
    parse_calls,
)
from bubblespec.mechanisms.episodes.workers import EnvironmentWorker, Episode, InProcess
from bubblespec.types import Prompt


class Observation(NamedTuple):
    """What an environment says after a turn, or at the beginning."""

    ids: np.ndarray
    """int64, to be appended after the turn, with the header of the next one; at the beginning, what
    follows the prompt's base ids. Empty after the last turn."""
    is_done: bool
    """No turn follows."""
    reason: str | None
    """Why none does: done (the environment says so), no_call, max_turns, error (of the
    environment), too_long (not even its template fits); None if one follows."""
    num_calls: int
    """Tool calls in the turn."""
    num_failed: int
    """Of these, those whose result is an error message."""
    seconds: float
    """Spent in the environment."""


class Outcome(NamedTuple):
    """What remains of an episode."""

    reward: float | None
    """Of get_reward(), or the sum of its steps' rewards; None without either, or if it failed."""
    environment: bytes | None
    """Pickled, if that was asked for."""
    problem: str | None
    """Why an environment failed, in an error of its own or while its reward was computed."""


@dataclass(eq=False)
class _Running:
    """An episode, as `Environments` sees it."""

    name: Hashable
    prompt: Prompt
    place: InProcess | EnvironmentWorker
    episode: Episode
    ids: list[int]
    """All tokens so far."""
    num_turns: int = 0
    calls: list[dict] = field(default_factory=list)
    """Of the turn that is being answered."""
    problem: str | None = None


def check_environment(
    config: EnvironmentConfig, tokenizer, prompt: Chat, columns: Collection[str]
) -> None:
    """Raises InputError, one line that says what is missing, if episodes cannot be made of this
    environment, tokenizer and a prompt such as this with these columns of the data."""
    form = load_form(config.factory, config.tools)
    form.check_columns(columns)
    check_tokens(tokenizer, prompt, form.schemas(), form.is_text, config.max_observation_length)


class Environments:
    """Runs many episodes at once. To be used by one thread."""

    def __init__(self, config: EnvironmentConfig, tokenizer):
        self.form = load_form(config.factory, config.tools)
        self.schemas = self.form.schemas()
        self._config, self._tokenizer = config, tokenizer
        self._numbers = itertools.count()
        self._running: dict[Hashable, _Running] = {}
        self._arrived: deque[tuple[_Running, Observation | dict | Exception]] = deque()
        self._has_arrived = threading.Condition()
        self._load: dict[InProcess | EnvironmentWorker, int] = {}  # episodes
        self._places = self._make_places()
        # Made for the first draft. Calls of this step must not wait for those of drafts, even of
        # the rollout before, whose tools may be slow.
        self._draft_places: list[InProcess | EnvironmentWorker] = []

    @property
    def num_differing(self) -> int:
        """How often a replay differed where `deterministic` is false."""
        return sum(place.num_differing for place in self._load)

    def begin(self, name: Hashable, prompt: Prompt, seed: int, *, is_draft: bool = False) -> None:
        """Start an episode under a name that no running one has. prompt.token_ids are its base ids
        (`tokens.base_ids`)."""
        assert name not in self._running, name
        if is_draft:
            self._draft_places = self._draft_places or self._make_places()
        place = min(self._draft_places if is_draft else self._places, key=self._load.__getitem__)
        self._load[place] += 1
        episode = Episode(next(self._numbers))
        running = _Running(name, prompt, place, episode, list(prompt.token_ids))
        self._running[name] = running
        self._submit(running, "begin", prompt.text, prompt.columns, seed)

    def act(self, name: Hashable, ids: Sequence[int]) -> None:
        """Answer a whole turn of the model, with its stop token. An observation comes later."""
        running, ids = self._running[name], [int(token) for token in ids]
        running.num_turns += 1
        if self.form.is_text:
            action = self._tokenizer.decode(ids, skip_special_tokens=True)
        else:
            action = parse_calls(self._tokenizer, ids, running.ids, self.schemas)
            running.calls = action
        running.ids += ids
        if not self.form.is_text and not action:
            self._arrive(running, _observation([], "no_call"))
        elif not self.form.is_text and self._is_last_turn(running):
            self._arrive(running, _observation([], "max_turns"))
        else:
            self._submit(running, "act", action)

    def poll(self) -> list[tuple[Hashable, Observation]]:
        """What has come since the last call; never waits. Raises InputError or RunFailed where an
        environment ends the run."""
        observations = []
        while self._arrived:
            running, reply = self._arrived.popleft()
            if self._running.get(running.name) is not running:  # it was ended meanwhile
                continue
            if isinstance(reply, Exception):
                raise reply
            if isinstance(reply, dict):
                reply = self._observe(running, reply)
            running.ids += reply.ids.tolist()
            observations.append((running.name, reply))
        return observations

    def wait(self, timeout_s: float) -> None:
        """Until something has come, or the time is over."""
        with self._has_arrived:
            self._has_arrived.wait_for(lambda: bool(self._arrived), timeout_s)

    def end(
        self, name: Hashable, *, with_reward: bool = True, with_environment: bool = False
    ) -> Future:
        """End an episode at any time. Gives its `Outcome`, once the worker is free."""
        running, future = self._running.pop(name), Future()
        future.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        self._load[running.place] -= 1
        running.episode.is_abandoned = not (with_reward or with_environment)

        def deliver(reply: dict | Exception) -> None:
            if isinstance(reply, Exception):
                future.set_exception(reply)
                return
            problem = running.problem or reply.get("error") or reply.get("failure")
            packed = base64.b64decode(reply.get("environment") or "") or None
            reward = None if problem else reply.get("reward")
            future.set_result(Outcome(reward, packed, problem))

        arguments, limit_s = (with_reward, with_environment), self._config.timeout_s
        running.place.submit(running.episode, "end", arguments, limit_s, deliver)
        return future

    def close(self) -> None:
        """End all workers, also busy ones. Can be called again."""
        close_workers([place for place in self._load if isinstance(place, EnvironmentWorker)])

    def _make_places(self) -> list[InProcess | EnvironmentWorker]:
        config = self._config
        worker = (config.factory, config.tools, config.deterministic)
        places = [EnvironmentWorker(*worker) for _ in range(config.num_workers)] or [
            InProcess(self.form)
        ]
        self._load |= dict.fromkeys(places, 0)
        return places

    def _submit(self, running: _Running, method: str, *arguments) -> None:
        limit_s = self._config.timeout_s * max(1, len(running.calls))
        running.place.submit(
            running.episode, method, arguments, limit_s, lambda reply: self._arrive(running, reply)
        )

    def _arrive(self, running: _Running, reply: Observation | dict | Exception) -> None:
        with self._has_arrived:
            self._arrived.append((running, reply))
            self._has_arrived.notify_all()

    def _observe(self, running: _Running, reply: dict) -> Observation:
        """Tokens for what a worker has replied."""
        seconds, limit = reply["seconds"], self._config.max_observation_length
        calls, running.calls = running.calls, []
        problem = reply.get("error") or reply.get("failure")
        if running.num_turns == 0:
            running.problem = problem
            text, base = running.prompt.text, running.prompt.token_ids
            begun = reply.get("prompt", text)
            ids = begin_ids(self._tokenizer, text, begun, base, self.schemas, limit)
            return _observation(ids, "error" if problem else None, seconds=seconds)
        if problem and not calls:
            running.problem = problem
            return _observation([], "error", seconds=seconds)
        if problem:  # a tool that hangs says so itself
            results = [tool_message(call["name"], RuntimeError(problem)) for call in calls]
            reply = {"messages": results, "num_failed": len(calls), "done": False}
        counts = len(calls), reply["num_failed"], seconds
        if reply["done"]:
            return _observation([], "done", *counts)
        if self._is_last_turn(running):  # of an environment that is given all turns
            return _observation([], "max_turns", *counts)
        is_chat = not isinstance(running.prompt.text, str)
        ids = observation_ids(self._tokenizer, reply["messages"], is_chat, limit)
        if ids is None:
            return _observation([], "too_long", *counts)
        return _observation(ids, None, *counts)

    def _is_last_turn(self, running: _Running) -> bool:
        return running.num_turns >= self._config.max_turns


def _observation(
    ids: list[int],
    reason: str | None,
    num_calls: int = 0,
    num_failed: int = 0,
    seconds: float = 0.0,
) -> Observation:
    ids = np.asarray(ids, np.int64)
    return Observation(ids, reason is not None, reason, num_calls, num_failed, seconds)
