"""Tensor parallelism: one forward computed by all ranks, each with a shard of its weights.

Every rank has the whole model, so a shard is a view of its parameters: nothing is copied or moved.
The configuration's `base_model_tp_plan` names the linear layers that are sharded. A "colwise" layer
computes some of its outputs, attention heads or hidden units of an MLP; the "rowwise" layer behind
it takes these as its inputs, and its output is the sum over ranks (Megatron-LM, Shoeybi et al.
2019, arXiv 1909.08053, section 3). Every rank computes everything else in full. The output head
gives the logits of a shard of the vocabulary, from which the ranks sample together
(`sample_shards`).

Shape legend: N packed tokens, T positions sampled, V vocabulary, v of it on this rank, P ranks.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import Linear
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from bubblespec.distributed.ranks import Ranks, all_gather
from bubblespec.distributed.shared_memory import open_collectives
from bubblespec.engine import sampling
from bubblespec.engine.forward import GraphMemory, ModelForward, Sampled
from bubblespec.engine.kernels import random_hidden
from bubblespec.engine.layers import layer_heads
from bubblespec.engine.model_checks import is_rounding, relative_difference
from bubblespec.engine.output_head import output_head
from bubblespec.engine.packing import Packing
from bubblespec.engine.sampling import SamplingParams
from bubblespec.errors import fallback, first_problem, one_line

KEYS_AND_VALUES = ("k_proj", "v_proj")  # sharded by key/value heads, other layers by query heads


class TPUnsupported(ValueError):
    """This model cannot be computed by this many ranks together; the message has the reason."""


def no_tp_tail(error: TPUnsupported) -> str:
    """Return the line for a run whose ranks compute no forwards together."""
    return fallback("no TP tail", error, "rollout.tp_tail_max_rows=0")


class TPGroup:
    """Collectives of common forwards: all ranks call the same methods in the same order."""

    def __init__(self, ranks: Ranks):
        """Set up shared memory; all ranks call this together."""
        self.ranks, self.rank, self.size = ranks, ranks.rank, ranks.world_size
        self.gather_text = ranks.gather_text
        are_processes = dist.is_initialized() and ranks.device.type == "cpu"
        self._shared = open_collectives(ranks) if are_processes else None
        is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
        self.can_capture = ranks.device.type == "cuda" and is_nccl
        """Whether sums may be part of a CUDA graph. Gloo's go through the host."""

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if tensor.device.type == "cuda":  # without a wait: the next gather finds a missing rank
            dist.all_reduce(tensor)
        elif self._shared is not None and tensor.dtype in (torch.float32, torch.float64):
            self._shared.sum_(tensor.view(-1).numpy())
        else:
            self.ranks.sum_(tensor)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather equally shaped tensors of all ranks, [P, ...]; the host waits."""
        if tensor.device.type == "cpu":
            return torch.from_numpy(self.gather_array(tensor.numpy()))
        everyone = tensor.new_empty(self.size, *tensor.shape)
        own = tensor.contiguous().view(-1)
        self.ranks.complete(lambda: all_gather(everyone.view(-1), own, async_op=True))
        return everyone

    def gather_array(self, array: np.ndarray) -> np.ndarray:
        """Gather equally shaped arrays of all ranks, [P, ...]."""
        return (self._shared or self.ranks).gather(array)


class ShardSpec(NamedTuple):
    """A linear layer and this rank's part of its outputs, or, if rowwise, of its inputs."""

    module: torch.nn.Linear
    is_rowwise: bool
    part: slice


