"""Linear layers of generation on a CPU in float32: torch's product, or one of a copied weight.

torch hands `linear` to MKL, with the weight as it is stored, [out, in]. From a copy in oneDNN's own
order of memory, 2 to 32 rows of a model that does not fit in the caches take up to half as long;
small models are faster without. So a run measures both at its start. The kernel affects rounding,
so all ranks use the same one, and a resumed run keeps its choice (`choose_packed`).

Copies are renewed when the weight's version counter has changed. Parameters, their names and their
memory stay as they are.

Shape legend: K features in, M features out.
"""

import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import is_inference_mode_enabled
from torch.nn.functional import linear

from bubblespec.config import Config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.weights import by_parts, linear_modules, part_of, stacks_of, version_of
from bubblespec.mechanisms import Run
from bubblespec.telemetry.reporter import show_phase
from bubblespec.telemetry.trace import describe_hardware

# Rows of the measured products, and the counts of each; torch's product serves larger ones.
ROWS = {1: range(1, 2), 2: range(2, 3), 3: range(3, 4), 4: range(4, 5), 6: range(5, 9)}
ROWS |= {12: range(9, 17), 24: range(17, 33)}
BUDGET_S = 1.0  # for all measurements; only two rounds of a slow machine may take longer
MAX_ROUNDS = 10
MARGIN = 1.1  # by which the copy must be faster: less is lost in noise
# Elements of the measured weights, float32: more than the caches of a core hold, shared ones too.
# Times of weights in a cache do not hold for weights in memory.
MAX_ELEMENTS = 1 << 25
MAX_IN_LAYER = 1 << 23  # of one weight; of larger ones (output heads) the first rows


def can_choose(config: Config, model: torch.nn.Module) -> bool:
    """Whether there is a choice: in float32 on a CPU, with oneDNN in torch, and none is given."""
    weight = next(model.parameters())
    if config.model.cpu_linear == "torch" or config.model.batch_invariant:
        return False
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and has_onednn()


def has_onednn() -> bool:
    """Whether this torch has oneDNN's products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def packed_linear(x: torch.Tensor, copy: torch.Tensor, bias=None) -> torch.Tensor:
    """Compute `linear` with a weight's packed copy, without autograd."""
    return torch.ops.mkldnn._linear_pointwise.default(x, copy, bias, "none", [], "")


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Copy a weight [M, K] into oneDNN's order of memory."""
    return torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous())


