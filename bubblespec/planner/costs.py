"""What forwards cost, fitted to those of the run; and how long a rollout takes by that: the only
estimate of its kind, which placement, drafting, the TP tail and the guard all use."""

import numpy as np

from bubblespec.engine.batch import Load
from bubblespec.planner.rows import (
    NUM_POINTS,
    TYPICAL_WINDOW,
    AcceptanceRates,
    Rows,
    acceptance_rates,
    forwards_horizon,
    forwards_survival,
)

SLOWEST = 5.0  # times the expected seconds: an interruption, not a cost
# Tokens of a forward at which the cost may bend. Matrix products have steps in the number of their
# rows: on a CPU those of the kernels, on a GPU flat up to saturation.
KNOTS = np.array(
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024], np.float64
)
KNOT_PRIOR = 4.0  # forwards near a knot that it takes to believe half of what they show
MAX_STEP = 0.6  # relative; what is farther off was disturbed
ANCHOR_WEIGHT = 4.0  # of a forward of the profile
FORGETTING = 0.99  # per forward of the run; around a knot, per forward there
REFRESH = 20  # forwards from one fit to the next
NO_DRAFTS = acceptance_rates(np.zeros((2, 2)))  # for rows without drafts


class CostModel:
    """Seconds of a forward: linear in rows, tokens and key/value positions, with a constant more
    where any row has several query tokens, times a piecewise linear factor in the tokens.

    T = (a + b rows + c tokens + d [multi_rows > 0] + e kv_tokens) (1 + step(tokens)). What several
    query tokens cost besides the tokens is a mask and padding, once for all rows. a to e are fitted
    by least squares of relative errors with forgetting; `step` is the mean relative error that is
    left around each of KNOTS, drawn towards 0 where few forwards were seen, and not forgotten while
    there are none. A profile at the start anchors what the forwards of a run do not vary: they all
    feed many tokens, or all few.
    """

    NUM_TERMS = 5

    def __init__(self):
        self._anchors = np.zeros((self.NUM_TERMS, self.NUM_TERMS + 1))
        self._moments = np.zeros_like(self._anchors)  # of x / seconds, and their sum
        self._observed: list[tuple[float, ...]] = []  # since the last fit
        # Around each knot sums of x / seconds, and of weights: of the anchors, of the run.
        self._at_knots = np.zeros((2, len(KNOTS), self.NUM_TERMS + 1))
        self._coefficients = np.array([1e-3, 0.0, 1e-4, 0.0, 0.0])
        self._steps = np.zeros(len(KNOTS))

    @classmethod
    def from_parameters(cls, parameters: np.ndarray) -> "CostModel":
        """A model with the `parameters` of another, or the mean of several."""
        model = cls()
        model._coefficients = np.array(parameters[: cls.NUM_TERMS], np.float64)
        model._steps = np.array(parameters[cls.NUM_TERMS :], np.float64)
        return model

    @property
    def parameters(self) -> np.ndarray:
        """All that `seconds` depends on, float64 [NUM_TERMS + knots]."""
        return np.concatenate((self.coefficients, self._steps))

    @property
    def coefficients(self) -> np.ndarray:
        """a to e, float64 [5]; fitted again once enough forwards have been observed."""
        if len(self._observed) >= REFRESH:
            self.fit()
        return self._coefficients

    def anchor(self, load: Load, seconds: float) -> None:
        """One forward of the profile; it is never forgotten."""
        equation = np.array([_equation(load, seconds)])
        self._anchors += ANCHOR_WEIGHT * _moments(equation, 1.0)
        self._at_knots[0] += ANCHOR_WEIGHT * _sums_by_knot(equation)
        self.fit()

    def observe(self, load: Load, seconds: float) -> None:
        """One forward of the run. Nothing is fitted here: decoding waits for this."""
        self._observed.append(_equation(load, seconds))

    def fit(self) -> None:
        """Fit again to all that was observed, interruptions left out."""
        observed = np.array(self._observed, np.float64).reshape(-1, self.NUM_TERMS + 1)
        self._observed.clear()
        if len(observed):
            ratio = observed[:, -1] / (observed[:, :-1] @ self._coefficients)
            is_known = self._anchors.any() or self._moments.any()
            observed = observed[ratio < SLOWEST * (1.0 if is_known else np.median(ratio))]
            self._moments *= FORGETTING ** len(observed)
            self._moments += _moments(observed, FORGETTING)
        self._coefficients = _solve(self._anchors + self._moments)
        new = _sums_by_knot(observed)
        self._at_knots[1] *= FORGETTING ** new[:, -1:]
        self._at_knots[1] += new
        # What the linear part leaves: expected over measured seconds is linear in a to e.
        sums = self._at_knots.sum(axis=0)
        expected, weights = sums[:, :-1] @ self._coefficients, sums[:, -1]
        errors = weights / np.maximum(expected, 1e-12) - 1.0
        self._steps = errors.clip(-MAX_STEP, MAX_STEP) * weights / (weights + KNOT_PRIOR)

    def seconds(self, rows, tokens, multi_rows=0, kv_tokens=0):
        """Expected seconds of a forward; of numbers or of arrays that broadcast."""
        a, b, c, d, e = self.coefficients
        linear = a + b * rows + c * tokens + d * np.minimum(multi_rows, 1.0) + e * kv_tokens
        return linear * (1.0 + np.interp(np.log(np.maximum(tokens, 1.0)), _LOG_KNOTS, self._steps))


