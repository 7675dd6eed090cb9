"""Exceptions that end a run with lines instead of a traceback, and `log` for such lines."""

import contextlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

MAX_SHOWN = 500  # characters of a message or value of the user's code
# In messages of torch.OutOfMemoryError, of CUDA's errors, and of cuBLAS at its first call.
OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
# In CUDA's message for every later call in the capture of a graph that has failed.
CAPTURE_HAS_FAILED = "previous error during capture"
# In messages of errors after which a GPU computes nothing more in this process.
LOST = ("illegal memory access", "illegal instruction", "device-side assert", "ECC error")
LOST += ("unspecified launch failure", "misaligned address")


class EndsRun(Exception):
    """Ends the run with its message, one line, and with `exit_code`."""

    exit_code = 1
    is_logged = False  # whether this rank or another one has printed it

    def lines(self) -> list[str]:
        return [f"error: {line}" for line in str(self).splitlines() or [""]]


class InputError(EndsRun, ValueError):
    """An invalid configuration, file, model or reward. The message names it, a line for each."""

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """Replace the traceback in a notebook."""
        return self.lines()


class RewardsFailed(InputError):
    """A step has rewards that cannot be trained on; raised by all ranks, which save before."""


class RunFailed(EndsRun, RuntimeError):
    """Training cannot usefully continue. The message, equal on all ranks, has the reason."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


class RankTimeout(EndsRun, RuntimeError):
    """A rank hangs or has died; the message, equal on all other ranks, names it."""

    exit_code = 3


class Interrupt(KeyboardInterrupt):
    """A second Ctrl-C, by which a rank ends at once."""


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception comes from the keyboard, not from the user's own code.

    The handler of a run raises Interrupt; Python's own, of a notebook, what user code could,
    too."""
    has_own_handler = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    return isinstance(error, Interrupt if has_own_handler else KeyboardInterrupt)


_said_s = time.monotonic()  # when the last line was printed


def log(line: str) -> None:
    """Print a line to stderr; if that is on a full disk, the run continues without it."""
    global _said_s
    _said_s = time.monotonic()
    with contextlib.suppress(OSError):
        tqdm.write(escape(line), file=sys.stderr)  # not into a progress bar
        sys.stderr.flush()


def quiet_s() -> float:
    """Return the seconds since the last line of `log`."""
    return time.monotonic() - _said_s


def escape(text: str) -> str:
    """Return a text for UTF-8: half an emoji, which JSON can hold, becomes the text \\ud83d."""
    return text.encode("utf-8", "backslashreplace").decode()


def shown(value: object, form: Callable[[Any], str] = repr) -> str:
    """Return the beginning of a value's text on one line; the user's may have megabytes or none."""
    try:
        text = " ".join(escape(form(value)).split())
    except Exception:  # of its own __repr__ or __str__
        text = f"a {type(value).__name__} without text"
    return text[:MAX_SHOWN] + "..." * bool(text[MAX_SHOWN:])


def one_line(error: BaseException) -> str:
    """Return an error's kind and the beginning of its message, on one line."""
    return f"{type(error).__name__}: {shown(error, str)}".removesuffix(": ")


def first_cause(error: BaseException) -> BaseException:
    """Return the error of a chain that says why: the one about memory, if there is one.

    Otherwise the last one raised that is more than CUDA's note that a capture had failed before."""
    chain = list(_chain_of(error))
    of_memory = [of for of in chain if is_out_of_memory(one_line(of))]
    told = [of for of in chain if CAPTURE_HAS_FAILED not in one_line(of)]
    return (of_memory + told + chain)[0]


def is_out_of_memory(problem: BaseException | str) -> bool:
    """Whether an error, with those behind it, or a line about one, says that memory has run out."""
    if isinstance(problem, str):
        return any(text in problem for text in OUT_OF_MEMORY)
    return any(is_out_of_memory(one_line(of)) for of in _chain_of(problem))


def _chain_of(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop(0)
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            waiting += found.__cause__, found.__context__
            yield found


def gpu_problem(error: BaseException) -> str | None:
    """Return what a run cannot go on from: memory that has run out, a GPU or a kernel that fails.

    One line with what helps; None for other errors."""
    if is_out_of_memory(error):
        return (
            f"{one_line(first_cause(error))}; a smaller optim.max_tokens_per_microbatch, "
            "rollout.gpu_memory_utilization or rollout.max_num_seqs needs less"
        )
    for own in _chain_of(error):
        if is_lost(own) or type(own).__module__.startswith("triton."):
            return f"{one_line(own)}; model.kernels=torch takes torch's operations alone"
    return None


def is_lost(error: BaseException) -> bool:
    """Whether a GPU computes nothing more in this process."""
    return any(text in str(own) for own in _chain_of(error) for text in LOST)


def trace_of(error: BaseException) -> str:
    entries = traceback.format_exception(error)
    limit = 8 * MAX_SHOWN
    return "".join(e if len(e) <= limit else f"{e[:limit]}...\n" for e in entries)


def first_problem(own: str | None, gather_text: Callable[[str], list[str]]) -> str | None:
    """Return the problem of the first rank that has one, on all ranks. gather_text: see `Ranks`."""
    return next(filter(None, gather_text(own or "")), None)


def fallback(instead: str, problem: object, key: str) -> str:
    """Return a line about a slower fallback: what is used, why, and the key that avoids it."""
    return f"{instead}: {problem} ({key} tries nothing else)"
