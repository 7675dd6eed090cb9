"""Sample responses of a step: chosen, and described for samples.jsonl and TensorBoard."""

from collections import Counter

import numpy as np
from transformers import PreTrainedTokenizerBase

from bubblespec.errors import escape
from bubblespec.records import StepRecord
from bubblespec.samples import Samples
from bubblespec.types import is_sampled

NUM_SHOWN = 4  # of a step
REFERENCES = ("answer", "solution", "ground_truth", "reference")  # columns, as the field names them


def choose(samples: Samples, shown: Counter[int], count: int = NUM_SHOWN) -> list[int]:
    """Return samples of the least often shown prompts, each time a prompt's next sample.

    shown: how often each uid was shown; updated.
    """
    uids = [group.prompt.uid for group in samples.groups]
    groups = sorted(range(len(uids)), key=lambda number: (shown[uids[number]], number))[:count]
    chosen = []
    for number in groups:
        size = samples.num_generations
        chosen.append(number * size + shown[uids[number]] % size)
        shown[uids[number]] += 1
    return chosen


def describe(
    record: StepRecord, index: int, names: list[str], tokenizer: PreTrainedTokenizerBase
) -> dict:
    """Return a sample as a line of samples.jsonl. names: of the reward functions."""
    samples, number = record.samples, index % record.samples.num_generations
    group = samples.groups[index // samples.num_generations]
    rewards = zip(names, samples.rewards[index].tolist(), strict=True)
    return {
        "step": record.step + 1,
        "uid": group.prompt.uid,
        "visit": group.visit,
        "sample": number,
        "prompt": group.prompt.text,
        "completion": completion_of(samples, index, tokenizer),
        "num_tokens": len(samples.tokens[index]),
        "is_truncated": bool(samples.is_truncated[index]),
        "reward": float(record.rewards.ravel()[index]),
        "rewards": dict(rewards),
        "advantage": float(record.advantages[index]),
        "columns": group.prompt.columns,
    }


def as_text(sample: dict) -> str:
    """Return a described sample for TensorBoard, which keeps its lines and spaces."""
    numbers = {"reward": sample["reward"]} | sample["rewards"] | {"advantage": sample["advantage"]}
    head = ", ".join(f"{name} {value:.3f}" for name, value in numbers.items())
    prompt, completion = sample["prompt"], sample["completion"]
    text = f"{head}\n\nprompt: {prompt}\n\ncompletion:\n{completion}"
    text += "".join(f"\n\n{name}: {value}" for name, value in references(sample["columns"]))
    return "    " + escape(text).replace("\n", "\n    ")


def references(columns: dict) -> list[tuple[str, str]]:
    """Return names and texts of the columns with a prompt's right answer."""
    found = ((name, columns.get(name)) for name in REFERENCES)
    return [(name, str(value)) for name, value in found if value is not None]


def completion_of(samples: Samples, index: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sample's text, with an environment's tokens between ⟦ and ⟧."""
    tokens, sampled = samples.tokens[index], is_sampled(samples.full_logprob[index])
    turns = np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(sampled)) + 1)
    texts = [str(tokenizer.decode(tokens[turn].tolist())) for turn in turns]
    marked = zip(texts, turns, strict=True)
    return "".join(text if sampled[turn[0]] else f"⟦{text}⟧" for text, turn in marked)
