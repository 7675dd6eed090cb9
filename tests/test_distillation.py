"""The divergence from a teacher: the formula, its gradient, chunks, and runs. The loss of whole
updates, with masks and ranks: test_masked_loss.py."""

import pytest
import torch
from trl.experimental.gkd import GKDTrainer

from bubblespec.engine.output_head import OutputHead
from bubblespec.learn.distillation import compare, divergence
from tests.helpers.reference_step import jensen_shannon

BETAS = (0.0, 1e-3, 0.3, 0.5, 1.0)


def logits(seed: int, scale: float, requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = scale * torch.randn(6, 31, generator=generator, dtype=torch.float64)
    return drawn.requires_grad_(requires_grad)


@pytest.mark.parametrize("beta", BETAS)
def test_divergence_equals_definition_and_trl(beta):
    """Values and gradients, also of near certain distributions."""
    for scale in (1.0, 8.0):
        student, teacher = logits(0, scale, requires_grad=True), logits(1, scale)
        found = divergence(student, teacher, beta)
        wanted = jensen_shannon(teacher.log_softmax(-1), student.log_softmax(-1), beta)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        theirs = GKDTrainer.generalized_jsd_loss(
            student[None], teacher[None], beta=beta, reduction="sum"
        )
        torch.testing.assert_close(found.sum(), theirs, rtol=1e-9, atol=1e-12)
        gradients = [torch.autograd.grad(v.sum(), student)[0] for v in (found, wanted)]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
        assert (found > 0).all()
        assert divergence(teacher, teacher, beta).abs().max() < 1e-14


def test_gradient_by_logits_equals_closed_form():
    """Of KL(q || p): q (log q - log p - KL); of KL(p || q): q - p."""
    student, teacher = logits(0, 2.0, requires_grad=True), logits(1, 2.0)
    p, q = teacher.softmax(-1), student.detach().softmax(-1)
    difference = q.log() - p.log()
    wanted = {1.0: q * (difference - (q * difference).sum(-1, keepdim=True)), 0.0: q - p}
    for beta, closed in wanted.items():
        (found,) = torch.autograd.grad(divergence(student, teacher, beta).sum(), student)
        torch.testing.assert_close(found, closed, rtol=1e-10, atol=1e-13)


def test_chunks_and_padding_change_nothing():
    """Heads of other widths and numbers of padded rows, with factor and cap; against whole logits
    of the common vocabulary."""
    torch.manual_seed(0)
    own, other = (torch.nn.Linear(n, v, bias=False).double() for n, v in ((16, 97), (24, 104)))
    heads = OutputHead(own, 90, factor=0.7, cap=3.0), OutputHead(other.requires_grad_(False), 90)
    hidden = torch.randn(20, 16, dtype=torch.float64, requires_grad=True)
    theirs, target = torch.randn(20, 24, dtype=torch.float64), torch.randint(90, (20,))
    weight, results = torch.linspace(0.1, 2, 40, dtype=torch.float64).view(2, 20), []
    for max_logits in (1 << 20, 2 * 104 * 3, 1):
        found = compare(
            hidden,
            heads[0],
            theirs,
            heads[1],
            target,
            temperature=0.8,
            beta=0.3,
            max_logits=max_logits,
        )
        results.append((found, *torch.autograd.grad((weight * found).sum(), [hidden, own.weight])))
    policy = (3.0 * torch.tanh(0.7 * own(hidden) / 3.0)[:, :90] / 0.8).log_softmax(-1)
    teacher = (other(theirs)[:, :90] / 0.8).log_softmax(-1)
    logprob = policy.gather(1, target[:, None])[:, 0]
    whole = torch.stack((logprob, jensen_shannon(teacher, policy, 0.3)))
    wanted = (whole, *torch.autograd.grad((weight * whole).sum(), [hidden, own.weight]))
    for found in results:
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
