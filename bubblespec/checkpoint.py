"""Checkpoints: written to a temporary folder, flushed to disk, then renamed.

A folder named checkpoint-N is complete unless the disk fails. SHA256SUMS detects that (`sha256sum
-c SHA256SUMS`), so a run never resumes from a damaged checkpoint.

Noise is a function of a sample's id, and a batch is one of the step and of earlier draws.
Exactness therefore needs weights, optimizer state, the step number and the schedule's state. Drafts
and histories are saved for speed."""

import contextlib
import copy
import filecmp
import glob
import hashlib
import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from bubblespec.config import Config, flatten, resume_classes
from bubblespec.config.file import config_to_yaml, load_config
from bubblespec.config.keys import EXACT, ROUNDING
from bubblespec.distributed.ranks import Ranks
from bubblespec.errors import InputError, log, one_line
from bubblespec.folders import flush, has_content, keep_aside, lock
from bubblespec.types import HEADS

STATE_FILE = "trainer_state.json"
SUMS_FILE = "SHA256SUMS"
CONFIG_FILE = "config.yaml"
SPECULATION_FILE = "speculation.npz"
PLANNER_FILE = "planner.npz"
OPTIMIZER_FILE = "optimizer.pt"
BEST = "checkpoint-best"
TEMPORARY = "tmp-checkpoint-"  # beginning of names of what is being written or deleted
FORMAT = 3
ADVICE = "set the same to resume, or another run.output_dir for a new run"
# Errors of reading files that are torn or of another format.
UNREADABLE: tuple[type[Exception], ...] = (OSError, ValueError, KeyError, RuntimeError, EOFError)
UNREADABLE += (zipfile.BadZipFile, pickle.UnpicklingError)


def save_checkpoint(
    config: Config,
    ranks: Ranks,
    state: dict,
    *,
    model: PreTrainedModel,
    tokenizer,
    optimizer,
    arrays: dict[str, dict[str, Any]],
    writers: Sequence[Callable[[str], None]] = (),
    then: Callable[[], None] = lambda: None,
) -> str | None:
    """Save a checkpoint after `state["step"]` updates, on all ranks together.

    state: for trainer_state.json, see `read_state`; arrays: by file name; writers: add files of
    their own to the folder that they are given, on rank 0; then: called there once the checkpoint
    is complete, before older ones are deleted (but not the best one).

    Return None, or in one line why saving failed (a full disk, for instance), the same on every
    rank. A failed save leaves nothing, and earlier checkpoints stay."""
    optimizer_state = optimizer.state_dict()  # all ranks together where it is sharded
    step, output_dir = state["step"], config.run.output_dir
    temporary = os.path.join(output_dir, f"{TEMPORARY}{step}")
    folder_of = os.path.join(output_dir, "checkpoint-{}").format
    state = {"format": FORMAT, "world_size": ranks.world_size, "config": flatten(config)} | state

    def save() -> str | None:
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            os.makedirs(temporary)
            heads = None if config.model.lora_r else copied(vars(model).get(HEADS) or {})
            state_dict = heads | model.state_dict() if heads else None
            model.save_pretrained(temporary, state_dict=state_dict)
            tokenizer.save_pretrained(temporary)
            add_old_keys(temporary, type(model.config).from_dict)
            # torch gives no reason where it cannot write to a file that it has opened itself
            with open(os.path.join(temporary, OPTIMIZER_FILE), "wb") as file:
                torch.save(optimizer_state, file)
            for name, content in arrays.items():
                np.savez(os.path.join(temporary, name), **content)
            for write in writers:
                write(temporary)
            Path(temporary, STATE_FILE).write_text(json.dumps(state, indent=1), "utf-8")
            _commit(temporary, folder_of(step))
            then()
            best = {os.path.realpath(os.path.join(output_dir, BEST))}
            if state.get("best"):  # a file system without links has no checkpoint-best
                best.add(os.path.realpath(folder_of(state["best"]["step"])))
            # Later ones are damaged, or of a continuation that was given up: they do not count.
            saved = [folder for folder in list_checkpoints(output_dir) if step_of(folder) <= step]
            for old in saved[: -config.run.save_total_limit]:
                if os.path.realpath(old) not in best:
                    remove_checkpoint(old)
            return None
        except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: torch.save
            shutil.rmtree(temporary, ignore_errors=True)
            reason = error.__context__ if isinstance(error.__context__, OSError) else error
            return " ".join(str(reason).split()) or type(reason).__name__

    return ranks.run_on_rank0(save)


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies on the host, as files cannot hold tensors that share memory."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


