"""Seconds of a forward as a function of its load: fitted on measured forwards, or a roofline; of
one rank alone, and of all ranks together.

    T = constant + f(tokens) + rates of rows, wide rows, positions, prompt and draft tokens, pairs

f is piecewise linear with knots at powers of two and never falls: a GPU's forwards take the same
time up to saturation and then grow with the tokens, a CPU's grow from the first token on. Beyond
the last knot f continues with its last slope. All coefficients are at least 0.

Pairs: a row that feeds n tokens over p positions attends to about n * p of them, where a decoding
row attends to p. A load has sums over rows only, so tokens * positions / rows is taken, less the
positions themselves.
"""

import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bubblespec.engine.tensor_parallel import TPUnsupported, shard_heads
from bubblespec.errors import InputError
from bubblespec.records import Load
from bubblespec.telemetry.trace import FOLDER, read_meta, read_table

RATES = ("rows", "wide_rows", "positions", "prompt_tokens", "draft_tokens", "pairs")
# A forward that takes this many times its prediction was interrupted, and is left out.
INTERRUPTED = 3.0
NUM_REFITS = 4
MIN_FORWARDS = 10
# Penalties, in squared relative errors: on every rate, so that tokens get the cost where forwards
# do not tell two causes apart; and on changes of slope, which decide where nothing was measured.
RIDGE, SMOOTHING = 1e-5, 1e-4

# Data sheets: bytes per second of HBM, dense bfloat16 operations per second, and bytes per second
# of NVLink in each direction.
GPUS = {
    "h200": (4.8e12, 989e12, 450e9),
    "h100": (3.35e12, 989e12, 450e9),
    "a100": (2.04e12, 312e12, 300e9),
}
# Qwen2.5: parameters, layers, query heads, key/value heads, head dimension, seconds of launches.
MODELS = {
    "32b": (32.76e9, 64, 40, 8, 128, 7e-3),
    "7b": (7.62e9, 28, 28, 4, 128, 3e-3),
    "1.5b": (1.54e9, 28, 12, 2, 128, 3e-3),
}
BANDWIDTH_SHARE, COMPUTE_SHARE = 0.8, 0.5  # of the data sheet, that kernels reach
VERIFY_S = 1e-5  # host time for each row that verifies a draft
# Seconds of a small all-reduce over NVLink: at all, and for each rank beyond the first. NCCL's ring
# on a DGX A100 was measured at 10 us on 2 GPUs, 16.9 us on 4 and 33.7 us on 8 (NVIDIA/nccl-tests,
# issue 123). Newer links and other algorithms take less.
ALL_REDUCE_S, ALL_REDUCE_RANK_S = 6e-6, 4e-6


@dataclass
class ForwardCost:
    """Seconds of forwards on one machine."""

    knots: list[int]
    """Tokens, ascending."""
    slopes: list[float]
    """Seconds per token from each knot on."""
    constant: float
    """Seconds of a forward of `knots[0]` tokens."""
    rates: dict[str, float]
    """Seconds by name (RATES)."""
    source: str = ""
    """Where the figures are from."""

    def __post_init__(self):
        rises = np.diff(self.knots) * np.array(self.slopes[:-1])
        self._at_knots = (self.constant + np.concatenate(([0.0], np.cumsum(rises)))).tolist()
        self._rates = [self.rates[name] for name in RATES]

    def seconds(self, load: Sequence[float]) -> float:
        """Seconds of a forward; load: the fields of `Load`."""
        rows, tokens, wide_rows, positions, prompt_tokens, draft_tokens = load
        i = max(bisect_right(self.knots, tokens) - 1, 0)
        pairs = max(tokens / rows - 1.0, 0.0) * positions
        counts = (rows, wide_rows, positions, prompt_tokens, draft_tokens, pairs)
        by_tokens = self._at_knots[i] + self.slopes[i] * (tokens - self.knots[i])
        return by_tokens + sum(map(float.__mul__, self._rates, map(float, counts)))


