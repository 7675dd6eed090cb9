"""How often draft tokens are accepted, by kind of proposal: what planner/windows.py chooses by."""

import json

import numpy as np

# survival is estimated by source and by which of these the match length reaches
MATCH_EDGES = (2, 4, 8, 16)


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
