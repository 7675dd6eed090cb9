"""Environments whose turns a small policy can take, and their tool calls."""

import json
import os
import random

import numpy as np

GAME, CALCULATOR, DICE = (f"{__name__}.{name}" for name in ("Game", "Calculator", "Dice"))
# Turns end with the tiny policy's stop token.
CHAT_TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }}
{% endfor %}{% for message in messages %}{{ '<' ~ message.role ~ '>' ~ message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson }}
{{- '</tool_call>' }}{% endfor %}<|endoftext|>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


class Game:
    """A text environment: sums that depend on the seed and on the turns before."""

    def __init__(self, env_config, extras):
        self.seen, self.random = str(extras["answer"]), random.Random()

    def init(self, prompt, seed):
        self.random.seed(seed)
        if self.random.random() < 0.5:
            return f"{prompt} {self.random.randrange(9)} ="
        return None

    def step(self, action: str) -> dict:
        self.seen += action
        value = sum(map(ord, self.seen)) + self.random.randrange(10)
        said = [{"role": "user", "content": f" {value % 10} + {value % 7} ="}]
        is_done = value % 5 == 0
        return {"observations": [] if is_done else said, "reward": value % 3, "done": is_done}


class Dice(Game):
    def init(self, prompt, seed):
        self.random = random.SystemRandom()


class Calculator:
    """An environment for TRL."""

    def reset(self, **columns) -> None:
        self.total = int(columns["answer"])

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        if a == b:
            raise ValueError("that is too easy")
        self.total += a + b
        return self.total

    def get_reward(self) -> float:
        return float(self.total % 4)


def parse_calls(tokenizer, ids, prefix, schemas) -> list[dict]:
    values = [int(token) for token in ids]
    return [
        {"name": "add", "arguments": {"a": value % 3, "b": value % 5}}
        for value in values[: sum(values) % 3]
    ]


def remaining(prompts, completions, completion_ids, environments, **columns) -> list[float]:
    return [float(environment.total % 3) for environment in environments]


def copy_policy(folder) -> str:
    source = "configs/tiny_policy"
    for name in os.listdir(source):
        os.symlink(os.path.abspath(os.path.join(source, name)), os.path.join(folder, name))
    path = os.path.join(folder, "tokenizer_config.json")
    with open(path) as file:
        settings = json.load(file)
    os.remove(path)
    with open(path, "w") as file:
        json.dump(settings | {"chat_template": CHAT_TEMPLATE}, file)
    return str(folder)


def delay(poll, seed: int = 0):
    """`Environments.poll` whose observations come some polls later, in another order."""
    random, waiting = np.random.default_rng(seed), {}

    def poll_late(environments):
        late = waiting.setdefault(id(environments), [])
        late += poll(environments)
        random.shuffle(late)
        count = random.integers(len(late) + 1) // 2 or len(late[:1]) * int(random.random() < 0.1)
        taken, late[:] = late[:count], late[count:]
        return [entry for entry in taken if entry[0] in environments._running]

    return poll_late
