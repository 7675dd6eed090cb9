"""The GPU suite in its CPU form: every part has figures, or says what it needs; failures and time's
end cost their own rows."""

import json
import math
import re
import sys

import pytest
import torch

from benchmarks import gpu_suite
from benchmarks.gpu_suite import NEEDS_CUDA, Figure
from tests.helpers.clocks import Clock


def run_suite(monkeypatch, *arguments: str) -> int:
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--cpu", *arguments])
    try:
        return gpu_suite.main()
    finally:
        torch.set_num_threads(threads)


def test_every_part_measures_something(monkeypatch, tmp_path, capsys):
    out = tmp_path / "cpu.json"
    assert run_suite(monkeypatch, "--json", str(out)) == 0
    result = json.loads(out.read_text())
    assert (
        result["versions"]["torch"] == torch.__version__
        and result["kernels"] == ["sdpa"]
        and result["is_small"]
    )
    assert list(result["parts"]) == list(gpu_suite.PARTS)
    printed = capsys.readouterr().out
    for name, part in result["parts"].items():
        assert part["error"] is None, name
        values = [row["value"] for row in part["rows"] if row["value"] is not None]
        assert values and all(math.isfinite(v) and v >= 0 for v in values), name
        for row in part["rows"]:
            assert row["value"] is not None or row["note"] == NEEDS_CUDA, row
            assert f"| {name} | {row['case']} |" in printed
    cases = {
        (name, row["case"]): row for name, part in result["parts"].items() for row in part["rows"]
    }
    assert cases["parity", "bfloat16 varlen"]["note"] == NEEDS_CUDA
    assert 0 < cases["parity", "bfloat16 sdpa"]["value"] < 0.2
    assert all(
        row["value"] == 0
        for (name, _), row in cases.items()
        if name == "composition" and row["unit"]
    ), "float32"
    assert (
        "0 rows part" in cases["paired", "bubble+suffix"]["note"]
        and cases["paired", "drafted tokens accepted"]["value"] > 0.5
    )
    assert cases["trainer", "AdamW, first update"]["value"] < 1e-3
    assert re.fullmatch(
        r"\d+ ticks in 60 steps", cases["ticks", "gloo, 2 processes, ticks"]["note"]
    )


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
    assert (
        found["failing"]["error"]
        == found["failing"]["rows"][1]["note"]
        == "RuntimeError: CUDA error: an illegal memory access"
    )
    assert found["endless"]["error"] == "stopped: its time was over"
    assert [row["value"] for row in found["endless"]["rows"]] == [2.0, 2.0, 2.0, None], (
        "0.5 s of it, which is 0.05 s of a GPU"
    )
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
