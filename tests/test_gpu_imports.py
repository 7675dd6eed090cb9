"""GPU tests and suite with torch, transformers, numpy and pytest alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from test_gpu_suite import PROGRAMS, check_figures

from benchmarks.gpu_programs import gpu_test_files
from benchmarks.gpu_suite import PARTS

ROOT = Path(__file__).resolve().parents[1]
FEW_PACKAGES = ROOT / "tests" / "helpers" / "few_packages"


def run_with_few_packages(*arguments: str) -> subprocess.CompletedProcess:
    """Run Python as if only these four packages were installed."""
    environment = os.environ | {"PYTHONPATH": str(FEW_PACKAGES), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_other_packages_are_not_found():
    for package in ("omegaconf", "datasets", "scipy", "psutil", "pyarrow"):
        got = run_with_few_packages("-c", f"import {package}")
        assert f"No module named '{package}'" in got.stderr


def test_gpu_tests_are_collected_with_few_packages():
    """A test that is not marked gpu runs as well, to import the fixtures of all tests."""
    names = [Path(file).stem for file in gpu_test_files()]
    assert names[0] == "test_triton_ops" and {"test_triton_training", "test_device_rows"} < {*names}
    chosen = "bits_are_identical or float32_and_float64_noise_agree"
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen)
    got = run_with_few_packages(*options, *gpu_test_files())
    assert "error" not in got.stdout + got.stderr and got.returncode == 0, got.stdout + got.stderr
    # triton, whose tests are skipped as a file, comes with torch only where that is for GPUs.
    assert re.search("1 passed, [1-5] skipped", got.stdout), got.stdout


# Parts in one process, of which each would import torch for itself.
IN_ONE_PROCESS = """
import sys
from benchmarks import gpu_suite

def launch(name, end_s, arguments, path):
    gpu_suite.measure(name, end_s, arguments.cpu, arguments.overrides, path)

gpu_suite.launch = launch
sys.exit(gpu_suite.main())
"""


def test_whole_gpu_suite_runs_with_few_packages(tmp_path):
    out = tmp_path / "cpu.json"
    suite = "-c", IN_ONE_PROCESS, "--cpu", "--minutes", "60", "--json", str(out)
    got = run_with_few_packages(*suite)
    assert got.returncode == 0, got.stdout + got.stderr
    result = json.loads(out.read_text())
    assert len(result["left_out"]) == len(PROGRAMS)
    assert list(result["parts"]) == list(PARTS)
    assert result["versions"]["torch"] == torch.__version__
    assert result["kernel"] == "sdpa" and result["is_small"]
    for name in PROGRAMS:
        (row,) = result["parts"].pop(name)["rows"]
        assert row["note"].startswith("left out: needs omegaconf, datasets")
    cases = check_figures(result, got.stdout)
    assert "skipped" in cases["tests", "pytest -m gpu"]["note"]
    parted = [row["value"] for (name, _), row in cases.items() if name == "composition"]
    assert set(parted) == {0}, "float32"
    assert cases["updates", "parameters that differ when repeated"]["value"] == 0
    assert cases["ranks", "2 ranks, 1 rows together, eager"]["value"] > 0
