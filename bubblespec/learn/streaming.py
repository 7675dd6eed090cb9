"""Streamed gradients (RollPacker's stream trainer, arXiv 2509.21009): parts of an update's
gradient, computed during its rollout.

A group whose rewards are all known determines its samples' advantages, and a sample's contribution
to the gradient is then known up to one factor, the same for all samples of the update (losses.py).
So a rank that has nothing else to do adds up the gradients of its own finished samples; the update
then computes only the others and scales the sum once. A slice is one micro-batch, small enough that
nobody waits long for its end.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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
        self.learner, self.cost = learner, learner.cost

    def begin(self) -> None:
        """A step begins. What an abandoned rollout has left is forgotten."""
        self.learner.forget_streamed()

    def pieces(self, rows: Sequence[Row | None], rewards: np.ndarray) -> list[Piece]:
        """One group's samples that this rank has and that have a gradient.

        rows: None for the samples of other ranks; rewards: float64 [samples], of all of them.
        """
        loss = self.learner.config.loss
        (advantages,) = estimate_advantages(
            rewards[None], loss.advantage_estimator, loss.scale_rewards
        )
        return [
            Piece(row, advantage)
            for row, advantage in zip(rows, advantages.tolist(), strict=True)
            if row is not None
            and (advantage != 0 or self.learner.reference is not None)
            and not (loss.mask_truncated_completions and row.finish == "length")
        ]

    def max_tokens(self, limit_s: float) -> int:
        """Maximum number of tokens of a slice of at most `limit_s` seconds."""
        limit = self.learner.config.optim.max_tokens_per_microbatch
        return min(self.cost.max_tokens(limit_s), limit)

    def add(self, pieces: list[Piece]) -> Span:
        """One slice: add the gradients of these samples. Returns when that was. Raises ValueError
        for a sample whose gradient has been added before."""
        learner, rows = self.learner, [piece.row for piece in pieces]
        ids = [row.id for row in rows]
        if not learner.streamed.ids.isdisjoint(ids):
            raise ValueError(f"some gradients of {ids} have been computed before")
        begin_s = learner.ranks.clock.perf_counter()
        lengths = np.array([len(row.tokens) for row in rows])
        weights = local_weights(learner.config.loss.loss_type, lengths, np.ones(len(rows), bool))
        batch = pack_responses(
            [row.prompt for row in rows],
            [row.tokens for row in rows],
            [row.full_logprob for row in rows],
            ids=ids,
            order=list(range(len(rows))),
            device=learner.ranks.device,
        )
        advantages = np.array([piece.advantage for piece in pieces])
        measured = learner.accumulate_gradient(batch, advantages, weights)
        measured[0].item()  # waits for a GPU: a slice has ended only then
        learner.streamed.ids.update(ids)
        learner.streamed.measured.append(measured)
        span = Span("gradient", begin_s, learner.ranks.clock.perf_counter())
        self.cost.observe(1, sum(piece.num_tokens for piece in pieces), span.end_s - begin_s)
        return span
