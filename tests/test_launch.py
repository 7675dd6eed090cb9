"""python -m bubblespec train: torchrun's ranks, but the last line is the run's own."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.helpers.checks import wait_until
from tests.helpers.warm import ROOT, SINGLE_THREADED, python

CONFIG = ["--config", "configs/tiny_cpu_bulk.yaml", "model.cpu_linear=torch", "eval.num_prompts=0"]
CONFIG += ["run.eval_steps=0", "rollout.num_prompts_per_step=4", "rollout.num_generations=2"]


@pytest.fixture
def start(tmp_path):
    """start(options of the launcher, *overrides) -> the process, in a group of its own, as a
    terminal has it."""
    processes = []

    def begin(options: list[str], *overrides: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "bubblespec", "train", *options, *CONFIG, *overrides]
        process = subprocess.Popen(
            [*command, f"run.output_dir={tmp_path / 'out'}"],
            cwd=ROOT,
            env=os.environ | SINGLE_THREADED,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def end_of(process: subprocess.Popen) -> tuple[int, str]:
    """Exit code and what it said; there is no traceback and no log of the launcher."""
    _, said = process.communicate(timeout=300)
    assert "Traceback" not in said and "torch/distributed" not in said, said
    return process.returncode, said


def test_bad_key_is_the_last_line_with_exit_code_2(start):
    code, said = end_of(start([], "loss.beta=1"))
    assert (code, said) == (2, "error: loss.beta: unknown key; here it is loss.kl_coef\n")


def test_ctrl_c_ends_with_the_summary_of_the_run(start, tmp_path):
    process = start(["--nproc_per_node=2", "--shutdown-timeout=200"], "run.max_steps=100000")
    metrics = tmp_path / "out" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size)
    os.killpg(process.pid, signal.SIGINT)
    code, said = end_of(process)
    assert code == -signal.SIGINT  # for a shell 130, and the end of its script
    (steps,) = re.findall(
        r"^stopped after (\d+) of 100000 updates; run the same", said.splitlines()[-1]
    )
    assert (tmp_path / "out" / f"checkpoint-{steps}").exists()


def test_killed_rank_is_named(start, tmp_path):
    process = start([], "run.max_steps=100000")
    metrics = tmp_path / "out" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size)
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    with open(children) as file:
        (rank,) = (int(child) for child in file.read().split() if _is_rank(int(child)))
    os.kill(rank, signal.SIGKILL)
    code, said = end_of(process)
    assert code == 128 + signal.SIGKILL
    assert said.splitlines()[-1].endswith("error: rank 0 was killed by SIGKILL")


def _is_rank(pid: int) -> bool:
    with open(f"/proc/{pid}/cmdline") as file:
        return "train.py" in file.read()


def test_override_before_config_is_refused():
    done = python("-m", "bubblespec", "train", "run.seed=1", *CONFIG)
    assert done.returncode == 2 and "run.seed=1 must come after --config" in done.stderr
