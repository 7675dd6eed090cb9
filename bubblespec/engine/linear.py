"""Linear layers on a CPU in float32: torch's own product, or a faster one for some shapes and
numbers of rows.

torch hands `linear` to MKL, with the weight as it is stored, [out, in]. That is not the fastest
everywhere: on AMD's processors oneDNN is more than twice as fast, and on all of them the few rows
of a decoding forward are multiplied faster by a copy of the weight in another order of memory. So
generation may use a copy, and training may use oneDNN; what pays is measured for each shape of
layer at the start of a run. In float32 the kernel decides about rounding, so all ranks must use the
same, and a continued run keeps what it began with (`setup.choose_linear`).

Copies are renewed when the weight has changed, which its version counter says: generation always
uses the current weights. Parameters, their names and their memory stay as they are.

Shape legend: N rows (tokens), K features in, M features out.
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

# Rows of a forward at which generation is measured, each for a range (see `level`). No powers of
# two: those suit MKL's kernels, which take up to twice as long for a row less or more, and any
# number of rows may be left.
LEVELS = (1, 3, 6, 12, 48)
MANY_ROWS = 32  # and more are all of the last level
MIN_TRAINING_ROWS = 128  # training forwards of fewer rows are torch's
COPIES = ("transposed", "packed")

BUDGET_S = 0.9  # for all measurements; only two rounds of a slow machine may take longer
MAX_ROUNDS = 10
MARGIN = 1.1  # a kernel must be faster by this factor,
MIN_SAVED_S = 5e-6  # and by so much in a call: less is lost in a forward's time
MAX_SHAPES = 8  # measured, those with most work; the others stay with torch's product
MAX_ELEMENTS = 1 << 21  # of the weights of a shape: more than a core's own caches hold
MAX_IN_LAYER = 1 << 20  # of one of them: of larger ones (output heads) the first rows
TRAINING_ROWS = 256  # of the measured products of training
FORWARDS_PER_COPY = 100  # between two updates, at least: they share the making of a copy

# What is timed of each shape: generation by rows and copy, the making of the copies, training by
# torch and by oneDNN.
TIMINGS = [
    *(("generate", rows, copy) for rows in LEVELS for copy in ("", *COPIES)),
    *(("copy", copy) for copy in COPIES),
    *(("train", by_onednn) for by_onednn in (False, True)),
]


class Plan(NamedTuple):
    """How layers of one shape are computed."""

    copy: str = ""
    """Of the weight, for generation: "transposed" is [K, M] for torch's own product, "packed" is in
    oneDNN's order; or none."""
    levels: tuple[bool, ...] = (False,) * len(LEVELS)
    """Whether generation uses the copy, by `level` of the rows."""
    trains: bool = False
    """Whether training uses oneDNN."""


def level(rows: int) -> int:
    """Index of the `LEVELS` that stands for this many rows: 1, 2 and 3, 4 to 7, 8 to 31, 32 and
    more."""
    return sum(rows >= first for first in (2, 4, 8, 32))


def can_choose(model: torch.nn.Module) -> bool:
    """Whether there is a choice: in float32 on a CPU, and with oneDNN in torch."""
    parameter = next(model.parameters())
    is_float = parameter.device.type == "cpu" and parameter.dtype == torch.float32
    return is_float and has_onednn()


def has_onednn() -> bool:
    """Whether this torch has oneDNN's products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
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
    # By rows: a look-up takes less than working out the level.
    _uses_copy = (False,) * (MANY_ROWS + 1)
    _copy: torch.Tensor | None = None
    _copied = -1  # version of the weight that the copy is of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Not through Module.__getattr__: at a few rows every microsecond counts.
        parameters = self._parameters
        weight, bias = parameters["weight"], parameters["bias"]
        rows = x.numel() // self.in_features
        if not is_inference_mode_enabled():
            if rows >= MIN_TRAINING_ROWS and self.plan.trains:
                return OneDNNLinear.apply(x, weight, bias)
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
        """Renew the copy of the weight where the weight has changed."""
        weight = self.weight
        if not self.plan.copy or (self._copied == weight._version and not always):
            return
        if self.plan.copy == "packed":
            self._copy = torch.ops.mkldnn._reorder_linear_weight.default(weight)
        else:
            if self._copy is None:  # [M, K] to `linear`, [K, M] in memory
                self._copy = torch.empty(weight.shape[::-1]).t()
            self._copy.copy_(weight)
        self._copied = weight._version

    def __getstate__(self) -> dict:
        """Without the copy, which is made where it is needed."""
        return {**self.__dict__, "_copy": None, "_copied": -1}


def shape_of(module: torch.nn.Linear) -> str:
    """The name of a layer's shape, features in by features out."""
    return f"{module.in_features}x{module.out_features}"


def read_plans(choice: dict | None) -> dict[str, Plan]:
    """Plans by shape, from a choice as checkpoints keep it; none without one."""
    saved = {} if choice is None else choice["plans"]
    return {
        shape: Plan(copy, tuple(levels), trains is True)
        for shape, (copy, levels, trains) in saved.items()
    }


