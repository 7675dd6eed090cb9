"""The policy loss, token by token, and the weights that turn token losses into one number.

Every normalisation is a weight per token worked out from the *global* batch, so a rank can sum its own tokens in any order
and any split into micro-batches, and 1, 2 or 4 ranks get the same loss.

Shape legend: M response tokens of a micro-batch, S sequences of the global batch, V vocabulary.
"""

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint


def policy_loss(
    logprob: torch.Tensor, old_logprob: torch.Tensor, advantage: torch.Tensor, epsilon_low: float, epsilon_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate per token (Schulman et al. 2017, equation 7), with separate clips (DAPO, arXiv 2503.14476).

    All tensors: [M]. Returns (loss [M], whether the clip bounds the token's loss, bool [M]).
    """
    ratio = torch.exp(logprob - old_logprob)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    is_clipped = ((ratio < 1 - epsilon_low) & (advantage < 0)) | ((ratio > 1 + epsilon_high) & (advantage > 0))
    return loss, is_clipped


def kl_k3(logprob: torch.Tensor, reference_logprob: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimator of KL(policy || reference) per token: r - 1 - log r with r = reference / policy. [M] -> [M]."""
    log_ratio = reference_logprob - logprob
    return torch.exp(log_ratio) - log_ratio - 1


def token_weights(loss_type: str, lengths: np.ndarray, is_used: np.ndarray, max_completion_length: int) -> np.ndarray:
    """Weight of each token of each sequence, float64 [S], so that the loss is the weighted sum over all tokens.

    lengths: response tokens; is_used: False for sequences that are masked out of the loss (they still count as sequences).
    grpo: mean over sequences of the mean over their tokens; dr_grpo: sum over tokens / (S * max_completion_length);
    dapo: mean over all used tokens of the batch.
    """
    if loss_type == "grpo":
        weight = 1.0 / (len(lengths) * np.maximum(lengths, 1))
    elif loss_type == "dr_grpo":
        weight = np.full(len(lengths), 1.0 / (len(lengths) * max_completion_length))
    elif loss_type == "dapo":
        weight = np.full(len(lengths), 1.0 / max(int(lengths[is_used].sum()), 1))
    else:
        raise ValueError(f"loss.loss_type: {loss_type} is not one of grpo, dr_grpo, dapo")
    return np.where(is_used, weight, 0.0)


def token_logprobs(
    hidden: torch.Tensor,
    head: torch.nn.Module,
    target: torch.Tensor,
    temperature: float,
    max_logits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of its distribution, softmax(logits / temperature).

    hidden: [M, hidden size]; target: int64 [M]. Returns float [M] twice; the entropy carries no gradient. At most `max_logits`
    logits exist at once: above that, chunks are computed one by one and again in the backward pass.
    """
    vocab = head.weight.shape[0]
    if hidden.shape[0] * vocab <= max_logits:
        return _logprob_and_entropy(hidden, head, target, temperature)
    rows = max(1, max_logits // vocab)
    parts = [
        checkpoint(_logprob_and_entropy, h, head, t, temperature, use_reentrant=False, preserve_rng_state=False)
        for h, t in zip(hidden.split(rows), target.split(rows), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _logprob_and_entropy(hidden, head, target, temperature):
    logits = head(hidden)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    log_z = logits.logsumexp(-1)
    logprob = logits.gather(-1, target[:, None])[:, 0] - log_z
    with torch.no_grad():
        probability = (logits - log_z[:, None]).exp_()
        entropy = log_z - (probability * logits).sum(-1)
    return logprob, entropy
