"""Forwards whose logits of a row do not depend on other rows, in any type, to the last bit.

`model.batch_invariant`, for models like Llama: libraries choose a product's kernel, and with it the
order of its sums, by the number of rows. So products have a fixed number of rows on a CPU. On a GPU
cuBLAS has no workspace to split sums in, and products have the few sizes of CUDA graphs, eager ones
too, from 64 rows on. Each query is attended by itself on a CPU, and on a GPU in tiles of one size,
over splits of a fixed number of keys, in all forwards. `first_difference` compares rows among
different other rows in forwards of all sizes that a run has.

Shape legend: N packed tokens, R rows, K texts, L positions of a text or attended, C hidden size, H
query heads, D head dimension.
"""

import os
from bisect import bisect_left
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import is_inference_mode_enabled
from torch.nn.functional import linear, pad, scaled_dot_product_attention
from transformers import PreTrainedModel

from bubblespec.engine import ops
from bubblespec.engine.arrays import to_device
from bubblespec.engine.comparison import feed
from bubblespec.engine.decoder import Decoder, is_like_llama, stacked
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.graphs import GraphPool, graph_sizes
from bubblespec.engine.kv_cache import PAGE, SPLIT, CachePacking, KVCache, LayerCache, pack_rows
from bubblespec.engine.ops import SAMPLE, has_kernels, torch_ops
from bubblespec.engine.ops.softmax import AttentionOptions
from bubblespec.engine.pages import Pages
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import best_and_sum, widen
from bubblespec.engine.weights import linear_modules
from bubblespec.errors import InputError
from bubblespec.mechanisms import Run
from bubblespec.memory import max_length

CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
MIN_ROWS = 64  # of a product on a GPU
ROWS = 16  # of every product on a CPU
NUM_PARTS, PART = 8, 1 << 15  # numbers for which torch starts a thread of a CPU
WIDTH = 64  # positions attended are a multiple of it
AT_ONCE = 64  # queries whose keys are gathered together
NUM_TEXTS, NUM_ROWS = 3, 32  # that are compared; more rows where the largest forward needs them
LONG = SPLIT + WIDTH  # tokens of the longest row on a GPU: attention adds up two splits
WIDTHS = (0, 1, 1, 1, 4, 9, 60)  # tokens that rows feed at once


class InvariantLinear(torch.nn.Linear):
    """A linear layer that generates by products of few numbers of rows."""

    sizes: list[int]  # rows of a product, ascending

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_inference_mode_enabled():
            return linear(x, self.weight, self.bias)
        outs = [self._product(rows) for rows in x.reshape(-1, x.shape[-1]).split(self.sizes[-1])]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.view(*x.shape[:-1], -1)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        count = len(rows)
        lacking = self.sizes[bisect_left(self.sizes, count)] - count
        rows = pad(rows, (0, 0, 0, lacking)) if lacking else rows
        return linear(rows, self.weight, self.bias)[:count]


def load(run: Run) -> None:
    """Set what cuBLAS reads once, before its first product, and choose kernels."""
    if not run.config.model.batch_invariant:
        return
    os.environ.update(CUBLAS)
    run.make_forward = InvariantForward
    if run.config.model.attention == "auto" and run.ranks.device.type == "cuda":
        run.attention = "varlen"  # whose backward can be deterministic


def make_invariant(model: PreTrainedModel, max_num_batched_tokens: int) -> None:
    """Make linear layers invariant, output head included; parameters stay."""
    is_gpu = model.device.type in ops.DEVICES
    sizes = graph_sizes(max_num_batched_tokens, MIN_ROWS) if is_gpu else [ROWS]
    for module in linear_modules(model):
        if type(module) in (torch.nn.Linear, InvariantLinear):
            module.__class__ = InvariantLinear
            vars(module)["sizes"] = sizes