def use_plans(model: torch.nn.Module, plans: dict[str, Plan]) -> None:
    """Give the linear layers of a model, its output head among them, the plans of their shapes; a
    layer of another class than torch's stays as it is. Copies of the weights are made now."""
    for module in _linear_layers(model):
        plan = plans.get(shape_of(module), Plan())
        if plan != Plan():
            module.__class__, module.plan = FastLinear, plan
            module._uses_copy = tuple(plan.levels[level(rows)] for rows in range(MANY_ROWS + 1))
    refresh_copies(model)


def refresh_copies(model: torch.nn.Module) -> None:
    """After an update of the weights: make their copies now, not in the next forward, whose time
    would be taken for the cost of its rows."""
    for module in model.modules():
        if isinstance(module, FastLinear):
            module.refresh()


def measured_layers(model: torch.nn.Module) -> dict[str, list[torch.nn.Linear]]:
    """The layers of each shape that is measured, those with most work first."""
    layers: dict[str, list[torch.nn.Linear]] = {}
    for layer in _linear_layers(model):
        layers.setdefault(shape_of(layer), []).append(layer)
    work = {shape: len(of) * of[0].weight.numel() for shape, of in layers.items()}
    order = sorted(layers, key=lambda shape: (-work[shape], shape))
    return {shape: layers[shape] for shape in order[:MAX_SHAPES]}


def measure(model: torch.nn.Module, clock: Callable[[], float] = time.perf_counter) -> np.ndarray:
    """Seconds of a call, float64 [shapes, timings], in the order of `measured_layers` and
    `TIMINGS`: the minimum of a few rounds, as other work on the machine only adds to it. A round
    goes through some layers of a shape, so that weights come from the caches that they come from
    in a forward."""
    shapes, table = measured_layers(model), []
    for layers in shapes.values():
        end = clock() + BUDGET_S / len(shapes)
        size = min(layers[0].weight.numel(), MAX_IN_LAYER)
        calls = [_timed_calls(layer) for layer in layers[: max(1, MAX_ELEMENTS // size)]]
        best = dict.fromkeys(TIMINGS, np.inf)
        first: dict[tuple, float] = {}
        for number in range(MAX_ROUNDS):
            for timing in TIMINGS:
                of_layers = [call[timing] for call in calls[: None if timing[0] != "copy" else 1]]
                began = clock()
                for call in of_layers:
                    call()
                best[timing] = min(best[timing], (clock() - began) / len(of_layers))
                first.setdefault(timing, (clock() - began) / len(of_layers))
            if number and clock() > end:
                break
        # oneDNN compiles code for each number of rows that it has not met yet. Few rows come again
        # and again; how many rows a long chunk or a micro-batch has is new nearly every time.
        for timing in (("generate", LEVELS[-1], "packed"), ("train", True)):
            best[timing] += (first[timing] - best[timing]) * len(calls) / len(layers)
        table.append([best[timing] for timing in TIMINGS])
    return np.array(table)


def choose(shapes: list[str], seconds: np.ndarray) -> dict[str, Plan]:
    """The plan of each shape, from what `measure` returns: a pure function of the times."""
    return {
        shape: _choose(dict(zip(TIMINGS, row.tolist(), strict=True)))
        for shape, row in zip(shapes, seconds, strict=True)
    }


def _choose(seconds: dict[tuple, float]) -> Plan:
    """The copy that gains most over all levels, and the levels at which it is used."""
    trains = seconds["train", False] >= MARGIN * seconds["train", True]
    best, plan = 0.0, Plan(trains=trains)
    for copy in COPIES:
        making_s = seconds["copy", copy] / FORWARDS_PER_COPY
        gain, levels = 0.0, []
        for rows in LEVELS:
            torchs = seconds["generate", rows, ""]
            ours = seconds["generate", rows, copy] + making_s
            levels.append(torchs >= max(MARGIN * ours, ours + MIN_SAVED_S))
            gain += np.log(torchs / ours) if levels[-1] else 0.0
        if gain > best:
            best, plan = gain, Plan(copy, tuple(levels), trains)
    return plan


def _linear_layers(model: torch.nn.Module) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if type(module) is torch.nn.Linear]


def _timed_calls(layer: torch.nn.Linear) -> dict[tuple, Callable[[], object]]:
    """Each of `TIMINGS` for a layer."""
    weight = layer.weight.detach()[: max(1, MAX_IN_LAYER // layer.in_features)]
    # The run's own generator stays as it is.
    random = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    arms = {copy: _layer_of(weight, copy) for copy in ("", *COPIES)}
    calls = {
        ("generate", rows, copy): partial(
            torch.inference_mode()(arm), random(1, rows, len(weight.t()))
        )
        for rows in LEVELS
        for copy, arm in arms.items()
    }
    calls |= {("copy", copy): partial(arms[copy].refresh, always=True) for copy in COPIES}
    x = random(TRAINING_ROWS, weight.shape[1]).requires_grad_()
    grad, trained = random(TRAINING_ROWS, weight.shape[0]), weight.clone().requires_grad_()

    def train(product: Callable) -> None:
        torch.autograd.grad(product(x, trained, None), (x, trained), grad)

    return calls | {
        ("train", False): partial(train, linear),
        ("train", True): partial(train, OneDNNLinear.apply),
    }


def _layer_of(weight: torch.Tensor, copy: str) -> torch.nn.Linear:
    """A layer of this weight, which always generates by the copy."""
    layer = torch.nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    if copy:
        use_plans(layer, {shape_of(layer): Plan(copy, (True,) * len(LEVELS))})
    return layer
