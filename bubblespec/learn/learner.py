"""The updates of a step, each with one reduction over ranks and one optimizer step.

Samples are balanced over ranks and packed into micro-batches without padding. A batch makes one
update, or `num_iterations` passes of `num_minibatches` updates. The old policy of the probability
ratio is the one that generated the batch. Its log-probabilities come from training forwards, never
from the generator, so the gradient depends on the tokens alone: not on how, where or in which
batches they were generated. The first update takes them from its own forward, so its ratio is
exactly 1; later minibatches get a forward before it.

Part of an update's gradient may be in the optimizer's buffer before the update begins
(`EarlyGradients`): a sample's contribution is then known up to a factor that all samples of the
update share (losses.py), so the sum is scaled once, at the end."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.model import OutputHead, forward_hidden, output_head, pack_sequences
from bubblespec.errors import RunFailed, log
from bubblespec.learn import losses
from bubblespec.learn.lora import adapter_disabled
from bubblespec.learn.losses import Teacher
from bubblespec.learn.microbatch import Microbatch, is_in_loss, make_minibatches
from bubblespec.learn.optimizer import Optimizer
from bubblespec.records import Samples, Span

# Upper bound of sampling/logp_difference/mean at temperature 1; above it something other than
# rounding is at work. Rounding alone gives 1e-7 in float64 (the generator's are kept in float32),
# 3e-7 to 1e-4 in float32 and 2e-3 to 3e-2 in bfloat16, measured on random models of eight layers,
# dense and with experts, with weights of usual size up to a size at which errors grow.
MAX_MISMATCH = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1}

MAX_LOGITS = 1 << 26  # tokens x vocabulary of a micro-batch that exist at once
MAX_SKIPPED_STEPS = 5

# What each micro-batch measures. An update has the sums, but for the last name the maximum. low,
# high and delta count bounded tokens (`losses.policy_loss`).
MEASURED: tuple[str, ...] = ("loss", "low", "high", "delta", "kl", "divergence", "mismatch")
MEASURED += ("tokens", "max_mismatch")


def sampled_hidden(
    model: PreTrainedModel,
    batch: Microbatch,
    kernel: str,
    on_hidden: Callable[[Microbatch, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Return hidden states that predict the sampled tokens, [M, hidden], in one packed forward.

    kernel: of attention; on_hidden: called with the batch and its hidden states, [N, hidden]."""
    packing = pack_sequences(batch.sequence_lengths, batch.input_ids.device)
    hidden = forward_hidden(model, batch.input_ids, packing, kernel)
    if on_hidden is not None:
        on_hidden(batch, hidden.detach())
    return hidden.index_select(0, batch.predicts)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Make equal micro-batches have equal gradients: backward passes add in a fixed order.

    Raises RuntimeError for an operation that has no such order. On a GPU, cuBLAS must have been set
    so before the first product. Not for generation, which would write keys and values in order."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # nothing reads it
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(enabled, warn_only=warns)


class EarlyGradients(Protocol):
    """Gradients in the optimizer's buffer before their update, without its common factor."""

    def take(self, samples: Samples) -> tuple[np.ndarray, list[torch.Tensor]]:
        """Hand the gradients over to the update of `samples`, on all ranks together.

        Return which samples some rank covers, bool [S], and `MEASURED` of own micro-batches."""

    def observe(self, microbatches: list[Microbatch], seconds: float) -> None:
        """Learn how long forward and backward passes of these micro-batches took."""


