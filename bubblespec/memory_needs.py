"""What a rank needs memory for: bytes of each part of a run, before anything is loaded.

Sizes of weights, gradients, optimizer state, keys and values are exact: they are read off the model
on torch's meta device, where tensors have shapes and no memory. Activations are counted there too,
as what a forward saves for its backward. The temporary memory of a backward, the loss head and the
sampler is a rule of thumb; the tests compare the gradient step with measured peaks.
"""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from bubblespec.config import Config
from bubblespec.engine import attention, sampling
from bubblespec.engine.chains import KEPT, LONGEST
from bubblespec.engine.drafter import Drafter
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import enable_gradient_checkpointing, forward_hidden
from bubblespec.engine.packing import PAGE, CachePacking, SequencePacking, pack_rows, pack_sequences
from bubblespec.errors import InputError
from bubblespec.learn.drafter_training import CONTEXT, PIECE, SEQUENCES_PER_UPDATE
from bubblespec.planner.windows import WINDOWS

# For a moment, beside what is saved. A backward holds gradients of about so much of what its layer
# has saved:
BACKWARD_SHARE = 0.5
# and the loss head so many copies of a chunk's logits, in float32 at least: the logits, their
# exponentials, two gradients.
LOGIT_COPIES = 4
# Training a drafter, measured: copies of its logits in float32, and what a layer saves, over all
# passes.
LESSON_LOGIT_COPIES, LESSON_LAYERS = 10, 5
AUTO_SHARED_ROWS = 16
# for each of sampling.MAX_LOGITS_AT_ONCE: logits, noise, their sum, and the integers noise is made
# of
SAMPLER_BYTES = 16


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
    """Most that a forward of the rollout holds, of this rank's rows or of all ranks together,
    beside what lasts and the slots."""
    shared_row: int
    """Keys and values of one row that all ranks decode together, of the heads of the rank with most
    of them, and what the drafter keeps for it; 0 where no rows can be."""
    shared: int
    """Of as many of them as rollout.tp_tail_max_rows asks for, spare ones included; 0 for auto,
    which takes what slots leave."""
    drafter: int
    """Where there is a learned drafter, what it adds to what lasts: weights, gradients, master
    weights, moments, and its part of the policy's head."""
    drafter_slot: int
    """What it keeps for one row: keys and values of its layer, and hidden states."""
    drafter_lesson: int
    """Most that training it on one piece of a response holds: in idle time beside rollouts, in a
    warm start several at a time."""
    host_while_saving: int
    """Memory of the machine, not of the card, that rank 0 needs for the optimizer state of all
    ranks."""
    host_lessons: int
    """The same of each rank, for the responses that the drafter learns from."""

    @property
    def lasting(self) -> int:
        """Bytes that are there all the time."""
        return (
            self.weights
            + self.reference
            + self.gradients
            + self.masters
            + self.moments
            + self.drafter
            + self.shared
        )

    @property
    def whole_slot(self) -> int:
        """Bytes of one row."""
        return self.slot + self.drafter_slot

    @property
    def training(self) -> int:
        """Bytes that are there in a gradient step alone, the policy's or the drafter's."""
        return max(self.activations + self.head, SEQUENCES_PER_UPDATE * self.drafter_lesson)

    def room_for_cache(self, room: float, is_freed: bool, is_streamed: bool = False) -> float:
        """Bytes for keys and values out of the `room` beside what lasts. is_freed: they are given
        back for a gradient step.

        is_streamed: forwards and gradients take turns. What the allocator keeps of the one need not
        fit the other, so both count.
        """
        if is_freed and room >= self.training:
            return room - self.rollout
        return room - (
            self.rollout + self.training if is_streamed else max(self.rollout, self.training)
        )


