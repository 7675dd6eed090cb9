"""A run recorded for replay (`run.trace`): responses, their drafts, and all forwards with times.

output_dir/trace has meta.json (format, flat config, world_size, hardware and versions of the newest
start) and two Parquet files per step, responses-00012.parquet and forwards-00012.parquet. Responses
are written last: a step counts if it has them. Files are written aside and renamed, and a resumed
run repeats the steps after its checkpoint. On a full disk recording stops, and the run continues.

responses: a row per response of the step, groups that dynamic sampling replaced included, in
canonical order. batch numbers the step's rollouts; owner is the rank that generated the response;
stopped is false at the length limit; reward is combined, with the overlong penalty; draft_tokens is
the draft as the step began, null without one; draft_version counts the updates before the draft was
last extended, -1 without one.

forwards: a row per forward, by rank, batch and time, with the fields of `ForwardRecord` and its
`Load`; times are seconds since that rank began that batch's rollout. together marks forwards of all
ranks together (the TP tail), a row on each rank."""

import contextlib
import json
import os
import platform
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from bubblespec.config import Config, flatten
from bubblespec.distributed.ranks import Ranks
from bubblespec.errors import log
from bubblespec.records import ForwardRecord, RolloutRecord, StepRecord
from bubblespec.telemetry.files import StepFiles, must_write, token_columns
from bubblespec.types import Load

FORMAT = 2
FOLDER = "trace"
META_FILE = "meta.json"
_FIELDS = list(ForwardRecord._fields)
_LOAD = _FIELDS.index("load")
COLUMNS = ("batch", *_FIELDS[:_LOAD], *Load._fields, *_FIELDS[_LOAD + 1 :], "together")


class Recorder:
    """Writes the trace of a run. Made by all ranks together; only rank 0 writes."""

    def __init__(self, config: Config, ranks: Ranks, num_updates: int):
        """num_updates: later steps are removed. Raises InputError."""
        self.ranks = ranks
        self.files: StepFiles | None = None  # of rank 0, until a write fails
        if ranks.is_main:
            folder = os.path.join(config.run.output_dir, FOLDER)
            self.files = StepFiles(folder, num_updates, "run.trace")
            with must_write("run.trace", folder):
                _write_meta(os.path.join(folder, META_FILE), config, ranks)

    def write(self, record: StepRecord) -> None:
        """Gather all ranks' forwards of a step and write it.

        All ranks continue together, so that no rank counts the writing as waiting for rank 0."""
        step = record.step + 1
        self.ranks.activity = f"recording of step {step}"
        forwards = self.ranks.gather_ragged(_own_forwards(record.rollouts).ravel())
        if self.files is not None:
            try:
                self.files.write("forwards", step, _forward_columns(step, forwards))
                self.files.write("responses", step, _response_columns(record))
            except OSError as error:
                with contextlib.suppress(OSError):  # what was begun
                    self.files.remove_from(step)
                reason = f"{self.files.folder}: {error.strerror or error}"
                log(f"warning: {reason}; recording stops before step {step}; the run continues")
                self.files = None
        self.ranks.barrier()


def _write_meta(path: str, config: Config, ranks: Ranks) -> None:
    names = ("torch", "transformers", "numpy")
    meta = {
        "format": FORMAT,
        "world_size": ranks.world_size,
        "hardware": describe_hardware(ranks.device),
        "versions": {"python": platform.python_version()} | {n: version(n) for n in names},
        "config": flatten(config),
    }
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)
    os.replace(path + ".tmp", path)


def describe_hardware(device: torch.device) -> dict[str, Any]:
    """Return what times depend on: processor, GPU (or None), cores, and threads of this process."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        processor = names[0] if names else processor
    return {
        "cpu": processor,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _response_columns(record: StepRecord) -> dict[str, Any]:
    samples, drafts = record.generated, [record.drafts.get(name) for name in record.generated.ids]
    batches = np.repeat(np.arange(len(record.batch_sizes)), record.batch_sizes)
    return token_columns(record) | {
        "batch": np.repeat(batches, samples.num_generations),
        "owner": record.owners,
        "stopped": ~samples.is_truncated,
        "reward": record.all_rewards.ravel(),
        "draft_tokens": [None if draft is None else draft.tokens for draft in drafts],
        "draft_finished": [draft is not None and draft.is_finished for draft in drafts],
        "draft_version": [-1 if draft is None else draft.version for draft in drafts],
    }


def _own_forwards(rollouts: list[RolloutRecord]) -> np.ndarray:
    """Return this rank's forwards, float64 [forwards, COLUMNS], timed since the rollout began."""
    forwards = []
    for i, rollout in enumerate(rollouts):
        for is_shared, some in ((False, rollout.forwards), (True, rollout.shared_forwards)):
            forwards += [(i, *f[:_LOAD], *f.load, *f[_LOAD + 1 :], is_shared) for f in some]
    numbers = np.array(sorted(forwards), np.float64).reshape(-1, len(COLUMNS))
    began_s = np.array([rollout.began_s for rollout in rollouts])
    numbers[:, 1:3] -= began_s[numbers[:, 0].astype(int), None]
    return numbers


def _forward_columns(step: int, by_rank: list[np.ndarray]) -> dict[str, Any]:
    """by_rank: see `_own_forwards`, flat, of each rank."""
    tables = [numbers.reshape(-1, len(COLUMNS)) for numbers in by_rank]
    ranks = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    columns = {"step": np.full(len(ranks), step), "rank": ranks}
    for name, values in zip(COLUMNS, np.concatenate(tables).T, strict=True):
        columns[name] = values if name.endswith("_s") else values.astype(np.int64)
    return columns | {"together": columns["together"].astype(bool)}
