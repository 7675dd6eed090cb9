"""The gradient steps: samples balanced over ranks, padding-free micro-batches, one reduction and
one optimizer step an update.

A batch makes one update, or `num_iterations` passes of `num_minibatches` updates. The old policy of
the probability ratio is the one that generated the batch. Its log-probabilities are those of
training forwards, never the generator's own, so the gradient depends on the tokens alone: not on
how, where or in which batches they were generated. The first update takes them from its own
forward, so that its ratio is exactly 1; the minibatches that come after it get a forward before it.

With optim.stream_gradients part of the gradient may be there before the update begins
(streaming.py): a batch then makes one update, which computes the rest and scales the sum.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.dist.ranks import Ranks
from bubblespec.engine.linear import refresh_copies
from bubblespec.engine.model import forward_hidden, output_head
from bubblespec.engine.packing import pack_sequences
from bubblespec.errors import RunFailed, log
from bubblespec.learn.lora import adapter_disabled
from bubblespec.learn.losses import (
    cispo_loss,
    importance_ratio,
    kl_penalty,
    policy_loss,
    token_logprobs,
)
from bubblespec.learn.microbatch import Microbatch, is_in_loss, make_microbatch, make_minibatches
from bubblespec.learn.microbatch_cost import MicrobatchCost
from bubblespec.learn.optimizer import Optimizer
from bubblespec.learn.out_of_memory import TokenBudget, run_within_memory
from bubblespec.records import Span
from bubblespec.types import SampleId, Samples

# What sampling/logp_difference/mean may be at temperature 1; beyond it something else than rounding
# is at work. Rounding alone gives 1e-7 in float64 (the generator's are kept in float32), 3e-7 to
# 1e-4 in float32 and 2e-3 to 3e-2 in bfloat16, measured on random models of eight layers, dense and
# with experts, with weights from usual ones to so large ones that errors grow.
LARGEST_MISMATCH = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1}

# What is measured of a micro-batch, and summed over those of an update; low, high and delta count
# bounded tokens (policy_loss).
MEASURED = (
    "loss",
    "entropy",
    "low",
    "high",
    "delta",
    "kl",
    "mismatch",
    "tokens",
    "largest_mismatch",
)


def response_logprobs(
    model: PreTrainedModel,
    batch: Microbatch,
    *,
    temperature: float,
    max_logits: int,
    kernel: str,
    on_hidden: Callable[[Microbatch, torch.Tensor], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of every response token, float [M] each, in one packed forward.
    on_hidden: is given its hidden states, [N, hidden]."""
    packing = pack_sequences(batch.sequence_lengths, batch.input_ids.device)
    hidden = forward_hidden(model, batch.input_ids, packing, kernel)
    if on_hidden is not None:
        on_hidden(batch, hidden.detach())
    predicting = hidden.index_select(0, batch.predicts)
    return token_logprobs(
        predicting, output_head(model), batch.target, temperature=temperature, max_logits=max_logits
    )


@dataclass
class Streamed:
    """What this rank's gradient buffer holds of the coming update before that begins."""

    ids: set[SampleId] = field(default_factory=set)
    """Samples whose gradients have been added, without the update's common factor."""
    measured: list[torch.Tensor] = field(default_factory=list)
    """`MEASURED` of their micro-batches."""

    def add(self, ids: list[SampleId], measured: torch.Tensor) -> None:
        """One more micro-batch. Raises ValueError for a sample that is in already."""
        if not self.ids.isdisjoint(ids):
            raise ValueError(
                f"the gradients of {sorted(self.ids.intersection(ids))} have been computed before"
            )
        self.ids.update(ids)
        self.measured.append(measured)

    def clear(self) -> None:
        """Nothing is there."""
        self.ids.clear()
        self.measured.clear()


