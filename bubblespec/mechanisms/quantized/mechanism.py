"""The quantised copy of a run: made and timed at the start, renewed before rollouts.

On a GPU it is made only if a product of it is fast enough by itself.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.chains import DraftModelSource, profile
from bubblespec.engine import graphs
from bubblespec.engine.arrays import median_s, to_device
from bubblespec.engine.decoder import is_like_llama
from bubblespec.engine.model import output_head
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.weights import linear_of
from bubblespec.errors import log, one_line
from bubblespec.mechanisms import Run
from bubblespec.mechanisms.quantized.copy import (
    GROUP,
    NO_PRODUCT,
    CopyRunner,
    Product,
    QuantizedDraftModel,
    linear_layers,
    observe_inputs,
    product_for,
)
from bubblespec.memory import Needs
from bubblespec.records import RolloutRecord, StepRecord
from bubblespec.rollout.plan import Mechanism, RolloutPlan
from bubblespec.rollout.sampler import Sampler

NAME = "quantized"
MAX_CHAIN_LENGTH = 16  # tokens
PRIOR = 0.93  # chance that a token of a chain is right if all before it are
RENEWAL_SHARE = 0.02  # of the rollouts' seconds
OBSERVED_TOKENS = 512  # of prompts, whose inputs to layers are observed
MIN_SPEEDUP = 1.35  # of the copy's forward over the policy's, with one row, for chains to pay
CACHE_BYTES = 1 << 27  # beyond what GPUs have
NO_COPY = "no quantised copy drafts"


class QuantizedMechanism(Mechanism):
    """The copy, its source of draft tokens and its renewal."""

    name = NAME

    def __init__(self, source: DraftModelSource):
        """source: whose chains a `CopyRunner` draws."""
        self.source, self.sources = source, [source]
        self.copy = cast(CopyRunner, source.runner).copy
        self.state = source.rates.survival  # how often tokens of chains were right
        self._credit_s = 0.0  # that renewals may take
        self._renewal_s = 0.0  # of the latest rollout

    def begin_rollout(self, plan: RolloutPlan) -> None:
        """Renew what the share of the last rollouts' seconds allows, if the copy is used."""
        self.source.runner.params = plan.params
        is_used = NAME not in plan.without  # which lacks all parts where it lacks drafts
        self.source.is_enabled = is_used and self.source.problem is None
        if plan.step is None or not self.source.is_enabled:
            return
        try:
            self._renewal_s = self.copy.renew(self.source.clock.perf_counter, self._credit_s)
        except Exception as error:  # weights that cannot be rounded
            self.source.give_up(error)
        self._credit_s -= self._renewal_s

    def end_rollout(self, record: RolloutRecord) -> None:
        """Allow a share of the rollout's seconds for the next renewal, and of those in a pause."""
        if self.source.is_enabled:
            self._credit_s = min(self._credit_s, 0.0)
        self._credit_s += RENEWAL_SHARE * record.total_s

    def metrics(self, ranks: Ranks, record: StepRecord) -> dict[str, float]:
        """Return how often tokens of chains are right, how long chains are, and what they take."""
        metrics = {"quantized/acceptance_rate": float(self.source.rates.mean)}
        metrics["quantized/renew_s"], self._renewal_s = self._renewal_s, 0.0
        return metrics | self.source.metrics(ranks)


# Creates the copy's source. Chains of a learned drafter cost less, so it is asked last.
make_source = partial(DraftModelSource, NAME, prior=PRIOR, longest=MAX_CHAIN_LENGTH, is_last=True)


def prepare(run: Run) -> None:
    """Choose the product of the copy on all ranks together; none, with a line, without one.

    On a GPU only a timing tells whether it is faster than bfloat16."""
    config, ranks, model = run.config, run.ranks, run.model
    if NAME not in config.speculative.sources:
        return
    product, problem = product_for(model, ranks.device.type, config.quantized.bits), None
    if product is None:
        problem = NO_PRODUCT
    elif not is_like_llama(model):
        problem = "the policy is not built like Llama"
    elif ranks.device.type == "cuda":
        speedup = partial(product_speedup, product, model)
        problem = refusal(f"a product in {product.name}", speedup, config, ranks)
    run.own[NAME] = product if problem is None else None
    if problem is not None and ranks.is_main:
        log(f"{NO_COPY}: {problem}")


def refusal(what: str, speedup: Callable[[], float], config: Config, ranks: Ranks) -> str | None:
    """Return why no copy is made on any rank; None where it pays.

    speedup: of the copy's forward, or product (`what`), over the policy's; it may raise."""
    own, problem = 0.0, f"{what} fails on another rank"
    try:
        own = speedup()
    except Exception as error:  # of a kernel, or of the model's own code with other layers
        problem = one_line(error)
    slowest = float(ranks.all_gather(np.array([own])).min())
    if slowest >= MIN_SPEEDUP or (config.speculative.planning == "always" and slowest > 0.0):
        return None
    if slowest > 0.0:
        problem = f"{what} is {slowest:.2f} times as fast as the policy's, and pays from "
        problem += f"{MIN_SPEEDUP:.2f} on"
    return problem


