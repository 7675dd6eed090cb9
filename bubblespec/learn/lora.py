"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft, an optional package.

The adapter is put into the model in place and stays unmerged: the model that generates is the one
that is trained, to the bit. Merging for the rollout would be faster, but in bfloat16 the merged
weights round most of a small update away. With the adapter off the model is its base, so the
reference of a KL term needs no second copy of the weights.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch.nn import Linear
from transformers import PreTrainedModel

from bubblespec.config import ModelConfig
from bubblespec.errors import InputError


def add_adapter(
    model: PreTrainedModel, config: ModelConfig, seed: int, checkpoint: str | None = None
) -> None:
    """Put an adapter of rank config.lora_r into a freshly loaded model, in its dtype, and freeze
    everything else.

    It is that of `checkpoint`, or a new one: B = 0, so the model computes what it did before, and A
    from `seed`, so that all ranks have the same. Call before the model goes to a GPU, whose random
    numbers are others. Raises InputError.
    """
    try:
        from peft import LoraConfig, load_peft_weights, set_peft_model_state_dict
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise InputError(
            f"model.lora_r: LoRA needs peft ({error}); pip install -r requirements-lora.txt"
        ) from error
    if config.lora_r > model.config.hidden_size:
        raise InputError(
            f"model.lora_r: {config.lora_r} must be at most {model.config.hidden_size}, "
            "the model's hidden size"
        )
    targets = config.lora_target_modules
    if targets == ["all-linear"]:
        targets = "all-linear"
    else:
        _check_targets(model, targets)
    lora = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        target_modules=targets,
        lora_dropout=0.0,  # the probability ratio compares two forwards of the same weights
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model.add_adapter(lora)
    except ValueError as error:  # a kind of module that peft has no adapter for
        raise InputError(
            f"model.lora_target_modules: {str(error).strip().splitlines()[0]}"
        ) from error
    # They are often one tensor, and an adapter would change only one of its two uses.
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    if any(isinstance(module, BaseTunerLayer) for module in embeddings):
        raise InputError(
            "model.lora_target_modules: the embedding and the output head cannot have an adapter; "
            "leave them out"
        )
    if checkpoint is not None:
        result = set_peft_model_state_dict(model, load_peft_weights(checkpoint, device="cpu"))
        if result.unexpected_keys or any("lora_" in key for key in result.missing_keys):
            raise InputError(
                f"run.resume_from_checkpoint: the adapter in {checkpoint} is not one of this model"
            )


@contextlib.contextmanager
def adapter_disabled(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model computes what its base does, to the bit. A model without an adapter stays
    as it is."""
    if not hasattr(model, "peft_config"):
        yield
        return
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def _check_targets(model: PreTrainedModel, targets: list[str]) -> None:
    """peft skips a name that it does not find, as long as it finds another."""
    modules = dict(model.named_modules())
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in modules):
            linear = {n.rpartition(".")[2] for n, m in modules.items() if isinstance(m, Linear)}
            raise InputError(
                f"model.lora_target_modules: the model has no '{target}'; its linear layers are "
                f"{', '.join(sorted(linear))}"
            )
