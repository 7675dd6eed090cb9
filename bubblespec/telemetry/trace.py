"""A run recorded for replay (`trace.enabled`): its responses, the drafts they had, and every forward with its load and time.

output_dir/trace holds meta.json and three Parquet files a step. The steps file is written last: a step counts if it has one. All
files are written aside and renamed, and a continued run writes the steps anew that come after its checkpoint. At MOST_BYTES
recording stops, and the run goes on.

responses-00012.parquet: a row for each response of the step, replaced groups of dynamic sampling included, in canonical order

| column | type | meaning |
|---|---|---|
| step, batch | int32, int16 | batch counts the step's rollouts (above 0 with dynamic sampling only) |
| uid, sample, owner | int64, int16, int16 | prompt, number in its group, and the rank that generated it |
| prompt_tokens, tokens | list of int32 | the response's with its stop token |
| stopped | bool | it has ended by itself, not at the length limit |
| reward | float64 | combined, with the overlong penalty |
| draft_tokens | list of int32 | its run-ahead draft as it stood when its step began; null if it had none |
| draft_finished | bool | the draft ends as a response does |
| draft_version | int32 | updates before the draft was last extended; -1 if there is none |

forwards-00012.parquet: a row for each forward, by rank, batch and time: step (int32), rank, batch (int16), and the fields of
`Forward` (times float64 in seconds since that rank began that batch's rollout, positions int64, other counts int32)

steps-00012.parquet: a row for each rank; times are float64, in seconds

| column | type | meaning |
|---|---|---|
| step, rank, digest | int32, int16, string | digest: that of metrics.jsonl |
| own_s, wait_s, total_s | | see `RolloutStats`; over all batches of the step, as is everything here |
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
from bubblespec.errors import InputError, say
from bubblespec.ranks.collectives import Ranks
from bubblespec.records import Prompt
from bubblespec.rollout.placement import owner_ranks
from bubblespec.speculate.store import Draft, DraftStore
from bubblespec.telemetry.forward_log import Forward, ForwardLog
from bubblespec.telemetry.timeline import total_s

if TYPE_CHECKING:  # which know this module
    import pyarrow

    from bubblespec.rollout.collect import Collected

FORMAT = 1
FOLDER = "trace"
META_FILE = "meta.json"
MOST_BYTES = 4 << 30  # of files
COLUMNS = {
    "responses": {
        "step": "int32",
        "batch": "int16",
        "uid": "int64",
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
    | {name: "float64" if name.endswith("_s") else "int64" if name == "positions" else "int32" for name in Forward._fields},
    "steps": {"step": "int32", "rank": "int16", "digest": "string"}
    | dict.fromkeys(("own_s", "wait_s", "total_s"), "float64")
    | {"own_forwards": "int32", "drafted_tokens": "int64"}
    | dict.fromkeys(("gen_s", "meet_s", "reward_s", "train_s", "exchange_s", "step_s"), "float64"),
}


class Recorder:
    """Writes the trace of a run. Made by all ranks together; only rank 0 writes.

    store: where the run keeps its drafts, if it has any; first_step: steps from here on, left by an earlier start, are removed.
    """

    def __init__(self, config: Config, ranks: Ranks, store: DraftStore | None, first_step: int):
        self.ranks, self.store = ranks, store
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
                with _replaced(os.path.join(self.folder, META_FILE)) as path, open(path, "w", encoding="utf-8") as file:
                    json.dump(meta, file, indent=1)
                self.num_bytes = sum(entry.stat().st_size for entry in os.scandir(self.folder))
            except OSError as error:
                raise InputError(f"trace.enabled: cannot write to {self.folder}: {error.strerror}") from error
        self._stop_if_full(first_step)

    def begin(self, step: int, prompts: list[Prompt], num_generations: int) -> None:
        """A step is about to begin; prompts: its batch, whose drafts are noted as they stand now."""
        self._logs: list[ForwardLog] = []
        self._drafts: dict[tuple[int, int], Draft] = {}
        if self.is_on and self.store is not None and self.ranks.is_main:
            for uid in (prompt.uid for prompt in prompts):
                found = {(uid, sample): self.store.get((step, uid, sample)) for sample in range(num_generations)}
                self._drafts |= {key: draft for key, draft in found.items() if draft is not None}

    def new_log(self) -> ForwardLog | None:
        """For the forwards of the step's next rollout; None once recording has stopped."""
        if not self.is_on:
            return None
        self._logs.append(ForwardLog())
        return self._logs[-1]

    def write(self, step: int, collected: "Collected", digest: str) -> None:
        """The step is over: gather all ranks' forwards and write it. All ranks go on together, so that nobody counts the
        writing as waiting for rank 0."""
        if not self.is_on:
            return
        self.ranks.place = f"recording of step {step}"
        stats, stages = collected.stats, collected.stages
        numbers = [stats.own_s, stats.wait_s, stats.total_s, stats.own_forwards, stats.drafted_tokens]
        numbers += [total_s(stages, kind) for kind in ("gen", "wait", "reward", "train")]
        numbers += [total_s(stats.events, "exchange"), stages[-1][2] - stages[0][1]]
        by_rank = self.ranks.gather(np.array(numbers, np.float64))
        own = [np.insert(log.numbers(), 0, batch, axis=1) for batch, log in enumerate(self._logs)]
        forwards = self.ranks.gather_ragged(np.concatenate(own).ravel())
        if self.ranks.is_main:
            tables = {
                "responses": _response_columns(step, collected, self._drafts, self.ranks.world_size),
                "forwards": _forward_columns(step, forwards),
                "steps": _step_columns(step, digest, by_rank),
            }
            try:
                for kind, columns in tables.items():
                    self.num_bytes += _write_table(self.folder, kind, step, columns)
            except OSError as error:
                self.is_on = False
                reason = error.strerror or error
                say(f"warning: {self.folder}: {reason}; recording stops before step {step}, and the run goes on")
        self._stop_if_full(step + 1)

    def _stop_if_full(self, next_step: int) -> None:
        """Rank 0 says whether recording goes on."""
        if self.is_on and self.num_bytes > MOST_BYTES:
            self.is_on = False
            size = f"{self.num_bytes / 1e9:.2f} GB"
            say(f"warning: {self.folder} has {size}, the most; recording stops before step {next_step}, and the run goes on")
        self.is_on = bool(self.ranks.gather(np.array([self.is_on], np.uint8))[0, 0])

    def _remove_from(self, first_step: int) -> None:
        for name in os.listdir(self.folder):
            found = re.fullmatch(r"(?:responses|forwards|steps)-(\d{5,})\.parquet(\.tmp)?", name)
            if found and (int(found[1]) >= first_step or found[2]):
                os.remove(os.path.join(self.folder, name))


