"""Prompts: where they come from, and which of them make up the batch of a step.

Everything ends in a `PromptSet`: tokenised prompts, each with a stable uid and the columns that rewards read. The batch of
step t is a pure function of (seed, t), so any rank can compute the batch of any later step, which is what drafting ahead needs.
"""

import difflib
import glob
import hashlib
import itertools
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bubblespec.errors import InputError

_EXTRA = 1 << 40  # beyond any epoch: extra prompts are drawn in orders of their own
FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class Prompt:
    """One prompt: `uid` (63 bits, stable across runs), `text` (a string or chat messages), its token ids, and its columns."""

    uid: int
    text: str | list[dict]
    token_ids: tuple[int, ...]
    columns: dict


class PromptSet:
    """Prompts short enough to train on. `num_dropped` counts those over `max_prompt_length` tokens."""

    def __init__(self, prompts: list[Prompt], num_dropped: int):
        self.prompts = prompts
        self.num_dropped = num_dropped
        self._order: tuple[tuple[int, int], np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, seed: int, step: int, num_prompts: int) -> list[Prompt]:
        """The prompts of `step`: epochs are shuffled by (seed, epoch), and a remainder too small for a batch is left out of
        its epoch, so no prompt occurs twice in one batch (its noise keys would collide)."""
        steps_per_epoch = len(self.prompts) // num_prompts
        if steps_per_epoch == 0:
            raise InputError(
                f"data: {len(self.prompts)} usable prompts are fewer than rollout.num_prompts_per_step = {num_prompts}"
            )
        epoch, index = divmod(step, steps_per_epoch)
        if self._order is None or self._order[0] != (seed, epoch):
            order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(len(self.prompts))
            self._order = ((seed, epoch), order)
        order = self._order[1]
        return [self.prompts[i] for i in order[index * num_prompts : (index + 1) * num_prompts]]

    def extra(self, seed: int, step: int, num_prompts: int, used: set[int]) -> list[Prompt]:
        """Further prompts for `step`, none of those with a uid in `used`: its noise keys would be used again. A pure function of
        the arguments; fewer than `num_prompts` if there are no more."""
        order = np.random.Generator(np.random.Philox(key=[seed, _EXTRA + step])).permutation(len(self.prompts))
        return list(itertools.islice((p for p in map(self.prompts.__getitem__, order) if p.uid not in used), num_prompts))


def build_prompt_set(
    rows: Sequence[dict],
    tokenize: Callable[[str | list[dict]], list[int]],
    max_prompt_length: int,
    system_prompt: str | None = None,
    as_chat: bool = False,
) -> PromptSet:
    """Tokenise rows with a `prompt` column; prompts longer than `max_prompt_length` tokens are left out and counted.

    `as_chat` wraps string prompts as a user message; `system_prompt` goes in front of chat prompts without one.
    """
    prompts, num_dropped = [], 0
    occurrences: dict[str, int] = {}
    for number, row in enumerate(rows):
        text = row["prompt"]
        _check_prompt(text, number)
        if as_chat and isinstance(text, str):
            text = [{"role": "user", "content": text}]
        if system_prompt and not isinstance(text, str) and text[0]["role"] != "system":
            text = [{"role": "system", "content": system_prompt}, *text]
        token_ids = tokenize(text)
        uid = _stable_uid(text, occurrences)
        if len(token_ids) > max_prompt_length:
            num_dropped += 1
            continue
        columns = {name: value for name, value in row.items() if name != "prompt"}
        prompts.append(Prompt(uid, text, tuple(token_ids), columns))
    return PromptSet(prompts, num_dropped)


def make_tokenize(tokenizer) -> Callable[[str | list[dict]], list[int]]:
    """Strings are tokenised as the tokenizer does by default; chat messages go through its chat template."""

    def tokenize(text: str | list[dict]) -> list[int]:
        if isinstance(text, str):
            return tokenizer(text)["input_ids"]
        if tokenizer.chat_template is None:
            raise InputError("model.path: its tokenizer has no chat template, but data has chat prompts")
        rendered = tokenizer.apply_chat_template(text, add_generation_prompt=True, tokenize=False)
        return tokenizer(rendered, add_special_tokens=False)["input_ids"]

    return tokenize


