"""Questions that several tests ask, and a full disk."""

import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bubblespec.errors import InputError

PATIENCE_S = 120.0  # for what must happen at some time


def refusal(function, *arguments) -> str:
    """The message of the InputError, one line, that function(*arguments) raises."""
    with pytest.raises(InputError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def pids_in(path: Path) -> list[int]:
    """The process numbers that were noted in a file, one in a line."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class FullDisk:
    """No file of this process can grow beyond `size` bytes: a write fails, as on a full disk."""

    def __init__(self, size: int):
        self.size = size

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)