def _commit(temporary: str, final: str) -> None:
    """Write checksums, flush everything to disk, and rename last."""
    folders = list(os.walk(temporary, topdown=False))  # ends with the checkpoint's own
    paths = [os.path.join(folder, name) for folder, _, files in folders for name in files]
    names = [os.path.relpath(path, temporary) for path in paths]
    names.sort(key=lambda name: (name == STATE_FILE, name))
    sums = os.path.join(temporary, SUMS_FILE)
    with open(sums, "w", encoding="utf-8") as file:
        digests = _digests(temporary, names)
        file.writelines(f"{digest}  {name}\n" for name, digest in digests.items())
        mode = os.fstat(file.fileno()).st_mode
    for path in paths:  # safetensors makes files that only their owner can read
        with contextlib.suppress(OSError):
            os.chmod(path, mode)
    for path in (*paths, sums, *(folder for folder, *_ in folders)):
        flush(path)
    remove_checkpoint(final)
    os.rename(temporary, final)
    flush(os.path.dirname(final))


def remove_checkpoint(folder: str) -> None:
    """Delete a checkpoint, if there is one; renamed first, so that a kill leaves none in part."""
    parent, name = os.path.split(folder)
    renamed = os.path.join(parent, f"{TEMPORARY}old-{name}")
    shutil.rmtree(renamed, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rename(folder, renamed)
        flush(parent)
        shutil.rmtree(renamed)


def find_damage(folder: str) -> str | None:
    """Return the damage of a checkpoint, or None if all files match their checksums."""
    try:
        lines = Path(folder, SUMS_FILE).read_text("utf-8").splitlines()
        wanted = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError) as error:  # ValueError: a line of another form, or not UTF-8
        return f"{SUMS_FILE} cannot be read ({error})"
    if not wanted or list(wanted)[-1] != STATE_FILE:
        return f"{SUMS_FILE} is truncated"
    try:
        digests = _digests(folder, list(wanted))
    except OSError as error:
        return f"a file cannot be read: {error}"
    changed = [name for name in wanted if digests[name] != wanted[name]]
    return f"{changed[0]} does not match its checksum" if changed else None