def load_rows(path: str, name: str | None, split: str, columns: dict[str, str] | None = None) -> Sequence[dict]:
    """Rows of local JSON/JSONL/CSV/Parquet files (a file, a folder or a glob) or of a hub dataset, through `datasets`.

    columns: where a column comes from, if not from one of its own name; a dot reaches into a nested column.
    """
    import datasets

    if os.path.isfile(path):
        files = [path]
    else:
        files = sorted(glob.glob(os.path.join(glob.escape(path), "*") if os.path.isdir(path) else path))
    files = [f for f in files if os.path.splitext(f)[1] in FILE_FORMATS]
    looks_local = os.path.splitext(path)[1] in FILE_FORMATS or path.startswith((".", "/"))
    if not files and looks_local:
        raise InputError(f"data: no JSON, JSONL, CSV or Parquet file at {path}")
    formats = {FILE_FORMATS[os.path.splitext(f)[1]] for f in files}
    if len(formats) > 1:
        raise InputError(f"data: {path} mixes the formats {sorted(formats)}; give files of one format")
    for file in files:
        if os.path.getsize(file) == 0:
            raise InputError(f"data: {file} is empty")
    try:
        if files:
            as_patterns = [glob.escape(file) for file in files]
            dataset = datasets.load_dataset(formats.pop(), data_files=as_patterns, split="train")
        else:
            dataset = datasets.load_dataset(path, name, split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        cause = error.__cause__ or error  # DatasetGenerationError says nothing itself
        reason = _first_bad_line(files) or f"cannot load {path}: {' '.join(str(cause).split())}"
        raise InputError(f"data: {reason}") from error
    dataset = _map_columns(dataset, columns or {}, path)
    if "prompt" not in dataset.column_names:
        raise InputError(f"data: {path} has no 'prompt' column; it has {dataset.column_names}")
    if len(dataset) == 0:
        raise InputError(f"data: {path} has no rows")
    return dataset


def _map_columns(dataset, columns: dict[str, str], path: str):
    """The dataset with further columns, or others under a name that it had."""
    given = dataset
    for name, source in columns.items():
        outer, *inner = source.split(".")
        if outer not in given.column_names:
            raise InputError(f"data.columns.{name}: {path} has no '{outer}' column; it has {given.column_names}")
        values = list(given[outer])
        for key in inner:
            if not all(isinstance(value, dict) and key in value for value in values):
                raise InputError(f"data.columns.{name}: not every row of {path} has a '{source}'")
            values = [value[key] for value in values]
        rest = dataset.remove_columns(name) if name in dataset.column_names else dataset
        dataset = rest.add_column(name, values)
    return dataset


def reasoning_gym_rows(tasks: Sequence, size: int, seed: int) -> list[dict]:
    """`size` procedural problems from a weighted mixture of reasoning-gym tasks.

    tasks: mappings with `name` (a reasoning-gym task), `weight` and `config` (the task's own parameters).
    Row i is a pure function of (tasks, seed, i): columns `prompt`, `answer`, `task` and `entry` (reasoning-gym's item).
    """
    import reasoning_gym

    sources = []
    for number, task in enumerate(tasks):
        try:
            # Item i of a reasoning-gym task draws from seed + i: seeds far apart keep mixtures and held-out sets disjoint.
            task_seed = random.Random(f"{seed}/{number}").getrandbits(48)
            sources.append(reasoning_gym.create_dataset(task["name"], size=size, seed=task_seed, **task["config"]))
        except (ValueError, TypeError, AssertionError) as error:
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
            raise InputError(f"data.tasks[{which}] ({tasks[which]['name']}): cannot make problem {i}: {error}") from error
        rows.append({"prompt": entry["question"], "answer": entry["answer"], "task": tasks[which]["name"], "entry": entry})
    return rows


def _stable_uid(text: str | list[dict], occurrences: dict[str, int]) -> int:
    """63 bits from the prompt's content; a repeated prompt gets its occurrence number mixed in, so uids stay distinct."""
    content = json.dumps(text, sort_keys=True, ensure_ascii=False)
    occurrence = occurrences.get(content, 0)
    occurrences[content] = occurrence + 1
    digest = hashlib.sha256(f"{occurrence}:{content}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _check_prompt(text, row_number: int) -> None:
    if not isinstance(text, (str, list)):
        raise InputError(f"data: the prompt of row {row_number} is {text!r}, neither a string nor a list of chat messages")
    if not text:
        raise InputError(f"data: row {row_number} has an empty prompt")
    for message in text if isinstance(text, list) else []:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise InputError(f"data: the prompt of row {row_number} has {message!r}, not a message with 'role' and 'content'")


def _first_bad_line(files: list[str]) -> str | None:
    """Where a JSONL file is not JSON: `datasets` names neither the file nor a line that counts from the file's start."""
    for path in files:
        if not path.endswith(".jsonl"):
            continue
        with open(path, encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                try:
                    json.loads(line if line.strip() else "{}")
                except json.JSONDecodeError as error:
                    return f"{path}, line {number} is not JSON: {error.msg}"
    return None
