"""Whether a run fits, worked out before anything is loaded: python -m bubblespec.memory --config
FILE [section.key=value ...]

What the parts of a run need is in memory_needs.py. Here it is held against what is there: how many
slots an engine gets, how many rows all ranks may decode together, and, as a table, what cards of
two sizes have room for.

All sizes are bytes of one rank; the table is in GB of 10^9 bytes.
"""

import argparse
import os
import sys

import numpy as np
import psutil
import torch
from transformers import AutoConfig, PreTrainedModel

from bubblespec.config import Config, load_config
from bubblespec.dist.ranks import Ranks
from bubblespec.errors import InputError
from bubblespec.memory_needs import (
    AUTO_SHARED_ROWS,
    Needs,
    activation_bytes,
    meta_model,
    spare_slots,
    work_out,
)

CARDS = {
    "80 GB": 79.1 * 2**30,
    "141 GB": 139.7 * 2**30,
}  # what torch sees of an H100 and of an H200
# Kept free: the CUDA context, NCCL's buffers, CUDA graphs, fragmentation. A guess, not measured.
HEADROOM = 0.06


def rows_of_a_rank(config: Config, world_size: int) -> int:
    """Responses that the rank with most of them generates in a step."""
    return -(-config.rollout.num_prompts_per_step // world_size) * config.rollout.num_generations


def most_slots(config: Config, world_size: int) -> int:
    """Slots beyond which more are of no use: one for each row of a rank, and as many again for rows
    beyond an even share of what is trained on: drafts made ahead, prompts that may be deferred, or
    many short rows placed against few long ones."""
    rows = rows_of_a_rank(config, world_size)
    is_placed = world_size > 1 and config.rollout.placement != "in_turn"
    may_have_more = (
        "bubble" in config.speculative.method or config.tail_batching.enabled or is_placed
    )
    return min(rows * (2 if may_have_more else 1), config.rollout.max_batch_tokens)


def choose_num_slots(
    config: Config, model: PreTrainedModel, has_moments: bool, ranks: Ranks
) -> int:
    """rollout.num_slots, or for auto as many as fit into what is free now, the same on all ranks
    (they must call it together).

    Called when model and optimizer are on the device. has_moments: whether AdamW's moments are
    there too; otherwise the first update makes them. On a CPU ranks may fill half of the memory
    that is free. Raises InputError where not one slot fits.
    """
    rollout = config.rollout
    most = most_slots(config, ranks.world_size)
    if rollout.num_slots != "auto":
        return (
            rollout.num_slots
            if "bubble" in config.speculative.method
            else min(rollout.num_slots, most)
        )
    needs = work_out(config, model, ranks.world_size)
    free, free_beside, room = _room(config, needs, has_moments, ranks.device)
    spare = spare_slots(config) if ranks.device.type == "cuda" else 0
    fitting = int(ranks.gather(np.array([room // needs.whole_slot])).min()) - spare
    if fitting < 1:
        shared = (
            f" and {needs.shared / 1e9:.2f} GB of rollout.tp_tail_max_rows" if needs.shared else ""
        )
        raise InputError(
            f"rollout.num_slots: a slot of {needs.whole_slot / 1e9:.2f} GB and {(free_beside - room) / 1e9:.2f} GB of "
            f"activations{shared} do not fit the {free / 1e9:.2f} GB that model and optimizer leave free; lower "
            "optim.max_tokens_per_microbatch or rollout.max_completion_length, or set optim.shard_state (see bubblespec.memory)"
        )
    return min(fitting, most)


def choose_tp_rows(
    config: Config, model: PreTrainedModel, has_moments: bool, num_slots: int, ranks: Ranks
) -> int:
    """rollout.tp_tail_max_rows, or for auto as many as fit beside the engine's slots into what is
    free, at most AUTO_SHARED_ROWS; the same on all ranks (they must call it together). has_moments:
    as in `choose_num_slots`."""
    wanted = config.rollout.tp_tail_max_rows
    if wanted != "auto" or ranks.world_size == 1:
        return 0 if wanted == "auto" else wanted
    needs = work_out(config, model, ranks.world_size)
    spare = spare_slots(config) if ranks.device.type == "cuda" else 0
    _, free_beside, room = _room(config, needs, has_moments, ranks.device)
    left = min(
        room - (num_slots + spare) * needs.whole_slot, free_beside - needs.training
    )  # they stay in a gradient step
    fitting = ranks.gather(np.array([left // needs.shared_row])).min() - spare
    return int(min(max(fitting, 0), AUTO_SHARED_ROWS))


def _room(
    config: Config, needs: Needs, has_moments: bool, device: torch.device
) -> tuple[float, float, float]:
    """Bytes that are free, that are left of them beside what the run makes later, and of these the
    bytes for keys and values."""
    free, total = free_bytes(device)
    free_beside = (
        free
        - HEADROOM * total
        - (0 if has_moments else needs.moments)
        - needs.drafter
        - needs.shared
    )
    return (
        free,
        free_beside,
        needs.room_for_cache(
            free_beside, config.rollout.free_cache_engine, config.optim.stream_gradients
        ),
    )


def free_bytes(device: torch.device) -> tuple[float, float]:
    """What this rank may still allocate, and all that there is for it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(
            device
        ), total
    available = psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) / 2
    return available, available


def table(config: Config, model: PreTrainedModel, world_size: int) -> str:
    """The sum, and for cards of 80 and 141 GB what it leaves."""
    needs = work_out(config, model, world_size)
    optim, rollout = config.optim, config.rollout
    other = activation_bytes(
        model, optim.max_tokens_per_microbatch, not config.model.gradient_checkpointing
    )
    precision = "float32" if model.dtype == torch.bfloat16 else config.model.dtype
    where = (
        f"this rank's share of {world_size}"
        if optim.shard_state and world_size > 1
        else "all on every rank"
    )
    rows, most = rows_of_a_rank(config, world_size), most_slots(config, world_size)
    with_or_without = (
        ("with", "without") if config.model.gradient_checkpointing else ("without", "with")
    )
    lines = [
        f"{config.model.path}: {sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters in {config.model.dtype}, "
        f"{world_size} ranks; GB on each",
        f"{needs.weights / 1e9:8.2f}  weights",
        f"{needs.reference / 1e9:8.2f}  reference model" if needs.reference else None,
        f"{needs.gradients / 1e9:8.2f}  gradients, {precision}",
        f"{needs.masters / 1e9:8.2f}  master weights, float32, {where}" if needs.masters else None,
        f"{needs.moments / 1e9:8.2f}  moments, {precision}, {where}",
        f"{needs.drafter / 1e9:8.2f}  drafter: weights, gradients, optimizer state, part of the head"
        if needs.drafter
        else None,
        f"{needs.shared / 1e9:8.2f}  of {rollout.tp_tail_max_rows} rows that all ranks decode together"
        if needs.shared
        else None,
        f"{needs.lasting / 1e9:8.2f}  lasting",
        f"{needs.activations / 1e9:8.2f}  activations of {optim.max_tokens_per_microbatch} tokens, {with_or_without[0]} "
        f"checkpointing ({other / 1e9:.2f} {with_or_without[1]})",
        f"{needs.head / 1e9:8.2f}  loss head: {optim.max_logits_per_chunk} logits at once",
        f"{needs.rollout / 1e9:8.2f}  or, in the rollout, a forward of {rollout.max_batch_tokens} tokens",
        f"{needs.slot / 1e9:8.2f}  keys and values of a slot, {rollout.max_prompt_length + rollout.max_completion_length} tokens",
        f"{needs.drafter_slot / 1e9:8.2f}  of the drafter for a slot"
        if needs.drafter_slot
        else None,
        f"{needs.drafter_lesson / 1e9:8.2f}  for training the drafter on a piece of a response"
        if needs.drafter_slot
        else None,
    ]
    for name, total in CARDS.items():
        room = total * (1 - HEADROOM) - needs.lasting
        rooms = (
            needs.room_for_cache(room, is_freed, optim.stream_gradients)
            for is_freed in (False, True)
        )
        beside_step, freed = (
            max(int((cache - needs.shared) // needs.whole_slot) - spare_slots(config), 0)
            for cache in rooms
        )
        fitting = freed if rollout.free_cache_engine else beside_step
        slots = min(fitting, most) if rollout.num_slots == "auto" else rollout.num_slots
        lines.append(
            f"{world_size} x {name}: {'fits' if 1 <= slots <= fitting else 'DOES NOT FIT'}, {(room - needs.training) / 1e9:.1f} "
            f"left beside a gradient step ({HEADROOM:.0%} kept free); slots: {beside_step} fit, {freed} if freed for the step; "
            f"{slots} used for {rows} rows"
        )
    lines.append(
        f"rank 0 holds {needs.host_while_saving / 1e9:.1f} GB of optimizer state in the machine's memory while it saves"
    )
    if needs.host_lessons:
        lines.append(
            f"each rank holds {needs.host_lessons / 1e9:.1f} GB of responses for its drafter in the machine's memory"
        )
    return "\n".join(line for line in lines if line)


def load_meta_model(config: Config) -> PreTrainedModel:
    """From the model's config.json alone. Raises InputError."""
    try:
        architecture = AutoConfig.from_pretrained(
            config.model.path, trust_remote_code=config.model.trust_remote_code
        )
        return meta_model(architecture, getattr(torch, config.model.dtype))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"model.path: cannot read the configuration of {config.model.path}: {str(error).strip().splitlines()[0]}"
        ) from error


def main() -> int:
    """Print what a rank needs and what fits. Returns the exit code: 2 for bad input."""
    parser = argparse.ArgumentParser(
        description="Memory of one rank, worked out from the configuration"
    )
    parser.add_argument("--config", required=True, help="YAML file, see configs/")
    parser.add_argument("--world-size", type=int, default=8, help="number of ranks")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_intermixed_args()
    try:
        if arguments.world_size < 1:
            raise InputError(f"--world-size: {arguments.world_size} must be at least 1")
        config = load_config(arguments.config, arguments.overrides)
        print(table(config, load_meta_model(config), arguments.world_size))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