def load_cost(name: str) -> ForwardCost:
    """Of forwards of one rank: the roofline of GPU:MODEL, or what the forwards of a recorded run
    took, with the host's work between them. name: of GPUS and MODELS, or the run's output_dir.
    Raises InputError."""
    gpu, _, model = name.partition(":")
    if gpu in GPUS and model in MODELS:
        return roofline(gpu, model)
    folder = os.path.join(name, FOLDER)
    if not os.path.isdir(folder):
        valid = f"{', '.join(GPUS)} : {', '.join(MODELS)}"
        raise InputError(f"{name}: neither the folder of a recorded run nor a roofline ({valid})")
    try:
        return _fit_recorded(folder, together=False)
    except ValueError as error:
        raise InputError(f"{folder}: {error}") from error


def load_shared_cost(name: str, num_ranks: int) -> ForwardCost | None:
    """Of forwards of all ranks together, as in the shared tail; see `load_cost`. None where nothing
    says what they take: a recorded run had another number of ranks or too few such forwards, or the
    model cannot be sharded over so many ranks."""
    gpu, _, model = name.partition(":")
    if gpu in GPUS and model in MODELS:
        try:
            return roofline(gpu, model, num_ranks)
        except TPUnsupported:
            return None
    folder = os.path.join(name, FOLDER)
    if read_meta(folder)["world_size"] != num_ranks:
        return None
    try:
        return _fit_recorded(folder, together=True)
    except ValueError:
        return None


def _fit_recorded(folder: str, *, together: bool) -> ForwardCost:
    """Fitted on a trace's forwards of one rank, or on those of all ranks together, of which each
    rank has recorded the same. Raises ValueError if there are too few."""
    hardware, table = read_meta(folder)["hardware"], read_table(folder, "forwards")
    is_shared = np.zeros(len(table), bool)
    if "together" in table.column_names:  # null where a run was begun by an older version
        is_shared = table["together"].fill_null(False).to_numpy()
    chosen = is_shared & (table["rank"].to_numpy() == 0) if together else ~is_shared
    loads = np.stack([table[name].to_numpy() for name in Load._fields], axis=1)
    seconds = table["end_s"].to_numpy() - table["begin_s"].to_numpy()
    kind = "shared forwards" if together else "forwards"
    source = f"fitted on {kind} of {hardware.get('gpu') or hardware.get('cpu')}"
    return fit_cost(loads[chosen], seconds[chosen], source)


def roofline(gpu: str, model: str, num_ranks: int = 1) -> ForwardCost:
    """The cost of a forward on a GPU from its data sheet, not measured (Williams, Waterman and
    Patterson 2009): linear layers read all weights once, or compute, whichever takes longer;
    attention reads the keys and values of every attended position once, and computes on them.

    Where several ranks compute it together, each does its share of that, the largest counts where
    heads do not divide evenly, and there are two all-reduces per layer and one exchange of samples.

    gpu, model: of GPUS and MODELS. Left out: sampling, kernels that are slower at odd shapes.
    Raises TPUnsupported for a model that so many ranks cannot share.
    """
    memory, peak, link = GPUS[gpu]
    bandwidth, compute = memory * BANDWIDTH_SHARE, peak * COMPUTE_SHARE
    parameters, layers, heads, kv_heads, dimension, launch_s = MODELS[model]
    own = [shard_heads(heads, kv_heads, rank, num_ranks) for rank in range(num_ranks)]
    own_heads, own_kv_heads = (max(s.stop - s.start for s in of) for of in zip(*own, strict=True))
    weights_s = 2 * parameters / num_ranks / bandwidth  # bfloat16
    token_s = 2 * parameters / num_ranks / compute
    knee = round(weights_s / token_s)  # tokens that compute for as long as the weights are read
    rates = dict.fromkeys(RATES, 0.0)
    rates["wide_rows"] = VERIFY_S
    rates["positions"] = 2 * 2 * layers * own_kv_heads * dimension / bandwidth
    rates["pairs"] = 4 * layers * own_heads * dimension / compute
    constant_s, summed_s, where = launch_s + weights_s, 0.0, f"one {gpu.upper()}"
    if num_ranks > 1:
        latency_s = ALL_REDUCE_S + ALL_REDUCE_RANK_S * (num_ranks - 1)
        constant_s += (2 * layers + 1) * latency_s
        # A ring sends each sum to and from all ranks but one (bus bandwidth of nccl-tests).
        sent = 2 * (num_ranks - 1) / num_ranks * 2 * heads * dimension
        summed_s = 2 * layers * sent / (link * BANDWIDTH_SHARE)
        where = f"{num_ranks} {gpu.upper()}s together"
    source = f"roofline, not measured: Qwen2.5-{model.upper()}, bfloat16, on {where}"
    return ForwardCost([1, knee], [summed_s, token_s + summed_s], constant_s, rates, source)


