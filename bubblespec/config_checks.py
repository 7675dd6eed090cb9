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
from typing import TYPE_CHECKING, Any, NamedTuple

from bubblespec.errors import InputError

if TYPE_CHECKING:
    from omegaconf import DictConfig

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
    schema: type,
    base: Any,
    overrides: list[str],
    source: str,
    removed: dict[str, str],
    foreign: dict[str, str],
) -> Any:
    """`schema` filled from `base` and then the overrides, each value within its bounds. source:
    what an error calls `base`; removed: former keys, and what took their place; foreign: names
    of other trainers, whole or the last part, and ours."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

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
                raise InputError(f"{source}: the key {section!r} is no text, so it is no section")
            if section in sections and not isinstance(values, dict):
                raise InputError(f"{section}: is a section, not a value")
            if section not in sections and not (values and isinstance(values, dict)):
                raise InputError(f"{section}: {_unknown(section, keys, foreign)}")
            for leaf, value in values.items():
                name = f"{section}.{leaf}"
                if name in removed:
                    raise InputError(f"{name}: there is no such key any more: {removed[name]}")
                if name not in keys:
                    name = _innermost(name, value)
                    raise InputError(f"{name}: {_unknown(name, keys, foreign)}")
                _put(config, name, value)
    try:
        for name in sorted(OmegaConf.missing_keys(config)):
            raise InputError(f"{name}: has no default, so it must be given")
        filled = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:  # a reference ${...} to what does not exist
        raise InputError(f"{error.full_key}: {_first_line(error)}") from error
    _check_bounds(filled)
    return filled


def _put(config: "DictConfig", name: str, value: Any) -> None:
    """Set a key. OmegaConf checks the type, and does not always know the whole name."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.update(config, name, value)
    except OmegaConfBaseException as error:
        name = error.full_key if str(error.full_key).startswith(name) else name
        problem = _first_line(error)
        if "ListConfig" in problem or "container types" in problem:
            problem = "is a list or a mapping; give it whole, as in [...] or {...}"
        raise InputError(f"{name}: {problem}") from error


def keys_of(schema: type) -> dict[str, dataclasses.Field]:
    """The field of each "section.key"."""
    sections = dataclasses.fields(schema)
    return {f"{s.name}.{f.name}": f for s in sections for f in dataclasses.fields(s.type)}


def _check_bounds(section: Any, prefix: str = "") -> None:
    """Each value against the bounds of its key, which null and auto need not meet. A text that
    cannot be null is not empty."""
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
    """Other trainers nest their keys deeper: the name of the first value."""
    while isinstance(value, dict) and value:
        leaf, value = next(iter(value.items()))
        name += f".{leaf}"
    return name


def _unknown(name: str, keys: Iterable[str], foreign: dict[str, str]) -> str:
    """What a key of another trainer is called here, the right name in the wrong section, or the key
    that is spelled most alike."""
    section, leaf = name.partition(".")[0], name.rpartition(".")[2]
    matches = sorted(key for key in keys if key.partition(".")[2] == leaf)
    if answer := foreign.get(name) or (not matches and foreign.get(leaf)):
        return f"unknown key; here it is {answer}"
    if len(matches) != 1:
        matches = difflib.get_close_matches(name, sorted(keys), n=1) or matches
    if matches:
        return f"unknown key; did you mean {' or '.join(matches)}?"
    valid = [key for key in keys if key.startswith(f"{section}.")]
    return f"unknown key; valid are {', '.join(sorted(valid or {k.split('.')[0] for k in keys}))}"


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
