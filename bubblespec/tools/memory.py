"""Memory of one rank, estimated before a run:

python -m bubblespec memory --config FILE [--world-size N] [section.key=value ...]
"""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from bubblespec import memory
from bubblespec.config import Config
from bubblespec.config.file import load_config
from bubblespec.engine.kv_cache import PAGE
from bubblespec.errors import InputError
from bubblespec.learn.lora import add_adapter
from bubblespec.loading import from_pretrained, with_dtype
from bubblespec.mechanisms import Run, functions
from bubblespec.tools import make_parser, parse

# Usable bytes of an RTX 4090, an H100 and an H200.
CARDS = {"24 GB": 23.5 * 2**30, "80 GB": 79.1 * 2**30, "141 GB": 139.7 * 2**30}
SHAPES = Path(__file__).parents[2] / "configs" / "shapes"  # config.json of models in configs/


def main(arguments: list[str]) -> int:
    """Print the table. Return 1 if the run fits on no card, else 0."""
    parser = make_parser("memory")
    parser.add_argument("--world-size", type=int, default=8, help="number of ranks")
    given = parse(parser, arguments)
    if given.world_size < 1:
        raise InputError(f"--world-size: {given.world_size} must be at least 1")
    config = load_config(given.config, given.overrides)
    config = with_dtype(config, "cpu" if config.model.device == "cpu" else "cuda")
    model, teacher = planned_model(config, config.model.path), None
    if config.model.lora_r:
        add_adapter(model, config.model, seed=0)
    if (path := config.model.teacher_path) is not None:
        teacher = planned_model(config, path)
    print(table(config, model, given.world_size, teacher))
    needs = needs_of(config, model, given.world_size, teacher)
    fitting = (fit(config, needs, given.world_size, total)[0] for total in CARDS.values())
    return 0 if any(fitting) else 1


def planned_model(config: Config, path: str) -> PreTrainedModel:
    """Return the model of a folder or hub name on the meta device. Raises InputError."""
    shipped = SHAPES / Path(path).name
    if not Path(path).exists() and f"Qwen/{shipped.name}" == path and shipped.exists():
        path = str(shipped)
    architecture = from_pretrained(AutoConfig, config, path)
    return meta_model(architecture, getattr(torch, config.model.dtype))


def needs_of(
    config: Config, model: PreTrainedModel, world_size: int, teacher: PreTrainedModel | None = None
) -> memory.Needs:
    """Return what a rank needs, mechanisms included."""
    needs = memory.estimate(config, model, world_size, teacher)
    device = "cpu" if config.model.device == "cpu" else "cuda"
    ranks: Any = SimpleNamespace(world_size=world_size, device=torch.device(device))
    for add in functions("add_needs"):
        needs = add(needs, Run(config, ranks, model))
    return needs