class ShardedForward(ModelForward):
    """This rank's part of a model's forward."""

    model: PreTrainedModel

    def __init__(
        self,
        model: PreTrainedModel,
        tp: TPGroup,
        kernel: str = "sdpa",
        *,
        enforce_eager: bool = False,
        memory: GraphMemory | None = None,
        reduce: Callable = sampling.best_and_sum,
    ):
        """Plan the shards, see `ModelForward`; raise TPUnsupported on all ranks or on none."""
        is_eager = enforce_eager or not tp.can_capture
        super().__init__(model, kernel, enforce_eager=enforce_eager, memory=memory, reduce=reduce)
        self.is_eager |= is_eager
        self.tp, self.rank = tp, tp.rank
        self.specs, self.key_heads = plan_shards(model, tp.rank, tp.size)
        """Key/value heads of this rank in each sharded attention, by layer."""
        self.num_key_heads = [heads.num_keys for heads in layer_heads(model.config)]
        self._is_alone = False
        self._zeros: list[torch.Tensor] = []

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which layers compute this rank's parts, with unchanged parameters."""
        changed: list[torch.nn.Module] = []

        def change(module: torch.nn.Module, forward: Callable) -> None:
            vars(module)["forward"] = forward  # hides that of its class
            changed.append(module)

        try:
            for module, is_rowwise, part in self.specs:
                # A layer with a LoRA adapter has a base layer.
                base = cast(Linear, getattr(module, "base_layer", module))
                side = "lora_A" if is_rowwise else "lora_B"
                for layer in [base, *cast(dict[str, Linear], getattr(module, side, {})).values()]:
                    change(layer, partial(partial_linear, layer, part, is_rowwise))
                if is_rowwise:
                    change(module, partial(self._summed, module.forward, base.bias))
            yield
        finally:
            for patched in changed:
                vars(patched).pop("forward", None)

    def hidden(self, tokens: torch.Tensor, packing: Packing) -> torch.Tensor:
        """See `Forward`."""
        with self.applied():
            return super().hidden(tokens, packing)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's logits [T, v] of hidden states [T, hidden]."""
        head = output_head(self.model)
        part = shard_of(head.num_tokens, self.tp.rank, self.tp.size)
        linear_head = cast(Linear, head.linear)
        return head.finish(partial_linear(linear_head, part, False, hidden))

    def sample(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        num_generated: torch.Tensor,
        params: SamplingParams,
    ) -> Sampled:
        """See `sample_shards`."""
        size = output_head(self.model).num_tokens
        return sample_shards(
            logits, keys, num_generated, params, self.reduce, vocab_size=size, tp=self.tp
        )

    def gather_text(self, text: str) -> list[str]:
        """See `Forward`."""
        return self.tp.gather_text(text)

    @contextlib.contextmanager
    def rehearsal(self, num_tokens: Sequence[int]) -> Iterator[None]:
        """See `Forward`."""
        widths = {spec.module.out_features for spec in self.specs if spec.is_rowwise}
        sizes = {count * width for count in num_tokens for width in widths}
        longest = self.weight().new_zeros(max(sizes))
        self._zeros = [longest[:size] for size in sorted(sizes, reverse=True)]
        with self._alone():
            yield

    def connect(self) -> None:
        """See `Forward`."""
        for zeros in self._zeros:
            self.tp.sum_(zeros)
        self._zeros = []

    def check(self) -> None:
        """Compare shards with the whole model; if they differ, raise TPUnsupported on all ranks."""
        model, name, problem = self.model, type(self.model).__name__, None
        try:  # without sums nobody waits for a rank that fails alone
            with self._alone():
                random_hidden(self)
        except Exception as error:  # the model's own code runs here
            problem = one_line(error)
        problem = first_problem(problem, self.tp.gather_text)
        if problem is not None:
            raise TPUnsupported(f"the forward of {name} in shards fails: {problem}")
        whole = random_hidden(ModelForward(model, self.kernel))
        difference = torch.tensor([relative_difference(random_hidden(self), whole)])
        largest = self.tp.gather(difference.to(model.device)).max().item()
        if not is_rounding(largest, model.dtype):
            raise TPUnsupported(
                f"{name} computed in shards by its base_model_tp_plan differs from the whole "
                f"model by {largest:.1e}"
            )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Context in which this rank's parts are not summed over ranks."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def _summed(
        self, forward: Callable, bias: torch.Tensor | None, x: torch.Tensor
    ) -> torch.Tensor:
        out = forward(x) if self._is_alone else self.tp.sum_(forward(x))
        return out if bias is None else out + bias


def partial_linear(
    layer: torch.nn.Linear, part: slice, is_rowwise: bool, x: torch.Tensor
) -> torch.Tensor:
    """Compute a part of a linear layer's outputs, or, if rowwise, of its sums without the bias.

    x: [..., in], or [..., the part of in]. A layer with other products has a method `partial`."""
    bias = None if is_rowwise or layer.bias is None else layer.bias[part]
    if (own := getattr(layer, "partial", None)) is not None:
        return own(x, part, is_rowwise, bias)
    return linear(x, layer.weight[:, part] if is_rowwise else layer.weight[part], bias)


