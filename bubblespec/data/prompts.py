"""Prompts: where they come from, and which of them make up the batch of a step.

Everything ends in a `PromptSet`: tokenised prompts, each with a stable uid and the columns that
rewards read. The batch of step t is a pure function of (seed, t), so any rank can compute the batch
of any later step, which is what drafting ahead needs.
"""

import difflib
import glob
import hashlib
import itertools
import json
import os
import random
from collections.abc import Callable, Sequence

import numpy as np

from bubblespec.errors import InputError
from bubblespec.types import Prompt

_EXTRA = 1 << 40  # beyond any epoch: extra prompts are drawn in orders of their own
FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


class PromptSet:
    """Prompts short enough to train on. `num_dropped` counts those over `max_prompt_length`
    tokens."""

    def __init__(self, prompts: list[Prompt], num_dropped: int):
        self.prompts = prompts
        self.num_dropped = num_dropped
        self._order: tuple[tuple[int, int], np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, seed: int, step: int, num_prompts: int) -> list[Prompt]:
        """The prompts of `step`: epochs are shuffled by (seed, epoch), and a remainder too small
        for a batch is left out of its epoch, so no prompt occurs twice in one batch (its noise keys
        would collide)."""
        steps_per_epoch = len(self.prompts) // num_prompts
        if steps_per_epoch == 0:
            dropped = (
                f"; {self.num_dropped} more are over rollout.max_prompt_length"
                if self.num_dropped
                else ""
            )
            raise InputError(
                f"rollout.num_prompts_per_step: {num_prompts}, but the data has {len(self.prompts)} usable prompts{dropped}"
            )
        epoch, index = divmod(step, steps_per_epoch)
        if self._order is None or self._order[0] != (seed, epoch):
            order = _shuffled(len(self.prompts), seed, epoch)
            self._order = ((seed, epoch), order)
        order = self._order[1]
        return [self.prompts[i] for i in order[index * num_prompts : (index + 1) * num_prompts]]

    def extra(self, seed: int, step: int, num_prompts: int, used: set[int]) -> list[Prompt]:
        """Further prompts for `step`, none of those with a uid in `used`: its noise keys would be
        used again. A pure function of the arguments; fewer than `num_prompts` if there are no
        more."""
        order = _shuffled(len(self.prompts), seed, _EXTRA + step)
        return list(
            itertools.islice(
                (p for p in map(self.prompts.__getitem__, order) if p.uid not in used), num_prompts
            )
        )


def _shuffled(count: int, *key: int) -> np.ndarray:
    """The numbers below `count` in an order of this key, two integers of 64 bits."""
    words = np.array(key, np.uint64)  # a list with one above 2**63 would go through floats
    return np.random.Generator(np.random.Philox(key=words)).permutation(count)


def build_prompt_set(
    rows: Sequence[dict],
    tokenize: Callable[[str | list[dict]], list[int]],
    max_prompt_length: int,
    *,
    system_prompt: str | None = None,
    as_chat: bool = False,
    key: str = "data",
) -> PromptSet:
    """Tokenise rows with a `prompt` column; prompts longer than `max_prompt_length` tokens are left
    out and counted.

    `as_chat` wraps string prompts as a user message; `system_prompt` goes in front of chat prompts
    without one. `key`: the configuration's key, for errors. Raises InputError for an invalid
    prompt; rows are counted from 0.
    """
    prompts, num_dropped = [], 0
    occurrences: dict[str, int] = {}
    for number, row in enumerate(rows):
        text = row["prompt"]
        if problem := _find_problem(text):
            raise InputError(f"{key}: the prompt of row {number} {problem}")
        if as_chat and isinstance(text, str):
            text = [{"role": "user", "content": text}]
        if system_prompt and not isinstance(text, str) and text[0]["role"] != "system":
            text = [{"role": "system", "content": system_prompt}, *text]
        try:
            token_ids = tokenize(text)
        except TemplateRefusal as error:
            raise InputError(
                f"{key}: the chat template of model.path refuses the prompt of row {number}: {error}"
            ) from error
        if not token_ids:
            raise InputError(f"{key}: the prompt of row {number} has no tokens")
        uid = _stable_uid(text, occurrences)
        if len(token_ids) > max_prompt_length:
            num_dropped += 1
            continue
        columns = {name: value for name, value in row.items() if name != "prompt"}
        prompts.append(Prompt(uid, text, tuple(token_ids), columns))
    return PromptSet(prompts, num_dropped)


class TemplateRefusal(ValueError):
    """A chat template that cannot render these messages; the message is one line."""