def describe_hardware(device: torch.device) -> dict[str, Any]:
    """What times depend on: processor, GPU (None on a CPU), cores, and threads of this process."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        processor = names[0] if names else processor
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"cpu": processor, "gpu": gpu, "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def describe_versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers", "numpy")}


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
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise InputError(f'{path}: not a trace of this version (it has no "format": {FORMAT})')
    return meta


def list_steps(folder: str) -> list[int]:
    """The steps that a trace holds whole, in order. Raises InputError if there is none."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise InputError(f"{folder} is not a trace: {error.strerror}") from error
    steps = sorted(int(found[1]) for name in names if (found := re.fullmatch(r"steps-(\d{5,})\.parquet", name)))
    if not steps:
        raise InputError(f"{folder}: no step is recorded there")
    return steps


def read_table(folder: str, kind: str, steps: list[int] | None = None) -> "pyarrow.Table":
    """All rows of a kind (responses, forwards, steps), of all steps or of some. Raises InputError."""
    import pyarrow
    import pyarrow.parquet

    tables = []
    for step in list_steps(folder) if steps is None else steps:
        path = _path(folder, kind, step)
        try:
            tables.append(pyarrow.parquet.read_table(path, partitioning=None))
        except (OSError, pyarrow.ArrowException) as error:
            raise InputError(f"{path}: cannot be read: {' '.join(str(error).split())[:200]}") from error
        if tables[-1].column_names != list(COLUMNS[kind]):
            raise InputError(f"{path}: its columns are not those of a trace")
    return pyarrow.concat_tables(tables)


def _path(folder: str, kind: str, step: int) -> str:
    return os.path.join(folder, f"{kind}-{step:05d}.parquet")


@contextlib.contextmanager
def _replaced(path: str):
    """A temporary name to write to, which becomes `path` once it is written; an error leaves nothing."""
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

    types = {name: pyarrow.list_(pyarrow.int32()) if t == "list" else t for name, t in COLUMNS[kind].items()}
    table = pyarrow.table([pyarrow.array(columns[name], t) for name, t in types.items()], names=list(types))
    with _replaced(_path(folder, kind, step)) as path:
        pyarrow.parquet.write_table(table, path, compression="zstd")
        return os.path.getsize(path)


def _response_columns(step: int, collected: "Collected", drafts: dict[tuple[int, int], Draft], world_size: int) -> dict[str, Any]:
    samples, n = collected.generated, collected.generated.num_generations
    batch, owner = [], []  # of each prompt
    for number, size in enumerate(collected.batch_sizes):
        batch += [number] * size
        owner += owner_ranks(size, world_size)
    uids = [samples.prompt_of(i).uid for i in range(len(samples))]
    found = [drafts.get((uid, i % n)) for i, uid in enumerate(uids)]
    return {
        "step": [step] * len(samples),
        "batch": np.repeat(batch, n),
        "uid": uids,
        "sample": [i % n for i in range(len(samples))],
        "owner": np.repeat(owner, n),
        "prompt_tokens": [np.array(samples.prompt_of(i).token_ids, np.int32) for i in range(len(samples))],
        "tokens": [tokens.astype(np.int32) for tokens in samples.tokens],
        "stopped": ~samples.is_truncated,
        "reward": collected.all_rewards.ravel(),
        "draft_tokens": [None if draft is None else draft.tokens for draft in found],
        "draft_finished": [draft is not None and draft.is_finished for draft in found],
        "draft_version": [-1 if draft is None else draft.version for draft in found],
    }


def _forward_columns(step: int, by_rank: list[np.ndarray]) -> dict[str, Any]:
    """by_rank: float64 [forwards * (1 + fields of Forward)] of each rank, the batch first."""
    tables = [numbers.reshape(-1, 1 + len(Forward._fields)) for numbers in by_rank]
    numbers = np.concatenate(tables)
    ranks = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    columns = {name: numbers[:, 1 + i] for i, name in enumerate(Forward._fields)}
    whole = {name: column if name.endswith("_s") else column.astype(np.int64) for name, column in columns.items()}
    return {"step": [step] * len(numbers), "rank": ranks, "batch": numbers[:, 0].astype(np.int64), **whole}


def _step_columns(step: int, digest: str, by_rank: np.ndarray) -> dict[str, Any]:
    """by_rank: float64 [ranks, numbers of a rank in the order of COLUMNS]."""
    numbers = dict(zip(list(COLUMNS["steps"])[3:], by_rank.T, strict=True))
    for name in ("own_forwards", "drafted_tokens"):
        numbers[name] = numbers[name].astype(np.int64)
    return {"step": [step] * len(by_rank), "rank": range(len(by_rank)), "digest": [digest] * len(by_rank), **numbers}
