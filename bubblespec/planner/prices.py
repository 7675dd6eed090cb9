"""What parts of a rollout cost, fitted to whole rollouts.

The seconds of single forwards (costs.py) leave out what comes with them: the starts and ends of
rows, proposals, the exchange of drafts and the planning. So the seconds of whole rollouts are
fitted by what happens in them, drawn towards the prices that forwards suggest. Drafting is planned
by these prices, and a draft is charged in the rollout that it was made for.
"""

from typing import NamedTuple

import numpy as np

from bubblespec.planner.costs import CostModel, solve
from bubblespec.records import RolloutRecord

FORGETTING = 0.95  # per rollout
ERROR = 0.1  # relative standard error of a rollout's seconds
# Standard errors of what forwards suggest, relative to it; of the constant, to a rollout's seconds.
LEAST_SHARE = 0.1  # of what forwards suggest
PRIOR_ERRORS = np.array([0.1, 0.3, 0.5, 0.3, 1.0])


class Counts(NamedTuple):
    """What one rank, the slowest, did in a rollout."""

    rollouts: float
    """1."""
    forwards_s: float
    """Modelled seconds of its forwards, had they fed no drafts."""
    verified: float
    """Draft tokens verified."""
    drafted: float
    """Tokens drafted alongside rows of the step."""
    begun: float
    """Responses whose drafts were begun or continued alongside rows of the step."""


class Prices(NamedTuple):
    """Seconds for each of `Counts`; forwards_s is a factor on the modelled seconds."""

    rollout_s: float
    forward: float
    verified_s: float
    drafted_s: float
    begun_s: float


def counts_of(record: RolloutRecord, cost: CostModel) -> Counts:
    """Return the counts of one rank."""
    columns = [
        (f.own_rows, f.ahead_rows, f.load.rows, f.load.positions, f.load.prompt_tokens)
        for f in record.forwards
        if f.own_rows
    ]
    rows, ahead, all_rows, positions, prompts = np.array(columns, np.float64).reshape(-1, 5).T
    rows = np.minimum(rows, all_rows)  # others wait for slots
    share = rows / np.maximum(all_rows, 1.0)
    forwards_s = cost.seconds(rows, rows + share * prompts, 0.0, share * positions).sum()
    shared_s = sum(end_s - begin_s for _, begin_s, end_s in record.shared)
    drafted = float(ahead.sum())
    verified = float(record.acceptance.draft_tokens)
    return Counts(1.0, float(forwards_s) + shared_s, verified, drafted, float(record.drafts_begun))


class RolloutCostFit:
    """Prices of this run's rollouts. The same on every rank, as its observations are exchanged."""

    def __init__(self):
        self._moments = np.zeros((len(Counts._fields), len(Counts._fields) + 1))
        self.prices: Prices | None = None
        """None before the first rollout."""
        self.error = np.nan
        """Predicted over measured seconds of the latest rollout, less 1."""

    def observe(
        self, counts: Counts, seconds: float, cost: CostModel, prompt: float, context: float
    ) -> None:
        """Learn a rollout.

        cost: of forwards; prompt, context: mean tokens of a prompt, and positions of a row."""
        if seconds <= 0.0:
            return  # in virtual time
        if self.prices is not None:
            self.error = float(np.dot(counts, self.prices)) / seconds - 1.0
        x = np.array(counts) / (ERROR * seconds)
        weight = 1.0 / ERROR
        new = np.outer(x, np.append(x, weight))
        self._moments = FORGETTING * self._moments + new
        suggested = suggested_prices(cost, prompt, context)
        errors = PRIOR_ERRORS * np.array([seconds, *suggested[1:]])
        precision = 1.0 / np.maximum(errors, 1e-12) ** 2
        prior = np.column_stack((np.diag(precision), precision * np.array(suggested)))
        fitted = solve(self._moments + prior)
        # Nothing is free, or the most urgent drafts would be worth nothing.
        self.prices = Prices(*np.maximum(fitted, LEAST_SHARE * np.array(suggested)).tolist())

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return sums over rollouts and the latest prices, none before the first rollout."""
        prices = np.array(() if self.prices is None else self.prices)
        return {"moments": self._moments, "prices": prices}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a saved state."""
        self._moments = state["moments"]
        self.prices = Prices(*state["prices"].tolist()) if len(state["prices"]) else None


def suggested_prices(cost: CostModel, prompt: float, context: float) -> Prices:
    """Return what single forwards suggest. prompt, context: see `RolloutCostFit.observe`."""
    _, row_s, token_s, _, kv_s = cost.coefficients.tolist()
    return Prices(0.0, 1.0, token_s, row_s + token_s + kv_s * context, token_s * prompt)
