"""What a run says while it works: at once, and in long silences."""

import subprocess
import sys

import pytest

from bubblespec import progress
from bubblespec.rollout.loop import RolloutLoop
from tests.helpers.checks import wait_until
from tests.helpers.runs import ALWAYS_DRAFT, SHORT, train_here
from tests.helpers.threads import train_on_threads
from tests.helpers.warm import ROOT


@pytest.fixture
def silent(monkeypatch, capfd):
    """Every moment without a line is a long silence."""
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "LOOK_S", 1e-3)
    monkeypatch.delenv("RANK", raising=False)


def test_silence_is_broken_by_what_is_being_done(silent, capfd):
    said = []

    def has_said(text: str) -> bool:
        said.append(capfd.readouterr().err)
        return text in "".join(said)

    progress.begin("importing")
    assert has_said("importing ...\n")
    done = iter(range(100_000))
    progress.note(lambda: f"generating {next(done)} of 9")
    wait_until(lambda: has_said("\ngenerating 0 of 9 ... ("))
    wait_until(lambda: has_said("\ngenerating 1 of 9 ... ("))
    progress.note("training")
    wait_until(lambda: has_said("\ntraining ... ("))


def test_other_ranks_say_nothing(silent, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    progress.begin("importing")
    assert capfd.readouterr().err == "" and not progress._is_over.is_set()


@pytest.mark.parametrize(
    "command", ["train", "evaluate x", "generate x y", "doctor", "memory", "simulate", ""]
)
def test_first_line_comes_before_heavy_imports(command):
    """With torch and transformers out of reach: what comes first needs neither."""
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
    code += f"sys.argv[1:] = {command.split()}; import runpy; "
    code += "runpy.run_module('bubblespec', run_name='__main__', alter_sys=True)"
    if not command:
        code = code.replace("'bubblespec'", "'train'")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    first, *_, last = done.stderr.splitlines()
    wanted = "starting the ranks" if command == "train" else "importing torch and transformers"
    assert first == f"{wanted} ..." and last.startswith("ModuleNotFoundError: ")


def test_rollout_counts_complete_responses(monkeypatch, tmp_path):
    """The count covers all ranks if ticks exchange it, else one rank."""
    lines, forward = set(), RolloutLoop._forward

    def counted(self):
        lines.add(self.progress())
        forward(self)
        own = len(self.plan.rows) - len(self.unfinished)
        assert int(self.progress().split(", ")[1].split()[0]) >= own

    monkeypatch.setattr(RolloutLoop, "_forward", counted)
    options = ["run.max_steps=1", "run.save_steps=0", "speculative.method=none"]
    train_here(tmp_path / "one", *options)
    start = "step 1: generating, "
    assert f"{start}0 of 32 responses are complete" in lines and len(lines) > 2
    lines.clear()
    train_on_threads(
        2, *SHORT, *options, "rollout.tp_tail_max_rows=0", f"run.output_dir={tmp_path / 'b'}"
    )
    assert f"{start}0 of 16 responses of rank 1 are complete" in lines
    lines.clear()
    ticks = ["run.max_steps=2", "speculative.method=bubble", ALWAYS_DRAFT]
    train_on_threads(2, *SHORT, *ticks, f"run.output_dir={tmp_path / 'c'}")
    assert f"{start}0 of 32 responses are complete" in lines
