"""A reward that runs code: 1 if the Python program of a completion passes the tests of the column `tests`.

The program runs in its own process with limits on CPU time, wall time, memory and files, without the trainer's environment or
file descriptors, in an empty temporary folder; it and all that it has started is killed at the end. That protects the run from a
faulty program. **It is not a security sandbox**: the program has the user's rights on files and network, and a malicious one
can forge a success. Run untrusted code in a container or a virtual machine.
"""

import contextlib
import json
import re
import subprocess
import sys
import tempfile

from bubblespec.rewards import text_of

CPU_LIMIT_S = 5  # lower than the wall time: what is slow on a busy machine should not fail
WALL_LIMIT_S = 20.0
MEMORY_LIMIT = 1 << 30  # bytes of address space, for each process
FILE_LIMIT = 16 << 20  # bytes of each file


def passes_tests(prompts, completions, completion_ids, tests, **columns) -> list[float | None]:
    """1 if all tests pass, else 0; None without tests. `tests`: Python statements, such as asserts, as text or a list of texts,
    which see the names that the program has defined."""
    scores: list[float | None] = []
    for completion, given in zip(completions, tests, strict=True):
        if not given:
            scores.append(None)
            continue
        checks = given if isinstance(given, str) else "\n".join(given)
        scores.append(float(run_program(program_in(text_of(completion)), checks)))
    return scores


def program_in(text: str) -> str:
    """The last fenced code block, or all of the text if there is none."""
    blocks = re.findall(r"^```[^\n`]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return blocks[-1] if blocks else text


def run_program(program: str, tests: str) -> bool:
    """Whether the program, and then the tests in the same module, run to their end within the limits."""
    with tempfile.TemporaryDirectory(prefix="bubblespec-", ignore_cleanup_errors=True) as folder:
        job = {"program": program, "tests": tests, "folder": folder, "wall_s": WALL_LIMIT_S, "cpu_s": CPU_LIMIT_S}
        job |= {"memory": MEMORY_LIMIT, "file": FILE_LIMIT}
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-c", _KEEPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            # Standard input stays open: its end tells the keeper that this process has gone.
            keeper.stdin.write(json.dumps(job).encode() + b"\n")
            keeper.stdin.flush()
            return keeper.stdout.readline() == b"passed\n"
        except BrokenPipeError:  # the program has killed its keeper
            return False
        finally:
            with contextlib.suppress(BrokenPipeError):
                keeper.stdin.close()
            keeper.stdout.close()
            keeper.wait()


# The keeper starts the program's process, waits for its verdict, its end, the time limit or the end of its own parent, and then
# kills all that still runs. On Linux it adopts the program's orphans, so that it also kills those outside the process group.
# A success is reported by a secret number that the program does not get: exit codes and printed text count for nothing.
_KEEPER = r"""
import ctypes, json, os, resource, secrets, select, signal, sys, time

def become(job, verdict, secret):
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    os.closerange(3, verdict)
    os.closerange(verdict + 1, 1 << 16)
    limits = {"CPU": job["cpu_s"], "AS": job["memory"], "FSIZE": job["file"], "CORE": 0, "NOFILE": 64}
    if os.getuid():
        limits["NPROC"] = 0  # no further process or thread; does not hold for root
    for name, value in limits.items():
        most = resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
    module = {"__name__": "completion"}
    exec(compile(job["program"], "completion.py", "exec"), module)
    exec(compile(job["tests"], "tests.py", "exec"), module)
    os.write(verdict, secret)

def children():
    pids = []
    for name in os.listdir("/proc"):
        try:
            with open("/proc/" + name + "/stat") as file:
                if name.isdigit() and int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    pids.append(int(name))
        except OSError:
            pass
    return pids

def kill(pid, group=False):
    try:
        os.killpg(pid, signal.SIGKILL) if group else os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass

def main():
    job = json.loads(sys.stdin.readline())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    deadline = time.monotonic() + job["wall_s"]
    secret, (reader, verdict) = secrets.token_bytes(16), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become(job, verdict, secret)
        finally:
            os._exit(0)
    os.close(verdict)
    reply = b""
    while (remaining_s := deadline - time.monotonic()) > 0:
        ready = select.select([reader, sys.stdin], [], [], remaining_s)[0]
        if sys.stdin in ready:
            break
        if reader in ready:
            chunk = os.read(reader, 64)
            reply += chunk
            if not chunk or len(reply) >= len(secret):
                break
    kill(pid, group=True)
    kill(pid)  # before it had a group of its own
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
        if sys.platform == "linux":
            for child in children():
                kill(child)
    if reply == secret:
        os.write(1, b"passed\n")

main()
"""
