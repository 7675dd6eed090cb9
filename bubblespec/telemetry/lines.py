"""Files with one JSON object per line, which a resumed run continues."""

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from bubblespec.errors import InputError, log


class JsonLines:
    """A file of one run on rank 0.

    With `num_updates` > 0 it is continued: `records` are its lines for which `is_kept` holds, and
    other lines are cut off. With 0 an existing file is kept under another name. Raises InputError
    if it cannot be written."""

    def __init__(self, path: str, num_updates: int, is_kept: Callable[[dict], bool]):
        self.name = os.path.basename(path)
        try:
            if num_updates == 0:
                keep_aside(path)
            self.records = _cut(path, is_kept)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (kept open for the run)
        except OSError as error:
            raise InputError(f"run.output_dir: cannot write to {path}: {error.strerror}") from error
        self._size = self._file.tell()  # bytes of whole lines
        self._waiting: list[str] = []  # lines that could not be written yet

    def write(self, record: dict[str, Any]) -> bool:
        """Append a line after the waiting ones. Return whether all of them are in the file."""
        line = json.dumps(_plain(record), allow_nan=False, default=str) + "\n"
        self._waiting.append(line)
        return self._flush()

    def close(self) -> None:
        """Write the waiting lines, and close the file."""
        self._flush()
        self._file.close()
        if self._waiting:
            log(f"warning: {len(self._waiting)} lines of {self.name} are lost")

    def _flush(self) -> bool:
        data = "".join(self._waiting).encode()
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)  # no partial line stays
            if len(self._waiting) == 1:
                reason = f"{self.name} cannot be written ({error.strerror})"
                log(f"warning: {reason}; its lines wait in memory")
            return False
        self._size = self._file.tell()
        self._waiting = []
        return True


def _plain(value: Any) -> Any:
    """Return a value of JSON's types: NaN and infinity become null, arrays lists."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(entry) for entry in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def keep_aside(path: str) -> None:
    """Rename a file or folder of an earlier run, so that a new run does not overwrite it."""
    if not os.path.exists(path) or not os.path.getsize(path):
        return
    kept = next(name for n in itertools.count(1) if not os.path.exists(name := f"{path}.{n}"))
    os.rename(path, kept)
    log(f"no checkpoint in this folder: the run starts at step 1; the earlier file is now {kept}")


def _cut(path: str, is_kept: Callable[[dict], bool]) -> list[dict]:
    """Drop the lines after the last checkpoint, whose steps are repeated.

    Return the other lines."""
    if not os.path.exists(path):
        return []
    records = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # torn by a kill
                continue
            if is_kept(record):
                records.append(record)
    temporary = path + ".tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        # The last line may have lost its end.
        file.writelines(json.dumps(record) + "\n" for record in records)
    os.replace(temporary, path)
    return records
