"""The guard of a mechanism that may cost time: rollouts with and without it are compared, and the
faster setting is kept.

Every setting of a mechanism gives the same tokens, so it is safe to try both. Rollouts differ in
length, so what is compared is measured seconds over the seconds that the cost model expects of
these responses without drafts: the model's error is in both settings alike. While the mechanism is
clearly ahead by the model, nothing is tried: a control rollout would cost more than it tells.
"""

import numpy as np

CLEAR_RATIO = 0.7  # measured over modelled: so much is no error of the model
FIRST_CHECK = 6  # rollouts before the first comparison
NUM_CONTROL = 3  # rollouts of a comparison that count
INTERVAL = 12  # rollouts to the next comparison; doubled each time that one confirms the setting
MAX_INTERVAL = 192
MARGIN = 0.02  # by which the other setting must be faster
MEMORY = 12  # rollouts of a setting that are remembered


class Guard:
    """Decides whether one mechanism is on, rollout by rollout. The same on every rank, as it is fed
    with what the ranks have exchanged."""

    def __init__(self, is_on: bool = True):
        self.is_on = is_on
        self._ratios: dict[bool, list[float]] = {True: [], False: []}
        self._interval = INTERVAL
        self._until_check = FIRST_CHECK
        self._control_left = 0  # rollouts of the running comparison
        self._is_settling = 0  # rollouts after a change of the setting that are not counted

    @property
    def setting(self) -> bool:
        """Whether the mechanism is on in the next rollout."""
        return self.is_on != (self._control_left > 0)

    def observe(self, measured_s: float, modelled_s: float, may_check: bool = True) -> None:
        """A rollout is over that had `setting`: its seconds, and those expected without drafts.

        may_check: no other mechanism is being compared now.
        """
        if modelled_s <= 0.0:
            return
        if self._is_settling:
            self._is_settling -= 1  # drafts of the other setting were still used, or missing
            return
        ratios = self._ratios[self.setting]
        ratios.append(measured_s / modelled_s)
        del ratios[:-MEMORY]
        if self._control_left:
            self._control_left -= 1
            if not self._control_left:
                self._decide()
            return
        self._until_check -= 1
        if self._until_check <= 0 and may_check:
            if np.median(ratios) < CLEAR_RATIO:
                self._until_check = 1
            else:
                self._control_left, self._is_settling = NUM_CONTROL, 1

    @property
    def is_checking(self) -> bool:
        """Whether the other setting is being tried."""
        return self._control_left > 0

    def _decide(self) -> None:
        """Change the setting if the other was faster beyond doubt: by its median, and in most of
        the control rollouts."""
        here, there = self._ratios[self.is_on], self._ratios[not self.is_on][-NUM_CONTROL:]
        limit = (1.0 - MARGIN) * float(np.median(here))
        is_faster = np.median(there) < limit and np.sum(np.array(there) < limit) * 2 > len(there)
        if is_faster:
            self.is_on, self._interval = not self.is_on, INTERVAL
        else:
            self._is_settling = 1
            self._interval = min(2 * self._interval, MAX_INTERVAL)
        self._until_check = self._interval

    def state_dict(self) -> dict[str, np.ndarray]:
        """All that it knows, as arrays."""
        counts = (self.is_on, self._interval, self._until_check, self._control_left)
        return {
            "counts": np.array([*counts, self._is_settling], np.int64),
            "on": np.array(self._ratios[True]),
            "off": np.array(self._ratios[False]),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state."""
        is_on, *counts = state["counts"].tolist()
        self.is_on = bool(is_on)
        self._interval, self._until_check, self._control_left, self._is_settling = counts
        self._ratios = {True: state["on"].tolist(), False: state["off"].tolist()}
