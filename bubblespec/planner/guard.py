"""Guards of mechanisms that may cost time: sequential tests of whole rollouts.

From time to time a rollout runs without the mechanism, for comparison. All settings give the same
tokens, so they are compared by ratios: measured seconds over the cost model's seconds for the same
responses without drafts, of whose error both settings have the same. The mechanism pauses once it
has lost a part of a rollout and is slower by more than chance; rollouts of a pause are comparisons
too, so that a later trial needs few rollouts to fail again.
"""

import numpy as np

FIRST_CONTROL = 1  # rollouts before the first one without the mechanism
INTERVAL, TRIAL = 2.5, 6.0  # first interval between two such rollouts; the same after a pause
# Standard errors of the lead by which a mechanism must be behind to pause. A mistaken pause costs
# less than a mistaken continuation.
ERRORS = 0.6
MIN_COMPARISONS, SURE_ERRORS = 2, 1.5  # the same with fewer comparisons, which may be odd ones
CLEAR, CLEAR_AT_ONCE = 1.5, 3.0  # standard errors of a clear lead; the same with one comparison
# Growth of the interval from one comparison to the next, and once more as it ends, if the lead is
# clear by then.
GROWTH, CLEAR_GROWTH = 1.25, 3.0
MIN_LOST, MIN_LOST_AGAIN = 0.2, 0.1  # mean rollouts lost before a pause, and before later ones
FIRST_PAUSE, MAX_PAUSE = 36, 288  # rollouts of a pause, doubled each time
MEMORY = 48  # latest rollouts kept by setting
# Relative standard error of one rollout, as PRIOR_ROLLOUTS earlier ones: a few tell little of it.
PRIOR_ERROR, PRIOR_ROLLOUTS = 0.1, 4
MAX_RATIO = 1.3  # of a comparison over the median one; beyond, the rollout was interrupted
# What may be guarded, in the order in which it is compared; the others while drafts are on.
DRAFTS, COPY = "drafts", "quantized"


class Guard:
    """Decides whether the next rollout uses a mechanism.

    The same on every rank, as its observations are exchanged."""

    def __init__(self, has_effect_behind: bool = False):
        """Begin with the mechanism on.

        has_effect_behind: whether the first rollout without the mechanism has drafts that were made
        with it, so that only the second one is compared."""
        self.has_effect_behind = has_effect_behind
        self._with: list[tuple[float, float]] = []  # measured and modelled seconds by rollout
        self._without: list[tuple[float, float]] = []
        self._until_control, self._interval = float(FIRST_CONTROL + has_effect_behind), INTERVAL
        self.is_unprepared = True
        """Whether the next rollout is not compared: the first one warms up, and a rollout lives on
        the drafts that the one before it has made."""
        self._is_late = False  # whether the next comparison has been put off
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
        return self.setting and self._until_control < 2

    def test(self) -> tuple[float, float]:
        """Return by which share rollouts with the mechanism are faster, and its standard error.

        0 and infinity while nothing is known."""
        if not self._with or not self._without:
            return 0.0, np.inf
        used, unused = np.array(self._with), np.array(self._without)
        ratios = unused[:, 0] / unused[:, 1]
        middle = np.median(ratios)
        unused[:, 0] = unused[:, 1] * ratios.clip(middle / MAX_RATIO, middle * MAX_RATIO)
        (own, own_error), (other, other_error) = _ratio(used), _ratio(unused)
        return 1.0 - own / other, own / other * float(np.hypot(own_error, other_error))

    @property
    def has_compared(self) -> bool:
        """Whether there were enough rollouts without the mechanism to compare with."""
        return len(self._without) >= MIN_COMPARISONS

    def observe(self, measured_s: float, modelled_s: float, was_on: bool) -> None:
        """Learn a rollout: its seconds, and those predicted without drafts."""
        if min(measured_s, modelled_s) <= 0.0:
            return
        was_prepared, self.is_unprepared = not self.is_unprepared, False
        of_setting = self._with if was_on else self._without
        if was_prepared:
            of_setting.append((measured_s, modelled_s))
            del of_setting[:-MEMORY]
        if self._pause_left:
            self._pause_left -= 1
            if not self._pause_left:
                self.try_again()
            return
        self._until_control -= was_on
        if was_prepared:
            self._plan(was_on)
        has_changed = self.setting != was_on
        self.is_unprepared = has_changed and (self.setting or self.has_effect_behind)

    def try_again(self) -> None:
        """End a pause, as the savings may have changed."""
        self._pause_left = 0
        self._with.clear()
        self._until_control = self._interval = TRIAL
        self.is_unprepared = True

    def _plan(self, was_on: bool) -> None:
        """Decide when the next comparison is, and whether to pause, behind one more rollout."""
        lead, error = self.test()
        is_clear = lead > (CLEAR if self.has_compared else CLEAR_AT_ONCE) * error
        if not was_on:
            self._interval, self._is_late = GROWTH * self._interval, False
            self._until_control = self._interval + self.has_effect_behind
        elif is_clear and self.is_next_without and not self._is_late:
            self._until_control += (CLEAR_GROWTH - 1) * self._interval
            self._interval, self._is_late = CLEAR_GROWTH * self._interval, True
        if self._is_slower(lead, error):
            self._pause_left, self._pause = self._pause, min(2 * self._pause, MAX_PAUSE)

    def _is_slower(self, lead: float, error: float) -> bool:
        least = MIN_LOST if self._pause == FIRST_PAUSE else MIN_LOST_AGAIN
        errors = ERRORS if self.has_compared else SURE_ERRORS
        return lead < -errors * error and -lead * len(self._with) > least

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state as arrays."""
        state = (self._until_control, self._interval, self._pause_left, self._pause)
        numbers = (*state, self.is_unprepared, self._is_late)
        return {
            "numbers": np.array(numbers, np.float64),
            "with": np.array(self._with, np.float64).reshape(-1, 2),
            "without": np.array(self._without, np.float64).reshape(-1, 2),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a saved state."""
        self._until_control, self._interval, *rest = state["numbers"].tolist()
        self._pause_left, self._pause = map(int, rest[:2])
        self.is_unprepared, self._is_late = bool(rest[2]), bool(rest[-1])  # more between, once
        self._with = [tuple(pair) for pair in state["with"].tolist()]
        self._without = [tuple(pair) for pair in state["without"].tolist()]


