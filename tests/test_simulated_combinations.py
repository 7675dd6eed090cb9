"""benchmarks/simulated_combinations.py at its smallest size."""

import itertools
import json
import sys

import pytest

from benchmarks import simulated_combinations as module
from benchmarks.shared import main
from bubblespec.tools.simulate.workload import Spec

SMALL = ["--synthetic", "mean=20,max=60,steps=2", "--ranks", "2", "--rows", "4"]


@pytest.fixture
def command(monkeypatch):
    def call(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["simulated_combinations.py", *SMALL, *options])
        return main(module.run, module.make_parser())

    return call


def test_combinations_are_compared(command, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert command("--generations", "2", "--json", str(out)) == 0
    runs = {run["parts"]: run for run in json.loads(out.read_text())["runs"]}
    assert len(runs) == 12 and runs["none"]["speedup"] == 1.0
    assert len({run["response_tokens"] for run in runs.values()}) == 1, "the same samples"
    assert runs["none"]["drafted_tokens"] == runs["placement"]["drafted_tokens"] == 0
    best = max(run["speedup"] for run in runs.values())
    less = best / runs["bubble+suffix+quantized+placement+tail"]["speedup"] - 1
    assert f"all parts: {less:.1%} slower than the best combination" in capsys.readouterr().out


def test_all_combinations_are_distinct():
    found = module.combinations(True)
    assert len(found) == len(set(found)) == 32
    keys = [tuple(module.overrides(parts)) for parts in found]
    assert len(set(keys)) == 32
    assert set(itertools.chain(*module.combinations(False))) == set(module.PARTS)


def test_shortened_workload_keeps_its_proportions():
    spec = Spec(mean=2000, max=16000, run=500, prompt=256)
    short = module.shortened(spec, 32)
    assert (short.mean, short.max, short.prompt, short.run) == (62.5, 500, 8, 15.625)
    assert module.shortened(spec, 1) == spec


def test_incomplete_groups_end_in_one_line(command, capsys):
    assert command("--generations", "3") == 2
    assert "--rows: a multiple of --generations" in capsys.readouterr().err
