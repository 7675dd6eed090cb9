"""Memory of a rank, worked out before anything is loaded: python -m bubblespec.memory --config FILE [section.key=value ...]

Sizes of weights, gradients, optimizer state, keys and values are exact: they are read off the model on torch's meta device,
where tensors have shapes and no memory. Activations are counted there too, as what a forward saves for its backward. The
temporary memory of a backward, the loss head and the sampler is a rule of thumb; the tests compare the gradient step with
measured peaks.

All sizes are bytes of one rank; tables are in GB of 10^9 bytes.
"""

import argparse
import copy
import os
import sys
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from bubblespec.config import Config, load_config
from bubblespec.engine import attention, sampling
from bubblespec.engine.chains import KEPT, LONGEST
from bubblespec.engine.drafter import Drafter
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import enable_gradient_checkpointing, forward_hidden
from bubblespec.engine.packing import PAGE, CachePacking, SequencePacking, pack_rows, pack_sequences
from bubblespec.errors import InputError
from bubblespec.learn.drafter_training import CONTEXT, PIECE, SEQUENCES_PER_UPDATE
from bubblespec.ranks.collectives import Ranks

CARDS = {"80 GB": 79.1 * 2**30, "141 GB": 139.7 * 2**30}  # what torch sees of an H100 and of an H200
# Kept free: the CUDA context, NCCL's buffers, CUDA graphs, fragmentation. A guess, not measured.
HEADROOM = 0.06
# For a moment, beside what is saved. A backward holds gradients of about so much of what its layer has saved:
BACKWARD_SHARE = 0.5
# and the loss head so many copies of a chunk's logits, in float32 at least: the logits, their exponentials, two gradients.
LOGIT_COPIES = 4
# Training a drafter, measured: copies of its logits in float32, and what a layer saves, over all passes.
LESSON_LOGIT_COPIES, LESSON_LAYERS = 10, 5
AUTO_SHARED_ROWS = 16
SAMPLER_BYTES = 16  # for each of sampling.MAX_LOGITS_AT_ONCE: logits, noise, their sum, and the integers noise is made of


@dataclass(frozen=True)
class Needs:
    """Bytes of one rank."""

    weights: int
    """The policy."""
    reference: int
    """The reference model of a KL term, or 0."""
    gradients: int
    """The whole gradient buffer."""
    masters: int
    """This rank's float32 master weights, or 0 where the model is updated in place."""
    moments: int
    """AdamW's, of what this rank updates."""
    slot: int
    """Keys and values of one row."""
    activations: int
    """Most that a gradient step holds below the loss head, beside what lasts."""
    head: int
    """Most that its loss head holds."""
    rollout: int
    """Most that a forward of the rollout holds, beside what lasts and the slots."""
    drafter: int
    """Where there is a learned drafter, what it adds to what lasts: weights, gradients, master weights, moments, and its part of
    the policy's head."""
    drafter_slot: int
    """What it keeps for one row: keys and values of its layer, and hidden states."""
    drafter_lesson: int
    """Most that training it on one piece of a response holds: in idle time beside rollouts, in a warm start several at a time."""
    host_while_saving: int
    """Memory of the machine, not of the card, that rank 0 needs for the optimizer state of all ranks."""
    host_lessons: int
    """The same of each rank, for the responses that the drafter learns from."""

    @property
    def lasting(self) -> int:
        """Bytes that are there all the time."""
        return self.weights + self.reference + self.gradients + self.masters + self.moments + self.drafter

    @property
    def whole_slot(self) -> int:
        """Bytes of one row."""
        return self.slot + self.drafter_slot

    @property
    def training(self) -> int:
        """Bytes that are there in a gradient step alone, the policy's or the drafter's."""
        return max(self.activations + self.head, SEQUENCES_PER_UPDATE * self.drafter_lesson)

    def room_for_cache(self, room: float, is_freed: bool, is_streamed: bool = False) -> float:
        """Bytes for keys and values out of the `room` beside what lasts. is_freed: they are given back for a gradient step.

        is_streamed: forwards and gradients take turns. What the allocator keeps of the one need not fit the other, so both count.
        """
        if is_freed and room >= self.training:
            return room - self.rollout
        return room - (self.rollout + self.training if is_streamed else max(self.rollout, self.training))


