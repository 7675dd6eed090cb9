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

from benchmarks import gpu_bench, gpu_forwards, gpu_programs, gpu_ranks, gpu_suite
from benchmarks.gpu_bench import Bench, Figure, make_bench
from benchmarks.measured_costs import DECODE, read_cases
from bubblespec import memory
from bubblespec.engine import graphs
from bubblespec.learn.learner import Learner
from bubblespec.tools.simulate.roofline import roofline, update_tokens_per_s
from bubblespec.types import Load
from tests.helpers.clocks import Clock
from tests.helpers.graphs import stand_in
from tests.helpers.warm import launch

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("doctor", "paired", "train")


@pytest.fixture
def run_suite(monkeypatch):
    """Run the suite with its parts in this process."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--cpu", *arguments])
        return gpu_suite.main()

    def launch_here(name: str, end_s: float, arguments, path: str) -> None:
        gpu_suite.measure(name, end_s, arguments.cpu, arguments.overrides, path)

    monkeypatch.setattr(gpu_suite, "launch", launch_here)
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

    launched = []

    def run_program(bench, *arguments: str):
        launched.append(arguments)
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
        if arguments[: len(launcher)] != launcher:
            return launch(0, list(arguments)), 1.0
        done = launch(1, list(arguments[len(launcher) :]))
        done.returncode = int(done.returncode != 0)  # as torchrun's own
        return done, 1.0

    monkeypatch.setattr(gpu_programs, "run_program", run_program)
    out = tmp_path / "cpu.json"
    override = "rollout.temperature=0.9"
    assert run_suite("--json", str(out), "--minutes", "60", override, "--only", *PROGRAMS) == 0
    assert all(override in arguments for arguments in launched) and len(launched) == 3
    cases = check_figures(json.loads(out.read_text()), capsys.readouterr().out)
    assert cases["doctor", "doctor"]["note"].endswith("warnings; exit code 0")
    failing = cases["train", "an exception in a reward ends train.py after"]
    assert failing["note"] == "exit code 1, its traceback"
    paired = [case for part, case in cases if part == "paired"]
    assert paired == [f"tiny, random weights, {of}" for of in ("step 0", "step 1", "a forward")]
    assert "0 of 6 rows differ" in cases["paired", paired[0]]["note"]


def test_parts_come_in_order_of_worth():
    order = ["doctor", "tests", "decode", "paired", "updates", "ranks"]
    assert list(gpu_suite.PARTS)[: len(order)] == order
    assert sum(part.limit_s for part in gpu_suite.PARTS.values()) == 60 * gpu_suite.MINUTES
    text = (ROOT / "docs" / "lab" / "README.md").read_text()
    listed = re.findall(r"^\| (\w+) \| (\d+) \|", text, re.MULTILINE)
    assert listed == [(name, f"{part.limit_s:.0f}") for name, part in gpu_suite.PARTS.items()]


def test_short_budget_lists_what_was_left_out(run_suite, monkeypatch, tmp_path, capsys):
    def failing(bench):
        yield Figure("before", 1.0)
        raise RuntimeError("CUDA error:\n  an illegal memory access")

    clock = Clock()

    def endless(bench):
        while True:
            clock.sleep(100.0)
            yield Figure("again", 2.0)

    def lacking(bench):
        yield gpu_bench.left_out("several", "one GPU only")

    parts = {"failing": (failing, 1.0), "lacking": (lacking, 1.0), "endless": (endless, 300.0)}
    parts |= {"shorter": (endless, 300.0), "last": (endless, 300.0)}
    parts = {name: gpu_suite.Part(*part) for name, part in parts.items()}
    monkeypatch.setattr(gpu_suite, "PARTS", parts)
    for module in (gpu_suite, gpu_bench):
        monkeypatch.setattr(module, "time", clock)
    out, minutes = tmp_path / "cpu.json", str(250 / 60)  # of 10: limits are 125 s
    assert run_suite("--json", str(out), "--minutes", minutes) == 1
    result = json.loads(out.read_text())
    found = result["parts"]
    values = {name: [row["value"] for row in part["rows"]] for name, part in found.items()}
    wanted = {"failing": [1.0, None], "lacking": [None], "endless": [2.0, 2.0, None]}
    assert values == wanted | {"shorter": [2.0, None]}
    message = "failed: RuntimeError: CUDA error: an illegal memory access"
    assert found["failing"]["error"] == found["failing"]["rows"][1]["note"] == message
    assert result["left_out"] == {
        "failing": message,
        "lacking, several": "one GPU only",
        "endless": "no time: stopped after 2 rows",
        "shorter": "no time: stopped after 1 rows",
        "last": "no time",
    }
    printed = capsys.readouterr().out.split("Left out:")[1]
    assert re.findall(r"^- (.+?): (.+)$", printed, re.MULTILINE) == [*result["left_out"].items()]
    # Without the part that fails nothing is wrong.
    assert run_suite("--minutes", minutes, "--only", *list(parts)[1:]) == 0


def test_keys_are_not_ignored_in_silence(run_suite, tmp_path):
    out = tmp_path / "cpu.json"
    assert run_suite("--json", str(out), "loss.beta=0.1", "--only", "kernels") == 0
    assert json.loads(out.read_text())["left_out"] == {
        "kernels, kernels": "it does not read loss.beta=0.1"
    }


DYING_PARTS = """
import os, signal, subprocess, sys, time

if "stuck" in sys.argv:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)", *sys.argv])
    time.sleep(10_000)

from benchmarks import gpu_suite
from benchmarks.gpu_bench import Figure

def killed(bench):
    yield Figure("before", 1.0)
    os.kill(os.getpid(), signal.SIGKILL)

