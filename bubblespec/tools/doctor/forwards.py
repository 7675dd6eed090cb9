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
from bubblespec.engine.compiled import compared, compile_reduction
from bubblespec.engine.forward import ModelForward, can_capture
from bubblespec.engine.graphs import ForwardGraphs
from bubblespec.engine.kernels import cache_for, packed_logits
from bubblespec.engine.model import forward_hidden
from bubblespec.engine.model_checks import is_rounding, random_tokens, relative_difference
from bubblespec.engine.output_head import output_head
from bubblespec.engine.packing import pack_rows
from bubblespec.engine.sampling import best_and_sum
from bubblespec.errors import one_line
from bubblespec.mechanisms.quantized.copy import Copy, observe_inputs
from bubblespec.mechanisms.quantized.products import NO_PRODUCT, product_for
from bubblespec.mechanisms.quantized.runner import copy_forward
from bubblespec.mechanisms.tp_tail.shards import (
    ShardedForward,
    TPGroup,
    TPUnsupported,
    no_tp_tail,
    shard_of,
)

if TYPE_CHECKING:
    from bubblespec.rollout.sampler import Sampler
    from bubblespec.trainer import Trainer

WARM_UP, NUM_TIMED = 3, 20
NUM_SAMPLED = 128  # positions of the check of sampling
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
    """Report the kernel in use, which `prepare` has compared with SDPA."""
    if case.slower is not None:
        yield slower(case.slower)
    elif case.ranks.device.type == "cuda" and case.kernel == "sdpa":
        yield slower("attention is sdpa; model.attention=auto")
    else:
        others = "; other kernels run on CUDA only" if case.ranks.device.type == "cpu" else ""
        yield ok(f"attention is {case.kernel}{others}")


@torch.inference_mode()
def graphs(case: Case) -> Iterator[Line]:
    """Compare forwards of few tokens as CUDA graphs with eager forwards."""
    loaded, kernel, device = case.loaded, case.kernel, case.loaded.device
    if case.ranks.device.type == "cpu":
        yield ok("not applicable: a CPU has none")
        return
    is_eager = case.config.rollout.enforce_eager
    if is_eager or not can_capture(case.ranks.device, kernel):
        why = "rollout.enforce_eager=true" if is_eager else "model.attention is sdpa"
        yield slower(f"there are none; {why}")
        return
    cache, tokens = cache_for(kernel, num_spare=1), random_tokens(loaded, 1)
    packing = pack_rows(cache, np.zeros(1, np.int64), np.ones(1, np.int64), device)
    captured = ForwardGraphs(ModelForward(loaded, kernel), cache, 16)
    replay = partial(captured.forward, tokens, packing)
    if replay() is None:
        yield slower(str(captured.problem))
        return
    replayed = packed_logits(loaded, cache, kernel, captured.forward)
    eager = packed_logits(loaded, cache_for(kernel), kernel)
    yield close(replayed, eager, "graphs and eager forwards", "rollout.enforce_eager=true")
    actions = (replay, partial(forward_hidden, loaded, tokens, packing, kernel))
    graph_ms, eager_ms = (1e3 * median_s(action, device) for action in actions)
    yield ok(f"a forward of one token takes {graph_ms:.2f} ms, eager {eager_ms:.2f} ms")


@torch.inference_mode()
def sampling(case: Case) -> Iterator[Line]:
    """Compare the compiled reduction of logits with the eager one."""
    if case.ranks.device.type == "cpu":
        yield ok("not applicable: eager on a CPU")
        return
    head, dtype, device = output_head(case.loaded), case.loaded.dtype, case.loaded.device
    if case.config.rollout.enforce_eager:
        yield slower("sampling is eager; rollout.enforce_eager=true")
        return
    compiled, line = compile_reduction(head.num_tokens, dtype, device)
    if line is not None:
        yield slower(line)
        return
    given = compared(NUM_SAMPLED, head.num_tokens, dtype, device)
    ms, eager_ms = (1e3 * median_s(partial(f, *given), device) for f in (compiled, best_and_sum))
    yield ok(f"the same {NUM_SAMPLED} tokens take {ms:.2f} ms compiled, eager {eager_ms:.2f} ms")


@torch.inference_mode()
def tp_tail(case: Case) -> Iterator[Line]:
    """Compare a forward of all ranks together with a forward of each rank alone."""
    ranks, loaded, device = case.ranks, case.loaded, case.ranks.device
    avoid = "rollout.tp_tail_max_rows=0"
    if ranks.world_size == 1 or case.config.rollout.tp_tail_max_rows == 0:
        yield ok(f"not applicable: {'one rank' if ranks.world_size == 1 else avoid}")
        return
    try:
        shards = ShardedForward(loaded, TPGroup(ranks), case.kernel)
        shards.check()
    except TPUnsupported as error:
        yield slower(no_tp_tail(error))
        return
    tokens, one, head = random_tokens(loaded, 1), np.ones(1, np.int64), output_head(loaded)
    whole, part = (pack_rows(cache_for(case.kernel), 0 * one, one, device) for _ in range(2))

    def together() -> torch.Tensor:
        return shards.logits(shards.hidden(tokens, part))

    def alone() -> torch.Tensor:
        return head(forward_hidden(loaded, tokens, whole, case.kernel))

    own = shard_of(head.num_tokens, ranks.rank, ranks.world_size)
    yield close(together(), alone()[:, own], "forwards together and alone", avoid)
    together_ms, alone_ms = (1e3 * median_s(action, device) for action in (together, alone))
    took = f"{together_ms:.2f} ms on all ranks together, {alone_ms:.2f} ms on each alone"
    yield ok(f"a forward of one token takes {took}")


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
        yield slower(NO_PRODUCT)
        return
    tokens, one = random_tokens(loaded, NUM_SAMPLED), np.ones(1, np.int64)
    packing = pack_rows(cache_for(case.kernel), 0 * one, one, device)
    wanted = packed_logits(loaded, cache_for(case.kernel), case.kernel)
    try:
        copy = Copy(loaded, product, *observe_inputs(loaded, tokens, case.kernel))
        forward = copy_forward(copy, loaded, case.kernel)
        logits = packed_logits(copy.model, cache_for(case.kernel), case.kernel)
        ms = 1e3 * median_s(partial(forward.hidden, tokens[:1], packing), device)
    except Exception as error:  # the model's own code runs here
        yield slower(f"{product.name}: {one_line(error)}")
        return
    same = float((logits.argmax(-1) == wanted.argmax(-1)).float().mean())
    policy = partial(forward_hidden, loaded, tokens[:1], packing, case.kernel)
    took = f"{ms:.2f} ms, the policy's {1e3 * median_s(policy, device):.2f} ms"
    text = f"{product.name}: {same:.0%} of {len(wanted)} best tokens are the policy's; a forward"
    text += f" of one token takes {took}"
    yield ok(text) if same >= MIN_SAME else failed(f"{text}; {avoid}")


def close(got: torch.Tensor, wanted: torch.Tensor, what: str, avoid: str) -> Line:
    """Compare logits with the tolerance of `prepare_model`; avoid: key that a failure names."""
    difference = relative_difference(got, wanted)
    line = f"logits of {what} differ by {difference:.1e} of their size"
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
    "sampling": Check(sampling, "rollout.enforce_eager=true", "model"),
    "quantised copy": Check(quantized, "speculative.method=bubble+suffix", "model"),
    "TP tail": Check(tp_tail, "rollout.tp_tail_max_rows=0", "model"),
}
