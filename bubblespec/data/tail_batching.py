"""Tail batching: short rounds that leave their slowest groups for later, and long rounds of these
(RollPacker, arXiv 2509.21009, section 4), here without bias.

A short round launches more groups than a step trains on; those that are not among the shortest are
deferred. Once there are enough of them for a step, a long round trains on exactly these, the oldest
first. RollPacker draws a deferred prompt anew, which prefers short answers: it stays slow only if
it is slow twice. Here a deferred group keeps its name, and so the noise of its samples: the same
samples are finished later, under the then current weights, with their tokens so far as drafts.
Every sample that the data order names is trained on exactly once; what changes is the order, short
responses first and then the long ones.
"""

import math
from collections import Counter

import numpy as np

from bubblespec.data.prompts import PromptSet
from bubblespec.data.schedule import load_visits, save_visits
from bubblespec.types import Group, Launch, SampleId, Samples

# auto: what is looked at, and how sure a gain must be.
NUM_CYCLES_KEPT = 16  # steps of groups whose lengths are remembered
MIN_SEEN = 16  # groups of which lengths are known before any is deferred
MOST_OVER_SAMPLING = 2.0
MIN_GAIN = 1.05
# of numbers that are expected to be so close the smallest is taken: it has the smallest rollouts
MUCH_THE_SAME = 1.02
NUM_TRIALS = 256
# A token that is verified costs so much of a forward: from 1/60 (a small model on a CPU core) to
# 1/400 (a 7B on a GPU).
VERIFY_SHARE = 1 / 64


