"""Windows: the number of draft tokens that each row feeds in a forward.

A forward takes T seconds, and a draft token is accepted only if all tokens before it were. With
survival s, the chance that one more token of a draft is right, the i-th token of a window adds s**i
accepted tokens and the cost of feeding one more token (Leviathan et al. 2023, arXiv 2211.17192,
equation 1). Windows are filled greedily, best segment first, up to the point where accepted tokens
per second, (rows + sum of s**i) / T, are highest. If no draft token pays, all windows are empty and
the forward decodes one token per row.
"""

import numpy as np

from bubblespec.planner.costs import CostModel
from bubblespec.records import ACCEPT_BINS

WINDOWS = np.array(ACCEPT_BINS)
SIZES = np.diff(WINDOWS, prepend=0)  # tokens of segments, each from one window to the next
MIN_GAIN = 1.05  # in tokens per second: estimates are noisy, and the best of many is taken
# Rows of similar survival are planned together, as rows of one of these levels: evenly spaced log
# odds, so that neighbours differ by a twelfth in the chance of a wrong token.
LEVELS = 1 / (1 + np.exp(-np.linspace(-3.0, 7.0, 128)))
BETWEEN = (LEVELS[1:] + LEVELS[:-1]) / 2


def _rank_segments() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the segments of all levels, best first, after an empty one of each level.

    Level and number in WINDOWS, int64, and the accepted tokens that a row gains by a segment,
    float64."""
    s = LEVELS[:, None]
    gain = np.diff(s * (1 - s**WINDOWS) / (1 - s), axis=1, prepend=0.0)  # of sums of s**i
    density = gain / np.maximum(SIZES, 1)
    density[:, 0] = np.inf
    order = (-density).argsort(axis=None, kind="stable")
    return *np.divmod(order, len(WINDOWS)), gain.ravel()[order]


LEVEL, NUMBER, GAIN = _rank_segments()


def choose_windows(
    survival: np.ndarray, available: np.ndarray, cost: CostModel, positions: int, *, budget: int
) -> np.ndarray:
    """Return the draft tokens of each of R decoding rows, int64 [R].

    survival: float64 [R]; available: int64 [R], tokens proposed for each row; positions: attended
    to by all rows together; budget: maximum number of draft tokens in all.
    """
    rows, num_windows = len(survival), len(WINDOWS)
    if not available.any():
        return np.zeros(rows, np.int64)
    level = BETWEEN.searchsorted(survival)
    # A segment counts as whole for a row that has some tokens of it.
    most = WINDOWS.searchsorted(available)
    counts = np.bincount(level * num_windows + most, minlength=len(LEVEL))
    counts = counts.reshape(-1, num_windows)[:, ::-1].cumsum(axis=1)[:, ::-1]
    num_rows = counts[LEVEL, NUMBER]  # rows with a segment
    some = num_rows.nonzero()[0]
    has, number = num_rows[some], NUMBER[some]
    size = SIZES[number]
    num_rows, fed = has, (has * size).cumsum()
    if fed[-1] > budget:
        left = np.maximum(budget - (fed - has * size), 0)
        num_rows = np.minimum(has, left // np.maximum(size, 1))
        fed = (num_rows * size).cumsum()
    gained = rows + (num_rows * GAIN[some]).cumsum()
    seconds = cost.seconds(rows, rows + fed, fed > 0, positions)
    rate = gained / seconds
    best = int(rate.argmax())
    if rate[best] < MIN_GAIN * rate[0]:
        return np.zeros(rows, np.int64)
    # All rows of a level get a segment; the first rows alone get the last one.
    reached = np.zeros(len(LEVELS), np.int64)
    reached[LEVEL[some[: best + 1]]] = WINDOWS[number[: best + 1]]
    windows = np.minimum(reached[level], available)
    if num_rows[best] < has[best]:
        without = ((level == LEVEL[some[best]]) & (most >= number[best])).nonzero()[0]
        windows[without[num_rows[best] :]] = WINDOWS[number[best] - 1]
    return windows