class PackedLinear(torch.nn.Linear):
    """A linear layer with copies, into which `use_packed` turns a model's layers."""

    rows: frozenset[int]  # numbers of rows that the copy serves
    # Packed copies of the weight and of its parts, each with the weight's version.
    copies: dict[tuple, tuple[tuple[int, ...], torch.Tensor]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Not through Module.__getattr__: at a few rows every microsecond counts.
        weight, bias = cast(torch.Tensor, self._parameters["weight"]), self._parameters["bias"]
        if is_inference_mode_enabled() and x.numel() // self.in_features in self.rows:
            return packed_linear(x, self.packed(), bias)
        return linear(x, weight, bias)

    def partial(self, x: torch.Tensor, parts: tuple[slice, ...], is_rowwise: bool) -> torch.Tensor:
        """Return partial products, as `weights.by_parts` does, packed where that is chosen."""
        if not is_inference_mode_enabled() or x.numel() // x.shape[-1] not in self.rows:
            return by_parts(linear, x, self, parts, is_rowwise)
        bias = None
        if not is_rowwise and self.bias is not None:
            bias = torch.cat([self.bias[part] for part in parts])
        return packed_linear(x, self.packed(parts, is_rowwise), bias)

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


def generating_layers(model: torch.nn.Module) -> Iterator[torch.nn.Linear]:
    """Yield the linear layers of torch's own class that generation uses, stacks for their parts."""
    stacked = {layer for of in model.modules() for layers in stacks_of(of) for layer in layers}
    for module in linear_modules(model):
        if type(module) is torch.nn.Linear and module not in stacked:
            yield module


def use_packed(model: torch.nn.Module, rows: Collection[int]) -> None:
    """Give the layers of generation, output head included, copies for some numbers of rows."""
    for module in list(generating_layers(model)) if rows else ():
        module.__class__ = PackedLinear
        layer = cast(PackedLinear, module)
        layer.rows, layer.copies = frozenset(rows), {}
    refresh_copies(model)


def refresh_copies(model: torch.nn.Module) -> None:
    """Renew copies after an update, so that the next forward's measured time excludes them."""
    for module in linear_modules(model):
        if isinstance(module, PackedLinear):
            module.packed()


def measure(model: torch.nn.Module, clock: Callable[[], float] = time.perf_counter) -> np.ndarray:
    """Measure products of some layers, in seconds, float64 [torch's or packed, ROWS].

    Each is the minimum of a few rounds, as other work on the machine only adds time. A round goes
    through layers of all kinds, as a forward does, so that weights come from the same level of
    memory."""
    weights, num_elements = [], 0
    layers = list(generating_layers(model))
    random.Random(0).shuffle(layers)  # every kind among the first
    for layer in layers:
        if num_elements < MAX_ELEMENTS:
            weights.append(layer.weight.detach()[: MAX_IN_LAYER // layer.in_features or 1])
            num_elements += weights[-1].numel()
    with torch.inference_mode():
        arms = (linear, weights), (packed_linear, [pack(weight) for weight in weights])
        table = np.zeros((len(arms), len(ROWS)))
        for column, count in enumerate(ROWS):
            x_of = {weight.shape[1]: torch.ones(count, weight.shape[1]) for weight in weights}
            for row, (product, of) in enumerate(arms):
                pairs = zip(of, weights, strict=True)
                calls = [partial(product, x_of[plain.shape[1]], weight) for weight, plain in pairs]
                table[row, column] = _seconds_of_calls(calls, clock, BUDGET_S / table.size)
    return table


def _seconds_of_calls(
    calls: Sequence[Callable[[], object]], clock: Callable[[], float], budget_s: float
) -> float:
    """Time calls one after another, each in its best round."""
    end = clock() + budget_s
    rounds: list[np.ndarray] = []
    while len(rounds) < 2 or (len(rounds) < MAX_ROUNDS and clock() < end):
        times = [clock()]
        for call in calls:
            call()
            times.append(clock())
        rounds.append(np.diff(times))
    return float(np.min(rounds, axis=0).sum())


def choose_packed(ranks: Ranks, model: torch.nn.Module, saved: dict | None) -> dict:
    """Choose the rows that copies serve, the same on all ranks, where it `can_choose`.

    Returns what checkpoints keep: {"hardware": ..., "packed": numbers of rows}. saved: the
    checkpoint's choice, kept on the same processor, as other kernels round differently."""
    hardware = describe_hardware(ranks.device)
    is_kept = saved is not None and "packed" in saved and saved["hardware"] == hardware
    if ranks.all_gather(np.array([is_kept], np.uint8)).all() and saved is not None:
        return saved
    torch_s, packed_s = np.exp(np.log(ranks.all_gather(measure(model))).mean(axis=0))
    is_faster = torch_s >= MARGIN * packed_s
    wins = [rows for rows, wins in zip(ROWS.values(), is_faster, strict=True) if wins]
    return {"hardware": hardware, "packed": [count for rows in wins for count in rows]}


def prepare(run: Run) -> None:
    """Choose the policy's kernels, and renew its copies after updates."""
    if not can_choose(run.config, run.model):
        return
    with show_phase(run.ranks, "timing linear layers"):
        chosen = run.chosen["linear"] = choose_packed(run.ranks, run.model, run.state.get("linear"))
        run.set_kernels = partial(use_packed, rows=chosen["packed"])
        run.set_kernels(run.model)
    run.after_update.append(partial(refresh_copies, run.model))
