"""Where a run's numbers and samples go on rank 0: JSON lines, TensorBoard, Parquet files, a hook.

A resumed run continues the files. A full disk does not end a run: lines wait in memory until they
can be written. TensorBoard's curves then have a gap."""

import atexit
import contextlib
import importlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from bubblespec.config import Config, flatten
from bubblespec.config.imports import call, without_input
from bubblespec.errors import InputError, escape, is_interrupt, log, one_line
from bubblespec.folders import keep_aside
from bubblespec.metrics import OWN_GROUPS, WATCHED
from bubblespec.records import Samples, StepRecord
from bubblespec.types import completion_mask

NUM_SAMPLES = 4  # prompts of a step, one response each
PACKAGES = ("wandb", "trackio")  # of run.log_to; they have the same functions
OWN_GROUP = "z_bubblespec"  # TensorBoard sorts groups by name: after reward, train and all others
STEP_FILE = re.compile(r"\.?[a-z]+-(\d{5,})\.parquet")  # with a dot while it is written


@contextlib.contextmanager
def must_write(option: str, path: str) -> Iterator[None]:
    """Raise InputError if the context cannot write to `path`. option: the key in its message."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{option}: cannot write to {path}: {error.strerror}") from error


# Names of a `SampleId` in files, which keep them.
ID_KEYS = ("uid", "visit", "sample")


class JsonLines:
    """A file with one JSON object per line, of one run on rank 0.

    With `num_updates` > 0 it is continued: lines of later steps are cut off, others are
    `records`. With 0 an existing file is kept under another name. Raises InputError if it
    cannot be written."""

    def __init__(self, path: str, num_updates: int):
        self.name = os.path.basename(path)
        with must_write("run.output_dir", path):
            if num_updates == 0:
                keep_aside(path)
            self.records = _cut(path, num_updates)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (kept open for the run)
        self._size = self._file.tell()  # bytes of whole lines
        self._waiting: list[str] = []  # lines that could not be written yet

    def write(self, record: dict[str, Any]) -> bool:
        """Append a line after the waiting ones. Return whether all of them are in the file."""
        self._waiting.append(json_line(record))
        return self._flush()

    def close(self) -> None:
        self._flush()
        self._file.close()
        if self._waiting:
            log(f"warning: {len(self._waiting)} lines of {self.name} are lost")

    def _flush(self) -> bool:
        data = "".join(self._waiting).encode()
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)  # no partial line stays
            if len(self._waiting) == 1:
                reason = f"{self.name} cannot be written ({error.strerror})"
                log(f"warning: {reason}; its lines wait in memory")
            return False
        self._size = self._file.tell()
        self._waiting = []
        return True


def json_line(record: dict[str, Any]) -> str:
    """Write a record as a line of JSON; what JSON lacks is null or text."""
    return json.dumps(_plain(record), allow_nan=False, default=str) + "\n"


def _plain(value: Any) -> Any:
    """Return a value of JSON's types: NaN and infinity become null, arrays lists."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(entry) for entry in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut(path: str, num_updates: int) -> list[dict]:
    """Drop the lines after the last checkpoint, whose steps are repeated. Return the other ones."""
    records = []
    missing = contextlib.suppress(FileNotFoundError)
    with missing, open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(json.JSONDecodeError):  # torn by a kill
                if (record := json.loads(line))["step"] <= num_updates:
                    records.append(record)
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    os.replace(path + ".tmp", path)
    return records


