"""A reward that runs the Python program in a completion.

The program runs in its own process with limits on CPU time, wall time, memory and files, without
the trainer's environment or file descriptors, in an empty temporary folder. At the end it is killed
with all that it has started. That protects the run from a faulty program. **It is not a security
sandbox**: the program has the user's rights on files and network, and a malicious one can forge a
success. Run untrusted code in a container or a virtual machine.
"""

import contextlib
import json
import os
import re
import resource
import secrets
import select
import subprocess
import sys
import tempfile
from pathlib import Path

from bubblespec.distributed.processes import fork_with_supervisor
from bubblespec.distributed.worker import comes_within
from bubblespec.rewards.functions import per_sample
from bubblespec.rewards.shipped import text_of

CPU_LIMIT_S = 5  # lower than the wall time: a busy machine must not fail a program
WALL_LIMIT_S = 20.0
MEMORY_LIMIT = 1 << 30  # bytes of address space, for each process
FILE_LIMIT = 16 << 20  # bytes of each file
_BOOT = """
import sys
sys.path.insert(0, sys.argv.pop())
from bubblespec.rewards.code import main
del sys.path[0]
main()
"""


@per_sample
def passes_tests(prompts, completions, completion_ids, tests, **columns) -> list[float | None]:
    """Return 1 where the program passes all tests, else 0; None without tests.

    `tests`: Python statements, such as asserts, as text or a list of texts. They run behind the
    program, in the same module."""
    scores: list[float | None] = []
    for completion, given in zip(completions, tests, strict=True):
        checks = given if isinstance(given, str) else "\n".join(given or ())
        passes = run_program(program_in(text_of(completion)), checks) if checks else None
        scores.append(None if passes is None else float(passes))
    return scores


passes_tests.can_score = lambda columns: bool(columns.get("tests"))  # type: ignore[attr-defined]


def program_in(text: str) -> str:
    """Return the last fenced code block, or all of the text without one."""
    blocks = re.findall(r"^```[^\n`]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return blocks[-1] if blocks else text


def run_program(program: str, tests: str) -> bool:
    """Whether the program, and then the tests, run to their end within the limits.

    A secret number, which the program does not get, reports success: exit codes and printed text do
    not count."""
    secret = secrets.token_bytes(16)
    reading, verdict = os.pipe()
    limits = {"CPU": CPU_LIMIT_S, "AS": MEMORY_LIMIT, "FSIZE": FILE_LIMIT, "CORE": 0, "NOFILE": 64}
    job = [program, tests, secret.hex(), verdict, os.getpid(), limits]
    with (
        open(reading, "rb") as reader,
        tempfile.TemporaryDirectory(prefix="bubblespec-", ignore_cleanup_errors=True) as folder,
    ):
        supervisor = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT, str(Path(__file__).resolve().parents[2])],
            stdin=subprocess.PIPE,  # stays open: at its end the supervisor kills the program
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[verdict],
            cwd=folder,
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        os.close(verdict)
        assert supervisor.stdin is not None
        try:
            supervisor.stdin.write(json.dumps(job).encode() + b"\n")
            supervisor.stdin.flush()
            has_ended = comes_within(WALL_LIMIT_S, lambda s: select.select([reader], [], [], s)[0])
            return has_ended and os.read(reader.fileno(), 64) == secret
        except BrokenPipeError:  # the supervisor was killed
            return False
        finally:
            with contextlib.suppress(BrokenPipeError):
                supervisor.stdin.close()
            supervisor.wait()


def main() -> None:
    """Run the job on standard input in a child, supervised by this process."""
    program, tests, secret, verdict, trainer, limits = json.loads(sys.stdin.readline())
    fork_with_supervisor(trainer, verdict)
    try:
        os.closerange(3, verdict)
        os.closerange(verdict + 1, 1 << 16)
        if os.getuid():
            limits["NPROC"] = 0  # no further process or thread; has no effect for root
        for name, value in limits.items():
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]  # may be lower already
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        module = {"__name__": "completion"}
        exec(compile(program, "completion.py", "exec"), module)
        exec(compile(tests, "tests.py", "exec"), module)
        os.write(verdict, bytes.fromhex(secret))
    finally:
        os._exit(0)
