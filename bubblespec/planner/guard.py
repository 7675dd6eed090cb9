"""The guard of mechanisms that may cost time: left out where rollouts are slower with them.

Both settings give the same tokens. Rollouts differ in length, so the guard compares ratios:
measured seconds over the cost model's seconds for the same responses without drafts; the model's
error is in both settings alike. Costs and savings of a mechanism come in different rollouts, so
rollouts with it count by their sums, rollouts without it one by one.

The guard tests after every rollout, on all that it remembers: the mechanism pauses if it is slower
by more than the standard error. Single rollouts without it become rarer, and so do trials after a
pause.
"""

import numpy as np

# Rollouts before the first one without the mechanism, while there is little to lose; rollouts from
# there to the second. While the mechanism is not slower, intervals double.
FIRST_CONTROL, FIRST_INTERVAL, MAX_INTERVAL = 1, 10, 128
WARM_UP = 4  # rollouts of a trial that are not counted: the first drafts are an investment
MIN_WITH, MIN_WITHOUT = 8, 2  # rollouts of each setting before anything is decided
MIN_PAUSE, MAX_PAUSE = 24, 384  # rollouts
TRIAL_SHARE = 0.02  # of a pause, that the trial after it may lose
GROWTH = 2.0  # of pauses, each time that the same is found again
MIN_NOISE = 0.1  # standard deviation of log ratios, while few are known
MEMORY = 48  # latest rollouts kept by setting
NUMBERS = ("_num_tried", "_until_control", "_interval", "_pause_left", "_pause_growth")


class Guard:
    """Decides whether the next rollout uses a mechanism.

    The same on every rank, as its observations are exchanged."""

    def __init__(self):
        self._with: list[tuple[float, float]] = []  # measured and modelled seconds by rollout
        self._without: list[tuple[float, float]] = []
        self._num_tried = 0  # rollouts with the mechanism since the run or the trial began
        self._until_control = FIRST_CONTROL  # rollouts to come before the next one without it
        self._interval = FIRST_INTERVAL
        self._pause_left = 0  # rollouts of the current pause still to come
        self._pause_growth = 1.0

    @property
    def setting(self) -> bool:
        """Whether the mechanism is on in the next rollout."""
        return not self._pause_left and self._until_control > 0

    @property
    def is_paused(self) -> bool:
        """Whether the mechanism is off because it was slower."""
        return self._pause_left > 0

    @property
    def is_next_without(self) -> bool:
        """Whether the guard plans the rollout after the next one without the mechanism."""
        return self.setting and self._until_control == 1

    def lead(self) -> tuple[float, float]:
        """Return the share by which rollouts with the mechanism are faster, and its standard error.

        Before MIN_WITHOUT are measured, the model counts as a rollout without the mechanism."""
        if not self._with:
            return 0.0, 1.0
        measured_s, modelled_s = np.sum(self._with, axis=0)
        without = self._without
        if len(without) < MIN_WITHOUT:
            without = [(1.0, 1.0), *without]
        logs = [
            np.log([measured / modelled for measured, modelled in of_setting])
            for of_setting in (self._with, without)
        ]
        centre = float(np.median(logs[1]))
        error = sum(max(float(of.std()), MIN_NOISE) ** 2 / len(of) for of in logs) ** 0.5
        return 1.0 - float(measured_s / modelled_s) / np.exp(centre), error

    def observe(self, measured_s: float, modelled_s: float) -> None:
        """Learn a rollout with `setting`: its seconds, and those predicted without drafts."""
        if min(measured_s, modelled_s) <= 0.0:
            return
        is_with = self.setting
        if not is_with:
            self._without = [*self._without, (measured_s, modelled_s)][-MEMORY:]
        if self._pause_left:
            self._pause_left -= 1
            if not self._pause_left:  # try again: the savings may have changed
                self._with, self._num_tried = [], 0
                self._until_control = WARM_UP + MIN_WITH
            return
        if is_with:
            self._num_tried += 1
            if self._num_tried > WARM_UP:
                self._with = [*self._with, (measured_s, modelled_s)][-MEMORY:]
            self._until_control -= 1
        else:
            self._until_control = self._interval
            if self.lead()[0] >= 0.0:
                self._interval = min(2 * self._interval, MAX_INTERVAL)
        self._decide()

    def _decide(self) -> None:
        if len(self._with) < MIN_WITH or len(self._without) < MIN_WITHOUT:
            return
        lead, error = self.lead()
        if lead < -error:
            certain = (WARM_UP + MIN_WITH) * -(lead + error)  # loss of a trial, in rollouts
            pause = self._pause_growth * max(MIN_PAUSE, certain / TRIAL_SHARE)
            self._pause_left = int(min(pause, MAX_PAUSE))
            self._pause_growth *= GROWTH
        elif lead > error:
            self._pause_growth = 1.0

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state as arrays."""
        return {
            "numbers": np.array([getattr(self, name) for name in NUMBERS], np.float64),
            "with": np.array(self._with, np.float64).reshape(-1, 2),
            "without": np.array(self._without, np.float64).reshape(-1, 2),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a saved state; of an earlier version the rollouts alone."""
        if len(state["numbers"]) == len(NUMBERS):
            for name, number in zip(NUMBERS, state["numbers"].tolist(), strict=True):
                setattr(self, name, type(getattr(self, name))(number))
        self._with = [tuple(pair) for pair in state["with"].tolist()]
        self._without = [tuple(pair) for pair in state["without"].tolist()]