def work_out(config: Config, model: PreTrainedModel, world_size: int) -> Needs:
    """model: on the meta device (`meta_model`), or the trainer's own, of which only shapes are used."""
    size = model.dtype.itemsize
    trained = [p for p in model.parameters() if p.requires_grad]
    sizes = [[p.numel() for p in trained if p.ndim >= 2], [p.numel() for p in trained if p.ndim < 2]]
    total = sum(map(sum, sizes))
    share = largest_share(sizes, world_size) if config.optim.shard_state else total
    has_masters = trained[0].dtype == torch.bfloat16
    state_size = 4 if has_masters else trained[0].dtype.itemsize
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    shapes = meta_model(model.config, model.dtype)
    head = shapes.get_output_embeddings().weight
    tokens, vocab = config.optim.max_tokens_per_microbatch, head.shape[0]
    logits = min(tokens * vocab, config.optim.max_logits_per_chunk)
    fed = config.rollout.max_batch_tokens
    sampled = min(fed * vocab, sampling.MAX_LOGITS_AT_ONCE["cuda"])
    drafter, drafter_slot, lesson, lessons = (
        drafter_bytes(config, shapes) if "drafter" in config.speculative.method else (0, 0, 0, 0)
    )
    return Needs(
        weights=weights,
        reference=weights if config.loss.kl_coef > 0 else 0,
        gradients=total * state_size,
        masters=share * state_size if has_masters else 0,
        moments=2 * share * state_size,
        slot=slot_bytes(config, shapes),
        activations=activation_bytes(shapes, tokens, config.model.gradient_checkpointing),
        # Two gradients of the head's size: that of one chunk, and their sum so far.
        head=logits * (LOGIT_COPIES * max(size, 4) + (size if size < 4 else 0)) + 2 * head.numel() * size,
        rollout=int(_layer_bytes(shapes, fed)) + fed * vocab * size + sampled * SAMPLER_BYTES + lesson,
        drafter=drafter,
        drafter_slot=drafter_slot,
        drafter_lesson=lesson,
        host_while_saving=total * state_size * (3 if has_masters else 2),
        host_lessons=lessons,
    )


def meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without memory, with an attention that saves for the backward what the variable-length kernels save."""
    config = copy.deepcopy(config)  # the names of the attention and of the experts' product sit on it
    config._experts_implementation = None  # transformers' default, a grouped product: any other looks at values
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.set_attn_implementation(_SHAPES_ONLY)
    return model.eval()


def largest_share(sizes: list[list[int]], world_size: int) -> int:
    """Elements on the rank that gets most, where whole parameters are dealt out largest first to the rank with least so far,
    one list of `sizes` (a parameter group) after the other: what ZeroRedundancyOptimizer does."""
    loads = [0] * world_size
    for group in sizes:
        for size in sorted(group, reverse=True):
            loads[loads.index(min(loads))] += size
    return max(loads)


def slot_length(config: Config, beyond: int = 0) -> int:
    """Positions of one slot: of the longest prompt and response, and `beyond` them."""
    length = config.rollout.max_prompt_length + config.rollout.max_completion_length + beyond
    return -(-length // PAGE) * PAGE if config.model.attention == "flash_attn" else length


def slot_bytes(config: Config, model: PreTrainedModel) -> int:
    """Keys and values of one slot, in the model's precision."""
    cache = KVCache(1, 1)
    packing = pack_rows(cache, np.array([0]), np.array([1]), torch.device("meta"))
    model = meta_model(model.config, model.dtype)
    model.set_attn_implementation(attention.NAME)
    with torch.no_grad():
        _forward_shapes(model, 1, packing)
    return cache.num_bytes() * slot_length(config)


