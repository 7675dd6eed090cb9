"""Processes that must not outlive the one that started them. Imports nothing heavy: reward workers use it too."""

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
    """Ask Linux for this signal when its parent ends: more exactly, when the thread that started it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def kill_group(leader: int) -> None:
    """SIGKILL to a process and whatever it has started in its group. The leader must not have been waited for yet: until then its
    number cannot go to another process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing left of it but, on some systems, the zombie
        os.killpg(leader, signal.SIGKILL)


def fork_with_keeper(parent: int, descriptor: int) -> None:
    """Fork. The child goes on from here, in a session of its own and without standard input. This process becomes its keeper and
    never returns: it ends as the child ends, with the same exit code or signal, and before it does so it kills all that the
    child has started. It does that at once when its standard input can be read or comes to its end, or when `parent` has gone.

    On Linux the keeper adopts the child's orphans, so that those are found too which have left the child's group or session;
    elsewhere only the group is killed. descriptor: one that only the child is to have.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    keeper = os.getpid()
    child = os.fork()
    if child:
        os.close(descriptor)
        _keep(child, parent)
    os.setsid()
    die_with_parent()
    if os.getppid() != keeper:  # it had died before we asked
        os._exit(0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)


def children_of(parent: int) -> list[int]:
    """Also those that have ended and were not waited for. Linux only; elsewhere none are found."""
    if sys.platform != "linux":
        return []
    found = []
    try:
        for thread in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except FileNotFoundError:  # a thread has ended, or a kernel without these files
        found = [int(pid) for pid in filter(str.isdigit, os.listdir("/proc")) if _state_of(pid)[1] == parent]
    return found


def descendants_of(parent: int) -> tuple[list[int], int]:
    """All that it has started, and they: those that run, and how many have ended without being waited for. Linux only."""
    running, num_ended, left = [], 0, children_of(parent)
    while left:
        pid = left.pop()
        if _state_of(pid)[0] in "ZX":
            num_ended += 1
        else:
            running.append(pid)
            left += children_of(pid)
    return running, num_ended


def _state_of(pid: int | str) -> tuple[str, int]:
    """Its state, a letter (see proc(5); X if it is no more), and its parent."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
        return state, int(parent)
    except OSError:
        return "X", 0


def _keep(child: int, parent: int) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # it only ends the wait below
    die_with_parent(signal.SIGTERM)  # beside the end of standard input, which a fork of the parent may hold open
    ended: dict[int, int] = {}
    while _reap(ended) and child not in ended and os.getppid() == parent:
        ready = select.select([0, reader], [], [])[0]
        if 0 in ready:
            break
        os.read(reader, 4096)
    if child not in ended or sys.platform != "linux":
        kill_group(child)
    while _reap(ended):
        # Only its own children: until it has waited for them their numbers stay theirs. Theirs become its own as they end.
        for pid in children_of(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
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
    """Wait for the children that have ended, adopted ones too, and note how each did. Returns whether there are others."""
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    except ChildProcessError:
        return False
    return True