def whole(bench):
    yield Figure("after", 2.0)

parts = {"stuck": None, "killed": killed, "whole": whole}
gpu_suite.PARTS = {name: gpu_suite.Part(part, 1.0) for name, part in parts.items()}
sys.exit(gpu_suite.main())
"""


def test_part_that_dies_or_hangs_stops_no_other(monkeypatch, tmp_path):
    """Each part is a process, of which nothing is left when it has died or was killed."""
    program, out = tmp_path / "suite.py", tmp_path / "out.json"
    program.write_text(DYING_PARTS)
    limits = {"stuck": 0.1, "killed": 500.0, "whole": 500.0}
    parts = {name: gpu_suite.Part(None, limit_s) for name, limit_s in limits.items()}
    monkeypatch.setattr(gpu_suite, "PARTS", parts)
    monkeypatch.setattr(gpu_suite, "STOP_S", 2.0)
    monkeypatch.setattr(gpu_suite, "LEAVE_S", 0.0)
    monkeypatch.setattr(sys, "argv", [str(program), "--cpu", "--json", str(out)])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert gpu_suite.main() == 1
    result = json.loads(out.read_text())
    found = {name: [row["value"] for row in part["rows"]] for name, part in result["parts"].items()}
    assert found == {"stuck": [None], "killed": [1.0, None], "whole": [2.0]}
    assert result["left_out"] == {
        "stuck": "failed: killed, as it did not stop",
        "killed": "failed: killed by SIGKILL",
    }
    processes = subprocess.run(["ps", "ax", "-o", "command"], capture_output=True, text=True)
    assert str(program) not in processes.stdout


def test_one_gpu_and_small_cards_leave_cases_out(monkeypatch):
    """7B weights and many rows do not fit on 24 GB; several ranks need several GPUs."""
    bench = Bench(torch.device("cpu"), torch.bfloat16, "sdpa", False, "rtx4090", 24e9)
    assert bench.policy == "0.5B" and not bench.decoding_fits("7B", 128, 4096)
    assert bench.decoding_fits("7B", 16, 4096) and bench.decoding_fits("1.5B", 128, 3072)
    assert not Bench(bench.device, bench.dtype, "sdpa", False, "l4", 18e9).decoding_fits(
        "7B", 16, 4096
    )
    monkeypatch.setattr(Bench, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (row,) = gpu_ranks.tp_tail(bench)
    assert row.value is None and row.note == "left out: one GPU only"


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", None),
    ],
)
def test_cards_are_found_by_whole_words(card, name):
    assert gpu_bench.gpu_of(card) == name


def test_smollm2_has_random_weights_without_a_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_programs, "SMOLLM2", str(tmp_path / "absent"))
    monkeypatch.setattr(gpu_programs, "snapshot_download", lambda *_, **__: "from the hub")
    assert gpu_programs.smollm2_path() == "from the hub"

    def offline(*_, **__):
        raise ConnectionError

    monkeypatch.setattr(gpu_programs, "snapshot_download", offline)
    assert gpu_programs.smollm2_path() is None
    monkeypatch.setattr(gpu_programs, "SMOLLM2", str(tmp_path))
    assert gpu_programs.smollm2_path() == str(tmp_path)


def test_forwards_are_timed_in_graphs(monkeypatch):
    """Graphs of the engine and of single kernels, by stand-ins of a GPU's."""

    timed = []

    def once(action, *_) -> float:
        timed.append(action())
        return 1.0

    def capture(run, memory=None):
        """Capture a forward by the stand-in, and calls of single kernels here."""
        return partial(once, run, None) if memory is None else captures(run, memory)

    captures = stand_in(monkeypatch)
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(gpu_forwards, "WINDOWS", (0, 3))
    monkeypatch.setattr(gpu_forwards, "CALLS", 2)
    monkeypatch.setattr(Bench, "seconds", lambda bench, action: once(action))
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
    with pytest.raises(TimeoutError, match="no time left"):
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


def decode_load(rows: int, context: int, window: int) -> Load:
    """Rows that decode, or verify `window` draft tokens each."""
    wide_rows = rows if window else 0
    return Load(rows, rows * (window + 1), wide_rows, rows * context, 0, rows * window)


def test_guide_lists_measured_and_expected_figures():
    """Measured milliseconds, those of the prototype, and the roofline's estimates."""
    data = ROOT / "docs" / "lab" / "data"
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
    text = (ROOT / "docs" / "lab" / "gpu-times.md").read_text()
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
    small = {}
    row = r"^\| ([\d.]+B) \| (\d+) \| ([\d,]+) \| ([\d. |]+) \|$"
    for model, rows, context, figures in re.findall(row, text, re.MULTILINE):
        case = int(rows), int(context.replace(",", ""))
        small[model, *case] = [*map(float, figures.split(" | "))]
        expected = [
            1e3 * roofline(gpu, model.lower()).seconds(decode_load(*case, window))
            for gpu in ("rtx4090", "l4")
            for window in gpu_forwards.WINDOWS
        ]
        assert small[model, *case] == pytest.approx(expected, abs=0.06)
    assert small.keys() == {case for case in found if case[0] != "7B"}
    speeds = re.search(r"update of the 0.5B ([\d,]+) and ([\d,]+) tokens per second", text)
    for gpu, speed in zip(("rtx4090", "l4"), speeds.groups(), strict=True):
        expected = pytest.approx(update_tokens_per_s(gpu, "0.5b"), abs=60)
        assert int(speed.replace(",", "")) == expected
    assert found.keys() == {(model, rows, context) for (model, context), rows in cases}
