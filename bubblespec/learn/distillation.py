"""On-policy distillation: how far the policy is from a teacher on the policy's own responses.

Both distributions are over the whole vocabulary, at the temperature of the rollout, at each sampled
token (GKD, Agarwal et al. 2024, arXiv 2306.13649). As there, no gradient flows through sampling.

Shape legend: M sampled tokens of a micro-batch, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from bubblespec.engine.ops import has_kernels
from bubblespec.engine.output_head import OutputHead
from bubblespec.learn.losses import COMPACT, in_chunks, in_one_pass, logits_of


@dataclass(frozen=True)
class Teacher:
    """A frozen model that the policy learns from."""

    model: PreTrainedModel
    kernel: str
    """Attention kernel; see `choose_kernel`."""


def divergence(log_q: torch.Tensor, log_p: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the generalized Jensen-Shannon divergence per token, [M] (GKD, equation 1).

    For the teacher's p, the student's q and the mixture m = beta p + (1 - beta) q the divergence is
    beta KL(p || m) + (1 - beta) KL(q || m), which vanishes as beta goes to 0 or 1. So beta 0 stands
    for KL(p || q) and beta 1 for KL(q || p), as in TRL. log_q, log_p: log-probabilities [M, V].
    """
    if beta == 0:
        return _kl(log_p, log_q)
    if beta == 1:
        return _kl(log_q, log_p)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def _kl(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """Return KL(a || b) of each row."""
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def compare(
    hidden: torch.Tensor,
    head: OutputHead,
    teacher_hidden: torch.Tensor,
    teacher_head: OutputHead,
    target: torch.Tensor,
    *,
    temperature: float,
    beta: float,
    max_logits: int,
) -> torch.Tensor:
    """Return log-probabilities of the targets, and divergences from the teacher, float [2, M].

    hidden, teacher_hidden: [M, hidden size of the model]. Chunks as in `token_logprobs`, of half
    the tokens, as there are two distributions; the teacher's logits, too, are computed again in the
    backward pass.
    """

    def of_chunk(own: torch.Tensor, other: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        log_q = logits_of(own, head, temperature).log_softmax(-1)
        with torch.no_grad():
            log_p = logits_of(other, teacher_head, temperature).log_softmax(-1)
        logprob = log_q.gather(-1, target[:, None])[:, 0]
        return torch.stack((logprob, divergence(log_q, log_p, beta)))

    def by_kernels(own: torch.Tensor, other: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = teacher_head.finish(teacher_head.linear(other))
        return in_one_pass(own, target, logits, head=head, temperature=temperature, beta=beta)

    weights = [h.linear.get_parameter("weight") for h in (head, teacher_head)]
    vocab = max(map(len, weights))
    if all(has_kernels(weight.device, weight.dtype) for weight in weights):
        rows = COMPACT * max_logits // (2 * vocab)
        return in_chunks(by_kernels, rows, hidden, teacher_hidden, target)
    return in_chunks(of_chunk, max_logits // (2 * vocab), hidden, teacher_hidden, target)
