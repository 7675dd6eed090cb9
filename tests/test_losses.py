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


CASES = {
    "two clips": {"epsilon_low": 0.1, "epsilon_high": 0.3},
    "dual clip": {"epsilon_low": 0.1, "epsilon_high": 0.3, "delta": 1.5},
    "sequence": {
        "importance_sampling_level": "sequence",
        "epsilon_low": 0.1,
        "epsilon_high": 0.1,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
}


@pytest.mark.parametrize("is_on_policy", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_token_losses_equal_plain_computation(case, is_on_policy):
    """Values, clips and gradients. A sequence's ratio is differentiated through its mean there."""
    loss, lengths = LossConfig(**CASES[case]), [5, 1, 30, 14] * 8
    logprob = torch.from_numpy(RNG.normal(-1, 0.5, sum(lengths))).requires_grad_()
    noise = torch.zeros(len(logprob)) if is_on_policy else torch.from_numpy(RNG.normal(0, 0.4, 400))
    old = logprob.detach() + noise
    advantages = torch.from_numpy(RNG.normal(0, 1, len(lengths)))
    of_tokens = advantages.repeat_interleave(torch.tensor(lengths))
    ratio = importance_ratio(logprob, old, torch.tensor(lengths), loss.importance_sampling_level)
    if loss.loss_type == "cispo":
        got, clips = cispo_loss(logprob, ratio, of_tokens, loss.epsilon_high)
    else:
        got, clips = policy_loss(ratio, of_tokens, loss.epsilon_low, loss.epsilon_high, loss.delta)
    wanted, wanted_clips = [], []
    for p, o, advantage in zip(
        logprob.split(lengths), old.split(lengths), advantages.tolist(), strict=True
    ):
        values, by_name = token_losses(p, o, advantage, loss)
        wanted.append(values)
        none = torch.zeros(len(p), dtype=torch.bool)
        wanted_clips.append([by_name.get(name, none) for name in ("low", "high", "delta")])
    torch.testing.assert_close(got, torch.cat(wanted), rtol=1e-12, atol=0)
    wanted_clips = torch.stack([torch.cat(parts) for parts in zip(*wanted_clips, strict=True)])
    assert torch.equal(clips, wanted_clips)
    weight = torch.from_numpy(RNG.random(len(lengths))).repeat_interleave(torch.tensor(lengths))
    (gradient,), (wanted_gradient,) = (
        torch.autograd.grad((weight * values).sum(), logprob, retain_graph=True)
        for values in (got, torch.cat(wanted))
    )
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-10, atol=1e-14)
    if is_on_policy:
        assert not clips.any() and torch.equal(gradient, -weight * of_tokens)
    else:
        names = {"two clips": 2, "dual clip": 3, "sequence": 2}
        assert (clips[: names.get(case, 0)].sum(1) > 5).all() and clips[1].any()
        assert case != "cispo" or (gradient != 0).all(), "no token loses its gradient"


def test_kl_estimators_have_documented_means_and_gradients():
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
def test_weights_give_published_means(loss_type):
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
def test_bfloat16_head_gradient_rounds_once(is_tied):
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


def test_chunks_bound_number_of_live_logits():
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
