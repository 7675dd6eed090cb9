"""The guard of a run's time: drafting may spend what it has won, and a small share of the run
beside that.

Every rollout is held against what its responses would have taken without drafts, by the cost model;
now and then a rollout without any says how far that is right. What drafts have won goes to an
account, what they have lost is taken from it, and a share of what the run takes is added: most of
it at the start, where nothing has been won yet. Drafts beside a rank's own rows stop where the
account is empty; if it is overdrawn, the next rollouts are plain, until it is not. So a whole run
loses no more than that share and what one rollout may lose beyond its allowance, whatever the plans
were wrong about. Of N rollouts that each lose at most x rollouts beyond it, x <= DEEPEST -
OVERDRAFT, that is at most max(MAX_LOSS * N, OVERDRAFT) + x rollouts."""

import math
from dataclasses import dataclass

import numpy as np

# of a run's time without drafts, the overdraft included; what the guard itself gets wrong comes on
# top
MAX_LOSS = 0.025
# Of what may be lost so much, but no more than MOST_CREDIT rollouts, from the start on; the rest in
# the course of the run, so that drafts that have lost it are tried again.
EARLY, MOST_CREDIT = 0.9, 2.0
# More than this, in rollouts, is not kept: or drafts that have stopped to win might lose for long.
MOST_KEPT = 2.0
OVERDRAFT = 0.2  # in rollouts; a rollout is not exactly as long as expected
DEEPEST = 0.3  # in rollouts; a rollout that has lost more was slow for other reasons
FORGETTING = 0.1  # single rollouts are far from equally fast


@dataclass
class Account:
    """The same on every rank, as it is settled with what the ranks have exchanged."""

    num_rollouts: int
    """Of the run, from where the account is opened."""
    check_every: int
    """Rollouts from one without drafts to the next; 0 for none, and then drafts may lose what they
    do."""
    balance_s: float = 0.0
    rollout_s: float = 0.0
    """A rollout without drafts, exponentially weighted; 0 before the first."""
    factor: float = 1.0
    """Seconds without drafts over what the cost model says."""
    num_settled: int = 0
    num_since_check: int = 0
    """Rollouts since the last one without drafts."""
    is_overdrawn: bool = False
    credited_s: float = 0.0
    """What has been added so far without having been won."""

    @property
    def is_plain(self) -> bool:
        """Whether the next rollout is to be one without drafts."""
        return self.check_every > 0 and (
            self.is_overdrawn or self.num_since_check >= self.check_every
        )

    @property
    def allowance_s(self) -> float:
        """What drafts beside own rows may cost the next rollout."""
        return max(self.balance_s, 0.0) if self.check_every else math.inf

    def settle(self, estimated_s: float, actual_s: float, was_plain: bool) -> float:
        """After a rollout: what the cost model says it would have taken without drafts, and what it
        took. Returns the seconds that drafts have won in it."""
        if was_plain:
            if estimated_s > 0:
                self.factor = (1 - FORGETTING) * self.factor + FORGETTING * actual_s / estimated_s
            self.num_since_check, plain_s = 0, actual_s
        else:
            self.num_since_check, plain_s = self.num_since_check + 1, self.factor * estimated_s
        self.rollout_s = (
            plain_s
            if not self.num_settled
            else (1 - FORGETTING) * self.rollout_s + FORGETTING * plain_s
        )
        won_s = plain_s - actual_s
        self.num_settled += 1
        may_lose = max(MAX_LOSS * self.num_rollouts - OVERDRAFT, 0.0)
        early = min(EARLY * may_lose, MOST_CREDIT)
        so_far = early + (may_lose - early) * min(self.num_settled / self.num_rollouts, 1.0)
        credit_s, self.credited_s = self.credited_s, max(so_far * self.rollout_s, self.credited_s)
        credit_s = self.credited_s - credit_s
        balance_s = max(self.balance_s + won_s, -DEEPEST * self.rollout_s) + credit_s
        self.balance_s = min(balance_s, MOST_KEPT * self.rollout_s)
        self.is_overdrawn = self.balance_s < (
            0.0 if self.is_overdrawn else -OVERDRAFT * self.rollout_s
        )
        return won_s

    def state(self) -> np.ndarray:
        """Float64 [7]."""
        counts = (self.num_settled, self.num_since_check, self.is_overdrawn)
        return np.array(
            [self.balance_s, self.rollout_s, self.factor, *counts, self.credited_s], np.float64
        )

    def load_state(self, state: np.ndarray) -> None:
        """Take over a saved state."""
        self.balance_s, self.rollout_s, self.factor = map(float, state[:3])
        self.num_settled, self.num_since_check, self.is_overdrawn = (
            int(state[3]),
            int(state[4]),
            bool(state[5]),
        )
        self.credited_s = float(state[6])
