"""Prompts: rows, tokenised; and their fingerprints, by which a run resumes on the same data."""

import contextlib
import copy
import functools
import hashlib
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from bubblespec.config.imports import import_quietly
from bubblespec.data.schedule import PromptSet
from bubblespec.errors import InputError, one_line, shown
from bubblespec.types import Prompt

# A chat that a file holds as text, as every CSV file does: all of it is a list of messages.
_CHAT = re.compile(
    r"""\s*\[\s*\{(?=.*["']role["']\s*:)(?=.*["']content["']\s*:).*\}\s*\]\s*""", re.S
)

# Fingerprints of a run's data, by these names in its checkpoints.
ROWS, HELD_OUT, TEMPLATE = "data.rows", "data.held_out", "data.template"
WEIGHTS = "model.weights"
DATE = "data.date"  # that a run's template writes, so that prompts are the same on the next day


def build_prompt_set(
    rows: Sequence[dict],
    tokenize: Callable[[str | list[dict]], Sequence[int]],
    max_prompt_length: int,
    *,
    system_prompt: str | None = None,
    as_chat: bool = False,
    key: str = "data",
) -> PromptSet:
    """Tokenise rows with a `prompt` column; leave out and count prompts that are too long.

    `as_chat` wraps string prompts as a user message; `system_prompt` goes in front of chat prompts
    without one. Chats in JSON text are chats, and lists of text parts become one text. Raises
    InputError, which names `key`, for an invalid prompt; rows are counted from 0."""
    prompts, num_dropped = [], 0
    occurrences: Counter[str] = Counter()
    for number, row in enumerate(rows):
        text = row["prompt"]
        if isinstance(text, str) and _CHAT.fullmatch(text):
            with contextlib.suppress(ValueError, RecursionError):
                text = json.loads(text)
        if problem := _find_problem(text):
            raise InputError(f"{key}: the prompt of row {number} {problem}")
        if as_chat and isinstance(text, str):
            text = [{"role": "user", "content": text}]
        if system_prompt and isinstance(text, str):
            raise InputError(
                f"data.system_prompt: the prompt of row {number} is a string, which cannot "
                "have a system message; set data.as_chat=true, or leave it out"
            )
        if not isinstance(text, str):
            text = [message | {"content": _join_parts(message["content"])} for message in text]
        if system_prompt and text[0]["role"] != "system":
            text = [{"role": "system", "content": system_prompt}, *text]
        token_ids = tokenize(text)
        if not token_ids:
            raise InputError(f"{key}: the prompt of row {number} has no tokens")
        content = json.dumps(text, sort_keys=True, ensure_ascii=False)
        prompt_id = hash_text(f"{occurrences[content]}:{content}")  # equal prompts differ
        occurrences[content] += 1
        if len(token_ids) > max_prompt_length:
            num_dropped += 1
            continue
        columns = {name: value for name, value in row.items() if name != "prompt"}
        prompts.append(Prompt(prompt_id, text, tuple(token_ids), columns))
    return PromptSet(prompts, num_dropped)


def make_tokenize(
    tokenizer, schemas: Sequence[dict] = ()
) -> Callable[[str | list[dict]], list[int]]:
    """Return the function from a prompt to its ids, which a response continues.

    Strings get the tokenizer's prefix (BOS), unless they begin with it, and not its suffix (EOS).
    Chats go through the chat template, with tools' schemas and the header of the model's turn; a
    last message of the assistant is continued instead."""

    def tokenize(text: str | list[dict]) -> list[int]:
        if isinstance(text, str):
            before = _ids_before(tokenizer)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids if ids[: len(before)] == before else before + ids
        if tokenizer.chat_template is None:
            problem = "its tokenizer has no chat template, but data has chat prompts"
            raise InputError(f"model.path: {problem}")
        is_begun = text[-1]["role"] == "assistant"
        how = {"add_generation_prompt": not is_begun, "continue_final_message": is_begun}
        return render(tokenizer, text, schemas, **how)

    return tokenize


@functools.lru_cache(maxsize=4)
def _ids_before(tokenizer) -> list[int]:
    """Return the ids that the tokenizer puts in front of every text that has tokens."""
    for probe in itertools.chain("a", tokenizer.get_vocab()):
        bare = tokenizer(probe, add_special_tokens=False)["input_ids"]
        whole = tokenizer(probe)["input_ids"]
        begins = range(len(whole) - len(bare) + 1)
        found = [whole[:i] for i in begins if whole[i : i + len(bare)] == bare]
        if bare and len(found) == 1:
            return found[0]
    return []