def make_tokenize(tokenizer) -> Callable[[str | list[dict]], list[int]]:
    """Strings are tokenised as the tokenizer does by default; chat messages go through its chat
    template."""

    def tokenize(text: str | list[dict]) -> list[int]:
        if isinstance(text, str):
            return tokenizer(text)["input_ids"]
        if tokenizer.chat_template is None:
            raise InputError(
                "model.path: its tokenizer has no chat template, but data has chat prompts"
            )
        try:
            rendered = tokenizer.apply_chat_template(
                text, add_generation_prompt=True, tokenize=False
            )
        except (
            Exception
        ) as error:  # a template is a program of the model's folder, and ends in any way
            raise TemplateRefusal(
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            ) from error
        return tokenizer(rendered, add_special_tokens=False)["input_ids"]

    return tokenize


def load_rows(
    path: str,
    name: str | None,
    split: str,
    *,
    key: str = "data.path",
    columns: dict[str, str] | None = None,
) -> list[dict]:
    """Rows of local JSON/JSONL/CSV/Parquet files (a file, a folder or a glob) or of a hub dataset,
    through `datasets`.

    Files have no subsets, and one split, train, of which a slice such as train[:100] may be taken.
    Loading scripts are never run: of a folder only its data files are read, and `datasets` refuses
    scripts of the hub. key: the configuration's key, for errors. columns: {name: source} for
    columns to rename; a dot in the source reaches into a nested column.
    """
    import datasets

    datasets.logging.set_verbosity(
        datasets.logging.CRITICAL
    )  # what it logs as errors we raise, in a line of our own
    is_local = (
        os.path.exists(path)
        or path.startswith((".", "/", "~"))
        or _suffix(path) in FILE_FORMATS
        or "*" in path
    )
    files = _data_files(path)
    if not files and is_local:
        raise InputError(f"{key}: no JSON, JSONL, CSV or Parquet file at {path}")
    formats = {FILE_FORMATS[_suffix(file)] for file in files}
    if len(formats) > 1:
        raise InputError(
            f"{key}: {path} mixes the formats {sorted(formats)}; give files of one format"
        )
    for file in files:
        if os.path.getsize(file) == 0:
            raise InputError(f"{key}: {file} is empty")
    if files and name is not None:
        raise InputError(
            f"data.name: {name}, but the files of {path} have no subsets; leave it out"
        )
    try:
        if files:
            as_patterns = [glob.escape(file) for file in files]
            dataset = datasets.load_dataset(formats.pop(), data_files=as_patterns, split=split)
        else:
            dataset = datasets.load_dataset(path, name, split=split)
        names, rows = dataset.column_names, list(dataset)
    except Exception as error:  # `datasets` raises many kinds
        cause = error.__cause__ or error  # DatasetGenerationError says nothing itself
        place = path if files else f"{path} (no such file or folder, so taken for a hub dataset)"
        has_rows = "corresponds to no data" not in str(
            cause
        )  # the word of `datasets` for files without a row
        unknown = (
            f"cannot load {place}, split {split}: {' '.join(str(cause).split())}"
            if has_rows
            else f"{path} has no rows"
        )
        reason = _first_bad_line(files) or unknown
        raise InputError(f"{key}: {reason}") from error
    rows, names = _map_columns(rows, names, columns or {}, path)
    if "prompt" not in names:  # for JSON without objects `datasets` makes up columns
        raise InputError(
            f"{key}: {_first_bad_line(files) or f'{path} has no prompt column; it has {names}'}"
        )
    if clash := {"prompts", "completions", "completion_ids"}.intersection(names):
        raise InputError(
            f"{key}: {path} has the column {min(clash)}, a name of what rewards are given anyway; rename it"
        )
    if not rows:
        raise InputError(f"{key}: {path} has no rows")
    return rows


def _data_files(path: str) -> list[str]:
    """The files of known formats at a path, in a folder or of a glob."""
    if os.path.isfile(path):
        files = [path]
    else:
        files = sorted(
            glob.glob(os.path.join(glob.escape(path), "*") if os.path.isdir(path) else path)
        )
    return [file for file in files if _suffix(file) in FILE_FORMATS]


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _map_columns(
    rows: list[dict], names: list[str], columns: dict[str, str], path: str
) -> tuple[list[dict], list[str]]:
    """The rows with further columns, or others under a name that they had; and the names of all
    columns."""
    added: dict[str, list] = {}
    for name, source in columns.items():
        outer, *inner = source.split(".")
        if outer not in names:
            raise InputError(f"data.columns.{name}: {path} has no '{outer}' column; it has {names}")
        values = [row[outer] for row in rows]
        for key in inner:
            if not all(isinstance(value, dict) and key in value for value in values):
                raise InputError(f"data.columns.{name}: not every row of {path} has a '{source}'")
            values = [value[key] for value in values]
        added[name] = values
    rows = [
        {**row, **{name: values[i] for name, values in added.items()}} for i, row in enumerate(rows)
    ]
    return rows, [*names, *(name for name in added if name not in names)]