def work_out(config: Config, model: PreTrainedModel, world_size: int) -> Needs:
    """model: on the meta device (`meta_model`), or the trainer's own, of which only shapes are
    used."""
    size = model.dtype.itemsize
    trained = [p for p in model.parameters() if p.requires_grad]
    sizes = [
        [p.numel() for p in trained if p.ndim >= 2],
        [p.numel() for p in trained if p.ndim < 2],
    ]
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
    drafter, drafter_slot, lesson, lessons = (
        drafter_bytes(config, shapes) if "drafter" in config.speculative.method else (0, 0, 0, 0)
    )
    slot, shared_row, sampled = slot_bytes(config, shapes), 0, sampling_bytes(fed, vocab, size)
    if world_size > 1 and config.rollout.tp_tail_max_rows != 0:
        shared_row = shared_slot_bytes(slot, shapes, world_size) + drafter_slot
        sampled = max(sampled, shared_sampling_bytes(config, vocab, size, world_size))
    return Needs(
        weights=weights,
        reference=weights if config.loss.kl_coef > 0 else 0,
        gradients=total * state_size,
        masters=share * state_size if has_masters else 0,
        moments=2 * share * state_size,
        slot=slot,
        activations=activation_bytes(shapes, tokens, config.model.gradient_checkpointing),
        # Two gradients of the head's size: that of one chunk, and their sum so far.
        head=logits * (LOGIT_COPIES * max(size, 4) + (size if size < 4 else 0))
        + 2 * head.numel() * size,
        rollout=int(_layer_bytes(shapes, fed)) + sampled + lesson,
        shared_row=shared_row,
        shared=shared_slots(config, world_size) * shared_row,
        drafter=drafter,
        drafter_slot=drafter_slot,
        drafter_lesson=lesson,
        host_while_saving=total * state_size * (3 if has_masters else 2),
        host_lessons=lessons,
    )


def meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without memory, with an attention that saves for the backward what the
    variable-length kernels save."""
    config = copy.deepcopy(
        config
    )  # the names of the attention and of the experts' product sit on it
    config._experts_implementation = (
        None  # transformers' default, a grouped product: any other looks at values
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.set_attn_implementation(_SHAPES_ONLY)
    return model.eval()


def largest_share(sizes: list[list[int]], world_size: int) -> int:
    """Elements on the rank that gets most, where whole parameters are dealt out largest first to
    the rank with least so far, one list of `sizes` (a parameter group) after the other: what
    ZeroRedundancyOptimizer does."""
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


def spare_slots(config: Config) -> int:
    """Slots on a GPU that belong to no row: padding of forwards that are CUDA graphs goes there."""
    has_graphs = (
        config.model.dtype == "bfloat16"
        and config.model.attention != "sdpa"
        and not config.rollout.enforce_eager
    )
    return int(has_graphs)


def shared_slots(config: Config, world_size: int) -> int:
    """Slots that rollout.tp_tail_max_rows asks for, spare ones included; 0 for auto."""
    wanted = config.rollout.tp_tail_max_rows
    return 0 if wanted in (0, "auto") or world_size == 1 else wanted + spare_slots(config)


def shared_slot_bytes(slot: int, model: PreTrainedModel, world_size: int) -> int:
    """What of a slot's keys and values the rank with most of the heads has, where all ranks decode
    a row together."""
    architecture = model.config.get_text_config(decoder=True)
    key_heads = (
        getattr(architecture, "num_key_value_heads", None) or architecture.num_attention_heads
    )
    return slot * -(-key_heads // world_size) // key_heads


def sampling_bytes(positions: int, vocab: int, size: int) -> int:
    """Logits of so many positions in the model's precision, and what the sampler makes of a part of
    them at a time."""
    return (
        positions * vocab * size
        + min(positions * vocab, sampling.MAX_LOGITS_AT_ONCE["cuda"]) * SAMPLER_BYTES
    )


def shared_sampling_bytes(config: Config, vocab: int, size: int, world_size: int) -> int:
    """The same on each rank of a forward of all of them together. Where only the best tokens are
    allowed the ranks exchange their logits: this rank's in float32, padded, those of all ranks, and
    these in a row."""
    rollout, speculative = config.rollout, config.speculative
    rows = AUTO_SHARED_ROWS if rollout.tp_tail_max_rows == "auto" else rollout.tp_tail_max_rows
    window = int(WINDOWS[-1])
    window = 0 if speculative.method == "none" else window
    positions, own = (
        min(rows * (1 + window), max(rollout.max_batch_tokens, rows)),
        -(-vocab // world_size),
    )
    if not 0 < rollout.top_k < vocab and rollout.top_p == 1.0:
        return sampling_bytes(positions, own, size)
    return sampling_bytes(positions, vocab, 0) + positions * (
        own * (size + 4 + 4) + (world_size * own + vocab) * 4
    )


def drafter_bytes(config: Config, model: PreTrainedModel) -> tuple[int, int, int, int]:
    """Of a drafter for this policy, on the meta device: bytes that are there all the time, of one
    row, at most in training on one lesson, and in the machine's memory. Raises InputError for a
    policy that can have none."""
    vocab, hidden = model.get_output_embeddings().weight.shape
    try:
        with torch.device("meta"):
            drafter = Drafter(model, np.arange(1))
    except ValueError as error:
        raise InputError(f"speculative.method: no drafter for this policy: {error}") from error
    size, count = model.dtype.itemsize, sum(p.numel() for p in drafter.parameters())
    # Bytes of a parameter: itself, its gradient, and two moments; in bfloat16 these are of a
    # float32 master weight, which has a gradient of its own for a moment.
    of_each = 2 * size + (4 * 4 if model.dtype == torch.bfloat16 else 2 * size)
    cache, one = KVCache(1, 1), np.array([1])
    with torch.no_grad():
        packing = pack_rows(cache, np.array([0]), one, torch.device("meta"))
        drafter(
            torch.empty(1, hidden, dtype=model.dtype, device="meta"),
            torch.zeros(1, dtype=torch.int64, device="meta"),
            packing,
        )
    of_row = cache.num_bytes() * slot_length(config, LONGEST) + KEPT * hidden * size
    known = min(config.drafter.vocab_size, vocab)
    of_lesson = LESSON_LOGIT_COPIES * 4 * PIECE * known + int(
        LESSON_LAYERS * _layer_bytes(model, PIECE + CONTEXT)
    )
    return (
        count * of_each + known * hidden * size,
        of_row,
        of_lesson,
        config.drafter.buffer_tokens * hidden * size,
    )


def activation_bytes(model: PreTrainedModel, tokens: int, has_checkpoints: bool) -> int:
    """Most that a forward and backward of `tokens` packed tokens hold below the head, beside
    weights and gradients.

    With gradient checkpointing only the layers' inputs stay, and one layer at a time is computed
    again.
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
    """What the forward of one packed sequence saves for its backward, and its result. Views of one
    memory count once."""
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


