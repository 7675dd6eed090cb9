"""Linear layers on a CPU in float32: torch's own product, or another one where that is faster.

torch hands `linear` to MKL, with the weight as it is stored, [out, in]. On AMD's processors oneDNN
is more than twice as fast; everywhere a copy of the weight in oneDNN's own order of memory is
faster for few rows. Two to four rows are fastest as `weight @ x.T`, for which MKL has other code
than for `x @ weight.T`. Time has steps in the number of rows: four may take less than three. So
generation may use each of these and add rows of zeros, and training may use oneDNN, as measured at
the start of a run for each shape of layer and number of rows. The kernel affects rounding, so all
ranks use the same one, and a resumed run keeps its choice (`choose_linear`).

Copies are renewed when the weight's version counter has changed. Parameters, their names and their
memory stay as they are.

Shape legend: K features in, M features out.
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import chain, product
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import is_inference_mode_enabled
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from bubblespec.config import Config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.weights import by_parts, linear_modules, part_of, stacks_of, version_of
from bubblespec.telemetry.trace import describe_hardware

# Rows of a product at which generation is measured; another number counts as the next of these.
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 48, 128)
MAX_PADDED = 24  # rows up to which those between are padded to one of ROWS
MIN_TRAINING_ROWS = 128  # training forwards of fewer rows are torch's

BUDGET_S = 2.0  # for all measurements; only two rounds of a slow machine may take longer
MAX_ROUNDS = 10
MARGIN = 1.1  # a kernel must be faster by this factor,
MIN_SAVED_S = 2e-6  # and by so much in a call: less is lost in noise
PADDING_S = 5e-6  # that rows of zeros take to be made
# Elements of the measured weights, float32: more than the caches of a core hold, shared ones too.
# Times of weights in a cache do not hold for weights in memory.
MAX_ELEMENTS = 1 << 25
MAX_IN_LAYER = 1 << 23  # of one weight; of larger ones (output heads) the first rows
TRAINING_ROWS = 256  # of the measured products of training
MAX_TRAINED = 1 << 21  # elements, of all measured weights of a shape


TORCH, TRANSPOSED, PACKED = KERNELS = ("torch", "transposed", "packed")  # the simplest first
OPTIONS = {"rows": list(ROWS), "kernels": list(KERNELS)}  # among which a choice is made


class Call(NamedTuple):
    """How a product of generation is computed."""

    kernel: str = TORCH
    pad_to: int = 0  # pad to this many rows with zeros; 0: no padding


class Plan(NamedTuple):
    """Kernels of layers of one shape."""

    calls: tuple[Call, ...] = ()  # in generation, for each of ROWS; none for torch's products
    trains: bool = False  # whether training uses oneDNN

    def by_rows(self) -> tuple[Call, ...]:
        """Return the calls for 0, 1, 2, ... rows, up to the last of ROWS."""
        counts = range(ROWS[-1] + 1)
        return tuple(_as_measured(self.calls, count) if self.calls else Call() for count in counts)


def _as_measured(calls: tuple[Call, ...], count: int) -> Call:
    """Return the call for the next of ROWS."""
    number = bisect_left(ROWS, count)
    is_between = 0 < count < ROWS[number] <= MAX_PADDED
    if not is_between or calls[number].pad_to or calls[number].kernel == PACKED:
        return calls[number]
    # 13 to 15 rows may take MKL a third longer than 16.
    return calls[number]._replace(pad_to=ROWS[number])


def can_choose(config: Config, model: torch.nn.Module) -> bool:
    """Whether there is a choice: in float32 on a CPU, with oneDNN in torch, and none is given."""
    weight = next(model.parameters())
    if config.model.cpu_linear == "torch" or config.model.batch_invariant:
        return False
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and has_onednn()


def has_onednn() -> bool:
    """Whether this torch has oneDNN's products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias=None) -> torch.Tensor:
    """Compute `linear` by oneDNN, without autograd; weight: [M, K], of any strides, or packed."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def transposed_linear(x: torch.Tensor, weight: torch.Tensor, bias=None) -> torch.Tensor:
    """Compute `linear` as (weight @ x.T).T, without autograd. x: [..., K]; weight: [M, K]."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # otherwise x.T has no fast product
    out = torch.mm(weight, rows.t()).t().contiguous()
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], len(weight))


