"""Rows of local files, below a folder or of a glob and by split, and of hub datasets.

All files are read here. `datasets` converts values of JSON, JSONL, CSV and TSV: texts that look
like dates, the numbers of a column that has one fraction, cells of a CSV file. It reads Parquet
files and folders of `save_to_disk` from a cache that goes by their time stamps, so only the types
of their columns are left to it. Hub datasets are its own."""

import bz2
import contextlib
import csv
import fnmatch
import functools
import glob
import gzip
import io
import json
import lzma
import operator
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from bubblespec.errors import InputError, log, one_line


def _open_zstd(path: str, mode: str, **options) -> io.TextIOWrapper:
    import pyarrow  # here, as it takes a tenth of a second

    return io.TextIOWrapper(pyarrow.input_stream(path, compression="zstd"), **options)


# Functions that open compressed files, by first bytes.
COMPRESSIONS: dict[bytes, Callable] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": _open_zstd,
}


def load_rows(
    path: str,
    name: str | None,
    split: str,
    *,
    key: str = "data.path",
    columns: dict[str, str] | None = None,
    warn: Callable[[str], None] = log,
) -> list[dict]:
    """Return the rows of local files, of a folder of `save_to_disk`, or of a hub dataset.

    Local files are JSON, JSONL, CSV, TSV or Parquet: a file, a folder or a glob. All rows get the
    same columns, None where a row lacks one. Files belong to the splits that the names of their
    folders or their own contain; a single split is also `train`. A slice such as train[:100] may be
    taken. Loading scripts are never run. key: the configuration's key, for errors; columns: {name:
    source} for columns to rename, where a dot in the source reaches into a nested column; warn:
    gets a line about what is read of a folder or glob."""
    import datasets

    # Its errors are raised below, in one line.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    files, others = files_by_split(path, key)
    if len(files) == 1 and not others and not split.startswith(next(iter(files))):
        files = {"train": next(iter(files.values()))}
    formats = sorted({FILE_FORMATS[suffix_of(file)] for of in files.values() for file in of})
    is_path = os.path.exists(path) or path.startswith((".", "/", "~")) or "*" in path
    if not files and (is_path or suffix_of(path) in FILE_FORMATS):
        found = f"; not read: {names_of(others, path)}" if others else ""
        raise InputError(f"{key}: no JSON, JSONL, CSV, TSV or Parquet file at {path}{found}")
    if len(formats) > 1:
        raise InputError(f"{key}: {path} mixes file formats {formats}; use one format")
    if files and name is not None:
        problem = f"the files of {path} have no subsets; leave it out"
        raise InputError(f"data.name: {name}, but {problem}")
    try:
        if not files:
            rows = list(datasets.load_dataset(path, name, split=split))
        else:
            rows = _take(files, READERS[formats[0]], split)
    except InputError as error:
        raise InputError(f"{key}: {error}") from error
    except Exception as error:  # `datasets` raises many kinds
        cause = error.__cause__ or error  # DatasetGenerationError says nothing itself
        what = path if files else f"{path} (no such file or folder; taken as a hub dataset)"
        raise InputError(f"{key}: cannot load {what}, split {split}: {one_line(cause)}") from error
    if not rows:
        raise InputError(f"{key}: {path}, split {split}, has no rows")
    if files and formats != ["arrow"] and not os.path.isfile(path):
        used = [of for of in files if split == "all" or re.search(rf"\b{re.escape(of)}\b", split)]
        names = [name for of in used for name in files[of]]
        line = f"{key}: {path}, split {split}: {len(rows)} rows of {len(names)} file"
        line += "s" * (len(names) > 1)
        parts = {line: names} | {f"split {of}": files[of] for of in files if of not in used}
        parts |= {"not read": others} if others else {}
        warn("; ".join(f"{what} ({names_of(of, path)})" for what, of in parts.items()))
    lacking = dict.fromkeys(name for row in rows for name in row)
    if any(len(row) < len(lacking) for row in rows):
        rows = [lacking | row for row in rows]
    added = [_column(rows, f"data.columns.{name}", of) for name, of in (columns or {}).items()]
    for name, values in zip(columns or {}, added, strict=True):
        rows = [row | {name: value} for row, value in zip(rows, values, strict=True)]
    if "prompt" not in rows[0]:
        has = f"{path} has no prompt column; it has {', '.join(rows[0])}"
        raise InputError(f'{key}: {has}; set "data.columns={{prompt: {_likely_prompt(rows[0])}}}"')
    return rows


def _likely_prompt(row: dict) -> str:
    """Return the column that is most likely the prompt: by its name, else the first with text."""
    texts = [name for name, value in row.items() if isinstance(value, str | list)]
    return next(filter(row.__contains__, PROMPTS), [*texts, "COLUMN"][0])


