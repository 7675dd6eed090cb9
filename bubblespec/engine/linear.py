"""Linear layers on a CPU in float32: torch's own product, or a faster one for some shapes.

torch hands `linear` to MKL, with the weight as it is stored, [out, in]. On AMD's processors oneDNN
is more than twice as fast, and on all of them the few rows of a decoding forward are multiplied
faster by a copy of the weight in another order of memory. So generation may use a copy, and
training may use oneDNN; what pays is measured for each shape of layer at the start of a run. In
float32 the kernel decides about rounding, so all ranks must use the same, and a continued run keeps
what it began with (`setup.choose_linear`).

Copies are renewed when the weight has changed, which its version counter says: generation always
uses the current weights. Parameters, their names and their memory stay as they are.

Shape legend: K features in, M features out.
"""

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import is_inference_mode_enabled
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

# Rows of a forward at which generation is measured. No powers of two: those suit MKL's kernels,
# which take up to twice as long for a row less or more, and any number of rows may be left.
ROWS = (1, 3, 6, 12, 48)
COPIES = ("", "transposed", "packed")
MIN_TRAINING_ROWS = 128  # training forwards of fewer rows are torch's

BUDGET_S = 1.5  # for all measurements; only two rounds of a slow machine may take longer
MAX_ROUNDS = 10
MARGIN = 1.1  # a kernel must be faster by this factor,
MIN_SAVED_S = 2e-6  # and by so much in a call: less is lost in noise
# Of the measured weights, float32: more than the caches of a core hold, shared ones included.
# Weights that come from a cache say nothing about those that come from memory.
MAX_ELEMENTS = 1 << 25
MAX_IN_LAYER = 1 << 20  # of one of them: of larger ones (output heads) the first rows
TRAINING_ROWS = 256  # of the measured products of training
MAX_TRAINING_ELEMENTS = 1 << 21  # of the weights of a shape


class Plan(NamedTuple):
    """How layers of one shape are computed."""

    copy: str = ""
    """Of the weight, for generation: "transposed" is [K, M] for torch's own product, "packed" is in
    oneDNN's order; or none."""
    trains: bool = False
    """Whether training uses oneDNN."""


def can_choose(model: torch.nn.Module) -> bool:
    """Whether there is a choice: in float32 on a CPU, and with oneDNN in torch."""
    weight = next(model.parameters())
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and has_onednn()


def has_onednn() -> bool:
    """Whether this torch has oneDNN's products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias=None) -> torch.Tensor:
    """`linear` by oneDNN, without autograd. x: [..., K]; weight: [M, K], of any strides, or
    packed."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


