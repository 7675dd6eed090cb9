"""benchmarks/simulated_systems.py at its smallest size."""

import json
import sys

import pytest

from benchmarks import simulated_systems
from benchmarks.shared import main
from benchmarks.simulated_systems import CHANGES, SYSTEMS, scaled
from bubblespec.tools.simulate.roofline import roofline
from bubblespec.types import Load

SMALL = ["--sizes", "7b", "--lengths", "8k", "--longest", "100", "--steps", "2", "--prompts", "2"]


@pytest.fixture
def command(monkeypatch):
    """A call of the benchmark with few ranks and responses, which returns the exit code."""
    monkeypatch.setattr(simulated_systems, "RANKS", 2)
    monkeypatch.setattr(simulated_systems, "GENERATIONS", 2)

    def call(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["simulated_systems.py", *SMALL, *options])
        return main(simulated_systems.run, simulated_systems.make_parser())

    return call


def test_every_system_is_compared_and_drawn(command, tmp_path, capsys):
    out, picture, ablation = (str(tmp_path / name) for name in ("out.json", "a.png", "b.png"))
    assert command("--json", out, "--picture", picture, "--ablation", ablation) == 0
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("a.png", "b.png"))
    runs = {run["system"]: run for run in json.loads((tmp_path / "out.json").read_text())["runs"]}
    assert len(runs) == len(SYSTEMS) + 1 + len(CHANGES)
    assert runs["plain"]["speedup"] == runs["plain, second epoch"]["speedup"] == 1.0
    before, drafts = runs["plain, second epoch"], runs["drafts of the epoch before"]
    ratio = before["seconds_per_token"] / drafts["seconds_per_token"]
    assert drafts["speedup"] == pytest.approx(ratio)
    assert runs["learned drafter"]["speedup"] > 1.2 and runs["quantised copy"]["speedup"] > 1.05
    both = runs["learned drafter, copy"]["speedup"]
    assert both > 0.97 * runs["learned drafter"]["speedup"]
    printed = capsys.readouterr().out
    assert "TLT (2511.16665): 1.7x end to end" in printed and "| without placement | " in printed


def test_runs_in_the_file_are_not_run_again(command, tmp_path, capsys, monkeypatch):
    out = str(tmp_path / "out.json")
    kept = {
        name: simulated_systems.SYSTEMS[name]
        for name in ("plain", "quantised copy", "all, acceptance length 3")
    }
    monkeypatch.setattr(simulated_systems, "SYSTEMS", kept)
    assert command("--json", out) == 0
    first = capsys.readouterr()
    assert first.err.startswith("4 runs, about 1 min of one core")
    assert command("--json", out) == 0
    again = capsys.readouterr()
    assert again.err.startswith("0 runs") and again.out == first.out
    assert command("--json", out, "--seed", "1") == 2
    assert "runs with other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "big"], "--lengths: 'big' is no number of tokens"),
        (["--sizes", "70b"], "--sizes: 70b unknown"),
        (["--steps", "3"], "--steps: even"),
        (["--drafter", "accept_length=9"], "--drafter: accept_length: 9.0 must be from 1 to 6"),
        (["--quantized", "acceptance=2"], "--quantized: acceptance: 2.0 must be from 0 to 1"),
    ],
)
def test_wrong_arguments_end_in_one_line(command, capsys, options, message):
    assert command(*options) == 2
    assert message in capsys.readouterr().err


def test_scaled_cost_multiplies_positions():
    cost = roofline("h200", "7b")
    load, longer = Load(4, 12, 2, 1000, 0, 8), Load(4, 12, 2, 8000, 0, 8)
    assert scaled(cost.seconds, 8.0)(load) == pytest.approx(cost.seconds(longer))
