"""A reward that runs the Python program in a completion.

The program runs in its own process with limits on CPU time, wall time, memory and files, without
the trainer's environment or file descriptors, in an empty temporary folder. At the end it is killed
with all that it has started. That protects the run from a faulty program. **It is not a security
sandbox**: the program has the user's rights on files and network, and a malicious one can forge a
success. Run untrusted code in a container or a virtual machine."""

import ast
import builtins
import contextlib
import functools
import json
import os
import re
import resource
import secrets
import select
import subprocess
import symtable
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path
from types import ModuleType

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


_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})([^`\n]*)")
_PYTHON = re.compile(r"\W*py(thon)?[\d.]*\b", re.IGNORECASE)
_DEFINITION = re.compile(r"^((async\s+)?def|class)\s|^\w+\s*=\s*lambda\b", re.MULTILINE)


@per_sample
def passes_tests(prompts, completions, completion_ids, tests, **columns) -> list[float | None]:
    """Return 1 where the program passes all tests, else 0; None without tests that tell.

    `tests`: Python statements, such as asserts, as text or a list of texts. They run behind the
    program, in the same module. A function `check` is called with what the column `entry_point`
    names, and cases of `unittest` are run. Tests that do not compile, or that an empty program
    passes, do not tell."""
    names = columns.get("entry_point") or [None] * len(tests)
    scores: list[float | None] = []
    for completion, given, name in zip(completions, tests, names, strict=True):
        checks = _statements(given, name)
        program = program_in(text_of(completion))
        scores.append(float(run_program(program, checks)) if _can_tell(checks) else None)
    return scores


def _can_score(columns: dict) -> bool:
    try:
        return _can_tell(_statements(columns.get("tests"), columns.get("entry_point")))
    except TypeError:  # no texts
        return False


passes_tests.can_score = _can_score  # type: ignore[attr-defined]


def _statements(tests: str | list[str] | None, entry_point: str | None) -> str:
    """Return the tests as one text, with the call that runs them if they only define it."""
    checks = tests if isinstance(tests, str) else "\n".join(tests or ())
    if entry_point and re.search(r"^def check\(", checks, re.MULTILINE):
        checks += f"\ncheck({entry_point})\n"
    if "unittest.TestCase" in checks and "unittest.main(" not in checks:
        checks += "\nimport unittest\nunittest.main(argv=['tests'])\n"
    return checks


@functools.lru_cache(maxsize=1 << 14)
def _can_tell(checks: str) -> bool:
    """Whether the tests compile, and an empty program does not pass them."""
    try:
        tree, table = ast.parse(checks), symtable.symtable(checks, "tests.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    # Most tests use a name of the program outside functions. Others have to be run.
    statements = [node for node in tree.body if isinstance(node, ast.Assert | ast.Expr)]
    used = {node.id for s in statements for node in ast.walk(s) if isinstance(node, ast.Name)}
    defined = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}
    missing = _global_names(table) - defined - set(dir(builtins))
    is_sure = missing if "unittest.main(" in checks else missing & used
    return bool(is_sure and "import *" not in checks) or not run_program("", checks)


def _global_names(table: symtable.SymbolTable) -> set[str]:
    own = {s.get_name() for s in table.get_symbols() if s.is_referenced() and s.is_global()}
    return own.union(*map(_global_names, table.get_children()))


def program_in(text: str) -> str:
    """Return the program: a fenced code block, or all of the text without one.

    Blocks marked as Python come before unmarked ones, and these before others. Of several the last
    one that defines a function or class counts, or else the last."""
    blocks: list[tuple[int, bool, str]] = []
    lines: list[str] = []
    opening: re.Match | None = None
    for line in text.split("\n"):
        fence = _FENCE.match(line)
        if opening is None:
            opening, lines = fence, []
        elif fence and fence[2].startswith(opening[2]) and len(fence[1]) < len(opening[1]) + 4:
            block, mark = "".join(f"{line}\n" for line in lines), opening[3].strip()
            block = textwrap.dedent(block) if opening[1] else block
            rank = 2 if _PYTHON.match(mark) else int(not mark)
            blocks.append((rank, bool(_DEFINITION.search(block)), block))
            opening = None
        else:
            lines.append(line)
    return max(reversed(blocks), key=lambda block: block[:2])[2] if blocks else text


def run_program(program: str, tests: str) -> bool:
    """Whether the program, and then the tests, run to their end within the limits.

    A secret that the program does not get reports success: exit codes and prints do not count."""
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
        module = ModuleType("completion")
        # Pickle and dataclasses look up the first, unittest the second.
        sys.modules["completion"] = sys.modules["__main__"] = module
        _execute(program, "completion.py", module)
        module.__name__ = "__main__"
        _execute(tests, "tests.py", module)
        os.write(verdict, bytes.fromhex(secret))
    finally:
        os._exit(0)


def _execute(source: str, file: str, module: ModuleType) -> None:
    """Run statements in the module until they end, or exit with success by themselves.

    Raises SystemExit of other code, such as that of a program in its tests."""
    try:
        exec(compile(source, file, "exec"), vars(module))
    except SystemExit as end:
        files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(end.__traceback__)}
        if end.code not in (None, 0) or {"completion.py", "tests.py"} & files != {file}:
            raise
