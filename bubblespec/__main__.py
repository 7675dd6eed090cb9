"""The commands: python -m bubblespec train|doctor|memory|simulate ..."""

import os
import sys

import bubblespec

if __name__ == "__main__":
    bubblespec.own_folders_last()

import importlib
import logging

from bubblespec.distributed.processes import end_early
from bubblespec.errors import EndsRun
from bubblespec.tools import COMMANDS, GONE, usage


def main() -> int:
    """Run the command that the first argument names. Return the exit code: 2 for bad input."""
    end_early()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in COMMANDS:
        if is_help := name in ("-h", "--help", "help"):
            print(usage())
        else:
            problem = GONE.get(name, f"{name} is no command\n{usage()}")
            print(f"error: {problem}", file=sys.stderr)
        return 0 if is_help else 2
    import transformers  # here and below, as imports take seconds

    from bubblespec.distributed.failures import report

    transformers.utils.logging.disable_progress_bar()
    if os.environ.get("RANK", "0") != "0":
        logging.disable(logging.WARNING)
    try:
        return importlib.import_module(COMMANDS[name].module).main(arguments) or 0
    except EndsRun as error:  # one line
        return report(error)


if __name__ == "__main__":
    sys.exit(main())
