"""The commands beside training: their present and former names."""

import pytest

from bubblespec.__main__ import COMMANDS
from tests.helpers.warm import launch, python


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_one_name(name):
    done = python("-m", "bubblespec", name, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: python -m bubblespec {name} ")
    if name == "train":
        return  # the newest
    done = python("-m", f"bubblespec.{name}", "--config", "configs/tiny_cpu.yaml")
    assert done.returncode == 1 and not done.stdout
    error = f"error: python -m bubblespec.{name} is now python -m bubblespec {name}\n"
    assert done.stderr.endswith(error)


def test_unknown_command_lists_names():
    for arguments in ([], ["learn"]):
        done = launch(1, ["-m", "bubblespec", *arguments])
        assert done.returncode == 1
        assert done.stderr == "usage: python -m bubblespec doctor|memory|simulate|train|play ...\n"