@torch.inference_mode()
def product_speedup(product: Product, model: PreTrainedModel) -> float:
    """Return how many times as fast as the policy's a product of its largest layer is, of one row.

    The output head is left out. Weights are read from memory, not from a cache: there are several,
    one after the other in a graph."""
    head = output_head(model).linear
    layers = [linear_of(of).weight.detach() for of in linear_layers(model) if of is not head]
    fitting = [weight for weight in layers if product.fits(weight.shape[1], weight.shape[0])]
    if not fitting:
        raise ValueError(f"no layer fits the groups of {product.name}")
    weight = max(fitting, key=torch.Tensor.numel)
    x = weight.new_ones(1, weight.shape[1])
    packed = product.pack(weight, weight.new_ones(weight.shape[1], dtype=torch.float32))
    weights = _beyond_caches((weight,), weight.nbytes)
    copies = _beyond_caches(packed, weight.nbytes * product.bits // 16)
    policy_s = _seconds_of([partial(linear, x, *of) for of in weights])
    return policy_s / _seconds_of([partial(product.multiply, x, of) for of in copies])


def _beyond_caches(tensors: tuple[torch.Tensor, ...], size: int) -> list[tuple[torch.Tensor, ...]]:
    """Return so many copies of tensors, of `size` bytes together, that no cache holds them."""
    return [tuple(of.clone() for of in tensors) for _ in range(2 + CACHE_BYTES // size)]


def _seconds_of(calls: list[Callable[[], torch.Tensor]]) -> float:
    """Return the seconds of one of several calls in a graph, the median of a few replays."""
    results: list[torch.Tensor] = []

    def run() -> None:
        results[:] = [call() for call in calls]

    graphs.rehearse(run)
    return median_s(graphs.capture(run), results[-1].device) / len(calls)


def add_needs(needs: Needs, run: Run) -> Needs:
    """Add the memory of the copy's linear layers; before `prepare`, as if timings allowed it."""
    config, model = run.config, run.model
    if NAME not in config.speculative.sources:
        return needs
    product = product_for(model, run.ranks.device.type, config.quantized.bits)
    if (product := run.own.get(NAME, product)) is None:
        return needs
    layers = [linear_of(layer) for layer in linear_layers(model)]
    weights = sum(layer.weight.numel() for layer in layers)
    is_grouped = product.bits == 4
    grids = 2 * weights // GROUP if is_grouped else sum(layer.out_features for layer in layers)
    size = weights * product.bits // 8 + grids * model.dtype.itemsize
    return replace(needs, others=needs.others | {"quantised copy of the policy": size})


def make(run: Run) -> QuantizedMechanism | None:
    """Create the copy on all ranks together; None, with a line, where it would not pay."""
    config, ranks, sampler = run.config, run.ranks, run.sampler
    if sampler.proposer is None or (run.virtual or run.own).get(NAME) is None:
        return None
    cost, made = sampler.stats.cost, list[Any]()

    def speedup() -> float:
        of_copy = run.virtual[NAME] if run.virtual else make_runner(sampler, run.own[NAME])
        made[:] = of_copy, profile(of_copy, ranks.clock)
        return float(cost.seconds(1, 1) / made[1].seconds(1, 1))

    if problem := refusal("its forward", speedup, config, ranks):
        if ranks.is_main:
            log(f"{NO_COPY}: {problem}")
        return None
    of_copy, copy_cost = made
    if of_copy.graphs is not None:
        cast(ModelRunner, sampler.engine.runner).followers.append(of_copy)
    always = config.speculative.planning == "always"
    source = make_source(of_copy, cost, copy_cost, always=always, clock=ranks.clock)
    sampler.proposer.add(source)
    sampler.stats.chooser.add(NAME)
    sampler.stats.chains, sampler.stats.chains_part = source.shortening, NAME
    run.after_update.append(of_copy.copy.note_update)
    return QuantizedMechanism(source)


def make_runner(sampler: Sampler, product: Product) -> CopyRunner:
    """Create the copy, which the inputs of some prompts' tokens calibrate."""
    runner, prompts = cast(ModelRunner, sampler.engine.runner), sampler.schedule.prompts.prompts[:8]
    tokens = np.concatenate([prompt.token_ids for prompt in prompts])[:OBSERVED_TOKENS]
    ids = to_device(tokens.astype(np.int64), runner.device)
    copy = QuantizedDraftModel(runner.model, product, observe_inputs(runner.model, ids))
    return CopyRunner(copy, sampler.engine, sampler.params)
