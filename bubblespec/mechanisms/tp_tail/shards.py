"""Tensor parallelism: one forward computed by all ranks, each with a shard of its weights.

Every rank has the whole model, so nothing is moved: a shard is a `Decoder` whose products take part
of the weights. The first product of attention and MLP computes some of its outputs, heads or hidden
units; the second takes these as its inputs, and its output is the sum over ranks (Megatron-LM,
Shoeybi et al. 2019, arXiv 1909.08053, section 3). Every rank computes everything else in full. The
output head gives the logits of a shard of the vocabulary, from which the ranks sample together
(`sample_shards`).

Shape legend: N packed tokens, T positions sampled, V vocabulary, v of it on this rank, P ranks.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import Linear
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from bubblespec.distributed.ranks import Ranks, all_gather
from bubblespec.distributed.shared_memory import open_collectives
from bubblespec.engine import sampling
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.comparison import CHECKED, cache_for, difference, over_cache, random_tokens
from bubblespec.engine.decoder import Decoder, is_like_llama
from bubblespec.engine.forward import ModelForward, Sampled
from bubblespec.engine.model import last_hidden, output_head
from bubblespec.engine.sampling import Noise
from bubblespec.engine.weights import Kind, Linears, Multiply, by_parts, linear_of, stack
from bubblespec.errors import fallback, first_problem, one_line


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
        self._captured: dist.ProcessGroup | None = None  # of sums in graphs

    def connect(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place, as graphs will sum tensors of this size."""
        if self._captured is None:
            self._captured = group_of_graphs(self.ranks)
        dist.all_reduce(tensor, group=self._captured)

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if tensor.device.type == "cuda":  # without a wait: the next gather finds a missing rank
            is_captured = torch.cuda.is_current_stream_capturing()
            dist.all_reduce(tensor, group=self._captured if is_captured else None)
        elif self._shared is not None and tensor.dtype in (torch.float32, torch.float64):
            self._shared.all_reduce_(tensor.view(-1).numpy())
        else:
            self.ranks.all_reduce_(tensor)
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
        return (self._shared or self.ranks).all_gather(array)


def group_of_graphs(ranks: Ranks) -> dist.ProcessGroup:
    """Create a process group for the sums in CUDA graphs; all ranks call this together.

    The ranks' own group must work after an error in the capture of a sum: with it they agree to do
    without graphs. A communicator of NCCL takes memory on each GPU, between links of NVLink 0.5 to
    1.6 GB by reports of others."""
    # The time-out is twice the ranks', as that of their own group: they name a missing rank before.
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=2 * ranks.timeout_s))
    zeros = torch.zeros(1, device=ranks.device)
    ranks.complete(lambda: dist.all_reduce(zeros, group=group, async_op=True))
    return group


