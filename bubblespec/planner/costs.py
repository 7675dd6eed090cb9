"""The cost of a forward, fitted to the run's forwards, and the seconds of a rollout.

Placement, drafting and the TP tail use these estimates."""

import numpy as np

from bubblespec.planner.rows import (
    NUM_POINTS,
    TYPICAL_WINDOW,
    AcceptanceRates,
    Rows,
    acceptance_rates,
    forwards_horizon,
    forwards_survival,
)
from bubblespec.types import Load

SLOWEST = 5.0  # times the predicted seconds; a slower forward was interrupted
# Tokens of a forward at which the cost may bend. Matrix products have steps in the number of their
# rows: a CPU's kernels have sizes, a GPU is flat up to saturation.
KNOTS = np.array(
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024], np.float64
)
KNOT_PRIOR = 4.0  # weight of a step of 0 at a knot, in forwards
MAX_STEP = 0.6  # relative; larger errors are disturbances
ANCHOR_WEIGHT = 4.0  # weight of a forward of the profile
FORGETTING = 0.99  # per forward of the run; at a knot, per forward near the knot
REFRESH = 20  # forwards from one fit to the next
LEAST = np.array([1e-6, 0.0, 1e-7, 0.0, 0.0])  # of the coefficients, in seconds
# Active rows at which it is known how much chains of a drafter shorten decoding.
CHAIN_ROWS = np.array([1, 2, 4, 8, 16, 32, 64, 128], np.float64)
NO_DRAFTS = acceptance_rates(np.zeros((2, 2)))  # for rows without drafts


class CostModel:
    """Seconds of a forward, linear in rows, tokens and positions, times a factor in the tokens.

    A constant is added where any row has several query tokens; the factor is piecewise linear.

    T = (a + b rows + c tokens + d [wide_rows > 0] + e positions) (1 + step(tokens)). d is for a
    mask and padding, once for all rows. a to e are fitted by least squares of relative errors with
    forgetting; `step` is the remaining mean relative error around each of KNOTS, drawn towards 0
    where few forwards were seen. A profile at the start anchors the terms that the forwards of a
    run do not vary.
    """

    NUM_TERMS = 5

    def __init__(self):
        self._anchors = np.zeros((self.NUM_TERMS, self.NUM_TERMS + 1))
        self._moments = np.zeros_like(self._anchors)  # see `_moments`
        self._observed: list[tuple[float, ...]] = []  # since the last fit
        # Sums of x / seconds and of weights around each knot, for the anchors and for the run.
        self._at_knots = np.zeros((2, len(KNOTS), self.NUM_TERMS + 1))
        self._coefficients = np.array([1e-3, 0.0, 1e-4, 0.0, 0.0])
        self._steps = np.zeros(len(KNOTS))
        self.chains: np.ndarray | None = None
        """Factors on the seconds with CHAIN_ROWS active rows, for a model of decoding with chains
        of a drafter: seconds per token over those without. None: of forwards as they are."""

    @classmethod
    def from_parameters(cls, parameters: np.ndarray) -> "CostModel":
        """Create a model from the `parameters` of another, or the mean of several."""
        model = cls()
        model._coefficients = np.array(parameters[: cls.NUM_TERMS], np.float64)
        model._steps = np.array(parameters[cls.NUM_TERMS :], np.float64)
        return model

    @property
    def parameters(self) -> np.ndarray:
        """Coefficients and steps, float64 [NUM_TERMS + knots]."""
        return np.concatenate((self.coefficients, self._steps))

    @property
    def coefficients(self) -> np.ndarray:
        """Terms a to e, float64 [5], fitted again every REFRESH forwards."""
        if len(self._observed) >= REFRESH:
            self.fit()
        return self._coefficients

    def anchor(self, load: Load, seconds: float) -> None:
        """Learn one forward of the profile, which is never forgotten."""
        equation = np.array([_equation(load, seconds)])
        self._anchors += ANCHOR_WEIGHT * _moments(equation, 1.0)
        self._at_knots[0] += ANCHOR_WEIGHT * _sums_by_knot(equation)
        self.fit()

    def observe(self, load: Load, seconds: float) -> None:
        """Note one forward of the run; `fit` comes later, as decoding waits here."""
        self._observed.append(_equation(load, seconds))

    def fit(self) -> None:
        """Fit to all observed forwards, without interruptions."""
        observed = np.array(self._observed, np.float64).reshape(-1, self.NUM_TERMS + 1)
        self._observed.clear()
        if len(observed):
            ratio = observed[:, -1] / (observed[:, :-1] @ self._coefficients)
            is_known = self._anchors.any() or self._moments.any()
            observed = observed[ratio < SLOWEST * (1.0 if is_known else np.median(ratio))]
            self._moments *= FORGETTING ** len(observed)
            self._moments += _moments(observed, FORGETTING)
        self._coefficients = np.maximum(solve(self._anchors + self._moments), LEAST)
        new = _sums_by_knot(observed)
        self._at_knots[1] *= FORGETTING ** new[:, -1:]
        self._at_knots[1] += new
        # Errors of the linear part: predicted over measured seconds is linear in a to e.
        sums = self._at_knots.sum(axis=0)
        expected, weights = sums[:, :-1] @ self._coefficients, sums[:, -1]
        errors = weights / np.maximum(expected, 1e-12) - 1.0
        self._steps = errors.clip(-MAX_STEP, MAX_STEP) * weights / (weights + KNOT_PRIOR)

    def seconds(self, rows, tokens, wide_rows=0, positions=0):
        """Return predicted seconds of forwards; arguments are numbers or arrays that broadcast."""
        a, b, c, d, e = self.coefficients
        linear = a + b * rows + c * tokens + d * np.minimum(wide_rows, 1.0) + e * positions
        linear = linear * (
            1.0 + np.interp(np.log(np.maximum(tokens, 1.0)), _LOG_KNOTS, self._steps)
        )
        if self.chains is None:
            return linear
        return linear * np.interp(np.log(np.maximum(rows, 1.0)), np.log(CHAIN_ROWS), self.chains)


