"""AdamW on one flat gradient buffer: micro-batches accumulate into it locally, ranks sum it once, the norm is one operation.

A bfloat16 model gets float32 gradients and float32 master weights; other models are updated in place.
"""

import math

import torch

from bubblespec.config import OptimConfig
from bubblespec.distributed import Ranks


class Optimizer:
    def __init__(self, model: torch.nn.Module, config: OptimConfig, max_steps: int):
        self.config, self.max_steps = config, max_steps
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.has_masters = self.params[0].dtype == torch.bfloat16
        dtype = torch.float32 if self.has_masters else self.params[0].dtype
        self.flat_grad = torch.zeros(sum(p.numel() for p in self.params), dtype=dtype, device=self.params[0].device)
        views = torch.split(self.flat_grad, [p.numel() for p in self.params])
        self.masters = [p.detach().to(dtype, copy=True) for p in self.params] if self.has_masters else self.params
        for param, master, view in zip(self.params, self.masters, views, strict=True):
            master.grad = view.view_as(param)  # for float32 models autograd accumulates right into the flat buffer
            if self.has_masters:
                param.register_post_accumulate_grad_hook(_move_grad_to(master.grad))
        decayed = [m for m in self.masters if m.ndim >= 2]
        others = [m for m in self.masters if m.ndim < 2]
        self.adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
        )

    def reduce(self, ranks: Ranks) -> None:
        """Sum the gradients of all ranks; the loss is already normalised by global counts."""
        ranks.sum_(self.flat_grad)

    def clear(self) -> None:
        self.flat_grad.zero_()

    def step(self, step: int, is_finite: bool = True) -> tuple[float, float]:
        """Clip, update, clear the gradients. Returns (gradient norm before clipping, learning rate).

        Where the gradient is not finite, or the loss was not (`is_finite`), nothing but the gradients is changed.
        """
        grad_norm = torch.linalg.vector_norm(self.flat_grad).item()
        if not (is_finite and math.isfinite(grad_norm)):
            self.clear()
            return grad_norm, 0.0
        limit = self.config.max_grad_norm
        if limit and grad_norm > limit:
            self.flat_grad.mul_(limit / grad_norm)
        learning_rate = self.config.learning_rate * learning_rate_factor(self.config, step, self.max_steps)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.clear()
        if self.has_masters:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.masters)
        return grad_norm, learning_rate

    def state_dict(self) -> dict:
        masters = [m.cpu() for m in self.masters] if self.has_masters else []
        return {"adamw": self.adamw.state_dict(), "masters": masters}

    def load_state_dict(self, state: dict) -> None:
        self.adamw.load_state_dict(state["adamw"])
        with torch.no_grad():
            for master, saved in zip(self.masters if self.has_masters else [], state["masters"], strict=True):
                master.copy_(saved)


def learning_rate_factor(config: OptimConfig, step: int, max_steps: int) -> float:
    """Share of the peak learning rate at `step`: linear warm-up, then constant, or down to 0 at `max_steps`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(max_steps - config.warmup_steps, 1)
    if config.lr_scheduler == "linear":
        return 1.0 - progress
    if config.lr_scheduler == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0


def _move_grad_to(buffer: torch.Tensor):
    def hook(param: torch.nn.Parameter) -> None:
        buffer.add_(param.grad)
        param.grad = None

    return hook