@dataclass(kw_only=True)
class Learner:
    """Trains the policy on the samples of each step."""

    config: Config
    ranks: Ranks
    model: PreTrainedModel
    """Policy, which generates as well."""
    reference: PreTrainedModel | None
    """Initial policy, for the KL term; None without one. With LoRA it is `model` itself, with the
    adapter turned off."""
    optimizer: Optimizer
    params: SamplingParams
    """Distribution that the samples are from."""
    kernel: str
    """Attention kernel; see `choose_kernel`."""
    after_update: list[Callable[[], None]] = field(default_factory=list)
    """Functions called once the weights have changed. Copies of weights are renewed here: in the
    next forward, the time would be taken for the cost of its rows."""
    teacher: Teacher | None = None
    """Model of distillation; None without it."""
    is_deterministic: bool = False
    """Whether backward passes add in a fixed order."""
    answers_turns: bool = False
    """Whether responses have tokens that are not sampled: an environment's."""
    early: EarlyGradients | None = None
    on_hidden: Callable[[Microbatch, torch.Tensor], None] | None = None
    """Function called with the policy's hidden states of each micro-batch, [N, hidden]."""
    num_skipped_in_a_row: int = 0
    """Latest consecutive steps in which an update was skipped."""
    has_warned_of_mismatch: bool = False
    own_loss: losses.TokenLoss | None = None
    """The user's own loss, where loss.loss_type is a dotted path."""

    def __post_init__(self):
        if "." in self.config.loss.loss_type:
            self.own_loss = losses.load_loss(self.config.loss.loss_type)

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether a zero advantage means no gradient: with a policy loss alone, not the user's."""
        return self.reference is None and self.teacher is None and self.own_loss is None

    def has_gradient(self, samples: Samples, advantages: np.ndarray) -> np.ndarray:
        """Return which samples are trained on, bool [S]. advantages: float64 [S]."""
        is_used = is_in_loss(samples, self.config)
        return is_used & (advantages != 0) if self.skips_zero_advantage else is_used

    def update(
        self, samples: Samples, advantages: np.ndarray, step: int
    ) -> tuple[dict[str, float], list[Span]]:
        """Make all updates of one step. advantages: float64 [S].

        Return the step's training metrics, equal on all ranks except `timing_s/sync` (this rank's
        seconds in gradient reductions), and a "sync" span for each reduction. An update whose loss,
        gradient or samples' log-probabilities are not finite is skipped, on all ranks alike. Raises
        RunFailed after more than MAX_SKIPPED_STEPS consecutive steps with such an update."""
        has_gradient = self.has_gradient(samples, advantages)
        # NaN marks a token that was not sampled, or shows a failed generation.
        has_nan = bool((samples.num_sampled < samples.lengths).any())
        is_broken = has_nan and not self.answers_turns
        is_covered = np.zeros(len(samples), bool)
        early: list[torch.Tensor] = []
        if self.early is not None:
            is_covered, early = self.early.take(samples)
        minibatches, weights, factors = make_minibatches(
            samples,
            has_gradient & ~is_covered,
            config=self.config,
            ranks=self.ranks,
            scales_later=self.early is not None,
        )
        for batch in itertools.chain(*minibatches[1:]):
            with torch.no_grad():
                hidden = sampled_hidden(self.model, batch, self.kernel)
                batch.old = self._logprobs(self.model, batch, hidden)
        totals, grad_norms, spans, num_skipped = [], [], [], 0
        passes = list(zip(minibatches, factors, strict=True)) * self.config.loss.num_iterations
        for microbatches, factor in passes:
            measured = self.accumulate_gradients(microbatches, advantages, weights)
            if self.ranks.device.type == "cuda":  # the host is far ahead of the backward pass
                torch.cuda.synchronize(self.ranks.device)
            begin_s = self.ranks.clock.perf_counter()
            self.ranks.all_reduce_(self.optimizer.flat_grad)  # tokens are weighted by global counts
            spans.append(Span("sync", begin_s, self.ranks.clock.perf_counter()))
            if factor != 1.0:
                self.optimizer.flat_grad.mul_(factor)
            totals.append(sum_over_ranks(early + measured, self.ranks, factor))
            is_finite = math.isfinite(totals[-1]["loss"]) and not is_broken
            grad_norm, learning_rate = self.optimizer.step(step, is_finite)
            grad_norms.append(grad_norm)
            num_skipped += not (is_finite and math.isfinite(grad_norm))
        for renew in self.after_update:
            renew()
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if num_skipped else 0
        if self.num_skipped_in_a_row > MAX_SKIPPED_STEPS:
            raise RunFailed(
                f"loss or gradient was not finite in {self.num_skipped_in_a_row} steps in a row, "
                f"the last of them step {step + 1}; these updates were skipped. Check "
                "optim.learning_rate, the rewards and model.dtype"
            )
        metrics = self.training_metrics(totals)
        self.warn_of_mismatch(metrics, step)
        metrics |= {
            "grad_norm": float(np.mean(grad_norms)),
            "learning_rate": learning_rate,
            "skipped_updates": num_skipped,
            "timing_s/sync": sum(span.end_s - span.begin_s for span in spans),
        }
        return metrics, spans

    def accumulate_gradients(
        self, microbatches: list[Microbatch], advantages: np.ndarray, weights: np.ndarray
    ) -> list[torch.Tensor]:
        """Call `accumulate_gradient` for each micro-batch, and let `early` observe the seconds."""
        begin_s = self.ranks.clock.perf_counter()
        measured = [self.accumulate_gradient(b, advantages, weights) for b in microbatches]
        if self.early is not None and measured:
            measured[-1][0].item()  # waits for a GPU
            self.early.observe(microbatches, self.ranks.clock.perf_counter() - begin_s)
        return measured

    def accumulate_gradient(
        self, batch: Microbatch, advantages: np.ndarray, weights: np.ndarray
    ) -> torch.Tensor:
        """Do forward and backward; return `MEASURED`. advantages, weights: float64 [S]."""
        loss = self.config.loss
        if self.teacher is not None:
            with torch.no_grad():  # first, while the policy keeps no activations
                of_teacher = sampled_hidden(self.teacher.model, batch, self.teacher.kernel)
        hidden = sampled_hidden(self.model, batch, self.kernel, self.on_hidden)
        if self.teacher is None:
            logprob = self._logprobs(self.model, batch, hidden)
            divergence = torch.zeros_like(logprob)
        else:
            logprob, divergence = losses.compare(
                hidden,
                output_head(self.model),
                of_teacher,
                output_head(self.teacher.model),
                batch.target,
                batch.num_generated,
                params=self.params,
                beta=loss.distillation_beta,
                max_logits=MAX_LOGITS,
            )
        if batch.old is None:
            batch.old = logprob.detach()
        advantage, weight = (  # of each token, without waiting for the forward
            torch.from_numpy(values[batch.order])
            .to(logprob, non_blocking=True)
            .repeat_interleave(batch.lengths, output_size=len(logprob))
            for values in (advantages, weights)
        )
        ratio = losses.importance_ratio(
            logprob, batch.old, batch.lengths, loss.importance_sampling_level
        )
        is_clipped = torch.zeros((3, len(logprob)), device=logprob.device)
        if loss.loss_type == "distillation":
            token_loss = divergence
        elif self.own_loss is not None:
            token_loss = self.own_loss(logprob, ratio, advantage)
            losses.check_token_loss(loss.loss_type, token_loss, logprob)
        elif loss.loss_type == "cispo":
            token_loss, is_clipped = losses.cispo_loss(logprob, ratio, advantage, loss.epsilon_high)
        else:
            token_loss, is_clipped = losses.policy_loss(
                ratio, advantage, loss.epsilon_low, loss.epsilon_high, loss.delta
            )
        kl = torch.zeros_like(logprob)
        if self.reference is not None:
            if batch.reference is None or self.params.truncates:
                policy = hidden.detach(), output_head(self.model)
                with torch.no_grad(), adapter_disabled(self.reference):
                    of_reference = sampled_hidden(self.reference, batch, self.kernel)
                    batch.reference = self._logprobs(self.reference, batch, of_reference, policy)
            kl = losses.kl_penalty(logprob, batch.reference, loss.kl_estimator)
        token_loss = token_loss + loss.kl_coef * kl + loss.distillation_coef * divergence
        total = (weight * token_loss).sum()
        with deterministic() if self.is_deterministic else contextlib.nullcontext():
            total.backward()
        mismatch = (batch.old - batch.generated).abs()
        sums = (t.detach().sum() for t in (*is_clipped, kl, divergence, mismatch))
        return torch.stack(
            [total.detach(), *sums, logprob.new_full((), len(logprob)), mismatch.max()]
        )

    def _logprobs(
        self,
        model: PreTrainedModel,
        batch: Microbatch,
        hidden: torch.Tensor,
        policy: tuple[torch.Tensor, OutputHead] | None = None,
    ) -> torch.Tensor:
        """Return log-probabilities of the sampled tokens, [M]. hidden: see `sampled_hidden`."""
        of = batch.target, batch.num_generated, self.params
        return losses.token_logprobs(hidden, output_head(model), *of, MAX_LOGITS, policy)

    def training_metrics(self, totals: list[dict[str, float]]) -> dict[str, float]:
        """Return the metrics of a step from the `MEASURED` of each of its updates.

        The loss is the mean over updates; other means are over the tokens trained on in all
        updates, if there were any. Clips are left out for a single update, whose ratios are 1."""
        total = {name: sum(update[name] for update in totals) for name in MEASURED}
        if total["tokens"] == 0:
            return {"loss": 0.0}
        mean = {name: total[name] / total["tokens"] for name in MEASURED}
        metrics = {
            "loss": total["loss"] / len(totals),
            "sampling/logp_difference/mean": mean["mismatch"],
            "sampling/logp_difference/max": max(update["max_mismatch"] for update in totals),
        }
        if self.reference is not None:
            metrics["kl"] = mean["kl"]
        if self.teacher is not None:
            metrics["divergence"] = mean["divergence"]
        clips = self.own_loss is None and self.config.loss.loss_type != "distillation"
        if len(totals) > 1 and clips:
            metrics["clip_ratio/low_mean"] = mean["low"]
            metrics["clip_ratio/high_mean"] = mean["high"]
            metrics["clip_ratio/region_mean"] = mean["low"] + mean["high"]
            if self.config.loss.delta is not None:
                metrics["clip_ratio/delta_mean"] = mean["delta"]
        return metrics

    def warn_of_mismatch(self, metrics: dict[str, float], step: int) -> None:
        """Warn, once per run, if generation and training differ by more than rounding."""
        dtype, temperature = self.model.dtype, self.params.temperature
        mean = metrics.get("sampling/logp_difference/mean", 0.0)
        limit = MAX_MISMATCH[dtype] / min(temperature, 1.0)
        if self.has_warned_of_mismatch or not mean > limit:
            return
        self.has_warned_of_mismatch = True
        if self.ranks.is_main:
            log(
                f"warning: in step {step + 1} log-probabilities in training differ from those in "
                f"generation by {mean:.1e} on average (sampling/logp_difference/mean), far above "
                f"the rounding of {str(dtype).removeprefix('torch.')}: the two forwards differ. "
                "Look for randomness in the model's own code (dropout, router noise), and try "
                "another model.attention and model.dtype"
            )


def sum_over_ranks(measured: list[torch.Tensor], ranks: Ranks, factor: float) -> dict[str, float]:
    """Return the `MEASURED` of an update; the loss times factor."""
    by_batch = np.zeros((1, len(MEASURED)))
    if measured:
        by_batch = torch.stack(measured).double().cpu().numpy()
    local = np.append(by_batch[:, :-1].sum(axis=0), by_batch[:, -1].max())
    local[MEASURED.index("loss")] *= factor
    by_rank = ranks.all_gather(local)
    total = np.append(by_rank[:, :-1].sum(axis=0), by_rank[:, -1].max())
    return dict(zip(MEASURED, total.tolist(), strict=True))
