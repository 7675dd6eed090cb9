"""The gradient step: samples balanced over ranks, padding-free micro-batches, one reduction, one optimizer step.

On an on-policy step the probability ratio is taken from the training forward's own detached log-probability, so the
gradient depends on the tokens alone: not on how, where or in which batches they were generated.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.distributed import Ranks
from bubblespec.engine.model import forward_hidden, output_head
from bubblespec.engine.packing import pack_sequences
from bubblespec.losses import kl_k3, policy_loss, token_logprobs, token_weights
from bubblespec.optimizer import Optimizer
from bubblespec.rollout import Samples
from bubblespec.timeline import Event


@dataclass
class Microbatch:
    """Packed sequences on the device. N tokens fed, of which M positions predict the response tokens `target`.

    order: sample indices; lengths: response tokens of each; generated: the generator's log-probabilities, float [M].
    """

    order: list[int]
    lengths: torch.Tensor
    input_ids: torch.Tensor
    sequence_lengths: list[int]
    predicts: torch.Tensor
    target: torch.Tensor
    generated: torch.Tensor


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
    loss = config.loss
    is_used = ~samples.is_truncated if loss.mask_truncated_completions else np.ones(len(samples), bool)
    weights = token_weights(loss.loss_type, samples.lengths, is_used, config.rollout.max_completion_length)
    # Without a KL term a sample of zero advantage (a group of equal rewards) has zero gradient: it is not computed.
    has_gradient = is_used & ((advantages != 0) | (reference is not None))
    sequence_lengths = samples.lengths + np.array([len(samples.prompt_of(i).token_ids) for i in range(len(samples))])
    plan = plan_microbatches(
        np.where(has_gradient, sequence_lengths, 0), ranks.world_size, config.optim.max_tokens_per_microbatch
    )
    microbatches = [make_microbatch(samples, order, ranks.device) for order in plan[ranks.rank]]
    old_logprobs: list[torch.Tensor] = []
    model.train(config.model.gradient_checkpointing)  # dropout is off; training mode is what enables checkpointing
    metrics, sync_s = {}, 0.0
    for iteration in range(loss.num_iterations):
        sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=ranks.device)
        largest_mismatch = 0.0
        for number, batch in enumerate(microbatches):
            logprob, entropy = response_logprobs(
                model, batch, config.rollout.temperature, config.optim.max_logits_per_chunk, kernel
            )
            if iteration == 0:
                old_logprobs.append(logprob.detach())
            per_token = _per_token(batch, advantages, weights, logprob)
            token_loss, is_clipped = policy_loss(
                logprob, old_logprobs[number], per_token["advantage"], loss.epsilon_low, loss.epsilon_high
            )
            kl = torch.zeros_like(logprob)
            if reference is not None:
                with torch.no_grad():
                    reference_logprob, _ = response_logprobs(
                        reference, batch, config.rollout.temperature, config.optim.max_logits_per_chunk, kernel
                    )
                kl = kl_k3(logprob, reference_logprob)
            total = (per_token["weight"] * (token_loss + loss.kl_coef * kl)).sum()
            total.backward()
            mismatch = (logprob.detach() - batch.generated).abs()
            sums += torch.stack(
                [
                    total.detach(),
                    *(t.detach().sum() for t in (entropy, is_clipped, kl, mismatch)),
                    logprob.new_tensor(len(logprob)),
                ]
            )
            largest_mismatch = max(largest_mismatch, mismatch.max().item())
        started = time.perf_counter()
        optimizer.reduce(ranks)
        ended = time.perf_counter()
        sync_s += ended - started
        if events is not None:
            events.append(("sync", started, ended))
        everyone = ranks.gather(np.append(sums.cpu().numpy(), largest_mismatch))
        grad_norm, learning_rate = optimizer.step(step)
        if iteration == 0:
            metrics = _training_metrics(everyone, reference is not None)
            metrics |= {"grad_norm": grad_norm, "learning_rate": learning_rate}
        elif iteration == loss.num_iterations - 1:
            last = _training_metrics(everyone, False)
            metrics["clip_ratio/region_mean"] = last.get("clip_ratio/region_mean", 0.0)
    model.eval()
    return metrics | {"timing_s/sync": sync_s}


_SUMS = ("loss", "entropy", "clipped", "kl", "mismatch", "tokens")


def _per_token(batch: Microbatch, advantages: np.ndarray, weights: np.ndarray, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """A sample's advantage and weight repeated for each of its tokens, [M]."""
    return {
        name: torch.from_numpy(values[batch.order]).to(like).repeat_interleave(batch.lengths)
        for name, values in (("advantage", advantages), ("weight", weights))
    }


def _training_metrics(everyone: np.ndarray, has_reference: bool) -> dict[str, float]:
    """everyone: [ranks, sums and the largest mismatch]. Means are over the tokens that were trained on, if there were any."""
    total = dict(zip(_SUMS, everyone[:, :-1].sum(axis=0).tolist(), strict=True))
    tokens = total["tokens"]
    if tokens == 0:
        return {"loss": 0.0}
    metrics = {
        "loss": total["loss"],
        "entropy": total["entropy"] / tokens,
        "clip_ratio/region_mean": total["clipped"] / tokens,
        "sampling/logp_difference/mean": total["mismatch"] / tokens,
        "sampling/logp_difference/max": float(everyone[:, -1].max()),
    }
    return metrics | ({"kl": total["kl"] / tokens} if has_reference else {})
