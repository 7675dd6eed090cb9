"""Configuration files: YAML and dotted overrides into a checked `Config`, and back.

All mistakes of a configuration make one `InputError`, with a line each that names the key.
names.json has names of keys and values in other trainers, for the answers to them.
OmegaConf is imported where it is used, as tests on GPU machines run without it."""

import contextlib
import dataclasses
import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bubblespec.config import Config
from bubblespec.config.combinations import combination_problems
from bubblespec.config.keys import bound_problems, keys_of
from bubblespec.errors import InputError, shown

KEYS = keys_of(Config)
SECTIONS = {key.partition(".")[0] for key in KEYS}
# Keys of text, which YAML 1.1 would change: 2024_05_01, 007, 1e3, 12:30, yes.
TEXT = {key for key, field in KEYS.items() if field.type in (str, str | None)}
TEXTS = {key for key, field in KEYS.items() if field.type in (list[str], dict[str, str])}
PATHS = [key for key in KEYS if key.endswith(("path", "_dir", "_from_checkpoint"))]
QUOTED = re.compile(r"""'([^']|'')*'|"([^"\\]|\\.)*\"""", re.DOTALL)
KEY = re.compile(r"[a-z_]+\.[a-z_0-9]+")
SIMILAR = 0.85  # similarity with a key of the same section that makes a typing error likely
# Answers to arguments of TRL, keys of verl, others, and values: a key of ours, with words after a
# comma on how the two differ, or a text that begins with "not". An answer to `a.b` holds for all
# keys below it that have none of their own.
ROWS = json.loads(Path(__file__).with_name("names.json").read_text("utf-8"))
VALUES = ROWS.pop("values")
TRL, VERL, _OTHERS = (
    {name: answer for names, answer in rows.items() for name in names.split()}
    for rows in ROWS.values()
)
_ALL = _OTHERS | VERL | TRL


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Return the checked configuration of a YAML file and overrides. Raises InputError."""
    if not os.path.isfile(path):
        raise InputError(f"--config: no file at {path}")
    from omegaconf import OmegaConf

    try:
        base = OmegaConf.load(path)
        with open(path, encoding="utf-8") as file:
            as_written = _without_types(file.read())
    except Exception as error:  # of many kinds; all mean a file that is not valid YAML
        raise InputError(f"{path}: not valid YAML: {shown(error, str)}") from error
    given = OmegaConf.to_container(base)
    for section, leaf in (key.split(".") for key in TEXT | TEXTS):
        with contextlib.suppress(KeyError, TypeError):
            if given[section][leaf] is not None:
                given[section][leaf] = as_written[section][leaf]
    return _fill(given, overrides, path)


def config_of_sections(sections: dict[str, dict], overrides: Sequence[str], source: str) -> Config:
    """Return the checked configuration of a dictionary of sections. source: its name in errors."""
    return _fill(_escape(sections), overrides, source)


def config_to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML, which `load_config` reads back."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(_escape(dataclasses.asdict(config))))


def _fill(given: Any, overrides: Sequence[str], source: str) -> Config:
    """Fill a `Config` from `given`, a `source`, and then the overrides, and check it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = OmegaConf.structured(Config)
    if not isinstance(given, dict):
        found = type(given).__name__
        raise InputError(f"{source}: expected sections (model, data, ...), found {found}")
    problems, has_rewards = list(_put_all(config, given, source)), _sets_rewards(given)
    for override in overrides:
        if not override.partition("=")[0].strip(". ") or "=" not in override:
            problems.append(f"override '{override}' is not of the form section.key=value")
            continue
        try:
            given = _read_override(override)
        except Exception as error:
            problems.append(f"override '{override}': not valid YAML: {shown(error, str)}")
        else:
            problems += _put_all(config, given, source)
            has_rewards |= _sets_rewards(given)
    # A key that an earlier line names is corrected with it: say nothing more about it.
    named = set(KEY.findall("\n".join(problems)))
    try:
        for name in sorted(OmegaConf.missing_keys(config)):
            problems += [f"{name}: is required"] if named.isdisjoint(KEY.findall(name)) else []
            OmegaConf.update(config, name, "missing")
        filled: Any = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:  # a reference ${...} to what does not exist
        problems.append(f"{error.full_key}: {str(error).strip().splitlines()[0]}")
        raise InputError("\n".join(problems)) from error
    for section, leaf in (name.split(".") for name in PATHS):
        value = getattr(getattr(filled, section), leaf)
        if value and (path := os.path.expanduser(value)).startswith("~"):
            problems.append(f"{section}.{leaf}: {value}: no such user; a folder is ./{value}")
        elif value:
            setattr(getattr(filled, section), leaf, path)
    problems += bound_problems(filled)
    if filled.loss.loss_type == "distillation" and not has_rewards:
        filled.reward.functions = []
    named = set(KEY.findall("\n".join(problems)))
    for name in named & KEYS.keys():  # a default, with which combinations can be checked
        section, _, leaf = name.partition(".")
        default = getattr(type(filled)(), section)
        setattr(getattr(filled, section), leaf, getattr(default, leaf))
    for problem in combination_problems(filled):
        problems += [problem] if named.isdisjoint(KEY.findall(problem)) else []
    if problems:
        raise InputError("\n".join(problems))
    if filled.environment.max_observation_length == "auto":
        half = filled.rollout.max_completion_length // 2
        filled.environment.max_observation_length = max(1, min(half, 512))
    return filled


