"""AdamW on one flat gradient buffer.

Micro-batches accumulate into the buffer locally, ranks sum it once, and its norm is one operation.
A bfloat16 model gets float32 gradients and float32 master weights; other models are updated in
place. With optim.shard_state a rank keeps masters and moments of its share of the parameters alone,
updates these parameters, and sends them to all (ZeRO stage 1, Rajbhandari et al. 2020, arXiv
1910.02054). No parameter is divided: the operations, and so the bits, are those without sharding.
"""

import math
from functools import partial
from typing import Any

import numpy as np
import torch

from bubblespec.config import OptimConfig
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.ops import MOVE, has_kernels

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's names
PIECE = 1 << 24  # elements that a rank sends to rank 0 at a time while saving


class Optimizer:
    """AdamW of a model's trained parameters; all ranks make, step and save it together."""

    def __init__(self, model: torch.nn.Module, config: OptimConfig, max_steps: int, ranks: Ranks):
        self.config, self.max_steps, self.ranks = config, max_steps, ranks
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names, self.params = [name for name, _ in named], [p for _, p in named]
        self.num_updates = 0
        self.has_masters = self.params[0].dtype == torch.bfloat16
        dtype = torch.float32 if self.has_masters else self.params[0].dtype
        sizes = [p.numel() for p in self.params]
        self.flat_grad = torch.zeros(sum(sizes), dtype=dtype, device=self.params[0].device)
        self.grads: dict[torch.Tensor, torch.Tensor] = {}  # parts of the flat buffer, by parameter
        for param, view in zip(self.params, self.flat_grad.split(sizes), strict=True):
            self.grads[param] = view.view_as(param)
            if self.has_masters:
                move = partial(_move_grad, self.grads[param])
                param.register_post_accumulate_grad_hook(move)
                # for gradients that come in many parts
                setattr(param, "main_grad", self.grads[param])  # noqa: B010 (no field of torch's)
            else:  # autograd accumulates right into the flat buffer
                param.grad = self.grads[param]
        # this rank's parameters, and what AdamW updates for them
        self.updated: dict[torch.Tensor, torch.Tensor] = {}
        matrices = [p for p in self.params if p.ndim >= 2]
        vectors = [p for p in self.params if p.ndim < 2]
        decays = ((matrices, config.weight_decay), (vectors, 0.0))
        groups = [{"params": part, "weight_decay": decay} for part, decay in decays if part]
        self.adamw: torch.optim.Optimizer
        self.is_sharded = config.shard_state and ranks.world_size > 1
        if self.is_sharded:
            from torch.distributed.optim import ZeroRedundancyOptimizer  # takes seconds to import

            # It gives each rank its share and sends the updated parameters. Saving is our own: its
            # consolidate_state_dict needs room for two whole shares on every GPU.
            make: Any = self._make_adamw  # a class is expected
            sharded = ZeroRedundancyOptimizer(groups, make, lr=config.learning_rate)
            self.adamw, self.local = sharded, sharded.optim
        else:
            self.adamw = self.local = self._make_adamw(groups, lr=config.learning_rate)
        is_updated = np.array([p in self.updated for p in self.params], np.uint8)
        # the first rank that updates each parameter
        self.owner = ranks.all_gather(is_updated).argmax(axis=0).tolist()

    def _make_adamw(self, groups: list[dict], lr: float) -> torch.optim.AdamW:
        """Create AdamW on the parameters, or on float32 masters, copied back after every step.

        Moments are made at once, so that memory free afterwards is free for the whole run."""
        given = [p for group in groups for p in group["params"]]
        self.updated = {p: p.detach().float() if self.has_masters else p for p in given}
        for param, master in self.updated.items():
            master.grad = self.grads[param]
        adamw = torch.optim.AdamW(
            [{**g, "params": [self.updated[p] for p in g["params"]]} for g in groups],
            lr=lr,
            betas=(self.config.adam_betas[0], self.config.adam_betas[1]),
            eps=self.config.adam_epsilon,
            # on CUDA the default makes a copy of all moments in every step
            fused=self.flat_grad.is_cuda or None,
        )
        masters = list(self.updated.values())
        state = adamw.state_dict()
        for index, master in enumerate(masters):
            moments = {key: torch.zeros_like(master) for key in MOMENTS}
            state["state"][index] = {"step": torch.tensor(0.0), **moments}
        adamw.load_state_dict(state)
        if self.has_masters and given:
            adamw.register_step_post_hook(partial(_copy_masters, given, masters))
        return adamw

    def clear(self) -> None:
        self.flat_grad.zero_()

    def step(self, step: int, is_finite: bool = True) -> tuple[float, float]:
        """Clip, update, clear. Return the gradient's norm before clipping, and the learning rate.

        Only clear if the gradient is not finite, or the loss was not (`is_finite`)."""
        grad_norm = torch.linalg.vector_norm(self.flat_grad).item()
        if not (is_finite and math.isfinite(grad_norm)):
            self.clear()
            return grad_norm, 0.0
        limit = self.config.max_grad_norm
        if limit and grad_norm > limit:
            self.flat_grad.mul_(limit / grad_norm)
        factor = learning_rate_factor(self.config, step, self.max_steps)
        learning_rate = self.config.learning_rate * factor
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        if not self.is_sharded:
            self.adamw.step()
        else:
            with self.ranks.watch():  # it sends the updated parameters
                self.adamw.step()
            # received parameters bypass the version counters, by which copies are renewed
            torch.autograd.graph.increment_version(self.params)
        self.num_updates += 1
        self.clear()
        return grad_norm, learning_rate

    def has_finite_weights(self) -> bool:
        return all(torch.isfinite(param).all().item() for param in self.params)

    def state_dict(self) -> dict | None:
        """Return the number of updates, and by parameter name moments and master, on rank 0's CPU.

        Equal whether sharded or not: tensors of other ranks are gathered one by one."""
        parameters: dict[str, dict[str, torch.Tensor]] = {}
        named = list(zip(self.names, self.params, self.owner, strict=True))
        # Without an update the moments are zeros, and the masters are the weights.
        for name, param, owner in named if self.num_updates else []:
            own = self._state_of(param)
            for key in (*MOMENTS, "master") if self.has_masters else MOMENTS:
                tensor = self._to_main(own.get(key), param, owner)
                if tensor is not None:
                    parameters.setdefault(name, {})[key] = tensor
        if not self.ranks.is_main:
            return None
        return {"num_updates": self.num_updates, "parameters": parameters}

    def load_state_dict(self, state: dict) -> None:
        """Load this rank's part, of any number of ranks. Raises ValueError for other shapes."""
        self.num_updates = state["num_updates"]
        if not self.num_updates:
            return
        for name, param in zip(self.names, self.params, strict=True):
            saved = state["parameters"][name]
            for key, tensor in self._state_of(param).items():
                if key == "step":
                    tensor.fill_(self.num_updates)
                elif saved[key].shape != tensor.shape:
                    raise ValueError("the optimizer state is for other parameter shapes")
                else:
                    tensor.copy_(saved[key])

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return AdamW's tensors of a parameter, and its master; empty if another rank has them."""
        target = self.updated.get(param)
        if target is None:
            return {}
        master = {"master": target.detach()} if self.has_masters else {}
        return {**self.local.state[target], **master}

    def _to_main(
        self, tensor: torch.Tensor | None, param: torch.Tensor, owner: int
    ) -> torch.Tensor | None:
        """Copy a tensor of rank `owner` to the CPU of rank 0, in pieces; other ranks get None.

        Keys and values leave no room on a GPU for a whole one."""
        if owner == 0:
            return tensor.cpu() if self.ranks.is_main and tensor is not None else None
        whole = None
        if self.ranks.is_main:
            whole = torch.empty(param.numel(), dtype=self.flat_grad.dtype)
        for begin in range(0, param.numel(), PIECE):
            part = slice(begin, min(begin + PIECE, param.numel()))
            if tensor is None:
                piece = self.flat_grad.new_empty(part.stop - begin)
            else:
                piece = tensor.view(-1)[part]
            self.ranks.broadcast_(piece, owner)
            if whole is not None:
                whole[part] = piece
        return None if whole is None else whole.view(param.shape)


