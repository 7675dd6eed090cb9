"""A drafter on disk: one file of a checkpoint, or of the folder that drafter.path names."""

import os

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.draft.drafter import Drafter
from bubblespec.engine.model import output_head
from bubblespec.errors import InputError

DRAFTER_FILE = "drafter.safetensors"


def save_drafter(folder: str, drafter: Drafter, num_updates: int) -> None:
    """Weights, token ids and the number of updates, as a file of a folder. Raises OSError."""
    state = drafter.state_dict()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    tensors["ids"] = torch.from_numpy(drafter.ids)
    tensors["num_updates"] = torch.tensor(num_updates)
    save_file(tensors, os.path.join(folder, DRAFTER_FILE))


def read_drafter(
    config: Config, model: PreTrainedModel, checkpoint: str | None
) -> tuple[Drafter, int] | None:
    """The checkpoint's drafter, else that of drafter.path, and its number of updates; None if there
    is neither. Raises InputError for a folder without a drafter for this policy."""
    folder, key = config.drafter.path, "drafter.path"
    if checkpoint is not None and os.path.isfile(os.path.join(checkpoint, DRAFTER_FILE)):
        folder, key = checkpoint, "run.resume_from_checkpoint"
    if not folder:
        return None
    try:
        tensors = load_file(os.path.join(folder, DRAFTER_FILE))
        ids, num_updates = tensors.pop("ids").numpy(), int(tensors.pop("num_updates"))
        if ids.ndim != 1 or not len(ids) or (np.diff(ids, prepend=-1) <= 0).any():
            raise ValueError("ids must be token ids, ascending")
        if ids[-1] >= len(output_head(model).weight):
            raise ValueError(f"ids: the policy has no token {ids[-1]}")
        drafter = Drafter(model, ids, config.run.seed)
        drafter.load_state_dict(tensors)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{key}: no drafter of this policy can be read from {folder}: {reason}"
        ) from error
    return drafter, num_updates
