"""One forward computed by all ranks together, each with a slice of the weights that it holds
anyway.

Every rank has the whole model, so a slice is a view of its parameters: nothing is copied or moved.
The configuration's `base_model_tp_plan` names the linear layers that are cut. A "colwise" layer
computes some of its outputs, attention heads or hidden units of an MLP; the "rowwise" layer behind
it takes these as its inputs, and the sum over ranks of what it gives is the layer's output
(Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053, section 3). Whatever else there is, every rank
computes whole. The output head gives the logits of a slice of the vocabulary, from which the ranks
sample together (`sample_slices`).

Shape legend: N packed tokens, T positions sampled, V vocabulary, v of it on this rank, P ranks.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from bubblespec.engine import sampling
from bubblespec.engine.noise import gumbel
from bubblespec.engine.sampling import SamplingParams, restrict

KEYS_AND_VALUES = (
    "k_proj",
    "v_proj",
)  # cut by key/value heads; all other layers of an attention by query heads


class CannotCut(ValueError):
    """This model cannot be computed by so many ranks together; the message says why."""


class Joint(Protocol):
    """What a forward needs of the ranks. All of them call the same in the same order."""

    rank: int
    size: int
    can_capture: bool
    """Whether sums may be part of a CUDA graph."""

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Equally shaped tensors of all ranks: [P, ...]."""


class Heads(NamedTuple):
    """This rank's share of an attention layer: query heads and the key/value heads that they look
    at."""

    query: slice
    key: slice


class Cut(NamedTuple):
    """A linear layer of which this rank computes a part."""

    module: torch.nn.Module
    is_rowwise: bool
    part: slice
    """Of its outputs; of its inputs where it is rowwise."""


