"""Memory of a learned drafter."""

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.engine.layers import layer_heads
from bubblespec.mechanisms.drafter.layer import last_full_layer
from bubblespec.mechanisms.drafter.runner import MAX_ROWS
from bubblespec.memory import Needs, has_pages, max_slots


def add_drafter(needs: Needs, config: Config, model: PreTrainedModel, world_size: int) -> Needs:
    """Add the drafter, a layer of the model and the projection into it, if the run has one."""
    if "drafter" not in config.speculative.sources:
        return needs
    shape = model.config.get_text_config(decoder=True)
    size, layers = model.dtype.itemsize, shape.num_hidden_layers
    total = sum(p.numel() for p in model.parameters())
    embedding: Any = model.get_input_embeddings()
    parameters = (total - embedding.weight.numel()) / layers + 2 * shape.hidden_size**2
    # weights, gradients, moments and, for bfloat16, float32 masters
    drafter = parameters * (2 * size + 16 if model.dtype == torch.bfloat16 else 4 * size)
    slot, numbers = needs.slot, [n * (key + value) for _, n, key, value in layer_heads(shape)]
    own = slot * numbers[last_full_layer(shape)] // sum(numbers)
    if has_pages(config):  # the drafter's own keys and values are in slots
        drafter += min(max_slots(config, world_size), MAX_ROWS) * own
    else:
        slot += own
    tp_row = needs.tp_row * slot // needs.slot
    return replace(needs, drafter=int(drafter), slot=slot, tp_row=tp_row)
