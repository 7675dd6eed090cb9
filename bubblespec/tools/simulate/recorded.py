"""Read the trace of a real run: its prompts, responses, rewards and recorded drafts as a workload.

Seconds of forwards are fitted to the same trace as a function of their load:

    T = constant + f(tokens) + rates of rows, wide rows, positions, prompt and draft tokens, pairs

f is piecewise linear with knots at powers of two and never falls: a GPU's forwards take the same
time up to saturation and then grow with the tokens, a CPU's grow from the first token on. Beyond
the last knot f continues with its last slope. All coefficients are at least 0.

Pairs: a row that feeds n tokens over p positions attends to about n * p of them, where a decoding
row attends to p. A load has sums over rows only, so tokens * positions / rows is taken, less the
positions themselves. The kernels of a GPU are not linear in either: see roofline.py.
"""

import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from bubblespec.config import Config, flatten
from bubblespec.errors import InputError, one_line
from bubblespec.telemetry.trace import FOLDER, FORMAT, META_FILE
from bubblespec.tools.simulate.roofline import GPUS, MODELS, GPUCost, copy_roofline, roofline
from bubblespec.tools.simulate.workload import STOP, Spec, Workload
from bubblespec.types import Load, Prompt

RATES = ("rows", "wide_rows", "positions", "prompt_tokens", "draft_tokens", "pairs")
# A forward that takes this many times its prediction was interrupted, and is left out.
INTERRUPTED = 3.0
NUM_REFITS = 4
MIN_FORWARDS = 10
# Penalties, in squared relative errors: on every rate, so that tokens get the cost where forwards
# do not tell two causes apart; and on changes of slope, which decide where nothing was measured.
RIDGE, SMOOTHING = 1e-5, 1e-4


@dataclass
class ForwardCost:
    """Seconds of forwards on one machine."""

    knots: list[int]  # tokens, ascending
    slopes: list[float]  # seconds per token from each knot on
    constant: float  # seconds of a forward of `knots[0]` tokens
    rates: dict[str, float]  # seconds by name (RATES)
    source: str = ""  # where the figures are from

    def __post_init__(self):
        rises = np.diff(self.knots) * np.array(self.slopes[:-1])
        self._at_knots = (self.constant + np.concatenate(([0.0], np.cumsum(rises)))).tolist()
        self._rates = [self.rates[name] for name in RATES]

    def seconds(self, load: Sequence[float]) -> float:
        """Return the seconds of a forward; load: the fields of `Load`."""
        rows, tokens, wide_rows, positions, prompt_tokens, draft_tokens = load
        i = max(bisect_right(self.knots, tokens) - 1, 0)
        pairs = max(tokens / rows - 1.0, 0.0) * positions
        counts = (rows, wide_rows, positions, prompt_tokens, draft_tokens, pairs)
        by_tokens = self._at_knots[i] + self.slopes[i] * (tokens - self.knots[i])
        return by_tokens + sum(map(float.__mul__, self._rates, map(float, counts)))


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
    prompts: list[dict[int, Prompt]] = [{} for _ in recorded]  # by prompt_id
    responses, drafts, rewards, steps = {}, {}, {}, {}
    stops = sorted({row["tokens"][-1] for row in rows if row["stopped"]}) or [STOP]
    num_agreed = num_diverged = 0
    for row in rows:
        step, prompt_id, tokens = row["step"] - recorded[0], row["uid"], np.array(row["tokens"])
        key = (step, prompt_id, row["sample"])
        prompts[step][prompt_id] = Prompt(prompt_id, "", tuple(row["prompt_tokens"]), {})
        steps[prompt_id, row["visit"]] = step
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
    """Return the cost of forwards of the quantised copy; None where there is none.

    Recorded runs have no figures of it, and models with states have no copy."""
    gpu, _, model = name.partition(":")
    has_copy = gpu in GPUS and model in MODELS and MODELS[model].states is None
    return copy_roofline(gpu, model) if has_copy else None


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


def fit_cost(loads: np.ndarray, seconds: np.ndarray, source: str) -> ForwardCost:
    """Fit by nonnegative least squares of relative errors, so that short forwards count, too.

    The first fit takes errors relative to what was measured, which interruptions hardly move; the
    others relative to the fit before, as the mean time is wanted. Raises ValueError for too few
    forwards."""
    from scipy.optimize import nnls

    loads, seconds = np.asarray(loads, np.float64), np.asarray(seconds, np.float64)
    if len(loads) < MIN_FORWARDS:
        raise ValueError(f"{len(loads)} forwards are too few to fit a cost; give {MIN_FORWARDS}")
    # The last knot is far enough below the largest load that its slope is measured.
    count = max(1, math.ceil(math.log2(max(loads[:, 1].max() / 1.5, 1.0))))
    knots = 2 ** np.arange(count, dtype=np.int64)
    features = _features(loads, knots)
    typical = np.sqrt(np.mean((features / seconds[:, None]) ** 2, axis=0))
    ridge = np.diag(math.sqrt(RIDGE) * typical)[1 + count :]
    bends = np.zeros((count - 1, len(typical)))
    for i in range(count - 1):
        weight = math.sqrt(SMOOTHING) * knots[i + 1] / np.median(seconds)
        bends[i, 1 + i : 3 + i] = (weight, -weight)
    penalty = math.sqrt(len(seconds)) * np.concatenate((ridge, bends))
    scale, is_kept = seconds, np.ones(len(seconds), bool)
    for _ in range(1 + NUM_REFITS):
        weighted = np.concatenate((features[is_kept] / scale[is_kept, None], penalty))
        size = np.maximum(np.linalg.norm(weighted, axis=0), 1e-300)
        target = np.concatenate((seconds[is_kept] / scale[is_kept], np.zeros(len(penalty))))
        solution = nnls(weighted / size, target)[0] / size
        scale = np.maximum(features @ solution, 1e-9)
        is_kept = seconds < INTERRUPTED * scale
        if not is_kept.any():
            break
    constant, *others = solution.tolist()
    rates = dict(zip(RATES, others[count:], strict=True))
    return ForwardCost(knots.tolist(), others[:count], constant, rates, source)


def _features(loads: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """Return the factors of the coefficients, float64 [N, 1 + knots + rates]."""
    rows, tokens, wide_rows, positions, prompt_tokens, draft_tokens = loads.T
    ramps = np.clip(tokens[:, None] - knots, 0, np.append(np.diff(knots), np.inf))
    pairs = np.maximum(tokens / rows - 1, 0) * positions
    rates = (rows, wide_rows, positions, prompt_tokens, draft_tokens, pairs)
    return np.column_stack((np.ones(len(loads)), ramps, *rates))
