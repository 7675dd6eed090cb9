"""The gradient steps: samples balanced over ranks, padding-free micro-batches, one reduction and one optimizer step an update.

A batch makes one update, or `num_iterations` passes of `num_minibatches` updates. The old policy of the probability ratio is the
one that generated the batch. Its log-probabilities are those of training forwards, never the generator's own, so the gradient
depends on the tokens alone: not on how, where or in which batches they were generated. The first update takes them from its
own forward, so that its ratio is exactly 1; the minibatches that come after it get a forward before it.
"""

import itertools
import time
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.distributed import Ranks
from bubblespec.engine.model import forward_hidden, output_head
from bubblespec.engine.packing import pack_sequences
from bubblespec.lora import adapter_disabled
from bubblespec.losses import cispo_loss, importance_ratio, kl_penalty, policy_loss, token_logprobs, token_weights
from bubblespec.optimizer import Optimizer
from bubblespec.rollout import Samples
from bubblespec.timeline import Event


@dataclass
class Microbatch:
    """Packed sequences on the device. N tokens fed, of which M positions predict the response tokens `target`.

    order: sample indices; lengths: response tokens of each; generated: the generator's log-probabilities, float [M];
    old, reference: those of the old policy and of the reference, float [M], once they are known.
    """

    order: list[int]
    lengths: torch.Tensor
    input_ids: torch.Tensor
    sequence_lengths: list[int]
    predicts: torch.Tensor
    target: torch.Tensor
    generated: torch.Tensor
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None


def plan_microbatches(lengths: np.ndarray, world_size: int, max_tokens: int) -> list[list[list[int]]]:
    """Sample indices by rank and micro-batch. lengths: int64 [S], tokens (0 = not trained on).

    Longest first to the rank with the least work so far (linear cost in tokens), then, again longest first, into the first
    micro-batch with room. A pure function of the lengths, so equal tokens give equal micro-batches.
    """
    load = np.zeros(world_size)
    per_rank: list[list[int]] = [[] for _ in range(world_size)]
    for index in np.argsort(-lengths, kind="stable"):
        if lengths[index] == 0:
            break
        rank = int(load.argmin())
        per_rank[rank].append(int(index))
        load[rank] += lengths[index]
    return [_first_fit(indices, lengths, max_tokens) for indices in per_rank]


def _first_fit(indices: list[int], lengths: np.ndarray, max_tokens: int) -> list[list[int]]:
    microbatches, room = [], []
    for index in indices:
        fits = next((i for i, r in enumerate(room) if r >= lengths[index]), None)
        if fits is None:
            fits = len(room)
            microbatches.append([])
            room.append(max_tokens)
        microbatches[fits].append(index)
        room[fits] -= lengths[index]
    return microbatches


def make_microbatch(samples: Samples, order: list[int], device: torch.device) -> Microbatch:
    """Each sequence is its prompt and its response without the last token, which predicts nothing."""
    prompts = [samples.prompt_of(i).token_ids for i in order]
    tokens = [samples.tokens[i] for i in order]
    fed = np.concatenate([np.concatenate((p, t[:-1])) for p, t in zip(prompts, tokens, strict=True)])
    sequence_lengths = [len(p) + len(t) - 1 for p, t in zip(prompts, tokens, strict=True)]
    ends = np.cumsum(sequence_lengths)
    predicts = np.concatenate([np.arange(end - len(t), end) for end, t in zip(ends, tokens, strict=True)])
    return Microbatch(
        order,
        torch.tensor([len(t) for t in tokens], device=device),
        torch.from_numpy(fed.astype(np.int64)).to(device),
        sequence_lengths,
        torch.from_numpy(predicts).to(device),
        torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(device),
        torch.from_numpy(np.concatenate([samples.full_logprob[i] for i in order])).to(device),
    )


