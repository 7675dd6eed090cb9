"""Checks of one model's forwards, for the doctor and benchmarks/gpu_suite.py.

A check is a generator of lines, which all ranks run together. This file imports nothing beyond
torch, transformers and numpy, as GPU machines may lack the other packages.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.decoder import is_like_llama
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.graphs import ForwardGraphs
from bubblespec.engine.model_checks import (
    cache_for,
    is_rounding,
    random_hidden,
    random_tokens,
    relative_difference,
)
from bubblespec.engine.ops import has_triton, torch_ops
from bubblespec.engine.packing import pack_rows
from bubblespec.errors import one_line
from bubblespec.mechanisms.quantized.copy import Copy, observe_inputs
from bubblespec.mechanisms.quantized.products import NO_PRODUCT, product_for
from bubblespec.mechanisms.quantized.runner import CopyForward
from bubblespec.mechanisms.tp_tail.shards import (
    ShardedForward,
    TPGroup,
    TPUnsupported,
    no_tp_tail,
)

if TYPE_CHECKING:
    from bubblespec.rollout.sampler import Sampler
    from bubblespec.trainer import Trainer

WARM_UP, NUM_TIMED = 3, 20
NUM_CHECKED, NUM_OBSERVED = 12, 128  # tokens of rows
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
    model: PreTrainedModel | None = None
    """Loaded by the check `model`; None again once the run's own model is loaded."""
    kernel: str = "sdpa"
    slower: str | None = None
    """Warning if the kernel is a fallback."""
    trainer: "Trainer | None" = None

    @property
    def loaded(self) -> PreTrainedModel:
        """The model, once the check `model` has passed."""
        assert self.model is not None
        return self.model

    @property
    def sampler(self) -> "Sampler":
        """The run's sampler, once the check `set-up` has passed."""
        assert self.trainer is not None
        return self.trainer.sampler


class Check(NamedTuple):
    """A check of a case."""

    make: Callable[[Case], Iterator[Line]]
    avoid: str
    """Key that errors name if they name none themselves."""
    needs: str | None = None
    """Check that must pass first."""


def attention(case: Case) -> Iterator[Line]:
    """Report what generates, and the kernel of training, which `prepare` has compared with SDPA."""
    if case.slower is not None:
        yield slower(case.slower)
    layers = "written out" if is_like_llama(case.loaded) else "transformers' modules"
    forward = ModelForward(case.loaded)
    if case.ranks.device.type == "cuda" and forward.ops is torch_ops:
        what = "triton" if not has_triton() else "bfloat16"
        yield slower(f"generation takes torch's operations, without CUDA graphs: no {what}")
    yield ok(f"layers are {layers}; attention in training is {case.kernel}")


@torch.inference_mode()
def graphs(case: Case) -> Iterator[Line]:
    """Compare forwards as CUDA graphs with eager forwards."""
    loaded, device = case.loaded, case.loaded.device
    if case.ranks.device.type == "cpu":
        yield ok("not applicable: a CPU has none")
        return
    forward = ModelForward(loaded, enforce_eager=case.config.rollout.enforce_eager)
    if forward.is_eager:
        yield slower("there are none: rollout.enforce_eager=true, or no operations for them")
        return
    cache, tokens, one = cache_for(forward, 2), random_tokens(loaded, 1), np.ones(1, np.int64)
    captured = ForwardGraphs(forward, cache, NUM_CHECKED * 2)
    replayed = random_hidden(forward, cache, NUM_CHECKED, partial(run_captured, captured))
    if captured.problem:
        yield slower(str(captured.problem))
        return
    eager = random_hidden(forward, cache_for(forward, 2), NUM_CHECKED)
    yield close(replayed, eager, "graphs and eager forwards", "rollout.enforce_eager=true")
    packing = pack_rows(cache, 0 * one, one, device)
    runs = captured.forward, forward.hidden
    graph_ms, eager_ms = (1e3 * median_s(partial(run, tokens, packing), device) for run in runs)
    yield ok(f"a forward of one token takes {graph_ms:.2f} ms, eager {eager_ms:.2f} ms")


