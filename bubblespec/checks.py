"""Checks of a run's loaded parts: tokenizer, model and checkpoint match, and the engine's slots fit
into memory."""

import os

import psutil
import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from bubblespec.config import Config
from bubblespec.dist.ranks import Ranks
from bubblespec.errors import InputError
from bubblespec.learn.optimizer import Optimizer
from bubblespec.memory_needs import shared_slot_bytes, shared_slots, slot_bytes


def check_vocabulary(
    config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Every token that a prompt or a stop can be must have an embedding; more embeddings than
    tokens are usual padding."""
    size = model.get_input_embeddings().num_embeddings
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= size:
        raise InputError(
            f"model.path: the tokenizer of {config.model.path} has token {largest}, but the model only {size} embeddings"
        )
    for token in config.rollout.stop_token_ids or []:
        if token >= size:
            raise InputError(f"rollout.stop_token_ids: {token} is beyond the model's {size} tokens")


def check_same_architecture(
    initial: PreTrainedConfig, model: PreTrainedModel, checkpoint: str
) -> None:
    """Refuse a checkpoint of another architecture than model.path: it has its own configuration, so
    it would load."""
    for name in (
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
    ):
        here, there = getattr(initial, name, None), getattr(model.config, name, None)
        if here != there:
            raise InputError(
                f"run.resume_from_checkpoint: {checkpoint} holds another model: {name} is {there}, in model.path {here}"
            )


def check_moments(optimizer: Optimizer, checkpoint: str | None) -> None:
    """Refuse optimizer moments of other shapes: AdamW loads them, and would fail at its first
    step."""
    for parameter, state in optimizer.local.state.items():
        if any(state[name].shape != parameter.shape for name in ("exp_avg", "exp_avg_sq")):
            raise InputError(
                f"run.resume_from_checkpoint: the optimizer state in {checkpoint} is of a model of other shapes"
            )


def check_memory(config: Config, ranks: Ranks, model: PreTrainedModel, num_slots: int) -> None:
    """Whether the slots of the engine, and those that all ranks share, fit into what is free now.
    Ranks on the CPUs of one machine share its memory."""
    max_length = config.rollout.max_prompt_length + config.rollout.max_completion_length
    num_shared, slot = shared_slots(config, ranks.world_size), slot_bytes(config, model)
    # A position's token, two log-probabilities and noise key; see Engine.
    host_bytes = (num_slots + num_shared) * max_length * 32
    cache_bytes = num_slots * slot + num_shared * shared_slot_bytes(slot, model, ranks.world_size)
    shared = f" and the {num_shared} of rollout.tp_tail_max_rows" if num_shared else ""
    num_sharing = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    needs = [(num_sharing * host_bytes, free_host_bytes(), "of memory")]
    if ranks.device.type == "cuda":
        needs.append((cache_bytes, torch.cuda.mem_get_info(ranks.device)[0], f"on {ranks.device}"))
    else:
        needs = [(num_sharing * (host_bytes + cache_bytes), free_host_bytes(), "of memory")]
    for needed, free, where in needs:
        if needed > free:
            raise InputError(
                f"rollout.num_slots: {num_slots} slots of {max_length} tokens{shared} need {needed / 1e9:.3g} GB for keys and "
                f"values on the ranks of this machine, but {free / 1e9:.3g} GB {where} are free; "
                "lower rollout.num_slots or rollout.max_completion_length"
            )


def free_host_bytes() -> int:
    """Memory of the machine that is available without swapping."""
    return psutil.virtual_memory().available