_LOG_KNOTS = np.log(KNOTS)


def _equation(load: Load, seconds: float) -> tuple[float, ...]:
    """What one forward says of the coefficients: what each is multiplied by, and their sum."""
    return 1.0, load.rows, load.tokens, min(load.wide_rows, 1), load.positions, seconds


def _sums_by_knot(forwards: np.ndarray) -> np.ndarray:
    """Sums of x / seconds and of weights, float64 [knots, NUM_TERMS + 1]: a forward counts at the
    two knots around it. forwards: float64 [forwards, NUM_TERMS + 1]."""
    counted = forwards / np.maximum(forwards[:, -1:], 1e-9)
    counted[:, -1] = 1.0
    place = np.interp(np.log(np.maximum(forwards[:, 2], 1.0)), _LOG_KNOTS, np.arange(len(KNOTS)))
    below = np.minimum(place.astype(np.int64), len(KNOTS) - 2)
    share, sums = (place - below)[:, None], np.zeros((len(KNOTS), counted.shape[1]))
    np.add.at(sums, below, (1.0 - share) * counted)
    np.add.at(sums, below + 1, share * counted)
    return sums


def _solve(moments: np.ndarray) -> np.ndarray:
    """Coefficients from the normal equations. Times do not shrink with more rows or tokens: a
    negative coefficient is set to 0, and the others are fitted again."""
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
    return np.maximum(coefficients, [1e-6, 0.0, 1e-7, 0.0, 0.0])


def _moments(observed: np.ndarray, forgetting: float) -> np.ndarray:
    """Sums over forwards of what the normal equations of relative errors need, the latest last and
    with weight 1. observed: float64 [forwards, NUM_TERMS + 1]."""
    x = observed[:, :-1] / np.maximum(observed[:, -1:], 1e-9)
    weighted = x * forgetting ** np.arange(len(x) - 1, -1, -1)[:, None]
    return np.concatenate((weighted.T @ x, weighted.sum(axis=0)[:, None]), axis=1)


def rollout_seconds(
    rows: Rows, cost: CostModel, num_slots: int, rates: AcceptanceRates = NO_DRAFTS
) -> float:
    """Expected seconds in which one engine generates these rows, longest first.

    Rows end independently; their number at each point in time decides what a forward costs.
    """
    if len(rows) == 0:
        return 0.0
    points, width = time_points(rows, num_slots)
    active, none_left = _admit(forwards_survival(rows, rates, points), num_slots)
    course_s = seconds_of_course(active, none_left, width, cost, len(rows), mean_load(rows))
    return float(course_s) + prefill_seconds(rows, cost)


def _admit(survival: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Expected rows in slots at each point in time, and the chance that no row is left, float64
    [T]. The rows that need most forwards begin at once, each other one as soon as half a slot is
    expected to be free.

    survival: float64 [S, T], of each row from where it begins.
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
    """Points in time, in forwards, at which the course of a rollout is looked at, float64 [T], and
    the forwards between two of them."""
    left = np.sort(np.maximum(rows.expected - rows.generated, 1.0))[::-1]
    horizon = forwards_horizon(rows) + float(left[num_slots:].sum()) / num_slots
    width = horizon / NUM_POINTS
    return (np.arange(NUM_POINTS) + 0.5) * width, width


def mean_load(rows: Rows) -> tuple[float, float]:
    """Draft tokens that a row feeds in a forward, and key/value positions that it attends to."""
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
    """Expected seconds of rollouts, float64 [...].

    active: float64 [..., T], expected unfinished rows at each point in time; none_left: float64
    [..., T], chance that there are none; width: forwards between two points; load: `mean_load`.
    Rows that find no slot are served later: the work done by time t is the minimum, over all
    earlier times s, of what has come by s plus what the slots can do from s to t (a queue's
    backlog, Lindley 1952).
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
    """Seconds of feeding the prompts, each once, and tokens that rows have already."""
    _, first = np.unique(rows.group, return_index=True)
    fed = float(rows.prompt_tokens[first].sum() + rows.generated.sum())
    return float(cost.coefficients[2]) * fed
