"""Which kernels linear layers use, by measurement at the start of a run.

The model's linear layers, or its first ones, are gone through in their order, as a forward does, so
that weights come from the caches that they come from in a forward. In generation a layer is timed
at a few numbers of rows: torch's product, the same with a transposed copy of the weight, and
oneDNN's with a packed one; in training its three products, by torch and by oneDNN. For each shape
of layer, what is faster by a margin is used. Ranks measure together, as they compute together, and
decide by the mean of their times: in float32 the kernel decides about rounding, so all ranks must
use the same.
"""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.nn.functional import linear

from bubblespec.engine.linear import (
    COPIES,
    LEVELS,
    Plan,
    differentiable_linear,
    has_onednn,
    input_gradient,
    onednn_linear,
    shape_of,
    use_plans,
    weight_gradient,
)

BUDGET_S = 0.9  # for all of it; only MIN_ROUNDS of a slow machine may take longer
MIN_ROUNDS, MAX_ROUNDS = 2, 10
MARGIN = 1.1  # a kernel must be faster by this factor
LEAST_SAVED_S = (
    5e-6  # by a copy in a call: of less nothing is left of a forward's time that could be measured
)
MOST_SHAPES = 8  # measured, those of most work; the others stay with torch's product
MOST_ELEMENTS = 1 << 21  # of the weights that are gone through: more than a core's own caches hold
MOST_IN_LAYER = 1 << 20  # of one of them: of larger ones (output heads) the first rows
FLOP = 1 << 27  # of a measured product of training: about a millisecond
FORWARDS_PER_COPY = (
    100  # forwards between two updates, at the least: they share the making of a copy
)
# oneDNN compiles code for each number of rows that it has not met, which takes about half a
# millisecond, and layers of one shape share it. Few rows come again and again; how many rows a long
# chunk or a micro-batch has is new nearly every time.
RECURRING_ROWS = 32

# What is timed of each shape: generation by rows and copy, the making of the copies, training by
# product and whether by oneDNN.
TIMINGS = [
    *(("generate", rows, copy) for rows in LEVELS for copy in ("", *COPIES)),
    *(("copy", copy) for copy in COPIES),
    *(("train", product, by_onednn) for by_onednn in (False, True) for product in range(3)),
]


def can_choose(model: torch.nn.Module) -> bool:
    """Whether there is a choice: in float32 on a CPU, and with oneDNN in torch."""
    parameter = next(model.parameters())
    return parameter.device.type == "cpu" and parameter.dtype == torch.float32 and has_onednn()


def count_shapes(model: torch.nn.Module) -> dict[str, int]:
    """Shapes of the linear layers that are measured, those of most work first, and how many layers
    have each."""
    layers = _linear_layers(model)
    count = Counter(map(shape_of, layers))
    work = {shape_of(layer): layer.weight.numel() * count[shape_of(layer)] for layer in layers}
    return {
        shape: count[shape]
        for shape in sorted(work, key=lambda shape: (-work[shape], shape))[:MOST_SHAPES]
    }


def measure(model: torch.nn.Module, clock: Callable[[], float] = time.perf_counter) -> np.ndarray:
    """Seconds of a call, float64 [shapes + 1, timings], in the order of `count_shapes` and
    `TIMINGS`: the least, as a machine with other work only adds to it, and where oneDNN compiles
    each time, a layer's share of that. The last row: what autograd takes longer with a function of
    our own."""
    end, count = clock() + BUDGET_S, count_shapes(model)
    layers = [(shape_of(layer), _timed_calls(layer)) for layer in _first_layers(model, count)]
    one_of_each = dict(reversed(layers)).items()  # the first of each shape
    times: dict[tuple, list[float]] = {}  # by (shape, timing)
    with torch.inference_mode():
        first = {
            (shape, timing): _seconds(calls[timing], clock)
            for shape, calls in one_of_each
            for timing in TIMINGS
        }
        num_rounds, round_s = 0, 0.0
        while num_rounds < MIN_ROUNDS or (num_rounds < MAX_ROUNDS and clock() + round_s < end):
            num_rounds, began = num_rounds + 1, clock()
            for timing in TIMINGS:
                generates = timing[0] == "generate"
                # What a first pass over the layers has left in the caches is what forwards find
                # there.
                for is_counted in (False, True) if generates else (True,):
                    for shape, calls in layers if generates else one_of_each:
                        seconds = _seconds(calls[timing], clock)
                        if is_counted:
                            times.setdefault((shape, timing), []).append(seconds)
            round_s = clock() - began
    least = np.array([[min(times[shape, timing]) for timing in TIMINGS] for shape in count])
    of_onednn = [
        timing for timing in TIMINGS if timing[-1] in ("packed", True) and timing[0] != "copy"
    ]
    places = [TIMINGS.index(timing) for timing in of_onednn]
    compiling = np.median(
        [[first[shape, timing] for timing in of_onednn] for shape in count] - least[:, places]
    )
    compiles = [
        timing in of_onednn and (timing[0] == "train" or timing[1] >= RECURRING_ROWS)
        for timing in TIMINGS
    ]
    shares = np.outer(1 / np.array(list(count.values())), compiles) * max(compiling, 0.0)
    return np.vstack([least + shares, np.full(len(TIMINGS), _autograd_overhead(clock))])


