"""What fails on one rank ends all of them, wherever they are, under torchrun's own agent and with a
process group that nobody could shut down."""

import contextlib
import json
import signal
import socket
import sys
import threading

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import train
from bubblespec.distributed import failures
from bubblespec.distributed.failures import write_torchrun_error
from bubblespec.distributed.processes import STOP_SIGNALS
from bubblespec.distributed.ranks import ranks_from_environment
from bubblespec.errors import InputError, RankTimeout
from tests.helpers.runs import SHORT, launch_with_agent
from tests.helpers.warm import TIMEOUT_S

OPTIONS = [*SHORT, "rollout.max_completion_length=24", "eval.num_prompts=0", "run.save_steps=0"]
OPTIONS += ["reward.num_workers=1", "loss.loss_type=tests.system.failing_train.failing_loss"]
FAILED = "rank 1 failed (KeyError: 'a mistake in the {}')"


def run_failing(folder, kind: str) -> tuple[dict[str, int], str, str]:
    """The exit codes of ranks that ended by themselves, what was printed before torchrun's summary,
    and its root cause. None of the reward workers must be left."""
    codes = folder / "codes"
    codes.mkdir()
    script = ["tests/system/failing_train.py", "--kind", kind, "--codes", str(codes)]
    script += ["--config", "configs/tiny_cpu_bulk.yaml", *OPTIONS, f"run.output_dir={folder}/run"]
    code, said = launch_with_agent(script, rdzv_endpoint="localhost:0", max_restarts=0)
    assert code == [1], said[-3000:]
    assert "destroy_process_group was called" not in said
    before, _, root = said.partition("Root Cause")
    ended = {path.name: json.loads(path.read_text()) for path in codes.iterdir()}
    workers = [pid for _, pids in ended.values() for pid in pids]
    assert workers, "the test needs some"
    for pid in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker = psutil.Process(pid)
            if worker.status() != psutil.STATUS_ZOMBIE:
                worker.wait(TIMEOUT_S)
    return {rank: code for rank, (code, _) in ended.items()}, before, root


@pytest.mark.parametrize("kind, part", [("loss", "loss"), ("rollout", "engine")])
def test_exception_on_one_rank_ends_all(tmp_path, kind, part):
    """In the loss the other rank is blocked where it never notices by itself."""
    codes, said, root = run_failing(tmp_path, kind)
    assert codes == {"0": 3, "1": 1}
    own, other = f"KeyError: 'a mistake in the {part}'\n", f"error: {FAILED.format(part)}\n"
    assert said.index(own) < said.index(other), "first the traceback, then what it leads to"
    assert said.index("Traceback (most recent call last)") < said.index(own)
    assert "rank      : 1" in root and "exitcode  : 1" in root and own in root + "\n"


@pytest.mark.parametrize("kind", ["ctrl-c", "terminal"])
def test_second_ctrl_c_ends_all_ranks(tmp_path, kind):
    codes, said, root = run_failing(tmp_path, kind)
    assert codes == {"0": 130, "1": 130}
    assert "\nbubblespec.errors.Interrupt\n" in said
    assert "exitcode  : 130" in root or kind == "terminal"  # then torchrun has no summary


def test_hanging_rank_ends_with_the_reporting_rank(tmp_path):
    codes, said, root = run_failing(tmp_path, "hangs")
    assert codes == {"0": 3, "1": 3}
    line = "error: rank 1 missing in training of step 1 (no answer for 1 s); last heard: in "
    assert said.count(line) == 1 and "exitcode  : 3" in root and line in root