class StepFiles:
    """A folder with Parquet files of each step, of one run on rank 0.

    Unfinished files and those of steps after `num_updates` are removed; with `keeps_earlier` and 0
    updates, the whole folder is kept under another name. Raises InputError, see `must_write`."""

    def __init__(self, folder: str, num_updates: int, option: str, keeps_earlier: bool = False):
        self.folder = folder
        with must_write(option, folder):
            if keeps_earlier and num_updates == 0:
                keep_aside(folder)
            os.makedirs(folder, exist_ok=True)
            self.remove_from(num_updates + 1)

    def write(self, kind: str, step: int, columns: dict[str, Any]) -> None:
        """Write a table of a step (from 1), which is complete once it has its name."""
        import pyarrow.parquet  # here, as it takes a tenth of a second

        name = f"{kind}-{step:05d}.parquet"
        temporary = os.path.join(self.folder, f".{name}")  # readers skip names with a dot
        pyarrow.parquet.write_table(pyarrow.table(columns), temporary, compression="zstd")
        os.replace(temporary, os.path.join(self.folder, name))

    def remove_from(self, first_step: int) -> None:
        for name in sorted(os.listdir(self.folder), reverse=True):  # responses before forwards
            match = STEP_FILE.fullmatch(name)
            if match and (int(match[1]) >= first_step or name.startswith(".")):
                os.remove(os.path.join(self.folder, name))


