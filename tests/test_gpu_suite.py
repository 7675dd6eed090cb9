"""The GPU suite on a CPU: every part has figures, and failures cost their own rows."""

import csv
import itertools
import json
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_bench, gpu_forwards, gpu_programs, gpu_suite
from benchmarks.gpu_bench import Bench, Figure, make_bench
from benchmarks.measured_costs import DECODE, read_cases
from bubblespec import memory
from bubblespec.engine import graphs
from bubblespec.learn.learner import Learner
from bubblespec.tools.simulate.roofline import roofline
from bubblespec.types import Load
from tests.helpers.clocks import Clock
from tests.helpers.graphs import stand_in
from tests.helpers.warm import launch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run_suite(monkeypatch):
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--cpu", *arguments])
        return gpu_suite.main()

    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)


def check_figures(result: dict, printed: str) -> dict[tuple[str, str], dict]:
    """Check that all figures are finite and printed; return rows by part and case."""
    cases = {}
    for name, part in result["parts"].items():
        assert part["error"] is None and part["rows"], name
        for row in part["rows"]:
            cases[name, row["case"]] = row
            if row["note"] != "needs a GPU":
                assert math.isfinite(row["value"]) and row["value"] >= 0, row
            assert f"| {name} | {row['case']} |" in printed
    return cases


def test_programs_have_figures(run_suite, monkeypatch, tmp_path, capsys):
    """The parts that need other packages; all others are in test_gpu_imports.py."""

    def run_program(bench, *arguments: str):
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
        if arguments[: len(launcher)] != launcher:
            return launch(0, list(arguments)), 1.0
        done = launch(1, list(arguments[len(launcher) :]))
        done.returncode = int(done.returncode != 0)  # as torchrun's own
        return done, 1.0

    monkeypatch.setattr(gpu_programs, "run_program", run_program)
    out = tmp_path / "cpu.json"
    assert run_suite("--json", str(out), "--only", "programs", "paired") == 0
    cases = check_figures(json.loads(out.read_text()), capsys.readouterr().out)
    assert cases["programs", "doctor"]["note"].endswith("0 failed; exit code 0")
    failing = cases["programs", "an exception in a reward ends train.py after"]
    assert failing["note"] == "exit code 1, its traceback"
    paired = [case for part, case in cases if part == "paired"]
    assert paired == [f"tiny, random weights, {of}" for of in ("step 0", "step 1", "a forward")]
    assert "0 of 6 rows differ" in cases["paired", paired[0]]["note"]


def test_failed_or_late_part_costs_no_other_rows(run_suite, monkeypatch, tmp_path):
    def failing(bench):
        yield Figure("before", 1.0)
        raise RuntimeError("CUDA error:\n  an illegal memory access")

    clock = Clock()

    def endless(bench):
        while True:
            clock.sleep(100.0)
            yield Figure("again", 2.0)

    parts = {"failing": (failing, 1.0), "endless": (endless, 300.0), "no time": (endless, 300.0)}
    parts = {name: gpu_suite.Part(*part) for name, part in parts.items()}
    monkeypatch.setattr(gpu_suite, "PARTS", parts)
    for module in (gpu_suite, gpu_bench):
        monkeypatch.setattr(module, "time", clock)
    out, minutes = tmp_path / "cpu.json", str(250 / 60)  # of 10: limits are 125 s
    assert run_suite("--json", str(out), "--minutes", minutes) == 0
    found = json.loads(out.read_text())["parts"]
    values = {name: [row["value"] for row in part["rows"]] for name, part in found.items()}
    wanted = {"failing": [1.0, None], "endless": [2.0, 2.0, None], "no time": [2.0, None]}
    assert values == wanted
    message = "RuntimeError: CUDA error: an illegal memory access"
    assert found["failing"]["error"] == found["failing"]["rows"][1]["note"] == message
    assert found["endless"]["error"] == "stopped: no time was left"


def test_forwards_are_timed_in_graphs(monkeypatch):
    """Graphs of the engine and of single kernels, by stand-ins of a GPU's."""

    timed = []

    def once(action, device) -> float:
        timed.append(action())
        return 1.0

    def capture(run, pool):
        """Capture a forward by the stand-in, and calls of single kernels here."""
        return captures(run, pool) if isinstance(run, partial) else (partial(once, run, None), None)

    captures = stand_in(monkeypatch)
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(gpu_forwards, "WINDOWS", (0, 3))
    monkeypatch.setattr(gpu_forwards, "CALLS", 2)
    monkeypatch.setattr(gpu_bench, "median_s", once)
    found = {figure.case: figure for figure in gpu_forwards.decoding(make_bench(True))}
    assert re.fullmatch(r"\d+ graphs", found["tiny, 2 rows at 40, first step"].note)
    assert captures.num_replays > 0
    timed.clear()
    cases = [figure.case for figure in gpu_forwards.kernels(make_bench(True))]
    assert len(cases) == 5 and timed.count(1.0) == 4  # of graphs: top_p has none


