"""Configuration files: YAML and dotted overrides into a checked `Config`, and back.

A mistake is an `InputError` of one line that names the key. OmegaConf is imported where it is used,
as tests on GPU machines run without it.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from bubblespec.config import Config
from bubblespec.config_checks import check_bounds, keys_of
from bubblespec.config_combinations import check_combinations
from bubblespec.config_names import FOREIGN
from bubblespec.errors import InputError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Return the checked configuration of a YAML file and `section.key=value` overrides.

    Raises InputError."""
    if not os.path.isfile(path):
        raise InputError(f"--config: no file at {path}")
    from omegaconf import OmegaConf

    try:
        base = OmegaConf.load(path)
    except Exception as error:  # of many kinds; all mean a file that is not valid YAML
        raise InputError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    return check_combinations(_fill(base, overrides, path))


def config_of_sections(sections: dict[str, dict], overrides: Sequence[str], source: str) -> Config:
    """Return the checked configuration of a dictionary of sections. source: its name in errors."""
    from omegaconf import OmegaConf

    return check_combinations(_fill(OmegaConf.create(_escape(sections)), overrides, source))


def config_to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML, which `load_config` reads back."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(_escape(dataclasses.asdict(config))))


def _fill(base: Any, overrides: Sequence[str], source: str) -> Config:
    """Fill a `Config` from `base` and then the overrides, and check bounds.

    source: the name of `base` in errors."""
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
    keys = keys_of(Config)
    sections = {key.partition(".")[0] for key in keys}
    config, names = OmegaConf.structured(Config), set()
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
                names.add(name)
    try:
        for name in sorted(OmegaConf.missing_keys(config)):
            raise InputError(f"{name}: is required")
        filled: Any = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:  # a reference ${...} to what does not exist
        raise InputError(f"{error.full_key}: {_first_line(error)}") from error
    if filled.loss.loss_type == "distillation" and "reward.functions" not in names:
        filled.reward.functions = []
    check_bounds(filled)
    return filled


def _put(config: "DictConfig", name: str, value: Any) -> None:
    """Set a key. OmegaConf checks the type; its error may lack the whole name."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.update(config, name, value)
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        name = key if key.startswith(name) else name
        problem = _first_line(error)
        if "ListConfig" in problem or "container types" in problem:
            problem = "is a list or a mapping; set all of it, as in [...] or {...}"
        raise InputError(f"{name}: {problem}") from error


def _innermost(name: str, value: Any) -> str:
    """Return the whole name of the first value, as other trainers nest keys deeper."""
    while isinstance(value, dict) and value:
        leaf, value = next(iter(value.items()))
        name += f".{leaf}"
    return name


def _unknown(name: str, keys: Iterable[str]) -> str:
    """Return our name of a foreign key, the right section of a key, or the most similar key."""
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


def _escape(value: Any) -> Any:
    """Escape `${` in all texts, so that it is not read as a reference."""
    if isinstance(value, dict):
        return {k: _escape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_escape(v) for v in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