class Guards(dict[str, Guard]):
    """The guards of a run by name."""

    def add(self, name: str) -> None:
        """Guard one more part, if drafts are guarded."""
        if DRAFTS in self:
            self[name] = Guard(has_effect_behind=name == COPY)

    def _may_learn(self, name: str, without: frozenset[str] | set[str]) -> bool:
        """Whether a part is compared in a rollout: all but drafts only with drafts made for it."""
        drafts = self.get(DRAFTS)
        if name == DRAFTS or drafts is None:
            return True
        return DRAFTS not in without and not drafts.is_unprepared

    @property
    def paused(self) -> frozenset[str]:
        """What was slower, and is off for some rollouts."""
        return frozenset(name for name, guard in self.items() if guard.is_paused)

    @property
    def without(self) -> frozenset[str]:
        """What the next rollout does without: all that pauses, and one part for comparison."""
        off = set(self.paused)
        for name in (DRAFTS, COPY):
            guard = self.get(name)
            if guard is None or name in off or not self._may_learn(name, off):
                continue
            if not guard.setting:
                off.add(name)
                break
        return frozenset(off)

    def observe(self, measured_s: float, modelled_s: float, without: frozenset[str]) -> None:
        """Learn a rollout, see `Guard`, without some of the parts."""
        compared = {name for name in without if name in self and not self[name].is_paused}
        learning = [n for n in self if compared <= {n} and self._may_learn(n, without)]
        for name in learning:
            self[name].observe(measured_s, modelled_s, name not in without)


def _ratio(rollouts: np.ndarray) -> tuple[float, float]:
    """Return the sum of measured over that of modelled seconds, and its relative standard error.

    rollouts: float64 [n, 2]. Long rollouts weigh more, in the error as well (Cochran 1977, Sampling
    Techniques, section 6.4)."""
    measured_s, modelled_s = rollouts.sum(axis=0)
    ratio = measured_s / modelled_s
    size, mean_s = len(rollouts), measured_s / len(rollouts)
    errors = (rollouts[:, 0] - ratio * rollouts[:, 1]) / mean_s
    squares = (errors**2).sum() + PRIOR_ROLLOUTS * PRIOR_ERROR**2
    return float(ratio), float(np.sqrt(squares / (size - 1 + PRIOR_ROLLOUTS) / size))
