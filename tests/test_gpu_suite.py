"""The GPU suite in its CPU form: every part has figures; failures and time's end cost their own
rows."""

import json
import math
import re
import sys

import torch
import torch.distributed as dist

from benchmarks import gpu_suite
from benchmarks.gpu_bench import Figure, make_bench
from bubblespec.dist.ranks import Ranks
from tests.helpers.clocks import Clock


def run_suite(monkeypatch, *arguments: str) -> int:
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--cpu", *arguments])
    try:
        return gpu_suite.main()
    finally:
        torch.set_num_threads(threads)


def test_every_part_measures_something(monkeypatch, tmp_path, capsys):
    def run_processes(measure, backend, world_size, is_small):
        """One process, which is this one."""
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            bench = make_bench(is_small)
            return measure(bench, Ranks(bench.device, 60.0))
        finally:
            dist.destroy_process_group()

    monkeypatch.setattr(gpu_suite, "run_processes", run_processes)
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
    parted = [row["value"] for (name, _), row in cases.items() if name == "composition"]
    assert set(parted) == {0}, "float32"
    note = cases["ticks", "gloo, 1 processes, ticks"]["note"]
    assert re.fullmatch(r"\d+ ticks in 10 steps", note)


def test_a_part_that_fails_or_takes_too_long_costs_its_own_rows(monkeypatch, tmp_path):
    def failing(bench):
        yield Figure("before", 1.0)
        raise RuntimeError("CUDA error:\n  an illegal memory access")

    clock = Clock()

    def endless(bench):
        while True:
            clock.sleep(gpu_suite.TOTAL_S / 2)
            yield Figure("again", 2.0)

    monkeypatch.setattr(gpu_suite, "PARTS", {"failing": failing, "endless": endless})
    monkeypatch.setattr(gpu_suite, "time", clock)
    out = tmp_path / "cpu.json"
    assert run_suite(monkeypatch, "--json", str(out)) == 0
    found = json.loads(out.read_text())["parts"]
    assert [row["value"] for row in found["failing"]["rows"]] == [1.0, None]
    message = "RuntimeError: CUDA error: an illegal memory access"
    assert found["failing"]["error"] == found["failing"]["rows"][1]["note"] == message
    assert found["endless"]["error"] == "stopped: no time was left"
    assert [row["value"] for row in found["endless"]["rows"]] == [2.0, 2.0, None]


def test_a_file_is_not_overwritten(monkeypatch, tmp_path):
    out = tmp_path / "there.json"
    out.write_text("kept")
    assert run_suite(monkeypatch, "--json", str(out)) == 2 and out.read_text() == "kept"
