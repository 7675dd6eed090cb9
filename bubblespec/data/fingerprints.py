"""Fingerprints of rows and chat template: a run resumes on the same data, equal on all ranks."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence

import numpy as np

from bubblespec.errors import InputError
from bubblespec.types import Prompt

ROWS, HELD_OUT, TEMPLATE = "data.rows", "data.held_out", "data.template"


def data_state(
    template: str | dict | None, prompts: Sequence[Prompt], held_out: Sequence[Prompt]
) -> dict[str, np.ndarray]:
    """Return fingerprints of rows, in order, and of the chat template, int64."""
    return {
        ROWS: fingerprints(prompts),
        HELD_OUT: fingerprints(held_out),
        TEMPLATE: np.array([fingerprint(template)]),
    }


def fingerprints(prompts: Sequence[Prompt]) -> np.ndarray:
    """Return hashes of text, tokens and columns of each prompt, int64, equal in every process."""
    found = [fingerprint([p.uid, p.token_ids, p.columns]) for p in prompts]  # uid: hash of the text
    return np.array(found, np.int64)


def fingerprint(value) -> int:
    """Return 63 bits of a hash of a value's content."""
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
    """Compare the data with that of a checkpoint, which may lack fingerprints.

    Warns of appended rows. Raises InputError for other differences unless `is_allowed`."""
    if ROWS not in saved:
        warn(f"warning: {folder} has no fingerprints: whether it had the same data is not checked")
        return
    problem = None
    if not np.array_equal(saved[TEMPLATE], state[TEMPLATE]):
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
    """Raise InputError unless all ranks have read the same rows. gather: see `Ranks.gather`."""
    found = gather(np.array([fingerprint([part.tolist() for part in data.values()])]))
    if (found != found[0]).any():
        raise InputError(
            "data: ranks have read different rows; some of data.tasks depend on "
            "PYTHONHASHSEED; set it to 0"
        )
