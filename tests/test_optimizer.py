"""The flat-buffer optimizer against reference_step.py, and with float32 master weights against
torch's AdamW. Across a save: test_shard_state.py."""

import copy

import pytest
import torch

from bubblespec.config import OptimConfig
from bubblespec.distributed.ranks import Ranks
from bubblespec.learn.optimizer import Optimizer, learning_rate_factor
from tests.helpers.reference_step import adamw_update

STEPS = 8
ALONE = Ranks(torch.device("cpu"))


class Small(torch.nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
        )
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.to(dtype)

    def loss(self, step: int, micro_batch: int = 0) -> torch.Tensor:
        """Differs between steps in scale, so that some gradients are clipped and some are not."""
        generator = torch.Generator().manual_seed(100 * step + micro_batch)
        x, y = torch.randn(6, 5, generator=generator), torch.randn(6, 3, generator=generator)
        dtype = self.frozen.dtype
        return (self.layers(x.to(dtype)) - y.to(dtype)).square().sum() * 10.0 ** (step % 3 - 1)


def backward(model: Small, step: int) -> None:
    for micro_batch in range(2):
        model.loss(step, micro_batch).backward()


CONFIG = OptimConfig(
    learning_rate=0.05,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    weight_decay=0.1,
    adam_betas=[0.8, 0.95],
    # wide, so that an update depends on the size of its gradient and clipping shows
    adam_epsilon=0.5,
    max_grad_norm=20.0,
)


@pytest.mark.parametrize("limit", [20.0, 0.0])
def test_steps_equal_clipping_and_adamw(limit):
    config = copy.copy(CONFIG)
    config.max_grad_norm = limit
    model = Small(torch.float64)
    optimizer = Optimizer(model, config, STEPS, ALONE)
    plain, moments, norms = Small(torch.float64), {}, []
    for step in range(STEPS):
        backward(model, step)
        backward(plain, step)
        wanted = adamw_update(list(plain.parameters()), moments, config, step, STEPS)
        assert optimizer.step(step) == pytest.approx(wanted, rel=1e-10)
        norms.append(wanted[0])
    assert min(norms) < 20 < max(norms), "some steps are clipped and some are not"
    expected = list(plain.parameters())
    torch.testing.assert_close(list(model.parameters()), expected, rtol=1e-12, atol=1e-12)
    assert not optimizer.flat_grad.any(), "gradients are cleared"
    assert torch.equal(model.frozen, torch.ones_like(model.frozen)) and model.frozen.grad is None


def test_bfloat16_steps_equal_adamw_on_float32_masters():
    model = Small(torch.bfloat16)
    masters = [p.detach().float() for p in model.parameters() if p.requires_grad]
    decays = ((2, 0.1), (1, 0.0))
    groups = [{"params": [m for m in masters if m.ndim == n], "weight_decay": d} for n, d in decays]
    adamw = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=0.5)
    optimizer = Optimizer(model, CONFIG, STEPS, ALONE)
    for step in range(STEPS):
        gradients = [torch.zeros_like(m) for m in masters]
        for micro_batch in range(2):
            params = [p for p in model.parameters() if p.requires_grad]
            parts = torch.autograd.grad(model.loss(step, micro_batch), params)
            gradients = [total + part.float() for total, part in zip(gradients, parts, strict=True)]
        backward(model, step)
        norm, rate = optimizer.step(step)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        wanted_norm = torch.nn.utils.clip_grad_norm_(masters, 20.0).item()
        adamw.param_groups[0]["lr"] = adamw.param_groups[1]["lr"] = rate
        adamw.step()
        assert norm == pytest.approx(wanted_norm, rel=1e-6)
        # Clipping rounds differently in float32, so values agree to its precision; the model is the
        # rounded masters exactly.
        updated = [optimizer.updated[p] for p in optimizer.params]
        torch.testing.assert_close(updated, masters, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for new, master in zip(updated, masters, strict=True):
                master.copy_(new)
        assert all(
            torch.equal(p.detach(), m.bfloat16())
            for p, m in zip(optimizer.params, updated, strict=True)
        )


# Learning rate


@pytest.mark.parametrize(
    "scheduler, warmup, wanted",
    [
        ("constant", 4, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1, 4: 1, 11: 1}),
        ("linear", 4, {0: 0.25, 3: 1, 4: 1, 6: 0.75, 8: 0.5, 11: 0.125, 12: 0}),
        ("cosine", 0, {0: 1, 4: 0.75, 6: 0.5, 8: 0.25, 12: 0}),
        ("cosine", 4, {0: 0.25, 3: 1, 4: 1, 6: (2 + 2**0.5) / 4, 8: 0.5, 12: 0}),
        ("cosine", 20, {0: 0.05, 11: 0.6}),
    ],
)
def test_learning_rate_factor(scheduler, warmup, wanted):
    config = OptimConfig(lr_scheduler_type=scheduler, warmup_steps=warmup)
    assert {step: learning_rate_factor(config, step, 12) for step in wanted} == pytest.approx(
        wanted, abs=1e-15
    )
