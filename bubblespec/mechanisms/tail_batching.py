"""Tail batching: short rounds that defer their slowest groups, and long rounds of deferred groups.

The idea is RollPacker's (arXiv 2509.21009, section 4), here without bias. A short round launches
more groups than a step trains on, and defers all but the shortest. Once enough groups for a step
are deferred, a long round trains on exactly these, oldest first. RollPacker draws a deferred prompt
again, which favours short answers. Here a deferred group keeps its name, and so the noise of its
samples: the same samples are finished later, under the then current weights, with their tokens so
far as drafts. Every sample of the data order is trained on exactly once; only the order changes.
"""

import math
from collections import Counter
from functools import partial
from typing import NamedTuple

import numpy as np

from bubblespec.data.schedule import StepSchedule
from bubblespec.mechanisms import Run
from bubblespec.records import Samples
from bubblespec.types import Group, SampleId, StepBatch

# auto: how much history it uses, and how clear a gain must be.
NUM_CYCLES_KEPT = 16  # steps of groups whose lengths are remembered
MIN_SEEN = 16  # groups with known lengths before any group is deferred
MAX_OVER_SAMPLING = 2.0
MIN_GAIN = 1.05
# among numbers whose costs differ by less than this factor, the smallest rollouts are taken
MAX_NOISE = 1.02
NUM_TRIALS = 256
# Verifying a token costs this share of a forward: from 1/60 (a small model on a CPU core) to 1/400
# (a 7B on a GPU).
VERIFY_SHARE = 1 / 64


class Deferred(NamedTuple):
    """A group that was launched and is still to be trained on."""

    group: Group
    round: int
    """Round in which the group was launched."""
    tokens: int
    """Tokens of all its samples so far."""


class TailBatching(StepSchedule):
    """Short rounds, and long rounds of what they have deferred."""

    defers = True

    def __init__(self, *order, over_sampling_ratio: float | str):
        """order: the arguments of `StepSchedule`; over_sampling_ratio: `TailBatchingConfig`'s."""
        super().__init__(*order)
        self.over_sampling_ratio = over_sampling_ratio
        self._by_id = {prompt.prompt_id: prompt for prompt in self.prompts.prompts}
        self._num_drawn = 0  # in the data order, that is without replacements
        self._queue: list[Deferred] = []
        self._round = 0
        self._launched: StepBatch | None = None  # of the latest round
        self._seen: list[int] = []  # longest response of each group of whole cycles, for auto
        self._cycle: list[int] = []  # the same of the cycle that is not over yet
        self._num_short_round = self._choose_num_short_round()
        self._trained = np.zeros(2, np.int64)  # samples that have had their turn, and their tokens
        self._metrics: dict[str, float] = {}

    @property
    def deferred(self) -> list[Group]:
        return [entry.group for entry in self._queue]

    @property
    def is_long_round(self) -> bool:
        """Whether the coming step is a long round."""
        return len(self._queue) >= self.num_prompts

    def launch(self, step: int) -> StepBatch:
        groups = self.deferred[: self.num_prompts]
        if not self.is_long_round:
            groups = self._draw(self._num_drawn, self._num_short_round, Counter())
        self._launched = StepBatch(groups, self.num_prompts, self.num_generations)
        return self._launched

    def upcoming(self, step: int, depth: int, used: list[Group] | None = None) -> list[list[Group]]:
        """See `StepSchedule`. Earlier deferred groups come first; `step` may defer more."""
        if depth == 0:
            return []
        current, is_long = self.launch(step).groups, self.is_long_round
        used = current if used is None else used
        names = {group.name for group in current}
        drawn = Counter(g.prompt.prompt_id for g in used if not (is_long and g.name in names))
        waiting = self.deferred[len(current) :] if is_long else self.deferred
        num_drawn = self._num_drawn + (0 if is_long else len(current))
        backlog = len(waiting) + (0 if is_long else len(current) - self.num_prompts)
        batches: list[list[Group]] = []
        for _ in range(depth):
            count = 0 if backlog >= self.num_prompts else self._num_short_round
            batches.append(self._draw(num_drawn, count, drawn))
            num_drawn += count
            backlog += count - self.num_prompts
        return [waiting + batches[0], *batches[1:]]

    def finish(self, samples: Samples, deferred: dict[SampleId, int]) -> None:
        assert self._launched is not None
        launched, was_long = self._launched.groups, self.is_long_round
        names = {group.name for group in launched}
        trained = {group.name for group in samples.groups}
        lengths = samples.lengths.reshape(-1, samples.num_generations)
        longest = lengths.max(axis=1)[[group.name in names for group in samples.groups]]
        drawn = [group for group in samples.groups if group.name not in names]  # replacements
        self._cycle.extend(longest.tolist())
        self._trained += (lengths.size, lengths.sum())
        if was_long:
            del self._queue[: self.num_prompts]
        else:
            drawn += launched
            self._num_drawn += len(launched)
            for group in launched:
                if group.name not in trained:
                    tokens = sum(deferred[group.sample(n)] for n in range(self.num_generations))
                    self._queue.append(Deferred(group, self._round, tokens))
        self._visits.update(group.prompt.prompt_id for group in drawn)
        if was_long or not self._queue:
            self._seen = (self._seen + self._cycle)[-NUM_CYCLES_KEPT * self.num_prompts :]
            self._cycle = []
            self._num_short_round = self._choose_num_short_round()
        self._round += 1
        waiting = len(self._queue) * self.num_generations, sum(d.tokens for d in self._queue)
        num_launched, launched_tokens = self._trained + waiting
        mean_trained = self._trained[1] / self._trained[0]
        self._metrics = {
            "tail/is_long_round": int(was_long),
            "tail/num_deferred": len(self._queue),
            "tail/oldest_deferred_steps": self._round - self._queue[0].round if self._queue else 0,
            "tail/cut_length": int(longest.max()),
            "tail/length_ratio": float(mean_trained / (launched_tokens / num_launched)),
        }

    def metrics(self) -> dict[str, float]:
        """See `StepSchedule`: `tail/*`, see docs/metrics.md."""
        return self._metrics

    def _choose_num_short_round(self) -> int:
        """Return the number of groups of a short round."""
        if self.over_sampling_ratio != "auto":
            return scaled(self.num_prompts, float(self.over_sampling_ratio))
        if len(self._seen) < MIN_SEEN:
            return self.num_prompts
        return best_num_launched(np.array(self._seen), self.num_prompts, self.num_generations)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return visits; the queue, int64 [deferred, 4] (id, round and tokens); and counts."""
        queue = [(group.prompt.prompt_id, group.draw_index, *rest) for group, *rest in self._queue]
        counts = [self._num_drawn, self._round, *self._trained]
        return super().state_dict() | {
            "queue": np.array(queue, np.int64).reshape(-1, 4),
            "counts": np.array(counts, np.int64),
            "seen": np.array(self._seen, np.int64),
            "cycle": np.array(self._cycle, np.int64),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        super().load_state_dict(state)
        self._queue = [
            Deferred(Group(self._by_id[prompt_id], draw_index), since, tokens)
            for prompt_id, draw_index, since, tokens in state["queue"].tolist()
            if prompt_id
            in self._by_id  # not if its row is gone, which needs run.allow_changed_data
        ]
        self._num_drawn, self._round = state["counts"][:2].tolist()
        self._trained = state["counts"][2:4].copy()
        self._seen, self._cycle = state["seen"].tolist(), state["cycle"].tolist()
        self._num_short_round = self._choose_num_short_round()


def scaled(count: int, ratio: float) -> int:
    """Return count x ratio, rounded up; 1.1 x 10 is 11, although the floats' product is above."""
    return math.ceil(round(count * ratio, 6))


