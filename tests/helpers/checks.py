"""Questions that several tests ask."""

import pytest

from bubblespec.errors import InputError


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
