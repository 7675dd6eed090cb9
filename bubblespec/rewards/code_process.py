"""The process in which a program of `passes_tests` runs, under limits. It imports nothing heavy.

A success is reported by a secret number that the program does not get: exit codes and printed text
count for nothing.
"""

import json
import os
import resource
import sys

from bubblespec.dist.processes import fork_with_keeper


def main() -> None:
    """Run the job on standard input in a child. This process becomes its keeper, which kills all
    that the program has started."""
    job = json.loads(sys.stdin.readline())
    verdict = job["verdict"]
    fork_with_keeper(job["trainer"], verdict)
    try:
        os.closerange(3, verdict)
        os.closerange(verdict + 1, 1 << 16)
        _limit(job["limits"] | {"CORE": 0, "NOFILE": 64})
        module = {"__name__": "completion"}
        exec(compile(job["program"], "completion.py", "exec"), module)
        exec(compile(job["tests"], "tests.py", "exec"), module)
        os.write(verdict, bytes.fromhex(job["secret"]))
    finally:
        os._exit(0)


def _limit(limits: dict[str, int]) -> None:
    """Set resource limits by name, or lower ones where the system asks for them."""
    if os.getuid():
        limits = limits | {"NPROC": 0}  # no further process or thread; has no effect for root
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
