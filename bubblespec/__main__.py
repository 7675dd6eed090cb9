"""The commands: python -m bubblespec train|evaluate|generate|doctor|memory|simulate ..."""

import os
import sys

import bubblespec

if __name__ == "__main__":
    bubblespec.own_folders_last()

import importlib
import logging

from bubblespec import progress
from bubblespec.distributed.processes import end_early
from bubblespec.errors import EndsRun, InputError, log
from bubblespec.tools import COMMANDS, GONE, num_ranks, usage


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
    try:
        count = num_ranks(name, arguments)
    except InputError as error:
        log("\n".join(error.lines()))
        return error.exit_code
    if name == "train" or count > 1:
        progress.begin("starting the ranks")
    else:
        progress.begin("importing torch and transformers")  # here and below: that takes seconds
        import transformers

        transformers.utils.logging.disable_progress_bar()
    from bubblespec.distributed.failures import report

    if os.environ.get("RANK", "0") != "0":
        logging.disable(logging.WARNING)
    try:
        if count > 1:
            from bubblespec.tools.launch import run_command

            run_command(name, arguments, count)
            return 0
        return importlib.import_module(COMMANDS[name].module).main(arguments) or 0
    except EndsRun as error:  # one line
        return report(error)


if __name__ == "__main__":
    sys.exit(main())