class TailBatching:
    """A `StepPlanner`."""

    def __init__(
        self,
        prompts: PromptSet,
        seed: int,
        num_prompts: int,
        num_generations: int,
        *,
        over_sampling_ratio: float | str,
        response_over_sampling_ratio: float = 1.0,
    ):
        """num_prompts, num_generations: groups that a step is trained on, and responses of each;
        ratios: see `TailBatchingConfig`."""
        self.prompts, self.seed, self.num_prompts, self.num_generations = (
            prompts,
            seed,
            num_prompts,
            num_generations,
        )
        self.over_sampling_ratio = over_sampling_ratio
        self.num_launched_generations = scaled(num_generations, response_over_sampling_ratio)
        self._by_uid = {prompt.uid: prompt for prompt in prompts.prompts}
        self._visits: Counter[int] = Counter()  # of all groups drawn, by uid
        self._num_drawn = (
            0  # in the data order; replacements of dynamic sampling come from an order of their own
        )
        self.deferred: list[Group] = []
        self._deferred_at: list[int] = []  # the round of each
        self._queued_tokens: list[int] = []  # of all samples of each, so far
        self._round = 0
        self._seen: list[int] = []  # longest response of each group of whole cycles, for auto
        self._cycle: list[int] = []  # the same of the cycle that is not over yet
        self._best: int | None = None  # what follows from _seen, once it is asked for
        self._trained = np.zeros(2, np.int64)  # samples that have had their turn, and their tokens
        self._raced = np.zeros(
            2, np.int64
        )  # the same of those that only ran in a race within their group, as far as they got
        self._metrics: dict[str, float] = {}

    @property
    def is_long_round(self) -> bool:
        """Whether the coming step is one."""
        return len(self.deferred) >= self.num_prompts

    def launch(self, step: int) -> Launch:
        """See `StepPlanner`."""
        if self.is_long_round:
            return Launch(
                self.deferred[: self.num_prompts],
                self.num_prompts,
                self.num_generations,
                self.num_generations,
            )
        groups = self._draw(self._num_drawn, self._num_launched(), Counter())
        return Launch(groups, self.num_prompts, self.num_launched_generations, self.num_generations)

    def upcoming(self, step: int, depth: int, used: list[Group] | None = None) -> list[list[Group]]:
        """See `StepPlanner`. Deferred groups come first, whenever their turn is; which groups
        `step` is going to defer is not foreseen."""
        if depth == 0:
            return []
        current, is_long = self.launch(step).groups, self.is_long_round
        names = {group.name for group in current}
        waiting = self.deferred[len(current) :] if is_long else self.deferred
        drawn = Counter(
            group.prompt.uid
            for group in (current if used is None else used)
            if not (is_long and group.name in names)
        )
        num_drawn, count = self._num_drawn + (0 if is_long else len(current)), self._num_launched()
        backlog = len(waiting) + (0 if is_long else len(current) - self.num_prompts)
        batches = []
        for _ in range(depth):
            if backlog >= self.num_prompts:
                batches.append([])
                backlog -= self.num_prompts
                continue
            batches.append(self._draw(num_drawn, count, drawn))
            drawn.update(group.prompt.uid for group in batches[-1])
            num_drawn, backlog = num_drawn + count, backlog + count - self.num_prompts
        return [waiting + batches[0], *batches[1:]]

    def replacements(self, step: int, count: int, used: list[Group]) -> list[Group]:
        """See `StepPlanner`. In an order of the step's own; their responses are not chosen by
        length."""
        queued = {group.prompt.uid for group in self.deferred}
        drawn = self.prompts.extra(
            self.seed, step, count, {group.prompt.uid for group in used} | queued
        )
        return [Group(prompt, self._visits[prompt.uid]) for prompt in drawn]

    def finish(self, samples: Samples, deferred: dict[SampleId, int]) -> None:
        """See `StepPlanner`."""
        was_long, launched = self.is_long_round, self.launch(self._round).groups
        names, had_turn = (
            {group.name for group in launched},
            {group.name for group in samples.groups},
        )
        lengths = samples.lengths.reshape(-1, samples.num_generations)
        chosen = [g for g, group in enumerate(samples.groups) if group.name in names]
        self._cycle.extend(lengths[chosen].max(axis=1).tolist())
        self._trained += (lengths.size, lengths.sum())
        if was_long:
            for of_group in (self.deferred, self._deferred_at, self._queued_tokens):
                del of_group[: self.num_prompts]
        else:
            self._num_drawn += len(launched)
            self._visits.update(group.prompt.uid for group in launched)
            for group in (group for group in launched if group.name not in had_turn):
                self.deferred.append(group)
                self._deferred_at.append(self._round)
                self._queued_tokens.append(
                    sum(deferred[group.sample(number)] for number in range(self.num_generations))
                )
            lost = [
                tokens
                for name, tokens in deferred.items()
                if name[:2] in had_turn or name.sample >= self.num_generations
            ]
            self._raced += (len(lost), sum(lost))
        self._visits.update(
            group.prompt.uid for group in samples.groups if group.name not in names
        )  # replacements
        if not self.deferred or was_long:
            self._seen = (self._seen + self._cycle)[-NUM_CYCLES_KEPT * self.num_prompts :]
            self._cycle, self._best = [], None
        self._round += 1
        self._metrics = self._measure(was_long, int(lengths[chosen].max()))

    def metrics(self) -> dict[str, float]:
        """See `StepPlanner`: `tail/*`, see docs/metrics.md."""
        return self._metrics

    def _measure(self, was_long: bool, cut_length: int) -> dict[str, float]:
        queued = np.array([len(self.deferred) * self.num_generations, sum(self._queued_tokens)])
        launched = self._trained + queued + self._raced
        return {
            "tail/is_long_round": int(was_long),
            "tail/num_deferred": len(self.deferred),
            "tail/oldest_deferred_steps": self._round - self._deferred_at[0]
            if self.deferred
            else 0,
            "tail/cut_length": cut_length,
            "tail/length_ratio": float(
                (self._trained[1] / self._trained[0]) / (launched[1] / launched[0])
            ),
        }

    def _num_launched(self) -> int:
        """Groups of a short round."""
        if self.over_sampling_ratio != "auto":
            return scaled(self.num_prompts, float(self.over_sampling_ratio))
        if len(self._seen) < MIN_SEEN:
            return self.num_prompts
        if self._best is None:
            self._best = best_num_launched(
                np.array(self._seen), self.num_prompts, self.num_generations
            )
        return self._best

    def _draw(self, begin: int, count: int, drawn: Counter[int]) -> list[Group]:
        """Groups `begin` .. `begin + count` - 1 of the data order, which is that of `InOrder`.
        drawn: visits, by uid, on top of those so far."""
        drawn, groups = drawn.copy(), []
        for number in range(begin, begin + count):
            step, place = divmod(number, self.num_prompts)
            prompt = self.prompts.batch(self.seed, step, self.num_prompts)[place]
            groups.append(Group(prompt, self._visits[prompt.uid] + drawn[prompt.uid]))
            drawn[prompt.uid] += 1
        return groups

    def state_dict(self) -> dict[str, np.ndarray]:
        """Visits, see `save_visits`; the queue, int64 [deferred, 4]: uid, visit, round and tokens;
        and counts."""
        entries = zip(self.deferred, self._deferred_at, self._queued_tokens, strict=True)
        queue = [(group.prompt.uid, group.visit, since, tokens) for group, since, tokens in entries]
        return save_visits(self._visits) | {
            "queue": np.array(queue, np.int64).reshape(-1, 4),
            "counts": np.array(
                [self._num_drawn, self._round, *self._trained, *self._raced], np.int64
            ),
            "seen": np.array(self._seen, np.int64),
            "cycle": np.array(self._cycle, np.int64),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """See `StepPlanner`."""
        self._visits = load_visits(state)
        queue = state["queue"].tolist()
        self.deferred = [Group(self._by_uid[uid], visit) for uid, visit, _, _ in queue]
        self._deferred_at, self._queued_tokens = (
            [entry[2] for entry in queue],
            [entry[3] for entry in queue],
        )
        self._num_drawn, self._round = state["counts"][:2].tolist()
        self._trained, self._raced = state["counts"][2:4].copy(), state["counts"][4:6].copy()
        self._seen, self._cycle, self._best = state["seen"].tolist(), state["cycle"].tolist(), None


def scaled(count: int, ratio: float) -> int:
    """count x ratio, rounded up; 1.1 x 10 is 11, although the product of the two floats is above
    it."""
    return math.ceil(round(count * ratio, 6))


def best_num_launched(longest: np.ndarray, num_prompts: int, num_generations: int) -> int:
    """Groups that a short round should launch: with the fewest expected sequential tokens for each
    group that is trained on, long rounds included; num_prompts where no number is clearly better
    than deferring nothing.

    longest: int64 [groups], the longest response of each of some recent groups. Cycles are played
    with groups drawn from these, by random numbers that are always the same: the answer is a
    function of the arguments.
    """
    most = scaled(num_prompts, MOST_OVER_SAMPLING)
    random = np.random.Generator(
        np.random.Philox(key=np.array([num_prompts, num_generations], np.uint64))
    )
    drawn = longest[random.integers(0, len(longest), (NUM_TRIALS, most))]
    tokens = {}
    for count in range(num_prompts + 1, most + 1):
        ordered = np.sort(drawn[:, :count], axis=1)
        cut, deferred = ordered[:, num_prompts - 1], ordered[:, num_prompts:]
        num_long = deferred.size // num_prompts
        if num_long == 0:
            continue
        in_long = (
            deferred.ravel()[: num_long * num_prompts]
            .reshape(num_long, num_prompts)
            .max(axis=1)
            .mean()
        )
        # Verifying what they have costs at most what decoding it again does, which is what many
        # rows come to.
        saved = cut.mean() * max(0.0, 1.0 - num_prompts * num_generations * VERIFY_SHARE)
        num_short = num_prompts / (count - num_prompts)  # to one long round
        tokens[count] = (num_short * cut.mean() + in_long - saved) / (num_short + 1)
    least = min(tokens.values(), default=math.inf)
    if least * MIN_GAIN > drawn[:, :num_prompts].max(axis=1).mean():
        return num_prompts
    return next(count for count in tokens if tokens[count] <= least * MUCH_THE_SAME)
