"""How many draft tokens each row feeds in a forward: as many as pay for themselves.

A forward of N tokens over R rows takes T(R, N) seconds, and a draft token is accepted only if all before it were. With
survival s, the chance that one more token of a draft is right, the i-th token of a window adds s**i accepted tokens and the
cost of one more token fed. Windows are filled greedily, best first, up to the point where accepted tokens per second, rows
plus sum of s**i over T, are highest; the gains of a row fall with i, so greedy is optimal. Where no draft token pays, the
windows are empty, and the forward is plain decoding.
"""

import numpy as np

WINDOWS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128])
LENGTHS = np.diff(WINDOWS)
MATCH_EDGES = (2, 4, 8, 16)  # survival is estimated by source and by which of these the match length reaches


class CostModel:
    """Seconds of a forward, T = a + b * rows + c * tokens + d * (it verifies drafts), by least squares with forgetting.

    Linear around where the run works now: on a GPU the slope is nearly 0 below saturation and grows beyond it, and the fit
    follows. Relative errors count, so that short forwards weigh as much as long ones. A profile at the start anchors what
    the forwards of a run do not vary: they all feed many tokens, or all few.
    """

    ANCHOR_WEIGHT = 4.0

    def __init__(self, forgetting: float = 0.99, refresh: int = 20):
        self.forgetting, self.refresh = forgetting, refresh
        self._anchors = np.zeros((4, 5))
        self._moments = np.zeros((4, 5))  # of x / seconds, and their sum, which is the right-hand side
        self._since_fit = 0
        self.coefficients = np.array([1e-3, 0.0, 1e-4, 0.0])

    def anchor(self, rows: int, tokens: int, seconds: float) -> None:
        self._anchors += self.ANCHOR_WEIGHT * _moments(rows, tokens, seconds)
        self.fit()

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """One forward of `tokens` tokens in `rows` rows. Five times slower than expected is an interruption: left out."""
        if seconds < 5 * self.seconds(rows, tokens):
            self._moments = self.forgetting * self._moments + _moments(rows, tokens, seconds)
            self._since_fit += 1
        if self._since_fit >= self.refresh:
            self.fit()

    def fit(self) -> None:
        self._since_fit = 0
        moments = self._anchors + self._moments
        matrix, target = moments[:, :4], moments[:, 4]
        ridge = np.diag(np.maximum(np.diag(matrix), 1e-12)) * 1e-6
        # Times do not shrink with more rows or tokens: a negative coefficient is set to 0, and the others are fitted again.
        free = np.ones(4, bool)
        self.coefficients = np.zeros(4)
        while free.any():
            fitted = np.linalg.solve((matrix + ridge)[np.ix_(free, free)], target[free])
            if (fitted >= 0).all():
                self.coefficients[free] = fitted
                break
            free[np.flatnonzero(free)[fitted < 0]] = False
        self.coefficients = np.maximum(self.coefficients, [1e-6, 0.0, 1e-7, 0.0])

    def seconds(self, rows, tokens):
        a, b, c, d = self.coefficients
        return a + b * rows + c * tokens + d * (np.asarray(tokens) > rows)


def _moments(rows: int, tokens: int, seconds: float) -> np.ndarray:
    x = np.array([1.0, rows, tokens, float(tokens > rows)]) / seconds
    return np.column_stack((np.outer(x, x), x))


class Survival:
    """Chance that the next token of a draft is accepted, by kind: (source, match length bucket, age or alignment).

    An exponentially weighted share, started at a prior; between trials it drifts back to the prior slowly, so that a source
    that was given up is tried again now and then.
    """

    PRIOR_WEIGHT = 8.0
    MEMORY = 400.0  # trials

    def __init__(self):
        self._trials: dict[tuple, float] = {}
        self._accepted: dict[tuple, float] = {}

    def estimate(self, kind: tuple, prior: float) -> float:
        weight = self.PRIOR_WEIGHT
        return (self._accepted.get(kind, 0.0) + weight * prior) / (self._trials.get(kind, 0.0) + weight)

    def observe(self, kind: tuple, num_draft: int, num_accepted: int) -> None:
        """A window of `num_draft` tokens was accepted up to `num_accepted`; tokens after the first wrong one tell nothing."""
        trials = min(num_accepted + 1, num_draft)
        keep = max(0.0, 1.0 - trials / self.MEMORY)
        self._trials[kind] = keep * self._trials.get(kind, 0.0) + trials
        self._accepted[kind] = keep * self._accepted.get(kind, 0.0) + num_accepted

    def forget(self, share: float) -> None:
        """Drift back to the priors by `share` (once a step)."""
        for table in (self._trials, self._accepted):
            for kind in table:
                table[kind] *= 1.0 - share


def match_bucket(length: int) -> int:
    return sum(length >= edge for edge in MATCH_EDGES)


def choose_windows(survival: np.ndarray, available: np.ndarray, cost: CostModel, rows: int, budget: int) -> np.ndarray:
    """Draft tokens of each row, int64 [R]. survival: float64 [R]; available: int64 [R], tokens proposed for each.

    rows: rows in the forward; budget: most draft tokens together.
    """
    s = np.clip(survival, 1e-3, 1 - 1e-6)[:, None]
    reach = np.minimum(WINDOWS, available[:, None])
    tokens = np.diff(reach, axis=1)  # [R, segments]
    expected = s * (1 - s**reach) / (1 - s)  # sum of s**i up to each window
    gain = np.diff(expected, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        density = np.where(tokens > 0, gain / tokens, -1.0)
    order = np.argsort(-density, axis=None, kind="stable")
    order = order[density.ravel()[order] > 0]
    fed = np.cumsum(tokens.ravel()[order])
    gained = np.cumsum(gain.ravel()[order])
    within = fed <= budget
    fed, gained, order = fed[within], gained[within], order[within]
    if len(order) == 0:
        return np.zeros(len(survival), np.int64)
    rate = (rows + np.concatenate(([0.0], gained))) / cost.seconds(rows, rows + np.concatenate(([0], fed)))
    chosen = order[: int(rate.argmax())]
    return np.bincount(chosen // tokens.shape[1], weights=tokens.ravel()[chosen], minlength=len(survival)).astype(np.int64)
