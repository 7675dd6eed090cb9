"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft, an optional package.

The adapter stays unmerged: the model that generates is, bit for bit, the one that is trained, and
in bfloat16 merged weights would round most of a small update away. With the adapter off the model
is its base, so the reference of a KL term needs no second copy of the weights."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from bubblespec.config import ModelConfig
from bubblespec.errors import InputError


def add_adapter(
    model: PreTrainedModel, config: ModelConfig, seed: int, checkpoint: str | None = None
) -> None:
    """Put an adapter into a freshly loaded model, in its dtype, and freeze everything else.

    The adapter is that of `checkpoint`, or a new one: B = 0, so the model computes what it did
    before, and A from `seed`, drawn on the CPU, so equal on all ranks. Raises InputError."""
    try:
        from peft import LoraConfig, load_peft_weights, set_peft_model_state_dict
    except ImportError as error:
        raise InputError(
            f"model.lora_r: LoRA needs peft ({error}); pip install -r requirements-lora.txt"
        ) from error
    if config.lora_r > (size := model.config.get_text_config(decoder=True).hidden_size):
        problem = f"{config.lora_r} must be at most {size}, the model's hidden size"
        raise InputError(f"model.lora_r: {problem}")
    lora = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        target_modules="all-linear",
        lora_dropout=0.0,  # the probability ratio compares two forwards of the same weights
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(lora)
    if checkpoint is not None:
        result: Any = set_peft_model_state_dict(model, load_peft_weights(checkpoint, device="cpu"))
        if result.unexpected_keys or any("lora_" in key for key in result.missing_keys):
            problem = f"the adapter in {checkpoint} does not fit this model"
            raise InputError(f"run.resume_from_checkpoint: {problem}")


@contextlib.contextmanager
def adapter_disabled(model: PreTrainedModel) -> Iterator[None]:
    """Make the model compute, bit for bit, what its base does; no change without an adapter."""
    if not hasattr(model, "peft_config"):
        yield
        return
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
