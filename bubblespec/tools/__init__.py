"""The commands of `python -m bubblespec`, and their command line, which train.py shares."""

import argparse
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from bubblespec.errors import InputError

OPTION = re.compile(r"--([a-z_]+\.[a-z_0-9.]+)(=.*)?", re.DOTALL)  # a key, written as an option


class Command(NamedTuple):
    module: str  # module with its `main`, imported when the command runs, as imports take seconds
    purpose: str
    example: str  # arguments that work in a clone of the repository
    has_ranks: bool = False  # whether it runs on several, by --nproc-per-node


COMMANDS = {
    "train": Command(
        "bubblespec.tools.launch",
        "train on several ranks, as torchrun does with train.py",
        "--nproc-per-node 2 --config configs/tiny_cpu.yaml run.max_steps=2",
    ),
    "evaluate": Command(
        "bubblespec.tools.evaluate",
        "evaluate a checkpoint or a model on held-out prompts",
        "configs/tiny_policy --config configs/tiny_cpu.yaml eval.num_prompts=16",
        has_ranks=True,
    ),
    "generate": Command(
        "bubblespec.tools.generate",
        "generate responses of a checkpoint or a model to your own prompts",
        'configs/tiny_policy "State the final answer to the following arithmetic problem: 1 + 2 ="',
        has_ranks=True,
    ),
    "doctor": Command(
        "bubblespec.tools.doctor",
        "check whether this machine can run a configuration",
        "--config configs/tiny_cpu.yaml",
        has_ranks=True,
    ),
    "memory": Command(
        "bubblespec.tools.memory",
        "estimate the memory of one rank before a run",
        "--config configs/qwen2.5_7b.yaml --world-size 8 optim.shard_state=true",
    ),
    "simulate": Command(
        "bubblespec.tools.simulate.command",
        "simulate the rollouts of a run on any number of ranks",
        "--synthetic mean=2000,max=16000,run=500 --ranks 8 --cost-model h200:7b",
    ),
}
# Of earlier versions, and what does the same.
GONE = {
    "play": "play has gone: `transformers serve` and `transformers chat FOLDER` talk to a saved "
    "checkpoint; run.save_rollouts=true writes whole episodes",
}


def usage() -> str:
    """Return a line and an example for each command."""
    lines = ["usage: python -m bubblespec COMMAND ..., or COMMAND --help", ""]
    for name, command in COMMANDS.items():
        lines += [f"{name:9} {command.purpose}", f"{'':9} {_example_of(name)}"]
    return "\n".join(lines)


def make_parser(name: str, **options) -> argparse.ArgumentParser:
    """Return a command's parser, whose --help shows the example. options: of ArgumentParser."""
    purpose, example = COMMANDS[name].purpose, f"example: {_example_of(name)}"
    prog = f"python -m bubblespec {name}"
    as_written = argparse.RawDescriptionHelpFormatter  # on one line, to be copied
    parser = argparse.ArgumentParser(
        prog,
        description=purpose,
        epilog=example,
        formatter_class=as_written,
        allow_abbrev=not COMMANDS[name].has_ranks,  # `num_ranks` reads one option alone
        **options,
    )
    if COMMANDS[name].has_ranks:
        names, what = ("--nproc-per-node", "--nproc_per_node"), "ranks of this machine"
        parser.add_argument(*names, type=int, default=1, metavar="N", help=what)
    return parser


def _example_of(name: str) -> str:
    return f"python -m bubblespec {name} {COMMANDS[name].example}"


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str], needs_config: bool = True
) -> argparse.Namespace:
    """Add --config and the overrides to a parser, and parse. Raises InputError."""
    what = "YAML file, see configs/"
    parser.add_argument("--config", required=needs_config, metavar="FILE", help=what)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="a key's value")
    refuse_dashes(arguments)
    return parser.parse_intermixed_args(arguments)


def num_ranks(name: str, arguments: Sequence[str]) -> int:
    """Return how many ranks a command is to start: 1 for one that has none, or is one itself.

    Raises InputError."""
    if "RANK" in os.environ or not COMMANDS[name].has_ranks:
        return 1
    parser = make_parser(name, add_help=False)
    count = parser.parse_known_args(arguments)[0].nproc_per_node
    if count < 1:
        raise InputError(f"--nproc-per-node: {count} must be at least 1")
    return count


def refuse_dashes(arguments: Sequence[str]) -> None:
    """Raise InputError with the right form of each key that is written as an option."""
    lines = []
    for argument, after in zip(arguments, [*arguments[1:], "VALUE"], strict=True):
        if found := OPTION.fullmatch(argument):
            key, value = found.groups()
            given = "VALUE" if after.startswith("--") else after
            written = argument if value else f"{argument} {given}"
            lines.append(f"{written}: write {key}{value or f'={given}'}")
    if lines:
        raise InputError("\n".join(lines))