def reasoning_gym_rows(tasks: Sequence, size: int, seed: int) -> list[dict]:
    """`size` procedural problems from a weighted mixture of reasoning-gym tasks.

    tasks: mappings with `name` (a reasoning-gym task), `weight` and `config` (the task's own
    parameters). Row i is a pure function of (tasks, seed, i): columns `prompt`, `answer`, `task`
    and `entry` (reasoning-gym's item).
    """
    import reasoning_gym

    sources = []
    for number, task in enumerate(tasks):
        try:
            # Item i of a reasoning-gym task draws from seed + i: seeds far apart keep mixtures and
            # held-out sets disjoint.
            task_seed = random.Random(f"{seed}/{number}").getrandbits(48)
            sources.append(
                reasoning_gym.create_dataset(
                    task["name"], size=size, seed=task_seed, **task["config"]
                )
            )
        except Exception as error:  # each task checks its parameters in its own way
            known = difflib.get_close_matches(task["name"], reasoning_gym.factory.DATASETS, n=1)
            near = f"; did you mean {known[0]}?" if known and known[0] != task["name"] else ""
            raise InputError(f"data.tasks[{number}] ({task['name']}): {error}{near}") from error
    weights = [task["weight"] for task in tasks]
    rows = []
    for i in range(size):
        which = random.Random(f"{seed}-{i}").choices(range(len(tasks)), weights=weights)[0]
        try:
            entry = sources[which][i]
        except Exception as error:  # parameters that the task itself did not check
            raise InputError(
                f"data.tasks[{which}] ({tasks[which]['name']}): cannot make problem {i}: {error}"
            ) from error
        rows.append(
            {
                "prompt": entry["question"],
                "answer": entry["answer"],
                "task": tasks[which]["name"],
                "entry": entry,
            }
        )
    return rows


def _stable_uid(text: str | list[dict], occurrences: dict[str, int]) -> int:
    """63 bits from the prompt's content; a repeated prompt gets its occurrence number mixed in, so
    uids stay distinct."""
    content = json.dumps(text, sort_keys=True, ensure_ascii=False)
    occurrence = occurrences.get(content, 0)
    occurrences[content] = occurrence + 1
    digest = hashlib.sha256(f"{occurrence}:{content}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _find_problem(prompt) -> str | None:
    """Why a prompt is invalid, or None."""
    if not isinstance(prompt, (str, list)):
        return f"is {prompt!r}, neither a string nor a list of chat messages"
    if not prompt:
        return "is empty"
    for message in prompt if isinstance(prompt, list) else []:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            return f"has {message!r}, not a message with 'role' and 'content'"
        if not isinstance(message["role"], str) or (
            message["content"] is None and not message.get("tool_calls")
        ):
            return f"has {message!r}, whose role or content is no text"
    try:
        json.dumps(prompt, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"has half a character: {error}"
    return None


def _first_bad_line(files: list[str]) -> str | None:
    """Where a file is not text, or not JSON objects, one a line (or a list of them in .json):
    `datasets` names neither the file nor a line that counts from the file's start."""
    for path in files:
        if FILE_FORMATS[_suffix(path)] == "parquet":
            continue
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    return f"{path}, line {number} is not UTF-8: {error.reason}"
        if FILE_FORMATS[_suffix(path)] == "json" and (reason := _first_bad_json(path)):
            return reason
    return None


def _first_bad_json(path: str) -> str | None:
    with open(path, encoding="utf-8-sig") as file:
        if _suffix(path) == ".json":
            text = file.read()
            file.seek(0)
            try:
                whole = json.loads(text)
            except json.JSONDecodeError as error:
                if text.lstrip().startswith("["):
                    return f"{path}, line {error.lineno} is not JSON: {error.msg}"
            else:
                items = whole if isinstance(whole, list) else [whole]
                wrong = next(
                    (n for n, item in enumerate(items) if not isinstance(item, dict)), None
                )
                return (
                    None
                    if wrong is None
                    else f"{path}, item {wrong} is not an object with a prompt"
                )
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                return f"{path}, line {number} is not JSON: {error.msg}"
            if not isinstance(row, dict):
                return f"{path}, line {number} is not an object with a prompt"
    return None
