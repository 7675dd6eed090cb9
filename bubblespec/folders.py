"""Files and folders beside their content: locks, flushes, renames, keys for other versions.

File systems differ in what they can do: what is not needed is tried, and may fail."""

import contextlib
import copy
import errno
import fcntl
import itertools
import json
import os
import weakref
from collections.abc import Callable
from typing import IO, Any

from bubblespec.errors import InputError, log

NEW_RUN = "no checkpoint in this folder: the run starts at step 1; the earlier file"


_locks: weakref.WeakSet[IO] = weakref.WeakSet()


def _close_locks(path: str | None = None) -> None:
    """Close this process's files of locks, or the one at `path`."""
    for file in list(_locks):
        if path in (None, file.name):
            file.close()


os.register_at_fork(after_in_child=_close_locks)  # else a child that outlives us keeps the lock


def lock(path: str, output_dir: str) -> IO:
    """Return a locked file; a lock that this process has had on it ends. Raises InputError.

    flock, not lockf: that lock would end where any code here reads and closes the file, as a logger
    does that copies the folder."""
    _close_locks(path)
    file = open(path, "w")  # noqa: SIM115 (open as long as the run)
    _locks.add(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise InputError(f"run.output_dir: {output_dir} is in use by another run") from error
    except OSError as error:
        reason = f"{output_dir} cannot be locked ({error.strerror})"
        log(f"warning: run.output_dir: {reason}: use it for one run at a time")
    return file


def flush(path: str) -> None:
    """Flush a file or folder to disk, where its file system can do so."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):  # data is lost
            raise


def has_content(path: str) -> bool:
    """Whether a file is more than the empty one, or the zeros, that a power failure may leave."""
    with open(path, "rb") as file:
        return bool(file.read().strip(b"\0"))


def keep_aside(path: str, why: str = NEW_RUN) -> None:
    """Rename a file or folder of an earlier run, so that a new run does not overwrite it.

    why: beginning of the line that says so."""
    if not os.path.exists(path) or not os.path.getsize(path):
        return
    kept = next(name for n in itertools.count(1) if not os.path.exists(name := f"{path}.{n}"))
    os.rename(path, kept)
    log(f"{why} is now {kept}")


def add_old_keys(folder: str, read: Callable[[dict], Any]) -> None:
    """Write what transformers 4 reads, too, into the files of a saved model and tokenizer.

    It would take the default rotary embeddings without a word, and has no class TokenizersBackend.
    read: config.json's content to a configuration, which must stay what it is."""

    def add_rotary(path: str) -> None:
        config = _read_json(path)
        new = _with_rotary(config)
        with contextlib.suppress(Exception):  # of a model's own code, which reads none of this
            if _has(read(copy.deepcopy(new)).to_dict(), read(config).to_dict()):
                _write_json(path, new)

    def rename_class(path: str) -> None:
        config = _read_json(path)
        if config.get("tokenizer_class") == "TokenizersBackend":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            if isinstance(config.get("extra_special_tokens"), list):
                config["additional_special_tokens"] = config.pop("extra_special_tokens")
            _write_json(path, config)

    for name, change in (("config.json", add_rotary), ("tokenizer_config.json", rename_class)):
        if os.path.isfile(path := os.path.join(folder, name)):  # an adapter has none
            change(path)


def _read_json(path: str) -> dict:
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _write_json(path: str, content: dict) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, sort_keys=True, ensure_ascii=False)
        file.write("\n")


def _with_rotary(config: dict) -> dict:
    """Return a configuration, its parts included, with the old keys of rotary embeddings."""
    config = {k: _with_rotary(v) if isinstance(v, dict) else v for k, v in config.items()}
    by_layer = config.get("rope_parameters") or {}
    rope = by_layer.get("full_attention", by_layer)
    if "rope_theta" not in rope:
        return config
    theta, share = rope["rope_theta"], rope.get("partial_rotary_factor")
    of_all = {"rope_theta": theta, "partial_rotary_factor": share}
    old = {name: value for name, value in of_all.items() if value is not None}
    if config.get("model_type") == "gpt_neox":
        old |= {"rotary_emb_base": theta, "rotary_pct": share}
    if "sliding_attention" in by_layer:
        old["rope_local_base_freq"] = by_layer["sliding_attention"]["rope_theta"]
    if rope["rope_type"] != "default":
        old["rope_scaling"] = {k: v for k, v in rope.items() if k not in of_all}
    return config | old


def _has(whole: Any, part: Any) -> bool:
    """Whether a dictionary, and each one in it, has the entries of another one."""
    if not (isinstance(whole, dict) and isinstance(part, dict)):
        return whole == part
    return all(key in whole and _has(whole[key], value) for key, value in part.items())
