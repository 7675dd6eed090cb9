"""Files and folders beside their content: locks, flushes, renames.

File systems differ in what they can do: what is not needed is tried, and may fail."""

import errno
import fcntl
import itertools
import os
import weakref
from typing import IO

from bubblespec.errors import InputError, log

NEW_RUN = "no checkpoint in this folder: the run starts at step 1; the earlier file"


_locks: weakref.WeakSet[IO] = weakref.WeakSet()


def _close_locks(path: str | None = None) -> None:
    """Close this process's files of locks, or the one at `path`."""
    for file in list(_locks):
        if path in (None, file.name):
            file.close()


os.register_at_fork(after_in_child=_close_locks)  # else a child that outlives us keeps the lock


def lock(path: str, output_dir: str) -> IO:
    """Return a locked file; a lock that this process has had on it ends. Raises InputError.

    flock, not lockf: that lock would end where any code here reads and closes the file, as a logger
    does that copies the folder."""
    _close_locks(path)
    file = open(path, "w")  # noqa: SIM115 (open as long as the run)
    _locks.add(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise InputError(f"run.output_dir: {output_dir} is in use by another run") from error
    except OSError as error:
        reason = f"{output_dir} cannot be locked ({error.strerror})"
        log(f"warning: run.output_dir: {reason}: use it for one run at a time")
    return file


def flush(path: str) -> None:
    """Flush a file or folder to disk, where its file system can do so."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):  # data is lost
            raise


def has_content(path: str) -> bool:
    """Whether a file is more than the empty one, or the zeros, that a power failure may leave."""
    with open(path, "rb") as file:
        return bool(file.read().strip(b"\0"))


def keep_aside(path: str, why: str = NEW_RUN) -> None:
    """Rename what an earlier run has left. why: beginning of the line that says so."""
    if not os.path.exists(path) or not os.path.getsize(path):
        return
    kept = next(name for n in itertools.count(1) if not os.path.exists(name := f"{path}.{n}"))
    os.rename(path, kept)
    log(f"{why} is now {kept}")
