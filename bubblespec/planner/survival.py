"""How far drafts hold, by kind of proposal: the one statistic of acceptance.

Windows, the depth and value of drafting ahead, and metrics are read from it."""

import json
from collections.abc import Sequence

import numpy as np

from bubblespec.planner.lengths import AcceptanceRates, acceptance_rates

ALIGNED = "aligned"  # kinds (ALIGNED, age) propose the draft that a row has followed from the start
# Rows of the counts. A kind is offered in a forward if any row has such a proposal; tokens are
# proposed if a forward verifies them; they are tried up to the first wrong one of each row.
OFFERED, PROPOSED, TRIED, ACCEPTED = range(4)
FORGETTING = 0.7  # of earlier counts, per rollout
PRIOR_WEIGHT = 8.0  # trials
MEMORY = 400.0  # trials of earlier rollouts that estimates count at most
UNTRIED = 0.5  # share of MEMORY that a kind keeps in a rollout that offers it and never tries it
MIN_PROPOSED = 20  # tokens of an age, below which its acceptance rate is unknown


class AcceptanceStats:
    """Counts of the current rollout on this rank, and decayed sums of earlier rollouts.

    `merge` adds up the counts of all ranks, so `rates` and `by_age` are the same on every rank.
    Estimates of windows also use this rank's current counts. A kind that is not tried any more
    drifts back to its prior, so a source that was given up is tried again after some rollouts.

    Shape legend: K kinds.
    """

    def __init__(self):
        self.kinds: list[tuple] = []
        self.counts = np.zeros((4, 2, 0))
        """Counts of this rollout, [4, 2, K]: of rows drafted for coming steps, and of others."""
        self.behind = np.zeros(2)
        """Tokens that rows gained behind the first mismatch with their own draft, and those among
        them that the draft gave, in this rollout."""
        self._past, self._past_behind = np.zeros((4, 0)), np.zeros(2)
        self._prior = np.zeros(0)
        self._is_merged = True

    def add(self, kinds: Sequence[tuple], priors: Sequence[float]) -> np.ndarray:
        """Add kinds with the chance of each while nothing is known of it.

        Return their numbers, int64."""
        numbers = self._numbers(kinds)
        self._prior[numbers] = priors
        self._believe()
        return numbers

    def _numbers(self, kinds: Sequence[tuple]) -> np.ndarray:
        new = [kind for kind in kinds if kind not in self.kinds]
        self.kinds += new
        for name in ("counts", "_past", "_prior"):
            column = getattr(self, name)
            more = np.zeros((*column.shape[:-1], len(new)))
            setattr(self, name, np.concatenate((column, more), axis=-1))
        return np.array([self.kinds.index(kind) for kind in kinds], np.int64)

    def _believe(self) -> None:
        """Set what estimates start from: tried and accepted tokens, [2, K]."""
        weight = np.minimum(1.0, MEMORY / np.maximum(self._past[TRIED], 1.0))
        prior = np.stack((np.ones_like(self._prior), self._prior))
        self._believed = weight * self._past[TRIED:] + PRIOR_WEIGHT * prior

    @property
    def estimates(self) -> np.ndarray:
        """Chance that the next token of a proposal is accepted, float64 [K]."""
        tried, accepted = self._believed + self.counts[TRIED:, 0] + self.counts[TRIED:, 1]
        return accepted / tried

    @property
    def rates(self) -> AcceptanceRates:
        """How far drafts of coming steps hold."""
        is_aligned = [name == ALIGNED for name, *_ in self.kinds]
        return acceptance_rates(
            np.stack((self._past[TRIED:, is_aligned].sum(axis=1), self._past_behind))
        )

    @property
    def by_age(self) -> dict[int, float]:
        """Share of draft tokens that were accepted, by updates since the draft was extended."""
        return {
            kind[1]: accepted / proposed
            for kind, (_, proposed, _, accepted) in zip(
                self.kinds, self._past.T.tolist(), strict=True
            )
            if kind[0] == ALIGNED and proposed >= MIN_PROPOSED
        }

    def by_source(self) -> dict[str, list[int]]:
        """Return this rollout's [proposed, accepted] by source, without rows drafted ahead."""
        table: dict[str, list[int]] = {}
        columns = (self.counts[PROPOSED, 1], self.counts[ACCEPTED, 1], self._past[TRIED])
        for (name, *_), *column in zip(self.kinds, *map(np.ndarray.tolist, columns), strict=True):
            proposed, accepted, tried_before = map(int, column)
            if proposed or tried_before:
                of_source = table.setdefault(name, [0, 0])
                of_source[0] += proposed
                of_source[1] += accepted
        return table

    def observe(
        self,
        kind: np.ndarray,
        num_draft: np.ndarray,
        num_accepted: np.ndarray,
        is_counted: np.ndarray,
    ) -> None:
        """Count the outcome of R verifications, int64 [R] and bool [R].

        Tokens behind a first wrong one say nothing."""
        size, index = len(self.kinds), kind + len(self.kinds) * is_counted
        columns = (num_draft, np.minimum(num_accepted + 1, num_draft), num_accepted)
        new = np.array([np.bincount(index, column, 2 * size) for column in columns])
        self.counts[PROPOSED:] += new.reshape(3, 2, size)

    @property
    def measured(self) -> np.ndarray:
        """Counts of this rollout that ranks exchange, float64 [4 K + 2]."""
        return np.concatenate((self.counts.sum(axis=1).ravel(), self.behind))

    def merge(self, measured: np.ndarray, has_drafts: bool = True) -> None:
        """End a rollout. measured: the sum of what all ranks have measured.

        has_drafts: whether the rollout could have drafts; else the rollout tells nothing."""
        new = measured[:-2].reshape(4, -1)
        is_untried = (new[OFFERED] > 0) & (new[TRIED] == 0)
        given_up = UNTRIED * np.minimum(1.0, MEMORY / np.maximum(self._past[TRIED], 1.0))
        forgetting = FORGETTING if has_drafts else 1.0
        self._past = np.where(is_untried, given_up, forgetting) * self._past + new
        # Where nothing is drafted any more, drafts are tried again once this is forgotten.
        self._past_behind = forgetting * self._past_behind + measured[-2:]
        self.counts[:], self.behind[:], self._is_merged = 0.0, 0.0, True
        self._believe()

    def begin(self) -> None:
        """Begin a rollout. Where the last one was not merged, this rank's counts stand for all."""
        if not self._is_merged:
            self.merge(self.measured)
        self._is_merged = False

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the kinds that were tried, as JSON texts [K], and their counts."""
        known = self._past[TRIED].nonzero()[0]
        kinds = np.array([json.dumps(self.kinds[kind]) for kind in known.tolist()], np.str_)
        return {"kinds": kinds, "past": self._past[:, known], "behind": self._past_behind}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a saved state."""
        numbers = self._numbers([tuple(json.loads(kind)) for kind in state["kinds"].tolist()])
        self._past[:] = 0.0
        self._past[:, numbers], self._past_behind = state["past"], state["behind"]
        self._believe()
