"""Declarations of configuration keys: bounds and forms of values, and their class on resume."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

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
    return Bound(lambda value: value > limit, f"above {limit}")


def at_most(limit: float, why: str = "") -> Bound:
    """Return an upper bound.

    Without `why` it is technical: larger sizes overflow, or exhaust the machine before any
    check."""
    return Bound(lambda value: value <= limit, f"at most {limit}{why and f' ({why})'}")


UINT64 = Bound(
    lambda value: value < 1 << 64, f"below {1 << 64} = 2**64: random numbers are keyed by 64 bits"
)
_FINITE = Bound(lambda value: not isinstance(value, float) or math.isfinite(value), "finite")


def key(default: Any, *bounds: Bound, resume: str = EXACT) -> Any:
    """bounds: on its value, or on each element of a list; resume: its class on resume."""
    metadata = {"bounds": bounds, "resume": resume}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def keys_of(schema: type) -> dict[str, dataclasses.Field]:
    types: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(schema)}
    return {f"{s}.{f.name}": f for s, type_ in types.items() for f in dataclasses.fields(type_)}


def bound_problems(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield a line for each value that violates a bound of its key, except null and auto.

    A text that cannot be null must not be empty."""
    for field in dataclasses.fields(section):
        name, value = f"{prefix}{field.name}", getattr(section, field.name)
        if field.type is str and not value.strip():
            yield f"{name}: is empty"
        bounds = (_FINITE, *field.metadata.get("bounds", ()))
        items = {name: value}
        if isinstance(value, list):
            items = {f"{name}[{index}]": item for index, item in enumerate(value)}
        elif field.type == dict[str, str]:
            items = {f"{name}.{key}": item for key, item in value.items()}
        for key, item in items.items():
            if field.type in (list[str], dict[str, str]) and not isinstance(item, str):
                yield f"{key}: {item} is not text"
            elif isinstance(item, str) and item.encode("utf-8", "ignore").decode() != item:
                yield f"{key}: {item!a} has half a character"
            elif dataclasses.is_dataclass(item):
                yield from bound_problems(item, f"{key}.")
            elif item is not None and item != "auto":
                violated = (bound.text for bound in bounds if not bound.holds(item))
                yield from (f"{key}: {item} must be {text}" for text in islice(violated, 1))


def is_model(path: str) -> bool:
    """Whether an entry of reward.functions is a folder or hub name, and no dotted path."""
    return "/" in path


def last_part(path: str) -> str:
    """Return the last part of a dotted path, or of a folder or hub name."""
    return path.rstrip("/").rpartition("/" if is_model(path) else ".")[2]
