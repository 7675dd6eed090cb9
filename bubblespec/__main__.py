"""The commands beside training: python -m bubblespec doctor|memory|simulate|play ..."""

import runpy
import sys

COMMANDS = {
    "doctor": "bubblespec.tools.doctor",
    "memory": "bubblespec.memory",
    "simulate": "bubblespec.tools.simulate",
    "play": "bubblespec.tools.play",
}


def main() -> None:
    """Run the command that the first argument names, with the rest of the arguments."""
    name = sys.argv[1] if len(sys.argv) > 1 else None
    if name not in COMMANDS:
        sys.exit(f"usage: python -m bubblespec {'|'.join(COMMANDS)} ...")
    del sys.argv[1]
    runpy.run_module(COMMANDS[name], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
