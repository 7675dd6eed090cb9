"""A workload from the trace of a real run: its prompts, responses and rewards, and its drafts as
far as they were recorded."""

import os
from typing import Any

import numpy as np

from bubblespec.config import Config, flatten
from bubblespec.errors import InputError
from bubblespec.simulate.workload import STOP, DraftModel, Key, Workload
from bubblespec.telemetry.trace import FOLDER, list_steps, read_table
from bubblespec.types import Prompt


def read_workload(run_dir: str) -> Workload:
    """The first batch of each step of a recorded run. A recorded draft says what it said, however
    old the weights are; an unfinished one continues as the response does. Raises InputError."""
    folder = os.path.join(run_dir, FOLDER)
    recorded = list_steps(folder)
    if recorded != list(range(recorded[0], recorded[0] + len(recorded))):
        raise InputError(f"{folder}: the steps {recorded} are not consecutive")
    rows = [row for row in read_table(folder, "responses").to_pylist() if not row["batch"]]
    prompts: list[dict[int, Prompt]] = [{} for _ in recorded]  # by uid
    responses, drafts, rewards, steps = {}, {}, {}, {}
    stops = sorted({row["tokens"][-1] for row in rows if row["stopped"]}) or [STOP]
    for row in rows:
        step, uid = row["step"] - recorded[0], row["uid"]
        key = (step, uid, row["sample"])
        prompts[step][uid] = Prompt(uid, "", tuple(row["prompt_tokens"]), {})
        steps[uid, row["visit"]] = step
        responses[key], rewards[key] = np.array(row["tokens"]), row["reward"]
        if row["draft_tokens"]:
            drafts[key] = np.array(row["draft_tokens"]), row["draft_finished"]
    batches = [list(of_step.values()) for of_step in prompts]
    texts = {key: _whole(*draft, responses[key], stops) for key, draft in drafts.items()}
    model = DraftModel(_mean_run(responses, drafts))
    longest = max(len(row["prompt_tokens"]) for row in rows)
    ends = {"stop_token_ids": tuple(stops), "recorded_drafts": texts, "rewards": rewards}
    workload = Workload(batches, responses, steps, len(recorded), longest, model, **ends)
    if len(responses) != len(recorded) * workload.num_prompts * workload.num_generations:
        raise InputError(f"{folder}: its steps do not all have {workload.num_prompts} whole groups")
    return workload


def _whole(
    draft: np.ndarray, is_finished: bool, tokens: np.ndarray, stops: list[int]
) -> np.ndarray:
    """What a recorded draft of the response `tokens` says at its end."""
    whole = draft if is_finished else np.concatenate((draft, tokens[len(draft) :]))
    if whole[-1] in stops:
        return whole
    # It has left its response, and outgrown it.
    return np.append(whole, tokens[-1] if tokens[-1] in stops else stops[0])


def _mean_run(responses: dict[Key, np.ndarray], drafts: dict[Key, tuple]) -> float:
    """Tokens of recorded drafts to their first mismatch; the default if there are none."""
    if not drafts:
        return DraftModel.mean_run
    num_agreed = num_diverged = 0
    for key, (draft, _) in drafts.items():
        tokens = responses[key]
        both = min(len(tokens), len(draft))
        wrong = np.flatnonzero(tokens[:both] != draft[:both])
        num_agreed += int(wrong[0]) if len(wrong) else both
        num_diverged += len(wrong) > 0
    return max(num_agreed / num_diverged, 1.0) if num_diverged else float("inf")


def sections_of(config: dict[str, Any], names: tuple[str, ...]) -> dict[str, dict]:
    """Of a recorded configuration by flat key, those keys of some sections that there still are."""
    sections: dict[str, dict] = {name: {} for name in names}
    for name in flatten(Config()).keys() & config.keys():
        section, key = name.split(".")
        if section in names:
            sections[section][key] = config[name]
    return sections
