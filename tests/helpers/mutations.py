"""Deliberate mistakes in the package, each of which a test must find: `python
tests/helpers/mutations.py` makes one after the other in a copy of the working folder and runs the
tests that are named with it. The table is tests/assets/mistakes.txt. Ends with 1 if one is missed.

    python tests/helpers/mutations.py [--tests NAME ...] [--part I/N] [--check]

--tests: those alone that name one of these test files, and no other file is run for them; --part:
every N-th from the I-th on; --check: only that each old text is there once, as every run does.
"""

import argparse
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

LIBRARIES = ("torch._dynamo", "torch.utils.tensorboard", "transformers.models.llama.modeling_llama")
LIBRARIES += ("datasets", "reasoning_gym", "matplotlib.pyplot", "trl")
ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "assets" / "mistakes.txt"
LEFT_OUT = (".git", ".venv", "__pycache__", "runs")  # of the copy
TIMEOUT_S = 600  # of the tests of one mistake; a test that hangs has found it


class Mistake(NamedTuple):
    path: str
    old: str
    new: str
    tests: list[str]


def read_table() -> list[Mistake]:
    """Return the table's mistakes. Raises ValueError where an old text is not there exactly once,
    or a test file is missing."""
    mistakes, problems = [], []
    for block in TABLE.read_text().strip().split("\n\n")[1:]:
        head, *lines = block.split("\n")
        name, names = head.split(":")
        old, new = ("\n".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+")
        mistake = Mistake(f"bubblespec/{name}.py", old, new, names.split())
        mistakes.append(mistake)
        if (count := (ROOT / mistake.path).read_text().count(old)) != 1:
            problems.append(f"{mistake.path} has {count} times: {old.strip()}")
        missing = [t for t in mistake.tests if not (ROOT / f"tests/test_{t}.py").is_file()]
        problems += [f"there is no tests/test_{test}.py" for test in missing]
    if problems:
        raise ValueError("\n".join(problems))
    return mistakes


def import_libraries() -> None:
    """Import what takes seconds, once for all mistakes, with the settings of tests/conftest.py."""
    sys.dont_write_bytecode = True
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"TRITON_INTERPRET": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    for name in LIBRARIES:
        importlib.import_module(name)


def run_tests(folder: Path, arguments: list[str]) -> None:
    """Run pytest in a copy, in a process that has imported the libraries and nothing of ours."""
    os.chdir(folder)
    sys.path = [str(folder), *(path for path in sys.path if not path.startswith(str(ROOT)))]
    with open(os.devnull, "w") as nothing:
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
    raise SystemExit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments]))


def is_found(folder: Path, mistake: Mistake, arguments: list[str]) -> bool:
    """Whether one of these tests, arguments of pytest, fails with the mistake."""
    path = folder / mistake.path
    text = path.read_text()
    path.write_text(text.replace(mistake.old, mistake.new))
    process = multiprocessing.get_context("fork").Process(
        target=run_tests, args=(folder, arguments)
    )
    process.start()
    process.join(TIMEOUT_S)
    process.kill()
    process.join()
    path.write_text(text)
    return process.exitcode != 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tests", nargs="*", default=[])
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    mistakes = read_table()
    print(f"{len(mistakes)} mistakes")
    if given.check:
        return 0
    first, step = map(int, given.part.split("/"))
    chosen = [m for m in mistakes if not given.tests or set(given.tests) & set(m.tests)]
    chosen, missed = chosen[first - 1 :: step], 0
    import_libraries()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "copy")
        shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for mistake in chosen:
            tests = [t for t in mistake.tests if not given.tests or t in given.tests]
            found = is_found(folder, mistake, [f"tests/test_{test}.py" for test in tests])
            missed += not found
            line = mistake.new.strip().split("\n")[0]
            print("found " if found else "MISSED", mistake.path, line, *tests, flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
