"""The game of `examples/sum_game.py` with turns that take as long as calls of tools do. Workers
import this module, so it imports nothing heavy."""

import math
import random
import time

from examples.sum_game import SumGame

SHORTEST_S, MEDIAN_S, LONGEST_S = 0.05, 0.2, 2.0


def delay_s(*call) -> float:
    """Return heavy-tailed seconds, the same for equal calls."""
    drawn_s = random.Random(repr(call)).lognormvariate(math.log(MEDIAN_S), 1.0)
    return min(max(drawn_s, SHORTEST_S), LONGEST_S)


class SlowGame(SumGame):
    """Sleeps before it answers."""

    def init(self, prompt: str, seed: int) -> None:
        """See `SumGame`."""
        super().init(prompt)
        self.seed = seed

    def step(self, action: str) -> dict:
        """See `SumGame`."""
        time.sleep(delay_s(self.seed, self.num_tries, action))
        return super().step(action)
