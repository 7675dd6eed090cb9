"""A game of one sum in three tries, as a text environment: a wrong answer is followed by the same
question again. `configs/tiny_episodes.yaml` trains on it."""

import re

NUM_TRIES = 3


class SumGame:
    """Rewards a right answer with 1 at the first try, 2/3 at the second and 1/3 at the third."""

    def __init__(self, env_config: dict, extras: dict):
        """extras: the columns of the data, of which `answer` is that of the sum."""
        self.wanted = int(extras["answer"])
        self.num_tries = 0

    def init(self, prompt: str) -> None:
        """The prompt is the question."""
        self.question = prompt

    def step(self, action: str) -> dict:
        """Score an answer; ask again if it is wrong and a try is left."""
        found = re.search(r"<answer>(-?\d+)</answer>", action)
        is_right = found is not None and int(found[1]) == self.wanted
        reward = (NUM_TRIES - self.num_tries) / NUM_TRIES if is_right else 0.0
        self.num_tries += 1
        if is_right or self.num_tries == NUM_TRIES:
            return {"observations": [], "reward": reward, "done": True}
        again = {"role": "user", "content": self.question}
        return {"observations": [again], "reward": 0.0, "done": False}
