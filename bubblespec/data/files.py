"""The files of a path: below a folder or of a glob, by split, each of them once."""

import contextlib
import fnmatch
import glob
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bubblespec.errors import InputError, one_line

FILE_FORMATS = {f".{name}": name for name in ("json", "csv", "tsv", "parquet", "arrow")}
FILE_FORMATS |= {".jsonl": "json", ".ndjson": "json"}
# Files of the hub's library next to rows.
DESCRIPTIONS = {"config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json"}
# Words in names that assign a file to a split, as on the hub.
SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
# What a run writes into its folder, which has two of these files from the first step on.
_OF_RUN = re.compile(
    r"config\.yaml|(metrics|samples)\.jsonl|checkpoint-.+|rollouts|trace|timeline|profile|tensorboard"
)
POINTER = "version https://git-lfs.github.com/"  # how a file begins whose content is elsewhere
IS_POINTER = "is a pointer of git-lfs, not the file: run `git lfs pull`"
_SHARD = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*")  # whose name is that of its split


def files_by_split(path: str, key: str) -> tuple[dict[str, list[str]], list[str]]:
    """Return the files of known formats at a path, below a folder or of a glob, by split.

    And what else is there: other files, and folders that a glob names but does not reach into."""
    folder = Path(path)
    try:
        if (saved := folder / "dataset_dict.json").is_file():  # of `save_to_disk`
            splits = json.loads(saved.read_text(encoding="utf-8"))["splits"]
            return {split: _saved_files(folder / split) for split in splits}, []
        if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
            return {"train": _saved_files(folder)}, []
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{path} is a damaged folder of save_to_disk: {one_line(error)}"
        raise InputError(f"{key}: {problem}") from error
    if folder.is_file():
        return ({"train": [path]}, []) if suffix_of(path) in FILE_FORMATS else ({}, [])
    found = _below(path) if folder.is_dir() else _once(_glob(path), path)
    by_split: dict[str, list[str]] = {}
    others = []
    for name in sorted(name for name in found if not _is_of_run(name, _base(path))):
        is_known = suffix_of(name) in FILE_FORMATS and os.path.basename(name) not in DESCRIPTIONS
        if is_known and not os.path.isdir(name):
            split = _split_of(os.path.relpath(name, _base(path)))
            by_split.setdefault(split, []).append(name)
        else:
            others.append(name)
    for split in [split for split in by_split if "+" in split]:
        if len(by_split) > 1:
            names = f"{names_of(by_split[split], path)} may be {split.replace('+', ' or ')}"
            raise InputError(f"{key}: {path}: {names}; rename, or give files of one split alone")
        by_split = {"train": by_split[split]}
    return by_split, others


def _below(folder: str) -> Iterator[str]:
    """Yield the files below a folder but hidden ones, and folders that cannot be read.

    A folder that links lead to as well is visited once, by its own name if that is below."""
    visited, waiting = set(), deque([folder])
    while waiting:
        here = waiting.popleft()
        if (place := os.path.realpath(here)) in visited:
            continue
        visited.add(place)
        try:
            entries = [entry for entry in os.scandir(here) if not entry.name.startswith(".")]
        except OSError:
            yield here
            continue
        for entry in entries:
            if not entry.is_dir():
                yield entry.path
            elif entry.is_symlink():
                waiting.append(entry.path)
            else:
                waiting.appendleft(entry.path)


def _glob(path: str) -> list[str]:
    """Return what a glob finds; Python's takes exponential time where folders link to others."""
    parts = path.split("/")
    if "**" not in parts:
        return glob.glob(path)
    at = parts.index("**")
    head = "/".join(parts[:at]) or ("/" if path.startswith("/") else ".")
    pairs = ((folder, name) for folder in glob.glob(head) for name in _below(folder))
    return [name for folder, name in pairs if _matches(_parts(name, folder), parts[at:])]


def _matches(parts: Sequence[str], pattern: list[str]) -> bool:
    """parts: of a relative path."""
    if not pattern or not parts:
        return not parts and set(pattern) <= {"**"}
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or _matches(parts[1:], pattern)
    return fnmatch.fnmatch(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _parts(name: str, base: str) -> tuple[str, ...]:
    return Path(os.path.relpath(name, base)).parts


def _once(names: Iterable[str], path: str) -> list[str]:
    """Return what a glob finds, each file of a folder once, though links may lead there as well."""
    by_place: dict[tuple[str, str], str] = {}
    base = _base(path)
    for name in sorted(names):
        folder, file = os.path.split(name)
        place, below = os.path.realpath(folder), os.path.relpath(folder or ".", base)
        is_direct = place == os.path.normpath(os.path.join(os.path.realpath(base), below))
        if is_direct or (place, file) not in by_place:
            by_place[place, file] = name
    return list(by_place.values())


def _is_of_run(name: str, base: str) -> bool:
    """Whether a run has written a file or folder: below the base, into the run's own folder."""
    parts = _parts(name, base)
    folders = [os.path.join(base, *parts[:depth]) for depth in range(len(parts))]
    return any(
        _OF_RUN.fullmatch(part) and _is_run(folder)
        for folder, part in zip(folders, parts, strict=True)
    )


def _is_run(folder: str) -> bool:
    names = ("config.yaml", "metrics.jsonl")
    return all(os.path.isfile(os.path.join(folder, name)) for name in names)


def is_pointer(path: str) -> bool:
    """Whether a file is what git leaves in place of a large one until `git lfs pull`."""
    with contextlib.suppress(OSError), open(path, "rb") as file:  # else reading it raises
        return file.read(len(POINTER)) == POINTER.encode()
    return False


def _saved_files(folder: Path) -> list[str]:
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return [str(folder / file["filename"]) for file in state["_data_files"]]


def _split_of(path: str) -> str:
    """Return the split, or several joined by a plus, that a path has a word of, or else train."""
    if shard := _SHARD.fullmatch(path):
        return shard[1]
    for part in os.path.split(path):
        words = set(re.split(r"[^a-z]+", part.lower()))
        if splits := [split for split, names in SPLITS.items() if words & names]:
            return "+".join(splits)
    return "train"


def _base(path: str) -> str:
    """Return the folder of a path that is a folder or a glob: what precedes the first wildcard."""
    return path if os.path.isdir(path) else os.path.dirname(re.split(r"[*?[]", path)[0]) or "."


def names_of(found: list[str], path: str) -> str:
    """Return the first few files below a folder or of a glob, for a line."""
    names = [os.path.relpath(name, _base(path)) for name in found[:4]]
    return ", ".join(names) + (f" and {len(found) - 4} more" if found[4:] else "")


def suffix_of(path: str) -> str:
    """Return the suffix of the format, which a suffix of a compression may follow."""
    stem, suffix = os.path.splitext(path.lower())
    return os.path.splitext(stem)[1] if suffix in (".gz", ".bz2", ".xz", ".zst") else suffix