def completion_of(samples: Samples, index: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sample's text, with an environment's tokens between ⟦ and ⟧."""
    tokens, sampled = samples.tokens[index], completion_mask(samples.logprob[index])
    turns = np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(sampled)) + 1)
    texts = [str(tokenizer.decode(tokens[turn].tolist())) for turn in turns]
    marked = zip(texts, turns, strict=True)
    return "".join(text if sampled[turn[0]] else f"⟦{text}⟧" for text, turn in marked)


def describe(
    record: StepRecord, index: int, names: list[str], tokenizer: PreTrainedTokenizerBase
) -> dict:
    """Return a sample as a line of samples.jsonl. names: of the reward functions."""
    samples = record.samples
    described = describe_sample(samples, index, names, tokenizer)
    described["columns"] |= record.logged.get(samples.ids[index], {})
    numbers = {"reward": record.rewards.ravel()[index], "advantage": record.advantages[index]}
    return {"step": record.step + 1, **described, **numbers}


def describe_sample(
    samples: Samples, index: int, names: list[str], tokenizer: PreTrainedTokenizerBase
) -> dict:
    """Return what is known of one of these samples. names: of the reward functions."""
    prompt = samples.prompt_of(index)
    return {
        **dict(zip(ID_KEYS, samples.ids[index], strict=True)),
        "prompt": prompt.text,
        "completion": completion_of(samples, index, tokenizer),
        "num_tokens": len(samples.tokens[index]),
        "is_truncated": bool(samples.is_truncated[index]),
        "rewards": dict(zip(names, samples.rewards[index].tolist(), strict=True)),
        "columns": dict(prompt.columns),
    }


def token_columns(record: StepRecord) -> dict[str, Any]:
    """Return the columns with id and tokens of all samples of a step, in canonical order."""
    samples, ids = record.generated, record.generated.ids
    prompts = [samples.prompt_of(i).token_ids for i in range(len(samples))]
    return {
        "step": [record.step + 1] * len(samples),
        **{key: [name[i] for name in ids] for i, key in enumerate(ID_KEYS)},
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


def import_logger(package: str) -> Any:
    """Import a package of run.log_to. Raises InputError."""
    try:
        module = importlib.import_module(package)
        if not hasattr(module, "init"):  # as a folder of earlier runs
            raise ImportError(f"{next(iter(module.__path__), package)} is another thing")
        return module
    except ImportError as error:
        problem = f"{package} cannot be imported ({error}); pip install {package}"
        raise InputError(f"run.log_to: {problem}") from error


def begin_logging(module: Any, config: Config) -> Callable[[dict[str, Any]], None]:
    """Begin a run of a package, named after run.output_dir; return its log. Raises InputError."""
    package = config.run.log_to or ""
    project = os.environ.get(f"{package.upper()}_PROJECT", "bubblespec")
    name = os.path.basename(os.path.abspath(config.run.output_dir))
    try:
        with without_input():
            run = module.init(project=project, name=name, config=flatten(config), resume="allow")
    except BaseException as error:  # for want of an account or a network
        if is_interrupt(error):
            raise
        offline = "; WANDB_MODE=offline needs neither key nor network" * (package == "wandb")
        problem = f"{package} cannot begin a run: {one_line(error)}{offline}"
        raise InputError(f"run.log_to: {problem}") from error
    atexit.register(module.finish)
    return lambda metrics: run.log(metrics, step=metrics["step"])


def tags_of(key: str) -> list[str]:
    """Return the curves of a metric: without a group in `train`, as in TRL; our own in one group.

    A metric to watch first is also in a group of these, which TensorBoard opens; others are folded.
    """
    tag = key if "/" in key else f"train/{key}"
    if key.startswith(OWN_GROUPS) or "/rank_" in key:
        tag = f"{OWN_GROUP}/{key}"
    return [tag, f"{WATCHED[key]}/{key}"] if key in WATCHED else [tag]


class TensorBoard:
    """The curves of one run on rank 0. A full disk leaves a gap in them."""

    def __init__(self, output_dir: str, purge_step: int):
        """purge_step: curves from here on, of an earlier run, are hidden."""
        self._folder = os.path.join(output_dir, "tensorboard")
        self._writer: Any = None
        self._purge_step: int | None = purge_step
        self._has_failed = False

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Draw one point of each curve. An error is a warning, once."""
        try:
            if self._writer is None:
                self._writer = self._open()
            for key, value in metrics.items():
                if isinstance(value, int | float | np.generic):
                    for tag in tags_of(key):
                        self._writer.add_scalar(tag, value, step)
            self._writer.flush()
        except OSError as error:
            if not self._has_failed:
                reason = f"TensorBoard's files cannot be written ({error.strerror})"
                log(f"warning: {reason}; its curves will have a gap")
            self._writer, self._has_failed = None, True

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(self._folder, purge_step=self._purge_step)
        self._purge_step = None
        return writer


class MetricsLogger:
    """Writes the files of a run.

    `num_updates` > 0 resumes it: lines of later steps are cut off. With 0, existing files are kept
    under other names. Steps count from 1, and an evaluation is that of the step before it.
    log_to: the user's hook, see `run.log_to`."""

    def __init__(
        self, output_dir: str, num_updates: int, log_to: Callable[[dict], object] | None = None
    ):
        paths = (os.path.join(output_dir, name) for name in ("metrics.jsonl", "samples.jsonl"))
        self._lines, self._samples = (JsonLines(path, num_updates) for path in paths)
        self._tensorboard = TensorBoard(output_dir, num_updates + 1 if num_updates else 0)
        self._log_to, self._has_warned = log_to, False
        evaluations = (r for r in self._lines.records if any(k.startswith("eval/") for k in r))
        self._evaluated = {record["step"] for record in evaluations}

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Write a step: a line of metrics.jsonl, a point of each curve, and a call of the hook."""
        record = {"step": step, **metrics}
        if self._lines.write(record):
            self._tensorboard.write(step, metrics)
        if self._log_to is None:
            return
        try:
            with without_input():
                call(self._log_to, record)
        except BaseException as error:  # the user's own code, which may need a network
            if is_interrupt(error):
                raise
            if not self._has_warned:
                problem = f"run.log_to failed in step {step}: {one_line(error)}"
                log(f"warning: {problem}; the run continues")
            self._has_warned = True

    def log_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        """Write an evaluation after `step` updates; a run that repeats one has its line already."""
        if step not in self._evaluated:
            self.log(step, metrics)

    def log_samples(
        self, record: StepRecord, names: list[str], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Write the first responses to a few prompts. names: of the reward functions."""
        firsts = range(0, len(record.samples), record.samples.num_generations)
        for index in firsts[:NUM_SAMPLES]:
            self._samples.write(describe(record, index, names, tokenizer))

    def close(self) -> None:
        for file in (self._lines, self._samples, self._tensorboard):
            file.close()