_LOG_KNOTS = np.log(KNOTS)


def _equation(load: Load, seconds: float) -> tuple[float, ...]:
    """Return the factors of the coefficients in one forward, and the seconds."""
    return 1.0, load.rows, load.tokens, min(load.wide_rows, 1), load.positions, seconds


def _sums_by_knot(forwards: np.ndarray) -> np.ndarray:
    """Return sums of x / seconds and of weights, float64 [knots, NUM_TERMS + 1].

    A forward counts at the two knots around it. forwards: float64 [forwards, NUM_TERMS + 1]."""
    counted = forwards / np.maximum(forwards[:, -1:], 1e-9)
    counted[:, -1] = 1.0
    place = np.interp(np.log(np.maximum(forwards[:, 2], 1.0)), _LOG_KNOTS, np.arange(len(KNOTS)))
    below = np.minimum(place.astype(np.int64), len(KNOTS) - 2)
    share, sums = (place - below)[:, None], np.zeros((len(KNOTS), counted.shape[1]))
    np.add.at(sums, below, (1.0 - share) * counted)
    np.add.at(sums, below + 1, share * counted)
    return sums


def solve(moments: np.ndarray) -> np.ndarray:
    """Solve the normal equations of n coefficients, float64 [n, n + 1].

    Seconds do not shrink with more rows or tokens: a negative coefficient is set to 0, and the
    others are fitted again."""
    matrix, target = moments[:, :-1], moments[:, -1]
    ridge = np.diag(np.maximum(np.diag(matrix), 1e-12)) * 1e-6
    coefficients = np.zeros(len(target))
    free = np.ones(len(target), bool)
    while free.any():
        fitted = np.linalg.solve((matrix + ridge)[np.ix_(free, free)], target[free])
        if (fitted >= 0).all():
            coefficients[free] = fitted
            break
        free[np.flatnonzero(free)[fitted < 0]] = False
    return coefficients


def _moments(observed: np.ndarray, forgetting: float) -> np.ndarray:
    """Return the normal equations of relative errors, float64 [NUM_TERMS, NUM_TERMS + 1].

    observed: float64 [forwards, NUM_TERMS + 1], the latest last, which has weight 1."""
    x = observed[:, :-1] / np.maximum(observed[:, -1:], 1e-9)
    weighted = x * forgetting ** np.arange(len(x) - 1, -1, -1)[:, None]
    return np.concatenate((weighted.T @ x, weighted.sum(axis=0)[:, None]), axis=1)


