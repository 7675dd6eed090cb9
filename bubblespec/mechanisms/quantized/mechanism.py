"""The quantised copy of a run: made and timed at the start, renewed before rollouts.

On a GPU it is made only if a product of it is fast enough by itself."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.data.prompts import Prompt
from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.chain_runner import ChainRunner, profile
from bubblespec.draft.chains import ChainSource
from bubblespec.engine import graphs
from bubblespec.engine.decoder import is_like_llama
from bubblespec.engine.engine import Engine
from bubblespec.engine.output_head import output_head
from bubblespec.engine.packing import to_device
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.engine.weights import linear_of
from bubblespec.errors import log, one_line
from bubblespec.mechanisms.quantized.copy import Copy, linear_layers, observe_inputs
from bubblespec.mechanisms.quantized.products import NO_PRODUCT, Product, product_for
from bubblespec.mechanisms.quantized.runner import CopyRunner
from bubblespec.planner.costs import CostModel
from bubblespec.records import RolloutRecord, StepRecord
from bubblespec.rollout.mechanism import Mechanism
from bubblespec.rollout.plan import RolloutPlan

NAME = "quantized"
MAX_CHAIN_LENGTH = 16  # tokens
PRIOR = 0.93  # chance that a token of a chain is right if all before it are
RENEWAL_SHARE = 0.02  # of the rollouts' seconds
OBSERVED_TOKENS = 512  # of prompts, whose inputs to layers are observed
MIN_SPEEDUP = 1.35  # of the copy's forward over the policy's, with one row, for chains to pay
NUM_TIMED = 7  # replays of a product
CACHE_BYTES = 1 << 27  # beyond what GPUs have
NO_COPY = "no quantised copy drafts"


class QuantizedMechanism(Mechanism):
    """The copy, its source of draft tokens and its renewal."""

    name = NAME

    def __init__(self, source: ChainSource, copy: Copy, config: Config, clock):
        self.source, self.sources, self.clock, self.copy = source, [source], clock, copy
        own, temperature = source.runner.params, config.eval.temperature
        self.params = own
        self.evaluation_params = own
        if temperature is not None:
            self.evaluation_params = replace(own, temperature=temperature)
        self._credit_s = 0.0  # that renewals may take
        self._renewal_s = 0.0  # of the latest rollout

    def begin_rollout(self, plan: RolloutPlan) -> None:
        """Renew what the share of the last rollouts' seconds allows, if the copy is used."""
        is_evaluation = plan.step is None
        self.source.runner.params = self.evaluation_params if is_evaluation else self.params
        is_used = self.name not in plan.without and plan.is_on
        self.source.is_enabled = is_used and self.source.problem is None
        if is_evaluation or not self.source.is_enabled:
            return
        try:
            self._renewal_s = self.copy.renew(self.clock.perf_counter, self._credit_s)
        except Exception as error:  # weights that cannot be rounded
            self.source.give_up(error)
        self._credit_s -= self._renewal_s

    def end_rollout(self, record: RolloutRecord) -> None:
        """Allow a share of the rollout's seconds for the next renewal."""
        self._credit_s = min(self._credit_s, 0.0) + RENEWAL_SHARE * record.total_s

    def metrics(self, ranks: Ranks, record: StepRecord) -> dict[str, float]:
        """Return how often tokens of chains are right, how long chains are, and what they take."""
        own = np.array([self.source.rates.mean, self._renewal_s])
        gathered, self._renewal_s = ranks.gather(own), 0.0
        metrics = {"quantized/acceptance_rate": float(gathered[:, 0].mean())}
        metrics["quantized/renew_s"] = float(gathered[:, 1].max())
        return metrics | self.source.metrics(ranks)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return how often tokens of chains were right."""
        return self.source.rates.survival.state_dict()

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a saved state."""
        self.source.rates.survival.load_state_dict(state)


def make_source(
    runner: ChainRunner, cost: CostModel, copy_cost: CostModel, **options
) -> ChainSource:
    """Create the copy's source; chains of a learned drafter cost less, so it is asked last."""
    return ChainSource(
        NAME,
        runner,
        cost,
        copy_cost,
        prior=PRIOR,
        longest=MAX_CHAIN_LENGTH,
        is_last=True,
        **options,
    )


def choose_product(config: Config, ranks: Ranks, model: PreTrainedModel) -> Product | None:
    """Return the product of the run's copy on all ranks together; None, with a line, without one.

    On a GPU only a timing tells whether it is faster than bfloat16."""
    if "quantized" not in config.speculative.sources:
        return None
    product, problem = product_for(model, ranks.device.type, config.quantized.bits), NO_PRODUCT
    if product is not None and not is_like_llama(model):
        product, problem = None, "the policy is not built like Llama"
    if product is not None and ranks.device.type == "cuda":
        speedup, problem = 0.0, "its product fails on another rank"
        try:
            speedup = product_speedup(product, model)
        except Exception as error:  # of a kernel
            problem = one_line(error)
        slowest = float(ranks.gather(np.array([speedup])).min())
        if slowest > 0.0:
            problem = f"a product in {product.name} is {slowest:.2f} times as fast as the policy's"
        if not pays(slowest, config):
            product = None
    if product is None and ranks.is_main:
        log(f"{NO_COPY}: {problem}")
    return product


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
    replay, _ = graphs.capture(run, None)
    seconds = []
    for _ in range(NUM_TIMED):
        begin_s = time.perf_counter()
        replay()
        results[-1].cpu()  # waits
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds) / len(calls)


def make_quantized(
    config: Config,
    ranks: Ranks,
    engine: Engine,
    params: SamplingParams,
    cost: CostModel,
    prompts: list[Prompt],
    product: Product,
) -> QuantizedMechanism | None:
    """Create the copy on all ranks together; None, with a line, where it would not pay.

    cost: of the policy's forwards; prompts: some of the data's; product: of `choose_product`."""
    runner = cast(ModelRunner, engine.runner)
    model, always = runner.model, config.speculative.planning == "always"
    problem, speedup = "it fails on another rank", 0.0
    tokens = np.concatenate([prompt.token_ids for prompt in prompts])[:OBSERVED_TOKENS]
    ids = to_device(tokens.astype(np.int64), runner.device)
    try:
        copy = Copy(model, product, observe_inputs(model, ids))
        of_copy = CopyRunner(copy, engine, params)
        copy_cost = profile(of_copy, ranks.clock)
        speedup = float(cost.seconds(1, 1) / copy_cost.seconds(1, 1))
    except Exception as error:  # the model's own code runs here, with other layers
        problem = one_line(error)
    slowest = float(ranks.gather(np.array([speedup])).min())
    if pays(slowest, config):
        if of_copy.graphs is not None:
            runner.followers.append(of_copy)
        source = make_source(of_copy, cost, copy_cost, always=always, clock=ranks.clock)
        return QuantizedMechanism(source, copy, config, ranks.clock)
    if slowest > 0.0:
        problem = f"its forward is {slowest:.2f} times as fast as the policy's, too little to pay"
    if ranks.is_main:
        log(f"{NO_COPY}: {problem}")
    return None


def pays(speedup: float, config: Config) -> bool:
    """Whether a copy is made whose forward, or product, is so many times as fast; 0: it fails."""
    return speedup >= MIN_SPEEDUP or (config.speculative.planning == "always" and speedup > 0.0)