def fixed_best_and_sum(
    logits: torch.Tensor,
    keys: torch.Tensor,
    first: int = 0,
    is_greedy: bool = False,
    seed: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `sampling.best_and_sum` with a softmax's sum, which adds up each row by itself."""
    logits = widen(logits)
    best, index, _ = best_and_sum(logits, keys, first, is_greedy, seed)
    logprob = logits.log_softmax(-1).gather(-1, index[:, None])
    return best, index, (logits.gather(-1, index[:, None]) - logprob)[:, 0]


class InvariantForward(ModelForward):
    """The forward of an invariant model. Training and a drafter need not be invariant."""

    is_invariant = True

    def __init__(self, model: torch.nn.Module, enforce_eager: bool = False):
        super().__init__(model, enforce_eager=enforce_eager)
        self.min_tokens = MIN_ROWS
        if not has_kernels(*self.type, SAMPLE):
            self.reduce = fixed_best_and_sum

    def make_decoder(self) -> Decoder:
        """Return the written-out layers; on a CPU each query is attended by itself.

        Raises InputError for other models."""
        model = cast(PreTrainedModel, self.model)
        if not is_like_llama(model):
            raise InputError(
                f"model.batch_invariant: true needs a model that is built like Llama, which "
                f"{type(model).__name__} is not; set false"
            )
        return Decoder(
            model, stacked(model), attend=attend_alone if self.ops is torch_ops else None
        )


def attend_alone(
    query: torch.Tensor,
    packing: CachePacking,
    cache: LayerCache,
    options: AttentionOptions,
) -> torch.Tensor:
    """Compute the attention of query [N, H, D] over keys up to the next multiple of WIDTH."""
    slots, positions = packing.index
    cached_key, cached_value = cache.keys, cache.values
    heads, out = cached_key.shape[2], torch.empty_like(query)
    for block in np.unique(positions // WIDTH):
        members = np.flatnonzero(positions // WIDTH == block)
        length = min((block + 1) * WIDTH, cached_key.shape[1])
        for begin in range(0, len(members), AT_ONCE):
            index = members[begin : begin + AT_ONCE]
            own, slot = (to_device(array, query.device) for array in (index, slots[index]))
            position = to_device(positions[index], query.device)[:, None]
            distance = position - torch.arange(length, device=query.device)
            is_seen = (distance >= 0) & (distance < (options.window or length))
            mask = torch.zeros_like(distance, dtype=query.dtype)
            mask = mask.masked_fill_(~is_seen, float("-inf"))[:, None, None]
            q = query[own].unflatten(1, (heads, -1))
            k, v = (t[:, :length][slot].transpose(1, 2) for t in (cached_key, cached_value))
            mask = mask.expand(-1, 1, q.shape[2], -1)
            found = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scaling)
            out[own] = found.flatten(1, 2)
    return out


@torch.inference_mode()
def first_difference(runner: ModelRunner, vocab_size: int) -> str | None:
    """Describe where hidden states or logits depend on other rows; None if nowhere.

    A few texts are fed alone, and then as the texts of all slots: for each of `compared_sizes` a
    forward of so many tokens, in a graph and eager, of rows that decode, verify and prefill, long
    and short. All its tokens are compared. The rows together must have room for the largest
    forward. vocab_size: tokens to feed."""
    forward, cache, most = runner.forward, runner.cache, runner.max_num_batched_tokens
    ways = {"eager": forward.hidden}
    if runner.graphs is not None:
        ways = {"in a graph": GraphPool(forward, cache, most).hidden, **ways}
    random = np.random.default_rng(0)
    lengths = row_lengths(runner.num_slots, runner.max_length)
    texts = random.integers(0, vocab_size, (NUM_TEXTS, runner.max_length))
    ids = to_device(texts, runner.device)
    alone = _alone(next(iter(ways.values())), cache, ids)
    of_row, start = np.arange(len(lengths)) % NUM_TEXTS, np.zeros_like(lengths)
    for size in compared_sizes(most, alone.shape[-1], runner.device):
        for way, hidden in ways.items():
            start[start == lengths] = 0
            if (lengths - start).sum() < size:
                start[:] = 0
            count = _counts(random, lengths - start, size)
            packing = pack_rows(cache, start.copy(), count, runner.device)
            slot, position = packing.index
            where = to_device(np.array((of_row[slot], position)), runner.device)
            found = hidden(ids[tuple(where)], packing)[:size].clone()
            difference = _difference(found, alone[tuple(where)], f"hidden states, {way}")
            difference = difference or _logits_difference(forward.logits, found)
            if difference is not None:
                return f"in a forward of {size} tokens {difference}"
            start += count
    return None


def compared_sizes(max_num_batched_tokens: int, width: int, device: torch.device) -> list[int]:
    """Return the tokens of forwards to compare, ascending; width: C.

    On a GPU products have these numbers of rows and no others (`InvariantLinear`, CUDA graphs),
    libraries choose a kernel by a product's shape, and the other kernels compute each token by
    itself. On a CPU all products have ROWS rows, and torch divides other large operations among
    threads. So three sizes are compared there: one row, more than a product's rows, and enough to
    be divided. Larger forwards repeat these."""
    if device.type in ops.DEVICES:
        return graph_sizes(max_num_batched_tokens, MIN_ROWS)
    sizes = 1, ROWS + 1, max(NUM_PARTS * PART // width, ROWS + 1)
    return sorted({min(size, max_num_batched_tokens) for size in sizes})


def row_lengths(num_rows: int, longest: int) -> np.ndarray:
    """Return the tokens of the rows that are compared: the first is long, others have one page."""
    lengths = np.full(num_rows, min(PAGE, longest))
    lengths[0] = longest
    return lengths


def _alone(hidden: Callable, cache: KVCache, ids: torch.Tensor) -> torch.Tensor:
    """Return the hidden states [K, L, C] of texts [K, L], each fed alone in short pieces."""
    pieces = [[len(part)] for part in ids[0].split(MIN_ROWS)]
    fed = (feed(hidden, cache, text[None], pieces) for text in ids)
    return torch.stack([torch.cat([states for _, states in text]) for text in fed])


def _counts(random: np.random.Generator, room: np.ndarray, size: int) -> np.ndarray:
    """Draw how many tokens of each row to feed, `size` in all, within room int64 [R]."""
    count = _first(np.minimum(random.choice(WIDTHS, len(room)), room), size)
    return count + _first(room - count, size - count.sum())


def _first(count: np.ndarray, total: int) -> np.ndarray:
    """Return how many of the first `total` of count [R] things each row has."""
    return np.diff(np.minimum(count.cumsum(), total), prepend=0)


def _logits_difference(logits: Callable, hidden: torch.Tensor) -> str | None:
    """Describe where logits of hidden states [N, C] depend on how many there are.

    The logits of a few at once are compared with those of all, which a run has room for."""
    whole = logits(hidden)
    for few, wanted in zip(whole.split(MIN_ROWS), hidden.split(MIN_ROWS), strict=True):
        if difference := _difference(few, logits(wanted), "logits"):
            return difference
    return None


def _difference(found: torch.Tensor, wanted: torch.Tensor, what: str) -> str | None:
    if torch.equal(found, wanted):
        return None
    share = (found != wanted).double().mean().item()
    size = ((found - wanted).abs().max() / wanted.abs().max()).item()
    return f"{share:.0%} of {what} differ from those of fewer, by up to {size:.0e} of their size"


def prepare(run: Run) -> None:
    """Make the policy batch-invariant, and compare; raise InputError with the differences.

    Keys and values take about as much as a run's largest forward writes, and weights are read some
    dozens of times: seconds."""
    config, model = run.config, run.model
    if not config.model.batch_invariant:
        return
    most = max(config.rollout.max_num_batched_tokens, MIN_ROWS)
    make_invariant(model, most)
    forward = InvariantForward(model, enforce_eager=config.rollout.enforce_eager)
    is_paged = forward.ops is not torch_ops
    longest = min(LONG if is_paged else 2 * WIDTH, max_length(config))
    num_rows = max(NUM_ROWS, -(-most // min(PAGE, longest)))
    num_pages = int((-(-row_lengths(num_rows, longest) // PAGE)).sum())
    runner = ModelRunner(
        model,
        num_rows,
        longest,
        config.run.seed,
        forward=forward,
        max_num_batched_tokens=most,
        pages=Pages.for_rows(num_rows, longest, PAGE, num_pages) if is_paged else None,
    )
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    difference = first_difference(runner, vocab_size)
    runner.release()
    if difference is not None:
        raise InputError(f"model.batch_invariant: {difference}")
