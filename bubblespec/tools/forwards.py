"""The doctor's checks of one model's forwards.

A check is a generator of lines, which all ranks run together. This file imports nothing beyond
torch, transformers and numpy, as benchmarks/gpu_suite.py runs without the other packages.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.arrays import median_s
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.comparison import CHECKED, cache_for, difference, over_cache, random_tokens
from bubblespec.engine.decoder import is_like_llama
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.graphs import GraphPool
from bubblespec.engine.kv_cache import KVCache, pack_rows
from bubblespec.engine.ops import has_triton, replaced, torch_ops
from bubblespec.errors import one_line
from bubblespec.learn.agreement import gradient_problem
from bubblespec.learn.learner import MAX_LOGITS
from bubblespec.mechanisms.quantized.copy import (
    NO_PRODUCT,
    Copy,
    CopyForward,
    observe_inputs,
    product_for,
)
from bubblespec.mechanisms.tp_tail.shards import ShardedForward, TPGroup, TPUnsupported, no_tp_tail
from bubblespec.memory import max_length

NUM_OBSERVED = 128  # tokens that a copy is compared on
MIN_SAME = 0.3  # of the best tokens of random text, where policies are unsure


class Line(NamedTuple):
    """A finding of a check. verdict: ok, slower or failed."""

    verdict: str
    text: str


ok, slower, failed = (partial(Line, verdict) for verdict in ("ok", "slower", "failed"))


@dataclass
class Case:
    """Subject of the checks; earlier checks fill in what later ones need."""

    config: Config
    ranks: Ranks
    model: Any = None  # of transformers, from the check `model` until the run's own is loaded
    kernel: str = "sdpa"
    slower: list[str] = field(default_factory=list)  # warnings of what is a fallback
    trainer: Any = None  # the run's `Trainer`, from the check `set-up` on


class Check(NamedTuple):
    """A check of a case."""

    make: Callable[[Case], Iterator[Line]]
    avoid: str  # key that errors name if they name none themselves
    needs: str | None = None  # check that must pass first


def attention(case: Case) -> Iterator[Line]:
    """Report what generates, and the kernel of training, which `prepare` has compared with SDPA."""
    for line in case.slower:
        yield slower(line.removeprefix("warning: "))
    layers = "written out" if is_like_llama(case.model) else "transformers' modules"
    forward = ModelForward(case.model)
    if case.ranks.device.type == "cuda" and forward.ops is torch_ops and not replaced:
        what = "triton" if not has_triton() else "bfloat16"
        yield slower(f"generation takes torch's operations, without CUDA graphs: no {what}")
    yield ok(f"layers are {layers}; attention in training is {case.kernel}")


def gradient(case: Case) -> Iterator[Line]:
    """Compare a gradient by the operations of training with one by transformers' modules."""
    rollout = case.config.rollout
    params = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k)
    sizes = max_length(case.config), MAX_LOGITS
    if (problem := gradient_problem(case.model, case.kernel, params, *sizes)) is not None:
        yield failed(f"{problem}; model.attention=sdpa")
        return
    yield ok("gradients are those of transformers' modules")


@torch.inference_mode()
def graphs(case: Case) -> Iterator[Line]:
    """Compare forwards as CUDA graphs with eager forwards."""
    loaded, avoid = case.model, "rollout.enforce_eager=true"
    if case.ranks.device.type == "cpu":
        yield ok("not applicable: a CPU has none")
        return
    forward = ModelForward(loaded, enforce_eager=case.config.rollout.enforce_eager)
    if forward.is_eager:
        yield slower(f"there are none: {avoid}, or no operations for them")
        return
    cache, plain = cache_for(loaded, CHECKED), cache_for(loaded, CHECKED)
    captured = GraphPool(forward, cache, 2 * CHECKED)
    got = partial(over_cache, captured.hidden, cache)
    wanted = partial(over_cache, forward.hidden, plain)
    differs = difference(loaded, CHECKED, got, wanted)
    if captured.problem:
        yield slower(str(captured.problem))
    elif differs:
        yield failed(f"hidden states of graphs and eager forwards differ by {differs}; {avoid}")
    else:
        ms = token_ms(captured.hidden, cache, loaded), token_ms(forward.hidden, plain, loaded)
        yield ok("hidden states of graphs and eager forwards agree")
        yield ok(f"a forward of one token takes {ms[0]:.2f} ms, eager {ms[1]:.2f} ms")


@torch.inference_mode()
def tp_tail(case: Case) -> Iterator[Line]:
    """Compare a forward of all ranks together with a forward of each rank alone."""
    ranks, loaded, avoid = case.ranks, case.model, "rollout.tp_tail_max_rows=0"
    if ranks.world_size == 1 or case.config.rollout.tp_tail_max_rows == 0:
        yield ok(f"not applicable: {'one rank' if ranks.world_size == 1 else avoid}")
        return
    try:
        shards = ShardedForward(loaded, TPGroup(ranks))
        shards.check()
    except TPUnsupported as error:
        yield slower(no_tp_tail(error))
        return
    yield ok("forwards together and alone agree")
    forwards = shards, ModelForward(loaded)
    together, alone = (token_ms(of.hidden, cache_for(loaded, 1), loaded) for of in forwards)
    took = f"{together:.2f} ms on all ranks together, {alone:.2f} ms on each alone"
    yield ok(f"a forward of one token takes {took}")


@torch.inference_mode()
def quantized(case: Case) -> Iterator[Line]:
    """Compare a quantised copy with the policy, and time both."""
    loaded, avoid = case.model, "speculative.method=bubble+suffix"
    if "quantized" not in case.config.speculative.sources:
        yield ok("not applicable: speculative.method has no quantised copy")
        return
    product = product_for(loaded, case.ranks.device.type, case.config.quantized.bits)
    if product is None:
        yield ok(f"not applicable: {NO_PRODUCT}")
        return
    try:
        copy = Copy(loaded, product, observe_inputs(loaded, random_tokens(loaded, NUM_OBSERVED)))
    except Exception as error:  # the model's own code runs here
        yield slower(f"{product.name}: {one_line(error)}")
        return
    best, ms = [], []
    for forward in (CopyForward(copy), ModelForward(loaded)):
        cache = cache_for(loaded, NUM_OBSERVED)
        hidden = over_cache(forward.hidden, cache, random_tokens(loaded, NUM_OBSERVED))
        best.append(forward.logits(hidden[0]).argmax(-1))
        ms.append(token_ms(forward.hidden, cache, loaded))
    same = float((best[0] == best[1]).float().mean())
    text = f"{product.name}: {same:.0%} of {NUM_OBSERVED} best tokens are the policy's; a forward"
    text += f" of one token takes {ms[0]:.2f} ms, the policy's {ms[1]:.2f} ms"
    yield ok(text) if same >= MIN_SAME else failed(f"{text}; {avoid}")


def seconds_together(action: Callable[[], object], ranks: Ranks) -> float:
    """Return the seconds of the slowest rank, from one barrier to the next."""
    ranks.barrier()
    began_s = time.perf_counter()
    action()
    ranks.barrier()
    return time.perf_counter() - began_s


def token_ms(hidden: Callable, cache: KVCache, model: PreTrainedModel) -> float:
    """Return the median milliseconds of a forward of one token."""
    tokens, one = random_tokens(model, 1), np.ones(1, np.int64)
    packing = pack_rows(cache, 0 * one, one, model.device)
    return 1e3 * median_s(partial(hidden, tokens, packing), model.device)
