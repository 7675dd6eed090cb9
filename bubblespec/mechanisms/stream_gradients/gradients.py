"""The gradients that a rank has streamed: what its buffer holds of the coming update.

A group whose rewards are all known determines its samples' advantages, and a sample's contribution
to the gradient is then known up to one factor, the same for all samples of the update. So a rank
that has nothing else to do adds up the gradients of its own finished samples (`add`). The update
computes the others and scales the sum once.
"""

import numpy as np
import torch

from bubblespec.learn.learner import Learner
from bubblespec.learn.losses import local_weights
from bubblespec.learn.microbatch import Microbatch, pack_responses
from bubblespec.records import Span
from bubblespec.samples import Samples, count_sampled
from bubblespec.types import Row, SampleId


class MicrobatchCost:
    """Seconds of a micro-batch, a + b * tokens with both at least 0.

    Fitted by least squares in which older observations count less and less.
    """

    FORGETTING = 0.9

    def __init__(self):
        self._products, self._seconds = np.zeros((2, 2)), np.zeros(2)  # sums over [1, tokens]
        self._coefficients = 0.0, 0.0

    def observe(self, num_microbatches: int, num_tokens: int, seconds: float) -> None:
        """Count micro-batches with `num_tokens` tokens together as one of their mean size."""
        features = np.array([1.0, num_tokens / num_microbatches])
        self._products = self.FORGETTING * self._products + np.outer(features, features)
        self._seconds = self.FORGETTING * self._seconds + features * seconds / num_microbatches
        # Through the origin if the sizes so far are too alike to tell, or if a or b would be
        # negative.
        (count, tokens), (_, squares) = self._products
        self._coefficients = 0.0, float(self._seconds[1] / squares)
        if count * squares - tokens * tokens > 1e-3 * count * squares:
            a, b = np.linalg.solve(self._products, self._seconds).tolist()
            if a >= 0 and b > 0:
                self._coefficients = a, b

    @property
    def is_known(self) -> bool:
        """Whether there was an observation; the methods below need one."""
        return bool(self._products.any())

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds of a micro-batch of this many tokens."""
        a, b = self._coefficients
        return a + b * num_tokens

    def tokens_s(self, num_tokens: int) -> float:
        """Return the seconds that this many tokens add to a micro-batch."""
        return self._coefficients[1] * num_tokens

    def max_tokens(self, limit_s: float) -> int:
        """Return how many tokens take at most `limit_s` seconds."""
        a, b = self._coefficients
        return int(max(limit_s - a, 0.0) / max(b, 1e-12))


class StreamedGradients:
    """The learner's `EarlyGradients`."""

    def __init__(self, learner: Learner):
        self.learner, self.cost = learner, MicrobatchCost()
        self.ids: set[SampleId] = set()
        """Samples whose gradients this rank has added since the last update."""
        self.is_covered: np.ndarray = np.zeros(0, bool)
        """Samples of the last update whose gradients some rank had added, bool [S]."""
        self._measured: list[torch.Tensor] = []
        learner.early = self

    def add(self, rows: list[Row], advantages: np.ndarray) -> Span:
        """Add the gradients of these finished samples, in one micro-batch. Return its time.

        advantages: float64 [rows]. Raises ValueError for a sample whose gradient has been added
        before.
        """
        learner, ranks, ids = self.learner, self.learner.ranks, [row.id for row in rows]
        if not self.ids.isdisjoint(ids):
            raise ValueError(f"some gradients of {ids} have been computed before")
        begin_s = ranks.clock.perf_counter()
        tokens, generated = [row.tokens for row in rows], [row.full_logprob for row in rows]
        are_used, loss_type = np.ones(len(rows), bool), learner.config.loss.loss_type
        weights = local_weights(loss_type, count_sampled(generated), are_used)
        batch = pack_responses([row.prompt for row in rows], tokens, generated, ranks.device)
        self._measured += learner.accumulate_gradients([batch], advantages, weights)
        self.ids.update(ids)
        return Span("gradient", begin_s, ranks.clock.perf_counter())

    def take(self, samples: Samples) -> tuple[np.ndarray, list[torch.Tensor]]:
        """See `EarlyGradients`. Raises ValueError for a streamed sample that is not trained on."""
        own = np.array([name in self.ids for name in samples.ids], bool)
        if num_others := len(self.ids) - own.sum():
            raise ValueError(f"{num_others} streamed samples are not trained on")
        self.is_covered = np.any(self.learner.ranks.gather(own.astype(np.uint8)), axis=0)
        measured, self._measured, self.ids = self._measured, [], set()
        return self.is_covered, measured

    def observe(self, microbatches: list[Microbatch], seconds: float) -> None:
        num_tokens = sum(sum(batch.sequence_lengths) for batch in microbatches)
        self.cost.observe(len(microbatches), num_tokens, seconds)

    def forget(self) -> None:
        """Discard what was added for an update that never came."""
        if self.ids:
            self.learner.optimizer.clear()
            self.ids, self._measured = set(), []
