"""A run recorded for replay (`trace.enabled`): its responses, the drafts they had, and every
forward with its load and time.

output_dir/trace holds meta.json and three Parquet files a step. The steps file is written last: a
step counts if it has one. All files are written aside and renamed, and a continued run writes the
steps anew that come after its checkpoint. At MOST_BYTES recording stops, and the run goes on.

responses-00012.parquet: a row for each response of the step, replaced groups of dynamic sampling
included, in canonical order

| column | type | meaning |
|---|---|---|
| step, batch | int32, int16 | batch counts the step's rollouts (above 0 with dynamic sampling only) |
| uid, visit, sample | int64, int32, int16 | the name of the sample, see `SampleId` |
| owner | int16 | the rank that generated it |
| prompt_tokens, tokens | list of int32 | the response's with its stop token |
| stopped | bool | it has ended by itself, not at the length limit |
| reward | float64 | combined, with the overlong penalty |
| draft_tokens | list of int32 | its draft as it stood when its step began; null if it had none |
| draft_finished | bool | the draft ends as a response does |
| draft_version | int32 | updates before the draft was last extended; -1 if there is none |

forwards-00012.parquet: a row for each forward, by rank, batch and time: step (int32), rank, batch
(int16), and the fields of `ForwardRecord` (times float64 in seconds since that rank began that
batch's rollout, positions int64, other counts int32)

steps-00012.parquet: a row for each rank; times are float64, in seconds

| column | type | meaning |
|---|---|---|
| step, rank, digest | int32, int16, string | digest: that of metrics.jsonl |
| own_s, wait_s, total_s | | see `RolloutRecord`; over all batches of the step, as is everything here |
| own_forwards, drafted_tokens | int32, int64 | forwards while own rows were left; tokens drafted ahead |
| gen_s, meet_s | | stages of the step: rollout with its planning; waiting for all ranks at its end |
| reward_s, train_s | | further stages: rewards, gathering and exchange; updates |
| exchange_s, step_s | | moving drafts (within reward_s); the whole step, the sum of its stages |

meta.json: format, config (flat), world_size, hardware and versions of the newest start.
"""

import contextlib
import json
import os
import platform
import re
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bubblespec.config import Config, flatten
from bubblespec.dist.ranks import Ranks
from bubblespec.errors import InputError, log
from bubblespec.records import ForwardRecord, RolloutRecord, StepRecord, total_s
from bubblespec.types import SampleId, digest

if TYPE_CHECKING:  # a tenth of a second that only a recorded run pays
    import pyarrow

FORMAT = 2
READABLE = (1, 2)  # 1 has no column "visit"
FOLDER = "trace"
META_FILE = "meta.json"
MOST_BYTES = 4 << 30  # of files
COLUMNS = {
    "responses": {
        "step": "int32",
        "batch": "int16",
        "uid": "int64",
        "visit": "int32",
        "sample": "int16",
        "owner": "int16",
        "prompt_tokens": "list",
        "tokens": "list",
        "stopped": "bool",
        "reward": "float64",
        "draft_tokens": "list",
        "draft_finished": "bool",
        "draft_version": "int32",
    },
    "forwards": {"step": "int32", "rank": "int16", "batch": "int16"}
    | {
        name: "float64" if name.endswith("_s") else "int64" if name == "positions" else "int32"
        for name in ForwardRecord._fields
    },
    "steps": {"step": "int32", "rank": "int16", "digest": "string"}
    | dict.fromkeys(("own_s", "wait_s", "total_s"), "float64")
    | {"own_forwards": "int32", "drafted_tokens": "int64"}
    | dict.fromkeys(("gen_s", "meet_s", "reward_s", "train_s", "exchange_s", "step_s"), "float64"),
}


_SUMMED = ("own_s", "wait_s", "total_s", "own_forwards", "drafted_tokens")  # over a step's rollouts


