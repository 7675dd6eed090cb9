"""The user's own functions and classes, which configuration keys name by dotted path."""

import asyncio
import contextlib
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from bubblespec.errors import InputError, is_interrupt, one_line, shown


def import_path(key: str, path: str, example: str) -> Any:
    """Import `package.module.name`, the value of `key`, like `example`. Raises InputError."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise InputError(f"{key}: '{path}' is not a dotted path such as {example}")
    try:
        with keep_settings():
            return getattr(importlib.import_module(module_name), name)
    except BaseException as error:  # the module's own code runs here
        if is_interrupt(error):
            raise
        file = getattr(sys.modules.get(module_name), "__file__", None)
        where = f" ({file})" if file and isinstance(error, AttributeError) else ""
        raise InputError(f"{key}: cannot import '{path}': {one_line(error)}{where}") from error


def import_quietly(name: str) -> ModuleType:
    """Import a package without the warnings of its first compilation, which concern its authors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return importlib.import_module(name)


def import_function(key: str, path: str, example: str, arguments: tuple[str, ...] = ()) -> Callable:
    """arguments: names of the positional ones that it must take. Raises InputError."""
    function = import_path(key, path, example)
    if not callable(function) or isinstance(function, type):
        raise InputError(f"{key}: '{path}' is not a function")
    if arguments:
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            called = ", ".join(arguments)
            problem = f"cannot be called with ({called}): {shown(error, str)}"
            raise InputError(f"{key}: {path} {problem}") from error
        except ValueError:  # some that are written in C have no signature
            pass
    return function


def call(function: Callable, /, *arguments, **named) -> Any:
    """Call a user's function, await what it returns, and keep this process's settings."""
    with keep_settings():
        return awaited(function(*arguments, **named))


@contextlib.contextmanager
def without_input() -> Iterator[None]:
    """Context in which nothing is asked, while other ranks wait: standard input has no terminal."""
    before = sys.stdin
    try:
        with open(os.devnull) as sys.stdin:
            yield
    finally:
        sys.stdin = before


@contextlib.contextmanager
def keep_settings() -> Iterator[None]:
    """Context of the user's code: settings of this process that it changes are set back.

    An update needs gradients and the dtype of before, and relative paths their folder. Global
    generators of random numbers are left to the user's code: the run has its own."""
    before = [(get, set_, get()) for get, set_ in _settings()]
    try:
        yield
    finally:
        for get, set_, value in before:
            if get() != value:
                set_(value)


def _settings() -> Iterator[tuple[Callable[[], Any], Callable[[Any], object]]]:
    yield _folder, lambda path: path and os.chdir(path)
    if (numpy := sys.modules.get("numpy")) is not None:
        yield numpy.geterr, lambda value: numpy.seterr(**value)
    if (torch := sys.modules.get("torch")) is not None:
        yield torch.is_grad_enabled, torch.set_grad_enabled
        yield torch.get_default_dtype, torch.set_default_dtype
        # without a device of its own, torch has no hook in each of its functions
        device = torch.get_default_device
        yield device, lambda value: torch.set_default_device(value if value.type != "cpu" else None)
        yield torch.get_num_threads, torch.set_num_threads
        yield torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
        yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it is deleted
        return ""


_loop: asyncio.AbstractEventLoop | None = None


def awaited(value: Any) -> Any:
    """Return the value, or its result if it is awaitable.

    All coroutines of a process share one event loop: connections that they keep stay valid."""
    if not inspect.isawaitable(value):
        return value
    global _loop
    _loop = _loop or asyncio.new_event_loop()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _loop.run_until_complete(value)
    with ThreadPoolExecutor(1) as pool:  # in a notebook this thread has a loop that is running
        return pool.submit(_loop.run_until_complete, value).result()
