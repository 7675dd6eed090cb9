"""Warm processes: forks of one that has imported everything, so that they start in milliseconds,
not after seconds of imports.

A fork is a process of its own in all that tests look at (memory, signals, files, its end), but for
two things: it shares the hash seed of its siblings, and no torchrun stands above it. Runs under its
agent (`runs.launch_with_agent`) are in test_faults.py and test_nodes.py.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection, forkserver, reduction
from multiprocessing.process import BaseProcess

import torch.distributed as dist

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
SINGLE_THREADED |= {"GLOO_SOCKET_IFNAME": "lo"}
TIMEOUT_S = 300.0  # a hang guard

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.helpers.preload"])


class _File:
    """A file descriptor on its way into another process."""

    def __init__(self, number: int):
        self.number = number

    def __reduce__(self):
        return _received, (reduction.DupFd(self.number),)


def _received(passed) -> _File:
    return _File(passed.detach())


def start(
    target: Callable, *arguments, stdout: int = 1, stderr: int = 2, **environment: str | None
) -> BaseProcess:
    """Start target(*arguments) in a process with this one's environment but for `environment`,
    where None unsets a variable. stdout, stderr: descriptors that it writes to."""
    before = os.environ.get("PYTHONPATH")
    os.environ.update(SINGLE_THREADED, PYTHONPATH=ROOT)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    variables = {
        name: value for name, value in {**os.environ, **environment}.items() if value is not None
    }
    process = _context.Process(
        target=_begin, args=(_File(stdout), _File(stderr), variables, target, arguments)
    )
    process.daemon = True
    process.start()
    return process


def _begin(
    stdout: _File, stderr: _File, variables: dict[str, str], target: Callable, arguments: tuple
) -> None:
    for number, file in ((1, stdout), (2, stderr)):
        os.dup2(file.number, number)
        os.close(file.number)
    os.environ.clear()
    os.environ.update(variables)
    atexit._clear()  # those of the process that this one is a fork of
    try:
        target(*arguments)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        atexit._run_exitfuncs()


def _python(arguments: list[str], folder: str) -> None:
    """As `python *arguments` in a folder: a script, or -m and a module."""
    os.chdir(folder)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, folder)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


def launch(
    ranks: int, arguments: list[str], folder: str = ROOT, **environment: str | None
) -> subprocess.CompletedProcess:
    """Run `python *arguments` to its end on `ranks` ranks as torchrun starts them, or, with 0, as
    one process that knows of none. As soon as a rank fails, the others are ended. Raises
    TimeoutExpired."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks else None
    processes, deadline = [], time.monotonic() + TIMEOUT_S
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:

        def end(code: int) -> subprocess.CompletedProcess:
            for file in (out, error):
                file.seek(0)
            return subprocess.CompletedProcess(arguments, code, out.read(), error.read())

        try:
            for rank in range(max(ranks, 1)):
                variables = dict(environment)
                if ranks:
                    variables |= {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(ranks),
                        "LOCAL_WORLD_SIZE": str(ranks),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(store.port),
                        "TORCHELASTIC_USE_AGENT_STORE": "True",
                    }
                files = {"stdout": out.fileno(), "stderr": error.fileno()}
                processes.append(start(_python, arguments, str(folder), **files, **variables))
            while running := [process for process in processes if process.exitcode is None]:
                connection.wait([process.sentinel for process in running], timeout=1)
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(arguments, TIMEOUT_S, stderr=end(-1).stderr)
                failed = next((process.exitcode for process in processes if process.exitcode), None)
                if failed:  # by itself; the others end as they are told to
                    for process in processes:
                        process.terminate()
                    for process in processes:
                        process.join(30)
                    return end(failed)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return end(next((process.exitcode for process in processes if process.exitcode), 0))


def python(
    *arguments: str, folder: str = ROOT, **environment: str | None
) -> subprocess.CompletedProcess:
    return launch(0, list(arguments), folder, **environment)
