"""Streamed gradients (RollPacker's stream trainer, arXiv 2509.21009): parts of an update's
gradient, computed during its rollout.

A group whose rewards are all known gives its samples' advantages, and what a sample adds to the
gradient is known up to one factor, the same for all samples of the update (losses.py). So a rank
that has nothing else to do adds up the gradients of its own finished samples; the update then
computes those of the others alone, and scales the sum once. A slice is one micro-batch, so small
that nobody waits long for its end.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from bubblespec.learn.advantages import estimate_advantages
from bubblespec.learn.learner import Learner
from bubblespec.learn.losses import local_weights
from bubblespec.learn.microbatch import pack_responses
from bubblespec.records import Span
from bubblespec.types import Row


class Piece(NamedTuple):
    """A sample whose gradient can be computed."""

    row: Row
    advantage: float

    @property
    def num_tokens(self) -> int:
        """Tokens that a micro-batch feeds of it."""
        return len(self.row.prompt) + len(self.row.tokens) - 1


class GradientStream:
    """The gradient of the coming update, as far as this rank has computed it during the rollout."""

    def __init__(self, learner: Learner):
        self.learner = learner
        self._has_failed = False

    def begin(self) -> None:
        """A step begins. Whatever a rollout that was abandoned has left is forgotten."""
        self.learner.forget_streamed()
        self._has_failed = False

    def pieces(self, rows: Sequence[Row | None], rewards: np.ndarray) -> list[Piece]:
        """Of one group's samples those that this rank has, and that have a gradient.

        rows: None for the samples of other ranks; rewards: float64 [samples], of all of them.
        """
        loss = self.learner.config.loss
        advantages = estimate_advantages(
            rewards[None], loss.advantage_estimator, loss.scale_rewards
        )[0].tolist()
        return [
            Piece(row, advantage)
            for row, advantage in zip(rows, advantages, strict=True)
            if row is not None
            and (advantage != 0 or self.learner.reference is not None)
            and not (loss.mask_truncated_completions and row.finish == "length")
        ]

    @property
    def is_ready(self) -> bool:
        """Whether it is known how long a slice takes (in the first step it is not), and there is
        memory for it."""
        return self.learner.cost.is_known and not self._has_failed

    def seconds(self, num_tokens: int) -> float:
        """Expected, of a slice of so many tokens."""
        return self.learner.cost.seconds(num_tokens)

    def spared_s(self, num_tokens: int) -> float:
        """What the update is expected to be spared by it: less than it takes, as a slice is a
        micro-batch more."""
        return self.learner.cost.tokens_s(num_tokens)

    def max_tokens(self, limit_s: float) -> int:
        """Most tokens of a slice of at most `limit_s` seconds."""
        return min(self.learner.cost.max_tokens(limit_s), self.learner.budget.max_tokens)

    def add(self, pieces: list[Piece]) -> Span:
        """One slice: add the gradients of these samples. Returns when that was. Where there is no
        memory for it, everything that this rank has streamed is forgotten, so that the update
        computes it, and nothing more is streamed in this step."""
        learner, rows = self.learner, [piece.row for piece in pieces]
        lengths, begin_s = (
            np.array([len(row.tokens) for row in rows]),
            learner.ranks.clock.perf_counter(),
        )
        weights = local_weights(learner.config.loss.loss_type, lengths, np.ones(len(rows), bool))
        advantages = np.array([piece.advantage for piece in pieces])
        measured = None
        try:
            batch = pack_responses(
                [row.prompt for row in rows],
                [row.tokens for row in rows],
                [row.full_logprob for row in rows],
                ids=[row.id for row in rows],
                order=list(range(len(rows))),
                device=learner.ranks.device,
            )
            measured = learner.accumulate_gradient(batch, advantages, weights)
            measured[0].item()  # waits for a GPU: a slice has ended only then
        except torch.OutOfMemoryError:
            # dealt with below, where the exception does not hold the tensors of the pass any more
            pass
        num_tokens = sum(piece.num_tokens for piece in pieces)
        if measured is None:
            self._give_up(num_tokens)
        else:
            learner.streamed.add([row.id for row in rows], measured)
        span = Span("gradient", begin_s, learner.ranks.clock.perf_counter())
        if measured is not None:
            learner.cost.observe(1, num_tokens, span.end_s - begin_s)
        return span

    def _give_up(self, num_tokens: int) -> None:
        """The pass that has failed may have added part of its gradient, so all of it is done
        again."""
        self._has_failed = True
        self.learner.optimizer.clear()
        self.learner.streamed.clear()
        if self.learner.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        tqdm.write(
            f"warning: rank {self.learner.ranks.rank}: out of memory in a streamed micro-batch of {num_tokens} tokens; all is "
            "computed after the rollout in this step. Lower rollout.num_slots, or set rollout.free_cache_engine=true",
            file=sys.stderr,
        )