def response_logprobs(
    model: PreTrainedModel, batch: Microbatch, temperature: float, max_logits: int, kernel: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of every response token, float [M] each, in one packed forward."""
    packing = pack_sequences(batch.sequence_lengths, batch.input_ids.device)
    hidden = forward_hidden(model, batch.input_ids, packing, kernel)
    return token_logprobs(hidden.index_select(0, batch.predicts), output_head(model), batch.target, temperature, max_logits)


def make_minibatches(
    samples: Samples, has_gradient: np.ndarray, config: Config, ranks: Ranks
) -> tuple[list[list[Microbatch]], np.ndarray]:
    """This rank's micro-batches of every minibatch, and the weight of each sample's tokens, float64 [S].

    Minibatches are whole groups, in the order of the batch, whatever the number of ranks. Each is normalised by its own
    counts, as if it were the whole batch of its update.
    """
    loss, generations = config.loss, samples.num_generations
    lengths, is_used = samples.lengths, _is_used(samples, config)
    sequence_lengths = lengths + np.array([len(samples.prompt_of(i).token_ids) for i in range(len(samples))])
    minibatches, weights = [], np.zeros(len(samples))
    for groups in np.array_split(np.arange(len(samples.prompts)), loss.num_minibatches):
        members = (groups[:, None] * generations + np.arange(generations)).ravel()
        weights[members] = token_weights(loss.loss_type, lengths[members], is_used[members], config.rollout.max_completion_length)
        to_train = np.zeros_like(sequence_lengths)
        to_train[members] = np.where(has_gradient, sequence_lengths, 0)[members]
        plan = plan_microbatches(to_train, ranks.world_size, config.optim.max_tokens_per_microbatch)
        minibatches.append([make_microbatch(samples, order, ranks.device) for order in plan[ranks.rank]])
    return minibatches, weights


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
) -> dict[str, float]:
    """All updates of one step. advantages: float64 [S]. Returns the step's training metrics, equal on all ranks, but for
    `timing_s/sync`, this rank's seconds in gradient reductions, which are noted in `events` too, if given."""
    # Without a KL term a sample of zero advantage (a group of equal rewards) has zero gradient: it is not computed.
    has_gradient = _is_used(samples, config) & ((advantages != 0) | (reference is not None))
    minibatches, weights = make_minibatches(samples, has_gradient, config, ranks)
    model.train(config.model.gradient_checkpointing)  # dropout is off; training mode is what enables checkpointing
    for batch in itertools.chain.from_iterable(minibatches[1:]):
        with torch.no_grad():
            batch.old = _logprobs(model, batch, config, kernel)[0]
    sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=ranks.device)
    largest_mismatch, sync_s, grad_norms = 0.0, 0.0, []
    updates = minibatches * config.loss.num_iterations
    for microbatches in updates:
        for batch in microbatches:
            sums += _accumulate_gradient(model, reference, batch, advantages, weights, config, kernel)
            largest_mismatch = max(largest_mismatch, (batch.old - batch.generated).abs().max().item())
        started = time.perf_counter()
        optimizer.reduce(ranks)
        ended = time.perf_counter()
        sync_s += ended - started
        if events is not None:
            events.append(("sync", started, ended))
        grad_norm, learning_rate = optimizer.step(step)
        grad_norms.append(grad_norm)
    model.eval()
    everyone = ranks.gather(np.append(sums.cpu().numpy(), largest_mismatch))
    metrics = _training_metrics(everyone, len(updates), config.loss.delta is not None, reference is not None)
    return metrics | {"grad_norm": float(np.mean(grad_norms)), "learning_rate": learning_rate, "timing_s/sync": sync_s}


_SUMS = ("loss", "entropy", "low", "high", "delta", "kl", "mismatch", "tokens")


def _accumulate_gradient(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    batch: Microbatch,
    advantages: np.ndarray,
    weights: np.ndarray,
    config: Config,
    kernel: str,
) -> torch.Tensor:
    """Forward and backward of one micro-batch. Returns its `_SUMS`."""
    loss = config.loss
    logprob, entropy = _logprobs(model, batch, config, kernel)
    if batch.old is None:
        batch.old = logprob.detach()
    advantage, weight = (
        torch.from_numpy(values[batch.order]).to(logprob).repeat_interleave(batch.lengths) for values in (advantages, weights)
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
    measured = (t.detach().sum() for t in (entropy, *is_clipped, kl, mismatch))
    return torch.stack([total.detach(), *measured, logprob.new_tensor(len(logprob))])


def _logprobs(model: PreTrainedModel, batch: Microbatch, config: Config, kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
    return response_logprobs(model, batch, config.rollout.temperature, config.optim.max_logits_per_chunk, kernel)


def _is_used(samples: Samples, config: Config) -> np.ndarray:
    """Which samples are in the loss, bool [S]."""
    return ~samples.is_truncated if config.loss.mask_truncated_completions else np.ones(len(samples), bool)


def _training_metrics(everyone: np.ndarray, num_updates: int, has_delta: bool, has_reference: bool) -> dict[str, float]:
    """everyone: [ranks, sums and the largest mismatch]. The loss is the mean over updates; other means are over the tokens
    that were trained on in all updates, if there were any."""
    total = dict(zip(_SUMS, everyone[:, :-1].sum(axis=0).tolist(), strict=True))
    tokens = total["tokens"]
    if tokens == 0:
        return {"loss": 0.0}
    metrics = {
        "loss": total["loss"] / num_updates,
        "entropy": total["entropy"] / tokens,
        "clip_ratio/low_mean": total["low"] / tokens,
        "clip_ratio/high_mean": total["high"] / tokens,
        "clip_ratio/region_mean": (total["low"] + total["high"]) / tokens,
        "sampling/logp_difference/mean": total["mismatch"] / tokens,
        "sampling/logp_difference/max": float(everyone[:, -1].max()),
    }
    if has_delta:
        metrics["clip_ratio/delta_mean"] = total["delta"] / tokens
    return metrics | ({"kl": total["kl"] / tokens} if has_reference else {})
