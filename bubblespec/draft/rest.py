"""Whether the drafter rests: where chains save next to nothing it is not asked, and tried again now
and then.

Chains that pay or not, a drafter costs: hidden states are kept, ticks taken, and idle ranks train
it."""

LEAST_SAVED = (
    0.03  # of a step's rollouts, by chains: about what a drafter costs that is not at rest
)
FIRST_REST, LONGEST_REST = 9, 39  # steps


class Rest:
    """Longer after each step in which chains were tried in vain."""

    def __init__(self):
        self.is_on = False
        self._steps_left = self._length = 0  # of this rest, and of the latest one in all

    def begin_step(self, saved: float | None) -> None:
        """Whether it rests in the step that begins; the same on all ranks, as they are told the
        same. saved: share of the last step's rollouts that chains have saved, None where there were
        none that could have had any."""
        if self.is_on:
            self._steps_left -= 1
            self.is_on = self._steps_left > 0
        elif saved is not None:
            self.is_on = saved < LEAST_SAVED
            self._length = (
                min(max(2 * self._length + 1, FIRST_REST), LONGEST_REST) if self.is_on else 0
            )
            self._steps_left = self._length
