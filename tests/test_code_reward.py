"""The code-execution reward against programs that hang, bomb, flood, cheat and pry."""

import os
import select
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from bubblespec.distributed import worker as worker_process
from bubblespec.rewards import code as module
from bubblespec.rewards.code import passes_tests, program_in, run_program
from tests.helpers.checks import is_alive, pids_in, wait_until
from tests.helpers.clocks import ClockThatSkips

ADD = "def add(a, b):\n    return a + b\n"
CHECK = "assert add(1, 2) == 3"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Limits that a busy machine does not reach; a test of one of them sets it."""
    monkeypatch.setattr(module, "WALL_LIMIT_S", 300.0)
    monkeypatch.setattr(module, "CPU_LIMIT_S", 60)


def grade(text: str, tests, chat: bool = False) -> float | None:
    completion = [{"role": "assistant", "content": text}] if chat else text
    return passes_tests(
        prompts=["p"], completions=[completion], completion_ids=[[1]], tests=[tests], level=[3]
    )[0]


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("x = 1", "x = 1"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nno,\n```py\nx = 2\ny = 3\n```\n", "x = 2\ny = 3\n"),
        ("```python\nx = 1", "```python\nx = 1"),
        ("```python\nx = 1\n```\nOutput:\n```\n3\n```", "x = 1\n"),
        ("```\nx = 1\n```\nRun it:\n```bash\npython a.py\n```", "x = 1\n"),
        ("```py\ndef f(): pass\n```\nUse it:\n```py\nprint(f())\n```", "def f(): pass\n"),
        ("```py\ndef f(): x\n```\nNo:\n```Python3\nclass f: y\n```\n", "class f: y\n"),
        ("1. So:\n   ```python\n   if x:\n     y\n   ```\n2. Done.", "if x:\n  y\n"),
        ("~~~\nx = 1\n~~~\r\n", "x = 1\n"),
        ("````md\n```py\nx = 1\n```\n````", "```py\nx = 1\n```\n"),
        ('```\ndef f():\n    "\n    ```\n    "\n```', 'def f():\n    "\n    ```\n    "\n'),
    ],
)
def test_program_is_the_last_definition_or_all_of_the_text(text, wanted):
    assert program_in(text) == wanted


@pytest.mark.parametrize(
    "text, tests, wanted, chat",
    [
        (f"Here:\n```python\n{ADD}```", CHECK, 1.0, True),
        (ADD, [CHECK, "assert add('a', 'b') == 'ab'"], 1.0, False),
        (ADD, [CHECK, "assert add(1, 2) == 4", CHECK], 0.0, True),
        ("def add(a, b):\n    return a - b", CHECK, 0.0, False),
        (ADD, "", None, True),
        (ADD, None, None, False),
    ],
)
def test_passes_tests(text, tests, wanted, chat):
    assert grade(text, tests, chat) == wanted


HUMAN_EVAL = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
SUITE = "import unittest\nclass Adds(unittest.TestCase):\n"
SUITE += "    def test_sum(self):\n        self.assertEqual(add(1, 2), 3)\n"
MAIN = "if __name__ == '__main__':\n    unittest.main()\n"


@pytest.mark.parametrize(
    "tests",
    [
        "   ",
        "x = 1\nassert x == 1",
        HUMAN_EVAL,  # nothing calls it
        "def test_sum():\n    assert add(1, 2) == 3",  # as for pytest
        "try:\n    assert add(1, 2) == 3\nexcept Exception:\n    print('wrong')",
        "assert add(1, 2) ==",
    ],
)
def test_tests_that_an_empty_program_passes_score_none(tests):
    assert grade(ADD, tests) is None and grade("0", tests) is None
    assert not passes_tests.can_score({"tests": tests})


def test_tests_that_are_no_text_cannot_score():
    assert not passes_tests.can_score({"tests": [{"input": 1}]})


@pytest.mark.parametrize(
    "tests, name",
    [
        (HUMAN_EVAL, "add"),
        (SUITE, None),
        (SUITE + "unittest.main(argv=['x'])", None),
        (SUITE + MAIN, None),
        (f"from math import *\n{CHECK}", None),
        ("y = add(1, 2)\nassert y == 3", None),
    ],
)
def test_suites_are_run(tests, name):
    def score(program: str) -> list[float | None]:
        return passes_tests(["p"], [program], [[1]], tests=[tests], entry_point=[name])

    assert passes_tests.can_score({"tests": tests, "entry_point": name})
    assert score(ADD) == [1.0]
    for wrong in ("0", "def add(a, b): exit()", ADD + "exit(1)"):
        assert score(wrong) == [0.0], wrong


DATA = """from __future__ import annotations
import pickle
from dataclasses import dataclass
@dataclass
class Pair:
    left: int
    right: int = 0
