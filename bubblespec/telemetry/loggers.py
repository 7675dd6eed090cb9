"""Loggers that run.log_to names: functions that pass lines of metrics on to a package."""

import atexit
import importlib
import os
from collections.abc import Callable
from typing import Any

from bubblespec.config import Config, flatten
from bubblespec.errors import InputError

PACKAGES = ("wandb", "trackio")  # which have the same functions


def make_logger(package: str, config: Config) -> Callable[[dict[str, Any]], None]:
    """Return a function that logs lines of metrics. Raises InputError without the package.

    The run begins with the first line and is named after run.output_dir. Its project is that of
    WANDB_PROJECT or TRACKIO_PROJECT, else bubblespec."""
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        problem = f"{package} cannot be imported ({error}); pip install {package}"
        raise InputError(f"run.log_to: {problem}") from error
    project = os.environ.get(f"{package.upper()}_PROJECT", "bubblespec")
    name = os.path.basename(os.path.abspath(config.run.output_dir))
    runs: list[Any] = []

    def log(metrics: dict[str, Any]) -> None:
        if not runs:
            runs.append(None)  # one attempt, as each may wait for a network
            options = {"config": flatten(config), "resume": "allow"}
            runs[0] = module.init(project=project, name=name, **options)
            atexit.register(module.finish)
        if runs[0] is not None:
            runs[0].log(metrics, step=metrics["step"])

    return log
