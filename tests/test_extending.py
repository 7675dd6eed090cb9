"""The modules and the change of docs/extending.md, as they stand there, with a copy of the project:
it trains, and its tokens are exact."""

import os
import re
import shutil

import pytest

from tests.helpers.runs import ALWAYS_DRAFT, SHORT, steps_of
from tests.helpers.warm import ROOT, launch

# Samples of the next step without a draft get one that repeats itself without end. Rank 1 is slow
# until rank 0, idle by then, has looked at one.
DRIVER = """
import os, sys, time
for name in [name for name in sys.modules if name.split(".")[0] in ("bubblespec", "train")]:
    del sys.modules[name]  # that of the process of which this one is a fork
import numpy as np
from bubblespec.engine.engine import Engine
from bubblespec.mechanisms.loop_finder import FindLoops, LoopFinder
from bubblespec.types import Draft
import train

begin_rollout, do_slice, step = LoopFinder.begin_rollout, FindLoops.do_slice, Engine.step
is_slow = False

def begin_with_loops(self, plan):
    global is_slow
    is_slow = os.environ.get("RANK") == "1"
    if plan.step is not None:
        (groups,) = self.sampler.schedule.upcoming(plan.step, 1, plan.used)
        self.looping = [group.sample(0) for group in groups]
        for sample in self.looping:
            self.sampler.store.put(sample, Draft(np.full(40, 7, np.int32), False, 0))
    begin_rollout(self, plan)

def noted_slice(self):
    span = do_slice(self)
    with open("slices", "a") as file:
        file.write(os.environ.get("RANK", "") + "\\n")
    for sample in self.loops:
        assert sample in self.finder.looping
    return span

def slow_step(self, *arguments):
    if is_slow and not os.path.exists("slices"):
        time.sleep(0.1)
    return step(self, *arguments)

LoopFinder.begin_rollout, FindLoops.do_slice = begin_with_loops, noted_slice
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
    for name in ("bubblespec", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(os.path.join(ROOT, name), folder / name, ignore=ignored)
    shutil.copy(os.path.join(ROOT, "train.py"), folder)
    for language, path, text in blocks():
        assert (folder / path).exists() == (language != "python")
        if language != "python":
            text = change((folder / path).read_text(encoding="utf-8"), text)
        (folder / path).write_text(text, encoding="utf-8")
    (folder / "drive.py").write_text(DRIVER)
    return folder


OWN = [
    "loss.advantage_estimator=my_advantages.by_function",
    "loss.loss_type=my_loss.soft_gate",
    "loss.num_iterations=2",
    "run.log_to=my_log.log",
]


def run(project, output: str, ranks: int, *overrides: str) -> list[dict]:
    """In processes that import the copy."""
    options = [*SHORT, "run.max_steps=2", "run.save_steps=0", "rollout.num_prompts_per_step=4"]
    options += ["data.size=40", "eval.num_prompts=0"]
    options += [f"run.output_dir={output}", *OWN, *overrides]
    command = ["drive.py", "--config", "configs/tiny_cpu_bulk.yaml", *options]
    done = launch(ranks, command, folder=str(project))
    assert done.returncode == 0, done.stderr[-3000:]
    return steps_of(project / output)


def test_extended_project_trains_with_exact_tokens(project):
    plain = run(project, "plain", 0, "speculative.method=none")
    method = "speculative.method=bubble+my_sources.Bigrams"
    changed = run(project, "changed", 2, method, ALWAYS_DRAFT, "loop_finder.min_ratio=8")
    assert len(plain) == 2
    for one, other in zip(plain, changed, strict=True):
        assert one["rollout/digest"] == other["rollout/digest"]
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-9)
        assert not any(key.startswith("clip_ratio/") for key in one)
    written = (project / "rewards.csv").read_text().splitlines()
    assert written == [f"{line['step']},{line['reward']}" for line in plain + changed]
    assert sum(line.get("drafts/bigrams/tokens", 0) for line in changed) > 20
    assert "0" in (project / "slices").read_text().split(), "rank 0 has been idle"
    assert changed[-1]["loop_finder/dropped"] > 0 and "loop_finder/dropped" not in plain[-1]


def test_new_mechanism_is_one_file_setup_and_configuration():
    changed = [path for _, path, _ in blocks() if path.startswith("bubblespec/")]
    assert changed == [
        f"bubblespec/{name}.py" for name in ("mechanisms/loop_finder", "setup", "config")
    ]
