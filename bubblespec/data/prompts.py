"""Prompts: where they come from, and which of them make up the batch of a step.

Everything ends in a `PromptSet`: tokenised prompts, each with a stable uid and the columns that
rewards read. The batch of step t is a pure function of (seed, t), so any rank can compute the batch
of any later step, which is what drafting ahead needs.
"""

import functools
import glob
import hashlib
import itertools
import json
import operator
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bubblespec.errors import InputError, one_line
from bubblespec.types import Prompt

_EXTRA = 1 << 40  # beyond any epoch: extra prompts are drawn in orders of their own
FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass
class PromptSet:
    """Prompts short enough to train on."""

    prompts: list[Prompt]
    num_dropped: int
    """Others, of more than `max_prompt_length` tokens."""

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, seed: int, step: int, num_prompts: int) -> list[Prompt]:
        """The prompts of `step`: epochs are shuffled by (seed, epoch), and a remainder too small
        for a batch is left out of its epoch, so no prompt occurs twice in one batch (its noise keys
        would collide)."""
        steps_per_epoch = len(self.prompts) // num_prompts
        if steps_per_epoch == 0:
            too_long = f"; {self.num_dropped} more are over rollout.max_prompt_length"
            raise InputError(
                f"rollout.num_prompts_per_step: {num_prompts}, but the data has "
                f"{len(self.prompts)} usable prompts{too_long if self.num_dropped else ''}"
            )
        epoch, index = divmod(step, steps_per_epoch)
        order = _shuffled(len(self.prompts), seed, epoch)
        return [self.prompts[i] for i in order[index * num_prompts : (index + 1) * num_prompts]]

    def extra(self, seed: int, step: int, num_prompts: int, used: set[int]) -> list[Prompt]:
        """Further prompts for `step`, none of those with a uid in `used`: its noise keys would be
        used again. A pure function of the arguments; fewer than `num_prompts` if there are no
        more."""
        shuffled = (self.prompts[i] for i in _shuffled(len(self.prompts), seed, _EXTRA + step))
        unused = (prompt for prompt in shuffled if prompt.uid not in used)
        return list(itertools.islice(unused, num_prompts))


@functools.lru_cache(maxsize=4)  # this epoch, the next, and extra prompts: all asked for repeatedly
def _shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers below `count` in an order of this key, two integers of 64 bits; read-only."""
    words = np.array((seed, epoch), np.uint64)  # a list with one above 2**63 would become floats
    order = np.random.Generator(np.random.Philox(key=words)).permutation(count)
    order.flags.writeable = False
    return order


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
        token_ids = tokenize(text)
        if not token_ids:
            raise InputError(f"{key}: the prompt of row {number} has no tokens")
        uid = _stable_uid(text, occurrences)
        if len(token_ids) > max_prompt_length:
            num_dropped += 1
            continue
        columns = {name: value for name, value in row.items() if name != "prompt"}
        prompts.append(Prompt(uid, text, tuple(token_ids), columns))
    return PromptSet(prompts, num_dropped)


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
        except Exception as error:  # a template is a program, and fails in any way
            raise InputError(
                f"model.path: its chat template refuses {text!r:.300}: {one_line(error)}"
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

    # What it logs as errors we raise, in a line of our own.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    files = _data_files(path)
    formats = sorted({FILE_FORMATS[_suffix(file)] for file in files})
    is_path = os.path.exists(path) or path.startswith((".", "/", "~")) or "*" in path
    if not files and (is_path or _suffix(path) in FILE_FORMATS):
        raise InputError(f"{key}: no JSON, JSONL, CSV or Parquet file at {path}")
    if len(formats) > 1:
        raise InputError(f"{key}: {path} mixes the formats {formats}; give files of one format")
    if files and name is not None:
        raise InputError(
            f"data.name: {name}, but the files of {path} have no subsets; leave it out"
        )
    try:
        if files:
            patterns = [glob.escape(file) for file in files]
            dataset = datasets.load_dataset(formats[0], data_files=patterns, split=split)
        else:
            dataset = datasets.load_dataset(path, name, split=split)
        rows = list(dataset)
    except Exception as error:  # `datasets` raises many kinds
        cause = error.__cause__ or error  # DatasetGenerationError says nothing itself
        what = path if files else f"{path} (no such file or folder, so taken for a hub dataset)"
        reason = f"cannot load {what}, split {split}: {one_line(cause)}"
        bad_line = next(filter(None, map(_find_bad_line, files)), None)
        raise InputError(f"{key}: {bad_line or reason}") from error
    if not rows:
        raise InputError(f"{key}: {path} has no rows")
    added = [_column(rows, f"data.columns.{name}", of) for name, of in (columns or {}).items()]
    for name, values in zip(columns or {}, added, strict=True):
        rows = [row | {name: value} for row, value in zip(rows, values, strict=True)]
    if "prompt" not in rows[0]:
        raise InputError(f"{key}: {path} has no prompt column; it has {list(rows[0])}")
    return rows


def _data_files(path: str) -> list[str]:
    """The files of known formats at a path, in a folder or of a glob."""
    pattern = os.path.join(glob.escape(path), "*") if os.path.isdir(path) else path
    files = [path] if os.path.isfile(path) else sorted(glob.glob(pattern))
    return [file for file in files if _suffix(file) in FILE_FORMATS]


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _column(rows: list[dict], key: str, source: str) -> list:
    """The values of a column, which dots reach into unless it has one in its own name."""
    path = [source] if source in rows[0] else source.split(".")
    try:
        return [functools.reduce(operator.getitem, path, row) for row in rows]
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{key}: not every row has a '{source}'; there are {list(rows[0])}"
        ) from error


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
            sources[-1][0]  # some parameters are wrong only here
        except Exception as error:  # each task checks its parameters in its own way
            raise InputError(f"data.tasks[{number}] ({task['name']}): {error}") from error
    weights = [task["weight"] for task in tasks]
    rows = []
    for i in range(size):
        which = random.Random(f"{seed}-{i}").choices(range(len(tasks)), weights=weights)[0]
        entry = sources[which][i]
        columns = {"prompt": entry["question"], "answer": entry["answer"], "entry": entry}
        rows.append(columns | {"task": tasks[which]["name"]})
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


def _find_bad_line(path: str) -> str | None:
    """Where a file of JSON objects, one per line or in a list, is none: `datasets` does not name
    the file, nor a line that counts from its start."""
    if FILE_FORMATS[_suffix(path)] != "json":
        return None
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        text = file.read()
    parts = [text] if text.lstrip().startswith("[") else text.split("\n")
    for number, part in enumerate(parts, 1):
        try:
            items = json.loads(part) if part.strip() else []
        except json.JSONDecodeError as error:
            return f"{path}, line {number + error.lineno - 1} is not JSON: {error.msg}"
        for item in items if isinstance(items, list) else [items]:
            if not isinstance(item, dict):
                return f"{path}, line {number} has {item!r:.100}, not an object with a prompt"
    return None
