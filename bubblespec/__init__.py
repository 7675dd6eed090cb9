"""bubblespec: a synchronous RL trainer for language models that fits on one node."""

import os
import sys


def own_folders_last() -> None:
    """Search the working folder, and then a script's own, after Python's modules and packages.

    Otherwise a file there that is named queue.py would be imported in place of Python's queue."""
    before = [] if sys.flags.safe_path else [sys.path.pop(0)]  # the one that Python puts first
    sys.path += dict.fromkeys([os.getcwd(), *before])
