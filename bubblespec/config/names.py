"""Names of keys and values in other trainers, for errors and docs/configuration.md.

names.json has answers to arguments of TRL, keys of verl, others, and values: a key of ours,
with words after a comma on how the two differ, or a text that begins with "not". An answer to `a.b`
holds for all keys below it that have none of their own.
"""

import json
from pathlib import Path

ROWS = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
VALUES = ROWS.pop("values")
TRL, VERL, _OTHERS = (
    {name: answer for names, answer in rows.items() for name in names.split()}
    for rows in ROWS.values()
)
_ALL = _OTHERS | VERL | TRL


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