class Recorder:
    """Writes the trace of a run. Made by all ranks together; only rank 0 writes."""

    def __init__(self, config: Config, ranks: Ranks, first_step: int):
        """first_step: steps from here on, left by an earlier start, are removed. Raises
        InputError."""
        self.ranks = ranks
        self.folder = os.path.join(config.run.output_dir, FOLDER)
        self.num_bytes = 0  # on disk; rank 0 knows
        self.is_on = True  # the same on all ranks
        if ranks.is_main:
            try:
                os.makedirs(self.folder, exist_ok=True)
                self._remove_from(first_step)
                meta = {
                    "format": FORMAT,
                    "world_size": ranks.world_size,
                    "hardware": describe_hardware(ranks.device),
                    "versions": describe_versions(),
                    "config": flatten(config),
                }
                with (
                    _replaced(os.path.join(self.folder, META_FILE)) as path,
                    open(path, "w", encoding="utf-8") as file,
                ):
                    json.dump(meta, file, indent=1)
                self.num_bytes = sum(entry.stat().st_size for entry in os.scandir(self.folder))
            except OSError as error:
                raise InputError(
                    f"trace.enabled: cannot write to {self.folder}: {error.strerror}"
                ) from error
        self._stop_if_full(first_step)

    def write(self, record: StepRecord) -> None:
        """The step is over: gather all ranks' forwards and write it. All ranks go on together, so
        that nobody counts the writing as waiting for rank 0."""
        if not self.is_on:
            return
        step, rollouts = record.step, record.rollouts
        self.ranks.place = f"recording of step {step}"
        numbers = [sum(getattr(rollout, name) for rollout in rollouts) for name in _SUMMED]
        numbers += [total_s(record.stages, kind) for kind in ("gen", "wait", "reward", "train")]
        numbers += [total_s(record.spans, "exchange"), record.seconds]
        by_rank = self.ranks.gather(np.array(numbers, np.float64))
        numbers_by_batch = [
            _forward_numbers(batch, rollout) for batch, rollout in enumerate(rollouts)
        ]
        forwards = self.ranks.gather_ragged(np.concatenate(numbers_by_batch).ravel())
        if self.ranks.is_main:
            tables = {
                "responses": _response_columns(record),
                "forwards": _forward_columns(step, forwards),
                "steps": _step_columns(step, digest(record.generated), by_rank),
            }
            try:
                for kind, columns in tables.items():
                    self.num_bytes += _write_table(self.folder, kind, step, columns)
            except OSError as error:
                self.is_on = False
                reason = error.strerror or error
                log(
                    f"warning: {self.folder}: {reason}; recording stops before step {step}, and the run goes on"
                )
        self._stop_if_full(step + 1)

    def _stop_if_full(self, next_step: int) -> None:
        """Rank 0 says whether recording goes on."""
        if self.is_on and self.num_bytes > MOST_BYTES:
            self.is_on = False
            size = f"{self.num_bytes / 1e9:.2f} GB"
            log(
                f"warning: {self.folder} has {size}, the most; recording stops before step {next_step}, and the run goes on"
            )
        self.is_on = bool(self.ranks.gather(np.array([self.is_on], np.uint8))[0, 0])

    def _remove_from(self, first_step: int) -> None:
        for name in os.listdir(self.folder):
            match = re.fullmatch(r"(?:responses|forwards|steps)-(\d{5,})\.parquet(\.tmp)?", name)
            if match and (int(match[1]) >= first_step or match[2]):
                os.remove(os.path.join(self.folder, name))


def describe_hardware(device: torch.device) -> dict[str, Any]:
    """What times depend on: processor, GPU (None on a CPU), cores, and threads of this process."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        processor = names[0] if names else processor
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "cpu": processor,
        "gpu": gpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def describe_versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: version(name) for name in ("torch", "transformers", "numpy")
    }


def read_meta(folder: str) -> dict[str, Any]:
    """meta.json of a trace. Raises InputError."""
    path = os.path.join(folder, META_FILE)
    try:
        with open(path, encoding="utf-8") as file:
            meta = json.load(file)
    except OSError as error:
        raise InputError(f"{folder} is not a trace: {META_FILE}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") not in READABLE:
        raise InputError(f'{path}: not a trace of this version (it has no "format": {FORMAT})')
    return meta


def list_steps(folder: str) -> list[int]:
    """The steps that a trace holds whole, in order. Raises InputError if there is none."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise InputError(f"{folder} is not a trace: {error.strerror}") from error
    steps = sorted(
        int(match[1]) for name in names if (match := re.fullmatch(r"steps-(\d{5,})\.parquet", name))
    )
    if not steps:
        raise InputError(f"{folder}: no step is recorded there")
    return steps


