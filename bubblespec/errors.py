"""The exceptions that end a run with a single line instead of a traceback, and lines that end nothing."""

import contextlib
import sys

from tqdm import tqdm


class EndsRun(Exception):
    """Ends the run with its message, one line, and with `exit_code`."""

    exit_code = 1
    is_said = False  # whether it has been printed, by this rank or by another that has one


class InputError(EndsRun, ValueError):
    """Something the user gave is wrong: a configuration, a file, a model or a reward. The message says which."""

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows instead of a traceback (IPython asks exceptions for it)."""
        return [f"error: {self}"]


class RunFailed(EndsRun, RuntimeError):
    """Training cannot usefully go on. The message says why, the same on all ranks."""


class RankTimeout(EndsRun, RuntimeError):
    """A rank hangs or has died; the message names it. All other ranks raise the same, once the first of them has said it."""

    exit_code = 3
    is_said = True


class SaveFailed(EndsRun, RuntimeError):
    """The state of a run that ends could not be saved. The message says why, the same on all ranks."""

    exit_code = 4


def say(line: str) -> None:
    """A line on the screen. Where that is a log on a full disk, it is lost, and the run goes on."""
    with contextlib.suppress(OSError):
        tqdm.write(line, file=sys.stderr)  # not into a progress bar
        sys.stderr.flush()