def rollout_seconds(
    rows: Rows,
    cost: CostModel,
    num_slots: int,
    rates: AcceptanceRates = NO_DRAFTS,
    num_ranks: int = 1,
) -> float:
    """Return expected seconds in which one engine generates these rows, longest first.

    Rows end independently; their number at each point in time determines the cost of a forward.
    With several ranks each has an equal share of the rows, and all end with the last one.
    """
    if len(rows) == 0:
        return 0.0
    points, width = time_points(rows, num_ranks * num_slots)
    survival = forwards_survival(rows, rates, points)
    active, none_left = _admit(survival, num_ranks * num_slots)
    load = mean_load(rows)
    course_s = seconds_of_course(active / num_ranks, none_left, width, cost, len(rows), load)
    return float(course_s) + prefill_seconds(rows, cost)


def _admit(survival: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the expected rows in slots, and the chance that none is left, by time, float64 [T].

    The longest rows begin at once, each other row once half a slot is expected to be free.

    survival: float64 [S, T], chance that each row is unfinished, from its own begin.
    """
    survival = survival[np.argsort(-survival.sum(axis=1), kind="stable")]
    ended = np.log1p(-np.minimum(survival, 1.0 - 1e-12))
    active, log_none = survival[:num_slots].sum(axis=0), ended[:num_slots].sum(axis=0)
    begin, num_points = 0, survival.shape[1]
    for row in range(num_slots, len(survival)):
        begin += int(np.argmax(active[begin:] <= num_slots - 0.5))
        active[begin:] += survival[row, : num_points - begin]
        log_none[:begin] = -np.inf
        log_none[begin:] += ended[row, : num_points - begin]
    return active, np.exp(log_none)


def time_points(rows: Rows, num_slots: int) -> tuple[np.ndarray, float]:
    """Return the points in time of a rollout's evaluation, in forwards, and the steps between.

    float64 [T] both."""
    left = np.sort(np.maximum(rows.expected - rows.generated, 1.0))[::-1]
    horizon = forwards_horizon(rows) + float(left[num_slots:].sum()) / num_slots
    width = horizon / NUM_POINTS
    return (np.arange(NUM_POINTS) + 0.5) * width, width


def mean_load(rows: Rows) -> tuple[float, float]:
    """Return a row's mean draft tokens per forward, and its mean key/value positions."""
    in_draft = np.maximum(rows.drafted - rows.generated, 0.0)
    decoded = np.maximum(rows.expected - np.maximum(rows.generated, rows.drafted), 0.0)
    forwards = float((in_draft / TYPICAL_WINDOW + decoded).sum())
    context = rows.prompt_tokens + (rows.expected + rows.generated) / 2
    return float(in_draft.sum()) / max(forwards, 1.0), float(context.mean())


def seconds_of_course(
    active: np.ndarray,
    none_left: np.ndarray,
    width: float,
    cost: CostModel,
    num_slots: int,
    load: tuple[float, float],
) -> np.ndarray:
    """Return expected seconds of rollouts, float64 [...].

    active: float64 [..., T], expected unfinished rows at each point in time; none_left: float64
    [..., T], chance that none is left; width: forwards between two points; load: `mean_load`. Rows
    without a slot are served later: the work done by time t is the minimum, over all earlier times
    s, of the work that has come by s plus what the slots can do from s to t (a queue's backlog,
    Lindley 1952).
    """
    any_left = np.clip(1.0 - none_left, 1e-9, 1.0)
    if (active > num_slots).any():
        come = np.cumsum(active, axis=-1)
        can = num_slots * np.arange(1, active.shape[-1] + 1)
        before = np.minimum.accumulate(np.minimum(come - can, 0.0), axis=-1)
        served = np.diff(can + before, axis=-1, prepend=0.0)
        any_left = np.where(served > active, np.maximum(any_left, served / num_slots), any_left)
        active = served
    rows = np.maximum(active / any_left, 1.0)
    draft_tokens, context = load
    seconds = cost.seconds(rows, rows * (1.0 + draft_tokens), 0.0, rows * context)
    return width * (any_left * seconds).sum(axis=-1)


def prefill_seconds(rows: Rows, cost: CostModel) -> float:
    """Return seconds of the prefill: each prompt once, and tokens that rows have already."""
    _, first = np.unique(rows.group, return_index=True)
    fed = float(rows.prompt_tokens[first].sum() + rows.generated.sum())
    return float(cost.coefficients[2]) * fed