def training_rows(num_elements: int) -> int:
    """Rows at which training is measured on a weight of this size: a power of two."""
    rows = min(max(FLOP // (2 * num_elements), 64), 512)
    return 1 << (rows.bit_length() - 1)


def choose(shapes: list[str], seconds: np.ndarray) -> dict[str, Plan]:
    """The plan of each shape, from what `measure` returns: a pure function of the times."""
    overhead = float(seconds[-1, 0])
    return {
        shape: Plan(*_choose_copy(times), _choose_products(times, overhead))
        for shape, row in zip(shapes, seconds[:-1], strict=True)
        for times in [dict(zip(TIMINGS, row.tolist(), strict=True))]
    }


def _choose_copy(seconds: dict[tuple, float]) -> tuple[str, tuple[bool, ...]]:
    """The copy that gains most over all levels, and the levels at which it is used."""
    best, choice = 0.0, Plan()[:2]
    for copy in COPIES:
        making = seconds["copy", copy] / FORWARDS_PER_COPY
        times = [
            (seconds["generate", rows, ""], seconds["generate", rows, copy] + making)
            for rows in LEVELS
        ]
        pays = tuple(plain >= max(MARGIN * ours, ours + LEAST_SAVED_S) for plain, ours in times)
        gain = sum(
            np.log(plain / ours)
            for (plain, ours), is_used in zip(times, pays, strict=True)
            if is_used
        )
        if gain > best:
            best, choice = gain, (copy, pays)
    return choice


def _choose_products(seconds: dict[tuple, float], overhead: float) -> tuple[bool, bool, bool]:
    """The products that oneDNN computes faster, if all three gain by the margin with what autograd
    takes longer."""
    by_torch, by_onednn = (
        [seconds["train", product, ours] for product in range(3)] for ours in (False, True)
    )
    products = tuple(
        theirs >= MARGIN * ours for theirs, ours in zip(by_torch, by_onednn, strict=True)
    )
    chosen = sum(
        ours if is_used else theirs
        for theirs, ours, is_used in zip(by_torch, by_onednn, products, strict=True)
    )
    return products if sum(by_torch) >= MARGIN * (chosen + overhead) else Plan().products


def _linear_layers(model: torch.nn.Module) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if type(module) is torch.nn.Linear]


def _first_layers(model: torch.nn.Module, count: dict[str, int]) -> list[torch.nn.Linear]:
    """The model's first layers, as many as MOST_ELEMENTS allow of each shape, but at least one."""
    layers = [layer for layer in _linear_layers(model) if shape_of(layer) in count]
    share = min(
        1.0, MOST_ELEMENTS / sum(min(layer.weight.numel(), MOST_IN_LAYER) for layer in layers)
    )
    left = {shape: max(1, round(share * number)) for shape, number in count.items()}
    first = []
    for layer in layers:
        left[shape_of(layer)] -= 1
        if left[shape_of(layer)] >= 0:
            first.append(layer)
    return first


def _timed_calls(layer: torch.nn.Linear) -> dict[tuple, Callable[[], object]]:
    """Each of `TIMINGS` for a layer. They are for inference mode: autograd's part is measured by
    itself."""
    weight_MK = layer.weight.detach()[: max(1, MOST_IN_LAYER // layer.in_features)]
    arms = {copy: _layer_of(weight_MK, copy) for copy in ("", *COPIES)}
    calls = {
        ("generate", n, copy): partial(arm, _random(1, n, arm.in_features))
        for n in LEVELS
        for copy, arm in arms.items()
    }
    calls |= {("copy", copy): partial(arms[copy].refresh, always=True) for copy in COPIES}
    x, grad = (
        _random(training_rows(weight_MK.numel()), size) for size in reversed(weight_MK.shape)
    )
    for by_onednn, product in ((False, linear), (True, onednn_linear)):
        calls["train", 0, by_onednn] = partial(product, x, weight_MK)
        calls["train", 1, by_onednn] = partial(input_gradient, grad, weight_MK, by_onednn)
        calls["train", 2, by_onednn] = partial(weight_gradient, grad, x, by_onednn)
    return calls


def _layer_of(weight_MK: torch.Tensor, copy: str) -> torch.nn.Linear:
    """A layer of this weight, which always generates by the copy."""
    layer = torch.nn.Linear(*reversed(weight_MK.shape), bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight_MK, requires_grad=False)
    if copy:
        use_plans(layer, {shape_of(layer): Plan(copy, (True,) * len(LEVELS))})
    return layer


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(0)
    )  # the run's own generator stays as it is


def _seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    begin = clock()
    call()
    return clock() - begin


def _autograd_overhead(clock: Callable[[], float]) -> float:
    """Seconds that forward and backward take longer with our own autograd function than with
    torch's `linear`."""
    x, weight = _random(1, 1), _random(1, 1).requires_grad_()
    arms = (
        lambda: linear(x, weight),
        lambda: differentiable_linear(x, weight, None, Plan().products),
    )
    times = [[_seconds(lambda arm=arm: arm().backward(), clock) for arm in arms] for _ in range(20)]
    theirs, ours = np.min(times, axis=0)
    return max(ours - theirs, 1e-9)  # above 0: ranks average logarithms
