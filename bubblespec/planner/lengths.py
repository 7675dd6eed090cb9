"""Lengths of responses, predicted from all that were generated, and the forwards that they need.

The best evidence is a finished draft, then the prompt's responses in earlier epochs (RhymeRL, arXiv
2508.18588), then finished drafts of siblings, and otherwise a straight line fitted to the prompt
and response lengths of recent responses. A length is log-logistic with a given mean and spread,
which has the heavy tail of response lengths and quantiles in closed form. A draft with the row's
own noise holds up to its first mismatch, whose chance is measured (`AcceptanceRates`). So a rollout
is played in N scenarios, each with one quantile of every row's length and first mismatch.

All is the same on every rank. Shape legend: S rows, N scenarios.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from bubblespec.records import Samples
from bubblespec.types import Draft, Group

NUM_RECENT = 4096  # responses that the line is fitted to
MAX_PROMPTS = 1 << 18  # prompts whose lengths are kept; the oldest go first
MIN_SPREAD = 1.0  # tokens; lower bound of an unknown length's spread
SIBLING_SPREAD = 0.7  # share of the line's spread; lower bound where siblings are known
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
    draft] behind it; see `AcceptanceStats`.
    """
    (tried, accepted), (gained, given) = counts + PRIOR_COUNTS
    chance = min(max(accepted / tried, 1e-6), 1.0 - 1e-9)
    return AcceptanceRates(float(-np.log(chance)), float(given / gained))


@dataclass(frozen=True)
class LengthForecast:
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

    def take(self, chosen: np.ndarray) -> "LengthForecast":
        """Return some of the rows, in the order given. chosen: indices or a mask."""
        return LengthForecast(**{name: column[chosen] for name, column in vars(self).items()})


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


def forwards_of(rows: LengthForecast, rates: AcceptanceRates, drafted: np.ndarray) -> np.ndarray:
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


class LengthModel:
    """Mean and spread of the lengths of responses."""

    def __init__(self):
        self._recent = np.empty((0, 2), np.int64)  # tokens of prompt and response, latest last
        self._of_prompt: dict[int, tuple[float, float]] = {}  # mean and spread, by prompt_id
        self._line = 1.0, 0.0, 1.0  # offset, slope and spread

    def observe(self, samples: Samples) -> None:
        """Learn from the responses of a step."""
        lengths = samples.lengths.reshape(len(samples.groups), -1)
        for group, of_group in zip(samples.groups, lengths, strict=True):
            self._of_prompt.pop(group.prompt.prompt_id, None)
            self._of_prompt[group.prompt.prompt_id] = (
                float(of_group.mean()),
                float(of_group.std()),
            )
        while len(self._of_prompt) > MAX_PROMPTS:
            del self._of_prompt[next(iter(self._of_prompt))]
        prompts = np.repeat([len(g.prompt.token_ids) for g in samples.groups], lengths.shape[1])
        pairs = np.stack((prompts, lengths.ravel()), axis=1)
        self._recent = np.concatenate((self._recent, pairs))[-NUM_RECENT:]
        self._fit_line()

    @property
    def knows_lengths(self) -> bool:
        """Whether any response has been seen."""
        return len(self._recent) > 0

    def predict(
        self, groups: list[Group], num_generations: int, drafts: list[Draft | None]
    ) -> LengthForecast:
        """Return the rows of these groups before they begin, by group and number.

        drafts: by row, None for no draft."""
        prompt_tokens = np.array([len(group.prompt.token_ids) for group in groups], np.int64)
        offset, slope, line_spread = self._line
        means = np.maximum(offset + slope * prompt_tokens, 1.0)
        spreads = np.full(len(groups), line_spread)
        for number, group in enumerate(groups):
            of_group = drafts[number * num_generations : (number + 1) * num_generations]
            siblings = [len(d.tokens) for d in of_group if d is not None and d.is_finished]
            if group.prompt.prompt_id in self._of_prompt:
                means[number], spreads[number] = self._of_prompt[group.prompt.prompt_id]
            elif siblings:
                means[number] = np.mean(siblings)
                spreads[number] = max(np.std(siblings), SIBLING_SPREAD * line_spread)
        expected = np.repeat(means, num_generations)
        spread = np.repeat(np.maximum(spreads, MIN_SPREAD), num_generations)
        drafted = np.array([0 if d is None else len(d.tokens) for d in drafts], np.float64)
        is_whole = np.array([d is not None and d.is_finished for d in drafts], bool)
        is_begun = (drafted > 0) & ~is_whole
        if is_begun.any():
            known = (expected[is_begun], spread[is_begun])
            expected[is_begun] = mean_length_beyond(*known, drafted[is_begun])
        return LengthForecast(
            prompt_tokens=np.repeat(prompt_tokens, num_generations),
            group=np.repeat(np.arange(len(groups)), num_generations),
            expected=np.where(is_whole, drafted, expected),
            spread=np.where(is_whole, 0.0, spread),
            drafted=drafted,
            generated=np.zeros(len(drafts), np.int64),
        )

    def _fit_line(self) -> None:
        """Fit offset and slope by least squares, and the spread around the line."""
        x, y = self._recent.T.astype(np.float64)
        slope = ((x - x.mean()) * (y - y.mean())).mean() / max(x.var(), 1e-9)
        offset = float(y.mean() - slope * x.mean())
        self._line = offset, float(slope), float((y - offset - slope * x).std())

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return recent lengths, int64 [N, 2]; uids, int64 [P], with lengths, float64 [P, 2]."""
        of_prompt = np.array(list(self._of_prompt.values()), np.float64).reshape(-1, 2)
        prompt_ids = np.array(list(self._of_prompt), np.int64)
        return {"recent": self._recent, "uids": prompt_ids, "of_prompt": of_prompt}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a saved state."""
        self._recent = state["recent"]
        if self.knows_lengths:
            self._fit_line()
        pairs = map(tuple, state["of_prompt"].tolist())
        self._of_prompt = dict(zip(state["uids"].tolist(), pairs, strict=True))
