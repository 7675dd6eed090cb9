"""A workload from the trace of a real run: its prompts, responses and rewards, and its drafts as
far as they were recorded."""

import os
from collections import Counter

import numpy as np

from bubblespec.errors import InputError
from bubblespec.simulate.drafter import DrafterModel
from bubblespec.simulate.drafting import STOP, DraftModel
from bubblespec.simulate.shared import SharedModel
from bubblespec.simulate.workload import Planned
from bubblespec.telemetry.trace import FOLDER, list_steps, read_meta, read_table
from bubblespec.types import Prompt, SampleId, Samples, digest

COLUMNS = (
    "step",
    "batch",
    "uid",
    "sample",
    "prompt_tokens",
    "tokens",
    "stopped",
    "reward",
    "draft_tokens",
    "draft_finished",
)


GONE = ("bubble.order", "bubble.uses_soft_bubbles")  # keys of versions that wrote format 1
BEFORE = {"rollout.placement": "in_turn"}  # what versions did that did not have the key yet


class RecordedWorkload(Planned):
    """The same as `Workload`, from a trace. A draft that was recorded says what it said, whatever
    the age of the weights, and goes on as the response does at the same places; what was not
    recorded comes from `drafts`.

    config: of the run, flat; digests: of its steps; mean_run: tokens of the recorded drafts to
    their first mismatch, infinite if there was none, None where no draft was recorded. Of dynamic
    sampling the first batch of each step is simulated.
    """

    def __init__(self, run_dir: str):
        folder = os.path.join(run_dir, FOLDER)
        meta = read_meta(folder)
        try:
            self.config = BEFORE | {
                key: value for key, value in meta["config"].items() if key not in GONE
            }
            self.world_size = int(meta["world_size"])
            self.limit = int(self.config["rollout.max_completion_length"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{folder}: meta.json has no whole config and world_size ({error})"
            ) from error
        steps = list_steps(folder)
        if steps != list(range(steps[0], steps[0] + len(steps))):
            raise InputError(f"{folder}: the steps {steps} are not consecutive")
        self.first_step, self.num_steps = steps[0], len(steps)
        self._batches: dict[int, list[Prompt]] = {step: [] for step in steps}
        self._responses: dict[
            tuple[int, int, int], tuple[np.ndarray, np.ndarray | None, bool]
        ] = {}  # response, draft, finished
        self._rewards: dict[tuple[int, int], list[float]] = {}
        self._visits: dict[tuple[int, int], int] = {}  # by (step, uid)
        self.stop_token_ids = tuple(sorted(self._read(folder))) or (STOP,)
        self._steps = {(uid, visit): step for (step, uid), visit in self._visits.items()}
        self.num_prompts = len(self._batches[self.first_step])
        self.num_generations = max(sample for _, _, sample in self._responses) + 1
        if len(self._responses) != self.num_steps * self.num_prompts * self.num_generations:
            raise InputError(
                f"{folder}: its steps do not all have {self.num_prompts} prompts with {self.num_generations} responses"
            )
        self.max_length = max(len(tokens) for tokens, *_ in self._responses.values())
        self.max_prompt_length = max(
            len(p.token_ids) for batch in self._batches.values() for p in batch
        )
        self.digests = {
            step: self._digest(step) for step in steps
        }  # of what is simulated; those of format 1 had other names
        self.mean_run = self._mean_run()
        self.drafter = DrafterModel()
        self.shared: SharedModel | None = None  # where the shared tail is simulated
        self.drafts = DraftModel() if self.mean_run is None else DraftModel(max(self.mean_run, 1.0))

    def _read(self, folder: str) -> set[int]:
        """All responses. Returns the tokens that ended some."""
        table, stops, turns = read_table(folder, "responses"), set(), Counter()
        # Format 1 does not have the visit: it is how often the trace itself has had the prompt
        # before.
        visits = (
            table["visit"].to_pylist() if "visit" in table.column_names else [None] * len(table)
        )
        columns = [table[name].to_pylist() for name in COLUMNS]
        for (
            visit,
            step,
            batch,
            uid,
            sample,
            prompt,
            tokens,
            stopped,
            reward,
            draft,
            finished,
        ) in zip(visits, *columns, strict=True):
            if batch:
                continue
            if not tokens or (not stopped and len(tokens) != self.limit):
                raise InputError(
                    f"{folder}: a response of step {step} has {len(tokens)} tokens, and no end"
                )
            if stopped:
                stops.add(tokens[-1])
            if (step, uid) not in self._rewards:
                self._batches[step].append(Prompt(uid, "", tuple(prompt), {}))
                self._visits[step, uid] = turns[uid] if visit is None else visit
                turns[uid] += 1
            self._rewards.setdefault((step, uid), []).append(reward)  # samples are in order
            draft = None if draft is None else np.array(draft, np.int64)
            self._responses[step, uid, sample] = (np.array(tokens, np.int64), draft, finished)
        return stops

    def _mean_run(self) -> float | None:
        num_agreed = num_diverged = 0
        for tokens, draft, _ in self._responses.values():
            if draft is not None and len(draft):
                both = min(len(tokens), len(draft))
                wrong = np.flatnonzero(tokens[:both] != draft[:both])
                num_agreed += int(wrong[0]) if len(wrong) else both
                num_diverged += len(wrong) > 0
        return num_agreed / num_diverged if num_diverged else float("inf") if num_agreed else None

    def _digest(self, step: int) -> str:
        launch = self.launch(step)
        numbers = np.tile(np.arange(self.num_generations), len(launch.groups))
        tokens = [self.response(step, name.uid, name.sample) for name in launch.ids]
        return digest(
            Samples(
                launch.groups,
                self.num_generations,
                numbers,
                tokens,
                [],
                [],
                np.empty(0, bool),
                np.empty((0, 0)),
            )
        )

    def batch(self, step: int) -> list[Prompt]:
        return self._batches[step]

    def visit(self, step: int, uid: int) -> int:
        """How often the prompt had been drawn before this step."""
        return self._visits[step, uid]

    def first_visits(self) -> Counter[int]:
        """See `Planned`."""
        first: dict[int, int] = {}
        for (_, uid), visit in sorted(self._visits.items()):
            first.setdefault(uid, visit)
        return Counter(first)

    def step_of(self, sample: SampleId) -> int:
        """The step that a sample belongs to."""
        return self._steps[sample.uid, sample.visit]

    def response(self, step: int, uid: int, sample: int) -> np.ndarray:
        return self._responses[step, uid, sample][0]

    def draft(
        self, step: int, uid: int, sample: int, age: int, limit: int, so_far: np.ndarray
    ) -> np.ndarray:
        """See `Workload.draft`."""
        tokens, draft, is_finished = self._responses[step, uid, sample]
        true = tokens[:limit]
        if age <= 0:
            return true
        stop = self.stop_of(true)
        if draft is None or not len(draft):
            return self.drafts.text((step, uid, sample), true, limit, stop, age, so_far)
        whole = draft if is_finished else np.concatenate((draft, tokens[len(draft) :]))
        if (
            len(whole) < limit and whole[-1] not in self.stop_token_ids
        ):  # it has left its response, and outgrown it
            whole = np.append(whole, stop)
        return whole[:limit]

    def rewards(self, step: int, uid: int) -> np.ndarray:
        return np.array(self._rewards[step, uid])

    def forget(self, step: int) -> None:
        """Nothing: a trace can be simulated again."""