def read_table(folder: str, kind: str, steps: list[int] | None = None) -> "pyarrow.Table":
    """All rows of a kind (responses, forwards, steps), of all steps or of some. Raises
    InputError."""
    import pyarrow
    import pyarrow.parquet

    tables = []
    for step in list_steps(folder) if steps is None else steps:
        path = _path(folder, kind, step)
        try:
            tables.append(pyarrow.parquet.read_table(path, partitioning=None))
        except (OSError, pyarrow.ArrowException) as error:
            raise InputError(
                f"{path}: cannot be read: {' '.join(str(error).split())[:200]}"
            ) from error
        if tables[-1].column_names not in (
            list(COLUMNS[kind]),
            [name for name in COLUMNS[kind] if name != "visit"],
        ):
            raise InputError(f"{path}: its columns are not those of a trace")
    return pyarrow.concat_tables(tables)


def _path(folder: str, kind: str, step: int) -> str:
    return os.path.join(folder, f"{kind}-{step:05d}.parquet")


@contextlib.contextmanager
def _replaced(path: str):
    """A temporary name to write to, which becomes `path` once it is written; an error leaves
    nothing."""
    temporary = path + ".tmp"
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise


def _write_table(folder: str, kind: str, step: int, columns: dict[str, Any]) -> int:
    """Returns the file's bytes."""
    import pyarrow  # a tenth of a second that only a recorded run pays
    import pyarrow.parquet

    types = {
        name: pyarrow.list_(pyarrow.int32()) if t == "list" else t
        for name, t in COLUMNS[kind].items()
    }
    table = pyarrow.table(
        [pyarrow.array(columns[name], t) for name, t in types.items()], names=list(types)
    )
    with _replaced(_path(folder, kind, step)) as path:
        pyarrow.parquet.write_table(table, path, compression="zstd")
        return os.path.getsize(path)


def _response_columns(record: StepRecord) -> dict[str, Any]:
    samples, n = record.generated, record.generated.num_generations
    prompts = [samples.prompt_of(i) for i in range(len(samples))]
    names = samples.ids
    drafts = [record.drafts.get(name) for name in names]
    return {
        "step": [record.step] * len(samples),
        "batch": np.repeat(np.repeat(np.arange(len(record.batch_sizes)), record.batch_sizes), n),
        **{field: [getattr(name, field) for name in names] for field in SampleId._fields},
        "owner": record.owners,
        "prompt_tokens": [np.array(prompt.token_ids, np.int32) for prompt in prompts],
        "tokens": [tokens.astype(np.int32) for tokens in samples.tokens],
        "stopped": ~samples.is_truncated,
        "reward": record.all_rewards.ravel(),
        "draft_tokens": [None if draft is None else draft.tokens for draft in drafts],
        "draft_finished": [draft is not None and draft.is_finished for draft in drafts],
        "draft_version": [-1 if draft is None else draft.version for draft in drafts],
    }


def _forward_numbers(batch: int, rollout: RolloutRecord) -> np.ndarray:
    """All forwards, float64 [forwards, 1 + fields of ForwardRecord], times since the rollout began.
    Counts are exact in it."""
    numbers = np.array(rollout.forwards, np.float64).reshape(-1, len(ForwardRecord._fields))
    numbers[:, :2] -= rollout.began_s
    return np.insert(numbers, 0, batch, axis=1)


def _forward_columns(step: int, by_rank: list[np.ndarray]) -> dict[str, Any]:
    """by_rank: see `_forward_numbers`, flat, of each rank."""
    fields = ForwardRecord._fields
    tables = [numbers.reshape(-1, 1 + len(fields)) for numbers in by_rank]
    numbers = np.concatenate(tables)
    ranks = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    columns = {name: numbers[:, 1 + i] for i, name in enumerate(fields)}
    whole = {
        name: column if name.endswith("_s") else column.astype(np.int64)
        for name, column in columns.items()
    }
    return {
        "step": [step] * len(numbers),
        "rank": ranks,
        "batch": numbers[:, 0].astype(np.int64),
        **whole,
    }


def _step_columns(step: int, digest: str, by_rank: np.ndarray) -> dict[str, Any]:
    """by_rank: float64 [ranks, numbers of a rank in the order of COLUMNS]."""
    numbers = dict(zip(list(COLUMNS["steps"])[3:], by_rank.T, strict=True))
    for name in ("own_forwards", "drafted_tokens"):
        numbers[name] = numbers[name].astype(np.int64)
    return {
        "step": [step] * len(by_rank),
        "rank": range(len(by_rank)),
        "digest": [digest] * len(by_rank),
        **numbers,
    }
