"""Declarations of configuration keys (bounds, class on resume), and the code that fills and checks
sections by them.

No key is named here. A mistake is an `InputError` of one line that names the key.
"""

import copy
import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bubblespec.config_names import FOREIGN
from bubblespec.errors import InputError

MISSING: Any = "???"  # OmegaConf's value of a key without default
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
    """Return a lower bound. or_else: another valid value, which the message names."""
    text = f"at least {limit}" if or_else is None else f"{or_else}, or at least {limit}"
    return Bound(
        lambda value: value == or_else or (not isinstance(value, str) and value >= limit), text
    )


def above(limit: float) -> Bound:
    """Return a lower bound that is not valid itself."""
    return Bound(lambda value: value > limit, f"above {limit}")


def at_most(limit: float, why: str = "") -> Bound:
    """Return an upper bound. Without `why` the limit is technical: larger sizes overflow, or
    exhaust the machine before anything is checked."""
    return Bound(lambda value: value <= limit, f"at most {limit}{why and f' ({why})'}")


UINT64 = Bound(
    lambda value: value < 1 << 64, f"below {1 << 64} = 2**64: random numbers are keyed by 64 bits"
)
_FINITE = Bound(lambda value: not isinstance(value, float) or math.isfinite(value), "finite")


def key(default: Any, *bounds: Bound, resume: str = EXACT) -> Any:
    """Return a field of a section. bounds: on its value, or on each element of a list; resume: its
    class on resume."""
    metadata = {"bounds": bounds, "resume": resume}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def require(holds: bool, name: str, value: Any, what: str) -> None:
    """Raise an InputError that names the key and its valid values unless the condition holds."""
    if not holds:
        raise InputError(f"{name}: {value} must be {what}")


def fill(schema: type, base: Any, overrides: list[str], source: str) -> Any:
    """Fill `schema` from `base` and then the overrides, and check bounds. source: the name of
    `base` in errors."""
    layers = [base]
    for override in overrides:
        if not override.partition("=")[0].strip(". ") or "=" not in override:
            raise InputError(f"override '{override}' is not of the form section.key=value")
        try:
            layers.append(OmegaConf.from_dotlist([override]))
        except Exception as error:
            reason = " ".join(str(error).split())
            raise InputError(f"override '{override}': not valid YAML: {reason}") from error
    keys = keys_of(schema)
    sections = {key.partition(".")[0] for key in keys}
    config = OmegaConf.structured(schema)
    for layer in layers:
        given = OmegaConf.to_container(layer)
        if not isinstance(given, dict):
            found = type(given).__name__
            raise InputError(f"{source}: expected sections (model, data, ...), found {found}")
        for section, values in given.items():
            if not isinstance(section, str):  # YAML reads on, off, yes and no as true and false
                raise InputError(f"{source}: the key {section!r} is not text")
            if section in sections and not isinstance(values, dict):
                raise InputError(f"{section}: is a section; set its keys")
            if section not in sections and not (values and isinstance(values, dict)):
                raise InputError(f"{section}: {_unknown(section, keys)}")
            for leaf, value in values.items():
                name = f"{section}.{leaf}"
                if name not in keys:
                    name = _innermost(name, value)
                    raise InputError(f"{name}: {_unknown(name, keys)}")
                _put(config, name, value)
    try:
        for name in sorted(OmegaConf.missing_keys(config)):
            raise InputError(f"{name}: is required")
        filled = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:  # a reference ${...} to what does not exist
        raise InputError(f"{error.full_key}: {_first_line(error)}") from error
    _check_bounds(filled)
    return filled


def _put(config: DictConfig, name: str, value: Any) -> None:
    """Set a key. OmegaConf checks the type; its error may lack the whole name."""
    try:
        OmegaConf.update(config, name, value)
    except OmegaConfBaseException as error:
        name = error.full_key if str(error.full_key).startswith(name) else name
        problem = _first_line(error)
        if "ListConfig" in problem or "container types" in problem:
            problem = "is a list or a mapping; set all of it, as in [...] or {...}"
        raise InputError(f"{name}: {problem}") from error


def keys_of(schema: type) -> dict[str, dataclasses.Field]:
    """Return the field of each "section.key"."""
    sections = dataclasses.fields(schema)
    return {f"{s.name}.{f.name}": f for s in sections for f in dataclasses.fields(s.type)}


def _check_bounds(section: Any, prefix: str = "") -> None:
    """Check each value against the bounds of its key, except null and auto. A text that cannot be
    null must not be empty."""
    for field in dataclasses.fields(section):
        name, value = f"{prefix}{field.name}", getattr(section, field.name)
        if field.type is str and not value.strip():
            raise InputError(f"{name}: is empty")
        bounds = (_FINITE, *field.metadata.get("bounds", ()))
        items = {name: value}
        if isinstance(value, list):
            items = {f"{name}[{index}]": item for index, item in enumerate(value)}
        for key, item in items.items():
            if dataclasses.is_dataclass(item):
                _check_bounds(item, f"{key}.")
            elif item is not None and item != "auto":
                for bound in bounds:
                    require(bound.holds(item), key, item, bound.text)


def _innermost(name: str, value: Any) -> str:
    """Return the whole name of the first value, as other trainers nest keys deeper."""
    while isinstance(value, dict) and value:
        leaf, value = next(iter(value.items()))
        name += f".{leaf}"
    return name


def _unknown(name: str, keys: Iterable[str]) -> str:
    """Return our name of another trainer's key, the right section of a key, or the key with the
    most similar spelling."""
    section, leaf = name.partition(".")[0], name.rpartition(".")[2]
    matches = sorted(key for key in keys if key.partition(".")[2] == leaf)
    if answer := FOREIGN.get(name) or (not matches and FOREIGN.get(leaf)):
        return f"unknown key; here it is {answer}"
    if len(matches) != 1:
        matches = difflib.get_close_matches(name, sorted(keys), n=1) or matches
    if matches:
        return f"unknown key; did you mean {' or '.join(matches)}?"
    valid = [key for key in keys if key.startswith(f"{section}.")]
    return f"unknown key; valid are {', '.join(sorted(valid or {k.split('.')[0] for k in keys}))}"


def escape(value: Any) -> Any:
    """Escape `${` in all texts, so that it is not read as a reference."""
    if isinstance(value, dict):
        return {k: escape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [escape(v) for v in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
