"""Memory of one rank: estimates before a run, slots and pages that fit, and a budget of tokens.

Weights, gradients, optimizer state, keys and values follow from shapes. Activations of a gradient
step and of a forward are a rule of thumb; a run on a GPU measures the peaks of both and gives the
remaining memory to keys and values."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bubblespec.config import Config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.kv_cache import MAX_SPLIT_TOKENS, PAGE, SPLIT
from bubblespec.engine.model import (
    forward_hidden,
    layer_heads,
    of_layers,
    output_head,
    pack_sequences,
)
from bubblespec.engine.ops import TYPES, has_kernels, has_triton
from bubblespec.engine.recurrent import state_bytes
from bubblespec.engine.sampling import sample
from bubblespec.errors import InputError
from bubblespec.learn.learner import MAX_LOGITS, Learner
from bubblespec.learn.losses import COMPACT
from bubblespec.learn.microbatch import pack_responses

SHARE_OF_HOST = 0.05  # share of the machine's free memory for drafts, and again for history
PROCESS, CGROUPS = Path("/proc/self"), Path("/sys/fs/cgroup")
DRAFT_TOKEN_BYTES, HISTORY_TOKEN_BYTES = 4, 100  # a token of history is in a suffix index, too


@dataclass(frozen=True)
class Needs:
    """Bytes of one rank."""

    weights: int  # with a LoRA adapter
    gradients: int
    optimizer: int  # this rank's AdamW moments and, for bfloat16, float32 master weights
    training: int  # activations and logits of a gradient step
    rollout: int  # activations and logits of a rollout's forward
    slot: int  # keys and values of one row
    states: int = 0  # of one row, whatever its length
    reference: int = 0  # the frozen copy that a KL term compares with
    teacher: int = 0  # the model of distillation
    scoring: int = 0  # activations of a forward that scores responses, where models do
    # Of mechanisms, which fill it in:
    others: dict[str, int] = field(default_factory=dict)  # models, by what they are
    shared_row: int = 0  # keys and values of one row that all ranks decode together
    shared_rows: tuple[int, ...] = (0,)  # how many there may be, the best number first

    @property
    def lasting(self) -> int:
        models = self.weights + self.reference + self.teacher + sum(self.others.values())
        return models + self.gradients + self.optimizer

    def room_for_cache(self, room: float, config: Config) -> float:
        """Return the bytes for keys and values, where `lasting` leaves `room` bytes."""
        if config.rollout.free_cache_engine and room >= max(self.training, self.scoring):
            return room - self.rollout
        forward = max(self.rollout, self.scoring)
        if config.trains_in_rollouts:  # forwards and gradients alternate
            return room - forward - self.training
        return room - max(forward, self.training)


def estimate(
    config: Config, model: PreTrainedModel, world_size: int, teacher: PreTrainedModel | None = None
) -> Needs:
    """Estimate the needs of a model and its teacher from their shapes, also on the meta device."""
    shape, size = model.config.get_text_config(decoder=True), model.dtype.itemsize
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    embeddings = cast(torch.nn.Embedding, model.get_input_embeddings()).weight.numel()
    layers, hidden, vocab = shape.num_hidden_layers, shape.hidden_size, shape.vocab_size
    in_bfloat16 = model.dtype == torch.bfloat16
    grad_size, share = 4 if in_bfloat16 else size, float(sum(trained))
    if config.optim.shard_state:
        share = max(share / world_size, max(trained))
    weights = num_bytes(model)
    # A decoder layer saves about this much per token for its backward: inputs of its projections,
    # norms in float32, queries, keys and values.
    inner = max(of_layers(shape, "intermediate_size", 4 * hidden))
    layer = (11 * hidden + 4 * inner) * size
    per_token = layers * layer
    if config.model.gradient_checkpointing:
        per_token = layers * hidden * size + 1.5 * layer
    tokens = config.optim.max_tokens_per_microbatch
    # logits, and without kernels their exponentials and two gradients, in float32 at least; the
    # head's gradient twice
    num_models = 1 if teacher is None else 2
    bound, width = (COMPACT, size) if has_pages(config) else (1, 4 * max(size, 4))
    head = num_models * min(tokens * vocab, bound * MAX_LOGITS // num_models) * width
    head += 2 * embeddings * size
    if teacher is not None:  # its last hidden states
        head += tokens * teacher.config.get_text_config(decoder=True).hidden_size * size
    batched = config.rollout.max_num_batched_tokens
    forward = max(batched * vocab * size, split_bytes(config, shape))
    return Needs(
        weights=weights,
        reference=weights if config.loss.kl_coef > 0 and not config.model.lora_r else 0,
        gradients=sum(trained) * grad_size,
        optimizer=int(share * grad_size * (3 if in_bfloat16 else 2)),
        training=int(tokens * per_token + head),
        rollout=int(batched * layer + forward),
        slot=kv_bytes(shape, size) * max_length(config),
        states=state_bytes(model, "cpu" if config.model.device == "cpu" else "cuda"),
        teacher=0 if teacher is None else num_bytes(teacher),
    )


def split_bytes(config: Config, shape: PreTrainedConfig) -> int:
    """Return the bytes that attention in kernels keeps in a rollout's largest forward.

    Keys are summed in splits, of which a token has for each head, in float32, weighted values, the
    largest score and the sum of weights."""
    tokens, splits = config.rollout.max_num_batched_tokens, -(-max_length(config) // SPLIT)
    if not config.model.batch_invariant:
        tokens = min(tokens, MAX_SPLIT_TOKENS)
    numbers = max(heads.num_queries * (heads.value_size + 2) for heads in layer_heads(shape))
    return 4 * tokens * splits * numbers if splits > 1 and has_pages(config) else 0


def num_bytes(model: PreTrainedModel) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def kv_bytes(config: PreTrainedConfig, size: int, num_ranks: int = 1) -> int:
    """Return the bytes of a token's keys and values, of one rank's heads. size: of a number."""
    layers = layer_heads(config)
    numbers = (-(-n // num_ranks) * (key + value) for _, n, key, value in layers)
    return size * sum(numbers)


def max_length(config: Config) -> int:
    return config.rollout.max_prompt_length + config.rollout.max_completion_length


def num_rows(config: Config, world_size: int) -> int:
    prompts = -(-config.rollout.num_prompts_per_step // world_size)
    return prompts * config.rollout.num_generations


def max_slots(config: Config, world_size: int) -> int:
    """Return the largest useful number of slots: one per row of a rank.

    And as many for drafts, deferred prompts, or many short rows placed against few long ones."""
    is_placed = world_size > 1 and config.rollout.placement != "in_turn"
    rows = num_rows(config, world_size) * (2 if config.keeps_drafts or is_placed else 1)
    return min(rows, config.rollout.max_num_batched_tokens)


def has_pages(config: Config) -> bool:
    """Whether a GPU run keeps keys and values in pages: that of `has_kernels`."""
    is_served = getattr(torch, config.model.dtype) in TYPES and has_triton()
    return is_served and config.model.kernels != "torch"


def cache_unit(config: Config, needs: Needs, is_paged: bool) -> tuple[float, int, int]:
    """Return the bytes of a page or slot, how many are spare, and those of the longest row."""
    if not is_paged:
        return needs.slot + needs.states, int(needs.states > 0), 1
    length = max_length(config)
    return needs.slot * PAGE / length, 1, -(-length // PAGE)


def slots_with_states(needs: Needs, room: float, slots: int) -> int:
    """Return how many slots there may be, at most `slots`: states take at most half of the room."""
    return min(slots, max(int(room / 2 // needs.states) - 1, 1)) if needs.states else slots


def choose_slots(
    config: Config, learner: Learner, ranks: Ranks, needs: Needs
) -> tuple[int, int | None, int]:
    """Return rollout.max_num_seqs, the number of pages or None, and that of `shared_rows`.

    All ranks call it together and get equal figures. Each `auto` becomes what fits into the
    memory that is free once model and optimizer are loaded; pages fill it. On CPUs that is half
    of the machine's free memory: nothing measures a gradient step. Raises InputError if slots
    do not fit."""
    rollout, device = config.rollout, ranks.device
    wanted, free = rollout.max_num_seqs, free_bytes(device)
    useful, is_paged = max_slots(config, ranks.world_size), has_kernels(device, learner.model.dtype)
    if isinstance(wanted, int):
        is_bounded = "bubble" not in config.speculative.sources
        useful = min(wanted, useful) if is_bounded else wanted
    unit, spare, per_row = cache_unit(config, needs, is_paged)
    is_flexible = wanted == "auto" or is_paged
    room, needed = (free / 2, per_row) if is_flexible else (free, useful)
    if device.type == "cuda" and is_flexible:
        peak = gradient_peak(config, learner) if needs.gradients else 0
        needs = replace(needs, training=peak)
        of_splits = split_bytes(config, learner.model.config.get_text_config(decoder=True))
        needs = replace(needs, rollout=max(forward_peak(config, learner), of_splits))
        kept_free = 1 - rollout.gpu_memory_utilization
        room = free - kept_free * torch.cuda.mem_get_info(device)[1]
        room -= sum(needs.others.values())
        room = needs.room_for_cache(room, config)
    if is_paged and needs.states:
        slots = slots_with_states(needs, room, useful)
        useful = int(ranks.all_gather(np.array([slots])).min())
        room -= (useful + 1) * needs.states
    for num_shared in needs.shared_rows:
        left = room - num_shared * needs.shared_row
        fitting = int(ranks.all_gather(np.array([left // unit])).min()) - spare
        if fitting >= needed:
            break
    else:
        size = needed * unit + num_shared * needs.shared_row
        have = f"need {size / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free next to the model"
        keys = (
            "rollout.max_num_seqs, rollout.max_completion_length, optim.max_tokens_per_microbatch"
        )
        raise InputError(
            f"rollout.max_num_seqs: {wanted}, but slots of {max_length(config)} tokens {have}; "
            f"lower {keys}, or set optim.shard_state=true"
        )
    if not is_paged:
        return min(fitting, useful), None, num_shared
    num_pages = min(fitting, useful * per_row)
    num_slots = min(useful, num_pages // (-(-rollout.max_prompt_length // PAGE) + 1))
    return max(num_slots, 1), num_pages, num_shared


def gradient_peak(config: Config, learner: Learner, lengths: list[int] | None = None) -> int:
    """Measure the peak bytes of a gradient step on a full micro-batch; clear the gradient.

    lengths: of its responses, by default the longest possible."""
    device = learner.ranks.device
    lengths = lengths or full_batch(config.optim.max_tokens_per_microbatch, config)
    prompts: list[tuple[int, ...]] = [(0,)] * len(lengths)
    tokens = [np.zeros(length, int) for length in lengths]
    generated = [np.zeros(length, np.float32) for length in lengths]

    def step() -> None:
        batch = pack_responses(prompts, tokens, generated, device)
        learner.accumulate_gradient(batch, np.zeros(len(lengths)), np.zeros(len(lengths)))

    peak = peak_of(step, device)
    learner.optimizer.clear()
    return peak


@torch.inference_mode()
def forward_peak(config: Config, learner: Learner) -> int:
    """Measure the peak bytes of a rollout's largest forward, whose tokens are all sampled."""
    rollout, model, device = config.rollout, learner.model, learner.ranks.device
    count = rollout.max_num_batched_tokens
    lengths = full_batch(count, config)
    params = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k)

    def forward() -> None:
        tokens = torch.zeros(count, dtype=torch.int64, device=device)
        packing = pack_sequences(lengths, device)
        logits = output_head(model)(forward_hidden(model, tokens, packing, learner.kernel))
        keys = torch.zeros(count, 4, dtype=torch.int32, device=device)
        sample(logits, keys, tokens, params)

    return peak_of(forward, device)