def _take(files: dict[str, list[str]], read: Callable[[str], Iterator[dict]], split: str) -> list:
    """Return the rows of a split, of a slice, or of a sum of these. Raises ValueError."""
    import datasets

    for path in (path for paths in files.values() for path in paths if is_pointer(path)):
        raise InputError(f"{path} {IS_POINTER}")
    rows = {of: [row for path in paths for row in read(path)] for of, paths in files.items()}
    instruction = datasets.ReadInstruction.from_spec("+".join(rows) if split == "all" else split)
    parts = instruction.to_absolute({of: len(of_split) for of, of_split in rows.items()})
    return [row for part in parts for row in rows[part.splitname][part.from_ : part.to]]


def _open(path: str, newline: str | None = None):
    """Open a text file, compressed or not."""
    with open(path, "rb") as file:
        begin = file.read(max(map(len, COMPRESSIONS)))
    opens = next((opens for magic, opens in COMPRESSIONS.items() if begin.startswith(magic)), open)
    return opens(path, "rt", encoding="utf-8-sig", newline=newline)


def _read_json(path: str) -> Iterator[dict]:
    """Yield the objects of a JSON or JSONL file, in sequence or in a list. Raises InputError."""
    with _open(path) as file:
        text = file.read()

    def where(position: int) -> str:
        line = text.count("\n", 0, position) + 1
        return f"{path}, line {line}"

    position = 0
    while found := _TEXT.search(text, position):
        begin = found.start()
        try:
            value, position = _DECODER.raw_decode(text, begin)
        except json.JSONDecodeError as error:
            # A torn line shows where the next one begins.
            last = begin if error.pos == begin else len(text[: error.pos].rstrip()) - 1
            raise InputError(f"{where(last)} is not JSON: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where(begin)}: {one_line(error)}") from error
        for row in value if isinstance(value, list) else [value]:
            if not isinstance(row, dict):
                raise InputError(f"{where(begin)} has {row!r:.100}, not an object with a prompt")
            yield row


def _without_repeats(pairs: list[tuple[str, object]]) -> dict:
    """Return a JSON object. Raises ValueError where a key is given twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"a key is given twice in {[key for key, _ in pairs]!r:.200}")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)
_TEXT = re.compile(r"\S")


def _read_csv(path: str, delimiter: str = ",") -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file, whose cells are texts. Raises InputError."""
    csv.field_size_limit(sys.maxsize)
    with _open(path, newline="") as file:
        lines = csv.reader(file, strict=True, delimiter=delimiter)
        try:
            header = [name or f"Unnamed: {n}" for n, name in enumerate(next(lines, []))]
            if len(set(header)) < len(header):
                raise InputError(f"{path} has two columns with the same name: {header}")
            for cells in filter(None, lines):
                if len(cells) > len(header):
                    count = f"{len(cells)} cells, but the header has {len(header)}"
                    raise InputError(f"{path}, line {lines.line_num} has {count}")
                yield dict(zip(header, cells, strict=False))
        except csv.Error as error:
            line = f"{path}, line {lines.line_num} is not CSV: {error}"
            raise InputError(line) from error


def _read_parquet(path: str) -> Iterator[dict]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        yield from _typed(file.iter_batches())


def _read_arrow(path: str) -> Iterator[dict]:
    """path: of either of its two forms."""
    import pyarrow

    with open(path, "rb") as file:
        try:
            batches: Iterable = pyarrow.ipc.open_stream(file)
        except pyarrow.ArrowInvalid:
            file.seek(0)
            found = pyarrow.ipc.open_file(file)
            batches = map(found.get_batch, range(found.num_record_batches))
        yield from _typed(batches)


def _typed(batches: Iterable) -> Iterator[dict]:
    """Yield the rows of Arrow batches, with values as `datasets` gives them."""
    import datasets

    for batch in batches:
        table = datasets.table.InMemoryTable.from_batches([batch])
        yield from datasets.Dataset(table, fingerprint="of no cache")


READERS = {"json": _read_json, "csv": _read_csv, "parquet": _read_parquet, "arrow": _read_arrow}
READERS["tsv"] = functools.partial(_read_csv, delimiter="\t")


def _column(rows: list[dict], key: str, source: str) -> list:
    """Return the values of a column; dots in `source` that are not in its name reach into it."""
    if source in rows[0]:
        return [row[source] for row in rows]
    try:
        return [functools.reduce(operator.getitem, source.split("."), row) for row in rows]
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{key}: some row has no column '{source}'; the first row has {list(rows[0])}"
        ) from error


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
# Names of the prompt in public data.
PROMPTS = ("question", "problem", "instruction", "query", "messages", "input", "text")
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
