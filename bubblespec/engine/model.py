"""A Hugging Face causal LM for engine and trainer: hidden states of packed tokens.

Of the model's code only its attention function is replaced (attention.py), and RMSNorms in float64
and on a GPU by the same in one call (norms.py). model_checks.py prepares a model.
"""

import functools
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bubblespec.engine.packing import CachePacking, SequencePacking

# Attributes of a model: what computes whole sequences in place of its modules, and whether layers
# are computed again in the backward pass.
OWN_HIDDEN, HAS_CHECKPOINTS = "_bubblespec_own_hidden", "_bubblespec_has_checkpoints"


class UnsupportedModel(ValueError):
    """This model cannot be served by the packed forward; the message says why."""


def forward_hidden(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    packing: CachePacking | SequencePacking,
    kernel: str = "sdpa",
) -> torch.Tensor:
    """Return last hidden states [N, hidden] of packed input_ids [N], at the packing's positions."""
    own = vars(model).get(OWN_HIDDEN)
    if own is not None and isinstance(packing, SequencePacking):
        return own(model, input_ids, packing, kernel)
    out = model.base_model(
        input_ids=input_ids[None],
        position_ids=packing.position[None],
        use_cache=False,
        packing=packing,
        kernel=kernel,
    )
    return out.last_hidden_state[0]


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Recompute each layer in the backward pass instead of storing its activations.

    Raises UnsupportedModel. The model stays in evaluation mode: transformers' own switch takes
    effect in training mode only, where dropout and router noise would make the trained function
    differ from the one that generated."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        problem = f"{type(model).__name__} has no layers that can be checkpointed"
        raise UnsupportedModel(f"model.gradient_checkpointing: {problem}")
    vars(model)[HAS_CHECKPOINTS] = True
    for layer in layers:
        layer.forward = functools.partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