def full_batch(num_tokens: int, config: Config) -> list[int]:
    """Return the lengths of sequences of `num_tokens` in all: the longest possible and a rest."""
    longest = max_length(config)
    return [min(longest, num_tokens - begin) for begin in range(0, num_tokens, longest)]


def peak_of(action: Callable[[], None], device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    return torch.cuda.max_memory_allocated(device) - before


def free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return free_host_bytes()


def free_host_bytes() -> float:
    """Return this rank's share of the machine's memory that is available without swapping."""
    return host_bytes()[0] / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def host_bytes() -> tuple[float, float]:
    """Return the bytes of memory that are available, and all, in the limits of a container."""
    import psutil

    host = psutil.virtual_memory()
    available, total = float(host.available), float(host.total)
    for folder, limit_of, used_of, cache_of in control_groups():
        # A file may be absent, and a limit "max".
        with contextlib.suppress(OSError, ValueError, KeyError):
            limit = int((folder / limit_of).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / used_of).read_text()) - int(stat[cache_of])  # freed on demand
            available, total = min(available, max(limit - used, 0)), min(total, limit)
    return available, total


def control_groups() -> Iterator[tuple[Path, str, str, str]]:
    """Yield the folder of each control group of this process, and names of figures in it.

    These are the files of the limit and of the use, and in memory.stat the cache of files. In a
    container the group may be at the root, while its path is that of the host."""
    try:
        lines = (PROCESS / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        root, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        if kinds:
            root = CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if not kinds or "memory" in kinds.split(","):
            parts = Path(path).parts[1:]
            for depth in range(len(parts) + 1):
                yield root.joinpath(*parts[:depth]), *names


def host_token_budget(ranks: Ranks) -> tuple[int, int]:
    """Return how many tokens of drafts and of history each rank may keep, equal on all ranks."""
    free = SHARE_OF_HOST * float(ranks.all_gather(np.array([free_host_bytes()])).min())
    return int(free // DRAFT_TOKEN_BYTES), int(free // HISTORY_TOKEN_BYTES)
