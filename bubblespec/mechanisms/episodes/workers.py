"""Worker processes in which environments run.

Each worker holds many episodes, and answers one request at a time. A worker that takes too long or
dies is replaced, and each of its other episodes is replayed in the new one when its next request
comes. An environment that is random beyond its seed may go on from another state then.
"""

import json
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from subprocess import Popen

from bubblespec.distributed.worker import MAX_REPLY_BYTES, Worker, WorkerFailure, WorkerTimeout
from bubblespec.mechanisms.episodes.forms import Host, load_form
from bubblespec.types import Prompt

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
        super().__init__(__name__, form, "environment")

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


def bounded(reply: dict) -> dict:
    """Return the reply, or an error if it is too large or not plain data."""
    try:
        size = len(json.dumps(reply))
        problem = None if size <= MAX_REPLY_BYTES else f"a reply of {size} bytes is too large"
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"a reply is not plain data: {error}"
    return reply if problem is None else {"error": problem, "seconds": reply["seconds"]}


def make_answer(form: dict) -> Callable[[bytes], dict]:
    """Return the function by which a worker replies (`worker.serve`)."""
    host = Host(load_form(**form))
    return lambda request: bounded(host.answer(request))
