"""Tokenizers with the chat templates of several families, and environments, good and bad.

Workers import this module for the environments, so it imports nothing heavy at the top.
"""

import asyncio
import json
import os
import random
import signal
import time

from bubblespec.config import EnvironmentConfig
from bubblespec.types import Prompt

HERE = __name__
TEXT = (
    "The quick brown fox asks 12 questions of an island. What is 3 + 4? The answer is 7. What land "
    'is this? {"name": "add", "arguments": {"a": 1, "b": 2}} error: nothing was found. What what '
)
CHATML = """{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson }}
{{- '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Changes the last turn when messages follow it, as the templates of reasoning models do.
FORGETFUL = CHATML.replace(
    "message.content }}", "('' if loop.last else '<done>') ~ message.content }}"
)
# Reads contents alone.
NO_TOOLS = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
]
# Their template and response template in TRL, if they come from there, and their stop token.
FAMILIES = {
    "chatml": (None, None, "<|im_end|>"),
    "qwen2.5": ("qwen2_5_training_chat_template", None, "<|im_end|>"),
    "qwen3": ("qwen3_training_chat_template", "qwen3_template", "<|im_end|>"),
    "llama3.1": ("llama3_1_chat_template", "llama3_template", "<|eot_id|>"),
    "glm4": ("glm4moe_training_chat_template", "glm4moe_template", "<|observation|>"),
}


def make_tokenizer(family: str = "chatml", template: str | None = None):
    """A byte-level BPE of about 400 tokens with the templates of a family."""
    import tokenizers
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [TEXT] * 20, BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    chat, response, stop = FAMILIES[family]
    eos = "<|endoftext|>" if family == "glm4" else stop  # that of GLM stands in no conversation
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos, bos_token=SPECIAL[3])
    tokenizer.chat_template = template or CHATML
    if chat is not None:
        from trl import chat_template_utils

        tokenizer.chat_template = getattr(chat_template_utils, chat)
        tokenizer.response_template = response and getattr(chat_template_utils, response)
    return tokenizer


def call_text(family: str, name: str, **arguments) -> str:
    """A turn with one tool call, as the models of a family write it, with its stop token."""
    if family == "llama3.1":
        call = json.dumps({"name": name, "parameters": arguments})
    elif family == "glm4":
        items = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in arguments.items()
        )
        call = f"\n<think></think>\n<tool_call>{name}\n{''.join(items)}</tool_call>"
    else:
        body = json.dumps({"name": name, "arguments": arguments})
        call = f"<tool_call>\n{body}\n</tool_call>"
    return call + FAMILIES[family][2]


def make_config(factory: str | None = None, **options) -> EnvironmentConfig:
    """Configure a class of this module, in process unless an option says otherwise."""
    path = factory and f"{HERE}.{factory}"
    defaults = {"num_workers": 0, "max_observation_length": 512}
    return EnvironmentConfig(factory=path, **{**defaults, **options})


def make_prompt(text="What is", base=(), **columns) -> Prompt:
    if not isinstance(text, str) or columns.pop("is_chat", True):
        text = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return Prompt(1, text, tuple(base), columns)


def play(factory, tokenizer, prompt: Prompt, texts: list[str], seed=0, **options):
    """Play an episode in process: the observations of the beginning and of each turn, and the
    outcome. factory: of this module, or a dotted path."""
    from bubblespec.mechanisms.episodes.environments import Environments
    from bubblespec.mechanisms.episodes.tokens import base_ids

    config = make_config(factory, **options)
    if factory and "." in factory:
        config.factory = factory
    environments = Environments(config, tokenizer)
    adds_text, schemas = environments.form.adds_text, environments.schemas
    prompt.token_ids = base_ids(tokenizer, prompt.text, schemas, adds_text)
    environments.begin("a", prompt, seed)
    observations = [observation for _, observation in environments.poll()]
    for text in texts:
        environments.act("a", tokenizer(text, add_special_tokens=False)["input_ids"])
        observations += [observation for _, observation in environments.poll()]
    return observations, environments.end("a", with_environment=True).result()


class UsesUp:
    """Takes everything out of the column `words`."""

    def reset(self, words: list, prompt: list, **columns) -> str:
        text = " ".join(map(str, (len(prompt), *words)))
        words.clear()
        prompt.clear()
        return text

    def look(self) -> str:
        """Look around."""
        return "nothing"


class Calculator:
    """An environment for TRL."""

    def __init__(self):
        self.results = []

    def reset(self, **columns) -> str | None:
        self.start = columns.get("start", 0)
        return columns.get("added")

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        self.results.append(self.start + a + b)
        return self.results[-1]

    async def later(self, text: str) -> str:
        """Repeat a text, a little later.

        Args:
            text: The text.
        """
        await asyncio.sleep(0)
        return text

    def numbers(self, upto: int) -> list:
        """Count.

        Args:
            upto: Where to stop.
        """
        return list(range(upto))

    def fail(self) -> str:
        """Do what cannot be done."""
        raise RuntimeError("it cannot be done")

    def get_reward(self) -> float:
        return float(sum(self.results))


class Unruly(Calculator):
    """Does what harms its process."""

    def reset(self, seed: int, kind: str = "", **columns) -> str | None:
        super().reset(**columns)
        self.random = random.Random(seed) if kind == "seeded" else random.SystemRandom()
        if kind == "raises":
            raise ValueError("no such game")
        return None

    def draw(self) -> int:
        """Draw a number."""
        self.results.append(self.random.randrange(1 << 30))
        return self.results[-1]

    def hang(self, path: str) -> str:
        """Wait for ever, in two processes whose numbers are noted.

        Args:
            path: Where.
        """
        self.results.append(1000)  # is undone, as the process is replaced
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.fork()
        with open(path, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(3600)

    def die(self, marker: str) -> str:
        """End the process; only once, if a marker is given.

        Args:
            marker: A file that is made, or empty.
        """
        if not os.path.exists(marker or "/nowhere"):
            if marker:
                open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return "survived"

    def flood(self, size: int) -> str:
        """Say much.

        Args:
            size: How much.
        """
        return "a " * size

    def process(self) -> int:
        """The number of the process."""
        return os.getpid()


class Guess:
    """A text environment: guess a number; halves of the reward for trying."""

    def __init__(self, env_config, extras):
        self.number, self.is_closed = extras["number"], False

    def init(self, prompt):
        return prompt, {}

    def step(self, action: str) -> dict:
        if action == "break":
            raise RuntimeError("broken")
        if int(action) == self.number:
            return {"observations": [], "reward": 1.0, "done": True}
        hint = "more" if int(action) < self.number else "less"
        said = [{"role": "user", "content": hint}]
        return {"observations": said, "reward": 0.25, "done": False, "metadata": {}}

    def close(self):
        self.is_closed = True


class WordGame(Guess):
    """The smallest text environment."""

    def __init__(self):
        self.number = 3

    def init(self, prompt, seed):
        self.number = seed
        return None


class Silent:
    def reset(self, **columns) -> None:
        """Adds nothing to prompts."""


class Untyped(Silent):
    def add(self, a, b):
        """Add.

        Args:
            a: The first.
            b: The second.
        """


class Undocumented(Silent):
    def add(self, a: int) -> int: ...


class Formless:
    def play(self) -> str: ...


class Picky:
    def reset(self, question: str) -> None: ...


def search(query: str) -> str:
    """Search.

    Args:
        query: What for.
    """
    return f"nothing about {query}"