def learning_rate_factor(config: OptimConfig, step: int, max_steps: int) -> float:
    """Return the share of the peak at `step`: linear warm-up, then the schedule to `max_steps`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(max_steps - config.warmup_steps, 1)
    if config.lr_scheduler_type == "linear":
        return 1.0 - progress
    if config.lr_scheduler_type == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0


def _move_grad(buffer: torch.Tensor, param: torch.nn.Parameter) -> None:
    if param.grad is not None:  # None where all of it has gone to `main_grad`
        add_to(buffer, param.grad)
        param.grad = None


def add_to(total: torch.Tensor, part: torch.Tensor) -> None:
    """Add a gradient to a buffer of its shape, in place.

    On a GPU torch reads and writes single numbers where types are mixed; the bits are equal."""
    if has_kernels(part.device, part.dtype, MOVE):
        from bubblespec.engine.ops import triton_training

        triton_training.add_to(total, part)
    else:
        total.add_(part)


@torch.no_grad()
def _copy_masters(params: list[torch.Tensor], masters: list[torch.Tensor], *_) -> None:
    if not has_kernels(params[0].device, params[0].dtype, MOVE):
        torch._foreach_copy_(params, masters)
        return
    from bubblespec.engine.ops import triton_training

    for param, master in zip(params, masters, strict=True):
        triton_training.round_into(param, master)
