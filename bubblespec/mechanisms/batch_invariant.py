"""Forwards whose logits of a row do not depend on other rows, in any type, to the last bit.

`model.batch_invariant`, for models like Llama: libraries choose a product's kernel, and with it the
order of its sums, by the number of rows. So products have a fixed number of rows on a CPU, and at
least 64 on a GPU, where cuBLAS has no workspace to split sums in; and each query is attended by
itself on a CPU, and over splits of a fixed number of keys on a GPU. `first_difference` compares one
row among different other rows.

Shape legend: N packed tokens, R rows, P positions compared, V vocabulary, L attended positions, H
query heads, K key/value heads, G = H / K, D head dimension.
"""

import os
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import is_inference_mode_enabled
from torch.nn.functional import linear, pad, scaled_dot_product_attention
from transformers import PreTrainedModel

from bubblespec.engine.arrays import to_device
from bubblespec.engine.comparison import feed
from bubblespec.engine.decoder import Decoder, is_like_llama, stacked
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.graphs import ForwardGraphs
from bubblespec.engine.kv_cache import CachePacking, LayerCache
from bubblespec.engine.ops import SAMPLE, has_kernels, torch_ops
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import best_and_sum, widen
from bubblespec.engine.weights import linear_modules
from bubblespec.errors import InputError
from bubblespec.mechanisms import Run

CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
MIN_ROWS = 64  # of a product on a GPU
ROWS = 16  # of every product on a CPU
WIDTH = 64  # positions attended are a multiple of it
AT_ONCE = 64  # queries whose keys are gathered together
NUM_OTHERS = (0, 2, 63, 256)  # rows that are fed with the one that is compared
LENGTH, COMPARED = 44, 8  # tokens of that row, and of these the last
NUM_SLOTS, SLOT_LENGTH = 257, 384  # for graphs of as many tokens


class InvariantLinear(torch.nn.Linear):
    """A linear layer that generates by products of a fixed number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_inference_mode_enabled():
            return linear(x, self.weight, self.bias)
        rows = x.reshape(-1, x.shape[-1])
        is_cpu, count = x.device.type == "cpu", len(rows)
        rows = pad(rows, (0, 0, 0, -count % ROWS if is_cpu else max(MIN_ROWS - count, 0)))
        parts = rows.split(ROWS) if is_cpu else (rows,)
        outs = [linear(part, self.weight, self.bias) for part in parts]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out[:count].view(*x.shape[:-1], -1)


def load(run: Run) -> None:
    """Set what cuBLAS reads once, before its first product, and choose kernels."""
    if not run.config.model.batch_invariant:
        return
    os.environ.update(CUBLAS)
    run.make_forward = InvariantForward
    if run.config.model.attention == "auto" and run.ranks.device.type == "cuda":
        run.attention = "varlen"  # whose backward can be deterministic


def make_invariant(model: torch.nn.Module) -> None:
    """Make linear layers invariant, output head included; parameters stay."""
    for module in linear_modules(model):
        if type(module) is torch.nn.Linear:
            module.__class__ = InvariantLinear


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
    scaling: float,
    window: int | None = None,
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
            is_seen = (distance >= 0) & (distance < (window or length))
            mask = torch.zeros_like(distance, dtype=query.dtype)
            mask = mask.masked_fill_(~is_seen, float("-inf"))[:, None, None]
            q = query[own].unflatten(1, (heads, -1))
            k, v = (t[:, :length][slot].transpose(1, 2) for t in (cached_key, cached_value))
            mask = mask.expand(-1, 1, q.shape[2], -1)
            found = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
            out[own] = found.flatten(1, 2)
    return out


@torch.inference_mode()
def first_difference(runner: ModelRunner, vocab_size: int) -> str | None:
    """Describe where logits of a row depend on other rows; None if nowhere.

    runner: of NUM_SLOTS slots of SLOT_LENGTH positions; vocab_size: tokens to feed."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, vocab_size, (1 + max(NUM_OTHERS), LENGTH))
    wanted, graphs = None, None
    if runner.graphs is not None:
        graphs = ForwardGraphs(runner.forward, runner.cache, runner.max_num_batched_tokens)
    hidden = (graphs or runner.forward).hidden
    for others in NUM_OTHERS:
        fed = {"prefill": [], "decoding": [1] * COMPARED, "verification": [3, 5]}
        for how, widths in fed.items():
            got = _logits(runner, tokens[: 1 + others], widths, hidden)
            wanted = got if wanted is None else wanted
            if not torch.equal(got, wanted):
                share = (got != wanted).double().mean().item()
                size = ((got - wanted).abs().max() / wanted.abs().max()).item()
                return (
                    f"{share:.0%} of a row's logits in {how} among {others} others differ from "
                    f"those in prefill alone, by up to {size:.0e} of their size"
                )
    return None


def _logits(
    runner: ModelRunner, tokens: np.ndarray, widths: list[int], hidden: Callable
) -> torch.Tensor:
    """Compute the first row's last logits, [COMPARED, V], fed in the middle of other rows.

    tokens: [R, LENGTH]; widths: of the forwards after the first; hidden: of a forward."""
    own, widths = len(tokens) // 2, [LENGTH - sum(widths), *widths]
    counts = np.minimum(1 + np.arange(len(tokens)) % 4, np.array(widths)[:, None])  # of others
    counts[:, own] = widths
    logits = []
    ids = to_device(np.roll(tokens, own, axis=0), runner.device)
    for packing, states in feed(hidden, runner.cache, ids, counts):
        is_own = packing.index[0] == own
        sampled = is_own.copy()
        sampled[packing.count.cumsum() - 1] = True
        found = runner.forward.logits(states[to_device(sampled, runner.device)])
        logits.append(found[to_device(is_own[sampled], runner.device)])
    return torch.cat(logits)[-COMPARED:]


def prepare(run: Run) -> None:
    """Make the policy batch-invariant, and compare; raise InputError with the differences."""
    config, model = run.config, run.model
    if not config.model.batch_invariant:
        return
    make_invariant(model)
    forward = InvariantForward(model, enforce_eager=config.rollout.enforce_eager)
    sizes, seed = (NUM_SLOTS, SLOT_LENGTH), config.run.seed
    runner = ModelRunner(model, *sizes, seed, forward=forward, max_num_batched_tokens=SLOT_LENGTH)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    difference = first_difference(runner, vocab_size)
    runner.release()
    if difference is not None:
        raise InputError(f"model.batch_invariant: {difference}")
