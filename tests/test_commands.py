"""The commands beside training."""

import pytest

from bubblespec.__main__ import COMMANDS
from tests.helpers.warm import launch, python


@pytest.mark.parametrize("name", COMMANDS)
def test_command_shows_usage(name):
    done = python("-m", "bubblespec", name, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: python -m bubblespec {name} ")


def test_unknown_command_lists_names():
    for arguments in ([], ["learn"]):
        done = launch(1, ["-m", "bubblespec", *arguments])
        assert done.returncode == 1
        assert done.stderr == "usage: python -m bubblespec doctor|memory|simulate|train|play ...\n"
