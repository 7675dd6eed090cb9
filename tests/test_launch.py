"""python -m bubblespec train: torchrun's ranks, but the last line is the run's own."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bubblespec.checkpoint import list_checkpoints, step_of
from bubblespec.errors import InputError
from bubblespec.tools import launch
from tests.helpers.checks import PATIENCE_S, wait_until
from tests.helpers.warm import ROOT, SINGLE_THREADED, python

CONFIG = ["--config", "configs/tiny_cpu_bulk.yaml", "model.cpu_linear=torch", "eval.num_prompts=0"]
CONFIG += ["run.eval_steps=0", "rollout.num_prompts_per_step=4", "rollout.num_generations=2"]


@pytest.fixture
def start(tmp_path):
    """start(options of the launcher, *overrides) -> the process, in a group of its own."""
    processes = []

    def begin(options: list[str], *overrides: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "bubblespec", "train", *options, *CONFIG, *overrides]
        command.append(f"run.output_dir={tmp_path / 'out'}")
        options = {"env": os.environ | SINGLE_THREADED, "cwd": ROOT, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, **options, text=True, start_new_session=True))
        return processes[-1]

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
    begin = "starting the ranks ...\nimporting torch and transformers ...\n"
    assert (code, said) == (2, f"{begin}error: loss.beta: unknown key; here it is loss.kl_coef\n")


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


@pytest.mark.parametrize(
    "number, line",
    [
        (signal.SIGKILL, "error: rank 0 was killed by SIGKILL"),
        (signal.SIGTERM, "stopped after {} of 100000 updates; run the same command to resume"),
    ],
)
def test_signal_to_rank_alone_is_no_success(start, tmp_path, number, line):
    process = start([], "run.max_steps=100000")
    metrics = tmp_path / "out" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size)
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    with open(children) as file:
        (rank,) = (int(child) for child in file.read().split() if _is_rank(int(child)))
    os.kill(rank, number)
    code, said = end_of(process)
    assert code == 128 + number
    saved = [step_of(path) for path in list_checkpoints(str(tmp_path / "out"))]
    assert bool(saved) == (number == signal.SIGTERM)
    assert said.splitlines()[-1].endswith(line.format(*saved))


def _is_rank(pid: int) -> bool:
    with open(f"/proc/{pid}/cmdline") as file:
        return "train.py" in file.read()


def test_override_before_config_is_refused():
    done = python("-m", "bubblespec", "train", "run.seed=1", *CONFIG)
    assert done.returncode == 2 and "run.seed=1 must come after --config" in done.stderr


def test_code_is_of_the_rank_that_ended_by_itself(monkeypatch):
    """torchrun has ended rank 0 with SIGTERM in the same second."""
    ends = {0: SimpleNamespace(exitcode=-signal.SIGTERM, timestamp=7)}
    ends[1] = SimpleNamespace(exitcode=2, timestamp=7)

    def fail(options):
        raise launch.ChildFailedError("train.py", ends)

    monkeypatch.setattr(launch.ChildFailedError, "format_msg", lambda *_: "")
    monkeypatch.setattr(launch.run, "run", fail)
    monkeypatch.setattr(launch.logging, "disable", lambda level: None)
    with pytest.raises(SystemExit) as end:
        launch.main(CONFIG)
    assert end.value.code == 2


def test_script_of_another_package_is_refused(monkeypatch, tmp_path):
    """Where pip install has put the package, and another one its own train.py next to it."""
    script = tmp_path / "train.py"
    script.write_text("print('another')")
    monkeypatch.setattr(launch, "SCRIPT", script)
    with pytest.raises(InputError, match=f"^{script} does not exist, or is not of this package"):
        launch.main(CONFIG)


def test_launcher_needs_no_name_and_hands_on_signals(monkeypatch):
    """One machine, whose own name may have no address."""
    taken = []
    monkeypatch.setattr(launch.run, "run", taken.append)
    monkeypatch.setattr(launch.logging, "disable", lambda level: None)
    monkeypatch.setattr(launch.socket, "getfqdn", lambda: "no..host")
    launch.main(CONFIG)
    (options,) = taken
    assert options.local_addr == "127.0.0.1"
    handled = options.signals_to_handle.split(",")
    assert {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"} == set(handled)
    with pytest.raises(
        InputError, match=r"^--local-addr: the host name 'no\.\.host' has no address"
    ):
        launch.main(["--nnodes=2", *CONFIG])


@pytest.mark.parametrize(
    "option, code",
    [("--nproc-per-node=0", 2), ("--master-port", 3), ("--rdzv-endpoint=no..host:1", 2)],
)
def test_wrong_option_is_one_line(option, code):
    with socket.create_server(("localhost", 0)) as taken:
        option += "" if "=" in option else f"={taken.getsockname()[1]}"
        done = python("-m", "bubblespec", "train", option, *CONFIG)
    _, line = done.stderr.splitlines()
    assert done.returncode == code and line.startswith("error: ")


@pytest.mark.parametrize("command", [["-m", "bubblespec", "train"], ["train.py"]])
def test_ctrl_c_during_imports_ends_without_traceback(command):
    pipe = {"stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen([sys.executable, *command, *CONFIG], **pipe) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_until(lambda: "libtorch" in maps.read_text())
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGINT and said.splitlines() in (
        ["starting the ranks ..."],
        ["importing torch and transformers ..."],
    )