def render(tokenizer, messages: list[dict], schemas: Sequence[dict] = (), **how) -> list[int]:
    text = render_text(tokenizer, messages, schemas, **how)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render_text(tokenizer, messages: list[dict], schemas: Sequence[dict] = (), **how) -> str:
    """Render chat messages by the tokenizer's template, with options `how`. Raises InputError.

    Arguments of tool calls in JSON text stay text, unless the template puts quotes around it."""
    how |= {"tools": list(schemas) or None, "tokenize": False}
    try:
        text = tokenizer.apply_chat_template(messages, **how)
        quoted = [json.dumps(of, ensure_ascii=False) for of in _arguments_in_text(messages)]
        if any(arguments in text for arguments in quoted):
            return tokenizer.apply_chat_template(_with_parsed_arguments(messages), **how)
        return text
    except Exception as error:  # a template is a program, and fails in any way
        raise InputError(
            f"model.path: its chat template fails on {messages!r:.300}: {one_line(error)}"
        ) from error


def _function_of(call) -> dict:
    """Return what has the arguments of a tool call."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    return function if isinstance(function, dict) else {}


def _arguments_in_text(messages: list[dict]) -> list[str]:
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    found = [_function_of(call).get("arguments") for call in calls]
    return [arguments for arguments in found if isinstance(arguments, str)]


def _with_parsed_arguments(messages: list[dict]) -> list[dict]:
    messages = copy.deepcopy(messages)
    for message in messages:
        for function in map(_function_of, message.get("tool_calls") or []):
            with contextlib.suppress(TypeError, ValueError):
                function["arguments"] = json.loads(function.get("arguments"))
    return messages


def leave_out(
    prompts: PromptSet, held_out: Sequence[Prompt], columns: Collection[str] = ()
) -> PromptSet:
    """Return the prompts that are not held out.

    Prompts are compared by text and, where rows of equal text differ in `columns` (an instruction
    of a game, say), also by these columns, which both sets have."""

    def full(prompt: Prompt) -> tuple[str, str]:
        return str(prompt.text), plain_text([prompt.columns[name] for name in sorted(columns)])

    ambiguous: set[str] = set()  # texts of rows that differ otherwise
    for part in (prompts.prompts, held_out):
        counts = Counter(text for text, _ in set(map(full, part)))
        ambiguous |= {text for text, count in counts.items() if count > 1}

    def identity(prompt: Prompt) -> str | tuple[str, str]:
        return full(prompt) if str(prompt.text) in ambiguous else str(prompt.text)

    out = set(map(identity, held_out))
    left = [prompt for prompt in prompts.prompts if identity(prompt) not in out]
    ids = set(map(id, held_out))  # of the objects: rows of another file have equal uids
    num_taken = sum(id(prompt) in ids for prompt in prompts.prompts)
    return PromptSet(left, prompts.num_dropped, len(prompts) - num_taken - len(left))


def reasoning_gym_rows(tasks: Sequence, size: int, seed: int) -> list[dict]:
    """Return `size` procedural problems from a weighted mixture of reasoning-gym tasks.

    tasks: mappings with `name`, `weight` and `config` (its parameters). Row i is a pure function of
    (tasks, seed, i): columns `prompt`, `answer`, `task` and `entry` (the gym's item)."""
    reasoning_gym = import_quietly("reasoning_gym")
    sources = []
    for number, task in enumerate(tasks):
        try:
            # Item i of a reasoning-gym task draws from seed + i: seeds far apart keep mixtures and
            # held-out sets disjoint.
            task_seed = random.Random(f"{seed}/{number}").getrandbits(48)
            options = {"size": size, "seed": task_seed, **task["config"]}
            sources.append(reasoning_gym.create_dataset(task["name"], **options))
            sources[-1][0]  # some parameters fail only here
        except Exception as error:  # each task checks its parameters in its own way
            raise InputError(
                f"data.tasks[{number}] ({task['name']}): {shown(error, str)}"
            ) from error
    weights = [task["weight"] for task in tasks]
    rows = []
    for i in range(size):
        which = random.Random(f"{seed}-{i}").choices(range(len(tasks)), weights=weights)[0]
        entry = sources[which][i]
        columns = {"prompt": entry["question"], "answer": entry["answer"], "entry": entry}
        rows.append(columns | {"task": tasks[which]["name"]})
    return rows


def _find_problem(prompt) -> str | None:
    if not isinstance(prompt, (str, list)):
        return f"is {prompt!r}, neither a string nor a list of chat messages"
    if not prompt:
        return "is empty"
    if isinstance(prompt, str) and _CHAT.fullmatch(prompt):
        return f"is {prompt!r:.200}, a chat as text that is not JSON"
    for message in prompt if isinstance(prompt, list) else []:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            return f"has {message!r}, not a message with 'role' and 'content'"
        content = message["content"]
        for part in content if isinstance(content, list) else []:
            is_text = isinstance(part, dict) and part.get("type") == "text"
            if not is_text or not isinstance(part.get("text"), str):
                return f"has {content!r:.200}, which has parts that are not text"
        if not isinstance(message["role"], str) or not (
            isinstance(content, (str, list)) or (content is None and message.get("tool_calls"))
        ):
            return f"has {message!r}, whose role or content is not text"
        if not isinstance(message.get("tool_calls") or [], list):
            return f"has {message!r:.200}, whose tool_calls are no list"
    try:
        json.dumps(prompt, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"has an incomplete character: {error}"
    return None


def _join_parts(content):
    return "".join(p["text"] for p in content) if isinstance(content, list) else content


def has_date(template: str | dict | None) -> bool:
    """Whether a chat template reads the clock."""
    return "strftime_now" in plain_text(template)


def data_state(
    template: str | dict | None,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    now_s: int = 0,
) -> dict[str, np.ndarray]:
    """Return fingerprints of rows, in order, and template, int64; if that has a date, its now_s."""
    return {
        ROWS: fingerprints(prompts),
        HELD_OUT: fingerprints(held_out),
        TEMPLATE: np.array([fingerprint(template)]),
    } | ({DATE: np.array([now_s])} if has_date(template) else {})


def fingerprints(prompts: Sequence[Prompt]) -> np.ndarray:
    """Return hashes of text, tokens and columns of each prompt, int64, equal in every process."""
    # Ids are hashes of the texts.
    found = [fingerprint([p.prompt_id, p.token_ids, p.columns]) for p in prompts]
    return np.array(found, np.int64)


def fingerprint(value) -> int:
    return hash_text(plain_text(value))


def hash_text(text: str) -> int:
    """Return 63 bits of a text's SHA-256."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def plain_text(value) -> str:
    """Write a value as JSON, and types that JSON lacks as Python's repr without addresses."""

    def plain(other) -> str | list[str]:
        if isinstance(other, (set, frozenset)):
            return sorted(map(repr, other))
        return re.sub(r" at 0x[0-9a-f]+", "", repr(other))

    try:
        return json.dumps(value, sort_keys=True, default=plain)
    except (TypeError, ValueError):  # keys that are no text
        return str(plain(value))


def check_continued(
    saved: dict[str, np.ndarray],
    state: dict[str, np.ndarray],
    folder: str,
    is_allowed: bool,
    warn: Callable[[str], None],
) -> None:
    """Compare data and frozen weights with those of a checkpoint, which may lack fingerprints.

    Warns of appended rows. Raises InputError for other differences unless `is_allowed`."""
    if ROWS not in saved:
        warn(f"warning: {folder} has no fingerprints: whether it had the same data is not checked")
        return
    problem = None
    if WEIGHTS in saved and not np.array_equal(saved[WEIGHTS], state[WEIGHTS]):
        problem = "model.path, model.teacher_path, reward.functions: weights that stay as they "
        problem += "are differ from those"
    elif not np.array_equal(saved[TEMPLATE], state[TEMPLATE]):
        problem = "model.path, model.chat_template_path: the chat template differs from that"
    elif not np.array_equal(saved[HELD_OUT], state[HELD_OUT]):
        problem = "data: held-out rows, their tokens or order differ from those"
    elif (added := len(state[ROWS]) - len(saved[ROWS])) < 0:
        problem = f"data: {len(state[ROWS])} training rows, fewer than the {len(saved[ROWS])}"
    elif len(differing := np.flatnonzero(state[ROWS][: len(saved[ROWS])] != saved[ROWS])):
        problem = f"data: {len(differing)} of {len(saved[ROWS])} training rows, their tokens or "
        problem += f"order differ (first: row {differing[0]}) from those"
    if problem is None:
        if added:
            warn(f"data: {added} training rows appended since {folder} are in use from now on")
    elif is_allowed:
        warn(f"warning: {problem} in {folder}")
    else:
        raise InputError(
            f"{problem} in {folder}; set another run.output_dir for a new run, or "
            "run.allow_changed_data=true to resume with it"
        )


def check_equal(data: dict[str, np.ndarray], gather: Callable[[np.ndarray], np.ndarray]) -> None:
    """Raise InputError unless all ranks have read the same rows. gather: see `Ranks.all_gather`."""
    found = gather(np.array([fingerprint([part.tolist() for part in data.values()])]))
    if (found != found[0]).any():
        raise InputError(
            "data: ranks have read different rows; some of data.tasks depend on "
            "PYTHONHASHSEED; set it to 0"
        )
