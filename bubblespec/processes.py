"""Processes that must not outlive the one that started them. Imports nothing heavy: reward workers use it too."""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent does: more exactly, when the thread that started it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_group(leader: int) -> None:
    """SIGKILL to a process and whatever it has started in its group. The leader must not have been waited for yet: until then its
    number cannot go to another process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing left of it but, on some systems, the zombie
        os.killpg(leader, signal.SIGKILL)
