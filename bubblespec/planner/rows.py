"""Predictions of a rollout's rows, and of the forwards that they need.

A length is uncertain: it is log-logistic with a given mean and spread, which has the heavy tail of
response lengths and quantiles in closed form. A draft with the row's own noise holds up to its
first mismatch, whose chance is measured (`AcceptanceRates`). So a rollout is played in N scenarios,
each with one quantile of every row's length and of its first mismatch, the same on every rank.

Shape legend: S rows, N scenarios.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

TYPICAL_WINDOW = 8.0  # draft tokens that a row verifies in one forward
# Scenarios of a rollout: as many as make up this many rows, as errors of few rows do not cancel.
NUM_PLAYED, LEAST_SCENARIOS, MOST_SCENARIOS = 2048, 8, 64
EVENLY = np.array([0.6180339887, 0.7548776662])  # multiples of these fill 0 to 1 evenly
NUM_QUANTILES = 64  # of a length, for its mean
# Counts before acceptance has been measured: [tried, accepted] before the first mismatch, and
# [gained, given by the draft] behind it.
PRIOR_COUNTS = np.array([[100.0, 99.95], [100.0, 10.0]])


class AcceptanceRates(NamedTuple):
    """How far drafts hold."""

    hazard: float
    """Hazard before a mismatch, above 0: -log of the chance that the next token is accepted."""
    after: float
    """Share of the tokens behind the first mismatch that the draft still gives."""


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


@lru_cache
def _quantiles(num_rows: int) -> np.ndarray:
    """Return quantiles of each row's length and first mismatch, float64 [2, N, num_rows].

    One row has N evenly spaced ones in a fixed random order; all rows together are as even, so that
    few scenarios have the right share of long rows."""
    num = min(max(NUM_PLAYED // num_rows, LEAST_SCENARIOS), MOST_SCENARIOS)
    order = np.random.Generator(np.random.Philox(key=0)).random((num_rows, 2, num)).argsort(axis=2)
    offset = (np.arange(num_rows)[:, None] + 0.5) * EVENLY % 1.0
    return ((order + offset[:, :, None]) / num).transpose(1, 2, 0)


def length_beyond(
    mean: np.ndarray, spread: np.ndarray, tokens: np.ndarray, quantile: np.ndarray
) -> np.ndarray:
    """Return a quantile of the lengths above `tokens`; arguments broadcast."""
    mean = np.maximum(mean, 1.0)
    variance = np.log1p(np.maximum(spread / mean, 1e-12) ** 2)
    log_median, shape = np.log(mean) - variance / 2, np.pi / np.sqrt(3.0 * variance)
    log_odds = shape * (np.log(np.maximum(tokens, 1e-3)) - log_median)
    log_odds = np.logaddexp(np.log(quantile), log_odds) - np.log1p(-quantile)
    longest = np.maximum(mean + 4.0 * spread, 1.5 * tokens)
    return np.clip(np.exp(log_median + log_odds / shape), tokens + (spread > 0.0), longest)


def mean_length_beyond(mean: np.ndarray, spread: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the expected length of unfinished responses with `tokens`, float64 [S]."""
    quantile = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    return length_beyond(mean, spread, tokens, quantile[:, None]).mean(axis=0)


def forwards_of(rows: Rows, rates: AcceptanceRates, drafted: np.ndarray) -> np.ndarray:
    """Return the forwards that each row still needs in N scenarios, float64 [..., N, S].

    drafted: float64 [..., S], tokens of its draft in the rollout, inf for all of its response; of
    `rows.drafted` ones it is known that the response is at least as long."""
    length, mismatch = _quantiles(len(rows))[..., (-rows.expected).argsort().argsort()]
    known = np.maximum(rows.generated, rows.drafted)
    length = length_beyond(rows.expected, rows.spread, known, length)
    in_draft = np.minimum(drafted[..., None, :], length) - rows.generated
    in_draft = np.maximum(in_draft, 0.0)
    right = np.minimum(-np.log1p(-mismatch) / rates.hazard, in_draft)
    behind = max(1.0 - rates.after, 1.0 / TYPICAL_WINDOW) * (in_draft - right)
    return length - rows.generated - in_draft + right / TYPICAL_WINDOW + behind