def _read_override(override: str) -> dict:
    """Return the sections of `section.key=value`, where the value is YAML.

    The value of a text key is what is typed, apart from quotes around all of it, and null."""
    from omegaconf import OmegaConf

    name, _, value = override.partition("=")
    key = ".".join(name.split(".")[:2])
    if key not in TEXT | TEXTS:
        return OmegaConf.to_container(OmegaConf.from_dotlist([override]))
    given, text = OmegaConf.create(), None if value.strip() in ("", "null") else value
    if name in TEXTS or QUOTED.fullmatch(value):
        text = _without_types(value)
    OmegaConf.update(given, name, text)
    return OmegaConf.to_container(given)


def _without_types(text: str) -> Any:
    import yaml

    return yaml.load(text, yaml.BaseLoader)


def _sets_rewards(given: dict) -> bool:
    rewards = given.get("reward")
    return isinstance(rewards, dict) and "functions" in rewards


def _put_all(config: Any, given: dict, source: str) -> Iterator[str]:
    for section, values in given.items():
        if not isinstance(section, str):  # YAML reads on, off, yes and no as true and false
            yield f"{source}: the key {section!r} is not text"
        elif section in SECTIONS and not isinstance(values, dict):
            answer = answer_to(section, SECTIONS)
            yield f"{section}: is a section; set its keys" + (f" ({answer})" if answer else "")
        elif section not in SECTIONS and not (values and isinstance(values, dict)):
            yield f"{section}: {_unknown(section, values)}"
        else:
            for leaf, value in values.items():
                name = f"{section}.{leaf}"
                if name in KEYS:
                    yield from _put(config, name, value)
                else:
                    yield from (f"{key}: {_unknown(key, v)}" for key, v in _leaves(name, value))


def _put(config: Any, name: str, value: Any) -> Iterator[str]:
    """Set a key, or yield what is wrong; the error of OmegaConf may lack the whole name."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if answer := value_of(name, value):
        yield f"{name}: here {answer}"
        return
    try:
        OmegaConf.update(config, name, value)
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        name = key if key.startswith(name) else name
        problem = str(error).strip().splitlines()[0]
        if "ListConfig" in problem or "container types" in problem:
            problem = "is a list or a mapping; set all of it, as in [...] or {...}"
        yield f"{name}: {problem}"


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return whole name and value of all that is in an unknown key: others nest keys deeper."""
    if not (value and isinstance(value, dict)):
        return [(name, value)]
    return [found for key, inner in value.items() for found in _leaves(f"{name}.{key}", inner)]


def _unknown(name: str, value: Any) -> str:
    """Return the answer to a foreign key, the right section of a key, or the most similar key."""
    if answer := answer_to(name, SECTIONS):
        ours = value_of(answer.partition(",")[0], value)
        here = "" if answer.startswith("not") else "here it is "
        return f"unknown key; {here}{answer}" + (f", where {ours}" if ours else "")
    section, leaf = name.partition(".")[0], name.rpartition(".")[2]
    matches = sorted(key for key in KEYS if key.partition(".")[2] == leaf)
    matches = difflib.get_close_matches(name, matches, 1, SIMILAR) or matches
    of_section = sorted(key for key in KEYS if key.startswith(f"{section}."))
    if not matches and (of_section or section == name):
        leaves = {key.partition(".")[2] for key in of_section or KEYS}
        similar = difflib.get_close_matches(leaf, leaves, 1, SIMILAR)
        matches = sorted(k for k in of_section or KEYS if k.partition(".")[2] in similar)
    if matches:
        return f"unknown key; did you mean {' or '.join(matches)}?"
    return f"unknown key; valid are {', '.join(of_section or sorted(SECTIONS))}"


def answer_to(name: str, sections: set[str]) -> str | None:
    """Return the answer to a foreign key by its whole name, its beginning, or its end.

    sections: ours, in which a key is taken for one of the same section only."""
    name, leaf = name.lstrip("+").removeprefix("args."), name.rpartition(".")[2]  # Hydra, TRL
    first, parent = name.partition(".")[0], name
    while parent and (parent == name or parent not in sections):
        if answer := _ALL.get(parent) or ("." in parent and _by_end(f".{parent}")):
            return answer
        parent = parent.rpartition(".")[0]
    answer = TRL.get(leaf) or _OTHERS.get(leaf) or _by_end(f".{leaf}")
    is_elsewhere = answer and first in sections and not answer.startswith(("not", f"{first}."))
    return None if is_elsewhere and leaf != name else answer


def value_of(key: str, value: object) -> str | None:
    """Return what a value of another trainer is in a key of ours: "false is none"."""
    text = {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
    answer = VALUES.get(key, {}).get(text)
    return answer and f"{text} is {answer}"


def _by_end(end: str) -> str | None:
    """Return the answer to the keys of verl with this end, if there is only one."""
    answers = {answer for name, answer in VERL.items() if name.endswith(end)}
    return answers.pop() if len(answers) == 1 else None


def _escape(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _escape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_escape(v) for v in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
