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
from bubblespec.errors import InputError, log

DRAFTER_FILE = "drafter.safetensors"


SAMPLE = 1024  # entries of the policy that are compared
# RL moves weights by far less; those of another model have nothing in common with them.
MAX_DIFFERENCE = 0.3


def save_drafter(folder: str, drafter: Drafter, num_updates: int, policy: PreTrainedModel) -> None:
    """Weights, token ids, the number of updates, and by what its policy is known, as a file of a
    folder. Raises OSError."""
    state = drafter.state_dict()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    tensors["ids"] = torch.from_numpy(drafter.ids)
    tensors["num_updates"] = torch.tensor(num_updates)
    tensors["policy"] = _sample_of(policy)
    save_file(tensors, os.path.join(folder, DRAFTER_FILE))


def read_drafter(
    config: Config, model: PreTrainedModel, checkpoint: str | None, warns: bool = False
) -> tuple[Drafter, int] | None:
    """The checkpoint's drafter, else that of drafter.path, and its number of updates; None if there
    is neither. Raises InputError for a folder without a drafter for this policy. warns: say so
    where it was trained for another one of the same shapes."""
    folder, key = config.drafter.path, "drafter.path"
    if checkpoint is not None and os.path.isfile(os.path.join(checkpoint, DRAFTER_FILE)):
        folder, key = checkpoint, "run.resume_from_checkpoint"
    if not folder:
        return None
    try:
        tensors = load_file(os.path.join(folder, DRAFTER_FILE))
        ids, num_updates = tensors.pop("ids").numpy(), int(tensors.pop("num_updates"))
        trained_for = tensors.pop("policy")
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
    here = _sample_of(model)
    if warns and (here - trained_for).norm() > MAX_DIFFERENCE * trained_for.norm():
        log(
            f"warning: {key}: the drafter in {folder} was trained for another model; tokens are "
            "right all the same, but few of its drafts will be accepted until it has learned"
        )
    return drafter, num_updates


def _sample_of(policy: PreTrainedModel) -> torch.Tensor:
    """Entries of the output head, float32 [SAMPLE] or fewer."""
    weight = output_head(policy).weight.detach().flatten()
    return weight[:: max(len(weight) // SAMPLE, 1)][:SAMPLE].float().cpu().clone()
