"""What a process is doing, said at its start and wherever the screen would be silent for long.

Imports nothing heavy: its first line comes before the imports, which take seconds."""

import os
import threading
import time
from collections.abc import Callable

from bubblespec.errors import log, quiet_s

QUIET_S = 20.0  # without a line
LOOK_S = 1.0

_is_over = threading.Event()
_doing: tuple[str | Callable[[], str], float] = "starting", time.monotonic()


def note(what: str | Callable[[], str]) -> None:
    """Set what this process does from now on. what: a text, or a function that returns one."""
    global _doing
    _doing = what, time.monotonic()


def begin(what: str) -> None:
    """Say what the process does first, and from now on in every long silence."""
    if os.environ.get("RANK", "0") != "0":  # the first rank says what all do
        return
    log(f"{what} ...")
    note(what)
    threading.Thread(target=_watch, name="progress", daemon=True).start()


def end() -> None:
    """Say nothing more: other processes begin, which do."""
    _is_over.set()


def _watch() -> None:
    while not _is_over.wait(LOOK_S):
        if quiet_s() >= QUIET_S:
            log(current())


def current() -> str:
    """Return what this process is doing, and for how long."""
    what, since_s = _doing
    text = what if isinstance(what, str) else what()
    return f"{text} ... ({time.monotonic() - since_s:.0f} s)"