def share_of(count: int, rank: int, size: int) -> slice:
    """Of `count` things in a row those of one rank; the numbers of any two ranks differ by at most
    1."""
    return slice(count * rank // size, count * (rank + 1) // size)


def share_heads(num_heads: int, num_key_heads: int, rank: int, size: int) -> Heads:
    """Whole groups of the query heads that look at one key/value head, where there are as many as
    ranks. Else several ranks share a group: each has some of its query heads, and all have its
    key/value head. Raises CannotCut if some rank would have none."""
    fold = num_heads // num_key_heads
    if num_key_heads >= size:
        key = share_of(num_key_heads, rank, size)
        return Heads(slice(key.start * fold, key.stop * fold), key)
    of_rank = [other * num_key_heads // size for other in range(size)]
    group = of_rank[rank]
    members = [other for other, its_group in enumerate(of_rank) if its_group == group]
    if fold < -(-size // num_key_heads):  # of the group with most ranks: all ranks say the same
        raise CannotCut(
            f"{num_heads} query heads and {num_key_heads} key/value heads are too few for {size} ranks"
        )
    query = share_of(fold, members.index(rank), len(members))
    return Heads(
        slice(group * fold + query.start, group * fold + query.stop), slice(group, group + 1)
    )


def plan_cuts(model: PreTrainedModel, rank: int, size: int) -> list[Cut]:
    """This rank's part of every layer that is cut. Raises CannotCut."""
    config = model.config.get_text_config(decoder=True)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    num_heads = getattr(config, "num_attention_heads", 0)
    num_key_heads = getattr(config, "num_key_value_heads", None) or num_heads
    cuts: list[Cut] = []
    for parent_name, parent in model.base_model.named_modules():
        styles = {}
        for name, module in parent.named_children():
            style = plan.get(re.sub(r"\b\d+\b", "*", f"{parent_name}.{name}"))
            if style in ("colwise", "rowwise") and _is_linear(module):
                styles[name] = style
        if sorted(set(styles.values())) != ["colwise", "rowwise"]:
            continue
        heads = (
            share_heads(num_heads, num_key_heads, rank, size)
            if hasattr(parent, "layer_idx")
            else None
        )
        for name, style in styles.items():
            module, is_rowwise = getattr(parent, name), style == "rowwise"
            width = module.in_features if is_rowwise else module.out_features
            count, own = width, None if heads is None else heads.query
            if heads is not None:
                count = num_key_heads if name in KEYS_AND_VALUES else num_heads
                own = heads.key if name in KEYS_AND_VALUES else heads.query
            if width % count or width < size:
                raise CannotCut(
                    f"{parent_name}.{name} has {width} features, which {size} ranks cannot share by heads"
                )
            own = share_of(count, rank, size) if own is None else own
            cuts.append(
                Cut(
                    module, is_rowwise, slice(own.start * width // count, own.stop * width // count)
                )
            )
    if not cuts:
        raise CannotCut(
            f"{type(model).__name__} has no plan of layers to cut (base_model_tp_plan of its configuration)"
        )
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise CannotCut(f"{type(model).__name__} has an output head that is not a linear layer")
    return cuts


def _is_linear(module: torch.nn.Module) -> bool:
    """A linear layer, or one with a LoRA adapter."""
    return isinstance(module, torch.nn.Linear) or isinstance(
        getattr(module, "base_layer", None), torch.nn.Linear
    )


@contextlib.contextmanager
def cut(cuts: list[Cut], joint: Joint) -> Iterator[None]:
    """Within it the model's layers compute this rank's parts. Their parameters stay as they are."""
    changed: list[torch.nn.Module] = []

    def change(module: torch.nn.Module, forward: Callable) -> None:
        module.forward = forward  # hides that of its class
        changed.append(module)

    try:
        for module, is_rowwise, part in cuts:
            if not is_rowwise:
                for layer in (
                    [module]
                    if isinstance(module, torch.nn.Linear)
                    else [module.base_layer, *module.lora_B.values()]
                ):
                    change(layer, partial(_some_outputs, layer, part))
            elif isinstance(module, torch.nn.Linear):
                change(
                    module,
                    partial(_summed, partial(_some_inputs, module, part), module.bias, joint),
                )
            else:
                for layer in (module.base_layer, *module.lora_A.values()):
                    change(layer, partial(_some_inputs, layer, part))
                change(module, partial(_summed, module.forward, module.base_layer.bias, joint))
        yield
    finally:
        for module in changed:
            del module.forward


def _some_outputs(layer: torch.nn.Linear, part: slice, x: torch.Tensor) -> torch.Tensor:
    return linear(x, layer.weight[part], None if layer.bias is None else layer.bias[part])


def _some_inputs(layer: torch.nn.Linear, part: slice, x: torch.Tensor) -> torch.Tensor:
    """Without the bias: it is added once, to the sum over ranks."""
    return linear(x, layer.weight[:, part])


def _summed(
    forward: Callable, bias: torch.Tensor | None, joint: Joint, x: torch.Tensor
) -> torch.Tensor:
    out = joint.sum_(forward(x))
    return out if bias is None else out + bias


def head_slice(head: torch.nn.Linear, joint: Joint, hidden: torch.Tensor) -> torch.Tensor:
    """This rank's logits [T, v] of hidden states [T, hidden]."""
    return _some_outputs(head, share_of(head.out_features, joint.rank, joint.size), hidden)


def sample_slices(
    logits: torch.Tensor,
    keys: torch.Tensor,
    num_generated: torch.Tensor,
    params: SamplingParams,
    *,
    vocab_size: int,
    joint: Joint,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`sampling.sample` from slices of the vocabulary: logits are this rank's, [T, v]. Returns the
    same, equal to the bit on all ranks, however they round: it is worked out from what they have
    exchanged.

    Of a position each rank tells its best token, the largest perturbed logit, and sums of
    exponentials. Truncation to the best tokens needs all logits, which are then exchanged.
    """
    if 0 < params.top_k < vocab_size or params.top_p < 1.0:
        return sampling.sample(_whole(logits, vocab_size, joint), keys, num_generated, params)
    first = share_of(vocab_size, joint.rank, joint.size).start
    own_stops = [
        token - first for token in params.stop_token_ids if first <= token < first + logits.shape[1]
    ]
    own_params = SamplingParams(
        params.temperature, stop_token_ids=tuple(own_stops), min_length=params.min_length
    )
    rows = max(1, sampling.MAX_LOGITS_AT_ONCE[logits.device.type] // logits.shape[1])
    chunks = zip(logits.split(rows), keys.split(rows), num_generated.split(rows), strict=True)
    of_ranks = joint.gather(
        torch.cat([_best_of_slice(*chunk, own_params, first) for chunk in chunks])
    )
    best, token, chosen, full_sums, sums = of_ranks.unbind(-1)
    winner = best.argmax(0)[None]
    dtype = _precision(logits)
    token, chosen = token.gather(0, winner)[0].long(), chosen.gather(0, winner)[0]
    full_logprob = (chosen - full_sums.logsumexp(0)).to(dtype)
    if params.temperature == 0.0:
        return token, torch.zeros_like(full_logprob), full_logprob
    return token, (chosen - sums.logsumexp(0)).to(dtype), full_logprob


def _best_of_slice(logits, keys, num_generated, params: SamplingParams, first: int) -> torch.Tensor:
    """Of each position: the largest perturbed logit of the slice, its token, its logit, and the
    logarithms of the sums of exponentials over the slice, of all logits and of those allowed;
    float64 [T, 5]."""
    logits = logits.to(_precision(logits))
    if params.temperature not in (0.0, 1.0):
        logits = logits / params.temperature
    allowed = perturbed = restrict(logits, num_generated, params)
    if params.temperature:
        ids = torch.arange(first, first + logits.shape[1], dtype=torch.int32, device=logits.device)
        perturbed = gumbel(keys, ids, logits.dtype).add_(allowed)
    best, place = perturbed.max(-1)
    chosen = logits.gather(-1, place[:, None])[:, 0]
    sums = [values.logsumexp(-1) for values in (logits, allowed)]
    return torch.stack([column.double() for column in (best, place + first, chosen, *sums)], dim=-1)


def _precision(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _whole(logits: torch.Tensor, vocab_size: int, joint: Joint) -> torch.Tensor:
    """The logits of all ranks, [T, V]."""
    shares = [share_of(vocab_size, rank, joint.size) for rank in range(joint.size)]
    widest = max(share.stop - share.start for share in shares)
    logits = logits.to(_precision(logits))
    padded = torch.nn.functional.pad(logits, (0, widest - logits.shape[1]))
    return torch.cat(
        [part[:, : s.stop - s.start] for part, s in zip(joint.gather(padded), shares, strict=True)],
        dim=1,
    )
