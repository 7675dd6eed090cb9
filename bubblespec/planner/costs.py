"""The cost of a forward, fitted to the run's forwards, and the seconds of a rollout.

Placement, drafting and the TP tail use these estimates."""

import numpy as np

from bubblespec.planner.lengths import (
    AcceptanceRates,
    LengthForecast,
    acceptance_rates,
    forwards_of,
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


def play(
    rows: LengthForecast,
    cost: CostModel,
    num_slots: int,
    rates: AcceptanceRates = NO_DRAFTS,
    rank_of: np.ndarray | None = None,
    drafted: np.ndarray | None = None,
) -> np.ndarray:
    """Return the seconds of each rank's decoding in N scenarios, float64 [..., N, ranks].

    Each rank admits its rows most forwards first. rank_of: int64 [S], None for one rank; drafted:
    see `forwards_of`, None for the drafts that rows have. Their tokens cost nothing here.
    """
    of_row = np.zeros(len(rows), np.int64)
    if rank_of is not None:
        of_row = np.unique(rank_of, return_inverse=True)[1]
    forwards = forwards_of(rows, rates, rows.drafted if drafted is None else drafted)
    num_rows = np.bincount(of_row)
    most = int(num_rows.max())
    # Ranks with fewer rows than others also have rows of no forwards, which come last.
    forwards = np.concatenate((forwards, np.zeros_like(forwards[..., :1])), axis=-1)
    row = np.full((len(num_rows), most), len(rows))
    row[np.arange(most) < num_rows[:, None]] = of_row.argsort(kind="stable")
    ends = forwards[..., row]
    if most > num_slots:
        order = (-ends.mean(axis=-3, keepdims=True)).argsort(axis=-1, kind="stable")
        ends = np.take_along_axis(ends, order, axis=-1)
        flat = ends.reshape(-1, most)
        slots, each = flat[:, :num_slots].copy(), np.arange(len(flat))
        for waiting in range(num_slots, most):
            free = slots.argmin(axis=1)
            flat[:, waiting] += slots[each, free]
            slots[each, free] = flat[:, waiting]
        ends = flat.reshape(ends.shape)
    # Slots are full while rows wait, so ends alone tell how many rows are active.
    active = np.minimum(np.arange(most, 0, -1.0), num_slots)
    context = rows.prompt_tokens + (rows.expected + rows.generated) / 2
    context = np.bincount(of_row, context) / num_rows
    forward_s = cost.seconds(active, active, 0.0, active * context[:, None])
    return (np.diff(np.sort(ends, axis=-1), axis=-1, prepend=0.0) * forward_s).sum(axis=-1)


def rollout_seconds(
    rows: LengthForecast,
    cost: CostModel,
    num_slots: int,
    rates: AcceptanceRates = NO_DRAFTS,
    rank_of: np.ndarray | None = None,
) -> float:
    """Return expected seconds in which ranks generate these rows, up to the last one's end.

    That is decoding, see `play`, and prompts, generated and draft tokens, which are fed once."""
    if len(rows) == 0:
        return 0.0
    rank_of = np.zeros(len(rows), np.int64) if rank_of is None else rank_of
    fed_s = float(cost.coefficients[2]) * tokens_fed(rows, rank_of)
    return float((play(rows, cost, num_slots, rates, rank_of) + fed_s).max(axis=-1).mean())


def tokens_fed(rows: LengthForecast, rank_of: np.ndarray) -> np.ndarray:
    """Return by rank the tokens that are fed besides decoded ones: each prompt once per rank."""
    _, ranks = np.unique(rank_of, return_inverse=True)
    _, first = np.unique((ranks, rows.group), axis=1, return_index=True)
    known = np.bincount(ranks, np.maximum(rows.generated, rows.drafted))
    return known + np.bincount(ranks[first], rows.prompt_tokens[first])
