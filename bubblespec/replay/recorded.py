"""A workload from the trace of a real run: its prompts, responses and rewards, and its drafts as far as they were recorded.

`RUN_DIR/trace/` has `meta.json` and, for every recorded step, `responses-00012.parquet` with one row a response: step, uid,
sample, owner, prompt_tokens, tokens, stopped, reward, and draft_tokens, draft_finished and draft_version of the draft that it had
as its step began (null for none).
"""

import glob
import json
import os
import re

import numpy as np
import pyarrow
import pyarrow.parquet

from bubblespec.data import Prompt
from bubblespec.errors import InputError
from bubblespec.replay.drafting import STOP, DraftModel

RESPONSE_COLUMNS = ("step", "uid", "sample", "prompt_tokens", "tokens", "stopped", "reward", "draft_tokens", "draft_finished")


class RecordedWorkload:
    """The same as `Workload`, from a trace. A draft that was recorded says what it said, and goes on as the response does; what
    was not recorded comes from `drafts`.

    mean_run: tokens of recorded drafts to their first mismatch, on average, infinite if there was none; None where no draft was
    recorded.
    """

    def __init__(self, run_dir: str):
        folder = os.path.join(run_dir, "trace")
        paths = sorted(glob.glob(os.path.join(folder, "responses-*.parquet")))
        if not paths:
            raise InputError(f"--trace: no responses-*.parquet in {folder}")
        self.meta = read_meta(folder)
        self.config: dict = self.meta["config"]
        self.limit = int(self.config["rollout.max_completion_length"])
        self._batches: dict[int, list[Prompt]] = {}
        self._found: dict[tuple[int, int, int], tuple] = {}  # tokens, draft or None, is draft finished
        self._rewards: dict[tuple[int, int], list[float]] = {}
        stops = set()
        for path in paths:
            self._read(path, stops)
        self.stop_token_ids = tuple(sorted(stops)) or (STOP,)
        steps = sorted(self._batches)
        if steps != list(range(steps[0], steps[0] + len(steps))):
            raise InputError(f"--trace: the steps in {folder} are not consecutive: {steps}")
        self.first_step, self.num_steps = steps[0], len(steps)
        self.num_prompts = len(self._batches[steps[0]])
        self.num_generations = 1 + max(sample for _, _, sample in self._found)
        for step in steps:
            wanted = {(step, p.uid, sample) for p in self._batches[step] for sample in range(self.num_generations)}
            if len(self._batches[step]) != self.num_prompts or not wanted <= self._found.keys():
                raise InputError(
                    f"--trace: step {step} in {folder} lacks responses: {self.num_prompts} prompts with "
                    f"{self.num_generations} each are expected"
                )
        self.max_length = max(len(tokens) for tokens, *_ in self._found.values())
        self.max_prompt_length = max(len(p.token_ids) for batch in self._batches.values() for p in batch)
        self.mean_run = self._mean_run()
        self.drafts = DraftModel(500.0 if self.mean_run is None else max(self.mean_run, 1.0))

    def _read(self, path: str, stops: set[int]) -> None:
        try:
            table = pyarrow.parquet.read_table(path, columns=list(RESPONSE_COLUMNS))
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"--trace: cannot read {path}: {str(error).splitlines()[0]}") from error
        lacking = set(RESPONSE_COLUMNS) - set(table.column_names)
        if lacking:
            raise InputError(f"--trace: {path} has no column {sorted(lacking)[0]}")
        columns = (table[name].to_pylist() for name in RESPONSE_COLUMNS)
        seen = {}
        for step, uid, sample, prompt, tokens, stopped, reward, draft, finished in zip(*columns, strict=True):
            if not tokens:
                raise InputError(f"--trace: {path} has a response without tokens (uid {uid}, sample {sample})")
            if stopped:
                stops.add(tokens[-1])
            elif len(tokens) != self.limit:
                raise InputError(
                    f"--trace: {path} has an unfinished response of {len(tokens)} tokens; the limit was {self.limit}"
                )
            draft = None if draft is None else np.array(draft, np.int64)
            self._found[step, uid, sample] = (np.array(tokens, np.int64), draft, bool(finished))
            self._rewards.setdefault((step, uid), []).append((sample, float(reward)))
            seen[step, uid] = prompt
        for (step, uid), prompt in seen.items():
            self._batches.setdefault(step, []).append(Prompt(uid, "", tuple(prompt), {}))

    def _mean_run(self) -> float | None:
        agreed, left = 0, 0
        for tokens, draft, _ in self._found.values():
            if draft is not None and len(draft):
                both = min(len(tokens), len(draft))
                wrong = np.flatnonzero(tokens[:both] != draft[:both])
                agreed += int(wrong[0]) if len(wrong) else both
                left += len(wrong) > 0
        return None if agreed + left == 0 else agreed / left if left else float("inf")

    def batch(self, step: int) -> list[Prompt]:
        return self._batches[step]

    def response(self, step: int, uid: int, sample: int) -> np.ndarray:
        return self._found[step, uid, sample][0]

    def draft(self, step: int, uid: int, sample: int, age: int, limit: int, so_far: np.ndarray) -> np.ndarray:
        """See `Workload.draft`."""
        tokens, draft, is_finished = self._found[step, uid, sample]
        true = tokens[:limit]
        if age <= 0:
            return true
        if draft is not None and len(draft):
            whole = draft if is_finished else np.concatenate((draft, tokens[len(draft) :]))
            if len(whole) < limit and whole[-1] not in self.stop_token_ids:  # left its response, and outgrew it
                whole = np.append(whole, self.stop_token_ids[0])
            return whole[:limit]
        stop = int(true[-1]) if int(true[-1]) in self.stop_token_ids else self.stop_token_ids[0]
        return self.drafts.text((step, uid, sample), true, limit, stop, age, so_far)

    def rewards(self, step: int, uid: int) -> np.ndarray:
        return np.array([reward for _, reward in sorted(self._rewards[step, uid])])

    def forget(self, step: int) -> None:
        """Nothing: the next replay of this trace needs it again."""


def read_meta(folder: str) -> dict:
    """meta.json of a trace, with its `config`, a flat dictionary, and `world_size`. Raises InputError."""
    path = os.path.join(folder, "meta.json")
    try:
        with open(path, encoding="utf-8") as file:
            meta = json.load(file)
    except (OSError, ValueError) as error:
        raise InputError(f"--trace: cannot read {path}: {str(error).splitlines()[0]}") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("config"), dict) or not isinstance(meta.get("world_size"), int):
        raise InputError(f"--trace: {path} has no config and world_size")
    if "rollout.max_completion_length" not in meta["config"]:
        raise InputError(f"--trace: {path} has no rollout.max_completion_length in its config")
    return meta


def step_of(path: str) -> int:
    return int(re.search(r"-(\d+)\.parquet$", path).group(1))
