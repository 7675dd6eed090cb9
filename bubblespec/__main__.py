"""The commands: python -m bubblespec train|doctor|memory|simulate|play ..."""

import importlib
import logging
import os
import sys

from bubblespec.distributed.processes import end_early
from bubblespec.errors import EndsRun

COMMANDS = {
    "doctor": "bubblespec.tools.doctor.command",
    "memory": "bubblespec.tools.memory",
    "simulate": "bubblespec.tools.simulate.command",
    "train": "bubblespec.tools.launch",
    "play": "bubblespec.tools.play",
}


def main() -> int:
    """Run the command that the first argument names. Return the exit code: 2 for bad input."""
    end_early()
    name, *arguments = sys.argv[1:] or [""]
    if name not in COMMANDS:
        sys.exit(f"usage: python -m bubblespec {'|'.join(COMMANDS)} ...")
    import transformers  # here and below, as imports take seconds

    from bubblespec.distributed.failures import report

    transformers.utils.logging.disable_progress_bar()
    if os.environ.get("RANK", "0") != "0":
        logging.disable(logging.WARNING)
    try:
        return importlib.import_module(COMMANDS[name]).main(arguments) or 0
    except EndsRun as error:  # one line
        return report(error)


if __name__ == "__main__":
    sys.exit(main())
