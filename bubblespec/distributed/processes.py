"""Processes that end with their parent. Imports nothing heavy: reward workers use it too."""

import contextlib
import ctypes
import functools
import os
import select
import signal
import sys
import threading
import time
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None  # a fork must not load it
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOP_SIGNALS += (signal.SIGUSR1, signal.SIGUSR2)  # as Slurm sends on --signal


def die_with_parent(by: int = signal.SIGKILL) -> None:
    """Request this signal from Linux when the thread that started this process ends."""
    if LIBRARY is not None:
        LIBRARY.prctl(PR_SET_PDEATHSIG, by)


def end_early() -> None:
    """Let this process end on Ctrl-C without a traceback, and a rank with its launcher."""
    if os.getpid() == 1:
        fork_below_init()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "RANK" in os.environ:
        die_with_parent()


def fork_below_init() -> None:
    """Fork as process 1 of a container, and return in the child alone, in a session of its own.

    Linux withholds signals without a handler from process 1. The parent hands signals on to the
    child, reaps orphans, and exits as the child ends, after a signal with 128 + its number."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    if child := os.fork():

        def hand_on(number: int, frame) -> None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(child, number)

        for number in STOP_SIGNALS:
            signal.signal(number, hand_on)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        while (ended := os.wait())[0] != child:
            pass
        code = os.waitstatus_to_exitcode(ended[1])
        os._exit(code if code >= 0 else 128 - code)
    os.setsid()  # a Ctrl-C comes from the parent alone, not from the terminal, too
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@functools.cache
def guard_forks() -> dict[int, Any]:
    """Return the signal handlers that forked children get from now on, none at first.

    A child of the main thread ends with this process; Linux would end others with their thread."""
    handlers: dict[int, Any] = {}
    owner, forking = os.getpid(), threading.local()

    def prepare() -> None:
        is_main = threading.current_thread() is threading.main_thread()
        forking.ends = is_main and os.getpid() == owner and LIBRARY is not None
        # A signal that comes between the fork and the new handlers waits for them.
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def resume() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def reset() -> None:
        if forking.ends:
            die_with_parent()
            if os.getppid() != owner:  # it had died before the request
                os._exit(0)
        if handlers:
            signal.set_wakeup_fd(-1)  # what answers signals to the parent
        for number, handler in handlers.items():
            signal.signal(number, handler)
        handlers.clear()  # forks of this child get what it has set itself
        resume()

    os.register_at_fork(before=prepare, after_in_parent=resume, after_in_child=reset)
    return handlers


def fork_with_supervisor(parent: int, descriptor: int) -> None:
    """Fork, and return in the child alone, in its own session and without standard input.

    This process becomes the child's supervisor: it ends as the child ends, with the same exit code
    or signal, after killing all processes that the child has started. It does so at once when its
    standard input can be read or is closed, or when `parent` has ended. On Linux the supervisor
    adopts the child's orphans, and also kills those outside the child's group or session; elsewhere
    it kills the group only. descriptor: closed in the supervisor."""
    if LIBRARY is not None:
        LIBRARY.prctl(PR_SET_CHILD_SUBREAPER, 1)
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
    for number in (signal.SIGCHLD, *STOP_SIGNALS):
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
