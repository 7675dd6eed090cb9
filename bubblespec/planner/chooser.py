"""Which parts of speculation coming rollouts use: Thompson sampling over a linear model.

All settings give the same tokens, so only seconds count. The logarithm of a rollout's measured
seconds, over those expected of the same responses without drafts, is a base plus the effect of each
part that is on, with normal noise. Before a rollout the effects are drawn from their distribution,
and a part is on if its drawn effect is below 0 (Thompson 1933; Russo et al. 2018, "A Tutorial on
Thompson Sampling"; TLT's strategy choice is a bandit as well). So every rollout tells about every
part, clearly faster parts are hardly ever left out, and clearly slower ones hardly ever tried.
Effects may change meanwhile: each returns slowly to its prior, as a stationary autoregression of
first order. So a part that is off is tried again, and no choice is permanent. The distribution
after a rollout is the Kalman filter's (Kalman 1960).
"""

from collections.abc import Sequence
from itertools import compress
from statistics import NormalDist

import numpy as np

DRAFTS = "drafts"  # a TP tail that is entered by cost included
# Normal prior in log seconds, means and standard deviations. The base is the error of the model of
# forwards. Prices would not do: fitted to rollouts with drafts, they take up what drafts cost.
BASE_ERROR, EFFECT, EFFECT_ERROR = 0.1, -0.05, 0.15
KEPT = 1 - 1 / 300  # of an effect's distance from its prior's mean, per rollout
# Standard deviation of a rollout's log seconds; the prior weighs as much as so many rollouts.
NOISE, NOISE_ROLLOUTS = 0.06, 6
# Draws are quasi-random: multiples of these, modulo 1, are spread evenly (Kronecker's sequence), so
# no series of unlucky draws keeps a part off for long.
STRIDES = (5**0.5 / 2 - 0.5, 2**0.5 - 1.0, 3**0.5 - 1.0)
MAX_SURPRISE = 0.3  # log seconds; beyond, something else has interrupted the rollout
WARM_UP = 3  # rollouts learned before the first choice: drafts are few until some were verified


class Chooser:
    """Choices for the steps of a run, two steps ahead: each step's drafts are made before it.

    The same on every rank, as its observations are exchanged."""

    def __init__(self, parts: Sequence[str] = ()):
        """Begin with all parts on. parts: what may be left out; the others need the first one."""
        self.parts = list(parts)
        self.forget()

    def forget(self) -> None:
        """Return to the prior, where the effects are about to change."""
        count = len(self.parts)
        self._mean = self._prior_mean = np.array([0.0, *[EFFECT] * count])  # of base and effects
        self._prior_covariance = np.diag([BASE_ERROR**2, *[EFFECT_ERROR**2] * count])
        self._covariance = self._prior_covariance
        self._noise = np.zeros(2)  # rollouts, and the squares of their surprises, weighted
        self._off: dict[int, frozenset[str]] = {}  # by step

    def add(self, part: str) -> None:
        """Choose about one more part, if drafts are chosen about."""
        if DRAFTS in self.parts:
            self.parts.append(part)
            self.forget()

    def off(self, step: int) -> frozenset[str]:
        """Return the parts that rollouts of a step do without."""
        return self._off.get(step, frozenset())

    def observe(self, step: int, seconds: float, expected_s: float) -> None:
        """Learn the first rollout of a step, and choose for the step after the next one.

        seconds: measured; expected_s: modelled of the same responses without drafts."""
        if step + 2 in self._off or not self.parts:
            return  # a further rollout, of dynamic sampling, which has no drafts
        off, coming, before = self.off(step), self.off(step + 1), self._off.get(step - 1)
        self._mean = self._prior_mean + KEPT * (self._mean - self._prior_mean)
        drift = (1 - KEPT**2) * self._prior_covariance
        self._covariance = KEPT**2 * self._covariance + drift
        # The first rollout warms up, and one behind another without drafts has none to verify.
        is_timed = min(seconds, expected_s) > 0.0
        if is_timed and before is not None and (DRAFTS in off or DRAFTS not in before):
            self._learn(float(np.log(seconds / expected_s)), off, before)
        chosen = coming  # a change holds for two steps: a rollout lives on drafts of the one before
        if coming == off and self._noise[0] > WARM_UP - 0.5:
            chosen = self._draw(step + 2)
        self._off = {step: off, step + 1: coming, step + 2: chosen}

    def _learn(self, log_s: float, off: frozenset[str], before: frozenset[str]) -> None:
        """Update the distribution by a rollout. off, before: what it and the one before lacked."""
        # Half of a part's effect comes with the drafts that were made with it a rollout earlier.
        shares = [1.0 - ((name in off) + (name in before)) / 2 for name in self.parts]
        x = np.array([1.0, *shares]) if DRAFTS not in off else np.eye(1 + len(shares))[0]
        surprise = min(float(log_s - x @ self._mean), MAX_SURPRISE)
        count, squares = self._noise
        variance = (squares + NOISE_ROLLOUTS * NOISE**2) / (count + NOISE_ROLLOUTS)
        gain = self._covariance @ x / (x @ self._covariance @ x + variance)
        self._mean = self._mean + gain * surprise
        self._covariance = self._covariance - np.outer(gain, x @ self._covariance)
        self._noise = KEPT * self._noise + np.array([1.0, min(surprise**2, MAX_SURPRISE**2)])

    def _draw(self, step: int) -> frozenset[str]:
        """Choose by drawn effects."""
        normal = [NormalDist().inv_cdf((0.5 + step * of) % 1.0) for of in STRIDES]
        factor = np.linalg.cholesky(self._covariance[1:, 1:])
        drawn = self._mean[1:] + factor @ normal[: len(factor)]
        if drawn[0] + drawn[1:].clip(max=0.0).sum() >= 0.0:
            return frozenset(self.parts)
        return frozenset(compress(self.parts[1:], drawn[1:] >= 0.0))

    def metrics(self) -> dict[str, float]:
        """Return the expected effect of each part in log seconds, and its standard error."""
        names = [f"chooser/{name}{suffix}" for suffix in ("", "_error") for name in self.parts]
        values = np.append(self._mean[1:], np.sqrt(np.diag(self._covariance)[1:]))
        return dict(zip(names, values.tolist(), strict=True))

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the distribution and the choices as arrays."""
        choices = [[step, *(name in self._off[step] for name in self.parts)] for step in self._off]
        found = np.array(choices, np.int64).reshape(len(choices), 1 + len(self.parts))
        return {
            "mean": self._mean,
            "covariance": self._covariance,
            "noise": self._noise,
            "off": found,
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a saved state, unless it is about other parts."""
        if state["mean"].shape == self._mean.shape:
            self._mean, self._covariance = state["mean"], state["covariance"]
            self._noise = state["noise"]
            choices = state["off"].tolist()
            self._off = {step: frozenset(compress(self.parts, off)) for step, *off in choices}
