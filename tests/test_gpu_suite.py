"""The GPU suite on a CPU: every part has figures, and failures cost their own rows."""

import csv
import itertools
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_forwards, gpu_programs, gpu_suite
from benchmarks.gpu_bench import Bench, Figure, make_bench
from bubblespec import memory
from bubblespec.tools.simulate.check import DECODE, read_cases
from bubblespec.tools.simulate.roofline import GPUS, MODELS, OWN, Model, roofline
from tests.helpers.clocks import Clock
from tests.helpers.graphs import stand_in
from tests.helpers.warm import launch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run_suite(monkeypatch):
    """Return a function that runs the suite on the CPU and returns the exit code."""

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
    """The only part that needs other packages; all others are in test_gpu_imports.py."""

    def run_program(*arguments: str):
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
        if arguments[: len(launcher)] != launcher:
            return launch(0, list(arguments)), 1.0
        done = launch(1, list(arguments[len(launcher) :]))
        done.returncode = int(done.returncode != 0)  # as torchrun's own
        return done, 1.0

    monkeypatch.setattr(gpu_programs, "run_program", run_program)
    out = tmp_path / "cpu.json"
    assert run_suite("--json", str(out), "--only", "programs") == 0
    cases = check_figures(json.loads(out.read_text()), capsys.readouterr().out)
    assert cases["programs", "doctor"]["note"].endswith("0 failed; exit code 0")
    failing = cases["programs", "an exception in a reward ends train.py after"]
    assert failing["note"] == "exit code 1, its traceback"


def test_failed_or_late_part_costs_no_other_rows(run_suite, monkeypatch, tmp_path):
    def failing(bench):
        yield Figure("before", 1.0)
        raise RuntimeError("CUDA error:\n  an illegal memory access")

    clock = Clock()

    def endless(bench):
        while True:
            clock.sleep(100.0)
            yield Figure("again", 2.0)

    parts = {"failing": (failing, 1.0), "endless": (endless, 150.0), "no time": (endless, 150.0)}
    parts = {name: gpu_suite.Part(*part) for name, part in parts.items()}
    monkeypatch.setattr(gpu_suite, "PARTS", parts)
    monkeypatch.setattr(gpu_suite, "TOTAL_S", 250.0)
    monkeypatch.setattr(gpu_suite, "time", clock)
    out = tmp_path / "cpu.json"
    assert run_suite("--json", str(out)) == 0
    found = json.loads(out.read_text())["parts"]
    values = {name: [row["value"] for row in part["rows"]] for name, part in found.items()}
    wanted = {"failing": [1.0, None], "endless": [2.0, 2.0, None], "no time": [2.0, None]}
    assert values == wanted
    message = "RuntimeError: CUDA error: an illegal memory access"
    assert found["failing"]["error"] == found["failing"]["rows"][1]["note"] == message
    assert found["endless"]["error"] == "stopped: no time was left"


def test_file_is_not_overwritten_and_limits_add_up(run_suite, tmp_path):
    out = tmp_path / "there.json"
    out.write_text("kept")
    assert run_suite("--json", str(out)) == 2 and out.read_text() == "kept"
    assert sum(part.limit_s for part in gpu_suite.PARTS.values()) <= gpu_suite.TOTAL_S <= 45 * 60