def shared_row_bytes(config: Config, model: PreTrainedModel, world_size: int) -> int:
    """Keys and values of a row that all ranks decode together, on the rank with most of the heads."""
    architecture = model.config.get_text_config(decoder=True)
    key_heads = getattr(architecture, "num_key_value_heads", None) or architecture.num_attention_heads
    return slot_bytes(config, model) * -(-key_heads // world_size) // key_heads


def drafter_bytes(config: Config, model: PreTrainedModel) -> tuple[int, int, int, int]:
    """Of a drafter for this policy, on the meta device: bytes that are there all the time, of one row, at most in training on one
    lesson, and in the machine's memory. Raises InputError for a policy that can have none."""
    vocab, hidden = model.get_output_embeddings().weight.shape
    try:
        with torch.device("meta"):
            drafter = Drafter(model, np.arange(1))
    except ValueError as error:
        raise InputError(f"speculative.method: no drafter for this policy: {error}") from error
    size, count = model.dtype.itemsize, sum(p.numel() for p in drafter.parameters())
    # Bytes of a parameter: itself, its gradient, and two moments; in bfloat16 these are of a float32 master weight, which has a
    # gradient of its own for a moment.
    of_each = 2 * size + (4 * 4 if model.dtype == torch.bfloat16 else 2 * size)
    cache, one = KVCache(1, 1), np.array([1])
    with torch.no_grad():
        packing = pack_rows(cache, np.array([0]), one, torch.device("meta"))
        drafter(
            torch.empty(1, hidden, dtype=model.dtype, device="meta"), torch.zeros(1, dtype=torch.int64, device="meta"), packing
        )
    of_row = cache.num_bytes() * slot_length(config, LONGEST) + KEPT * hidden * size
    known = min(config.drafter.vocab_size, vocab)
    of_lesson = LESSON_LOGIT_COPIES * 4 * PIECE * known + int(LESSON_LAYERS * _layer_bytes(model, PIECE + CONTEXT))
    return count * of_each + known * hidden * size, of_row, of_lesson, config.drafter.buffer_tokens * hidden * size


def activation_bytes(model: PreTrainedModel, tokens: int, has_checkpoints: bool) -> int:
    """Most that a forward and backward of `tokens` packed tokens hold below the head, beside weights and gradients.

    With gradient checkpointing only the layers' inputs stay, and one layer at a time is computed again.
    """
    whole = _saved_bytes(model, tokens)
    layer = _layer_bytes(model, tokens)
    if not has_checkpoints:
        return int(whole + BACKWARD_SHARE * layer)
    checkpointed = meta_model(model.config, model.dtype)
    enable_gradient_checkpointing(checkpointed)
    return int(_saved_bytes(checkpointed, tokens) + (1 + BACKWARD_SHARE) * layer)


def _layer_bytes(model: PreTrainedModel, tokens: int) -> float:
    return _saved_bytes(model, tokens) / model.config.num_hidden_layers


def _saved_bytes(model: PreTrainedModel, tokens: int) -> int:
    """What the forward of one packed sequence saves for its backward, and its result. Views of one memory count once."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    saved = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    device = torch.device("meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        keep(_forward_shapes(model, tokens, pack_sequences([tokens], device)))
    return sum(storage.nbytes() for address, storage in saved.items() if address not in weights)


def _forward_shapes(model: PreTrainedModel, tokens: int, packing: CachePacking | SequencePacking) -> torch.Tensor:
    """`forward_hidden` on the meta device. Raises InputError for a model whose shapes depend on values."""
    try:
        with _GroupedProductOfAnyType():
            return forward_hidden(model, torch.zeros(tokens, dtype=torch.int64, device="meta"), packing)
    except NotImplementedError as error:
        raise InputError(
            f"model.path: the memory that {type(model).__name__} needs cannot be worked out, as the sizes of its tensors depend "
            "on their values (experts that do not go through transformers' interface, say)"
        ) from error


class _GroupedProductOfAnyType(TorchFunctionMode):
    """On the meta device the product of experts' weights knows bfloat16 alone. transformers' stand-in for it has the same result
    and saves the same for the backward."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch._grouped_mm:
            return torch.ops.transformers.grouped_mm_fallback(*args, kwargs["offs"])
        return function(*args, **(kwargs or {}))


class _SavesLikeFlash(torch.autograd.Function):
    """Computes nothing; saves queries, keys, values, the result and one float32 a query and head."""

    @staticmethod
    def forward(ctx, query, key, value):
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out


def _shapes_only(module, query, key, value, attention_mask, **kwargs):
    query, key, value = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    return _SavesLikeFlash.apply(query, key, value)[None], None


_SHAPES_ONLY = "bubblespec_shapes_only"
AttentionInterface.register(_SHAPES_ONLY, _shapes_only)


def rows_of_a_rank(config: Config, world_size: int) -> int:
    """Responses that the rank with most of them generates in a step."""
    return -(-config.rollout.num_prompts_per_step // world_size) * config.rollout.num_generations


def most_slots(config: Config, world_size: int) -> int:
    """Slots beyond which more are of no use: one for each row of a rank, and as many again for rows beyond an even share of what
    is trained on: drafts made ahead, prompts that may be deferred, or many short rows placed against few long ones."""
    rows = rows_of_a_rank(config, world_size)
    is_placed = world_size > 1 and config.rollout.placement != "in_turn"
    may_have_more = "bubble" in config.speculative.method or config.tail_batching.enabled or is_placed
    return min(rows * (2 if may_have_more else 1), config.rollout.max_batch_tokens)


def spare_slots(config: Config) -> int:
    """Slots on a GPU that belong to no row: padding of forwards that are CUDA graphs goes there."""
    has_graphs = config.model.dtype == "bfloat16" and config.model.attention != "sdpa" and not config.rollout.enforce_eager
    return int(has_graphs)


def choose_num_slots(config: Config, model: PreTrainedModel, has_moments: bool, ranks: Ranks) -> int:
    """rollout.num_slots, or for auto as many as fit into what is free now, the same on all ranks (they must call it together).

    Called when model and optimizer are on the device. has_moments: whether AdamW's moments are there too; otherwise the first
    update makes them. On a CPU ranks may fill half of the memory that is free. Raises InputError where not one slot fits.
    """
    rollout = config.rollout
    most = most_slots(config, ranks.world_size)
    if rollout.num_slots != "auto":
        return rollout.num_slots if "bubble" in config.speculative.method else min(rollout.num_slots, most)
    needs = work_out(config, model, ranks.world_size)
    free, free_beside, room = _room(config, needs, has_moments, ranks.device)
    spare = spare_slots(config) if ranks.device.type == "cuda" else 0
    fitting = int(ranks.gather(np.array([room // needs.whole_slot])).min()) - spare
    if fitting < 1:
        raise InputError(
            f"rollout.num_slots: a slot of {needs.whole_slot / 1e9:.2f} GB and {(free_beside - room) / 1e9:.2f} GB of "
            f"activations do not fit the {free / 1e9:.2f} GB that model and optimizer leave free; lower "
            "optim.max_tokens_per_microbatch or rollout.max_completion_length, or set optim.shard_state (see bubblespec.memory)"
        )
    return min(fitting, most)


def choose_shared_rows(config: Config, model: PreTrainedModel, has_moments: bool, num_slots: int, ranks: Ranks) -> int:
    """rollout.shared_tail_rows, or for auto as many as fit beside the engine's slots into what is free, at most AUTO_SHARED_ROWS;
    the same on all ranks (they must call it together). has_moments: as in `choose_num_slots`."""
    wanted = config.rollout.shared_tail_rows
    if wanted != "auto" or ranks.world_size == 1:
        return 0 if wanted == "auto" else wanted
    needs = work_out(config, model, ranks.world_size)
    left = _room(config, needs, has_moments, ranks.device)[2] - num_slots * needs.whole_slot
    fitting = ranks.gather(np.array([left // shared_row_bytes(config, model, ranks.world_size)])).min()
    return int(min(max(fitting, 0), AUTO_SHARED_ROWS))


def _room(config: Config, needs: Needs, has_moments: bool, device: torch.device) -> tuple[float, float, float]:
    """Bytes that are free, that are left of them beside what the run makes later, and of these the bytes for keys and values."""
    free, total = free_bytes(device)
    free_beside = free - HEADROOM * total - (0 if has_moments else needs.moments) - needs.drafter
    return free, free_beside, needs.room_for_cache(free_beside, config.rollout.free_cache_engine, config.optim.stream_gradients)


def free_bytes(device: torch.device) -> tuple[float, float]:
    """What this rank may still allocate, and all that there is for it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
    available = psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) / 2
    return available, available


def table(config: Config, model: PreTrainedModel, world_size: int) -> str:
    """The sum, and for cards of 80 and 141 GB what it leaves."""
    needs = work_out(config, model, world_size)
    optim, rollout = config.optim, config.rollout
    other = activation_bytes(model, optim.max_tokens_per_microbatch, not config.model.gradient_checkpointing)
    precision = "float32" if model.dtype == torch.bfloat16 else config.model.dtype
    where = f"this rank's share of {world_size}" if optim.shard_state and world_size > 1 else "all on every rank"
    rows, most = rows_of_a_rank(config, world_size), most_slots(config, world_size)
    with_or_without = ("with", "without") if config.model.gradient_checkpointing else ("without", "with")
    lines = [
        f"{config.model.path}: {sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters in {config.model.dtype}, "
        f"{world_size} ranks; GB on each",
        f"{needs.weights / 1e9:8.2f}  weights",
        f"{needs.reference / 1e9:8.2f}  reference model" if needs.reference else None,
        f"{needs.gradients / 1e9:8.2f}  gradients, {precision}",
        f"{needs.masters / 1e9:8.2f}  master weights, float32, {where}" if needs.masters else None,
        f"{needs.moments / 1e9:8.2f}  moments, {precision}, {where}",
        f"{needs.drafter / 1e9:8.2f}  drafter: weights, gradients, optimizer state, part of the head" if needs.drafter else None,
        f"{needs.lasting / 1e9:8.2f}  lasting",
        f"{needs.activations / 1e9:8.2f}  activations of {optim.max_tokens_per_microbatch} tokens, {with_or_without[0]} "
        f"checkpointing ({other / 1e9:.2f} {with_or_without[1]})",
        f"{needs.head / 1e9:8.2f}  loss head: {optim.max_logits_per_chunk} logits at once",
        f"{needs.rollout / 1e9:8.2f}  or, in the rollout, a forward of {rollout.max_batch_tokens} tokens",
        f"{needs.slot / 1e9:8.2f}  keys and values of a slot, {rollout.max_prompt_length + rollout.max_completion_length} tokens",
        f"{needs.drafter_slot / 1e9:8.2f}  of the drafter for a slot" if needs.drafter_slot else None,
        f"{needs.drafter_lesson / 1e9:8.2f}  for training the drafter on a piece of a response" if needs.drafter_slot else None,
    ]
    for name, total in CARDS.items():
        room = total * (1 - HEADROOM) - needs.lasting
        rooms = (needs.room_for_cache(room, is_freed, optim.stream_gradients) for is_freed in (False, True))
        beside_step, freed = (max(int(cache // needs.whole_slot) - spare_slots(config), 0) for cache in rooms)
        fitting = freed if rollout.free_cache_engine else beside_step
        slots = min(fitting, most) if rollout.num_slots == "auto" else rollout.num_slots
        lines.append(
            f"{world_size} x {name}: {'fits' if 1 <= slots <= fitting else 'DOES NOT FIT'}, {(room - needs.training) / 1e9:.1f} "
            f"left beside a gradient step ({HEADROOM:.0%} kept free); slots: {beside_step} fit, {freed} if freed for the step; "
            f"{slots} used for {rows} rows"
        )
    lines.append(f"rank 0 holds {needs.host_while_saving / 1e9:.1f} GB of optimizer state in the machine's memory while it saves")
    if needs.host_lessons:
        lines.append(f"each rank holds {needs.host_lessons / 1e9:.1f} GB of responses for its drafter in the machine's memory")
    return "\n".join(line for line in lines if line)


def load_meta_model(config: Config) -> PreTrainedModel:
    """From the model's config.json alone. Raises InputError."""
    try:
        architecture = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
        return meta_model(architecture, getattr(torch, config.model.dtype))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"model.path: cannot read the configuration of {config.model.path}: {str(error).strip().splitlines()[0]}"
        ) from error


def main() -> int:
    """Print what a rank needs and what fits. Returns the exit code: 2 for bad input."""
    parser = argparse.ArgumentParser(description="Memory of one rank, worked out from the configuration")
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
