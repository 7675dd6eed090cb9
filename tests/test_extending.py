"""The changes of docs/extending.md, made to a copy of the project as they stand there: it trains,
and its tokens are exact."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers.runs import ALWAYS_DRAFT, SHORT
from tests.helpers.warm import ROOT

# Samples of the next step that have no draft get one that says the same again and again: pieces for
# the use of idle time. Which rank has looked at one leaves no other trace than this one. Rank 1 is
# slow until rank 0, idle by then, has done so.
DRIVER = """
import os, sys, time
import numpy as np
from bubblespec.engine.engine import Engine
from bubblespec.idle.loop_finder import LoopFinder
from bubblespec.types import Draft
import train

init, advance, merge, step = LoopFinder.__init__, LoopFinder.advance, LoopFinder.merge, Engine.step
is_slow = False

def with_loops(self, samples, store):
    global is_slow
    is_slow = os.environ["RANK"] == "1"
    init(self, samples, store)
    self.looping = [sample for sample in samples if store.get(sample) is None]
    for sample in self.looping:
        store.put(sample, Draft(np.full(40, 7, np.int32), False, 0))

def noted_advance(self):
    before = len(self.given)
    goes_on = advance(self)
    if len(self.given) < before:
        with open("pieces", "a") as file:
            file.write(os.environ["RANK"] + "\\n")
    return goes_on

def checked_merge(self, ranks):
    dropped = {sample for sample in self.loops if sample in self.looping}
    merge(self, ranks)
    assert all(self.store.get(sample) is None for sample in dropped)

def slow_step(self, *arguments):
    if is_slow and not os.path.exists("pieces"):
        time.sleep(0.5)
    return step(self, *arguments)

LoopFinder.__init__, LoopFinder.advance, LoopFinder.merge = with_loops, noted_advance, checked_merge
Engine.step = slow_step
sys.exit(train.main())
"""


def blocks() -> list[tuple[str, str, str]]:
    with open(os.path.join(ROOT, "docs/extending.md"), encoding="utf-8") as file:
        return re.findall(r"^```(\w+) (\S+)\n(.*?)^```$", file.read(), re.M | re.S)


def change(text: str, diff: str) -> str:
    """Apply the hunks of a diff without line numbers. The lines that it shows must be in the text
    exactly once."""
    for hunk in diff.split("@@\n"):
        lines = hunk.rstrip("\n").split("\n")
        before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
        after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy with all changes made."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(
        os.path.join(ROOT, "bubblespec"),
        folder / "bubblespec",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copytree(os.path.join(ROOT, "configs"), folder / "configs")
    shutil.copy(os.path.join(ROOT, "train.py"), folder)
    for language, path, text in blocks():
        if language == "python":
            assert not (folder / path).exists()
            (folder / path).write_text(text, encoding="utf-8")
        else:
            (folder / path).write_text(
                change((folder / path).read_text(encoding="utf-8"), text), encoding="utf-8"
            )
    (folder / "drive.py").write_text(DRIVER)
    return folder


def run(project, output: str, ranks: int, *overrides: str) -> list[dict]:
    options = [
        *SHORT,
        "run.max_steps=3",
        f"run.output_dir={output}",
        "loss.advantage_estimator=sign",
        *overrides,
    ]
    launcher = [
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={ranks}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(project),
    }
    command = [
        sys.executable,
        *launcher,
        "drive.py",
        "--config",
        "configs/tiny_cpu_bulk.yaml",
        *options,
    ]
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with open(project / output / "metrics.jsonl", encoding="utf-8") as file:
        return [line for line in map(json.loads, file) if "reward" in line]


def test_the_changes_train_and_leave_tokens_exact(project):
    exact = ("model.dtype=float64", "speculative.planning=always")
    plain = run(project, "plain", 1, *exact, "speculative.method=none")
    changed = run(project, "changed", 2, *exact, "speculative.method=bubble+bigrams", ALWAYS_DRAFT)
    assert [line["rollout/digest"] for line in plain] == [
        line["rollout/digest"] for line in changed
    ]
    for one, other in zip(plain, changed, strict=True):
        np.testing.assert_allclose(one["grad_norm"], other["grad_norm"], rtol=1e-9)
    assert sum(line.get("drafts/bigrams/tokens", 0) for line in changed) > 20
    assert "0" in (project / "pieces").read_text().split(), (
        "rank 0 has been idle, and was given pieces"
    )


CONFIGURATION = {"bubblespec/config.py", "bubblespec/config_combinations.py"}


def test_no_change_touches_more_than_two_files():
    """Beside the configuration; counted by section."""
    with open(os.path.join(ROOT, "docs/extending.md"), encoding="utf-8") as file:
        sections = file.read().split("\n## ")[1:]
    touched = [
        set(re.findall(r"^```\w+ (\S+)$", section, re.M)) - CONFIGURATION for section in sections
    ]
    assert [len(files) for files in touched] == [1, 2, 2, 0]
