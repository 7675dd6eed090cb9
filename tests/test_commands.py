"""The commands beside training."""

import os
import shlex
import subprocess
import sys

import pytest

from bubblespec.config.file import load_config
from bubblespec.distributed.worker import Worker
from bubblespec.errors import InputError
from bubblespec.tools import COMMANDS, GONE, refuse_dashes, usage
from tests.helpers.warm import ROOT, launch, python


@pytest.mark.parametrize("name", COMMANDS)
def test_command_shows_usage(name):
    done = python("-m", "bubblespec", name, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: python -m bubblespec {name} ")
    example = f"python -m bubblespec {name} {COMMANDS[name].example}\n"
    assert done.stdout.endswith(f"\nexample: {example}")
    words = shlex.split(COMMANDS[name].example)
    if "--config" in words:
        load_config(words[words.index("--config") + 1], [w for w in words if "." in w and "=" in w])


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_commands_are_listed_with_examples(arguments):
    done = launch(1, ["-m", "bubblespec", *arguments])
    assert (done.returncode, done.stdout) == (0, f"{usage()}\n")
    assert all(
        f"\n{name} " in usage() and command.example in usage() for name, command in COMMANDS.items()
    )


def test_unknown_command_lists_commands():
    done = launch(1, ["-m", "bubblespec", "learn"])
    assert (done.returncode, done.stderr) == (2, f"error: learn is no command\n{usage()}\n")


def test_commands_that_have_gone_are_answered_with_what_to_use():
    done = launch(1, ["-m", "bubblespec", "play", "--config", "configs/tiny_episodes.yaml"])
    assert (done.returncode, done.stderr) == (2, f"error: {GONE['play']}\n")


def test_key_with_dashes_is_answered_with_its_form():
    given = ["--run.max_steps", "2", "--data.path=a=b", "--run.trace", "--config", "x.yaml"]
    with pytest.raises(InputError) as error:
        refuse_dashes(given)
    assert str(error.value).splitlines() == [
        "--run.max_steps 2: write run.max_steps=2",
        "--data.path=a=b: write data.path=a=b",
        "--run.trace VALUE: write run.trace=VALUE",
    ]
    refuse_dashes(["--config", "a.b.yaml", "--nproc-per-node", "2", "run.seed=--1"])


@pytest.mark.parametrize("command", [["train.py"], ["-m", "bubblespec", "train"]])
def test_training_answers_key_with_dashes(command):
    done = python(*command, "--config", "configs/tiny_cpu.yaml", "--run.max_steps", "2")
    first, *others = done.stderr.splitlines()
    assert done.returncode == 2 and first.endswith(" ...")
    assert others == ["error: --run.max_steps 2: write run.max_steps=2"]


@pytest.mark.parametrize("count", ["0", "-1"])
def test_number_of_ranks_is_at_least_one(count):
    command = ["-m", "bubblespec", "evaluate", "a_model", "--nproc-per-node", count]
    done = python(*command)
    problem = f"error: --nproc-per-node: {count} must be at least 1\n"
    assert (done.returncode, done.stderr) == (2, problem)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder whose files have names of Python's modules."""
    for name in ("queue", "json", "ctypes"):
        (tmp_path / f"{name}.py").write_text("raise KeyError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_of_the_folder_hide_no_module(folder):
    command, environment = [sys.executable, "-m", "bubblespec"], {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{usage()}\n"), done.stderr


def test_files_of_the_folder_hide_nothing_in_workers(folder, monkeypatch):
    (folder / "own_echo.py").write_text("def make_answer(argument): return lambda _: argument")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    answers = []
    worker = Worker("own_echo", "an answer", "a.key")
    worker.jobs.put(lambda worker: answers.append((worker.start(), worker.ask(b"", 60.0))))
    worker.jobs.put(None)
    worker.thread.join()
    assert answers == [(None, "an answer")]
