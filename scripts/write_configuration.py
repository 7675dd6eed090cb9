"""Write docs/configuration.md, the reference of all keys, from the declarations in
bubblespec/config:

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
from bubblespec.config.keys import ROUNDING, SAFE

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
CONTINUED = {SAFE: "may differ", ROUNDING: "rounding"}

START = """\
# Configuration

For those who look up a key. A configuration is a YAML file with the sections below; only
`model.path`, `run.output_dir` and either `data.path` or `data.tasks` must be given. Keys on the
command line override the file:

```sh
python -m bubblespec train --config my_run.yaml run.seed=1 "data.columns={prompt: question}"
```

Values are YAML, and text is what is written: `data.name=007` and, on the command line,
`data.system_prompt=Answer: one number`. `null` means not set.

An unknown key, a wrong value, and keys that contradict each other end the run before anything is
loaded, with one line for each. Keys of TRL and verl are answered with the name of ours, or with why
there is none ([coming-from.md](coming-from.md) has whole scripts). `config.yaml` in
`run.output_dir` holds all keys as the run uses them.

*continued* says whether a run that is continued from a checkpoint may have another value. *may
differ*: with the same tokens and updates. *rounding*: with a warning, as sums are taken in another
order. Empty: the run is refused. `run.max_steps` may differ if the learning rate is constant.

`python -m scripts.write_configuration` writes this page from
[bubblespec/config](../bubblespec/config/__init__.py).
"""
HEADER = """\
| key | values | default | meaning | continued |
|---|---|---|---|---|"""


def page() -> str:
    """Return the whole document."""
    lines = [START]
    for section in dataclasses.fields(declarations.Config):
        summary = " ".join(inspect.getdoc(section.type).split())
        lines += [f"## {section.name}", "", summary, "", HEADER]
        lines += [row(*of) for of in keys_of_section(section.type, f"{section.name}.")]
        lines.append("")
    return "\n".join(lines)


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
    cells = [f"`{name}`", values, default_text(field), with_links(meaning), continued]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def default_text(field: dataclasses.Field) -> str:
    value: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value == declarations.MISSING:
        return "*required*"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def with_links(text: str) -> str:
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
