"""Every term of the loss against reference_step.py, sequence by sequence."""

import math

import numpy as np
import pytest
import torch

from bubblespec.config import LossConfig, OptimConfig
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.output_head import OutputHead
from bubblespec.learn.losses import (
    cispo_loss,
    common_factor,
    importance_ratio,
    kl_penalty,
    local_weights,
    policy_loss,
    token_logprobs,
)
from bubblespec.learn.optimizer import Optimizer
from tests.helpers.reference_step import kl_estimate, mean_loss, token_losses

RNG = np.random.default_rng(0)
M = 200


def plain_losses(logprob, old, advantages: list[float], lengths: list[int], **loss):
    """reference_step.token_losses of each sequence, [M], and the clips, bool [3, M]."""
    sequences = zip(logprob.split(lengths), old.split(lengths), advantages, strict=True)
    by_sequence = [
        token_losses(p, o, advantage, LossConfig(**loss)) for p, o, advantage in sequences
    ]
    none = logprob.new_zeros(len(logprob), dtype=torch.bool).split(lengths)
    names = ("low", "high", "delta")
    clips = [
        torch.cat([by_name.get(name, n) for (_, by_name), n in zip(by_sequence, none, strict=True)])
        for name in names
    ]
    return torch.cat([values for values, _ in by_sequence]), torch.stack(clips)


