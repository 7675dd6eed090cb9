"""The game of `examples/sum_game.py` in TRL's form, so that TRL runs the same class: an answer is a
tool call. For `vs_trl.py --tool-game`.

The tiny policy writes `<answer>7</answer>`. `make_policy` gives its tokenizer a response template
that reads this as a call of the tool `answer`, and a chat template that adds nothing to the text
but a line break where there are tools, as without any difference it would know none.
"""

import json
import os

NUM_TRIES = 3
CHAT_TEMPLATE = (
    "{{ '\\n' if tools }}{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ '<|endoftext|>' if message.role == 'assistant' }}{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "answer", "arguments": {"number": "{content}"}}}
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"\Z",  # nothing before a turn belongs to it
    "fields": {
        "tool_calls": {
            "open": "<answer>",
            "close": "</answer>",
            "repeats": True,
            "content": "text",
            "transform": CALL,
        },
        "content": {"close_pattern": r"<\|endoftext\|>", "content": "text"},
    },
}
# Three answers, and the turn after the last of them, whose call is not run.
OVERRIDES = [
    f"environment.factory={__name__}.SumTool",
    f"environment.max_turns={NUM_TRIES + 1}",
    "data.as_chat=true",
]


class SumTool:
    """The reward of an episode is 1 for a right answer at the first try, 2/3 at the second, 1/3 at
    the third, and 0 without one. TRL uses an instance for many episodes."""

    def reset(self, prompt, answer, **columns) -> None:
        """answer: of the sum, a column of the data."""
        self.question, self.wanted = prompt[-1]["content"], answer
        self.num_tries, self.reward = 0, 0.0

    def answer(self, number: str) -> str:
        """Answer the sum; returns the question again.

        Args:
            number: The answer."""
        if number == self.wanted and not self.reward:
            self.reward = max(NUM_TRIES - self.num_tries, 0) / NUM_TRIES
        self.num_tries += 1
        return self.question

    def get_reward(self) -> float:
        """Return the reward of the episode so far."""
        return self.reward


def make_policy(source: str, folder: str) -> str:
    """Copy the policy in `source` into a new folder, with both templates."""
    os.mkdir(folder)
    for name in os.listdir(source):
        os.symlink(os.path.abspath(os.path.join(source, name)), os.path.join(folder, name))
    path = os.path.join(folder, "tokenizer_config.json")
    with open(path, encoding="utf-8") as file:
        settings = json.load(file)
    os.remove(path)  # the link
    settings |= {"chat_template": CHAT_TEMPLATE, "response_template": RESPONSE_TEMPLATE}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(settings, file)
    return folder