def run_captured(captured: ForwardGraphs, tokens: torch.Tensor, packing) -> torch.Tensor:
    """Return hidden states of a graph, or of the forward where there is none."""
    hidden = captured.forward(tokens, packing)
    return captured.of.hidden(tokens, packing) if hidden is None else hidden


@torch.inference_mode()
def tp_tail(case: Case) -> Iterator[Line]:
    """Compare a forward of all ranks together with a forward of each rank alone."""
    ranks, loaded, device = case.ranks, case.loaded, case.ranks.device
    avoid = "rollout.tp_tail_max_rows=0"
    if ranks.world_size == 1 or case.config.rollout.tp_tail_max_rows == 0:
        yield ok(f"not applicable: {'one rank' if ranks.world_size == 1 else avoid}")
        return
    try:
        shards = ShardedForward(loaded, TPGroup(ranks))
        shards.check()
    except TPUnsupported as error:
        yield slower(no_tp_tail(error))
        return
    alone, tokens, one = ModelForward(loaded), random_tokens(loaded, 1), np.ones(1, np.int64)
    seconds = []
    for forward in (shards, alone):
        packing = pack_rows(cache_for(forward), 0 * one, one, device)
        seconds.append(median_s(partial(forward.hidden, tokens, packing), device))
    yield ok("forwards together and alone agree")
    took = f"{1e3 * seconds[0]:.2f} ms on all ranks together, {1e3 * seconds[1]:.2f} ms on each"
    yield ok(f"a forward of one token takes {took} alone")


@torch.inference_mode()
def quantized(case: Case) -> Iterator[Line]:
    """Compare a quantised copy with the policy, and time both."""
    loaded, device = case.loaded, case.ranks.device
    avoid = "speculative.method=bubble+suffix"
    if "quantized" not in case.config.speculative.sources:
        yield ok("not applicable: speculative.method has no quantised copy")
        return
    product = product_for(loaded, device.type, case.config.quantized.bits)
    if product is None:
        yield ok(f"not applicable: {NO_PRODUCT}")
        return
    try:
        copy = Copy(loaded, product, observe_inputs(loaded, random_tokens(loaded, NUM_OBSERVED)))
    except Exception as error:  # the model's own code runs here
        yield slower(f"{product.name}: {one_line(error)}")
        return
    best, seconds, one = [], [], np.ones(1, np.int64)
    for forward in (CopyForward(copy), ModelForward(loaded)):
        hidden = random_hidden(forward, cache_for(forward), NUM_OBSERVED)
        best.append(forward.logits(hidden).argmax(-1))
        packing = pack_rows(cache_for(forward), 0 * one, one, device)
        seconds.append(median_s(partial(forward.hidden, random_tokens(loaded, 1), packing), device))
    same = float((best[0] == best[1]).float().mean())
    took = f"{1e3 * seconds[0]:.2f} ms, the policy's {1e3 * seconds[1]:.2f} ms"
    text = f"{product.name}: {same:.0%} of {NUM_OBSERVED} best tokens are the policy's; a forward"
    text += f" of one token takes {took}"
    yield ok(text) if same >= MIN_SAME else failed(f"{text}; {avoid}")


def close(got: torch.Tensor, wanted: torch.Tensor, what: str, avoid: str) -> Line:
    """Compare hidden states with the tolerance of `prepare_model`; avoid: key to name."""
    difference = relative_difference(got, wanted)
    line = f"hidden states of {what} differ by {difference:.1e} of their size"
    return ok(line) if is_rounding(difference, wanted.dtype) else failed(f"{line}; {avoid}")


def median_s(action: Callable[[], object], device: torch.device) -> float:
    """Return the median wall seconds of a call, until the device is done."""
    seconds = []
    for _ in range(WARM_UP + NUM_TIMED):
        began_s = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds[WARM_UP:])


FORWARD_CHECKS: dict[str, Check] = {
    "attention": Check(attention, "model.attention=sdpa", "model"),
    "graphs": Check(graphs, "rollout.enforce_eager=true", "model"),
    "quantised copy": Check(quantized, "speculative.method=bubble+suffix", "model"),
    "TP tail": Check(tp_tail, "rollout.tp_tail_max_rows=0", "model"),
}
