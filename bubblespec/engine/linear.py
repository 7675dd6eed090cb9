"""Linear layers on a CPU in float32: torch's own product, or oneDNN's where that is faster.

torch hands `linear` to MKL, with the weight as it is stored, [out, in]. On AMD's processors oneDNN
is more than twice as fast, and on all of them the few rows of a decoding forward are multiplied
faster by a copy of the weight in oneDNN's own order of memory. So generation may use a packed copy,
and training may use oneDNN; what pays is measured for each shape of layer at the start of a run. In
float32 the kernel decides about rounding, so all ranks must use the same, and a continued run keeps
what it began with (`setup.choose_linear`).

Copies are renewed when the weight has changed, which its version counter says: generation always
uses the current weights. Parameters, their names and their memory stay as they are.

Shape legend: K features in, M features out.
"""

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
    """What layers of one shape use oneDNN for."""

    packs: bool = False
    """Generation, with a packed copy of the weight."""
    trains: bool = False


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

    plan: Plan
    copies: dict[tuple | None, tuple[int, torch.Tensor]]
    """Packed copies of the weight (at None) and of parts of it, each with the version of the weight
    that it is of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Not through Module.__getattr__: at a few rows every microsecond counts.
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if is_inference_mode_enabled():
            return (
                onednn_linear(x, self.packed(), bias)
                if self.plan.packs
                else linear(x, weight, bias)
            )
        if self.plan.trains and x.numel() >= MIN_TRAINING_ROWS * self.in_features:
            return OneDNNLinear.apply(x, weight, bias)
        return linear(x, weight, bias)

    def packed(self, part: slice | None = None, is_rowwise: bool = False) -> torch.Tensor:
        """A packed copy of the weight, or of the part of it that a tensor-parallel rank uses;
        renewed where the weight has changed."""
        name = part and (part.start, part.stop, is_rowwise)
        weight = self._parameters["weight"]
        version, copy = self.copies.get(name, (-1, None))
        if version != weight._version:
            with torch.inference_mode():
                copy = pack(weight if part is None else part_of(weight, part, is_rowwise))
            self.copies[name] = weight._version, copy
        return copy

    def __getstate__(self) -> dict:
        """Without the copies, which are made where they are needed."""
        return {**self.__dict__, "copies": {}}


def sharded_linear(
    layer: torch.nn.Linear, part: slice, is_rowwise: bool, x: torch.Tensor
) -> torch.Tensor:
    """What one rank computes of a layer: a part of its outputs, or, if it is rowwise, its product
    with a part of the inputs, without the bias, which is added to the sum over ranks. x: [..., K],
    or [..., the part of K]."""
    bias = None if is_rowwise or layer.bias is None else layer.bias[part]
    if is_inference_mode_enabled() and getattr(layer, "plan", Plan()).packs:
        return onednn_linear(x, layer.packed(part, is_rowwise), bias)
    return linear(x, part_of(layer.weight, part, is_rowwise), bias)


def part_of(weight: torch.Tensor, part: slice, is_rowwise: bool) -> torch.Tensor:
    """A part of the inputs of a weight [M, K] if it is rowwise, otherwise of its outputs."""
    return weight[:, part] if is_rowwise else weight[part]


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The weight [M, K] in oneDNN's order of memory."""
    return torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous())


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
            module.__class__, module.plan, module.copies = FastLinear, plan, {}
    refresh_copies(model)


def refresh_copies(model: torch.nn.Module) -> None:
    """After an update of the weights: make their copies now, not in the next forward, whose time
    would be taken for the cost of its rows."""
    for module in model.modules():
        if isinstance(module, FastLinear) and module.plan.packs:
            module.packed()


def layers_by_shape(model: torch.nn.Module) -> dict[str, list[torch.nn.Linear]]:
    """The linear layers of torch's own class."""
    layers: dict[str, list[torch.nn.Linear]] = {}
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            layers.setdefault(shape_of(module), []).append(module)
    return layers


def measure(model: torch.nn.Module, clock: Callable[[], float] = time.perf_counter) -> np.ndarray:
    """Seconds of a call by torch and by oneDNN, float64 [shapes, 2, timings], in the order of
    `layers_by_shape`: of generation with each of ROWS, then of training.

    The minimum of a few rounds, as other work on the machine only adds to it. A round goes through
    layers of all shapes, as a forward does, so that weights come from where they come from in a
    forward.
    """
    shapes = list(layers_by_shape(model).values())
    table = np.zeros((len(shapes), 2, len(ROWS) + 1))
    sizes = [_measured_weight(layers[0]).numel() for layers in shapes]
    total = sum(size * len(layers) for size, layers in zip(sizes, shapes, strict=True))
    share = min(1.0, MAX_ELEMENTS / max(total, 1))
    generating, training = [], []  # (number of the shape, layer)
    for number, (size, layers) in enumerate(zip(sizes, shapes, strict=True)):
        generating += [(number, layer) for layer in layers[: max(1, round(share * len(layers)))]]
        training += [(number, layer) for layer in layers[: max(1, MAX_TRAINING_ELEMENTS // size)]]
    for kernel, product in enumerate((linear, onednn_linear)):
        weights = [_measured_weight(layer) for _, layer in generating]
        if kernel == 1:
            weights = [pack(weight) for weight in weights]
        for column, rows in enumerate((*ROWS, TRAINING_ROWS)):
            if rows == TRAINING_ROWS:
                measured, trained = training, OneDNNLinear.apply if kernel == 1 else linear
                calls = [_training_call(layer, trained) for _, layer in training]
            else:
                measured = generating
                calls = [
                    partial(_generate, product, _random(1, rows, layer.in_features), weight)
                    for (_, layer), weight in zip(generating, weights, strict=True)
                ]
            first, best = _seconds_of_calls(calls, clock, BUDGET_S / table[0].size)
            number_of_call = np.array([number for number, _ in measured])
            for number, layers in enumerate(shapes):
                is_of_shape = number_of_call == number
                table[number, kernel, column] = best[is_of_shape].mean()
                # oneDNN compiles code for each number of rows that it has not met yet. Few rows
                # come again and again; how many a long chunk or a micro-batch has is new nearly
                # every time.
                if kernel == 1 and rows >= ROWS[-1]:
                    table[number, kernel, column] += (first - best)[is_of_shape].sum() / len(layers)
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


@torch.inference_mode()
def _generate(product: Callable, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return product(x, weight)


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
    """The plan of each shape, a pure function of what `measure` returns; for generation by the
    geometric mean over ROWS."""
    plans = {}
    for shape, of_shape in zip(shapes, seconds, strict=True):
        generation = np.exp(np.log(of_shape[:, :-1]).mean(axis=1))
        plans[shape] = Plan(_pays(*generation), _pays(*of_shape[:, -1]))
    return plans


def _pays(torchs_s: float, onednns_s: float) -> bool:
    return bool(torchs_s >= max(MARGIN * onednns_s, onednns_s + MIN_SAVED_S))