def shard_of(count: int, rank: int, size: int) -> slice:
    """Return one rank's share of a count; shares differ by at most 1."""
    return slice(count * rank // size, count * (rank + 1) // size)


def shard_heads(num_heads: int, num_key_heads: int, rank: int, size: int) -> tuple[slice, slice]:
    """Return one rank's query heads, and the key/value heads that they read.

    With fewer key/value heads than ranks, ranks share a group's query heads, and all have its
    key/value head. Raises TPUnsupported if some rank would have none."""
    fold = num_heads // num_key_heads
    if num_key_heads >= size:
        key = shard_of(num_key_heads, rank, size)
        return slice(key.start * fold, key.stop * fold), key
    groups = [other * num_key_heads // size for other in range(size)]
    group = groups[rank]
    members = [other for other in range(size) if groups[other] == group]
    if fold < -(-size // num_key_heads):  # of the largest group, so that all ranks agree
        raise TPUnsupported(
            f"{num_heads} query heads and {num_key_heads} key/value heads are too few for "
            f"{size} ranks"
        )
    own, first = shard_of(fold, members.index(rank), len(members)), group * fold
    return slice(first + own.start, first + own.stop), slice(group, group + 1)


def plan_shards(
    model: PreTrainedModel, rank: int, size: int
) -> tuple[list[ShardSpec], dict[int, slice]]:
    """Return this rank's part of each sharded layer, and its key/value heads by attention layer.

    Raises TPUnsupported."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    heads = layer_heads(config) if plan else []
    specs: list[ShardSpec] = []
    key_heads: dict[int, slice] = {}
    for parent_name, parent in model.base_model.named_modules():
        styles = {}
        for child, module in parent.named_children():
            style = plan.get(re.sub(r"\b\d+\b", "*", f"{parent_name}.{child}"))
            is_linear = isinstance(getattr(module, "base_layer", module), torch.nn.Linear)
            if style in ("colwise", "rowwise") and is_linear:
                styles[child] = style
        if set(styles.values()) != {"colwise", "rowwise"}:
            continue
        for child, style in styles.items():
            module, is_rowwise = getattr(parent, child), style == "rowwise"
            width = count = module.in_features if is_rowwise else module.out_features
            own = shard_of(count, rank, size)
            if hasattr(parent, "layer_idx"):  # an attention
                num_heads, num_key_heads, *_ = heads[parent.layer_idx]
                query, key = shard_heads(num_heads, num_key_heads, rank, size)
                is_key = child in KEYS_AND_VALUES
                own, count = (key, num_key_heads) if is_key else (query, num_heads)
                key_heads[parent.layer_idx] = key
            if width % count or width < size:
                raise TPUnsupported(
                    f"{parent_name}.{child} has {width} features, too few for {size} ranks by heads"
                )
            part = slice(own.start * width // count, own.stop * width // count)
            specs.append(ShardSpec(module, is_rowwise, part))
    if not specs:
        raise TPUnsupported(
            f"{name} has no tensor-parallel plan (base_model_tp_plan of its configuration)"
        )
    if not isinstance(model.get_output_embeddings(), torch.nn.Linear):
        raise TPUnsupported(f"{name} has an output head that is not a linear layer")
    return specs, key_heads


def sample_shards(
    logits: torch.Tensor,
    keys,
    num_generated,
    params: SamplingParams,
    reduce: Callable = sampling.best_and_sum,
    *,
    vocab_size,
    tp: TPGroup,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample as `sampling.sample` does, from this rank's logits [T, v].

    Ranks exchange their best token, its perturbed logit, and sums of exponentials, with top_k or
    top_p all logits, and compute from these alone: results are bit-identical however ranks round.
    """
    if 0 < params.top_k < vocab_size or params.top_p < 1.0:
        return sampling.sample(_whole(logits, vocab_size, tp), keys, num_generated, params)
    first = shard_of(vocab_size, tp.rank, tp.size).start
    stops = [t - first for t in params.stop_token_ids if first <= t < first + logits.shape[1]]
    own = replace(params, top_p=1.0, top_k=0, stop_token_ids=tuple(stops))
    ids = torch.arange(first, first + logits.shape[1], dtype=torch.int32, device=logits.device)
    best, index, *rest = sampling.reduce_chunks(logits, keys, num_generated, own, ids, reduce)
    columns = [column.double() for column in (best, index + first, *rest)]
    best, token, chosen, full_sums, sums = tp.gather(torch.stack(columns, dim=-1)).unbind(-1)
    winner = best.argmax(0)[None]
    token, chosen = token.gather(0, winner)[0].long(), chosen.gather(0, winner)[0]
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    full_logprob = (chosen - full_sums.logsumexp(0)).to(dtype)
    if params.temperature == 0.0:
        return token, torch.zeros_like(full_logprob), full_logprob
    return token, (chosen - sums.logsumexp(0)).to(dtype), full_logprob


def _whole(logits: torch.Tensor, vocab_size: int, tp: TPGroup) -> torch.Tensor:
    """Gather the logits of all ranks, [T, V]."""
    widths = [len(range(vocab_size)[shard_of(vocab_size, r, tp.size)]) for r in range(tp.size)]
    shards = tp.gather(pad(sampling.widen(logits), (0, max(widths) - logits.shape[1])))
    return torch.cat([s[:, :width] for s, width in zip(shards, widths, strict=True)], dim=1)