@dataclass(kw_only=True)
class Learner:
    """Trains the policy on the samples of each step."""

    config: Config
    ranks: Ranks
    model: PreTrainedModel
    """The policy, which generates as well."""
    reference: PreTrainedModel | None
    """The initial policy, of which the KL is taken, or None without a KL term. With LoRA `model`
    itself, whose adapter is then turned off."""
    optimizer: Optimizer
    kernel: str
    """Of attention; see `choose_kernel`."""
    budget: TokenBudget = field(init=False)
    """Size of the micro-batches; where memory has run out it stays lower in the steps that
    follow."""
    streamed: Streamed = field(default_factory=Streamed)
    cost: MicrobatchCost = field(default_factory=MicrobatchCost)
    """Learnt where gradients are streamed."""
    on_hidden: Callable[[Microbatch, torch.Tensor], None] | None = None
    """Given the policy's hidden states of each micro-batch, [N, hidden]: the drafter learns from
    them."""
    num_skipped_in_a_row: int = 0
    """Steps in a row, up to the latest, in which an update was left out."""
    has_warned_of_mismatch: bool = False
    """The warning is given once a run."""

    def __post_init__(self):
        self.budget = TokenBudget(self.config.optim.max_tokens_per_microbatch)

    def update(
        self, samples: Samples, advantages: np.ndarray, step: int
    ) -> tuple[dict[str, float], list[Span]]:
        """All updates of one step. advantages: float64 [S]. Returns the step's training metrics,
        equal on all ranks but for `timing_s/sync`, this rank's seconds in gradient reductions, and
        a "sync" span for each of these reductions.

        An update whose loss or gradient is not finite is left out, on all ranks alike;
        `skipped_updates` counts them. Raises RunFailed after more than optim.max_skipped_steps
        steps in a row with such an update.
        """
        # Without a KL term a sample of zero advantage (a group of equal rewards) has zero gradient:
        # it is not computed.
        has_gradient = is_in_loss(samples, self.config) & (
            (advantages != 0) | (self.reference is not None)
        )
        is_streamed = self._streamed_on_ranks(samples)
        is_left, streams = (
            has_gradient & ~is_streamed.any(axis=0),
            self.config.optim.stream_gradients,
        )
        minibatches, weights, factors = make_minibatches(
            samples,
            is_left,
            config=self.config,
            ranks=self.ranks,
            max_tokens=self.budget.max_tokens,
        )

        def run(
            work: Callable, microbatches: list[Microbatch], restart: Callable[[], None]
        ) -> list:
            return run_within_memory(
                work,
                microbatches,
                restart=restart,
                samples=samples,
                budget=self.budget,
                ranks=self.ranks,
            )

        for microbatches in minibatches[1:]:
            run(self._set_old_logprobs, microbatches, lambda: None)
        totals, grad_norms, spans, num_skipped = [], [], [], 0
        for number, microbatches in enumerate(minibatches * self.config.loss.num_iterations):

            def restart(number=number, microbatches=microbatches) -> None:
                self.optimizer.clear()
                microbatches.extend(self._take_back(samples, is_streamed[self.ranks.rank]))
                for batch in microbatches if number == 0 else ():
                    # the first update's comes from the very forward that is differentiated
                    batch.old = None

            began_s = self.ranks.clock.perf_counter()
            measured = run(
                lambda batch: self.accumulate_gradient(batch, advantages, weights),
                microbatches,
                restart,
            )
            if streams:
                self._observe_cost(microbatches, measured, began_s)
            begin_s = time.perf_counter()
            self.optimizer.reduce(self.ranks)
            spans.append(Span("sync", begin_s, time.perf_counter()))
            factor = factors[number % len(factors)]
            if streams:
                self.optimizer.flat_grad.mul_(factor)
            totals.append(_sum_over_ranks(self.streamed.measured + measured, self.ranks, factor))
            is_finite = math.isfinite(totals[-1]["loss"])
            grad_norm, learning_rate = self.optimizer.step(step, is_finite)
            grad_norms.append(grad_norm)
            num_skipped += not (is_finite and math.isfinite(grad_norm))
        refresh_copies(self.model)
        self._count_skipped(num_skipped, step)
        self.streamed.clear()
        metrics = _training_metrics(
            totals, self.config.loss.delta is not None, self.reference is not None
        )
        self.warn_of_mismatch(metrics, step)
        if streams:
            tokens = samples.lengths * has_gradient
            metrics["stream/share"] = float(tokens @ is_streamed.any(axis=0) / max(tokens.sum(), 1))
        metrics |= {
            "grad_norm": float(np.mean(grad_norms)),
            "learning_rate": learning_rate,
            "skipped_updates": num_skipped,
        }
        return metrics | {"timing_s/sync": sum(span.end_s - span.begin_s for span in spans)}, spans

    def forget_streamed(self) -> None:
        """Whatever has been added to the gradient for an update that never came."""
        if self.streamed.ids:
            self.optimizer.clear()
            self.streamed.clear()

    def _streamed_on_ranks(self, samples: Samples) -> np.ndarray:
        """Which samples' gradients have been computed before the update, bool [ranks, S]. Exchanged
        where gradients are streamed. Raises ValueError where this rank has some of samples that are
        not trained on."""
        if not self.config.optim.stream_gradients:
            return np.zeros((self.ranks.world_size, len(samples)), bool)
        own = np.array([name in self.streamed.ids for name in samples.ids], bool)
        if own.sum() != len(self.streamed.ids):
            raise ValueError(
                f"{len(self.streamed.ids) - own.sum()} samples were streamed that are not trained on"
            )
        return self.ranks.gather(own.astype(np.uint8)).astype(bool)

    def _take_back(self, samples: Samples, is_streamed: np.ndarray) -> list[Microbatch]:
        """What this rank has streamed goes with the gradients that are cleared: to be computed
        again, as one micro-batch of any size."""
        if not self.streamed.ids:
            return []
        self.streamed.clear()
        return [make_microbatch(samples, np.flatnonzero(is_streamed).tolist(), self.ranks.device)]

    def _observe_cost(
        self, microbatches: list[Microbatch], measured: list[torch.Tensor], began_s: float
    ) -> None:
        if measured:
            measured[-1][0].item()  # waits for a GPU
            num_tokens = sum(sum(batch.sequence_lengths) for batch in microbatches)
            self.cost.observe(
                len(microbatches), num_tokens, self.ranks.clock.perf_counter() - began_s
            )

    def accumulate_gradient(
        self, batch: Microbatch, advantages: np.ndarray, weights: np.ndarray
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch. advantages, weights: float64 [S]. Returns its
        `MEASURED`, sums but for the last."""
        loss = self.config.loss
        logprob, entropy = self._logprobs(
            self.model, batch, **({"on_hidden": self.on_hidden} if self.on_hidden else {})
        )
        if batch.old is None:
            batch.old = logprob.detach()
        advantage, weight = (
            # A sample's value for each of its tokens, without waiting for the forward.
            torch.from_numpy(values[batch.order])
            .to(logprob, non_blocking=True)
            .repeat_interleave(batch.lengths, output_size=len(logprob))
            for values in (advantages, weights)
        )
        ratio = importance_ratio(logprob, batch.old, batch.lengths, loss.importance_sampling_level)
        if loss.loss_type == "cispo":
            token_loss, is_clipped = cispo_loss(logprob, ratio, advantage, loss.epsilon_high)
        else:
            clips = {
                "epsilon_low": loss.epsilon_low,
                "epsilon_high": loss.epsilon_high,
                "delta": loss.delta,
            }
            token_loss, is_clipped = policy_loss(ratio, advantage, **clips)
        kl = torch.zeros_like(logprob)
        if self.reference is not None:
            if batch.reference is None:
                with torch.no_grad(), adapter_disabled(self.reference):
                    batch.reference = self._logprobs(self.reference, batch)[0]
            kl = kl_penalty(logprob, batch.reference, loss.kl_estimator)
        total = (weight * (token_loss + loss.kl_coef * kl)).sum()
        total.backward()
        mismatch = (batch.old - batch.generated).abs()
        sums = (t.detach().sum() for t in (entropy, *is_clipped, kl, mismatch))
        return torch.stack(
            [total.detach(), *sums, logprob.new_full((), len(logprob)), mismatch.max()]
        )

    @torch.no_grad()
    def _set_old_logprobs(self, batch: Microbatch) -> None:
        batch.old = self._logprobs(self.model, batch)[0]

    def _logprobs(
        self, model: PreTrainedModel, batch: Microbatch, **options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        temperature, max_logits = (
            self.config.rollout.temperature,
            self.config.optim.max_logits_per_chunk,
        )
        return response_logprobs(
            model,
            batch,
            temperature=temperature,
            max_logits=max_logits,
            kernel=self.kernel,
            **options,
        )

    def _count_skipped(self, num_skipped: int, step: int) -> None:
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if num_skipped else 0
        if self.num_skipped_in_a_row > self.config.optim.max_skipped_steps:
            raise RunFailed(
                f"loss or gradient not finite in {self.num_skipped_in_a_row} steps in a row, up to step {step}; the weights are "
                "those before them. Look at optim.learning_rate, at the rewards and at model.dtype"
            )

    def warn_of_mismatch(self, metrics: dict[str, float], step: int) -> None:
        """Once a run, where generation and training differ by more than rounding: they should be
        one function of the same weights."""
        dtype, temperature = self.model.dtype, self.config.rollout.temperature
        mean = metrics.get("sampling/logp_difference/mean", 0.0)
        if self.has_warned_of_mismatch or not mean > LARGEST_MISMATCH[dtype] / min(
            temperature, 1.0
        ):
            return
        self.has_warned_of_mismatch = True
        if self.ranks.is_main:
            log(
                f"warning: in step {step} log-probabilities in training differ from those in generation by {mean:.1e} on average "
                f"(sampling/logp_difference/mean), far more than {str(dtype).removeprefix('torch.')} rounds; one of the two "
                "computes something else: look for randomness in the model's own code (dropout, noise of a router), and try "
                "another model.attention and model.dtype"
            )


def _sum_over_ranks(
    measured: list[torch.Tensor], ranks: Ranks, factor: float = 1.0
) -> dict[str, float]:
    """`MEASURED` of an update, from this rank's micro-batches; factor: of the loss."""
    by_batch = (
        torch.stack(measured).double().cpu().numpy() if measured else np.zeros((1, len(MEASURED)))
    )
    by_batch[:, MEASURED.index("loss")] *= factor
    by_rank = ranks.gather(np.append(by_batch[:, :-1].sum(axis=0), by_batch[:, -1].max()))
    total = np.append(by_rank[:, :-1].sum(axis=0), by_rank[:, -1].max())
    return dict(zip(MEASURED, total.tolist(), strict=True))


def _training_metrics(
    totals: list[dict[str, float]], has_delta: bool, has_reference: bool
) -> dict[str, float]:
    """totals: `MEASURED` of each update. The loss is the mean over updates; other means are over
    the tokens that were trained on in all updates, if there were any."""
    total = {name: sum(update[name] for update in totals) for name in MEASURED}
    tokens = total["tokens"]
    if tokens == 0:
        return {"loss": 0.0}
    metrics = {
        "loss": total["loss"] / len(totals),
        "entropy": total["entropy"] / tokens,
        "clip_ratio/low_mean": total["low"] / tokens,
        "clip_ratio/high_mean": total["high"] / tokens,
        "clip_ratio/region_mean": (total["low"] + total["high"]) / tokens,
        "sampling/logp_difference/mean": total["mismatch"] / tokens,
        "sampling/logp_difference/max": max(update["largest_mismatch"] for update in totals),
    }
    if has_delta:
        metrics["clip_ratio/delta_mean"] = total["delta"] / tokens
    return metrics | ({"kl": total["kl"] / tokens} if has_reference else {})