def _forward_shapes(
    model: PreTrainedModel, tokens: int, packing: CachePacking | SequencePacking
) -> torch.Tensor:
    """`forward_hidden` on the meta device. Raises InputError for a model whose shapes depend on
    values."""
    try:
        with _GroupedProductOfAnyType():
            return forward_hidden(
                model, torch.zeros(tokens, dtype=torch.int64, device="meta"), packing
            )
    except NotImplementedError as error:
        raise InputError(
            f"model.path: the memory that {type(model).__name__} needs cannot be worked out, as the sizes of its tensors depend "
            "on their values (experts that do not go through transformers' interface, say)"
        ) from error


class _GroupedProductOfAnyType(TorchFunctionMode):
    """On the meta device the product of experts' weights knows bfloat16 alone. transformers'
    stand-in for it has the same result and saves the same for the backward."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch._grouped_mm:
            return torch.ops.transformers.grouped_mm_fallback(*args, kwargs["offs"])
        return function(*args, **(kwargs or {}))


class _SavesLikeFlash(torch.autograd.Function):
    """Computes nothing; saves queries, keys, values, the result and one float32 a query and
    head."""

    @staticmethod
    def forward(ctx, query, key, value):
        out = torch.empty_like(query)
        ctx.save_for_backward(
            query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32)
        )
        return out


def _shapes_only(module, query, key, value, attention_mask, **kwargs):
    query, key, value = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    return _SavesLikeFlash.apply(query, key, value)[None], None


_SHAPES_ONLY = "bubblespec_shapes_only"
AttentionInterface.register(_SHAPES_ONLY, _shapes_only)
