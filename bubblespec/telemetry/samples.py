"""The samples of a step as they are written: a few in samples.jsonl, or all of them as Parquet."""

import json
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from bubblespec.errors import escape, log
from bubblespec.records import StepRecord
from bubblespec.samples import Samples
from bubblespec.telemetry.files import StepFiles
from bubblespec.types import SampleId, is_sampled


def completion_of(samples: Samples, index: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sample's text, with an environment's tokens between ⟦ and ⟧."""
    tokens, sampled = samples.tokens[index], is_sampled(samples.full_logprob[index])
    turns = np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(sampled)) + 1)
    texts = [str(tokenizer.decode(tokens[turn].tolist())) for turn in turns]
    marked = zip(texts, turns, strict=True)
    return "".join(text if sampled[turn[0]] else f"⟦{text}⟧" for text, turn in marked)


def describe(
    record: StepRecord, index: int, names: list[str], tokenizer: PreTrainedTokenizerBase
) -> dict:
    """Return a sample as a line of samples.jsonl. names: of the reward functions."""
    samples, prompt = record.samples, record.samples.prompt_of(index)
    return {
        "step": record.step + 1,
        **samples.ids[index]._asdict(),
        "prompt": prompt.text,
        "completion": completion_of(samples, index, tokenizer),
        "num_tokens": len(samples.tokens[index]),
        "is_truncated": bool(samples.is_truncated[index]),
        "reward": float(record.rewards.ravel()[index]),
        "rewards": dict(zip(names, samples.rewards[index].tolist(), strict=True)),
        "advantage": float(record.advantages[index]),
        "columns": prompt.columns | record.logged.get(samples.ids[index], {}),
    }


def token_columns(record: StepRecord) -> dict[str, Any]:
    """Return the columns with id and tokens of all samples of a step, in canonical order."""
    samples, ids = record.generated, record.generated.ids
    prompts = [samples.prompt_of(i).token_ids for i in range(len(samples))]
    return {
        "step": [record.step + 1] * len(samples),
        **{field: [getattr(name, field) for name in ids] for field in SampleId._fields},
        "prompt_tokens": [np.array(tokens, np.int32) for tokens in prompts],
        "tokens": [tokens.astype(np.int32) for tokens in samples.tokens],
    }


def save_rollouts(
    files: StepFiles, record: StepRecord, names: list[str], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write all samples of a step (run.save_rollouts); a failure is a warning.

    Groups that dynamic sampling replaced, or that lack a reward, have no advantage. Chat prompts
    and the data's columns are JSON. names: of the reward functions."""
    import pyarrow

    def numbers(values) -> Any:
        return pyarrow.array(values, pyarrow.float64(), from_pandas=True)  # NaN is null

    samples, step = record.generated, record.step + 1
    advantages = dict(zip(record.samples.ids, record.advantages.tolist(), strict=True))
    prompts = [samples.prompt_of(i) for i in range(len(samples))]
    data = [
        json.dumps(p.columns | record.logged.get(name, {}), default=str, ensure_ascii=False)
        for p, name in zip(prompts, samples.ids, strict=True)
    ]
    columns = token_columns(record) | {
        "prompt": [p.text if isinstance(p.text, str) else json.dumps(p.text) for p in prompts],
        "text": [completion_of(samples, i, tokenizer) for i in range(len(samples))],
        "is_truncated": samples.is_truncated,
        "reward": numbers(record.all_rewards.ravel()),
        "advantage": numbers([advantages.get(name) for name in samples.ids]),
        "columns": list(map(escape, data)),
    }
    for name, values in zip(names, samples.rewards.T, strict=True):
        columns[f"rewards/{name}"] = numbers(values)
    try:
        files.write("step", step, columns)
    except OSError as error:
        log(f"warning: the rollouts of step {step} could not be written: {error.strerror or error}")
