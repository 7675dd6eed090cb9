"""The guard of a mechanism that may cost time: rollouts with and without it are compared, and the
faster setting is kept.

Every setting of a mechanism gives the same tokens, so it is safe to try both. Rollouts differ in
length, so what is compared is measured seconds over the seconds that the cost model expects of
these responses without drafts: the model's error is in both settings alike. While the mechanism is
clearly ahead by the model, nothing is tried: rollouts without it would cost more than they tell.

A single rollout says little, as machines are noisy. So both settings have blocks of rollouts in
turn until the difference of their mean logarithms is clear in units of its standard error.
"""

import numpy as np

CLEAR_RATIO = 0.7  # measured over modelled: so much is no error of the model
FIRST_CHECK = 4  # rollouts before the other setting is tried
BLOCK = 3  # rollouts of a setting in turn
INTERVAL = 12  # rollouts until what was confirmed is checked again; then four times as many
MAX_INTERVAL = 192
MEMORY = 16  # rollouts of a setting that are remembered
# Standard errors by which the other setting must be faster, or slower, for a decision.
SWITCH, CONFIRM = 1.7, 0.7
LOOKS_FASTER, MAX_SHARE = 0.3, 2  # then it goes on, up to so many times the rollouts of this one
# The standard deviation of a rollout's logarithm before any are seen, and how many it counts for.
PRIOR_STD, PRIOR_COUNT = 0.15, 6


class Guard:
    """Decides whether one mechanism is on, rollout by rollout. The same on every rank, as it is fed
    with what the ranks have exchanged."""

    def __init__(self, is_on: bool = True):
        self.is_on = is_on
        self.is_checking = False  # the other setting is being tried
        self._logs: dict[bool, list[float]] = {True: [], False: []}
        self._until_decision = FIRST_CHECK  # rollouts
        self._interval = INTERVAL
        self._is_settling = False  # drafts of the other setting are used, or missing

    @property
    def setting(self) -> bool:
        """Whether the mechanism is on in the next rollout."""
        return self.is_on != self.is_checking

    def observe(self, measured_s: float, modelled_s: float, may_check: bool = True) -> None:
        """A rollout is over that had `setting`: its seconds, and those expected without drafts.

        may_check: no other mechanism is being compared now.
        """
        if min(measured_s, modelled_s) <= 0.0:
            return
        if self._is_settling:
            self._is_settling = False
            return
        logs = self._logs[self.setting]
        logs.append(float(np.log(measured_s / modelled_s)))
        del logs[:-MEMORY]
        self._until_decision -= 1
        if self._until_decision <= 0 or (self.is_checking and self._lead() < -SWITCH):
            self._decide(may_check)

    def _decide(self, may_check: bool) -> None:
        """At the end of a block, or as soon as the other setting is clearly slower."""
        lead, before = self._lead(), self.setting
        if lead > SWITCH or lead < -CONFIRM:
            is_change = lead > SWITCH
            self.is_on ^= is_change
            self.is_checking = False
            self._logs[not self.is_on].clear()
            # What has been switched off has lost time; it may not do so again soon.
            self._until_decision = 2 * INTERVAL if is_change else self._interval
            self._interval = min(4 * self._until_decision, MAX_INTERVAL)
        else:
            self._until_decision = BLOCK
            here, there = (self._logs[of] for of in (self.is_on, not self.is_on))
            if self.is_checking:
                self.is_checking = lead > LOOKS_FASTER and len(there) < MAX_SHARE * len(here)
            elif may_check and np.median(here) > np.log(CLEAR_RATIO):
                self.is_checking = True
            else:
                self._until_decision = 1
        self._is_settling = self.setting != before

    def _lead(self) -> float:
        """By how much the other setting is faster, in standard errors; 0 where it is not known."""
        here, there = (np.array(self._logs[of]) for of in (self.is_on, not self.is_on))
        if not len(there):
            return 0.0
        squares = len(here) * here.var() + len(there) * there.var() + PRIOR_COUNT * PRIOR_STD**2
        variance = squares / (len(here) + len(there) - 2 + PRIOR_COUNT)
        error = np.sqrt(variance * (1 / len(here) + 1 / len(there)))
        return float((here.mean() - there.mean()) / error)

    def state_dict(self) -> dict[str, np.ndarray]:
        """All that it knows, as arrays."""
        flags = (self.is_on, self.is_checking, self._is_settling)
        counts = (self._until_decision, self._interval)
        return {
            "counts": np.array([*flags, *counts], np.int64),
            "on": np.array(self._logs[True]),
            "off": np.array(self._logs[False]),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state."""
        *flags, self._until_decision, self._interval = state["counts"].tolist()
        self.is_on, self.is_checking, self._is_settling = map(bool, flags)
        self._logs = {True: state["on"].tolist(), False: state["off"].tolist()}
