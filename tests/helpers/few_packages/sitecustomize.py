"""On PYTHONPATH: Python as it is where only torch, transformers, numpy, pytest and what these four
require are installed. Other installed packages are not found, in child processes either."""

import re
import sys
from importlib import metadata
from importlib.machinery import PathFinder

INSTALLED = ("torch", "transformers", "numpy", "pytest")


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_requirements(names: tuple[str, ...]) -> set[str]:
    """The distributions and all that they require, extras left out."""
    found, left = set(), list(names)
    while left:
        name = normalized(left.pop())
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform
            continue
        if name not in found:
            found.add(name)
            left += [re.match(r"[\w.-]+", text)[0] for text in required if "extra ==" not in text]
    return found


kept = with_requirements(INSTALLED) | {"bubblespec"}
owners = metadata.packages_distributions().items()
hidden = {module for module, names in owners if kept.isdisjoint(map(normalized, names))}


class Finder(PathFinder):
    """Finds none of the hidden modules."""

    @classmethod
    def find_spec(cls, name: str, path=None, target=None):
        is_hidden = name.partition(".")[0] in hidden
        return None if is_hidden else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
