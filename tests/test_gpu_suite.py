"""The GPU suite in its CPU form: every part has figures; failures and time's end cost their own
rows."""

import json
import math
import re
import sys

import pytest
import torch

from benchmarks import gpu_suite
from benchmarks.gpu_suite import Figure
from tests.helpers.clocks import Clock
from tests.helpers.ranks import run_ranks


def run_suite(monkeypatch, *arguments: str) -> int:
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--cpu", *arguments])
    try:
        return gpu_suite.main()
    finally:
        torch.set_num_threads(threads)


def measure_on(ranks, measure, is_small: bool):
    return measure(gpu_suite.make_bench(is_small), ranks)


def test_every_part_measures_something(monkeypatch, tmp_path, capsys):
    def run_processes(measure, backend, world_size, is_small):
        """In processes that have imported everything."""
        found = run_ranks(tmp_path, measure_on, world_size, measure, is_small)[0]
        return [Figure(*row) for row in found] if isinstance(found[0], list) else found

    monkeypatch.setattr(gpu_suite, "run_processes", run_processes)
    monkeypatch.setattr(gpu_suite, "TICK_STEPS", 10)
    out = tmp_path / "cpu.json"
    assert run_suite(monkeypatch, "--json", str(out)) == 0
    result = json.loads(out.read_text())
    assert result["versions"]["torch"] == torch.__version__
    assert result["kernels"] == ["sdpa"] and result["is_small"]
    assert list(result["parts"]) == list(gpu_suite.PARTS)
    printed, cases = capsys.readouterr().out, {}
    for name, part in result["parts"].items():
        assert part["error"] is None and part["rows"], name
        for row in part["rows"]:
            cases[name, row["case"]] = row
            assert math.isfinite(row["value"]) and row["value"] >= 0, row
            assert f"| {name} | {row['case']} |" in printed
    assert 0 < cases["parity", "bfloat16 sdpa"]["value"] < 0.2
    parted = [row["value"] for (name, _), row in cases.items() if name == "composition"]
    assert set(parted) == {0}, "float32"
    assert "0 rows part" in cases["paired", "bubble+suffix"]["note"]
    assert cases["paired", "drafted tokens accepted"]["value"] > 0.5
    assert cases["trainer", "AdamW, first update"]["value"] < 1e-3
    note = cases["ticks", "gloo, 2 processes, ticks"]["note"]
    assert re.fullmatch(r"\d+ ticks in 10 steps", note)


def test_a_part_that_fails_or_takes_too_long_costs_its_own_rows(monkeypatch, tmp_path):
    def failing(bench):
        yield Figure("before", 1.0)
        raise RuntimeError("CUDA error:\n  an illegal memory access")

    clock = Clock()

    def endless(bench):
        while True:
            clock.sleep(0.2)
            yield Figure("again", 2.0)

    def simple(bench):
        yield Figure("only", 3.0, "ms")

    parts = {"failing": (failing, 9.0), "endless": (endless, 0.05), "simple": (simple, 9.0)}
    monkeypatch.setattr(gpu_suite, "PARTS", parts)
    monkeypatch.setattr(gpu_suite, "time", clock)
    out = tmp_path / "cpu.json"
    assert run_suite(monkeypatch, "--json", str(out)) == 0
    found = json.loads(out.read_text())["parts"]
    assert [row["value"] for row in found["failing"]["rows"]] == [1.0, None]
    message = "RuntimeError: CUDA error: an illegal memory access"
    assert found["failing"]["error"] == found["failing"]["rows"][1]["note"] == message
    assert found["endless"]["error"] == "stopped: its time was over"
    # 0.5 s of it, which is 0.05 s of a GPU.
    assert [row["value"] for row in found["endless"]["rows"]] == [2.0, 2.0, 2.0, None]
    assert found["simple"]["rows"] == [{"case": "only", "value": 3.0, "unit": "ms", "note": ""}]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--only", "decode", "speed"], "--only: no part speed; parts are parity, "),
        (["--json", "there.json"], "--json: there.json exists already; give another file"),
        (["--json", "no/such/folder/x.json"], "--json: no folder for no/such/folder/x.json"),
    ],
)
def test_bad_arguments_end_in_one_line(monkeypatch, tmp_path, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").write_text("kept")
    assert run_suite(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}") and error.count("\n") == 1
    assert (tmp_path / "there.json").read_text() == "kept"
