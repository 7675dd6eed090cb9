"""The modules and the change of docs/extending.md, as they stand there, with a copy of the project:
it trains, and its tokens are exact."""

import os
import shutil

import pytest

from tests.helpers.documents import blocks, read_document
from tests.helpers.runs import ALWAYS_DRAFT, SHORT, steps_of
from tests.helpers.warm import ROOT, launch

# One sample of each group gets a draft that repeats itself without end.
DRIVER = """
import sys
for name in [name for name in sys.modules if name.split(".")[0] in ("bubblespec", "train")]:
    del sys.modules[name]  # modules of the process of which this one is a fork
import numpy as np
from bubblespec.mechanisms.loop_filter import LoopFilter
from bubblespec.types import Draft
import train

begin_rollout = LoopFilter.begin_rollout

def begin_with_loops(self, plan):
    loops = [group.sample(0) for group in plan.launch.groups]
    for sample in loops:
        self.store.put(sample, Draft(np.full(40, 7, np.int32), False, 0))
    begin_rollout(self, plan)
    assert not any(self.store.get(sample) for sample in loops)

LoopFilter.begin_rollout = begin_with_loops
sys.exit(train.main())
"""


def change(text: str, diff: str) -> str:
    """Apply hunks without line numbers, whose lines must be in the text exactly once."""
    for hunk in diff.split("@@\n"):
        lines = hunk.rstrip("\n").split("\n")
        before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
        after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    for name in ("bubblespec", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(os.path.join(ROOT, name), folder / name, ignore=ignored)
    shutil.copy(os.path.join(ROOT, "train.py"), folder)
    for language, path, text in blocks(read_document("docs/extending.md")):
        if not path:
            continue
        assert (folder / path).exists() == (language != "python")
        if language != "python":
            text = change((folder / path).read_text(encoding="utf-8"), text)
        (folder / path).write_text(text, encoding="utf-8")
    (folder / "drive.py").write_text(DRIVER)
    return folder


OWN = ["loss.advantage_estimator=my_advantages.by_function", "loss.loss_type=my_loss.soft_gate"]
OWN += ["loss.num_iterations=2", "run.log_to=my_log.log"]


def run(project, output: str, ranks: int, *overrides: str) -> list[dict]:
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
    changed = run(project, "changed", 2, method, ALWAYS_DRAFT, "loop_filter.max_ratio=8")
    assert len(plain) == 2
    for one, other in zip(plain, changed, strict=True):
        assert one["rollout/digest"] == other["rollout/digest"]
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-9)
        assert not any(key.startswith("clip_ratio/") for key in one)
    written = (project / "rewards.csv").read_text().splitlines()
    assert written == [f"{line['step']},{line['reward']}" for line in plain + changed]
    assert sum(line.get("drafts/bigrams/tokens", 0) for line in changed) > 20
    assert [line["loop_filter/dropped"] for line in changed] == [4, 8]
    assert "loop_filter/dropped" not in plain[-1]


def test_new_mechanism_is_one_file_its_name_and_configuration():
    page = blocks(read_document("docs/extending.md"))
    changed = [path for _, path, _ in page if path.startswith("bubblespec/")]
    names = ("mechanisms/loop_filter", "mechanisms/__init__", "config/__init__")
    assert changed == [f"bubblespec/{name}.py" for name in names]
    added = [text.count("\n+") + text.startswith("+") for lang, _, text in page if lang == "diff"]
    (mechanism,) = (text for _, path, text in page if "loop_filter" in path)
    assert len(mechanism.splitlines()) + sum(added) <= 40
