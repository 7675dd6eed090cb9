"""Cost of batches of whole sequences, fitted to timed ones."""

import numpy as np


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
