"""Seconds of a forward as a function of its load, and its fit to measured forwards.

    T = constant + f(tokens) + rates of rows, wide rows, positions, prompt and draft tokens, pairs

f is piecewise linear with knots at powers of two and never falls: a GPU's forwards take the same
time up to saturation and then grow with the tokens, a CPU's grow from the first token on. Beyond
the last knot f continues with its last slope. All coefficients are at least 0.

Pairs: a row that feeds n tokens over p positions attends to about n * p of them, where a decoding
row attends to p. A load has sums over rows only, so tokens * positions / rows is taken, less the
positions themselves. The kernels of a GPU are not linear in either: see roofline.py.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RATES = ("rows", "wide_rows", "positions", "prompt_tokens", "draft_tokens", "pairs")
# A forward that takes this many times its prediction was interrupted, and is left out.
INTERRUPTED = 3.0
NUM_REFITS = 4
MIN_FORWARDS = 10
# Penalties, in squared relative errors: on every rate, so that tokens get the cost where forwards
# do not tell two causes apart; and on changes of slope, which decide where nothing was measured.
RIDGE, SMOOTHING = 1e-5, 1e-4


@dataclass
class ForwardCost:
    """Seconds of forwards on one machine."""

    knots: list[int]  # tokens, ascending
    slopes: list[float]  # seconds per token from each knot on
    constant: float  # seconds of a forward of `knots[0]` tokens
    rates: dict[str, float]  # seconds by name (RATES)
    source: str = ""  # where the figures are from

    def __post_init__(self):
        rises = np.diff(self.knots) * np.array(self.slopes[:-1])
        self._at_knots = (self.constant + np.concatenate(([0.0], np.cumsum(rises)))).tolist()
        self._rates = [self.rates[name] for name in RATES]

    def seconds(self, load: Sequence[float]) -> float:
        """Return the seconds of a forward; load: the fields of `Load`."""
        rows, tokens, wide_rows, positions, prompt_tokens, draft_tokens = load
        i = max(bisect_right(self.knots, tokens) - 1, 0)
        pairs = max(tokens / rows - 1.0, 0.0) * positions
        counts = (rows, wide_rows, positions, prompt_tokens, draft_tokens, pairs)
        by_tokens = self._at_knots[i] + self.slopes[i] * (tokens - self.knots[i])
        return by_tokens + sum(map(float.__mul__, self._rates, map(float, counts)))


def fit_cost(loads: np.ndarray, seconds: np.ndarray, source: str) -> ForwardCost:
    """Fit by nonnegative least squares of relative errors, so that short forwards count, too.

    The first fit takes errors relative to what was measured, which interruptions hardly move; the
    others relative to the fit before, as the mean time is wanted. Raises ValueError for too few
    forwards."""
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
    """Return the factors of the coefficients, float64 [N, 1 + knots + rates]."""
    rows, tokens, wide_rows, positions, prompt_tokens, draft_tokens = loads.T
    ramps = np.clip(tokens[:, None] - knots, 0, np.append(np.diff(knots), np.inf))
    pairs = np.maximum(tokens / rows - 1, 0) * positions
    rates = (rows, wide_rows, positions, prompt_tokens, draft_tokens, pairs)
    return np.column_stack((np.ones(len(loads)), ramps, *rates))
