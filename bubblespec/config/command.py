"""The command line of a program with a configuration: --config FILE [section.key=value ...]."""

import argparse
import re
from collections.abc import Sequence

from bubblespec.errors import InputError

OPTION = re.compile(r"--([a-z_]+\.[a-z_0-9.]+)(=.*)?", re.DOTALL)  # a key, written as an option


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Add --config and the overrides to a parser, and parse. Raises InputError."""
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="a key's value")
    refuse_dashes(arguments)
    return parser.parse_intermixed_args(arguments)


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
