"""A workload from the trace of a real run: its prompts, responses and rewards, and its drafts as
far as they were recorded."""

import os
from collections import Counter
from typing import Any

import numpy as np

from bubblespec.config import Config, flatten
from bubblespec.errors import InputError
from bubblespec.simulate.workload import STOP, DraftModel, Key, Workload
from bubblespec.telemetry.trace import FOLDER, list_steps, read_meta, read_table
from bubblespec.types import Prompt, SampleId


class RecordedWorkload(Workload):
    """The first batch of each step of a recorded run. A recorded draft says what it said, however
    old the weights are.

    config: of the run, by flat key; world_size: its ranks; limit: where its responses are cut.
    """

    def __init__(self, run_dir: str):
        folder = os.path.join(run_dir, FOLDER)
        meta, steps = read_meta(folder), list_steps(folder)
        self.config: dict[str, Any] = meta["config"]
        self.world_size = meta["world_size"]
        self.limit = self.config["rollout.max_completion_length"]
        if steps != list(range(steps[0], steps[0] + len(steps))):
            raise InputError(f"{folder}: the steps {steps} are not consecutive")
        self.num_steps = len(steps)
        self._batches: list[list[Prompt]] = [[] for _ in steps]
        self._responses: dict[Key, np.ndarray] = {}
        self._drafts: dict[Key, tuple[np.ndarray, bool]] = {}
        self._rewards: dict[tuple[int, int], list[float]] = {}
        self._steps: dict[tuple[int, int], int] = {}  # by uid and visit
        stops = set()
        for row in read_table(folder, "responses").to_pylist():
            if row["batch"]:
                continue  # a replacement by dynamic sampling
            step, uid, tokens = row["step"] - steps[0], row["uid"], np.array(row["tokens"])
            if row["stopped"]:
                stops.add(int(tokens[-1]))
            if (step, uid) not in self._rewards:
                self._batches[step].append(Prompt(uid, "", tuple(row["prompt_tokens"]), {}))
                self._steps[uid, row["visit"]] = step
            self._rewards.setdefault((step, uid), []).append(row["reward"])  # samples are in order
            key = (step, uid, row["sample"])
            self._responses[key] = tokens
            if row["draft_tokens"]:
                self._drafts[key] = np.array(row["draft_tokens"]), row["draft_finished"]
        self.stop_token_ids = tuple(sorted(stops)) or (STOP,)
        self.num_prompts = len(self._batches[0])
        self.num_generations = max(sample for _, _, sample in self._responses) + 1
        if len(self._responses) != self.num_steps * self.num_prompts * self.num_generations:
            raise InputError(f"{folder}: its steps do not all have {self.num_prompts} whole groups")
        self.max_length = max(map(len, self._responses.values()))
        self.max_prompt_length = max(len(p.token_ids) for batch in self._batches for p in batch)
        self.drafts = DraftModel(self._mean_run())

    def _mean_run(self) -> float:
        """Tokens of recorded drafts to their first mismatch; the default if there are none."""
        if not self._drafts:
            return DraftModel.mean_run
        num_agreed = num_diverged = 0
        for key, (draft, _) in self._drafts.items():
            tokens = self._responses[key]
            both = min(len(tokens), len(draft))
            wrong = np.flatnonzero(tokens[:both] != draft[:both])
            num_agreed += int(wrong[0]) if len(wrong) else both
            num_diverged += len(wrong) > 0
        return max(num_agreed / num_diverged, 1.0) if num_diverged else float("inf")

    def batch(self, seed: int, step: int, num_prompts: int) -> list[Prompt]:
        # A planner may ask for steps beyond the end when it looks ahead.
        return self._batches[step] if step < self.num_steps else []

    def first_visits(self) -> Counter[int]:
        # The earliest visit of a prompt comes last, and stays.
        return Counter(dict(sorted(self._steps, reverse=True)))

    def step_of(self, sample: SampleId) -> int:
        return self._steps[sample.uid, sample.visit]

    def response(self, step: int, uid: int, sample: int) -> np.ndarray:
        return self._responses[step, uid, sample]

    def rewards(self, step: int, uid: int) -> np.ndarray:
        return np.array(self._rewards[step, uid])

    def recorded_draft(self, key: Key, limit: int) -> np.ndarray | None:
        """The draft as it was recorded; an unfinished one continues as the response does."""
        if key not in self._drafts:
            return None
        draft, is_finished = self._drafts[key]
        tokens = self._responses[key]
        whole = draft if is_finished else np.concatenate((draft, tokens[len(draft) :]))
        if whole[-1] not in self.stop_token_ids:  # it has left its response, and outgrown it
            whole = np.append(whole, self.stop_of(tokens))
        return whole[:limit]


def sections_of(config: dict[str, Any], names: tuple[str, ...]) -> dict[str, dict]:
    """Of a recorded configuration by flat key, those keys of some sections that there still are."""
    sections: dict[str, dict] = {name: {} for name in names}
    for name in flatten(Config()).keys() & config.keys():
        section, key = name.split(".")
        if section in names:
            sections[section][key] = config[name]
    return sections
