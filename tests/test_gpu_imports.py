"""GPU tests and suite with torch, transformers, numpy and pytest alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_suite import PARTS

ROOT = Path(__file__).resolve().parents[1]
FEW_PACKAGES = ROOT / "tests" / "helpers" / "few_packages"


def run_with_few_packages(*arguments: str) -> subprocess.CompletedProcess:
    """Run Python as if only these four packages were installed."""
    environment = os.environ | {"PYTHONPATH": str(FEW_PACKAGES), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def gpu_test_files() -> list[str]:
    files = sorted((ROOT / "tests").glob("test_*.py"))
    marked = [str(f) for f in files if "mark.gpu" in f.read_text() and f != Path(__file__)]
    assert len(marked) >= 5
    return marked


def test_other_packages_are_not_found():
    for package in ("omegaconf", "datasets", "scipy", "psutil", "pyarrow"):
        got = run_with_few_packages("-c", f"import {package}")
        assert f"No module named '{package}'" in got.stderr


def test_gpu_tests_are_collected_with_few_packages():
    """A test that is not marked gpu runs as well, to import the fixtures of all tests."""
    chosen = "bits_are_identical or float32_and_float64_noise_agree"
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen)
    got = run_with_few_packages(*options, *gpu_test_files())
    assert "error" not in got.stdout + got.stderr and got.returncode == 0, got.stdout + got.stderr
    assert "1 passed, 1 skipped" in got.stdout, got.stdout


def test_whole_gpu_suite_runs_with_few_packages(tmp_path):
    out = tmp_path / "cpu.json"
    got = run_with_few_packages("benchmarks/gpu_suite.py", "--cpu", "--json", str(out))
    assert got.returncode == 0, got.stderr
    parts = json.loads(out.read_text())["parts"]
    assert {name: part["error"] for name, part in parts.items()} == dict.fromkeys(PARTS)
    assert "skipped" in parts["tests"]["rows"][0]["note"]
    assert parts["programs"]["rows"][0]["note"].startswith("not run without omegaconf, datasets")
