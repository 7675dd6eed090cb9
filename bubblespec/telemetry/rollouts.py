"""All rollouts of a run (run.save_rollouts): one Parquet file per step in output_dir/rollouts."""

import json
import os
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from bubblespec.errors import InputError, escape, log
from bubblespec.records import StepRecord
from bubblespec.telemetry.lines import keep_aside
from bubblespec.telemetry.samples import completion_of

FILE_NAME = re.compile(r"\.?step-(\d+)\.parquet")  # with a dot while it is written


class Rollouts:
    """Writer of one run's rollouts on rank 0, which has the samples of all ranks.

    num_updates: files of later steps and unfinished ones are removed; with 0, the folder of an
    earlier run is kept under another name. Raises InputError if the folder cannot be written."""

    def __init__(self, output_dir: str, num_updates: int):
        self.folder = os.path.join(output_dir, "rollouts")
        try:
            if num_updates == 0:
                keep_aside(self.folder)
            os.makedirs(self.folder, exist_ok=True)
            for name in os.listdir(self.folder):
                match = FILE_NAME.fullmatch(name)
                if match and (name.startswith(".") or int(match[1]) > num_updates):
                    os.remove(os.path.join(self.folder, name))
        except OSError as error:
            reason = f"cannot write to {self.folder}: {error.strerror}"
            raise InputError(f"run.save_rollouts: {reason}") from error

    def write(
        self, record: StepRecord, names: list[str], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Write the samples of a step; a failure is a warning. names: of the reward functions."""
        import pyarrow.parquet  # here, as it takes a tenth of a second

        step = record.step + 1
        name = f"step-{step:05d}.parquet"
        temporary = os.path.join(self.folder, f".{name}")
        try:
            table = pyarrow.table(columns_of(record, names, tokenizer))
            pyarrow.parquet.write_table(table, temporary, compression="zstd")
            os.replace(temporary, os.path.join(self.folder, name))
        except OSError as error:
            reason = error.strerror or error
            log(f"warning: the rollouts of step {step} could not be written: {reason}")


def columns_of(
    record: StepRecord, names: list[str], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return the columns of a step's samples in canonical order, as arrow arrays.

    Groups that dynamic sampling replaced, or that lack a reward, have no advantage. Chat prompts
    and the data's columns are JSON."""
    import pyarrow

    samples, ids = record.generated, record.generated.ids
    advantages = dict(zip(record.samples.ids, record.advantages.tolist(), strict=True))
    prompts = [samples.prompt_of(i) for i in range(len(samples))]
    texts = [p.text if isinstance(p.text, str) else json.dumps(p.text) for p in prompts]
    lists = pyarrow.list_(pyarrow.int32())
    columns = {
        "step": pyarrow.array([record.step + 1] * len(samples)),
        **{
            field: pyarrow.array([getattr(name, field) for name in ids]) for field in ids[0]._fields
        },
        "prompt": pyarrow.array(texts),
        "prompt_tokens": pyarrow.array([list(p.token_ids) for p in prompts], lists),
        "tokens": pyarrow.array([tokens.tolist() for tokens in samples.tokens], lists),
        "text": pyarrow.array([completion_of(samples, i, tokenizer) for i in range(len(samples))]),
        "is_truncated": pyarrow.array(samples.is_truncated),
        "reward": pyarrow.array(record.all_rewards.ravel(), from_pandas=True),  # NaN is null
    }
    for name, values in zip(names, samples.rewards.T, strict=True):
        columns[f"rewards/{name}"] = pyarrow.array(values, from_pandas=True)
    columns["advantage"] = pyarrow.array([advantages.get(i) for i in ids], pyarrow.float64())
    data = [json.dumps(p.columns, default=str, ensure_ascii=False) for p in prompts]
    return columns | {"columns": pyarrow.array(list(map(escape, data)))}
