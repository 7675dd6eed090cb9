"""Memory of one rank, estimated before a run:

python -m bubblespec memory --config FILE [--world-size N] [section.key=value ...]
"""

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from bubblespec.config import Config
from bubblespec.config_file import load_config
from bubblespec.engine.packing import PAGE
from bubblespec.errors import InputError
from bubblespec.loading import from_pretrained, with_dtype
from bubblespec.mechanisms.drafter.memory import add_drafter
from bubblespec.mechanisms.quantized.memory import add_quantized
from bubblespec.memory import cache_unit, estimate, has_pages, max_length, max_slots, num_rows

CARDS = {"80 GB": 79.1 * 2**30, "141 GB": 139.7 * 2**30}  # usable bytes of an H100, an H200


def main(arguments: list[str]) -> None:
    """Print the table."""
    description = "Memory of one rank, before a run"
    parser = argparse.ArgumentParser("python -m bubblespec memory", description=description)
    parser.add_argument("--config", required=True, help="YAML file, see configs/")
    parser.add_argument("--world-size", type=int, default=8, help="number of ranks")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    given = parser.parse_intermixed_args(arguments)
    if given.world_size < 1:
        raise InputError(f"--world-size: {given.world_size} must be at least 1")
    config = load_config(given.config, given.overrides)
    config = with_dtype(config, "cpu" if config.model.device == "cpu" else "cuda")
    dtype, teacher = getattr(torch, config.model.dtype), None
    model = meta_model(from_pretrained(AutoConfig, config, config.model.path), dtype)
    if (path := config.model.teacher_path) is not None:
        teacher = meta_model(from_pretrained(AutoConfig, config, path), dtype)
    print(table(config, model, given.world_size, teacher))


def table(
    config: Config, model: PreTrainedModel, world_size: int, teacher: PreTrainedModel | None = None
) -> str:
    """Return a table of what each rank needs, and of what fits on GPUs of two sizes."""
    needs = estimate(config, model, world_size, teacher)
    needs = add_drafter(needs, config, model, world_size)
    needs = add_quantized(needs, config, model)
    count = sum(p.numel() for p in model.parameters())
    rows = [(needs.weights, "weights"), (needs.gradients, "gradients")]
    rows += [(needs.optimizer, "optimizer state"), (needs.drafter, "drafter")]
    rows += [(needs.quantized, "quantised copy of the policy"), (needs.teacher, "teacher")]
    rows += [(needs.lasting, "total, for the whole run")]
    rows += [(needs.training, "gradient step, in addition (estimated)")]
    rows += [(needs.rollout, "forward of a rollout, in addition, at another time (estimated)")]
    rows += [(needs.slot, f"keys and values of one response of {max_length(config)} tokens")]
    title = f"{config.model.path}: {count / 1e9:.2f} B parameters in {config.model.dtype}"
    lines = [f"{title}, {world_size} ranks; GB on each"]
    lines += [f"{size / 1e9:8.2f}  {name}" for size, name in rows if size]
    count, wanted = num_rows(config, world_size), config.rollout.max_num_seqs
    unit, spare, per_row = cache_unit(config, needs, has_pages(config))
    needed = per_row if isinstance(wanted, str) or has_pages(config) else wanted
    for name, total in CARDS.items():
        room = total * config.rollout.gpu_memory_utilization - needs.lasting
        fitting = max(int(needs.room_for_cache(room, config) // unit) - spare, 0)
        what = f"room for {fitting} responses at once, {max_slots(config, world_size)} are useful"
        if has_pages(config):
            # On average a row leaves half of its last page empty.
            mean = min(max(int((fitting / count - 0.5) * PAGE), 0), max_length(config))
            what = f"{fitting} pages of {PAGE} tokens: {count} responses of {mean} on average"
        fits = "fits" if room >= needs.training and fitting >= needed else "DOES NOT FIT"
        lines.append(f"{world_size} x {name}: {fits}; {what}")
    return "\n".join(lines)


def meta_model(architecture: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model on the meta device, where tensors have shapes and no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(architecture, dtype=dtype)
