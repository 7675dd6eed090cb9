"""Checkpoints: written aside, flushed to disk, renamed. A folder named checkpoint-N is therefore always whole.

Noise and batches are functions of the step, so weights, optimizer state and the step number are all that exactness needs;
drafts and histories are saved too, for speed.
"""

import fcntl
import json
import os
import re
import shutil
from typing import IO

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.config import Config, flatten, load_config
from bubblespec.errors import InputError
from bubblespec.optimizer import Optimizer

STATE_FILE = "trainer_state.json"
CONFIG_FILE = "config.yaml"
SPECULATION_FILE = "speculation.npz"
# Keys that may differ between a run and its continuation: they change neither tokens nor updates.
HARMLESS = {
    "run.output_dir",
    "run.eval_steps",
    "run.save_steps",
    "run.logging_steps",
    "run.timeline_steps",
    "run.keep_last",
    "run.resume_from_checkpoint",
    "run.timeout_s",
    "model.trust_remote_code",
    "eval.num_generations",
    "eval.temperature",
    "optim.max_skipped_steps",
    "reward.num_workers",
    "reward.timeout_s",
    "reward.adaptive_timeout",
    "speculative.method",
    "speculative.fixed_window",
    "speculative.max_history_tokens",
    "optim.shard_state",
    "rollout.free_cache_engine",
}


def save_checkpoint(
    config: Config,
    step: int,
    model: PreTrainedModel,
    tokenizer,
    optimizer: dict,
    speculation: dict[str, np.ndarray] | None,
) -> str:
    """Save after `step` updates (rank 0 only). optimizer: its state. Returns the folder, which `from_pretrained` loads."""
    final = os.path.join(config.run.output_dir, f"checkpoint-{step}")
    temporary = os.path.join(config.run.output_dir, f"tmp-checkpoint-{step}")
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    torch.save(optimizer, os.path.join(temporary, "optimizer.pt"))
    if speculation is not None:
        np.savez(os.path.join(temporary, SPECULATION_FILE), **speculation)
    with open(os.path.join(temporary, STATE_FILE), "w", encoding="utf-8") as file:
        json.dump({"step": step, "config": exactness_keys(config)}, file, indent=1)
    for name in os.listdir(temporary):
        _flush(os.path.join(temporary, name))
    _flush(temporary)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(temporary, final)
    _flush(config.run.output_dir)
    for old in list_checkpoints(config.run.output_dir)[: -config.run.keep_last]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def lock_output_dir(output_dir: str) -> IO:
    """Make the folder ours until the returned file is closed or this process ends. Raises InputError if another run has it."""
    os.makedirs(output_dir, exist_ok=True)
    file = open(os.path.join(output_dir, ".lock"), "w")  # noqa: SIM115 (open as long as the run)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise InputError(f"run.output_dir: {output_dir} is in use by another run") from error
    return file


def list_checkpoints(output_dir: str) -> list[str]:
    """Checkpoint folders, oldest first."""
    names = os.listdir(output_dir) if os.path.isdir(output_dir) else []
    numbered = [(int(m.group(1)), n) for n in names if (m := re.fullmatch(r"checkpoint-(\d+)", n))]
    return [os.path.join(output_dir, name) for _, name in sorted(numbered)]


def find_checkpoint(config: Config) -> str | None:
    """The folder to continue from, or None for a fresh start. Raises InputError where continuing would not be exact, or where
    output_dir holds a run of another configuration, whose files would be overwritten."""
    wanted, output_dir = config.run.resume_from_checkpoint, config.run.output_dir
    existing = list_checkpoints(output_dir)
    resolved = os.path.join(output_dir, CONFIG_FILE)
    if os.path.isfile(resolved):
        _check_same_run(config, exactness_keys(load_config(resolved)), output_dir)
    if wanted == "none":
        if existing:
            raise InputError(
                f"run.output_dir: {output_dir} holds checkpoints; give another folder, or "
                "run.resume_from_checkpoint=auto to continue"
            )
        return None
    folder = wanted if wanted != "auto" else (existing[-1] if existing else None)
    if folder is None:
        return None
    if not os.path.isfile(os.path.join(folder, STATE_FILE)):
        raise InputError(f"run.resume_from_checkpoint: {folder} is not a checkpoint (it has no {STATE_FILE})")
    _check_same_run(config, _read_state(folder)["config"], folder)
    return folder


def _check_same_run(config: Config, saved: dict, where: str) -> None:
    current = exactness_keys(config)
    for key in sorted(saved.keys() | current.keys()):
        if saved.get(key) != current.get(key):
            raise InputError(
                f"{key}: {current.get(key)} here, but {saved.get(key)} in {where}; "
                "continuing would not be the same run (give another run.output_dir for a new one)"
            )


def load_optimizer(folder: str, optimizer: Optimizer) -> int:
    """Restore the optimizer; returns the number of updates that the checkpoint holds.

    The file is mapped, not read: a rank takes its share out of it, and ranks of one machine share its pages.
    """
    path = os.path.join(folder, "optimizer.pt")
    optimizer.load_state_dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    return _read_state(folder)["step"]


def load_speculation(folder: str) -> dict[str, np.ndarray] | None:
    """The saved drafts and histories, if the run had any."""
    path = os.path.join(folder, SPECULATION_FILE)
    if not os.path.isfile(path):
        return None
    with np.load(path) as arrays:
        return dict(arrays)


def exactness_keys(config: Config) -> dict:
    """The configuration without the keys that change nothing about tokens and updates."""
    return {key: value for key, value in flatten(config).items() if not _is_harmless(config, key)}


def _is_harmless(config: Config, key: str) -> bool:
    """max_steps may grow in a continuation unless the learning rate's course depends on it; bubbles change time alone."""
    if key == "run.max_steps":
        return config.optim.lr_scheduler == "constant"
    return key in HARMLESS or key.startswith("bubble.")


def _read_state(folder: str) -> dict:
    with open(os.path.join(folder, STATE_FILE), encoding="utf-8") as file:
        return json.load(file)


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