class OneDNNLinear(torch.autograd.Function):
    """`linear` whose three products are oneDNN's: `apply(x, weight, bias)`."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return onednn_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = onednn_linear(grad, weight.t())
        grad_NM = grad.reshape(-1, weight.shape[0])
        if ctx.needs_input_grad[1]:
            grad_weight = onednn_linear(grad_NM.t(), x.reshape(-1, weight.shape[1]).t())
        if ctx.needs_input_grad[2]:
            grad_bias = grad_NM.sum(0)
        return grad_x, grad_weight, grad_bias


class FastLinear(torch.nn.Linear):
    """A linear layer with a plan; `use_plans` turns layers of a model into such."""

    plan = Plan()
    _copy: torch.Tensor | None = None
    _copied = -1  # version of the weight that the copy is of
    _shard_copy: torch.Tensor | None = None
    _shard_copied = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Not through Module.__getattr__: at a few rows every microsecond counts.
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if is_inference_mode_enabled():
            if not self.plan.copy:
                return linear(x, weight, bias)
            if self._copied != weight._version:
                self.refresh()
            return (onednn_linear if self.plan.copy == "packed" else linear)(x, self._copy, bias)
        if self.plan.trains and x.numel() >= MIN_TRAINING_ROWS * self.in_features:
            return OneDNNLinear.apply(x, weight, bias)
        return linear(x, weight, bias)

    @torch.inference_mode()
    def refresh(self) -> None:
        """Renew the copy of the weight where the weight has changed."""
        if self.plan.copy and self._copied != self.weight._version:
            self._copy = copy_of(self.weight, self.plan.copy)
            self._copied = self.weight._version

    @torch.inference_mode()
    def copied_shard(self, part: slice, is_rowwise: bool) -> torch.Tensor:
        """A copy, like that of the whole weight, of the part that a tensor-parallel rank uses;
        renewed where the weight has changed."""
        if self._shard_copied != self.weight._version:
            shard = self.weight[:, part] if is_rowwise else self.weight[part]
            self._shard_copy = copy_of(shard.contiguous(), self.plan.copy)
            self._shard_copied = self.weight._version
        return self._shard_copy

    def __getstate__(self) -> dict:
        """Without the copy, which is made where it is needed."""
        nothing = {"_copy": None, "_copied": -1, "_shard_copy": None, "_shard_copied": -1}
        return {**self.__dict__, **nothing}


def sharded_linear(
    layer: torch.nn.Linear, part: slice, is_rowwise: bool, x: torch.Tensor
) -> torch.Tensor:
    """What one rank computes of a layer: a part of its outputs, or, if it is rowwise, its product
    with a part of the inputs, without the bias, which is added to the sum over ranks. x: [..., K],
    or [..., the part of K]."""
    bias = None if is_rowwise or layer.bias is None else layer.bias[part]
    plan = getattr(layer, "plan", Plan())
    if plan.copy and is_inference_mode_enabled():
        product = onednn_linear if plan.copy == "packed" else linear
        return product(x, layer.copied_shard(part, is_rowwise), bias)
    return linear(x, layer.weight[:, part] if is_rowwise else layer.weight[part], bias)


def copy_of(weight: torch.Tensor, copy: str) -> torch.Tensor:
    """The weight [M, K] in another order of memory, one of COPIES."""
    if copy == "packed":
        return torch.ops.mkldnn._reorder_linear_weight.default(weight)
    return weight.t().contiguous().t() if copy == "transposed" else weight


def shape_of(module: torch.nn.Linear) -> str:
    """The name of a layer's shape, features in by features out."""
    return f"{module.in_features}x{module.out_features}"


def read_plans(choice: dict | None) -> dict[str, Plan]:
    """Plans by shape, from a choice as checkpoints keep it; none without one."""
    saved = {} if choice is None else choice["plans"]
    return {shape: Plan(*plan) for shape, plan in saved.items()}


def use_plans(model: torch.nn.Module, plans: dict[str, Plan]) -> None:
    """Give the linear layers of a model, its output head among them, the plans of their shapes; a
    layer of another class than torch's stays as it is. Copies are made now."""
    for shape, layers in layers_by_shape(model).items():
        plan = plans.get(shape, Plan())
        for module in layers if plan != Plan() else ():
            module.__class__, module.plan = FastLinear, plan
    refresh_copies(model)


def refresh_copies(model: torch.nn.Module) -> None:
    """After an update of the weights: make their copies now, not in the next forward, whose time
    would be taken for the cost of its rows."""
    for module in model.modules():
        if isinstance(module, FastLinear):
            module.refresh()


def layers_by_shape(model: torch.nn.Module) -> dict[str, list[torch.nn.Linear]]:
    """The linear layers of torch's own class."""
    layers: dict[str, list[torch.nn.Linear]] = {}
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            layers.setdefault(shape_of(module), []).append(module)
    return layers