PRODUCTS = {TORCH: linear, TRANSPOSED: transposed_linear, PACKED: onednn_linear}


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
    """A linear layer with a plan, into which `use_plans` turns a model's layers."""

    plan: Plan
    calls: tuple[Call, ...]  # by number of rows, see `Plan.by_rows`
    # Packed copies of the weight and of its parts, each with the weight's version.
    copies: dict[tuple, tuple[tuple[int, ...], torch.Tensor]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Not through Module.__getattr__: at a few rows every microsecond counts.
        weight, bias = cast(torch.Tensor, self._parameters["weight"]), self._parameters["bias"]
        if is_inference_mode_enabled():
            kernel, pad_to = self.calls[min(x.numel() // self.in_features, ROWS[-1])]
            weight = self.packed() if kernel == PACKED else weight
            return _product(x, weight, bias, kernel, pad_to)
        if self.plan.trains and x.numel() >= MIN_TRAINING_ROWS * self.in_features:
            return OneDNNLinear.apply(x, weight, bias)
        return linear(x, weight, bias)

    def partial(self, x: torch.Tensor, parts: tuple[slice, ...], is_rowwise: bool) -> torch.Tensor:
        """See `weights.by_parts`."""
        kernel, pad_to = Call()
        if is_inference_mode_enabled() and x.numel():
            kernel, pad_to = self.calls[min(x.numel() // x.shape[-1], ROWS[-1])]
        if kernel != PACKED:
            compute = partial(_product, kernel=kernel, pad_to=pad_to)
            return by_parts(compute, x, self, parts, is_rowwise)
        bias = None
        if not is_rowwise and self.bias is not None:
            bias = torch.cat([self.bias[part] for part in parts])
        return _product(x, self.packed(parts, is_rowwise), bias, kernel, pad_to)

    def packed(
        self, parts: tuple[slice, ...] = (slice(None),), is_rowwise: bool = False
    ) -> torch.Tensor:
        """Return a current packed copy of the weight, or of a tensor-parallel rank's parts."""
        name, version = (*((part.start, part.stop) for part in parts), is_rowwise), version_of(self)
        if name not in self.copies or self.copies[name][0] != version:
            weight = cast(torch.Tensor, self._parameters["weight"])
            with torch.inference_mode():
                copy = pack(torch.cat([part_of(weight, part, is_rowwise) for part in parts]))
            self.copies[name] = version, copy
        return self.copies[name][1]

    def __getstate__(self) -> dict:
        """Return the state without copies, which are made on demand."""
        return {**self.__dict__, "copies": {}}


def _product(x: torch.Tensor, weight: torch.Tensor, bias, kernel: str, pad_to: int):
    """Multiply x [..., K] by a weight [M, K], or its packed copy."""
    compute = PRODUCTS[kernel]
    if not pad_to:
        return compute(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    out = compute(pad(rows, (0, 0, 0, pad_to - len(rows))), weight, bias)
    return out[: len(rows)].view(*x.shape[:-1], out.shape[-1])


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Copy a weight [M, K] into oneDNN's order of memory."""
    return torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous())


def shape_of(module: torch.nn.Linear) -> str:
    """Name a layer's shape, features in by features out."""
    return f"{module.in_features}x{module.out_features}"


def read_plans(choice: dict | None) -> dict[str, Plan]:
    """Return plans by shape from a checkpoint's choice; none without one."""
    saved = {} if choice is None else choice["plans"]
    return {
        shape: Plan(tuple(Call(*call) for call in calls), trains)
        for shape, (calls, trains) in saved.items()
    }


def use_plans(model: torch.nn.Module, plans: dict[str, Plan]) -> None:
    """Give torch's linear layers, output head included, their plans, and make their copies.

    Layers of a stack are computed by themselves in training alone."""
    stacked = {layer for of in model.modules() for layers in stacks_of(of) for layer in layers}
    for shape, layers in layers_by_shape(model).items():
        plan = plans.get(shape, Plan())
        for module in layers:
            own = Plan(trains=plan.trains) if module in stacked else plan
            if own == Plan():
                continue
            module.__class__ = FastLinear
            fast = cast(FastLinear, module)
            fast.plan, fast.calls, fast.copies = own, own.by_rows(), {}
    refresh_copies(model)


def refresh_copies(model: torch.nn.Module) -> None:
    """Renew copies after an update, so that the next forward's measured time excludes them."""
    for module in linear_modules(model):
        if isinstance(module, FastLinear) and any(c.kernel == PACKED for c in module.plan.calls):
            module.packed()


def layers_by_shape(model: torch.nn.Module) -> dict[str, list[torch.nn.Linear]]:
    """Return the linear layers of torch's own class, stacks included."""
    layers: dict[str, list[torch.nn.Linear]] = {}
    for module in linear_modules(model):
        if type(module) is torch.nn.Linear:
            layers.setdefault(shape_of(module), []).append(module)
    return layers


def measure(model: torch.nn.Module, clock: Callable[[], float] = time.perf_counter) -> np.ndarray:
    """Measure calls by each of KERNELS in seconds, float64 [shapes, kernels, timings].

    Shapes are in the order of `layers_by_shape`; timings are of generation with each of ROWS, then
    of training, infinite for a kernel without it. Each is the minimum of a few rounds, as other
    work on the machine only adds time. A round goes through layers of all shapes, as a forward
    does, so that weights come from the same level of memory."""
    layers = layers_by_shape(model).values()
    shapes = [[_first_rows(layer, MAX_IN_LAYER) for layer in of] for of in layers]
    share = min(1.0, MAX_ELEMENTS / max(sum(len(of) * of[0].numel() for of in shapes), 1))
    generating = [of[: max(1, round(share * len(of)))] for of in shapes]
    training = [
        [
            _first_rows(layer, MAX_TRAINED)
            for layer in of[: MAX_TRAINED // of[0].weight.numel() or 1]
        ]
        for of in layers
    ]
    packed = [[pack(weight) for weight in of] for of in generating]
    table = np.full((len(shapes), len(KERNELS), len(ROWS) + 1), np.inf)
    for number, column in np.ndindex(table.shape[1:]):
        kernel, is_training = KERNELS[number], column == len(ROWS)
        if is_training and kernel == TRANSPOSED:
            continue
        if is_training:
            product_of = OneDNNLinear.apply if kernel == PACKED else linear
            calls = [[_training_call(product_of, weight) for weight in of] for of in training]
        else:
            weights = packed if kernel == PACKED else generating
            inputs = [_random(1, ROWS[column], of[0].shape[1]) for of in shapes]
            pairs = zip(inputs, weights, strict=True)
            calls = [[partial(PRODUCTS[kernel], x, weight) for weight in of] for x, of in pairs]
        with torch.inference_mode(not is_training):
            seconds = _seconds_of_calls(calls, clock, BUDGET_S / table[0].size)
        for shape, (first, best) in enumerate(seconds):
            table[shape, number, column] = best.mean()
            # oneDNN compiles code for each new number of rows. Small numbers recur; that of a long
            # chunk or a micro-batch is new nearly every time.
            if kernel == PACKED and column >= len(ROWS) - 1:
                table[shape, number, column] += (first - best).sum() / len(shapes[shape])
    return table


def _seconds_of_calls(
    calls: list[list[Callable[[], object]]], clock: Callable[[], float], budget_s: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Time the calls of each shape, in the first and in the best round, float64 [calls] each."""
    end = clock() + budget_s
    rounds: list[np.ndarray] = []
    while len(rounds) < 2 or (len(rounds) < MAX_ROUNDS and clock() < end):
        times = [clock()]
        for call in chain.from_iterable(calls):
            call()
            times.append(clock())
        rounds.append(np.diff(times))
    ends = np.cumsum([len(of) for of in calls])[:-1]
    return list(zip(np.split(rounds[0], ends), np.split(np.min(rounds, axis=0), ends), strict=True))


def _first_rows(layer: torch.nn.Linear, limit: int) -> torch.Tensor:
    """Return first rows of a layer's weight, at most `limit` elements."""
    return layer.weight.detach()[: limit // layer.in_features or 1]


def _random(*shape: int) -> torch.Tensor:
    """Draw normal numbers by a generator apart from the run's."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _training_call(product: Callable, weight: torch.Tensor) -> Callable[[], object]:
    """Return a call that computes forward and backward of a layer."""
    weight = weight.clone().requires_grad_()
    x = _random(TRAINING_ROWS, weight.shape[1]).requires_grad_()
    grad = _random(TRAINING_ROWS, len(weight))
    return lambda: torch.autograd.grad(product(x, weight, None), (x, weight), grad)


def choose(shapes: list[str], seconds: np.ndarray) -> dict[str, Plan]:
    """Choose plans by `measure`'s result: the simplest kernels and padding that no other beats."""
    plans = {}
    for shape, of_shape in zip(shapes, seconds, strict=True):
        generation, (torch_s, *_, onednn_s) = of_shape[:, :-1], of_shape[:, -1]
        calls = tuple(_choose_call(generation, number) for number in range(len(ROWS)))
        is_plain = all(call == Call() for call in calls)
        plans[shape] = Plan(() if is_plain else calls, bool(_beats(onednn_s, torch_s)))
    return plans


def _choose_call(seconds: np.ndarray, number: int) -> Call:
    """Choose the call for ROWS[number]. seconds: float64 [kernels, ROWS]."""
    options = {Call(kernel): of[number] for kernel, of in zip(KERNELS, seconds, strict=True)}
    for kernel, padded in product(range(len(KERNELS)), range(number + 1, len(ROWS))):
        options[Call(KERNELS[kernel], ROWS[padded])] = seconds[kernel, padded] + PADDING_S
    best = min(options.values())
    return next(call for call, call_s in options.items() if not _beats(best, call_s))


def _beats(other_s: float, simple_s: float) -> bool:
    """Whether the other kernel is faster by more than noise."""
    return simple_s >= max(MARGIN * other_s, other_s + MIN_SAVED_S)


def choose_linear(
    config: Config, ranks: Ranks, model: torch.nn.Module, saved: dict | None
) -> dict | None:
    """Choose the kernels of linear layers, the same on all ranks; None unless `can_choose`.

    Returns what checkpoints keep: {"hardware": ..., "options": OPTIONS, "plans": by shape}.
    saved: the checkpoint's choice, kept on the same processor, as other kernels round differently.
    """
    if not can_choose(config, model):
        return None
    hardware = describe_hardware(ranks.device)
    kept = {} if saved is None else {key: saved.get(key) for key in ("hardware", "options")}
    is_kept = kept == {"hardware": hardware, "options": OPTIONS}
    if ranks.gather(np.array([is_kept], np.uint8)).all():
        return saved
    seconds = np.exp(np.log(ranks.gather(measure(model))).mean(axis=0))
    shapes = list(layers_by_shape(model))
    return {"hardware": hardware, "options": OPTIONS, "plans": choose(shapes, seconds)}
