"""The guard of a mechanism that may cost time: it is switched off where it is slower.

From time to time a rollout runs without the mechanism, to compare.

Both settings give the same tokens. Rollouts differ in length, so the guard compares ratios:
measured seconds over the cost model's seconds for the same responses without drafts; the model's
error is in both settings alike. Costs and savings of a mechanism come in different rollouts, so
rollouts with it count by their sums, rollouts without it one by one.
"""

import numpy as np

# Rollouts before the first one without the mechanism, while there is little to lose; rollouts from
# there to the second; growth of later intervals.
FIRST_CONTROL, FIRST_INTERVAL, GROWTH = 1, 8, 2.0
# Rollouts of each setting before anything is decided: the first drafts are an investment.
MIN_WITH, MIN_WITHOUT = 12, 2
# Share by which a paused mechanism was slower; a mistaken pause costs less than a mistaken
# continuation.
MARGIN = 0.07
CLEAR = 0.25  # lead from which further rollouts without the mechanism are not worth their time
FIRST_PAUSE, MAX_PAUSE = 12, 192  # rollouts of a pause, doubled each time
MEMORY = 16  # latest rollouts kept by setting


class Guard:
    """Decides whether the next rollout uses a mechanism.

    The same on every rank, as its observations are exchanged."""

    def __init__(self):
        self._with: list[tuple[float, float]] = []  # measured and modelled seconds by rollout
        self._without: list[tuple[float, float]] = []
        self._until_control = float(FIRST_CONTROL)
        self._interval = float(FIRST_INTERVAL)
        self._pause_left = 0  # rollouts of the current pause still to come
        self._pause = FIRST_PAUSE

    @property
    def setting(self) -> bool:
        """Whether the mechanism is on in the next rollout."""
        return not self._pause_left and self._until_control >= 1

    @property
    def is_paused(self) -> bool:
        """Whether the mechanism is off because it was slower."""
        return self._pause_left > 0

    @property
    def is_next_without(self) -> bool:
        """Whether the guard plans the rollout after the next one without the mechanism."""
        return self.setting and self._until_control < 2 and self.lead < CLEAR

    @property
    def lead(self) -> float:
        """Share by which rollouts with the mechanism are faster; 0 while too few are known."""
        if len(self._with) < MIN_WITH or len(self._without) < MIN_WITHOUT:
            return 0.0
        measured_s, modelled_s = np.sum(self._with, axis=0)
        ratios = [measured / modelled for measured, modelled in self._without]
        return 1.0 - float(measured_s / modelled_s / np.median(ratios))

    def observe(self, measured_s: float, modelled_s: float) -> None:
        """Learn a rollout with `setting`: its seconds, and those predicted without drafts."""
        if min(measured_s, modelled_s) <= 0.0:
            return
        of_setting = self._with if self.setting else self._without
        of_setting.append((measured_s, modelled_s))
        del of_setting[:-MEMORY]
        if self._pause_left:
            self._pause_left -= 1
            if not self._pause_left:  # try again: the savings may have changed
                self._with.clear()
                self._until_control, self._interval = float(MIN_WITH), GROWTH * MIN_WITH
        elif not self.setting:  # a rollout for comparison
            self._until_control, self._interval = self._interval, GROWTH * self._interval
        elif self.lead < CLEAR:
            self._until_control -= 1
        if self.lead < -MARGIN and not self._pause_left:
            self._pause_left, self._pause = self._pause, min(2 * self._pause, MAX_PAUSE)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state as arrays."""
        numbers = (self._until_control, self._interval, self._pause_left, self._pause)
        return {
            "numbers": np.array(numbers, np.float64),
            "with": np.array(self._with, np.float64).reshape(-1, 2),
            "without": np.array(self._without, np.float64).reshape(-1, 2),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a saved state."""
        self._until_control, self._interval, *pauses = state["numbers"].tolist()
        self._pause_left, self._pause = map(int, pauses)
        self._with = [tuple(pair) for pair in state["with"].tolist()]
        self._without = [tuple(pair) for pair in state["without"].tolist()]