class ShardedForward(ModelForward):
    """This rank's part of the decoder of a model."""

    samples_alone = False

    def __init__(
        self,
        model: PreTrainedModel,
        tp: TPGroup,
        *,
        enforce_eager: bool = False,
        memory: WeakSet | None = None,
    ):
        """Cut the products, see `ModelForward`; raise TPUnsupported on all ranks or on none."""
        name = type(model).__name__
        if not is_like_llama(model):
            raise TPUnsupported(f"{name} is not built like Llama")
        self.policy, self.tp, self.rank = model, tp, tp.rank
        config = model.config.get_text_config(decoder=True)
        self.num_heads, self.num_key_heads = config.num_attention_heads, config.num_key_value_heads
        self.query_heads, self.key_heads = shard_heads(
            self.num_heads, self.num_key_heads, tp.rank, tp.size
        )
        self._is_alone = False
        self._zeros: list[torch.Tensor] = []
        is_eager = enforce_eager or not tp.can_capture
        super().__init__(model, enforce_eager=enforce_eager, memory=memory)
        self.is_eager |= is_eager
        assert self.decoder is not None
        if any(cast(Any, layer.mixer).wide_norms is not None for layer in self.decoder.layers):
            raise TPUnsupported(f"{name} has norms over the heads of all ranks")
        if not isinstance(linear_of(output_head(model).linear), Linear):
            raise TPUnsupported(f"{name} has an output head that is not a linear layer")

    def make_decoder(self) -> Decoder:
        """Return the decoder of this rank's heads and hidden units."""
        heads = [cut.stop - cut.start for cut in (self.query_heads, self.key_heads)]
        return Decoder(self.policy, self._product_of, (heads[0], heads[1]))

    def _product_of(self, kind: Kind, layers: Linears) -> Multiply:
        """Return this rank's part of a product: of its outputs, or of the sum over its inputs."""
        rank, size, bases = self.tp.rank, self.tp.size, [linear_of(layer) for layer in layers]
        width = sum(base.out_features for base in bases)
        if kind in ("out", "down"):
            (layer,), width = layers, bases[0].in_features
            head = width // self.num_heads
            own = scaled(self.query_heads, head) if kind == "out" else shard_of(width, rank, size)
            return lambda x: self._summed(partial_linear(layer, (own,), True, x), bases[0].bias)
        if kind == "gate_up":
            own = shard_of(width // 2, rank, size)
            cuts = [own, scaled(own, 1, width // 2)]
        else:
            head = width // (self.num_heads + 2 * self.num_key_heads)
            behind = head * self.num_heads, head * (self.num_heads + self.num_key_heads)
            cuts = [scaled(self.query_heads, head)]
            cuts += [scaled(self.key_heads, head, begin) for begin in behind]
        if (stacked := stack(self.policy, layers)) is not None:
            return partial(partial_linear, stacked, tuple(cuts), False)
        parts = [locate(layers, cut) for cut in cuts]
        return lambda x: torch.cat([partial_linear(of, (cut,), False, x) for of, cut in parts], -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's logits [T, v] of hidden states [T, hidden]."""
        head = output_head(self.policy)
        part = shard_of(head.num_tokens, self.tp.rank, self.tp.size)
        last = last_hidden(self.policy, hidden)
        return head.finish(partial_linear(head.linear, (part,), False, last))

    def sample(
        self,
        logits: torch.Tensor,
        noise: Noise,
        num_generated: torch.Tensor,
        params: SamplingParams,
    ) -> Sampled:
        size, reduce = output_head(self.policy).num_tokens, self.reduce_with(noise.seed)
        return sample_shards(
            logits, noise.words, num_generated, params, reduce, vocab_size=size, tp=self.tp
        )

    def gather_text(self, text: str) -> list[str]:
        return self.tp.gather_text(text)

    @contextlib.contextmanager
    def rehearsal(self, num_tokens: Sequence[int]) -> Iterator[None]:
        width = self.policy.config.get_text_config(decoder=True).hidden_size
        sizes = sorted({count * width for count in num_tokens}, reverse=True)
        longest = self.weight().new_zeros(sizes[0])
        self._zeros = [longest[:size] for size in sizes]
        with self._alone():
            yield

    def connect(self) -> None:
        for zeros in self._zeros:
            self.tp.connect(zeros)
        self._zeros = []

    def check(self) -> None:
        """Compare shards with the whole model; if they differ, raise TPUnsupported on all ranks."""
        model, problem, forwards = self.policy, None, (self, ModelForward(self.policy))
        got, wanted = (partial(over_cache, f.hidden, cache_for(model, CHECKED)) for f in forwards)
        try:  # without sums nobody waits for a rank that fails alone
            with self._alone():
                got(random_tokens(model, CHECKED))
        except Exception as error:  # the model's own code runs here
            problem = f"fails: {one_line(error)}"
        self._refuse(problem)
        differs = difference(model, CHECKED, got, wanted)
        self._refuse(differs and f"differs from the whole model by {differs}")

    def _refuse(self, problem: str | None) -> None:
        """Raise TPUnsupported on all ranks with the first rank's problem, if any has one."""
        problem = first_problem(problem, self.tp.gather_text)
        if problem is not None:
            raise TPUnsupported(f"{type(self.policy).__name__} computed in shards {problem}")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Context in which this rank's parts are not summed over ranks."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def _summed(self, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = out if self._is_alone else self.tp.all_reduce_(out)
        return out if bias is None else out + bias


def partial_linear(
    layer: torch.nn.Module, parts: tuple[slice, ...], is_rowwise: bool, x: torch.Tensor
) -> torch.Tensor:
    """Compute parts of a linear layer's outputs, or, if rowwise, of its sums without the bias.

    x: [..., in], or [..., the part of in]. A layer with other products has a method `partial`."""
    base = linear_of(layer)
    if (own := getattr(base, "partial", None)) is not None:
        out = own(x, parts, is_rowwise)
    else:
        out = by_parts(linear, x, base, parts, is_rowwise)
    adapted = cast(Any, layer)
    for name in getattr(layer, "active_adapters", ()):  # of LoRA
        down, up = (of[name].weight for of in (adapted.lora_A, adapted.lora_B))
        (part,) = parts
        down, up = (down[:, part], up) if is_rowwise else (down, up[part])
        out = out + adapted.scaling[name] * linear(linear(x, down), up)
    return out


def locate(layers: Linears, cut: slice) -> tuple[torch.nn.Module, slice]:
    """Return the layer that a slice of the outputs of all layers lies in, and the slice of it."""
    begin = 0
    for layer in layers:
        if cut.start < (end := begin + linear_of(layer).out_features):
            break
        begin = end
    return layer, slice(cut.start - begin, cut.stop - begin)


def scaled(cut: slice, width: int, begin: int = 0) -> slice:
    """Return a slice of heads as a slice of features, of `width` each, behind others."""
    return slice(begin + cut.start * width, begin + cut.stop * width)


def shard_of(count: int, rank: int, size: int) -> slice:
    """Return one rank's share of a count; shares differ by at most 1."""
    return slice(count * rank // size, count * (rank + 1) // size)


def shard_heads(num_heads: int, num_key_heads: int, rank: int, size: int) -> tuple[slice, slice]:
    """Return one rank's query heads, and the key/value heads that they read.

    With fewer key/value heads than ranks, ranks share a group's query heads, and all have its
    key/value head. Raises TPUnsupported if some rank would have none."""
    queries_per_kv = num_heads // num_key_heads
    if num_key_heads >= size:
        key = shard_of(num_key_heads, rank, size)
        return slice(key.start * queries_per_kv, key.stop * queries_per_kv), key
    groups = [other * num_key_heads // size for other in range(size)]
    group = groups[rank]
    members = [other for other in range(size) if groups[other] == group]
    if queries_per_kv < -(-size // num_key_heads):  # of the largest group, so that all ranks agree
        raise TPUnsupported(
            f"{num_heads} query heads and {num_key_heads} key/value heads are too few for "
            f"{size} ranks"
        )
    own, first = shard_of(queries_per_kv, members.index(rank), len(members)), group * queries_per_kv
    return slice(first + own.start, first + own.stop), slice(group, group + 1)


def sample_shards(
    logits: torch.Tensor,
    keys,
    num_generated,
    params: SamplingParams,
    reduce: Callable = sampling.best_and_sum,
    *,
    vocab_size,
    tp: TPGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample as `sampling.sample` does, from this rank's logits [T, v].

    Ranks exchange their best token, its perturbed logit, and sums of exponentials, with top_k or
    top_p all logits, and compute from these alone: results are bit-identical however ranks round.
    """
    if 0 < params.top_k < vocab_size or params.top_p < 1.0:
        whole = _whole(logits, vocab_size, tp)
        return sampling.sample(whole, keys, num_generated, params, reduce)
    first = shard_of(vocab_size, tp.rank, tp.size).start
    stops = [t - first for t in params.stop_token_ids if first <= t < first + logits.shape[1]]
    own = replace(params, top_p=1.0, top_k=0, stop_token_ids=tuple(stops))
    best, index, *rest = sampling.reduce_chunks(logits, keys, num_generated, own, reduce, first)
    columns = [column.double() for column in (best, index + first, *rest)]
    best, token, chosen, sums = tp.gather(torch.stack(columns, dim=-1)).unbind(-1)
    winner = best.argmax(0)[None]
    token, chosen = token.gather(0, winner)[0].long(), chosen.gather(0, winner)[0]
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprob = (chosen - sums.logsumexp(0)).to(dtype)
    return token, torch.zeros_like(logprob) if params.temperature == 0.0 else logprob


def _whole(logits: torch.Tensor, vocab_size: int, tp: TPGroup) -> torch.Tensor:
    """Gather the logits of all ranks, [T, V]."""
    widths = [len(range(vocab_size)[shard_of(vocab_size, r, tp.size)]) for r in range(tp.size)]
    shards = tp.gather(pad(sampling.widen(logits), (0, max(widths) - logits.shape[1])))
    return torch.cat([s[:, :width] for s, width in zip(shards, widths, strict=True)], dim=1)
