"""KL estimators and the log-probabilities of training. The loss: test_masked_loss.py."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bubblespec.config import OptimConfig
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.model import OutputHead
from bubblespec.learn.losses import compare, kl_penalty, token_logprobs
from bubblespec.learn.optimizer import Optimizer
from tests.helpers.reference_step import kl_estimate


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


@pytest.mark.parametrize("max_logits", [1 << 20, 97 * 3])
def test_token_logprobs_whole_and_in_chunks(max_logits):
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 97, bias=False, dtype=torch.float64)
    head = OutputHead(linear, num_tokens=90, factor=0.7, cap=1.5)
    hidden = torch.randn(20, 16, dtype=torch.float64, requires_grad=True)
    target = torch.randint(90, (20,))
    logprob = token_logprobs(hidden, head, target, target, SamplingParams(0.7), max_logits)
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
        of = OutputHead(head, vocab), target, target, SamplingParams()
        token_logprobs(hidden, *of, max_logits).sum().backward()
        return optimizer.flat_grad.double()

    wanted = gradient_of(torch.float64, chunk, True)
    whole, chunked, summed = (
        float((gradient_of(torch.bfloat16, *options) - wanted).norm() / wanted.norm())
        for options in ((1 << 30, False), (chunk, True), (chunk, False))
    )
    assert chunked <= whole < 3e-3 and summed > 2 * whole, (whole, chunked, summed)


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (1000,):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_chunks_bound_number_of_live_logits():
    head = OutputHead(torch.nn.Linear(4, 1000, bias=False), num_tokens=1000, cap=9.0)
    hidden, target = torch.randn(64, 4, requires_grad=True), torch.randint(1000, (64,))
    with Largest() as watched:
        token_logprobs(hidden, head, target, target, SamplingParams(), 8_000).sum().backward()
    assert 0 < watched.elements <= 8_000
    options = {"params": SamplingParams(), "beta": 0.5, "max_logits": 8_000}
    with Largest() as watched:
        compare(hidden, head, hidden.detach(), head, target, target, **options).sum().backward()
    assert 0 < watched.elements <= 4_000
