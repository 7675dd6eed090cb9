"""Linear layers on a CPU in float32: torch's own product, or a faster one for some shapes and
numbers of rows.

torch hands `linear` to MKL, with the weight as it is stored, [out, in]. That is not the fastest
everywhere: on AMD's processors oneDNN is more than twice as fast, and on all of them the few rows
of a decoding forward are multiplied faster by a copy of the weight in another order of memory. So
generation may use a copy, and training may use oneDNN for each of its three products;
linear_choice.py measures which of them pay. torch's `linear` is the reference, and what is used
wherever there is no plan.

A copy is made anew when its weight has changed, which the weight's version counter says: generation
always uses the current weights. Parameters, their names and their memory stay as they are.

Shape legend: N rows (tokens), K features in, M features out.
"""

from typing import NamedTuple

import torch
from torch import is_inference_mode_enabled
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

# Rows of a forward at which generation is measured, each for a range (see `level`). No powers of
# two: those suit MKL's kernels, which take up to twice as long for a row less or more, and any
# number of rows may be left.
LEVELS = (1, 3, 6, 12, 48)
MANY_ROWS = 32  # and more are all of the last level
MIN_TRAINING_ROWS = (
    128  # training forwards of fewer rows are torch's: measured at more, and of no weight
)
COPIES = ("transposed", "packed")


class Plan(NamedTuple):
    """How layers of one shape are computed."""

    copy: str = ""
    """Of the weight, for generation: "transposed" is [K, M] for torch's own product, "packed" is in
    oneDNN's order; or none."""
    levels: tuple[bool, ...] = (False,) * len(LEVELS)
    """Whether generation uses the copy, by `level` of the rows."""
    products: tuple[bool, bool, bool] = (False, False, False)
    """Whether training uses oneDNN: for the forward, for the gradient of the input, for that of the
    weight."""


def level(rows: int) -> int:
    """Index of the `LEVELS` that stands for this many rows: 1, 2 and 3, 4 to 7, 8 to 31, 32 and
    more."""
    return sum(rows >= first for first in (2, 4, 8, 32))


def has_onednn() -> bool:
    """Whether this torch has oneDNN's products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear` by oneDNN, without autograd. x: [..., K]; weight: [M, K], of any strides, or
    packed."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


class FastLinear(torch.nn.Linear):
    """A linear layer with a plan; `use_plans` makes layers of a model into such."""

    plan = Plan()
    _uses_copy = (False,) * (
        MANY_ROWS + 1
    )  # by rows: a look-up takes less than working out the level
    _copy: torch.Tensor | None = None
    _copied = -1  # version of the weight that the copy is of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters = (
            self._parameters
        )  # not through Module.__getattr__: at a few rows every microsecond counts
        weight, bias = parameters["weight"], parameters["bias"]
        rows = x.numel() // self.in_features
        if not is_inference_mode_enabled():
            if rows >= MIN_TRAINING_ROWS and any(self.plan.products):
                return differentiable_linear(x, weight, bias, self.plan.products)
            return linear(x, weight, bias)
        if not self._uses_copy[rows if rows < MANY_ROWS else MANY_ROWS]:
            return linear(x, weight, bias)
        if self._copied != weight._version:
            self.refresh()
        if self.plan.copy == "packed":
            return onednn_linear(x, self._copy, bias)
        return linear(x, self._copy, bias)

    @torch.inference_mode()
    def refresh(self, always: bool = False) -> None:
        """Make the copy of the weight anew where the weight has changed."""
        weight = self.weight
        if not self.plan.copy or (self._copied == weight._version and not always):
            return
        if self.plan.copy == "packed":
            self._copy = torch.ops.mkldnn._reorder_linear_weight.default(weight)
        else:
            if self._copy is None:
                self._copy = torch.empty(
                    weight.shape[::-1]
                ).t()  # [M, K] to `linear`, [K, M] in memory
            self._copy.copy_(weight)
        self._copied = weight._version

    def __getstate__(self) -> dict:
        """Without the copy, which is made where it is needed."""
        return {**self.__dict__, "_copy": None, "_copied": -1}


def differentiable_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    products: tuple[bool, bool, bool],
) -> torch.Tensor:
    """`linear` whose products are oneDNN's as `Plan.products` says."""
    return _Linear.apply(x, weight, bias, products)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, products):
        ctx.save_for_backward(x, weight)
        ctx.products = products
        return onednn_linear(x, weight, bias) if products[0] else linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = input_gradient(grad, weight, ctx.products[1])
        grad_NM = grad.reshape(-1, weight.shape[0])
        if ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(grad_NM, x.reshape(-1, weight.shape[1]), ctx.products[2])
        if ctx.needs_input_grad[2]:
            grad_bias = grad_NM.sum(0)
        return grad_x, grad_weight, grad_bias, None


def input_gradient(grad: torch.Tensor, weight: torch.Tensor, by_onednn: bool) -> torch.Tensor:
    """Gradient of `linear` in its input, [..., K]. grad: [..., M], of its result."""
    return onednn_linear(grad, weight.t()) if by_onednn else grad @ weight


def weight_gradient(grad_NM: torch.Tensor, x_NK: torch.Tensor, by_onednn: bool) -> torch.Tensor:
    """Gradient of `linear` in its weight, [M, K]."""
    return onednn_linear(grad_NM.t(), x_NK.t()) if by_onednn else grad_NM.t() @ x_NK


def shape_of(module: torch.nn.Linear) -> str:
    """The name of a layer's shape, features in by features out."""
    return f"{module.in_features}x{module.out_features}"


def read_plans(choice: dict | None) -> dict[str, Plan]:
    """Plans by shape, from a choice as checkpoints keep it; none without one."""
    saved = {} if choice is None else choice["plans"]
    return {
        shape: Plan(kind, tuple(at), tuple(products))
        for shape, (kind, at, products) in saved.items()
    }


def use_plans(model: torch.nn.Module, plans: dict[str, Plan]) -> None:
    """Give the linear layers of a model, its output head among them, the plans of their shapes; a
    layer of another class than torch's stays as it is. Copies of the weights are made now."""
    for module in model.modules():
        plan = plans.get(shape_of(module)) if type(module) is torch.nn.Linear else None
        if plan is not None and plan != Plan():
            module.__class__ = FastLinear
            module.plan, module._uses_copy = (
                plan,
                tuple(plan.levels[level(rows)] for rows in range(MANY_ROWS + 1)),
            )
    refresh_copies(model)


def refresh_copies(model: torch.nn.Module) -> None:
    """After an update of the weights: make their copies now, not in the next forward, whose time
    would be taken for the cost of its rows."""
    for module in model.modules():
        if isinstance(module, FastLinear):
            module.refresh()
