"""The exceptions that end a run with a single line instead of a traceback, and lines that end nothing."""

import contextlib
import sys

from tqdm import tqdm


class InputError(ValueError):
    """Something the user gave is wrong: a configuration, a file, a model or a reward. The message says which, in one line."""

    is_said = False  # whether it has been printed, by this rank or by another that has one

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows instead of a traceback (IPython asks exceptions for it)."""
        return [f"error: {self}"]


class RunFailed(RuntimeError):
    """Training cannot usefully go on. The message says why, in one line, the same on all ranks."""


def say(line: str) -> None:
    """A line on the screen. Where that is a log on a full disk, it is lost, and the run goes on."""
    with contextlib.suppress(OSError):
        tqdm.write(line, file=sys.stderr)  # not into a progress bar
        sys.stderr.flush()
