"""Read the trace of a real run: its prompts, responses, rewards and recorded drafts as a workload.

The cost of its forwards is fitted to the same trace.
"""

import json
import os
import re
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from bubblespec.config import Config, flatten
from bubblespec.errors import InputError, one_line
from bubblespec.telemetry.trace import FOLDER, FORMAT, META_FILE
from bubblespec.tools.simulate.cost import ForwardCost, fit_cost
from bubblespec.tools.simulate.roofline import GPUS, MODELS, GPUCost, copy_roofline, roofline
from bubblespec.tools.simulate.workload import STOP, Spec, Workload
from bubblespec.types import Load, Prompt


def read_meta(folder: str) -> dict[str, Any]:
    """Return meta.json of a trace. Raises InputError."""
    path = os.path.join(folder, META_FILE)
    try:
        with open(path, encoding="utf-8") as file:
            meta = json.load(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is not a trace: {one_line(error)}") from error
    if meta.get("format") != FORMAT:
        raise InputError(f'{path}: not a trace of this version (no "format": {FORMAT})')
    return meta


def list_steps(folder: str) -> list[int]:
    """Return the complete steps of a trace, in order. Raises InputError if there is none."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    matches = map(re.compile(r"responses-(\d{5,})\.parquet").fullmatch, names)
    steps = sorted(int(match[1]) for match in matches if match)
    if not steps:
        raise InputError(f"{folder}: no complete step is recorded")
    return steps


def read_table(folder: str, kind: str) -> pyarrow.Table:
    """Return all rows of a kind (responses, forwards). Raises InputError."""
    tables = []
    for step in list_steps(folder):
        path = os.path.join(folder, f"{kind}-{step:05d}.parquet")
        try:
            tables.append(pyarrow.parquet.read_table(path, partitioning=None))
        except (OSError, pyarrow.ArrowException) as error:
            raise InputError(f"{path}: cannot be read: {one_line(error)}") from error
    return pyarrow.concat_tables(tables, promote_options="permissive")  # a step without drafts


def read_workload(run_dir: str) -> Workload:
    """Return the first batch of each step of a recorded run as a workload. Raises InputError.

    A recorded draft keeps its tokens, however old the weights are; an unfinished draft continues
    like the response. `Spec.run` becomes the mean tokens of drafts to their first mismatch."""
    folder = os.path.join(run_dir, FOLDER)
    recorded = list_steps(folder)
    if recorded != list(range(recorded[0], recorded[0] + len(recorded))):
        raise InputError(f"{folder}: the steps {recorded} are not consecutive")
    rows = [row for row in read_table(folder, "responses").to_pylist() if not row["batch"]]
    prompts: list[dict[int, Prompt]] = [{} for _ in recorded]  # by uid
    responses, drafts, rewards, steps = {}, {}, {}, {}
    stops = sorted({row["tokens"][-1] for row in rows if row["stopped"]}) or [STOP]
    num_agreed = num_diverged = 0
    for row in rows:
        step, uid, tokens = row["step"] - recorded[0], row["uid"], np.array(row["tokens"])
        key = (step, uid, row["sample"])
        prompts[step][uid] = Prompt(uid, "", tuple(row["prompt_tokens"]), {})
        steps[uid, row["visit"]] = step
        responses[key], rewards[key] = tokens, row["reward"]
        if row["draft_tokens"]:
            draft = np.array(row["draft_tokens"])
            both = min(len(tokens), len(draft))
            wrong = np.flatnonzero(tokens[:both] != draft[:both])
            num_agreed += int(wrong[0]) if len(wrong) else both
            num_diverged += len(wrong) > 0
            if not row["draft_finished"]:
                draft = np.concatenate((draft, tokens[len(draft) :]))
            if draft[-1] not in stops:  # it differs from its response and is longer
                draft = np.append(draft, tokens[-1] if tokens[-1] in stops else stops[0])
            drafts[key] = draft
    spec = Spec()
    if drafts:
        spec = Spec(run=max(num_agreed / num_diverged, 1.0) if num_diverged else float("inf"))
    workload = Workload(
        batches=[list(of_step.values()) for of_step in prompts],
        responses=responses,
        steps=steps,
        num_steps=len(recorded),
        max_prompt_length=max(len(row["prompt_tokens"]) for row in rows),
        spec=spec,
        stop_token_ids=tuple(stops),
        recorded_drafts=drafts,
        rewards=rewards,
    )
    if len(responses) != len(recorded) * workload.num_prompts * workload.num_generations:
        raise InputError(f"{folder}: its steps do not all have {workload.num_prompts} whole groups")
    return workload


def sections_of(config: dict[str, Any], names: tuple[str, ...]) -> dict[str, dict]:
    """Return the valid keys of some sections of a recorded configuration, which has flat keys."""
    sections: dict[str, dict] = {name: {} for name in names}
    for name in flatten(Config()).keys() & config.keys():
        section, key = name.split(".")
        if section in names:
            sections[section][key] = config[name]
    return sections


def load_cost(name: str, num_ranks: int = 1) -> ForwardCost | GPUCost:
    """Return the cost of one rank's forwards, or of forwards of `num_ranks` ranks together.

    name: GPU:MODEL, of GPUS and MODELS, for a roofline; or a run's output_dir, to fit its forwards
    with the host's work between them. Raises InputError if there is no such cost."""
    (gpu, _, model), folder = name.partition(":"), os.path.join(name, FOLDER)
    try:
        if gpu in GPUS and model in MODELS:
            return roofline(gpu, model, num_ranks)
        if os.path.isdir(folder):
            return _fit_recorded(folder, num_ranks)
    except ValueError as error:  # too few forwards, or a model that so many ranks cannot share
        raise InputError(f"{name}: {error}") from error
    valid = f"{', '.join(GPUS)} : {', '.join(MODELS)}"
    raise InputError(f"{name}: neither the folder of a recorded run nor a roofline ({valid})")


def load_copy_cost(name: str) -> GPUCost | None:
    """Return the cost of forwards of the quantised copy; None for a recorded run."""
    gpu, _, model = name.partition(":")
    return copy_roofline(gpu, model) if gpu in GPUS and model in MODELS else None


def _fit_recorded(folder: str, num_ranks: int) -> ForwardCost:
    meta, table, kind = read_meta(folder), read_table(folder, "forwards"), "forwards"
    chosen = ~table["together"].to_numpy()
    if num_ranks > 1:
        if meta["world_size"] != num_ranks:
            raise ValueError(f"no forwards of {num_ranks} ranks together were recorded")
        # Each rank has recorded shared forwards alike.
        chosen, kind = ~chosen & (table["rank"].to_numpy() == 0), "shared forwards"
    loads = np.stack([table[name].to_numpy() for name in Load._fields], axis=1)
    seconds = table["end_s"].to_numpy() - table["begin_s"].to_numpy()
    source = f"fitted on {kind} of {meta['hardware'].get('gpu') or meta['hardware'].get('cpu')}"
    return fit_cost(loads[chosen], seconds[chosen], source)