def measure(model: torch.nn.Module, clock: Callable[[], float] = time.perf_counter) -> np.ndarray:
    """Seconds of a call, float64 [shapes, timings], in the order of `layers_by_shape`: generation
    by copy and number of rows, [COPIES, ROWS] in one, then training by torch and by oneDNN.

    The minimum of a few rounds, as other work on the machine only adds to it. A round of generation
    goes through layers of all shapes in the model's order, as a forward does, so that weights come
    from where they come from in a forward.
    """
    shapes = layers_by_shape(model)
    table = np.zeros((len(shapes), len(COPIES) * len(ROWS) + 2))
    total = sum(_measured_weight(layer).numel() for layers in shapes.values() for layer in layers)
    share = min(1.0, MAX_ELEMENTS / max(total, 1))
    measured = {}
    for number, layers in enumerate(shapes.values()):
        for layer in layers[: max(1, round(share * len(layers)))]:
            measured[layer] = number
    budget_s = BUDGET_S / table.shape[1]
    generate = torch.inference_mode()(lambda product, *arguments: product(*arguments))
    for column, (copy, rows) in enumerate(itertools.product(COPIES, ROWS)):
        if rows == ROWS[0]:  # one copy at a time is in memory
            weights = [copy_of(_measured_weight(layer), copy) for layer in measured]
        product = onednn_linear if copy == "packed" else linear
        calls = [
            partial(generate, product, _random(1, rows, layer.in_features), weight)
            for layer, weight in zip(measured, weights, strict=True)
        ]
        first, best = _seconds_of_calls(calls, clock, budget_s)
        for number, layers in enumerate(shapes.values()):
            of_shape = np.array([index == number for index in measured.values()])
            table[number, column] = best[of_shape].mean()
            # oneDNN compiles code for each number of rows that it has not met yet. Few rows come
            # again and again; how many rows a long chunk has is new nearly every time.
            if copy == "packed" and rows == ROWS[-1]:
                table[number, column] += (first - best)[of_shape].sum() / len(layers)
    for number, layers in enumerate(shapes.values()):
        count = max(1, MAX_TRAINING_ELEMENTS // _measured_weight(layers[0]).numel())
        for column, product in ((-2, linear), (-1, OneDNNLinear.apply)):
            calls = [_training_call(layer, product) for layer in layers[:count]]
            first, best = _seconds_of_calls(calls, clock, budget_s / len(shapes))
            table[number, column] = best.mean()
            if column == -1:  # a micro-batch's number of rows is new nearly every time, too
                table[number, column] += (first - best).sum() / len(layers)
    return table


def _seconds_of_calls(
    calls: list[Callable[[], object]], clock: Callable[[], float], budget_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """Of each call, in the first round and in the best one, float64 [calls] twice."""
    end, rounds = clock() + budget_s, []
    while len(rounds) < 2 or (len(rounds) < MAX_ROUNDS and clock() < end):
        times = [clock()]
        for call in calls:
            call()
            times.append(clock())
        rounds.append(np.diff(times))
    return rounds[0], np.min(rounds, axis=0)


def _measured_weight(layer: torch.nn.Linear) -> torch.Tensor:
    return layer.weight.detach()[: max(1, MAX_IN_LAYER // layer.in_features)]


def _random(*shape: int) -> torch.Tensor:
    """The run's own generator stays as it is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _training_call(layer: torch.nn.Linear, product: Callable) -> Callable[[], object]:
    """Forward and backward of a layer."""
    weight = _measured_weight(layer).clone().requires_grad_()
    x = _random(TRAINING_ROWS, layer.in_features).requires_grad_()
    grad = _random(TRAINING_ROWS, len(weight))
    return lambda: torch.autograd.grad(product(x, weight, None), (x, weight), grad)


def choose(shapes: list[str], seconds: np.ndarray) -> dict[str, Plan]:
    """The plan of each shape, a pure function of what `measure` returns; the copy by the geometric
    mean over ROWS."""
    plans = {}
    for shape, (*generation, torchs, onednns) in zip(shapes, seconds, strict=True):
        by_copy = np.exp(np.log(generation).reshape(len(COPIES), -1).mean(axis=1))
        best = int(by_copy.argmin())
        copy = COPIES[best] if _pays(by_copy[0], by_copy[best]) else ""
        plans[shape] = Plan(copy, _pays(torchs, onednns))
    return plans


def _pays(torchs_s: float, others_s: float) -> bool:
    return bool(torchs_s >= max(MARGIN * others_s, others_s + MIN_SAVED_S))
