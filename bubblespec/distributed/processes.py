"""Processes that end with their parent. Imports nothing heavy: reward workers use it too."""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(by: int = signal.SIGKILL) -> None:
    """Request this signal from Linux when the thread that started this process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def fork_with_supervisor(parent: int, descriptor: int) -> None:
    """Fork, and return in the child alone, in its own session and without standard input.

    This process becomes the child's supervisor: it ends as the child ends, with the same exit code
    or signal, after killing all processes that the child has started. It does so at once when its
    standard input can be read or is closed, or when `parent` has ended. On Linux the supervisor
    adopts the child's orphans, and also kills those outside the child's group or session; elsewhere
    it kills the group only. descriptor: closed in the supervisor.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    child = os.fork()
    if child:
        os.close(descriptor)
        _supervise(child, parent)
    os.setsid()
    die_with_parent()
    if os.getppid() != supervisor:  # it had died before the request
        os._exit(0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)


def _supervise(child: int, parent: int) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # it only ends the wait below
    # apart from the end of standard input, which a fork of the parent may hold open
    die_with_parent(signal.SIGTERM)
    ended: dict[int, int] = {}
    while _reap(ended) and child not in ended and os.getppid() == parent:
        ready = select.select([0, reader], [], [])[0]
        if 0 in ready:
            break
        os.read(reader, 4096)
    if child not in ended or sys.platform != "linux":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    import psutil

    while _reap(ended):
        # Only direct children, whose ids cannot be reused before they are reaped. Their children
        # are adopted as they end.
        for orphan in psutil.Process().children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(orphan.pid, signal.SIGKILL)
        time.sleep(0.001)
    code = os.waitstatus_to_exitcode(ended[child])
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _reap(ended: dict[int, int]) -> bool:
    """Reap ended children, adopted ones too, and note their status; return whether any is left."""
    try:
        while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
            ended[reaped[0]] = reaped[1]
    except ChildProcessError:
        return False
    return True
