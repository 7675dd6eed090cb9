"""The user's own functions and classes, which configuration keys name by dotted path."""

import asyncio
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from bubblespec.errors import InputError, one_line


def import_path(key: str, path: str, example: str) -> Any:
    """Import `package.module.name`, the value of `key`.

    example: a valid path, for the message. Raises InputError."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise InputError(f"{key}: '{path}' is not a dotted path such as {example}")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # the module's own code runs here
        raise InputError(f"{key}: cannot import '{path}': {one_line(error)}") from error


def import_function(key: str, path: str, example: str, arguments: tuple[str, ...] = ()) -> Callable:
    """Import a function.

    arguments: names of the positional arguments that it must take. Raises InputError."""
    function = import_path(key, path, example)
    if not callable(function) or isinstance(function, type):
        raise InputError(f"{key}: '{path}' is not a function")
    if arguments:
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            called = ", ".join(arguments)
            problem = f"cannot be called with ({called}): {error}"
            raise InputError(f"{key}: {path} {problem}") from error
        except ValueError:  # some that are written in C have no signature
            pass
    return function


_loop: asyncio.AbstractEventLoop | None = None


def awaited(value: Any) -> Any:
    """Return the value, or its result if it is awaitable.

    All coroutines of a process share one event loop, so that connections which they keep open stay
    valid."""
    if not inspect.isawaitable(value):
        return value
    global _loop
    _loop = _loop or asyncio.new_event_loop()
    return _loop.run_until_complete(value)
