"""Every term of the loss against values worked out separately, token by token, in float64 Python."""

import math

import numpy as np
import pytest
import torch

from bubblespec.losses import kl_k3, policy_loss, token_logprobs, token_weights

RNG = np.random.default_rng(0)
M = 200


def scalar_policy_loss(logprob, old, advantage, low, high):
    """Clipped surrogate by cases: a gain (advantage > 0) is capped above, a loss (advantage < 0) is capped below."""
    ratio = math.exp(logprob - old)
    if advantage >= 0:
        return -advantage * min(ratio, 1 + high), ratio > 1 + high and advantage > 0
    return -advantage * max(ratio, 1 - low), ratio < 1 - low


def test_policy_loss_and_its_gradient():
    logprob = torch.from_numpy(RNG.normal(-1, 0.5, M)).requires_grad_()
    old = torch.from_numpy(logprob.detach().numpy() + RNG.normal(0, 0.4, M))
    advantage = torch.from_numpy(RNG.normal(0, 1, M))
    loss, is_clipped = policy_loss(logprob, old, advantage, 0.1, 0.3)
    wanted = [scalar_policy_loss(*v, 0.1, 0.3) for v in zip(logprob.tolist(), old.tolist(), advantage.tolist(), strict=True)]
    np.testing.assert_allclose(loss.detach(), [w for w, _ in wanted], rtol=1e-12)
    assert is_clipped.tolist() == [bool(c) for _, c in wanted] and 20 < sum(is_clipped) < 150
    loss.sum().backward()
    ratio = (logprob - old).exp().detach()
    np.testing.assert_allclose(logprob.grad, torch.where(is_clipped, 0.0, -ratio * advantage), rtol=1e-12)


def test_on_policy_gradient_is_the_plain_policy_gradient():
    """With old = detached logprob the ratio is 1: loss -A, gradient -A."""
    logprob = torch.from_numpy(RNG.normal(-1, 0.5, M)).requires_grad_()
    advantage = torch.from_numpy(RNG.normal(0, 1, M))
    loss, is_clipped = policy_loss(logprob, logprob.detach(), advantage, 0.2, 0.2)
    loss.sum().backward()
    assert torch.equal(loss.detach(), -advantage) and torch.equal(logprob.grad, -advantage) and not is_clipped.any()


def test_kl_k3_is_nonnegative_and_unbiased():
    """Its mean under the policy is KL(policy || reference), computed by summing over a vocabulary."""
    policy, reference = torch.randn(2, 50, dtype=torch.float64).log_softmax(-1)
    estimate = kl_k3(policy, reference)
    assert (estimate >= 0).all()
    kl = sum(math.exp(p) * (p - r) for p, r in zip(policy.tolist(), reference.tolist(), strict=True))
    assert math.isclose((policy.exp() * estimate).sum().item(), kl, rel_tol=1e-10)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_token_weights_give_the_published_means(loss_type):
    lengths = np.array([3, 1, 7, 4])
    is_used = np.array([True, True, False, True])
    losses = [RNG.normal(size=n).tolist() for n in lengths]
    used = [values for values, u in zip(losses, is_used, strict=True) if u]
    wanted = {
        "grpo": sum(sum(v) / len(v) for v in used) / 4,
        "dr_grpo": sum(sum(v) for v in used) / (4 * 10),
        "dapo": sum(sum(v) for v in used) / sum(len(v) for v in used),
    }[loss_type]
    weights = token_weights(loss_type, lengths, is_used, max_completion_length=10)
    assert math.isclose(sum(w * sum(v) for w, v in zip(weights, losses, strict=True)), wanted, rel_tol=1e-12)


def test_weights_without_any_used_sequence_are_zero():
    for loss_type in ("grpo", "dr_grpo", "dapo"):
        assert not token_weights(loss_type, np.array([3, 2]), np.array([False, False]), 5).any()


@pytest.mark.parametrize("max_logits", [1 << 20, 97 * 3])
def test_token_logprobs_whole_and_in_chunks(max_logits):
    """Values and gradients against log_softmax and -sum p log p of the full logits."""
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 97, bias=False, dtype=torch.float64)
    hidden = torch.randn(20, 16, dtype=torch.float64, requires_grad=True)
    target = torch.randint(97, (20,))
    logprob, entropy = token_logprobs(hidden, head, target, 0.7, max_logits)
    logprob.dot(torch.linspace(-1, 1, 20, dtype=torch.float64)).backward()
    got = hidden.grad.clone(), head.weight.grad.clone()
    hidden.grad = head.weight.grad = None
    full = (head(hidden) / 0.7).log_softmax(-1)
    wanted = full.gather(1, target[:, None])[:, 0]
    wanted.dot(torch.linspace(-1, 1, 20, dtype=torch.float64)).backward()
    torch.testing.assert_close(logprob, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got, (hidden.grad, head.weight.grad), rtol=1e-12, atol=1e-12)
    assert not entropy.requires_grad


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

    head = torch.nn.Linear(4, 1000, bias=False)
    hidden, target = torch.randn(64, 4, requires_grad=True), torch.randint(1000, (64,))
    with Largest() as watched:
        token_logprobs(hidden, head, target, 1.0, 8_000)[0].sum().backward()
    assert 0 < watched.elements <= 8_000
