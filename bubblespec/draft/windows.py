"""What a forward costs, and how often draft tokens are accepted: what planner/windows.py chooses
by."""

import json

import numpy as np

SLOWEST = 5.0  # times the expected seconds
MATCH_EDGES = (
    2,
    4,
    8,
    16,
)  # survival is estimated by source and by which of these the match length reaches


class CostModel:
    """Seconds of a forward, T = a + b * rows + c * tokens + d * wide rows + e * positions, by least
    squares with forgetting.

    tokens are those fed, wide rows feed more than one, positions are those attended to, summed over
    the rows. Linear around where the run works now: on a GPU the slopes are nearly 0 below
    saturation and grow beyond it, and the fit follows. Relative errors count, so that short
    forwards weigh as much as long ones. A profile at the start anchors what the forwards of a run
    do not vary: they all feed many tokens, or all few.
    """

    ANCHOR_WEIGHT = 4.0
    NUM_TERMS = 5

    def __init__(self, forgetting: float = 0.99, refresh: int = 20):
        self.forgetting, self.refresh = forgetting, refresh
        self._anchors = np.zeros((self.NUM_TERMS, self.NUM_TERMS + 1))
        self._moments = np.zeros_like(
            self._anchors
        )  # of x / seconds, and their sum, which is the right-hand side
        self._observed: list[
            tuple[float, ...]
        ] = []  # since the last fit: a row of x, and its seconds
        self._coefficients = np.array([1e-3, 0.0, 1e-4, 0.0, 0.0])

    @property
    def coefficients(self) -> np.ndarray:
        """a to e, float64 [5]: worked out anew where enough has been observed since they were last
        asked for."""
        if len(self._observed) >= self.refresh:
            self.fit()
        return self._coefficients

    @coefficients.setter
    def coefficients(self, coefficients: np.ndarray) -> None:
        self._coefficients = coefficients

    def anchor(
        self, rows: int, tokens: int, wide_rows: int, positions: int, seconds: float
    ) -> None:
        """One forward of the profile; it is never forgotten."""
        self._anchors += self.ANCHOR_WEIGHT * _moments(
            np.array([(1.0, rows, tokens, wide_rows, positions, seconds)]), 1.0
        )
        self.fit()

    def observe(
        self, rows: int, tokens: int, wide_rows: int, positions: int, seconds: float
    ) -> None:
        """One forward. Nothing is worked out here: plain decoding waits for this, and asks for no
        coefficients."""
        self._observed.append((1.0, rows, tokens, wide_rows, positions, seconds))

    def fit(self) -> None:
        """Work the coefficients out anew from all that was observed. Five times slower than
        expected is an interruption: left out. Where nothing is known yet, than the median of what
        was observed."""
        if self._observed:
            observed = np.array(self._observed, np.float64)
            self._observed.clear()
            ratio = observed[:, -1] / (observed[:, :-1] @ self._coefficients)
            is_known = self._anchors.any() or self._moments.any()
            observed = observed[ratio < SLOWEST * (1.0 if is_known else np.median(ratio))]
            self._moments *= self.forgetting ** len(observed)
            self._moments += _moments(observed, self.forgetting)
        moments = self._anchors + self._moments
        matrix, target = moments[:, :-1], moments[:, -1]
        ridge = np.diag(np.maximum(np.diag(matrix), 1e-12)) * 1e-6
        # Times do not shrink with more rows or tokens: a negative coefficient is set to 0, and the
        # others are fitted again.
        free = np.ones(self.NUM_TERMS, bool)
        self._coefficients = np.zeros(self.NUM_TERMS)
        while free.any():
            fitted = np.linalg.solve((matrix + ridge)[np.ix_(free, free)], target[free])
            if (fitted >= 0).all():
                self._coefficients[free] = fitted
                break
            free[np.flatnonzero(free)[fitted < 0]] = False
        self._coefficients = np.maximum(self._coefficients, [1e-6, 0.0, 1e-7, 0.0, 0.0])

    def seconds(self, rows, tokens, wide_rows=0, positions=0):
        """Expected seconds of a forward; of numbers or of arrays of one shape."""
        a, b, c, d, e = self.coefficients
        return a + b * rows + c * tokens + d * wide_rows + e * positions


def _moments(observed: np.ndarray, forgetting: float) -> np.ndarray:
    """Sums over forwards of what the normal equations need, the latest last and with weight 1; of
    relative errors. observed: float64 [forwards, NUM_TERMS + 1]."""
    x = observed[:, :-1] / observed[:, -1:]
    weighted = x * forgetting ** np.arange(len(x) - 1, -1, -1)[:, None]
    return np.concatenate((weighted.T @ x, weighted.sum(axis=0)[:, None]), axis=1)


class Survival:
    """Chance that the next token of a draft is accepted, by kind: (source, match length bucket, age
    or alignment).

    An exponentially weighted share, started at a prior; between trials it drifts back to the prior
    slowly, so that a source that was given up is tried again now and then.
    """

    PRIOR_WEIGHT = 8.0
    MEMORY = 400.0  # trials

    def __init__(self):
        self._trials: dict[tuple, float] = {}
        self._accepted: dict[tuple, float] = {}

    def estimate(self, kind: tuple, prior: float) -> float:
        """The chance for a kind, which is `prior` where nothing was observed of it."""
        weight = self.PRIOR_WEIGHT
        return (self._accepted.get(kind, 0.0) + weight * prior) / (
            self._trials.get(kind, 0.0) + weight
        )

    def observe(self, kind: tuple, num_draft: int, num_accepted: int) -> None:
        """A window of `num_draft` tokens was accepted up to `num_accepted`; tokens after the first
        wrong one tell nothing."""
        trials = min(num_accepted + 1, num_draft)
        keep = max(0.0, 1.0 - trials / self.MEMORY)
        self._trials[kind] = keep * self._trials.get(kind, 0.0) + trials
        self._accepted[kind] = keep * self._accepted.get(kind, 0.0) + num_accepted

    def forget(self, share: float) -> None:
        """Drift back to the priors by `share` (once a rollout)."""
        for table in (self._trials, self._accepted):
            for kind in table:
                table[kind] *= 1.0 - share

    def adopt(self, other: "Survival") -> None:
        """What has been observed elsewhere of kinds that have not been observed here."""
        for kind in other._trials.keys() - self._trials.keys():
            self._trials[kind], self._accepted[kind] = other._trials[kind], other._accepted[kind]

    def state_dict(self) -> dict[str, np.ndarray]:
        """K kinds as JSON texts [K]; trials and accepted, float64 [K, 2]."""
        return {
            "kinds": np.array([json.dumps(kind) for kind in self._trials], np.str_),
            "counts": np.array(
                [(self._trials[kind], self._accepted[kind]) for kind in self._trials], np.float64
            ).reshape(-1, 2),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state."""
        kinds = [tuple(json.loads(kind)) for kind in state["kinds"].tolist()]
        self._trials = dict(zip(kinds, state["counts"][:, 0].tolist(), strict=True))
        self._accepted = dict(zip(kinds, state["counts"][:, 1].tolist(), strict=True))


def match_bucket(length: int) -> int:
    """How many of MATCH_EDGES a match of `length` tokens reaches."""
    return sum(length >= edge for edge in MATCH_EDGES)
