"""The policy loss, token by token, and the weights that turn token losses into one number.

Every normalisation is a weight per token worked out from the *global* minibatch, so a rank can sum
its own tokens in any order and any split into micro-batches, and 1, 2 or 4 ranks get the same loss.
docs/recipes.md maps recipes to these functions.

Tokens are sampled ones throughout: what an environment has added to a response is in no loss, no
mean and no length here.

On-policy distillation: how far the policy is from a teacher on the policy's own responses. Both
distributions are over the whole vocabulary, at the temperature of the rollout, at each sampled
token (GKD, Agarwal et al. 2024, arXiv 2306.13649). As there, no gradient flows through sampling.

With top_p, top_k or a minimum length, the policy is the distribution that was sampled from: softmax
over the tokens that sampling keeps. Which ones is computed again from the logits in training, and
is a constant in the gradient. The reference and the teacher are restricted to the same tokens, in
place of the whole vocabulary, so a divergence from them is finite, and 0 for equal weights.

Shape legend: M sampled tokens of a micro-batch, S sequences of the global minibatch (all of the
batch, if that is one minibatch), V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from bubblespec.config.imports import call, import_function
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.model import OutputHead
from bubblespec.engine.ops import HEAD, has_kernels
from bubblespec.engine.sampling import kept_tokens
from bubblespec.errors import InputError, one_line, shown
from bubblespec.learn.optimizer import add_to

# Kernels keep logits alone, in two bytes, which their gradient overwrites; elsewhere there are four
# numbers of four bytes. So many times as many logits take twice the memory, and the gradient of the
# head is added to its buffer two or three times per micro-batch of a 1.5B.
COMPACT = 16

# With truncated sampling, sorting takes further memory: so many times as few tokens at once.
TRUNCATED = 4
BARRED = -1e30  # a logit without probability; 0 * (inf - inf) would be no number

TokenLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def importance_ratio(
    logprob: torch.Tensor, old_logprob: torch.Tensor, lengths: torch.Tensor, level: str
) -> torch.Tensor:
    """Return policy / old policy, [M]: of each token or, at level "sequence", of its sequence.

    logprob, old_logprob: [M]; lengths: int64, tokens of each sequence, which sum to M.

    A sequence's ratio is the geometric mean of its tokens' ratios (GSPO, arXiv 2507.18071, equation
    7), with the gradient of each token's own log-probability (GSPO-token, equation 14). As a
    sequence's tokens share advantage and weight, both forms have equal gradients, and this one
    differentiates no sum over segments, which has no fixed order on a GPU.
    """
    log_ratio = logprob - old_logprob
    if level == "sequence":
        # On a GPU, checking the lengths or finding their sum would wait for all earlier work.
        mean = torch.segment_reduce(log_ratio.detach(), "mean", lengths=lengths, unsafe=True)
        mean = mean.repeat_interleave(lengths, output_size=len(log_ratio))
        log_ratio = mean + (logprob - logprob.detach())
    return torch.exp(log_ratio)


def policy_loss(
    ratio: torch.Tensor,
    advantage: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's clipped surrogate per token, [M], and where it is bounded, bool [3, M].

    The bounds are the lower clip, the upper clip and delta (Schulman et al. 2017, equation 7;
    separate clips: DAPO, arXiv 2503.14476). With `delta`, above 1 + epsilon_high, a negative
    advantage costs at most delta times itself (dual clip, Ye et al. 2020, arXiv 1912.09729,
    equation 5). ratio, advantage: [M].
    """
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(bounded * advantage, clipped * advantage)
    is_low = (ratio < 1 - epsilon_low) & (advantage < 0)
    is_high = (ratio > 1 + epsilon_high) & (advantage > 0)
    is_delta = torch.zeros_like(is_low) if delta is None else (ratio > delta) & (advantage < 0)
    return loss, torch.stack((is_low, is_high, is_delta))


