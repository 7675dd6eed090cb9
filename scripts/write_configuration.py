"""Write docs/configuration.md, the reference of all keys, from the declarations in
bubblespec/config and the names of other trainers in its names.json:

python -m scripts.write_configuration
"""

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bubblespec import config as declarations
from bubblespec.config.file import ROWS, TRL, VALUES, VERL
from bubblespec.config.keys import ROUNDING, SAFE

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
VERL_PREFIX = "actor_rollout_ref."
CONTINUED = {SAFE: "may differ", ROUNDING: "rounding"}

START = f"""\
# Configuration

After this page you can write a configuration file, override any key on the command line, and
translate single keys of TRL or verl. It lists every key with its type, default and meaning.
`python -m scripts.write_configuration` generates it from
[bubblespec/config](../bubblespec/config/__init__.py) and its
[mechanisms.py](../bubblespec/config/mechanisms.py), so edit the docstrings there.

A configuration is a YAML file with the sections below. Only `model.path`, `run.output_dir` and
either `data.path` or `data.tasks` must be given. Keys on the command line override the file, and
the last one counts:

```sh
torchrun --nproc_per_node=8 train.py --config my_run.yaml run.seed=1 optim.learning_rate=2e-6 \\
    "data.columns={{prompt: question}}"
```

Values are YAML, and text is what is written: `run.output_dir=2024_05_01`, `data.name=007` and, on
the command line, `data.system_prompt=Answer: one number`. There, quotes around all of a text are
removed, and `null` means not set; a file needs quotes around text with a colon. `~` at the
beginning of a path is the home folder.

An unknown key, a value of the wrong type or out of bounds, and keys that contradict each other end
the run before anything is loaded, with one line for each that names the key. For a key of TRL or
verl the line names ours, or says why there is none. `config.yaml` in `run.output_dir` holds all
keys as the run uses them. [recipes.md](recipes.md) has the keys of published recipes, and
[coming-from.md](coming-from.md) whole scripts of TRL and verl next to the equal file.

- **default**: *required* where there is none; `null` means not set.
- **continued**: whether a run that is continued from a checkpoint may have another value. *may
  differ*: yes, with the same tokens and updates. *rounding*: yes, with a warning, as sums are then
  taken in another order. Empty: no, the run is refused. `run.max_steps` may differ only if
  `optim.lr_scheduler_type` is `constant`.
- **TRL**: arguments of TRL 1.16 (GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments).
  **verl**: keys of 0.9.1 and earlier, where `{VERL_PREFIX}` is left out in front of `actor`,
  `rollout`, `model` and `nccl_timeout`. A remark in parentheses says what our value is where
  theirs means something else.
"""
HEADER = """\
| key | values | default | meaning | continued | TRL | verl |
|---|---|---|---|---|---|---|"""
LEFT_OUT = """
## Keys of TRL and verl that have no counterpart

A key holds for all keys below it that are not listed: `critic` for `critic.optim.lr`.

| keys | answer |
|---|---|"""
FOREIGN_VALUES = """
## Values of TRL and verl that are written differently

| value there | key | here |
|---|---|---|"""


def page() -> str:
    """Return the whole document."""
    lines = [START]
    for section in dataclasses.fields(declarations.Config):
        summary = " ".join(inspect.getdoc(section.type).split())
        lines += [f"## {section.name}", "", summary, "", HEADER]
        lines += [row(*of) for of in keys_of_section(section.type, f"{section.name}.")]
        lines.append("")
    lines[-1:] = [LEFT_OUT]
    for names, answer in (item for table in ROWS.values() for item in table.items()):
        if answer.startswith("not"):
            quoted = ", ".join(f"`{name.removeprefix(VERL_PREFIX)}`" for name in names.split())
            lines.append(f"| {quoted} | {with_links(as_code(answer))} |")
    lines.append(FOREIGN_VALUES)
    for key, values in VALUES.items():
        rows = values.items()
        lines += [f"| `{value}` | `{key}` | {with_links(answer)} |" for value, answer in rows]
    return "\n".join(lines) + "\n"


def keys_of_section(
    section: type, prefix: str
) -> Iterator[tuple[str, dataclasses.Field, str, str]]:
    """Yield whole name, field, type as text and docstring of each key; list items come below."""
    (body,) = ast.parse(inspect.getsource(section)).body
    fields = {field.name: field for field in dataclasses.fields(section)}
    for statement, below in zip(body.body, body.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign):
            continue
        field, name = fields[statement.target.id], f"{prefix}{statement.target.id}"
        yield name, field, type_text(statement.annotation), " ".join(below.value.value.split())
        if isinstance(statement.annotation, ast.Subscript):
            item = getattr(declarations, ast.unparse(statement.annotation.slice), None)
            if dataclasses.is_dataclass(item):
                yield from keys_of_section(item, f"{name}[].")


def type_text(annotation: ast.expr) -> str:
    """Return a type in words: the values of a Literal, or its name."""
    if isinstance(annotation, ast.BinOp):
        parts = [type_text(annotation.left), type_text(annotation.right)]
        if parts[0] != "text" and parts[1] == "text":  # auto, which the bounds name
            parts.pop()
        return " or ".join(part for part in parts if part != "null")
    if isinstance(annotation, ast.Subscript):
        items = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else []
        if annotation.value.id == "Literal":
            return ", ".join(f"`{item.value}`" for item in items)
        if annotation.value.id == "dict":
            return "mapping"
        return f"list of {type_text(annotation.slice)}"
    text = ast.unparse(annotation)
    return {"None": "null", "str": "text", "TaskConfig": "tasks"}.get(text, text)


def row(name: str, field: dataclasses.Field, values: str, meaning: str) -> str:
    """Return a line of a section's table. values: the type; meaning: the docstring."""
    bounds = [bound.text for bound in field.metadata.get("bounds", ())]
    # larger limits are technical
    values = "; ".join([values, *(text for text in bounds if not re.search(r"\d{5}", text))])
    continued = CONTINUED.get(field.metadata.get("resume"), "")
    elsewhere = (", ".join(names_elsewhere(name, names)) for names in (TRL, VERL))
    cells = [f"`{name}`", values, default_text(field), with_links(meaning), continued, *elsewhere]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def default_text(field: dataclasses.Field) -> str:
    value: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value == declarations.MISSING:
        return "*required*"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def names_elsewhere(name: str, names: dict[str, str]) -> Iterator[str]:
    """Yield the names of a key in another trainer, with remarks on differences."""
    for foreign, answer in names.items():
        keys, _, remark = answer.partition(", ")
        if not answer.startswith("not") and name in re.split(" and ", keys):
            yield f"`{foreign.removeprefix(VERL_PREFIX)}`" + (remark and f" ({remark})")


def as_code(text: str) -> str:
    return re.sub(r"(?<![\w/])([a-z_]+(?:\.[a-z_]+)+|--\w+)", r"`\1`", text)


def with_links(text: str) -> str:
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
