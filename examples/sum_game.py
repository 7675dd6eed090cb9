"""A game of three sums, as a text environment: each asks for the last digit of the answer before,
plus a number. `configs/tiny_episodes.yaml` trains on it."""

import random
import re

QUESTION = "State the final answer to the following arithmetic problem: {} ="
NUM_SUMS = 3


class SumGame:
    """The reward of an episode is the share of its turns that were answered right."""

    def __init__(self, env_config: dict, extras: dict):
        """extras: the columns of the data, of which `answer` is that of the first sum."""
        self.wanted = int(extras["answer"])
        self.num_turns = 0

    def init(self, prompt: str, seed: int) -> None:
        """The first sum is that of the prompt."""
        self.random = random.Random(seed)

    def step(self, action: str) -> dict:
        """Score an answer, and ask for the next sum."""
        found = re.search(r"<answer>(-?\d+)</answer>", action)
        given = int(found[1]) if found else 0
        reward = float(found is not None and given == self.wanted) / NUM_SUMS
        self.num_turns += 1
        if self.num_turns == NUM_SUMS:
            return {"observations": [], "reward": reward, "done": True}
        digit, term = abs(given) % 10, self.random.randint(1, 9)
        self.wanted = digit + term
        said = {"role": "user", "content": QUESTION.format(f"{digit} + {term}")}
        return {"observations": [said], "reward": reward, "done": False}