def fit(config: Config, needs: memory.Needs, world_size: int, total: float) -> tuple[bool, int]:
    """Return whether a run fits on cards of `total` bytes, and its pages or slots."""
    unit, spare, per_row = memory.cache_unit(config, needs, memory.has_pages(config))
    wanted = config.rollout.max_num_seqs
    needed = per_row if isinstance(wanted, str) or memory.has_pages(config) else wanted
    room = total * config.rollout.gpu_memory_utilization - needs.lasting
    left = needs.room_for_cache(room, config)
    if memory.has_pages(config) and needs.states:
        slots = memory.slots_with_states(needs, left, memory.max_slots(config, world_size))
        left -= (slots + 1) * needs.states
    fitting = max(int(left // unit) - spare, 0)
    return room >= needs.training and fitting >= needed, fitting


def changed(config: Config, settings: dict[str, Any]) -> Config:
    """Return a copy of the configuration with other values. settings: by section.key."""
    config = copy.deepcopy(config)
    for name, value in settings.items():
        section, key = name.split(".")
        setattr(getattr(config, section), key, value)
    return config


def settings_that_fit(
    config: Config,
    model: PreTrainedModel,
    world_size: int,
    total: float,
    teacher: PreTrainedModel | None = None,
) -> dict[str, Any]:
    """Return settings with which a run fits, by section.key; empty if none of them is enough."""

    def fits(settings: dict[str, Any]) -> bool:
        other = changed(config, settings)
        return fit(other, needs_of(other, model, world_size, teacher), world_size, total)[0]

    sources = [s for s in config.speculative.sources if s not in ("quantized", "drafter")]
    longest, tokens = memory.max_length(config), config.optim.max_tokens_per_microbatch
    settings = {
        "optim.shard_state": True,
        "optim.max_tokens_per_microbatch": min(tokens, longest),
        "rollout.max_num_batched_tokens": min(config.rollout.max_num_batched_tokens, 2048),
        "model.gradient_checkpointing": True,
        "rollout.free_cache_engine": True,
        "speculative.method": "+".join(sources) or "none",
    }
    if not fits(settings):
        return {}
    for name in reversed(settings.copy()):  # keep the first, which cost least time
        if fits(rest := {key: value for key, value in settings.items() if key != name}):
            settings = rest
    return settings


def table(
    config: Config, model: PreTrainedModel, world_size: int, teacher: PreTrainedModel | None = None
) -> str:
    """Return a table of what each rank needs, and of what fits on GPUs of three sizes."""
    needs = needs_of(config, model, world_size, teacher)
    count = sum(p.numel() for p in model.parameters())
    rows = [(needs.weights, "weights"), (needs.gradients, "gradients")]
    rows += [(needs.optimizer, "optimizer state"), (needs.reference, "reference model of the KL")]
    rows += [(size, name) for name, size in sorted(needs.others.items())]
    rows += [(needs.teacher, "teacher")]
    rows += [(needs.lasting, "total, for the whole run")]
    rows += [(needs.training, "gradient step, in addition (estimated)")]
    rows += [(needs.rollout, "forward of a rollout, in addition, at another time (estimated)")]
    rows += [(needs.slot, f"keys and values of one response of {memory.max_length(config)} tokens")]
    if needs.states:
        rows += [(needs.states, "states of one response")]
    size = f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
    title = f"{config.model.path}: {size} parameters in {config.model.dtype}"
    if config.model.lora_r:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        title += f", {trained / 1e6:.1f} M of them trained (LoRA)"
    unit, scale = ("GB", 1e9) if needs.lasting >= 1e9 else ("MB", 1e6)
    lines = [f"{title}, {world_size} ranks; {unit} on each"]
    lines += [f"{size / scale:8.2f}  {name}" for size, name in rows if size]
    count = memory.num_rows(config, world_size)
    for name, total in CARDS.items():
        has_fit, fitting = fit(config, needs, world_size, total)
        useful = memory.max_slots(config, world_size)
        what = f"room for {fitting} responses at once, {useful} are useful"
        if memory.has_pages(config):
            # On average a row leaves half of its last page empty.
            mean = min(max(int((fitting / count - 0.5) * PAGE), 0), memory.max_length(config))
            what = f"{fitting} pages of {PAGE} tokens: {count} responses of {mean} on average"
        fits = "fits" if has_fit else "DOES NOT FIT"
        lines.append(f"{world_size} x {name}: {fits}; {what}")
        if not has_fit:
            settings = settings_that_fit(config, model, world_size, total, teacher)
            keys = " ".join(f"{name}={value}".lower() for name, value in settings.items())
            lora = "" if config.model.lora_r else "model.lora_r=8, "
            advice = f"try {lora}a smaller model or shorter responses "
            advice += "(rollout.max_completion_length)"
            lines.append(f"  fits with {keys}" if keys else f"  {advice}")
    return "\n".join(lines)


def meta_model(architecture: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model on the meta device, where tensors have shapes and no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(architecture, dtype=dtype)
