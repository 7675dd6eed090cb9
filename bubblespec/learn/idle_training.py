"""The drafter in a run: what it learns from as the policy changes, and the slices in which it
does."""

import time

import numpy as np
import torch

from bubblespec.dist.ranks import Ranks
from bubblespec.draft.learned import LearnedDrafts
from bubblespec.engine.chains import LONGEST, Chains
from bubblespec.learn.drafter_training import (
    SEQUENCES_PER_UPDATE,
    DrafterTraining,
    Lesson,
    lessons_of,
)
from bubblespec.learn.microbatch import Microbatch
from bubblespec.learn.warm_start import measure
from bubblespec.records import CHAIN_ROWS, CHOSEN_LENGTHS

MEASURED = 4  # of the latest responses say how much is accepted, before they are learnt from
SHARE_PER_STEP = 0.25  # of the buffer is filled anew by one step, at the most
AVERAGE = 0.2  # weight of the latest slice in the seconds of a token


class IdleTraining:
    """Training of one rank's drafter during rollouts, and the mean of all ranks' after them."""

    def __init__(
        self,
        training: DrafterTraining,
        chains: Chains,
        source: LearnedDrafts,
        accepted: np.ndarray,
        clock=time,
    ):
        """accepted: see `measure`."""
        self.training, self.chains, self.source, self.accepted, self.clock = (
            training,
            chains,
            source,
            accepted,
            clock,
        )
        self.token_s = 0.0  # of a slice, for each token; 0 before the first
        self.new_lessons: list[Lesson] = []  # of the latest step, not learnt from yet
        self._num_added = 0  # sequences in the gradient that no update has been made by yet
        self._num_updates = 0  # since the ranks' drafters were last the same
        self._rolled_out = np.zeros(
            2
        )  # of this step: seconds saved, and taken, on the slowest rank
        self._num_measured = training.num_updates  # updates when `accepted` was measured

    @torch.no_grad()
    def take(self, batch: Microbatch, hidden: torch.Tensor) -> None:
        """Some of the sequences of a micro-batch of the policy's training, see
        `Learner.on_hidden`."""
        if not self.source.is_enabled:
            return
        room = SHARE_PER_STEP * self.training.lessons.max_tokens - sum(
            len(lesson.hidden) for lesson in self.new_lessons
        )
        if room > 0:
            self.new_lessons += lessons_of(batch, hidden, int(room))

    def begin_step(self, ranks: Ranks) -> None:
        """All ranks together, before a rollout: learn from the latest responses from now on. If the
        drafter has changed since it was last measured, they say first how much of it is accepted.
        Where it rested in the last step there is nothing to do."""
        rested, (saved_s, rollout_s) = not self.source.is_enabled, self._rolled_out
        self.source.rest.begin_step(saved_s / rollout_s if rollout_s else None)
        self._rolled_out = np.zeros(2)
        if rested:
            return
        new, self.new_lessons = self.new_lessons, []
        made = ranks.gather(np.array([len(new), self.training.num_updates - self._num_measured]))
        has_new, has_changed = made.sum(axis=0) > 0
        if has_new and has_changed:
            self._num_measured = self.training.num_updates
            self.accepted = measure(self.training, self.chains, new[:MEASURED], ranks)
            self.source.acceptance.expect(self.accepted)
        for lesson in new:
            self.training.lessons.add(lesson)

    def slice_tokens(self) -> int:
        """Tokens of a slice: those of the shortest response; 0 where there is nothing to learn."""
        return min((len(lesson.hidden) for lesson in self.training.lessons), default=0)

    def run_slice(self, limit_s: float) -> float:
        """Learn from a response that is expected to take no longer, if there is one. Returns the
        seconds that it took."""
        begin_s, lessons = self.clock.perf_counter(), self.training.lessons
        if self.token_s:
            drawn = lessons.draw(SEQUENCES_PER_UPDATE, self.training.random)
            fitting = [lesson for lesson in drawn if len(lesson.hidden) * self.token_s <= limit_s]
        else:  # how long one takes is not known yet
            fitting = sorted(lessons, key=lambda lesson: len(lesson.hidden))
        if not fitting:
            return 0.0
        self.training.backward(fitting[:1], 1 / SEQUENCES_PER_UPDATE)
        self._num_added += 1
        if self._num_added == SEQUENCES_PER_UPDATE:
            self.training.step()
            self._num_added, self._num_updates = 0, self._num_updates + 1
        seconds = self.clock.perf_counter() - begin_s
        token_s = seconds / len(fitting[0].hidden)
        self.token_s = (
            token_s if not self.token_s else (1 - AVERAGE) * self.token_s + AVERAGE * token_s
        )
        return seconds

    @torch.no_grad()
    def merge(self, ranks: Ranks, rollout_s: float) -> int:
        """All ranks together, after a rollout that took this rank `rollout_s`: the mean of their
        drafters, by updates made since the last time. Returns how many all have made."""
        source, own = self.source, self._num_updates
        measured = ranks.gather(np.array([own, source.num_asked, source.saved_s, rollout_s]))
        if measured[
            :, 1
        ].any():  # else other sources had drafts for all rows, and nothing was tried
            self._rolled_out += measured[measured[:, 3].argmax(), 2:]
        self._num_updates, source.num_asked, source.saved_s = 0, 0, 0.0
        total = measured[:, 0].sum()
        if ranks.world_size > 1 and total:
            training = self.training
            flat = ranks.sum_(torch.cat([p.reshape(-1) for p in training.masters]) * (own / total))
            for master, param, part in zip(
                training.masters,
                training.params,
                flat.split([p.numel() for p in training.masters]),
                strict=True,
            ):
                master.copy_(part.view_as(master))
                param.copy_(master)
        return int(total)

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Of a step: what is accepted, and which lengths of chains were chosen, by active rows."""
        metrics = {f"drafter/accepted_{n + 1}": float(self.accepted[n]) for n in range(LONGEST)}
        metrics["drafter/tokens_a_pass"] = 1.0 + float(self.accepted.sum())
        metrics |= {
            "drafter/num_updates": self.training.num_updates,
            "drafter/rests": int(not self.source.is_enabled),
        }
        chosen = (
            ranks.gather(self.source.take_chosen()).sum(axis=0) if self.source.is_enabled else ()
        )
        for rows, counts in zip(CHAIN_ROWS, chosen, strict=False):
            if counts.sum():
                metrics[f"drafter/chain_length/rows_{rows}"] = float(
                    counts @ np.arange(len(counts)) / counts.sum()
                )
                metrics[f"{CHOSEN_LENGTHS}{rows}"] = counts.tolist()
        return metrics