def _digests(folder: str, names: list[str]) -> dict[str, str]:
    """Return the SHA-256 of each file; several at a time, as hashing releases the GIL."""

    def digest(name: str) -> str:
        with open(os.path.join(folder, name), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def lock_output_dir(config: Config, num_updates: int = 0) -> IO:
    """Lock output_dir until the returned file is closed or this process ends.

    Try what a save needs, write the configuration into it, remove unfinished saves, and keep aside
    checkpoints of the branch that is given up by resuming an earlier one after `num_updates`.
    Raises InputError if another run has locked the folder, or it cannot be written to."""
    output_dir = config.run.output_dir
    resolved = os.path.join(output_dir, CONFIG_FILE)
    trial = os.path.join(output_dir, f"{TEMPORARY}trial")
    try:
        os.makedirs(output_dir, exist_ok=True)
        file = lock(os.path.join(os.path.realpath(output_dir), ".lock"), output_dir)
        os.makedirs(trial, exist_ok=True)
        Path(trial, STATE_FILE).write_text("{}")
        _commit(trial, f"{trial}-whole")
        remove_checkpoint(f"{trial}-whole")
        if config.run.resume_from_checkpoint not in ("auto", "none"):
            for folder in list_checkpoints(output_dir):
                if step_of(folder) > num_updates:
                    later = f"the run goes on after {num_updates} updates; a later checkpoint"
                    keep_aside(folder, later)
        Path(resolved + ".tmp").write_text(config_to_yaml(config), "utf-8")
        flush(resolved + ".tmp")
        os.replace(resolved + ".tmp", resolved)  # never half written: the next start reads it
    except OSError as error:
        shutil.rmtree(trial, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.remove(resolved + ".tmp")
        reason = f"cannot write to {output_dir}: {error.strerror}"
        raise InputError(f"run.output_dir: {reason}") from error
    for unfinished in glob.glob(os.path.join(glob.escape(output_dir), f"{TEMPORARY}*")):
        shutil.rmtree(unfinished, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.remove(unfinished)  # a link
    return file


def list_checkpoints(output_dir: str) -> list[str]:
    """Return checkpoint folders, oldest first."""
    names = os.listdir(output_dir) if os.path.isdir(output_dir) else []
    names = [name for name in names if re.fullmatch(r"checkpoint-\d+", name)]
    return sorted((os.path.join(output_dir, name) for name in names), key=step_of)


def step_of(folder: str) -> int:
    return int(folder.rpartition("-")[2])


def find_checkpoint(config: Config, ranks: Ranks) -> str | None:
    """Return the folder to resume from, the same on all ranks, or None for a fresh start.

    Rank 0 alone reads the files. Raises InputError where resuming would not be exact, and where
    output_dir has a run of another configuration or checkpoints that are all damaged."""
    return ranks.run_on_rank0(lambda: _find_checkpoint(config, ranks.world_size))


def _find_checkpoint(config: Config, world_size: int) -> str | None:
    folder, output_dir = config.run.resume_from_checkpoint, config.run.output_dir
    existing = list_checkpoints(output_dir)
    resolved = os.path.join(output_dir, CONFIG_FILE)
    if existing and os.path.isfile(resolved) and has_content(resolved):
        _check_same_run(config, flatten(load_config(resolved)), output_dir)
    if folder == "none" and existing:
        raise InputError(
            f"run.output_dir: {output_dir} contains checkpoints; set another folder, or "
            "run.resume_from_checkpoint=auto to resume"
        )
    if folder == "auto":
        folder = newest_whole(existing) or "none"
        if existing and folder == "none":
            advice = "remove them to start a new run"
            raise InputError(f"run.output_dir: all its checkpoints are damaged; {advice}")
    elif folder != "none":
        if not os.path.isfile(os.path.join(folder, STATE_FILE)):
            reason = f"is not a checkpoint (it has no {STATE_FILE})"
            raise InputError(f"run.resume_from_checkpoint: {folder} {reason}")
        if damage := find_damage(folder):
            raise InputError(f"run.resume_from_checkpoint: {folder} is damaged: {damage}")
    if folder == "none":
        return None
    state = read_state(folder)
    if state.get("format") != FORMAT:
        reason = "was written by another version of this package; set another run.output_dir"
        raise InputError(f"run.resume_from_checkpoint: {folder} {reason}")
    differences = _check_same_run(config, state["config"], folder)
    if world_size != state["world_size"]:
        differences.append(f"{world_size} ranks here, but {state['world_size']}")
    weights = "the run continues, but its weights repeat up to rounding only"
    for difference in differences:
        log(f"warning: {difference} in {folder}; {weights}")
    return folder


def newest_whole(checkpoints: list[str]) -> str | None:
    """Return the newest of these folders, oldest first, that is not damaged; warn of others."""
    for folder in reversed(checkpoints):
        if (damage := find_damage(folder)) is None:
            return folder
        log(f"warning: {folder} is damaged: {damage}; trying the previous one")
    return None


def _check_same_run(config: Config, saved: dict, where: str) -> list[str]:
    """Return differences that change rounding alone; raise InputError for relevant others.

    Data that has moved, or may differ, is left to `check_continued`, which compares its content."""
    is_allowed = config.run.allow_changed_data
    current, classes, rounding = flatten(config), resume_classes(config), []
    saved = flatten(Config()) | saved  # keys added since had their defaults
    for key in sorted(saved):
        if key not in current:
            raise InputError(f"{key}: unknown key in {where}, written by another version")
        here, there = current[key], saved[key]
        if here == there or (key.endswith("path") and _is_the_same_data(here, there)):
            continue
        has_moved = key.endswith("path") and not os.path.exists(there or ".")
        is_data = key.startswith("data.") or key == "model.chat_template_path"
        difference = f"{key}: {here} here, but {there}"
        if classes[key] == ROUNDING:
            rounding.append(difference)
        elif classes[key] == EXACT and not (is_data and (is_allowed or has_moved)):
            if not (is_allowed and has_moved):
                more = "; if it has only moved, set run.allow_changed_data=true" * has_moved
                if key == "run.max_steps":
                    more = "; only a constant optim.lr_scheduler_type can go on for longer"
                raise InputError(f"{difference} in {where}; {ADVICE}{more}")
            log(f"warning: {key}: {there} of {where} is gone; {here} is taken for the same")
    return rounding


def _is_the_same_data(here: str | None, there: str | None) -> bool:
    """Whether two paths lead to the same file or folder, or to equal copies."""
    if not here or not there or not (os.path.exists(here) and os.path.exists(there)):
        return False
    if os.path.samefile(here, there):
        return True
    if not (os.path.isdir(here) and os.path.isdir(there)):
        is_file = os.path.isfile(here) and os.path.isfile(there)
        return is_file and filecmp.cmp(here, there, shallow=False)
    names = os.listdir(here)
    return sorted(names) == sorted(os.listdir(there)) and all(
        _is_the_same_data(os.path.join(here, name), os.path.join(there, name)) for name in names
    )


@contextlib.contextmanager
def refuse_what_does_not_fit(folder: str) -> Iterator[None]:
    """Context of reading a checkpoint: raises InputError for torn or foreign files."""
    try:
        yield
    except UNREADABLE as error:
        reason = f"the state in {folder} does not fit this run: {one_line(error)}"
        raise InputError(f"run.resume_from_checkpoint: {reason}") from error


def load_optimizer(folder: str, optimizer) -> None:
    """Restore the optimizer from a mapped file, each rank its share. Raises InputError."""
    path = os.path.join(folder, OPTIMIZER_FILE)
    with refuse_what_does_not_fit(folder):
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(state, dict):
            raise ValueError(f"{OPTIMIZER_FILE} holds a {type(state).__name__}")
        optimizer.load_state_dict(state)


def load_arrays(folder: str, name: str) -> dict[str, np.ndarray]:
    """Return the arrays in a file of a checkpoint. Raises one of UNREADABLE."""
    with np.load(os.path.join(folder, name)) as arrays:  # refuses pickled objects
        return dict(arrays)


def read_state(folder: str) -> dict:
    """Return the content of trainer_state.json. Raises InputError.

    step: updates done; evaluated: updates before the last evaluation, or -1; best: metric, value
    and step of the best evaluation by run.save_best, or None; progress: sums over the run so far,
    by name; linear: see `choose_packed`; format; world_size; config: flat."""
    with refuse_what_does_not_fit(folder):
        return json.loads(Path(folder, STATE_FILE).read_text("utf-8"))


def add_old_keys(folder: str, read: Callable[[dict], Any]) -> None:
    """Write what transformers 4 reads, too, into the files of a saved model and tokenizer.

    It would take the default rotary embeddings without a word, and has no class TokenizersBackend.
    read: config.json's content to a configuration, which must stay what it is."""

    def add_rotary(path: str) -> None:
        config = json.loads(Path(path).read_text("utf-8"))
        new = _with_rotary(config)
        with contextlib.suppress(Exception):  # of a model's own code, which reads none of this
            if _has(read(copy.deepcopy(new)).to_dict(), read(config).to_dict()):
                _write_json(path, new)

    def rename_class(path: str) -> None:
        config = json.loads(Path(path).read_text("utf-8"))
        if config.get("tokenizer_class") == "TokenizersBackend":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            if isinstance(config.get("extra_special_tokens"), list):
                config["additional_special_tokens"] = config.pop("extra_special_tokens")
            _write_json(path, config)

    for name, change in (("config.json", add_rotary), ("tokenizer_config.json", rename_class)):
        if os.path.isfile(path := os.path.join(folder, name)):  # an adapter has none
            change(path)


def _write_json(path: str, content: dict) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    Path(path).write_text(f"{text}\n", "utf-8")


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
    if not (isinstance(whole, dict) and isinstance(part, dict)):
        return whole == part
    return all(key in whole and _has(whole[key], value) for key, value in part.items())
