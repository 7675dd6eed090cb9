"""The gradient steps: samples balanced over ranks, padding-free micro-batches, one reduction and one optimizer step an update.

A batch makes one update, or `num_iterations` passes of `num_minibatches` updates. The old policy of the probability ratio is the
one that generated the batch. Its log-probabilities are those of training forwards, never the generator's own, so the gradient
depends on the tokens alone: not on how, where or in which batches they were generated. The first update takes them from its
own forward, so that its ratio is exactly 1; the minibatches that come after it get a forward before it.
"""

import math
import time

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.engine.model import forward_hidden, output_head
from bubblespec.engine.packing import pack_sequences
from bubblespec.learn.lora import adapter_disabled
from bubblespec.learn.losses import cispo_loss, importance_ratio, kl_penalty, policy_loss, token_logprobs
from bubblespec.learn.microbatch import Microbatch, is_in_loss, make_minibatches
from bubblespec.learn.optimizer import Optimizer
from bubblespec.learn.out_of_memory import TokenBudget, run_within_memory
from bubblespec.ranks.collectives import Ranks
from bubblespec.rollout.placement import Samples
from bubblespec.telemetry.timeline import Event


def response_logprobs(
    model: PreTrainedModel, batch: Microbatch, temperature: float, max_logits: int, kernel: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of every response token, float [M] each, in one packed forward."""
    packing = pack_sequences(batch.sequence_lengths, batch.input_ids.device)
    hidden = forward_hidden(model, batch.input_ids, packing, kernel)
    return token_logprobs(hidden.index_select(0, batch.predicts), output_head(model), batch.target, temperature, max_logits)


def train_on_samples(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    optimizer: Optimizer,
    samples: Samples,
    advantages: np.ndarray,
    config: Config,
    ranks: Ranks,
    step: int,
    kernel: str,
    events: list[Event] | None = None,
    budget: TokenBudget | None = None,
) -> dict[str, float]:
    """All updates of one step. advantages: float64 [S]. Returns the step's training metrics, equal on all ranks, but for
    `timing_s/sync`, this rank's seconds in gradient reductions, which are noted in `events` too, if given.

    An update whose loss or gradient is not finite is left out, on all ranks alike; `skipped_updates` counts them.
    """
    budget = budget or TokenBudget(config.optim.max_tokens_per_microbatch)
    # Without a KL term a sample of zero advantage (a group of equal rewards) has zero gradient: it is not computed.
    has_gradient = is_in_loss(samples, config) & ((advantages != 0) | (reference is not None))
    minibatches, weights = make_minibatches(samples, has_gradient, config, ranks, budget.max_tokens)

    @torch.no_grad()
    def find_old(batch: Microbatch) -> None:
        batch.old = _logprobs(model, batch, config, kernel)[0]

    def accumulate(batch: Microbatch) -> torch.Tensor:
        return _accumulate_gradient(model, reference, batch, advantages, weights, config, kernel)

    for microbatches in minibatches[1:]:
        run_within_memory(find_old, microbatches, lambda: None, samples, budget, ranks)
    totals, grad_norms, num_skipped, sync_s = [], [], 0, 0.0
    for number, microbatches in enumerate(minibatches * config.loss.num_iterations):

        def restart(number=number, microbatches=microbatches) -> None:
            optimizer.clear()
            for batch in microbatches if number == 0 else ():
                batch.old = None  # the first update's comes from the very forward that is differentiated

        measured = run_within_memory(accumulate, microbatches, restart, samples, budget, ranks)
        started = time.perf_counter()
        optimizer.reduce(ranks)
        ended = time.perf_counter()
        sync_s += ended - started
        if events is not None:
            events.append(("sync", started, ended))
        totals.append(_sum_over_ranks(measured, ranks))
        is_finite = math.isfinite(totals[-1]["loss"])
        grad_norm, learning_rate = optimizer.step(step, is_finite)
        grad_norms.append(grad_norm)
        num_skipped += not (is_finite and math.isfinite(grad_norm))
    metrics = _training_metrics(totals, config.loss.delta is not None, reference is not None)
    metrics |= {"grad_norm": float(np.mean(grad_norms)), "learning_rate": learning_rate, "skipped_updates": num_skipped}
    return metrics | {"timing_s/sync": sync_s}


_MEASURED = ("loss", "entropy", "low", "high", "delta", "kl", "mismatch", "tokens", "largest_mismatch")


def _accumulate_gradient(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    batch: Microbatch,
    advantages: np.ndarray,
    weights: np.ndarray,
    config: Config,
    kernel: str,
) -> torch.Tensor:
    """Forward and backward of one micro-batch. Returns its `_MEASURED`, sums but for the last."""
    loss = config.loss
    logprob, entropy = _logprobs(model, batch, config, kernel)
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
        token_loss, is_clipped = policy_loss(ratio, advantage, loss.epsilon_low, loss.epsilon_high, loss.delta)
    kl = torch.zeros_like(logprob)
    if reference is not None:
        if batch.reference is None:
            with torch.no_grad(), adapter_disabled(reference):
                batch.reference = _logprobs(reference, batch, config, kernel)[0]
        kl = kl_penalty(logprob, batch.reference, loss.kl_estimator)
    total = (weight * (token_loss + loss.kl_coef * kl)).sum()
    total.backward()
    mismatch = (batch.old - batch.generated).abs()
    sums = (t.detach().sum() for t in (entropy, *is_clipped, kl, mismatch))
    return torch.stack([total.detach(), *sums, logprob.new_full((), len(logprob)), mismatch.max()])


def _sum_over_ranks(measured: list[torch.Tensor], ranks: Ranks) -> dict[str, float]:
    """`_MEASURED` of an update, from this rank's micro-batches."""
    own = torch.stack(measured).double().cpu().numpy() if measured else np.zeros((1, len(_MEASURED)))
    everyone = ranks.gather(np.append(own[:, :-1].sum(axis=0), own[:, -1].max()))
    total = np.append(everyone[:, :-1].sum(axis=0), everyone[:, -1].max())
    return dict(zip(_MEASURED, total.tolist(), strict=True))


def _logprobs(model: PreTrainedModel, batch: Microbatch, config: Config, kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
    return response_logprobs(model, batch, config.rollout.temperature, config.optim.max_logits_per_chunk, kernel)


def _training_metrics(totals: list[dict[str, float]], has_delta: bool, has_reference: bool) -> dict[str, float]:
    """totals: `_MEASURED` of each update. The loss is the mean over updates; other means are over the tokens that were
    trained on in all updates, if there were any."""
    total = {name: sum(update[name] for update in totals) for name in _MEASURED}
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