@pytest.mark.parametrize("delta", [None, 1.5])
def test_policy_loss_and_its_gradient(delta):
    logprob = torch.from_numpy(RNG.normal(-1, 0.5, M)).requires_grad_()
    old = torch.from_numpy(logprob.detach().numpy() + RNG.normal(0, 0.4, M))
    advantage = torch.from_numpy(RNG.normal(0, 1, M))
    ratio = importance_ratio(logprob, old, torch.tensor([M]), "token")
    loss, is_clipped = policy_loss(ratio, advantage, epsilon_low=0.1, epsilon_high=0.3, delta=delta)
    options = {"epsilon_low": 0.1, "epsilon_high": 0.3, "delta": delta}
    wanted, wanted_clips = plain_losses(logprob, old, advantage.tolist(), [1] * M, **options)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    assert torch.equal(is_clipped, wanted_clips)
    assert all(count > 5 for count in is_clipped.sum(1)[: 2 if delta is None else 3])
    loss.sum().backward()
    ratio = (logprob - old).exp().detach()
    np.testing.assert_allclose(
        logprob.grad, torch.where(is_clipped.any(0), 0.0, -ratio * advantage), rtol=1e-12
    )
    np.testing.assert_allclose(
        logprob.grad, torch.autograd.grad(wanted.sum(), logprob)[0], rtol=1e-12
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_on_policy_gradient_is_the_plain_policy_gradient(level):
    """With old = detached logprob the ratio is 1: loss -A, gradient -A."""
    logprob = torch.from_numpy(RNG.normal(-1, 0.5, M)).requires_grad_()
    advantage = torch.from_numpy(RNG.normal(0, 1, M))
    ratio = importance_ratio(logprob, logprob.detach(), torch.tensor([M - 7, 7]), level)
    loss, is_clipped = policy_loss(ratio, advantage, epsilon_low=0.2, epsilon_high=0.2)
    loss.sum().backward()
    assert torch.equal(loss.detach(), -advantage) and torch.equal(logprob.grad, -advantage)
    assert not is_clipped.any()


def test_sequence_ratio_is_the_geometric_mean_with_its_own_gradient():
    """Against the paper's first form, whose one ratio a sequence is differentiated through the mean
    over its tokens."""
    lengths = torch.tensor([5, 1, 30, 14])
    logprob = torch.from_numpy(RNG.normal(-1, 0.5, 50)).requires_grad_()
    old = torch.from_numpy(logprob.detach().numpy() + RNG.normal(0, 0.4, 50))
    advantage = torch.tensor([1.0, -2.0, 0.5, -0.1], dtype=torch.float64)
    weight = torch.tensor([0.1, 0.7, 0.2, 0.4], dtype=torch.float64).repeat_interleave(lengths)
    ratio = importance_ratio(logprob, old, lengths, "sequence")
    loss, _ = policy_loss(
        ratio, advantage.repeat_interleave(lengths), epsilon_low=0.5, epsilon_high=0.5
    )
    options = {"importance_sampling_level": "sequence", "epsilon_low": 0.5, "epsilon_high": 0.5}
    wanted, _ = plain_losses(logprob, old, advantage.tolist(), lengths.tolist(), **options)
    np.testing.assert_allclose(
        ratio[:5].detach(), (logprob - old)[:5].mean().exp().detach().expand(5), rtol=1e-14
    )
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    (got,), (gradient,) = (
        torch.autograd.grad((weight * values).sum(), logprob) for values in (loss, wanted)
    )
    np.testing.assert_allclose(got, gradient, rtol=1e-10)


def test_cispo_caps_the_weight_and_keeps_every_gradient():
    logprob = torch.from_numpy(RNG.normal(-1, 0.5, M)).requires_grad_()
    old = torch.from_numpy(logprob.detach().numpy() + RNG.normal(0, 0.4, M))
    advantage = torch.from_numpy(RNG.normal(0, 1, M))
    loss, is_clipped = cispo_loss(
        logprob, importance_ratio(logprob, old, torch.tensor([M]), "token"), advantage, 1.2
    )
    loss.sum().backward()
    wanted, wanted_clips = plain_losses(
        logprob, old, advantage.tolist(), [1] * M, loss_type="cispo", epsilon_high=1.2
    )
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    assert torch.equal(is_clipped, wanted_clips)
    weight = [
        min(math.exp(p - o), 1.2) for p, o in zip(logprob.tolist(), old.tolist(), strict=True)
    ]
    np.testing.assert_allclose(logprob.grad, -np.array(weight) * advantage.numpy(), rtol=1e-12)
    assert (logprob.grad != 0).all() and 20 < is_clipped.sum() < M - 20


def test_kl_estimators_have_the_means_and_gradients_that_they_claim():
    """Over a whole vocabulary: the mean value, and the mean gradient by the policy's logits, each
    weighted by the policy."""
    logits = torch.randn(50, dtype=torch.float64, requires_grad=True)
    policy, reference = logits.log_softmax(-1), torch.randn(50, dtype=torch.float64).log_softmax(-1)
    probability = policy.exp().detach()
    forward = (policy.exp() * (policy - reference)).sum()
    backward = (reference.exp() * (reference - policy)).sum()
    (of_forward,) = torch.autograd.grad(forward, logits, retain_graph=True)
    (of_backward,) = torch.autograd.grad(backward, logits, retain_graph=True)
    pulls = {"k1": torch.zeros_like(logits), "k2": of_forward, "k3": of_backward}
    for estimator, pull in pulls.items():
        estimate = kl_penalty(policy, reference, estimator)
        torch.testing.assert_close(
            estimate, kl_estimate(policy, reference, estimator), rtol=1e-13, atol=1e-14
        )
        if estimator != "k2":
            assert math.isclose(
                (probability * estimate).sum().item(), forward.item(), rel_tol=1e-10
            )
        if estimator != "k1":
            assert (estimate >= 0).all()
        (gradient,) = torch.autograd.grad((probability * estimate).sum(), logits, retain_graph=True)
        torch.testing.assert_close(gradient, pull, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "cispo"])
