"""Predictions of a rollout's rows, and of the forwards that they need.

A length is uncertain: it is log-logistic with a given mean and spread, which has the heavy tail of
response lengths and a survival function in closed form. A draft with the row's own noise holds up
to its first mismatch. The chance of a mismatch is measured (`AcceptanceRates`), so the number of
forwards of a drafted row has a distribution too.

Shape legend: S rows, T points in time, counted in forwards.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

TYPICAL_WINDOW = 8.0  # draft tokens that a row verifies in one forward
MIN_RELATIVE_SPREAD = 0.02  # least of a length that is not that of a whole draft
NUM_POINTS = 64
# Counts before acceptance has been measured: [tried, accepted] before the first mismatch, and
# [gained, given by the draft] behind it.
PRIOR_COUNTS = np.array([[100.0, 99.95], [100.0, 10.0]])


class AcceptanceRates(NamedTuple):
    """How far drafts hold."""

    hazard: float
    """Hazard before a mismatch, above 0: -log of the chance that the next token is accepted."""
    after: float
    """Share of the tokens behind the first mismatch that the draft still gives."""

    def reaches(self, position: np.ndarray) -> np.ndarray:
        """Return the chance that a draft holds for this many tokens, float64 like `position`."""
        return np.exp(-self.hazard * position)

    def accepted(self, drafted: np.ndarray) -> np.ndarray:
        """Return expected tokens before the first mismatch of `drafted` ones, float64 [S]."""
        return -np.expm1(-self.hazard * drafted) / self.hazard


def acceptance_rates(counts: np.ndarray) -> AcceptanceRates:
    """Compute rates from counts, drawn towards the priors where little has been measured.

    counts: float64 [2, 2], [tried, accepted] before the first mismatch, and [gained, given by the
    draft] behind it; see `Survival`.
    """
    (tried, accepted), (gained, given) = counts + PRIOR_COUNTS
    chance = min(max(accepted / tried, 1e-6), 1.0 - 1e-9)
    return AcceptanceRates(float(-np.log(chance)), float(given / gained))


@dataclass(frozen=True)
class Rows:
    """S rows, as numpy columns."""

    prompt_tokens: np.ndarray
    """int64 [S]."""
    group: np.ndarray
    """int64 [S], number of the prompt."""
    expected: np.ndarray
    """float64 [S], mean length of the response."""
    spread: np.ndarray
    """float64 [S], standard deviation of that length."""
    drafted: np.ndarray
    """float64 [S], tokens of the row's draft; 0 without one."""
    generated: np.ndarray
    """int64 [S], tokens that the row has."""

    def __len__(self) -> int:
        return len(self.expected)

    def take(self, chosen: np.ndarray) -> "Rows":
        """Return some of the rows, in the order given. chosen: indices or a mask."""
        return Rows(**{name: column[chosen] for name, column in vars(self).items()})


def length_survival(mean: np.ndarray, spread: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the chance that lengths are above `tokens`; arguments broadcast."""
    mean = np.maximum(mean, 1.0)
    variance = np.log1p(np.maximum(spread / mean, MIN_RELATIVE_SPREAD) ** 2)
    log_median, shape = np.log(mean) - variance / 2, np.pi / np.sqrt(3.0 * variance)
    exponent = shape * (np.log(np.maximum(tokens, 1e-3)) - log_median)
    return 1.0 / (1.0 + np.exp(np.clip(exponent, -60.0, 60.0)))


def mean_length_beyond(mean: np.ndarray, spread: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the expected length of unfinished responses with `tokens`, float64 [S]."""
    reach = np.maximum(mean + 6.0 * spread, 3.0 * tokens + 8.0) - tokens
    steps = (np.arange(NUM_POINTS) + 0.5) / NUM_POINTS
    beyond = tokens[:, None] + reach[:, None] * steps
    column = (mean[:, None], spread[:, None])
    left = length_survival(*column, beyond).mean(axis=1) * reach
    return tokens + left / np.maximum(length_survival(mean, spread, tokens), 1e-12)


def forwards_horizon(rows: Rows) -> float:
    """Return the forwards after which almost no row is unfinished."""
    longest = np.maximum(rows.expected + 4.0 * rows.spread, 1.5 * rows.generated) - rows.generated
    return float(longest.max(initial=1.0))


def forwards_survival(rows: Rows, rates: AcceptanceRates, points: np.ndarray) -> np.ndarray:
    """Return the chance that each row is unfinished after this many more forwards, float64 [S, T].

    points: float64 [T] or [S, T], forwards."""
    points = np.broadcast_to(points, (len(rows), points.shape[-1]))
    known = np.maximum(rows.generated, rows.drafted)[:, None]
    in_draft = np.maximum(rows.drafted - rows.generated, 0.0)
    right = rates.accepted(in_draft)
    of_draft = right / TYPICAL_WINDOW + (1.0 - rates.after) * (in_draft - right)
    tokens = known + np.maximum(points - of_draft[:, None], 0.0)
    column = (rows.expected[:, None], rows.spread[:, None])
    survival = length_survival(*column, tokens) / length_survival(*column, known)
    survival = np.where(points < of_draft[:, None], 1.0, survival)
    is_whole = (in_draft > 0) & (rows.spread == 0.0)
    if is_whole.any():
        survival[is_whole] = _whole_draft_survival(in_draft[is_whole], rates, points[is_whole])
    return survival


def _whole_draft_survival(
    drafted: np.ndarray, rates: AcceptanceRates, points: np.ndarray
) -> np.ndarray:
    """Return `forwards_survival` of rows with a finished draft, float64 [S, T].

    With a mismatch at token u they need u / TYPICAL_WINDOW + (1 - after) (drafted - u)
    forwards."""
    slowest = (1.0 - rates.after) * drafted[:, None]
    slope = (1.0 - rates.after) - 1.0 / TYPICAL_WINDOW
    fastest = drafted[:, None] / TYPICAL_WINDOW
    if slope <= 0.0:
        return (points < fastest).astype(np.float64)
    mismatch = np.clip((slowest - points) / slope, 0.0, drafted[:, None])
    return np.where(points < fastest, 1.0, 1.0 - rates.reaches(mismatch))