assert pickle.loads(pickle.dumps(Pair(1))) == Pair(1)
"""


@pytest.mark.parametrize("program", [DATA + ADD, ADD + "\nexit()"])
def test_right_program_passes(program):
    assert grade(program, CHECK) == 1.0
    assert grade(program, "assert add(1, 2) == 4") == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "def add(:",
        "import os; os._exit(0)",
        "import os\nfor fd in range(3, 64):\n"
        "    try: os.write(fd, b'passed\\n')\n    except OSError: pass\nos._exit(0)",
        "import ctypes; ctypes.string_at(0)",
        "input()",
        "x = bytearray(1 << 31)",
        "with open('big', 'wb') as file:\n    for _ in range(64): file.write(bytes(1 << 20))",
    ],
)
def test_program_ending_before_the_tests_fails(program):
    assert not run_program(program, "pass")


def test_input_is_empty_and_output_goes_nowhere(capfd):
    program = "import sys\nassert sys.stdin.read() == ''\nfor _ in range(200): print('x' * 100_000)"
    assert run_program(program, "pass")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "cpu_s, wall_s, program",
    [(1, 3600.0, "x = 9 ** 9 ** 9"), (60, 1.0, "import time; time.sleep(3600)")],
)
def test_busy_and_idle_programs_end_at_the_limit(monkeypatch, cpu_s, wall_s, program):
    monkeypatch.setattr(module, "CPU_LIMIT_S", cpu_s)
    monkeypatch.setattr(module, "WALL_LIMIT_S", wall_s)
    assert not run_program(program, "pass")


def test_pause_of_all_processes_is_no_limit(monkeypatch):
    """The clock jumps by an hour while the program is waited for."""
    clock, waits = ClockThatSkips(), []

    def wait(*arguments):
        waits.append(arguments)
        if len(waits) > 1:
            return select.select(*arguments)
        clock.skipped += 3600.0
        return [], [], []

    monkeypatch.setattr(worker_process, "time", clock)
    monkeypatch.setattr(module, "select", SimpleNamespace(select=wait))
    assert run_program(ADD, CHECK) and len(waits) > 1


FORKS = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for n in range(8):
    if os.fork() == 0:
        if n % 2:
            os.setsid()  # out of the process group
            if os.fork():
                os._exit(0)  # and an orphan
        time.sleep(3600)
"""


def test_children_end_with_the_program():
    """A bounded fork bomb. For users other than root no process can be started at all."""
    mark = f"bubblespec-test-{os.getpid()}-{time.time_ns()}"
    # PR_SET_NAME, which children inherit
    program = f"import ctypes\nctypes.CDLL(None).prctl(15, b'{mark[-12:]}')\n{FORKS}"

    def survivors() -> list[str]:
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/comm") as file:
                    found += [name] if file.read().strip() == mark[-12:] else []
            except OSError:
                pass
        return found

    assert run_program(program, "pass") == (os.getuid() == 0)
    assert survivors() == []


def test_program_has_no_access_to_descriptors_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "secret")
    descriptor = os.open(tmp_path / "open file", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(descriptor, True)
    program = f"""
import os, sys
open_ones = []
for fd in range(3, 4096):
    try:
        open_ones.append(os.readlink("/proc/self/fd/" + str(fd)))
    except OSError:
        pass
assert all(name.startswith("pipe:") for name in open_ones) and len(open_ones) == 1, open_ones
assert "SECRET_TOKEN" not in os.environ and "PATH" not in os.environ
assert os.listdir(".") == [] and os.getcwd() != {os.getcwd()!r}
assert {os.getcwd()!r} not in sys.path and "" not in sys.path
open("scratch", "w").write("mine")
"""
    assert run_program(program, "pass")
    os.close(descriptor)


SCRIPT = """
import sys
from bubblespec.rewards import code as code_reward
code_reward.WALL_LIMIT_S = 3600.0
note = f"open({sys.argv[1]!r}, 'w').write(str(os.getpid()) + ' ' + str(os.getppid()))"
code_reward.run_program(f"import os, time\\n{note}\\ntime.sleep(3600)", "")
"""


def test_program_dies_with_the_trainer(tmp_path):
    path = tmp_path / "pids"
    trainer = subprocess.Popen([sys.executable, "-c", SCRIPT, str(path)])
    wait_until(lambda: len(pids_in(path)) == 2)
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not any(map(is_alive, pids_in(path))))