def test_expected_milliseconds_are_listed(run_suite, monkeypatch, capsys):
    monkeypatch.setitem(MODELS, "tiny", Model(2, 48, 64, 4, 2, 12, 300))
    bench = replace(make_bench(True), gpu="h200")
    monkeypatch.setattr(gpu_suite, "make_bench", lambda on_cpu: bench)
    assert run_suite("--only", "attention", "decode", "windows", "profile") == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    of_case = {cells[1]: cells for cells in lines if len(cells) == 6}
    cost = gpu_forwards.decode_seconds("h200", "tiny", 2, 40)
    assert float(of_case["tiny, 2 rows at 40, eager"][3]) == pytest.approx(1e3 * cost, rel=1e-3)
    for case in ("2 rows, window 3", "tiny, 2 rows at 40, host"):
        assert float(of_case[case][3]) > 0
    assert of_case["tiny, 2 rows at 40, products"][3] == ""
    # The engine's attention is expected, however it is called: tiles of 16 queries.
    computed_us = 2 * 2 * 16 / 64 / 132 / (4 / 3) * 300 / 64 * 1e6 * OWN.block_s * 0.8 * 12 / 128
    read_us = 1e6 * 2 * 300 * 2 * 2 * 2 * 12 / (OWN.keys_share * GPUS["h200"].memory)
    for how in ("apart", "in groups"):
        expected_us = float(of_case[f"tiny, 2 rows at 300, heads {how}"][3])
        assert expected_us == pytest.approx(math.hypot(computed_us, read_us), rel=1e-3)


@pytest.mark.parametrize("max_q, room", [(1, 3), (2, 3), (8, 8)])
def test_attention_is_independent_of_the_call(monkeypatch, max_q, room):
    """A stand-in of the engine's kernel has room for more sequences than there are rows."""
    stand_in(monkeypatch)
    reference = replace(make_bench(True), dtype=torch.float64)
    bench = replace(reference, kernels=["sdpa", "varlen"])
    cache = gpu_forwards.random_cache(bench, 3, 300, 2, 16)
    query = torch.randn(3, 4, 16, dtype=torch.float64)
    arguments = (query, cache, [1] * 3)
    wanted = gpu_forwards.attend(reference, *arguments, 3, 300, max_q)()
    got = gpu_forwards.attend(bench, *arguments, room, 300, max_q)()
    assert torch.allclose(got, wanted.reshape(3, 4, 16), rtol=0, atol=1e-9)


def test_times_of_kernels_and_gaps_add_up():
    kernels = [("copy", 0, 1), ("Memcpy HtoD", 10, 12), ("flash_fwd_kernel", 15, 25)]
    kernels += [("nvjet_tst", 25, 30), ("rms_norm", 130, 131), ("ampere_bf16_gemm", 128, 129)]
    found = gpu_forwards.time_by_kind(kernels)
    wanted = {"products": 6, "attention": 10, "copies": 2, "other kernels": 2}
    wanted |= {"short gaps": 9 + 3 + 1, "host": 98}
    assert found == pytest.approx({kind: us / 1e3 for kind, us in wanted.items()})
    assert sum(found.values()) == pytest.approx(131 / 1e3)


def test_peaks_measure_full_micro_batches(monkeypatch):
    seen = []

    def peak_of(action, device) -> int:
        seen.append(action)
        action()
        return len(seen)

    for module in (memory, gpu_programs):
        monkeypatch.setattr(module, "peak_of", peak_of)
    bench = make_bench(True)
    monkeypatch.setattr(Bench, "is_cuda", True)
    rows = [figure for figure in gpu_programs.updates(bench) if "peak" in figure.case]
    assert [row.value for row in rows] == [2e-9, 3e-9] and {row.expected for row in rows} == {1e-9}
    for action in seen[1:]:
        assert sum(action.args[0].sequence_lengths) == 256


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
        gpus, of = ("h200", "h100"), (model.lower(), *case[1:])
        h200, h100 = (gpu_forwards.decode_seconds(gpu, *of) for gpu in gpus)
        load = case[1], case[1], case[1] * case[2]
        attention_s = roofline("h200", model.lower()).attention.seconds(*load)
        estimates = [1e3 * h200, 1e3 * attention_s, h100 / h200]
        assert found[case][:2] == pytest.approx([measured[case], prototype[case]], abs=0.006)
        assert found[case][2:] == pytest.approx(estimates, rel=0.02, abs=0.006)
    cases = itertools.product(gpu_forwards.CONTEXTS.items(), gpu_forwards.DECODING_ROWS)
    assert found.keys() == {(model, rows, context) for (model, context), rows in cases}
