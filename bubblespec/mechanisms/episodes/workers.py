"""Where environments run: in worker processes, or in this one (`InProcess`).

Each worker holds many episodes, and has a thread in the trainer that sends it one request at a
time. A worker that takes too long or dies is replaced, and each of its other episodes is replayed
in the new one when its next request comes: the same requests must get the same replies.
"""

import hashlib
import json
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bubblespec.distributed.worker import MAX_REPLY_BYTES, Worker, WorkerFailure, WorkerProcess
from bubblespec.errors import InputError, RunFailed
from bubblespec.mechanisms.episodes.forms import Form, Host, load_form

Deliver = Callable[[dict | Exception], None]
"""Takes a reply: what `Host` replies, `failure` if the worker had to be replaced, or an error that
ends the run."""


@dataclass(eq=False)
class Episode:
    """One environment, and what has happened in it."""

    number: int
    history: list[tuple[bytes, float, bytes]] = field(default_factory=list)
    """Requests that were replied to, their time limits and the replies' digests."""
    home: WorkerProcess | None = None
    """The worker that holds it."""
    is_abandoned: bool = False
    """Nobody waits for its replies any more."""


class InProcess:
    """Runs environments in this process, unprotected, each request at once."""

    def __init__(self, form: Form):
        self._host = Host(form)
        self.num_differing = 0

    def submit(
        self, episode: Episode, method: str, arguments: tuple, limit_s: float, deliver: Deliver
    ) -> None:
        """See `EnvironmentWorker`."""
        reply = self._host.answer(_request(episode, method, arguments))
        deliver(json.loads(json.dumps(bounded(reply))))


class EnvironmentWorker(Worker):
    """A worker process with its replacements, which holds many episodes."""

    def __init__(self, factory: str | None, tools: list[str], deterministic: bool):
        self.num_differing = 0
        """Replies of replays that differed from the first ones, where that ends no run."""
        self._deterministic = deterministic
        super().__init__(__name__, {"factory": factory, "tools": tools}, "environment")

    def submit(
        self, episode: Episode, method: str, arguments: tuple, limit_s: float, deliver: Deliver
    ) -> None:
        """Queue a call of a method of `Host`, to be replied to within limit_s seconds once its turn
        comes. `deliver` is called with the reply, in another thread. Raises InputError if the
        arguments cannot be sent."""
        request = _request(episode, method, arguments)
        self.jobs.put(lambda _: self._answer(episode, method, request, limit_s, deliver))

    def _answer(
        self, episode: Episode, method: str, request: bytes, limit_s: float, deliver: Deliver
    ) -> None:
        is_held = episode.home is not None and episode.home is self.process
        if episode.is_abandoned and not (method == "end" and is_held):
            deliver({"failure": "it was not needed", "seconds": 0.0})
            return
        try:
            reply = self._ask(episode, request, limit_s)
        except Exception as error:  # OSError: no process can be started
            reply = error
        deliver(reply)

    def _ask(self, episode: Episode, request: bytes, limit_s: float) -> dict:
        """Return the reply. A worker may die for reasons of other episodes, so a request that finds
        it dead is repeated once."""
        begin_s = time.monotonic()
        for is_last in (False, True):
            try:
                self.start()
                if episode.home is not self.process:
                    self._replay(episode)
                reply = self.ask(request, limit_s)
                episode.history.append((request, limit_s, digest(reply)))
                return reply
            except WorkerFailure as failure:
                if failure.is_timeout or is_last or self.is_closed:
                    return {"failure": str(failure), "seconds": time.monotonic() - begin_s}
        raise AssertionError

    def _replay(self, episode: Episode) -> None:
        """Bring the episode to where it was, in the present process. Requests that failed are left
        out."""
        for request, limit_s, seen in episode.history:
            if digest(self.ask(request, limit_s)) == seen:
                continue
            what = "an environment that was replayed in a new worker replied differently"
            if self._deterministic:
                raise RunFailed(
                    f"environment.deterministic: {what}; give false if it is random beyond its seed"
                )
            self.num_differing += 1
        episode.home = self.process


def _request(episode: Episode, method: str, arguments: tuple) -> bytes:
    try:
        return pickle.dumps((method, episode.number, arguments))
    except Exception as error:  # objects with code of their own
        raise InputError(
            f"environment: a prompt's columns cannot be sent to a worker: {error!r:.200}"
        ) from error


def digest(reply: dict) -> bytes:
    """Of all but the time that it took."""
    told = {key: value for key, value in reply.items() if key != "seconds"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).digest()


def bounded(reply: dict) -> dict:
    """The reply, or an error instead of one that is too large or no plain data."""
    try:
        size = len(json.dumps(reply))
        problem = None if size <= MAX_REPLY_BYTES else f"a reply of {size} bytes is too large"
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"a reply is not plain data: {error}"
    return reply if problem is None else {"error": problem, "seconds": reply["seconds"]}


def make_answer(argument: dict) -> Callable[[bytes], dict]:
    """What a worker replies with (`bubblespec.distributed.worker.serve`)."""
    host = Host(load_form(argument["factory"], argument["tools"]))
    return lambda request: bounded(host.answer(request))