def cispo_loss(
    logprob: torch.Tensor, ratio: torch.Tensor, advantage: torch.Tensor, epsilon_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of CISPO, as `policy_loss` does (MiniMax-M1, arXiv 2506.13585, equation 4).

    It is REINFORCE with an importance weight that carries no gradient and is cut to at most
    epsilon_high, so no token loses its gradient. A cut weight counts as an upper clip, whatever the
    sign of the advantage. All tensors: [M].
    """
    is_high = ratio > epsilon_high
    loss = -ratio.detach().clamp(max=epsilon_high) * advantage * logprob
    return loss, torch.stack((torch.zeros_like(is_high), is_high, torch.zeros_like(is_high)))


def load_loss(path: str) -> TokenLoss:
    """Return the user's own loss, once it has passed a trial on three tokens. Raises InputError.

    It is called with logprob, ratio and advantage, [M] each, and returns each token's loss, [M].
    """
    function = import_function(
        "loss.loss_type", path, "my_module.my_loss", ("logprob", "ratio", "advantage")
    )
    logprob = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    ratio = torch.exp(logprob - logprob.detach())
    function = partial(call, function)
    try:
        loss = function(logprob, ratio, torch.tensor([1.0, -1.0, 0.0]))
    except Exception as error:  # the user's own code
        problem = f"failed in a trial on three tokens: {one_line(error)}"
        raise InputError(f"loss.loss_type: {path} {problem}") from error
    check_token_loss(path, loss, logprob)
    if not loss.isfinite().all():
        raise InputError(f"loss.loss_type: {path} is not finite for ratios of 1: {loss.tolist()}")
    if not loss.requires_grad:
        raise InputError(f"loss.loss_type: {path} has no gradient; are its tensors detached?")
    return function


def check_token_loss(path: str, loss: object, logprob: torch.Tensor) -> None:
    """Raise InputError unless the user's own loss has one value per token."""
    if not isinstance(loss, torch.Tensor) or loss.shape != logprob.shape:
        found = shown(loss)
        if isinstance(loss, torch.Tensor):
            found = f"the shape {list(loss.shape)}"
        wanted = f"a tensor [{len(logprob)}], the loss of each token"
        raise InputError(f"loss.loss_type: {path} returned {found}, not {wanted}")


def kl_penalty(
    logprob: torch.Tensor, reference_logprob: torch.Tensor, estimator: str
) -> torch.Tensor:
    """Return an estimate of KL(policy || reference) per token, [M].

    The estimators are Schulman's (joschu.net/blog/kl-approx.html), of d = log policy - log
    reference. As values, k1 and k3 are unbiased, and k3 is never negative. In a loss only the
    gradient counts. For samples of the policy its mean is 0 with k1 (pure noise), that of KL(policy
    || reference) with k2, and that of KL(reference || policy) with k3.
    """
    d = logprob - reference_logprob
    if estimator == "k1":
        return d
    return 0.5 * d.square() if estimator == "k2" else torch.expm1(-d) + d


def common_factor(
    loss_type: str, lengths: np.ndarray, is_used: np.ndarray, max_completion_length: int
) -> float:
    """Return the factor of a token's weight that all sequences of the update share.

    It is known once all sequences are. With `local_weights` it makes the loss

    - grpo: the mean over sequences of the mean over their tokens (arXiv 2402.03300, equation 3);
    - dr_grpo: the sum over tokens / (S * max_completion_length) (arXiv 2503.20783);
    - dapo, cispo, distillation, and the user's own: the mean over all used tokens (DAPO, arXiv
      2503.14476, equation 12; CISPO, arXiv 2506.13585, equation 4).

    lengths: sampled tokens of the update's S sequences; is_used: False for sequences that are
    masked out of the loss (they still count as sequences).
    """
    if loss_type == "grpo":
        return 1.0 / len(lengths)
    if loss_type == "dr_grpo":
        return 1.0 / (len(lengths) * max_completion_length)
    return 1.0 / max(int(lengths[is_used].sum()), 1)


def local_weights(loss_type: str, lengths: np.ndarray) -> np.ndarray:
    """Return the factor of a token's weight that depends on its sequence alone, float64 [S]."""
    return 1.0 / np.maximum(lengths, 1) if loss_type == "grpo" else np.ones(len(lengths))


def token_logprobs(
    hidden: torch.Tensor,
    head: OutputHead,
    target: torch.Tensor,
    num_generated: torch.Tensor,
    params: SamplingParams,
    max_logits: int,
    policy: tuple[torch.Tensor, OutputHead] | None = None,
) -> torch.Tensor:
    """Return the log-probability of each target in the distribution that is sampled, float [M].

    hidden: [M, hidden size]; target, num_generated: int64 [M], see `kept_tokens`; policy: hidden
    states and head by which tokens are kept, if not the given ones. Above `max_logits` logits,
    chunks are computed one by one and again in the backward pass. The gradient of a head with a
    `main_grad` (optimizer.py) is added to that.
    """
    weight = head.linear.get_parameter("weight")
    if params.truncates:
        states, own_head = policy or (hidden, head)
        compute = partial(_truncated_logprob, head=head, policy_head=own_head, params=params)
        tensors = (hidden, target, num_generated) + ((states,) if policy else ())
        return in_chunks(compute, max_logits // (TRUNCATED * len(weight)), *tensors)
    if has_kernels(weight.device, weight.dtype, HEAD):
        compute = partial(in_one_pass, head=head, temperature=params.temperature)
        return in_chunks(compute, COMPACT * max_logits // len(weight), hidden, target)[0]
    compute = partial(_logprob, head=head, temperature=params.temperature)
    return in_chunks(compute, max_logits // len(weight), hidden, target)


def in_chunks(
    compute: Callable[..., torch.Tensor], rows: int, *tensors: torch.Tensor
) -> torch.Tensor:
    """Return compute(*tensors), [..., M], whose tensors are [M, ...], by chunks of `rows` tokens.

    Several chunks are computed one by one, and again in the backward pass.
    """
    if len(tensors[0]) <= rows:
        return compute(*tensors)
    chunks = zip(*(tensor.split(max(1, rows)) for tensor in tensors), strict=True)
    again = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([again(*chunk) for chunk in chunks], dim=-1)


class _ToMainGrad(torch.autograd.Function):
    """Identity on a parameter, whose gradient goes to the optimizer's float32 buffer.

    Autograd would add up the chunks in the parameter's type.
    """

    @staticmethod
    def forward(ctx, param: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
        ctx.main_grad = main_grad
        return param.view_as(param)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[None, None]:
        add_to(ctx.main_grad, grad)
        return None, None


def product_of(hidden: torch.Tensor, head: OutputHead) -> torch.Tensor:
    """Return the product with the head's weight, [M, V]."""
    params = {
        name: _ToMainGrad.apply(p, p.main_grad)
        for name, p in head.linear.named_parameters()
        if hasattr(p, "main_grad")
    }
    return functional_call(head.linear, params, (hidden,))


def logits_of(hidden: torch.Tensor, head: OutputHead, temperature: float) -> torch.Tensor:
    """Return logits / temperature of hidden states, [M, num_tokens], in float32 at least."""
    logits = head.logits(product_of(hidden, head))
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1.0 else logits / temperature


def _logprob(
    hidden: torch.Tensor, target: torch.Tensor, head: OutputHead, temperature: float
) -> torch.Tensor:
    return _chosen(logits_of(hidden, head, temperature), target)


def _chosen(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return logits.gather(-1, target[:, None])[:, 0] - logits.logsumexp(-1)


def _truncated_logprob(
    hidden: torch.Tensor,
    target: torch.Tensor,
    num_generated: torch.Tensor,
    policy: torch.Tensor | None = None,
    *,
    head: OutputHead,
    policy_head: OutputHead,
    params: SamplingParams,
) -> torch.Tensor:
    """Compute log-probabilities among kept tokens, [M]; policy: hidden states that decide these."""
    logits = logits_of(hidden, head, params.temperature)
    with torch.no_grad():
        own = logits if policy is None else logits_of(policy, policy_head, params.temperature)
        kept = kept_tokens(own, target, num_generated, params)
    return _chosen(logits.masked_fill(~kept, BARRED), target)


def in_one_pass(
    hidden: torch.Tensor,
    target: torch.Tensor,
    teacher_logits: torch.Tensor | None = None,
    *,
    head: OutputHead,
    temperature: float,
    beta: float = 0.0,
) -> torch.Tensor:
    """Compute log-probabilities, and divergences from a teacher, float32 [1 or 2, M], by kernels.

    teacher_logits: [M, num_tokens or more], not divided by the temperature."""
    from bubblespec.engine.ops.triton_training import HeadValues

    logits = head.finish(product_of(hidden, head))
    options = head.num_tokens, 1.0 / temperature, beta
    return HeadValues.apply(logits, target, teacher_logits, *options)


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
    num_generated: torch.Tensor,
    *,
    params: SamplingParams,
    beta: float,
    max_logits: int,
) -> torch.Tensor:
    """Return log-probabilities of the targets, and divergences from the teacher, float [2, M].

    hidden, teacher_hidden: [M, hidden size of the model]; the others as in `token_logprobs`. Chunks
    are half as large as there, as there are two distributions; the teacher's logits, too, are
    computed again in the backward pass.
    """
    temperature = params.temperature

    def of_chunk(own, other, target, num_generated) -> torch.Tensor:
        log_q = logits_of(own, head, temperature)
        with torch.no_grad():
            log_p = logits_of(other, teacher_head, temperature)
            if params.truncates:
                is_barred = ~kept_tokens(log_q, target, num_generated, params)
                log_p = log_p.masked_fill(is_barred, BARRED)
            log_p = log_p.log_softmax(-1)
        if params.truncates:
            log_q = log_q.masked_fill(is_barred, BARRED)
        log_q = log_q.log_softmax(-1)
        logprob = log_q.gather(-1, target[:, None])[:, 0]
        return torch.stack((logprob, divergence(log_q, log_p, beta)))

    def by_kernels(own: torch.Tensor, other: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = teacher_head.finish(teacher_head.linear(other))
        return in_one_pass(own, target, logits, head=head, temperature=temperature, beta=beta)

    weights = [h.linear.get_parameter("weight") for h in (head, teacher_head)]
    vocab = max(map(len, weights))
    rows = max_logits // (2 * vocab)
    if params.truncates:
        rows //= TRUNCATED
    elif all(has_kernels(weight.device, weight.dtype, HEAD) for weight in weights):
        return in_chunks(by_kernels, COMPACT * rows, hidden, teacher_hidden, target)
    return in_chunks(of_chunk, rows, hidden, teacher_hidden, target, num_generated)


@dataclass(frozen=True)
class Teacher:
    """A frozen model that the policy learns from."""

    model: PreTrainedModel
    kernel: str
    """Attention kernel; see `choose_kernel`."""
