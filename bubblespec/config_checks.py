"""Declarations of configuration keys (bounds, class on resume), and the code that fills and checks
sections by them.

No key is named here. A mistake is an `InputError` of one line that names the key.
"""

import copy
import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bubblespec.errors import InputError

# What may happen if a run is continued from a checkpoint with another value of a key.
EXACT = "exact"  # other tokens or updates: refused
# the same sums in another order: a warning, as a run out of memory must be able to lower it
ROUNDING = "rounding"
SAFE = "safe"  # the same tokens and updates, with other timing or reports: accepted


class Bound(NamedTuple):
    """A condition on a value, and how a message states it."""

    holds: Callable[[Any], bool]
    text: str


def at_least(limit: float, or_else: Any = None) -> Bound:
    """or_else: another valid value, named in the message."""
    text = f"at least {limit}" if or_else is None else f"{or_else}, or at least {limit}"
    return Bound(
        lambda value: value == or_else or (not isinstance(value, str) and value >= limit), text
    )


def above(limit: float) -> Bound:
    return Bound(lambda value: value > limit, f"above {limit}")


def at_most(limit: float, why: str = "") -> Bound:
    """Without `why` it is a technical limit: larger sizes exhaust the machine before anything is
    checked, or overflow."""
    return Bound(lambda value: value <= limit, f"at most {limit}{why and f' ({why})'}")


UINT64 = Bound(
    lambda value: value < 1 << 64, f"below {1 << 64} = 2**64: random numbers are keyed by 64 bits"
)
_INT64 = Bound(
    lambda value: not isinstance(value, int) or value < 1 << 63,
    f"below {1 << 63} = 2**63: integers have 64 bits",
)
_FINITE = Bound(lambda value: not isinstance(value, float) or math.isfinite(value), "finite")


def key(default: Any, *bounds: Bound, resume: str = EXACT) -> Any:
    """A field of a section: its default, what its value (or each element of its list) must be, and
    its class on resume."""
    metadata = {"bounds": bounds, "resume": resume}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def require(holds: bool, name: str, value: Any, what: str) -> None:
    """An InputError that names the key and what its value must be, unless the condition holds."""
    if not holds:
        raise InputError(f"{name}: {value} must be {what}")


def fill(
    schema: type, base: Any, overrides: list[str], source: str, removed: dict[str, str]
) -> Any:
    """`schema` filled from `base` and then the overrides, each value within its bounds. source:
    what an error calls `base`; removed: former keys, and what took their place."""
    layers = [base]
    for override in overrides:
        if not override.partition("=")[0].strip(". ") or "=" not in override:
            raise InputError(f"override '{override}' is not of the form section.key=value")
        try:
            layers.append(OmegaConf.from_dotlist([override]))
        except Exception as error:
            reason = " ".join(str(error).split())
            raise InputError(f"override '{override}': not valid YAML: {reason}") from error
    merged = OmegaConf.structured(schema)
    for layer in layers:
        given = OmegaConf.to_container(layer)
        if not isinstance(given, dict):
            found = type(given).__name__
            raise InputError(f"{source}: expected sections (model, data, ...), found {found}")
        for name in removed:
            section, _, leaf = name.partition(".")
            if isinstance(values := given.get(section), dict) and leaf in values:
                raise InputError(f"{name}: there is no such key any more: {removed[name]}")
        _check_keys(given, schema, schema)
        merged = _merge(merged, layer)
    try:
        for name in sorted(OmegaConf.missing_keys(merged)):
            raise InputError(f"{name}: has no default, so it must be given")
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:  # a reference ${...} to what does not exist
        raise InputError(f"{error.full_key}: {_first_line(error)}") from error
    _check_bounds(config)
    return config


def _check_bounds(section: Any, prefix: str = "") -> None:
    """Each value against the bounds of its key, which null and auto need not meet. A text that
    cannot be null is not empty."""
    for field in dataclasses.fields(section):
        name, value = f"{prefix}{field.name}", getattr(section, field.name)
        if field.type is str and not value.strip():
            raise InputError(f"{name}: is empty")
        bounds = (_FINITE, *field.metadata.get("bounds", ()))
        bounds += () if UINT64 in bounds else (_INT64,)
        items = {name: value}
        if isinstance(value, list):
            items = {f"{name}[{index}]": item for index, item in enumerate(value)}
        for key, item in items.items():
            if dataclasses.is_dataclass(item):
                _check_bounds(item, f"{key}.")
            elif item is not None and item != "auto":
                for bound in bounds:
                    require(bound.holds(item), key, item, bound.text)


def _check_keys(given: dict, schema: type, root: type, prefix: str = "") -> None:
    """Raise InputError for unknown keys, naming the nearest valid one, and for lists and sections
    of the wrong type, which OmegaConf reports without the section or in terms of its own classes.

    root: the whole configuration, which has `schema` at `prefix`; a misplaced key is looked up in
    its sections.
    """
    types = typing.get_type_hints(schema)
    for leaf, value in given.items():
        name = f"{prefix}{leaf}"
        if leaf not in types:
            raise InputError(f"{name}: unknown key{_nearest(str(leaf), list(types), root, prefix)}")
        if dataclasses.is_dataclass(types[leaf]):
            if not isinstance(value, dict):
                raise InputError(f"{name}: is a section, not a value")
            _check_keys(value, types[leaf], root, f"{name}.")
        if typing.get_origin(types[leaf]) is dict and isinstance(value, list):
            raise InputError(f"{name}: is a mapping; give it whole, as in {name}={{name: value}}")
        element = _list_element(types[leaf])
        if element is None or value is None or str(value).startswith("${"):  # OmegaConf checks them
            continue
        if not isinstance(value, list):
            raise InputError(f"{name}: is a list; give it as a whole, as in {name}=[...]")
        for index, item in enumerate(value if dataclasses.is_dataclass(element) else []):
            if not isinstance(item, dict):
                raise InputError(f"{name}[{index}]: is a section, not a value")
            _check_keys(item, element, root, f"{name}[{index}].")
            _merge(OmegaConf.structured(element), item, f"{name}[{index}].")


def _merge(base: Any, layer: Any, prefix: str = "") -> Any:
    """OmegaConf's merge, which checks the types; `prefix` is the key of `base` itself."""
    try:
        return OmegaConf.unsafe_merge(base, layer)
    except OmegaConfBaseException as error:
        raise InputError(f"{prefix}{error.full_key}: {_first_line(error)}") from error


def _list_element(hint: Any) -> type | None:
    """The X of `list[X]` and `list[X] | None`."""
    lists = (part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is list)
    return next((typing.get_args(part)[0] for part in lists), None)


def _nearest(leaf: str, siblings: list[str], root: type, prefix: str) -> str:
    """The right name in the wrong section, else the key of the same section that is spelled most
    alike."""
    names = {
        f"{s.name}.{f.name}" for s in dataclasses.fields(root) for f in dataclasses.fields(s.type)
    }
    matches = sorted(name for name in names if name.endswith(f".{leaf}"))
    matches = matches or [f"{prefix}{m}" for m in difflib.get_close_matches(leaf, siblings, n=1)]
    if matches:
        return f"; did you mean {' or '.join(matches)}?"
    return f"; valid are {', '.join(sorted(siblings))}"


def escape(value: Any) -> Any:
    """`${` is written so that it is read as text, not as a reference; a backslash in front of it
    counts as an escape."""
    if isinstance(value, dict):
        return {k: escape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [escape(v) for v in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