def test_times_of_kernels_and_gaps_add_up():
    """FlashAttention's names tell of CUTLASS, but are no products."""
    kernels = [("copy", 0, 1), ("Memcpy HtoD", 10, 12), ("flash_fwd<cutlass::bfloat16_t>", 15, 25)]
    kernels += [("nvjet_tst", 25, 30), ("_add_norm", 130, 131), ("ampere_bf16_gemm", 128, 129)]
    kernels += [("_attend", 131, 134), ("_merge", 134, 135), ("_sample_rows", 135, 136)]
    found = gpu_forwards.time_by_kind(kernels)
    wanted = {"products": 6, "attention": 14, "copies": 2, "other kernels": 1, "sampling": 1}
    wanted |= {"operations of layers": 1, "short gaps": 9 + 3 + 1, "host": 98}
    assert found == pytest.approx({kind: us / 1e3 for kind, us in wanted.items()})
    assert sum(found.values()) == pytest.approx(136 / 1e3)


def test_gpu_tests_that_time_out_keep_what_is_known(monkeypatch):
    lines = ["tests/a.py::one PASSED [ 30%]", "tests/a.py::two FAILED [ 60%]", "tests/a.py::three "]

    def run_program(bench, *arguments):
        raise subprocess.TimeoutExpired("pytest", 60.0, "\n".join(lines).encode())

    monkeypatch.setattr(gpu_programs, "run_program", run_program)
    rows = gpu_programs.gpu_tests(make_bench(True))
    first, second = next(rows), next(rows)
    assert first.note == "1 passed" and second.case.startswith("tests/a.py::two FAILED")
    with pytest.raises(RuntimeError, match="no time was left"):
        next(rows)


def test_peaks_measure_full_micro_batches(monkeypatch):
    fed, peaks, accumulate = [], itertools.count(1), Learner.accumulate_gradient

    def noted(learner, batch, *arguments):
        fed.append(sum(batch.sequence_lengths))
        return accumulate(learner, batch, *arguments)

    def peak_of(action, device) -> int:
        fed.clear()
        action()
        assert fed == [256]
        return next(peaks)

    monkeypatch.setattr(Learner, "accumulate_gradient", noted)
    monkeypatch.setattr(memory, "peak_of", peak_of)
    monkeypatch.setattr(gpu_programs, "kernels_of", lambda *_: [])
    bench = make_bench(True)
    monkeypatch.setattr(Bench, "is_cuda", True)
    rows = [figure for figure in gpu_programs.updates(bench) if "peak" in figure.case]
    assert [row.value for row in rows] == [2e-9, 3e-9] and {row.expected for row in rows} == {1e-9}


def test_guide_lists_measured_and_expected_figures():
    """Measured milliseconds, those of the prototype, and the roofline's estimates."""
    data = ROOT / "docs" / "results" / "data"
    with open(data / "h200.csv", encoding="utf-8", newline="") as file:
        measured = {
            (line["model"], int(line["rows"]), int(line["context"])): float(line["value"])
            for line in csv.DictReader(file)
            if (line["what"], line["how"]) == ("decode step", "graphs")
        }
    prototype = {
        (case.model, case.rows, case.context): 1e3 * case.seconds
        for case in read_cases(str(data / "h200_prototype.csv"))[0]
        if case.mode == DECODE
    }
    text = (ROOT / "docs" / "gpu-guide.md").read_text()
    row = r"^\| ([\d.]+B) \| (\d+) \| ([\d,]+) \| ([\d. |]+) \| x ([\d.]+) \|$"
    found = {}
    for model, rows, context, figures, ratio in re.findall(row, text, re.MULTILINE):
        case = model, int(rows), int(context.replace(",", ""))
        found[case] = [*map(float, figures.split(" | ")), float(ratio)]
        load = case[1], case[1], case[1] * case[2]
        whole = Load(*load[:2], 0, load[2])
        h200, h100 = (roofline(gpu, model.lower()).seconds(whole) for gpu in ("h200", "h100"))
        attention_s = roofline("h200", model.lower()).attention.seconds(*load)
        estimates = [1e3 * h200, 1e3 * attention_s, h100 / h200]
        assert found[case][:2] == pytest.approx([measured[case], prototype[case]], abs=0.006)
        assert found[case][2:] == pytest.approx(estimates, rel=0.02, abs=0.006)
    cases = itertools.product(gpu_forwards.CONTEXTS.items(), gpu_forwards.DECODING_ROWS)
    assert found.keys() == {(model, rows, context) for (model, context), rows in cases}