def fit_cost(loads: np.ndarray, seconds: np.ndarray, source: str) -> ForwardCost:
    """Nonnegative least squares of relative errors, so that short forwards weigh as much as long
    ones. The first fit counts errors relative to what was measured, which interruptions hardly
    move; the others relative to the fit before, as the mean time is wanted.

    loads: [N, 6], the fields of `Load`; seconds: [N], above 0. Raises ValueError if there are too
    few forwards.
    """
    from scipy.optimize import nnls

    loads, seconds = np.asarray(loads, np.float64), np.asarray(seconds, np.float64)
    if len(loads) < MIN_FORWARDS:
        raise ValueError(f"{len(loads)} forwards are too few to fit a cost; give {MIN_FORWARDS}")
    # The last knot is far enough below the largest load that its slope is measured.
    count = max(1, math.ceil(math.log2(max(loads[:, 1].max() / 1.5, 1.0))))
    knots = 2 ** np.arange(count, dtype=np.int64)
    features = _features(loads, knots)
    typical = np.sqrt(np.mean((features / seconds[:, None]) ** 2, axis=0))
    ridge = np.diag(math.sqrt(RIDGE) * typical)[1 + count :]
    bends = np.zeros((count - 1, len(typical)))
    for i in range(count - 1):
        weight = math.sqrt(SMOOTHING) * knots[i + 1] / np.median(seconds)
        bends[i, 1 + i : 3 + i] = (weight, -weight)
    penalty = math.sqrt(len(seconds)) * np.concatenate((ridge, bends))
    scale, is_kept = seconds, np.ones(len(seconds), bool)
    for _ in range(1 + NUM_REFITS):
        weighted = np.concatenate((features[is_kept] / scale[is_kept, None], penalty))
        size = np.maximum(np.linalg.norm(weighted, axis=0), 1e-300)
        target = np.concatenate((seconds[is_kept] / scale[is_kept], np.zeros(len(penalty))))
        solution = nnls(weighted / size, target)[0] / size
        scale = np.maximum(features @ solution, 1e-9)
        is_kept = seconds < INTERRUPTED * scale
        if not is_kept.any():
            break
    constant, *others = solution.tolist()
    rates = dict(zip(RATES, others[count:], strict=True))
    return ForwardCost(knots.tolist(), others[:count], constant, rates, source)


def _features(loads: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """What the coefficients are multiplied with, float64 [N, 1 + knots + rates]."""
    rows, tokens, wide_rows, positions, prompt_tokens, draft_tokens = loads.T
    ramps = np.clip(tokens[:, None] - knots, 0, np.append(np.diff(knots), np.inf))
    pairs = np.maximum(tokens / rows - 1, 0) * positions
    rates = (rows, wide_rows, positions, prompt_tokens, draft_tokens, pairs)
    return np.column_stack((np.ones(len(loads)), ramps, *rates))
