"""Rows of local files and of hub datasets.

All files are read here. `datasets` converts values of JSON, JSONL, CSV and TSV: texts that look
like dates, the numbers of a column that has one fraction, cells of a CSV file. It reads Parquet
files and folders of `save_to_disk` from a cache that goes by their time stamps, so only the types
of their columns are left to it. Hub datasets are its own."""

import bz2
import csv
import functools
import gzip
import io
import json
import lzma
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator

from bubblespec.data.files import (
    FILE_FORMATS,
    IS_POINTER,
    files_by_split,
    is_pointer,
    names_of,
    suffix_of,
)
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
        raise InputError(f"{key}: {path} has no prompt column; it has {list(rows[0])}")
    return rows


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