def best_num_launched(longest: np.ndarray, num_prompts: int, num_generations: int) -> int:
    """Return the number of groups that a short round should launch.

    It has the fewest expected sequential tokens for each trained group, long rounds included; it is
    num_prompts where no number is clearly better than deferring nothing. longest: int64 [groups],
    longest responses of recent groups, from which fixed random numbers draw simulated cycles: the
    answer is a function of the arguments.
    """
    largest = scaled(num_prompts, MAX_OVER_SAMPLING)
    key = np.array([num_prompts, num_generations], np.uint64)
    random = np.random.Generator(np.random.Philox(key=key))
    drawn = longest[random.integers(0, len(longest), (NUM_TRIALS, largest))]
    # Verifying their tokens costs no more than decoding them again, the cost with many rows.
    share_saved = max(0.0, 1.0 - num_prompts * num_generations * VERIFY_SHARE)
    tokens = {}
    for count in range(num_prompts + 1, largest + 1):
        ordered = np.sort(drawn[:, :count], axis=1)
        cut, deferred = ordered[:, num_prompts - 1].mean(), ordered[:, num_prompts:].ravel()
        num_long = len(deferred) // num_prompts
        if num_long == 0:
            continue
        long_rounds = deferred[: num_long * num_prompts].reshape(num_long, num_prompts)
        in_long = long_rounds.max(axis=1).mean() - share_saved * cut
        num_short = num_prompts / (count - num_prompts)  # per long round
        tokens[count] = (num_short * cut + in_long) / (num_short + 1)
    fewest = min(tokens.values(), default=math.inf)
    if fewest * MIN_GAIN > drawn[:, :num_prompts].max(axis=1).mean():
        return num_prompts
    return next(count for count in tokens if tokens[count] <= fewest * MAX_NOISE)


def load(run: Run) -> None:
    """Make short and long rounds the run's rule for what makes up a step."""
    tail = run.config.tail_batching
    if tail.enabled:
        run.make_schedule = partial(TailBatching, over_sampling_ratio=tail.over_sampling_ratio)