def test_weights_give_the_published_means(loss_type):
    """Without any used sequence they are zero; a local weight does not depend on the others."""
    lengths, is_used = np.array([3, 1, 7, 4]), np.array([True, True, False, True])
    losses = [torch.from_numpy(RNG.normal(size=n)) for n in lengths]
    used = [values for values, used in zip(losses, is_used, strict=True) if used]
    wanted = mean_loss(used, 4, loss_type, 10)
    local = local_weights(loss_type, lengths, is_used)
    weights = local * common_factor(loss_type, lengths, is_used, 10)
    mean = sum(w * v.sum() for w, v in zip(weights, losses, strict=True))
    assert math.isclose(mean, wanted, rel_tol=1e-12)
    alone = [local_weights(loss_type, lengths[i:][:1], is_used[i:][:1])[0] for i in range(4)]
    assert alone == local.tolist()
    none = np.zeros(4, bool)
    assert not local_weights(loss_type, lengths, none).any()
    assert math.isfinite(common_factor(loss_type, lengths, none, 10))


@pytest.mark.parametrize("max_logits", [1 << 20, 97 * 3])
def test_token_logprobs_whole_and_in_chunks(max_logits):
    """Values and gradients against log_softmax of the full logits."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 97, bias=False, dtype=torch.float64)
    head = OutputHead(linear, num_tokens=90, factor=0.7, cap=1.5)
    hidden = torch.randn(20, 16, dtype=torch.float64, requires_grad=True)
    target = torch.randint(90, (20,))
    logprob = token_logprobs(hidden, head, target, temperature=0.7, max_logits=max_logits)
    logprob.dot(torch.linspace(-1, 1, 20, dtype=torch.float64)).backward()
    got = hidden.grad.clone(), linear.weight.grad.clone()
    hidden.grad = linear.weight.grad = None
    logits = 1.5 * torch.tanh(0.7 * linear(hidden) / 1.5)
    full = (logits[:, :90] / 0.7).log_softmax(-1)
    wanted = full.gather(1, target[:, None])[:, 0]
    wanted.dot(torch.linspace(-1, 1, 20, dtype=torch.float64)).backward()
    torch.testing.assert_close(logprob, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got, (hidden.grad, linear.weight.grad), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_bfloat16_heads_gradient_rounds_once(is_tied):
    """Chunks of 30 tokens, against the gradient in float64; in one chunk the gradient is rounded
    once, and autograd's own sum over chunks is far off."""
    size, vocab, chunk = 32, 200, 200 * 30

    def gradient_of(dtype: torch.dtype, max_logits: int, has_optimizer: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        weight = 0.3 * torch.randn(vocab, size, generator=generator)
        tokens, target = torch.randint(20, (2, 3000), generator=generator)
        noise = torch.randn(3000, size, generator=generator).bfloat16().to(dtype)
        head = torch.nn.Linear(size, vocab, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            head.weight.copy_(weight)
        head = head.to(dtype)
        optimizer = Optimizer(head, OptimConfig(), 1, Ranks(torch.device("cpu")))
        if not has_optimizer and dtype == torch.bfloat16:
            del head.weight.main_grad
        hidden = noise + 1
        if is_tied:
            hidden = hidden + torch.nn.functional.embedding(tokens, head.weight)
        token_logprobs(hidden, OutputHead(head, vocab), target, 1.0, max_logits).sum().backward()
        return optimizer.flat_grad.double()

    wanted = gradient_of(torch.float64, chunk, True)
    whole, chunked, summed = (
        float((gradient_of(torch.bfloat16, *options) - wanted).norm() / wanted.norm())
        for options in ((1 << 30, False), (chunk, True), (chunk, False))
    )
    assert chunked <= whole < 3e-3 and summed > 2 * whole, (whole, chunked, summed)


def test_chunks_bound_the_logits_that_exist_at_once():
    """The largest tensor saved or made, watched through the dispatcher, in forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (1000,):
                    self.elements = max(self.elements, tensor.numel())
            return out

    head = OutputHead(torch.nn.Linear(4, 1000, bias=False), num_tokens=1000, cap=9.0)
    hidden, target = torch.randn(64, 4, requires_grad=True), torch.randint(1000, (64,))
    with Largest() as watched:
        token_logprobs(hidden, head, target, temperature=1.0, max_logits=8_000).sum().backward()
    assert 0 < watched.elements <= 8_000