@pytest.fixture
def rank_of_one(monkeypatch):
    """The environment of the only rank of a job, whose store nobody has made."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0"}
    for name, value in {**address, "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("bubblespec.distributed.ranks.die_with_parent", lambda: None)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_normal_end_frees_graphs_then_destroys_the_group(rank_of_one, monkeypatch):
    """NCCL would wait for the graphs."""
    order, destroy = [], dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", lambda: (order.append("group"), destroy()))
    with ranks_from_environment("cpu", 60.0) as ranks:
        ranks.before_end.append(lambda: order.append("graphs"))
    assert order == ["graphs", "group"]


class Left(BaseException):
    """In place of the end of this process."""


@pytest.fixture
def codes(rank_of_one, monkeypatch) -> list[int]:
    """The exit codes of this process, which then goes on."""
    seen: list[int] = []

    def leave(code: int):
        seen.append(code)
        if threading.current_thread() is threading.main_thread():
            raise Left

    monkeypatch.setattr(failures.os, "_exit", leave)
    monkeypatch.setattr(failures, "_leaving", threading.Lock())
    yield seen
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "error, code, text",
    [
        (InputError("a wrong key"), 2, "error: a wrong key"),
        (ValueError("a mistake"), 1, "ValueError: a mistake"),
        (SystemExit(0), 1, "SystemExit: 0"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
    ],
)
def test_error_leaves_text_file_and_exit_code(
    codes, monkeypatch, capsys, tmp_path, error, code, text
):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with pytest.raises(Left), ranks_from_environment("cpu", 60.0) as ranks:
        ranks.before_end.append(lambda: pytest.fail("graphs are freed at a normal end only"))
        raise error
    assert codes == [code]
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == text and (lines[0] == "Traceback (most recent call last):") == (code != 2)
    shown = json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]
    assert shown.splitlines() == lines
    report = dist.distributed_c10d._get_default_store().get("watchdog/report").decode()
    assert report.startswith(f"rank 0 failed ({type(error).__name__}")


def test_error_while_freeing_graphs_leaves_process_running(codes, capsys):
    with pytest.raises(Left), ranks_from_environment("cpu", 60.0) as ranks:
        ranks.before_end.append(lambda: [][0])
    assert codes == [1] and dist.is_initialized()
    assert capsys.readouterr().err.endswith("IndexError: list index out of range\n")


def test_hanging_store_is_not_awaited(codes, monkeypatch, capsys):
    """After the text, which needs none of it."""
    ended, leave = threading.Event(), failures.os._exit

    def exit_ends_the_wait(code: int):
        ended.set()
        leave(code)

    monkeypatch.setattr(failures.os, "_exit", exit_ends_the_wait)
    monkeypatch.setattr(failures, "LEAVE_S", 0.01)
    monkeypatch.setattr(failures.Watchdog, "end_others", lambda *_: ended.wait(TIMEOUT_S))
    with pytest.raises(Left), ranks_from_environment("cpu", 60.0):
        raise ValueError("a mistake")
    assert codes[0] == 1 and ended.is_set()
    assert capsys.readouterr().err.endswith("ValueError: a mistake\n")


def test_failure_of_another_rank_is_no_root_cause(monkeypatch, tmp_path):
    """torchrun shows the failure with the earliest second."""
    seconds = []
    for error in (RankTimeout("rank 1 has failed"), ValueError("a mistake")):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        monkeypatch.setattr("bubblespec.distributed.failures.time.time", lambda: 7.9)
        write_torchrun_error(error)
        seconds.append(ProcessFailure(0, 1, 1, str(tmp_path / "error.json")).timestamp)
    assert seconds == [8, 7]


def test_torchrun_cannot_replace_exit_code(rank_of_one, monkeypatch):
    """It sends a SIGTERM as soon as another rank has ended."""
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append("SIGTERM"))
    monkeypatch.setattr(failures, "log", lambda line: signal.raise_signal(signal.SIGTERM))
    assert failures.report(InputError("a wrong key")) == 2
    signal.raise_signal(signal.SIGTERM)
    assert not received


@pytest.mark.parametrize(
    "variables, code, said",
    [
        # without a second rank, and without the one that makes the store
        ({"WORLD_SIZE": "2"}, 3, "rank 0: no key-value store of all ranks at 127.0.0.1:"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}, 3, "rank 1: no key-value store of"),
        ({"MASTER_ADDR": None}, 2, "torchrun"),
        ({"WORLD_SIZE": "two"}, 2, "torchrun"),
        ({"WORLD_SIZE": None}, 2, "torchrun"),
        ({"MASTER_ADDR": "no..host"}, 2, "MASTER_ADDR: the host name 'no..host' has no address"),
        ({"GLOO_SOCKET_IFNAME": "no0"}, 2, "GLOO_SOCKET_IFNAME: no network interface no0 has an"),
    ],
)
def test_failed_start_is_one_error_line(rank_of_one, monkeypatch, capsys, variables, code, said):
    """On every rank without a store: none can ask whether another one has printed it."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(failures, "CONNECT_S", 0.5)
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "configs/tiny_cpu.yaml"])
    assert train.main() == code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert line.startswith("error: ") and said in line
